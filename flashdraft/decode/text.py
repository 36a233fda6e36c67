"""From ids to text, as it comes: never half a character, never text that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"  # what decoders show for bytes that are not (yet) a character
KEPT_TAIL = 4  # ids kept behind final text
LONGEST_TAIL = 16  # ids kept while a run of bytes forms no character


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Text of a growing list of ids. Every call decodes a few ids only, so a long answer costs no more per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The last ids, with some that were given out already: decoders look back (at spaces, at started characters).
        self._ids: list[int] = []
        self._given = 0  # characters of their text that were given out

    def push(self, token_id: int) -> str:
        """The text that became final with this id; empty inside a character."""
        self._ids.append(token_id)
        text = self._decode()
        unfinished = _unfinished(text)
        final = len(text) - unfinished
        if final <= self._given:
            return ""
        new, self._given = text[self._given : final], final
        if not unfinished or len(self._ids) > LONGEST_TAIL:
            self._ids = self._ids[-KEPT_TAIL:]
            text = self._decode()
            self._given = len(text) - _unfinished(text)
        return new

    def flush(self) -> str:
        """What is left when no more ids come; a character cut in half shows as the replacement character."""
        text, given = self._decode(), self._given
        self._given = len(text)
        return text[given:]

    def _decode(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=True)


def _unfinished(text: str) -> int:
    """Characters at the end that bytes to come may still change: a character misses three bytes at most."""
    return min(len(text) - len(text.rstrip(UNFINISHED)), 3)


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
