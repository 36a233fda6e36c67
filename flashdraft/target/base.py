"""The contract of a target: what drafting, verifying and training ask of the large model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import torch

from flashdraft.cache import KVCache
from flashdraft.core import UserError


class TargetOutput(NamedTuple):
    """Logits [B, S, V] of the kept slots, and features [B, Q, F] of all new positions (None without taps)."""

    logits: torch.Tensor
    features: torch.Tensor | None


class Target(ABC):
    """A causal language model whose answers are kept."""

    name: str
    device: torch.device
    dtype: torch.dtype
    num_layers: int
    hidden_size: int
    vocab_size: int
    """Tokens that can be generated: rows of a padded head beyond the tokenizer's tokens are cut off."""
    embedding_rows: int
    context_length: int | None
    """Positions that the model can take; None if it sets no limit."""
    eos_token_ids: tuple[int, ...]

    def check_taps(self, taps: Sequence[int]) -> None:
        """Raise UserError for layers that this target does not have."""
        wrong = [i for i in taps if not 0 <= i < self.num_layers]
        if wrong:
            raise UserError(
                f"target_layer_ids {list(taps)} ask for layer {wrong[0]}, but {self.name} has layers 0 to "
                f"{self.num_layers - 1}; is this drafter made for another target?"
            )

    @abstractmethod
    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows [..., D] of the embedding table, without the scaling or norm that some families add."""

    @abstractmethod
    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., V] of final hidden states [..., D], without the soft cap that some families add."""

    @abstractmethod
    def new_cache(self) -> KVCache:
        """An empty cache."""

    @abstractmethod
    def forward(
        self,
        ids_BQ: torch.Tensor,
        cache: KVCache,
        rows: slice,
        *,
        taps: tuple[int, ...] = (),
        keep_BS: torch.Tensor | None = None,
    ) -> TargetOutput:
        """One pass over new tokens of some rows of the cache, at the positions behind what each row holds.

        The cache is written but not committed. Features are the outputs of the decoder layers `taps` (counted from 0),
        side by side: transformers' `hidden_states[tap + 1]` (DFlash paper, section 4.1 and appendix A.1).
        `keep_BS` picks the slots whose logits are wanted (all by default).
        """
