"""Decoding without a drafter, one request, one token at a time: the baseline, and the judge of every other path."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from flashdraft.decode.row import Row
from flashdraft.target.base import Target


@torch.inference_mode()
def plain(target: Target, row: Row) -> Iterator[Row]:
    """Answer one row; yields it after every token."""
    if row.finished:
        yield row
        return
    cache = target.new_cache()
    cache.join()
    only = slice(0, 1)
    last_11 = torch.tensor([[len(row.ids) - 1]], device=target.device)
    logits_11V = target.forward(torch.tensor([row.ids], device=target.device), cache, only, keep_BS=last_11).logits
    cache.commit(0, len(row.ids))
    row.first(logits_11V[0, 0])
    yield row
    nothing = torch.empty(0, dtype=torch.long, device=target.device)
    while not row.finished:
        logits_11V = target.forward(torch.tensor([row.ids[-1:]], device=target.device), cache, only).logits
        cache.commit(0, 1)
        _, token = row.judge(logits_11V[0], nothing, None)
        row.take((), token, 0, logits_11V[0])
        yield row
