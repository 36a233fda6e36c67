"""One request's choice of tokens: its parameters, its noise, and the exact prefix of every slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from flashdraft.core import SamplingParams
from flashdraft.decode.verify import match, reject
from flashdraft.device import fresh_seed
from flashdraft.sampling import ACCEPT, OWN, Noise, draw, probabilities, process_prefix, process_static


class Sampler:
    """Judges the slots of one row."""

    def __init__(self, params: SamplingParams, eos_ids: Sequence[int]) -> None:
        self.params = params
        self.noise = Noise(fresh_seed() if params.seed is None else params.seed)
        self._eos_ids = eos_ids

    @property
    def argmax_only(self) -> bool:
        """Whether the target's own tokens are the argmax of the raw logits, so that many rows can be judged at once."""
        return self.params.greedy and not self.params.needs_prefix and not self.params.logit_bias

    def judge(
        self, logits_QV: torch.Tensor, draft_S: torch.Tensor, proposal_SV: torch.Tensor | None,
        ids: Sequence[int], prompt_length: int, ends: Callable[[int], bool] | None = None,
    ) -> tuple[int, int]:  # fmt: skip
        """(draft tokens kept, the target's token after them), given the tokens `ids` up to the anchor.

        `ends` is told of each draft token that is kept and says whether the answer ends with it: no processor is then
        shown what would come behind it, and the token named after it means nothing.
        """
        logits_QV = process_static(logits_QV, self.params)
        place = len(ids) - prompt_length
        if self.params.needs_prefix:
            return self._walk(logits_QV, draft_S, proposal_SV, list(ids), prompt_length, ends)
        if self.params.greedy:
            own_Q = logits_QV.argmax(dim=-1)
        else:
            target_QV = probabilities(logits_QV, self.params)
            uniforms_Q = self.noise.at(place, len(logits_QV), OWN)
            if proposal_SV is not None:
                accept_S = self.noise.at(place, len(draft_S), ACCEPT)
                return reject(draft_S, proposal_SV, target_QV, accept_S, uniforms_Q)
            own_Q = draw(target_QV, uniforms_Q)
        kept = int(match(draft_S[None], own_Q[None])[0])
        return kept, int(own_Q[kept])

    def _walk(
        self, logits_QV: torch.Tensor, draft_S: torch.Tensor, proposal_SV: torch.Tensor | None,
        ids: list[int], prompt_length: int, ends: Callable[[int], bool] | None,
    ) -> tuple[int, int]:  # fmt: skip
        """Slot by slot, no further than the first refusal or the end of the answer: a slot is processed once, on its
        exact prefix, and only if a token comes out of it. So even a processor with a memory of its own sees what plain
        decoding would show it."""
        draft = draft_S.tolist()
        for slot in range(len(draft) + 1):
            logits_V = process_prefix(logits_QV[slot], ids, prompt_length, self.params, self._eos_ids)
            place = len(ids) - prompt_length
            if self.params.greedy:
                own = int(logits_V.argmax())
                kept = slot < len(draft) and own == draft[slot]
            else:
                target_1V = probabilities(logits_V[None], self.params)
                own_1 = self.noise.at(place, 1, OWN)
                if proposal_SV is not None and slot < len(draft):
                    both_QV = torch.cat(
                        (target_1V, target_1V)
                    )  # `reject` reads the second row only if it keeps the first
                    accept_1 = self.noise.at(place, 1, ACCEPT)
                    taken, own = reject(draft_S[slot : slot + 1], proposal_SV[slot : slot + 1], both_QV, accept_1,
                                        own_1.expand(2))  # fmt: skip
                    kept = bool(taken)
                else:
                    own = int(draw(target_1V, own_1)[0])
                    kept = slot < len(draft) and own == draft[slot]
            if not kept:
                return slot, own
            ids.append(draft[slot])
            if ends is not None and ends(draft[slot]):
                return slot + 1, draft[slot]
        raise AssertionError("the last slot has no draft token to keep")
