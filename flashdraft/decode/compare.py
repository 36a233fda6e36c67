"""Plain and drafted decoding of the same prompt, and what a difference between them means."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from flashdraft.core import Completion, SamplingParams
from flashdraft.decode.engine import Engine, Prompt
from flashdraft.device import fresh_seed
from flashdraft.target.base import Target

NEAR_TIE = 1e-3  # float32 logits closer than this may change order with the shape of a matrix product
WARM_UP_TOKENS = 8


@dataclass(frozen=True)
class Divergence:
    """The first place at which two answers differ, and how far apart the two best logits lie there."""

    place: int
    gap: float

    @property
    def near_tie(self) -> bool:
        return self.gap < NEAR_TIE

    def describe(self) -> str:
        kind = "a near tie" if self.near_tie else "NOT a near tie"
        return f"ids differ from token {self.place} on: the two best logits are {self.gap:.2g} apart there, {kind}"


@dataclass(frozen=True)
class Comparison:
    """Both answers to one prompt."""

    plain: Completion
    drafted: Completion
    divergence: Divergence | None

    @property
    def same(self) -> bool:
        """Equal ids, or a first difference that rounding explains."""
        return self.divergence is None or self.divergence.near_tie


def compare(
    engine: Engine,
    prompt: Prompt,
    params: SamplingParams,
    *,
    raw: bool = False,
    watch: Callable[[str], None] | None = None,
) -> Comparison:
    """Answer by the drafted and the plain loop, after a warm-up of both; `watch` gets the drafted text as it comes."""
    ids = engine.encode(prompt, raw=raw)
    if params.seed is None:
        params = replace(params, seed=fresh_seed())
    short = replace(params, max_new_tokens=min(WARM_UP_TOKENS, params.max_new_tokens))
    for stream in (engine.stream, engine.stream_plain):
        for _ in stream(ids, short):
            pass
    drafted, plain = engine.complete(ids, params, watch=watch), engine.complete(ids, params, drafted=False)
    return Comparison(plain, drafted, divergence(engine.target, ids, plain.ids, drafted.ids))


@torch.inference_mode()
def divergence(target: Target, prompt_ids: Sequence[int], a: Sequence[int], b: Sequence[int]) -> Divergence | None:
    """Where two greedy answers part and the gap between the two best raw logits there; None if they are equal."""
    place = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    if place == len(a) == len(b):
        return None
    cache = target.new_cache()
    cache.join()
    ids = [*prompt_ids, *a[:place]]
    last_11 = torch.tensor([[len(ids) - 1]], device=target.device)
    logits = target.forward(torch.tensor([ids], device=target.device), cache, slice(0, 1), keep_BS=last_11).logits
    best, second = logits[0, 0].float().topk(2).values.tolist()
    return Divergence(place, best - second)
