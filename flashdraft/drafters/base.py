"""The contract of a drafter: start with a prompt's features, propose, commit what was kept.

A drafter works on the rows of a batch, in the same order as the target's cache; rows join and leave between rounds.
Letters: B rows, S draft tokens, T prompt positions, F feature width, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from flashdraft.core import SamplingParams
from flashdraft.target.base import Target


@dataclass(frozen=True)
class Draft:
    """A chain of proposed tokens for every row."""

    ids_BS: torch.Tensor
    probs_BSV: torch.Tensor | None = None
    """What each token was drawn from; None when the proposal is a point (argmax, look-up)."""
    confidence_BS: torch.Tensor | None = None
    """The drafter's own probability that its most likely token of a slot is right, given that those before it are."""

    def cut(self, size: int, device: torch.device) -> Draft:
        """The first `size` tokens, on the target's device."""
        probs, confidence = self.probs_BSV, self.confidence_BS
        return Draft(
            self.ids_BS[:, :size].to(device),
            None if probs is None else probs[:, :size].to(device),
            None if confidence is None else confidence[:, :size],
        )


class DraftRow(Protocol):
    """What a drafter may know of a request."""

    ids: list[int]
    """Prompt and answer so far; the last one is the anchor."""
    params: SamplingParams

    def draft_noise(self, count: int) -> torch.Tensor:
        """Uniform numbers [count] for sampling the next `count` draft tokens of this row."""


class Drafter(ABC):
    """Proposes tokens for a target. One object serves any number of decoding states."""

    block_size: int
    """Anchor and draft tokens of a whole block."""
    taps: tuple[int, ...] = ()
    """Target layers whose features it reads."""

    def check(self, target: Target) -> None:  # noqa: B027 - nothing to check is a fine default
        """Raise UserError when this drafter does not fit the target."""

    @abstractmethod
    def new_state(self, target: Target) -> DraftState:
        """State of an empty batch."""


class DraftState(ABC):
    """What a drafter remembers of the rows of one batch."""

    @abstractmethod
    def join(self, ids: Sequence[int], features_1TF: torch.Tensor | None) -> None:
        """A row was added at the end, with the features of its prompt."""

    @abstractmethod
    def propose(self, rows: Sequence[DraftRow], size: int) -> Draft:
        """`size` draft tokens (the drafter's `block_size` less the anchor) behind the anchor of every row."""

    @abstractmethod
    def commit(self, features_BQF: torch.Tensor | None, kept: Sequence[int]) -> None:
        """The target has read the anchor and the draft; the first `kept[b]` of these positions stay."""

    @abstractmethod
    def leave(self, row: int) -> None:
        """A row is gone; the last row takes its index."""


class NoDrafter(Drafter):
    """Proposes nothing, so that a round is a plain decoding step."""

    block_size = 1

    def new_state(self, target: Target) -> DraftState:
        return _Nothing(target)


class _Nothing(DraftState):
    def __init__(self, target: Target) -> None:
        self._device = target.device

    def join(self, ids: Sequence[int], features_1TF: torch.Tensor | None) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow], size: int) -> Draft:
        return Draft(torch.empty(len(rows), 0, dtype=torch.long, device=self._device))

    def commit(self, features_BQF: torch.Tensor | None, kept: Sequence[int]) -> None:
        pass

    def leave(self, row: int) -> None:
        pass
