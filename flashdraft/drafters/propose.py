"""From draft logits to a draft: the most likely token of each slot, or a sample whose proposal is recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashdraft.drafters.base import Draft, DraftRow
from flashdraft.sampling import draw, probabilities


def pick(logits_BSV: torch.Tensor, rows: Sequence[DraftRow]) -> Draft:
    """Draft tokens of every row. Rows that ask for sampled drafts (`sample_drafts`) get them, with what they were
    drawn from; the others take the argmax, which is a proposal of one point.

    The proposal applies temperature, top-k, top-p and min-p of the request: the nearer it is to what the target will be
    sampled from, the more is accepted. Penalties are left out: any recorded proposal is lossless.
    """
    top_BS, best_BS = logits_BSV.max(dim=-1)
    confidence_BS = (top_BS - logits_BSV.logsumexp(dim=-1)).exp()
    sampled = [b for b, row in enumerate(rows) if row.params.sample_drafts and not row.params.greedy]
    if not sampled or logits_BSV.shape[1] == 0:
        return Draft(best_BS, None, confidence_BS)
    probs_BSV = torch.zeros_like(logits_BSV, dtype=torch.float32).scatter(-1, best_BS[..., None], 1.0)
    for b in sampled:
        probs_BSV[b] = probabilities(logits_BSV[b], rows[b].params)
        best_BS[b] = draw(probs_BSV[b], rows[b].draft_noise(logits_BSV.shape[1]))
    return Draft(best_BS, probs_BSV, confidence_BS)
