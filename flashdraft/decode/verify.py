"""Which draft tokens are kept: pure functions of tensors, on which losslessness rests.

`match` serves greedy decoding and every proposal that is a point (argmax drafts, prompt lookup): with y drawn from the
target's distribution p at a slot, the draft token x is kept when y = x, which happens with probability p(x); otherwise
y is the token, and it is distributed as p without x. So the outcome is distributed as p exactly, and does not depend on
the drafter at all: the noise decides y, the drafter only how many y come out of one pass.

`reject` serves drafts that were sampled, with their proposal q on record (Leviathan et al. 2023, algorithm 1).

Letters: B rows, S draft tokens, V vocabulary.
"""

from __future__ import annotations

import torch

from flashdraft.sampling import draw


def match(draft_BS: torch.Tensor, own_BQ: torch.Tensor) -> torch.Tensor:
    """Number [B] of leading draft tokens equal to the target's own token of the same slot (Q = S + 1)."""
    return (draft_BS == own_BQ[:, :-1]).long().cumprod(dim=1).sum(dim=1)


def reject(
    draft_S: torch.Tensor,
    proposal_SV: torch.Tensor,
    target_QV: torch.Tensor,
    accept_S: torch.Tensor,
    own_Q: torch.Tensor,
) -> tuple[int, int]:
    """Rejection sampling against a recorded proposal: (draft tokens kept, the token after them).

    Draft token x is kept with probability min(1, p(x) / q(x)); the first refused one is replaced by a draw from
    max(p - q, 0), and when all are kept the last slot gives a token from p. `accept_S` and `own_Q` are uniform numbers
    for the tests and for these draws.
    """
    size = len(draft_S)
    p_S = target_QV[:size].gather(1, draft_S[:, None])[:, 0]
    q_S = proposal_SV.gather(1, draft_S[:, None])[:, 0]
    kept = int((accept_S.to(q_S.device) * q_S < p_S).long().cumprod(dim=0).sum())
    rest_V = target_QV[kept]
    if kept < size:
        left_V = (rest_V - proposal_SV[kept]).clamp(min=0)
        # All zero only by rounding, when p and q are equal: refusal then has probability zero too.
        rest_V = torch.where(left_V.sum() > 0, left_V, rest_V)
    return kept, int(draw(rest_V[None], own_Q[kept : kept + 1])[0])
