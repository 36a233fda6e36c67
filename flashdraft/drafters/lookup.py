"""Prompt lookup: the tokens that followed the last time the text looked like this. No weights, no features."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashdraft.drafters.base import Draft, Drafter, DraftRow, DraftState
from flashdraft.target.base import Target


class LookupDrafter(Drafter):
    """Finds the longest n-gram at the end of the text that occurred before, and proposes what followed it."""

    def __init__(self, block_size: int = 8, longest: int = 3) -> None:
        self.block_size = block_size
        self.longest = longest

    def new_state(self, target: Target) -> DraftState:
        return _LookupState(target.device, self.longest)


class _LookupState(DraftState):
    def __init__(self, device: torch.device, longest: int) -> None:
        self._device = device
        self._longest = longest
        self._indices: list[_NgramIndex] = []

    def join(self, ids: Sequence[int], features_1TF: torch.Tensor | None) -> None:
        self._indices.append(_NgramIndex(self._longest))

    def propose(self, rows: Sequence[DraftRow], size: int) -> Draft:
        ids_BS = [index.continuation(row.ids, size) for index, row in zip(self._indices, rows, strict=True)]
        return Draft(torch.tensor(ids_BS, dtype=torch.long, device=self._device).view(len(rows), size))

    def commit(self, features_BQF: torch.Tensor | None, kept: Sequence[int]) -> None:
        pass

    def leave(self, row: int) -> None:
        self._indices[row] = self._indices[-1]
        self._indices.pop()


class _NgramIndex:
    """Where each n-gram of a growing text ended last; only new tokens are read, so a round costs a few look-ups."""

    def __init__(self, longest: int) -> None:
        self._ends: list[dict[tuple[int, ...], int]] = [{} for _ in range(longest)]
        self._read = 0

    def continuation(self, ids: Sequence[int], size: int) -> list[int]:
        """`size` tokens that followed the longest known n-gram at the end of `ids`; its last token again and again
        where nothing is known."""
        self._index(ids)
        for n in range(min(len(self._ends), len(ids) - 1), 0, -1):
            end = self._ends[n - 1].get(tuple(ids[-n:]))
            if end is not None:
                found = list(ids[end : end + size])
                # What follows may run into the end of the text: it then repeats with the same period.
                period = len(ids) - end
                while len(found) < size:
                    found.append(found[len(found) - period])
                return found
        return [ids[-1]] * size

    def _index(self, ids: Sequence[int]) -> None:
        """Index every n-gram that ends before the last token, whose continuation is not known yet."""
        for end in range(max(self._read, 1), len(ids)):
            for n in range(1, min(len(self._ends), end) + 1):
                self._ends[n - 1][tuple(ids[end - n : end])] = end
        self._read = len(ids)
