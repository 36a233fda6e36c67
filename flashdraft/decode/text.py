"""From ids to text, as it comes: never half a character, never text that a stop string may still take back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"  # what decoders show for bytes that are not (yet) a character
LONGEST_CHARACTER = 3  # bytes of a character that may still lack one
LONGEST_TAIL = 32  # ids kept while no character ends with an id
KEPT_TAIL = 12  # ids kept of such a tail: any 9 bytes hold all that its last 3 replacement characters stand for


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that turns ids into text."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str: ...


class Detokenizer:
    """Text of a growing list of ids. Every call decodes a few ids only, so a long answer costs no more per token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        # The last ids, with some that were given out already: decoders look back (at spaces, at started characters).
        self._ids: list[int] = []
        self._whole = 0  # ids of these behind which a character ended, and which were given out
        self._given = ""  # text of these that was given out

    def push(self, token_id: int) -> str:
        """The text that became final with this id; empty inside a character."""
        self._ids = [*self._ids, token_id]
        text = self._decode(self._ids)
        if not text.startswith(self._given):
            # Where bytes are tokens, one that ends no character spoils a run of them, back over what was given out.
            self._ids, self._whole, self._given = self._ids[self._whole :], 0, ""
            text = self._decode(self._ids)
        unfinished = _unfinished(text)
        final = text[: len(text) - unfinished]
        new = final[len(self._given) :]
        if new:
            self._given = final
            self._forget(unfinished)
        elif not self._decode([token_id, token_id]):
            self._ids = self._ids[:-1]  # a special token: it shows nothing, and any number of them may come
        return new

    def flush(self) -> str:
        """What is left when no more ids come; a character cut in half shows as the replacement character."""
        text, given = self._decode(self._ids), self._given
        self._given = text
        return text[len(given) :]

    def _forget(self, unfinished: int) -> None:
        """Drop ids that no decoder will look back at; `unfinished` characters at their end were not given out."""
        if not unfinished:
            self._ids = self._ids[self._whole :]
            self._whole = len(self._ids)
        elif len(self._ids) > LONGEST_TAIL:
            self._ids = self._ids[-KEPT_TAIL:]
            self._whole = 0
        else:
            return
        text = self._decode(self._ids)
        self._given = text[: len(text) - unfinished]

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def _unfinished(text: str) -> int:
    """Characters at the end that bytes to come may still change."""
    return min(len(text) - len(text.rstrip(UNFINISHED)), LONGEST_CHARACTER)


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
