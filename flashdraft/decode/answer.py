"""Where an answer ends: the one place that decides it, token by token, however many tokens a round emitted."""

from __future__ import annotations

from collections.abc import Callable, Collection
from copy import copy

from flashdraft.core import FinishReason, SamplingParams, TokenLogprob
from flashdraft.decode.text import Detokenizer, StopStrings, Tokenizer


class Answer:
    """The growing answer of one request. Ids, text and log-probabilities always belong together.

    An end token belongs to the ids; its text (a special token) does not show. The token that completes a stop string
    belongs to the ids; the text is cut before the stop string.
    """

    def __init__(
        self, params: SamplingParams, eos_ids: Collection[int], tokenizer: Tokenizer | None, room: int | None
    ) -> None:
        """`room`: tokens that fit into the model's context behind the prompt; None for no limit."""
        self.ids: list[int] = []
        self.drafted: list[bool] = []
        self.logprobs: list[TokenLogprob] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self._limit = params.max_new_tokens if room is None else min(params.max_new_tokens, room)
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(eos_ids))
        self._detokenizer = Detokenizer(tokenizer) if tokenizer is not None else None
        self._stop_strings = StopStrings(params.stop)
        if self._limit <= 0:
            self.finish_reason = "length"

    @property
    def remaining(self) -> int:
        """Tokens that may still come."""
        return 0 if self.finish_reason else self._limit - len(self.ids)

    def push(self, token_id: int, drafted: bool, logprob: TokenLogprob | None = None) -> bool:
        """Take one more token; whether another one may follow."""
        assert self.finish_reason is None, "a finished answer takes no more tokens"
        self.ids.append(token_id)
        self.drafted.append(drafted)
        if logprob is not None:
            self.logprobs.append(logprob)
        stopped = False
        if self._detokenizer is not None:
            final, stopped = self._stop_strings.push(self._detokenizer.push(token_id))
            self.text += final
        if stopped:
            self.finish_reason = "stop"
            return False
        if token_id in self._ends or len(self.ids) >= self._limit:
            self.finish_reason = "stop" if token_id in self._ends else "length"
            self._finish_text()
            return False
        return True

    def foresee(self) -> Callable[[int], bool]:
        """A function that is told of the tokens that may come next, in their order, and says of each whether the answer
        would end with it (the token limit aside)."""
        detokenizer, strings = copy(self._detokenizer), copy(self._stop_strings)

        def ends(token_id: int) -> bool:
            text = "" if detokenizer is None else detokenizer.push(token_id)
            return strings.push(text)[1] or token_id in self._ends

        return ends

    def _finish_text(self) -> None:
        if self._detokenizer is None:
            return
        # The rest of a cut character may itself complete a stop string.
        final, stopped = self._stop_strings.push(self._detokenizer.flush())
        self.text += final
        if stopped:
            self.finish_reason = "stop"
        else:
            self.text += self._stop_strings.flush()
