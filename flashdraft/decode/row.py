"""One request in flight: its ids, its sampler, its answer and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from flashdraft.core import Completion, Piece, SamplingParams, Stats, TokenLogprob, UserError
from flashdraft.decode.answer import Answer
from flashdraft.decode.sampler import Sampler
from flashdraft.decode.text import Tokenizer
from flashdraft.device import now
from flashdraft.sampling import DRAFT
from flashdraft.target.base import Target


@dataclass(frozen=True)
class Request:
    """A prompt and how to answer it."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams = SamplingParams()


class Row:
    """A request in flight. Raises UserError for a prompt that the target cannot take."""

    def __init__(self, request: Request, target: Target, tokenizer: Tokenizer | None = None) -> None:
        check_prompt(request.prompt_ids, target)
        check_params(request.params, target)
        self.request = request
        self.params = request.params
        self.ids: list[int] = list(request.prompt_ids)
        self.stats = Stats()
        ends = (*target.eos_token_ids, *request.params.stop_token_ids)
        self.sampler = Sampler(request.params, [i for i in ends if 0 <= i < target.vocab_size])
        room = None if target.context_length is None else target.context_length - len(self.ids)
        self.answer = Answer(request.params, target.eos_token_ids, tokenizer, room)
        self._device = target.device
        self._begun = now(self._device)
        self._first = self._begun
        self._told = (0, 0, 0)

    @property
    def prompt_length(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def finished(self) -> bool:
        return self.answer.finish_reason is not None

    def draft_noise(self, count: int) -> torch.Tensor:
        return self.sampler.noise.at(len(self.ids) - self.prompt_length, count, DRAFT)

    def judge(
        self, logits_QV: torch.Tensor, draft_S: torch.Tensor, proposal_SV: torch.Tensor | None
    ) -> tuple[int, int]:
        """(draft tokens kept, the target's token after them)."""
        recorded = self.params.sample_drafts and not self.params.greedy
        ends = self.answer.foresee() if self.params.needs_prefix else None
        return self.sampler.judge(
            logits_QV, draft_S, proposal_SV if recorded else None, self.ids, self.prompt_length, ends
        )

    def first(self, logits_V: torch.Tensor) -> None:
        """Take the token that the prompt's own pass gives."""
        _, own = self.judge(logits_V[None], torch.empty(0, dtype=torch.long, device=logits_V.device), None)
        self._push([own], 0, logits_V[None])
        self._first = now(self._device)
        self.stats.time_to_first_token = self._first - self._begun

    def take(self, kept: Sequence[int], own: int, proposed: int, logits_QV: torch.Tensor) -> int:
        """Take what a round gave: the kept draft tokens, then the target's own. Returns how many were emitted."""
        emitted = self._push([*kept, own], len(kept), logits_QV)
        stats = self.stats
        stats.rounds += 1
        stats.drafted += proposed
        stats.emitted += emitted
        while len(stats.accepted_per_slot) < proposed:
            stats.accepted_per_slot.append(0)
        for slot in range(min(len(kept), emitted)):
            stats.accepted_per_slot[slot] += 1
        stats.decode_time = now(self._device) - self._first
        return emitted

    def piece(self) -> Piece:
        """What came since the last piece."""
        ids, text, logprobs = self._told
        answer = self.answer
        self._told = (len(answer.ids), len(answer.text), len(answer.logprobs))
        return Piece(
            text=answer.text[text:],
            ids=tuple(answer.ids[ids:]),
            drafted=tuple(answer.drafted[ids:]),
            logprobs=tuple(answer.logprobs[logprobs:]),
            finish_reason=answer.finish_reason,
            stats=self.stats,
        )

    def completion(self) -> Completion:
        """The whole answer, once it is finished."""
        answer = self.answer
        assert answer.finish_reason is not None, "the answer is not finished"
        return Completion(
            prompt_ids=self.request.prompt_ids,
            ids=tuple(answer.ids),
            text=answer.text,
            finish_reason=answer.finish_reason,
            logprobs=tuple(answer.logprobs),
            stats=self.stats,
        )

    def _push(self, tokens: Sequence[int], from_draft: int, logits_QV: torch.Tensor) -> int:
        """Push tokens until the answer ends; slot i of the logits gave token i."""
        for slot, token in enumerate(tokens):
            self.ids.append(token)
            if not self.answer.push(token, slot < from_draft, self._logprob(token, logits_QV[slot])):
                return slot + 1
        return len(tokens)

    def _logprob(self, token: int, logits_V: torch.Tensor) -> TokenLogprob | None:
        if self.params.logprobs is None:
            return None
        logprobs_V = logits_V.float().log_softmax(dim=-1)
        best = logprobs_V.topk(self.params.logprobs)
        top = tuple(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        return TokenLogprob(token, float(logprobs_V[token]), top)


def check_prompt(ids: Sequence[int], target: Target) -> None:
    """Raise UserError for an empty prompt, ids that the target does not know, or one longer than its context."""
    if not ids:
        raise UserError("the prompt is empty; give at least one token (a base model starts from its bos token)")
    wrong = next((i for i in ids if not 0 <= i < target.embedding_rows), None)
    if wrong is not None:
        raise UserError(f"the prompt holds id {wrong}, but {target.name} knows ids 0 to {target.embedding_rows - 1}")
    if target.context_length is not None and len(ids) > target.context_length:
        raise UserError(
            f"the prompt has {len(ids)} tokens, but {target.name} takes {target.context_length} (prompt and answer "
            "together); shorten it"
        )


def check_params(params: SamplingParams, target: Target) -> None:
    """Raise UserError for parameters that this target's vocabulary cannot satisfy."""
    size = target.vocab_size
    wrong = next((i for i in params.logit_bias if not 0 <= i < size), None)
    if wrong is not None:
        raise UserError(f"logit_bias names id {wrong}, but {target.name} generates ids 0 to {size - 1}")
    if params.logprobs is not None and params.logprobs > size:
        raise UserError(f"logprobs must be at most the {size} tokens that {target.name} knows, got {params.logprobs}")
