"""From logits to tokens: processing, probabilities, noise. Pure functions of tensors; nothing here knows a model.

Letters: S slots, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashdraft.core import SamplingParams

NEVER = float("-inf")
NOISE_CHUNK = 64  # tokens whose noise is drawn at a time
COLDEST = 1e-9  # lower temperatures overflow float32; this one is greedy already
NUCLEUS_GUESS = 256  # tokens among which the nucleus of top-p is looked for first

OWN, ACCEPT, DRAFT = 0, 1, 2
"""Columns of the noise: the target's own token, the test of a recorded proposal, the drafter's sample."""


class Noise:
    """Uniform numbers of one request, indexed by the place of a token in its answer.

    The token at place t always meets the same numbers, however the rounds fell and whatever shared the batch: equal
    seeds give equal answers, drafted or not.
    """

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed % 2**63)
        self._drawn = torch.empty(0, 3, dtype=torch.float64)

    def at(self, start: int, count: int, column: int) -> torch.Tensor:
        """Uniform numbers [count] in [0, 1), float64, for the places from `start` on."""
        while self._drawn.shape[0] < start + count:
            more = torch.rand(NOISE_CHUNK, 3, dtype=torch.float64, generator=self._generator)
            self._drawn = torch.cat((self._drawn, more))
        return self._drawn[start : start + count, column]


def process_static(logits_SV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """What does not depend on the tokens before a slot: the logit bias."""
    if not params.logit_bias:
        return logits_SV
    ids = torch.tensor(list(params.logit_bias), device=logits_SV.device)
    values = torch.tensor(list(params.logit_bias.values()), device=logits_SV.device, dtype=logits_SV.dtype)
    return logits_SV.index_add(1, ids, values.expand(len(logits_SV), -1))


def process_prefix(
    logits_V: torch.Tensor, ids: Sequence[int], prompt_length: int, params: SamplingParams, eos_ids: Sequence[int]
) -> torch.Tensor:
    """What depends on the exact tokens `ids` before a slot: penalties, minimum length, the caller's own processors.

    The repetition penalty counts prompt and answer (as transformers does), presence and frequency the answer only (as
    OpenAI does).
    """
    logits_V = logits_V.clone()
    device = logits_V.device
    if params.repetition_penalty != 1:
        # A prompt may hold ids that are embedded but never generated (rows of a padded table).
        seen = torch.tensor(sorted({i for i in ids if i < logits_V.shape[0]}), dtype=torch.long, device=device)
        found = logits_V[seen]
        logits_V[seen] = torch.where(found > 0, found / params.repetition_penalty, found * params.repetition_penalty)
    answer = ids[prompt_length:]
    if answer and (params.presence_penalty or params.frequency_penalty):
        counts_V = torch.bincount(torch.tensor(answer, device=device), minlength=logits_V.shape[0])
        logits_V -= params.frequency_penalty * counts_V + params.presence_penalty * (counts_V > 0)
    if len(answer) < params.min_new_tokens and eos_ids:
        logits_V[torch.tensor(list(eos_ids), device=device)] = NEVER
    if params.logits_processors:
        ids_1T = torch.tensor([list(ids)], device=device)
        for processor in params.logits_processors:
            logits_V = processor(ids_1T, logits_V[None])[0]
    return logits_V


def probabilities(logits_SV: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then top-k, top-p and min-p, in transformers' order; float32 probabilities [S, V]."""
    assert params.temperature > 0, "greedy decoding has no probabilities"
    scores = logits_SV.float() / max(params.temperature, COLDEST)
    if 0 < params.top_k < scores.shape[-1]:
        lowest = scores.topk(params.top_k, dim=-1).values[..., -1:]
        scores = scores.masked_fill(scores < lowest, NEVER)
    if params.top_p < 1:
        scores = scores.masked_fill(~_nucleus(scores.softmax(dim=-1), params.top_p), NEVER)
    if params.min_p > 0:
        probs = scores.softmax(dim=-1)
        scores = scores.masked_fill(probs < params.min_p * probs.amax(dim=-1, keepdim=True), NEVER)
    return scores.softmax(dim=-1)


def _nucleus(probs_SV: torch.Tensor, top_p: float) -> torch.Tensor:
    """Which tokens [S, V] stay under top-p: those before which the more likely ones have less than p of the mass."""
    size = probs_SV.shape[-1]
    # The nucleus is nearly always small: a full sort of the vocabulary is a last resort.
    for count in (min(NUCLEUS_GUESS, size), size):
        best_SK, order_SK = probs_SV.topk(count, dim=-1)
        reached_SK = best_SK.cumsum(dim=-1)
        if bool((reached_SK[:, -1] >= top_p).all()):
            break
    inside_SK = reached_SK - best_SK < top_p
    return torch.zeros_like(probs_SV, dtype=torch.bool).scatter(-1, order_SK, inside_SK)


def draw(probs_SV: torch.Tensor, uniforms_S: torch.Tensor) -> torch.Tensor:
    """Ids [S] with the given probabilities (which need not sum to 1), by inverting the cumulative distribution.

    In float64: float32 sums over a large vocabulary would move the borders between tokens.
    """
    # Apple GPUs have no float64; the sums are then made on the host.
    wide = probs_SV.cpu() if probs_SV.device.type == "mps" else probs_SV
    cumulative_SV = wide.double().cumsum(dim=-1)
    reached_S1 = uniforms_S.to(wide.device)[:, None] * cumulative_SV[:, -1:]
    # The first token whose cumulative sum exceeds the point, so that a token of probability 0 is never drawn.
    ids_S = torch.searchsorted(cumulative_SV, reached_S1, right=True)[:, 0]
    last_S = (wide > 0).double().cumsum(dim=-1).argmax(dim=-1)
    return torch.minimum(ids_S, last_S).to(probs_SV.device)
