"""From ids to text, as it comes: never half a character, never text that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "�"  # what decoders show for bytes that are not (yet) a character


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Text of a growing list of ids. Every call sees a few ids only, so a long answer costs no more per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # Ids are decoded from `_context` on, so that the decoder can see what joins a token to the one before it; the
        # text of ids before `_done` was given out.
        self._ids: list[int] = []
        self._context = 0
        self._done = 0

    def push(self, token_id: int) -> str:
        """The text that became complete with this id; empty inside a character."""
        self._ids.append(token_id)
        before, after = self._decode(self._done), self._decode(len(self._ids))
        if len(after) <= len(before) or after.endswith(UNFINISHED):
            return ""
        self._context, self._done = self._done, len(self._ids)
        return after[len(before) :]

    def flush(self) -> str:
        """What is left when no more ids come; a character cut in half shows as the replacement character."""
        before, after = self._decode(self._done), self._decode(len(self._ids))
        self._done = len(self._ids)
        return after[len(before) :]

    def _decode(self, end: int) -> str:
        return self._tokenizer.decode(self._ids[self._context : end], skip_special_tokens=True)


class StopStrings:
    """Finds stop strings in a growing text and holds back what may be the beginning of one."""

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is final now, whether a stop string was found); final text ends before the stop string."""
        held = self._held + text
        found = [at for at in (held.find(stop) for stop in self._stop) if at >= 0]
        if found:
            self._held = ""
            return held[: min(found)], True
        keep = max((_overlap(held, stop) for stop in self._stop), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def flush(self) -> str:
        """What was held back, when no more text comes."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a beginning of `stop`."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
