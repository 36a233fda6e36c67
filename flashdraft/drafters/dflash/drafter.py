"""DFlash as a drafter: cached context, one pass for a block (paper, sections 4.1 and 4.3)."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from flashdraft.cache import CacheWindow, KVCache
from flashdraft.core import UserError
from flashdraft.drafters.base import Draft, Drafter, DraftRow, DraftState
from flashdraft.drafters.dflash.model import DFlashModel, KeyValue
from flashdraft.drafters.propose import pick
from flashdraft.target.base import Target


class DFlashDrafter(Drafter):
    """Drafts with a DFlash model, at its own block size or another one."""

    def __init__(self, model: DFlashModel, block_size: int | None = None) -> None:
        self.model = model
        self.block_size = model.settings.block_size if block_size is None else block_size
        if self.block_size < 2:
            raise UserError(f"block_size must be at least 2 (the anchor and one draft token), got {self.block_size}")
        self.taps = model.settings.target_layer_ids

    def check(self, target: Target) -> None:
        target.check_taps(self.taps)
        config = self.model.settings
        if config.hidden_size != target.hidden_size:
            raise UserError(
                f"drafter and target do not fit: hidden_size is {config.hidden_size} in the drafter and "
                f"{target.hidden_size} in {target.name}"
            )
        if config.mask_token_id >= target.embedding_rows:
            raise UserError(
                f"drafter and target do not fit: mask_token_id {config.mask_token_id} is outside the "
                f"{target.embedding_rows} embeddings of {target.name}"
            )
        if config.num_target_layers not in (None, target.num_layers):
            raise UserError(
                f"drafter and target do not fit: num_target_layers is {config.num_target_layers} in the drafter, "
                f"{target.name} has {target.num_layers} layers"
            )
        d2t = self.model.d2t
        if d2t is not None:
            ids = torch.arange(len(d2t), device=d2t.device) + d2t
            if int(ids.min()) < 0 or int(ids.max()) >= target.vocab_size:
                raise UserError(
                    f"drafter and target do not fit: d2t gives ids {int(ids.min())} to {int(ids.max())}, but "
                    f"{target.name} generates 0 to {target.vocab_size - 1}"
                )

    def new_state(self, target: Target) -> DraftState:
        return DFlashState(self.model, target)


class DFlashState(DraftState):
    """The projected context of every row, layer by layer."""

    def __init__(self, model: DFlashModel, target: Target) -> None:
        self._model = model
        self._target = target
        self._cache = KVCache(model.settings.num_hidden_layers)

    def join(self, ids: Sequence[int], features_1TF: torch.Tensor | None) -> None:
        row = self._cache.join()
        self._write(features_1TF, slice(row, row + 1))
        self._cache.commit(row, len(ids))

    def propose(self, rows: Sequence[DraftRow], size: int) -> Draft:
        window = self._cache.window(slice(0, len(rows)), 1 + size)
        anchors_B = torch.tensor([row.ids[-1] for row in rows], device=self._model.device)
        logits_BSV = draft_logits(self._model, self._target, anchors_B, window)
        draft = pick(logits_BSV, rows)
        if self._model.d2t is None:
            return draft
        return _in_target_ids(draft, self._model.d2t, self._target.vocab_size)

    def commit(self, features_BQF: torch.Tensor | None, kept: Sequence[int]) -> None:
        self._write(features_BQF, slice(0, len(kept)))
        for row, count in enumerate(kept):
            self._cache.commit(row, count)

    def leave(self, row: int) -> None:
        self._cache.leave(row)

    def _write(self, features_BQF: torch.Tensor | None, rows: slice) -> None:
        """Project features to keys and values behind each row's length."""
        assert features_BQF is not None, "the target was not tapped"
        window = self._cache.window(rows, features_BQF.shape[1])
        context_BQD = self._model.project(features_BQF.to(self._model.device))
        at = self._model.rotation(window.positions(self._model.device))
        for layer, own in enumerate(self._model.context_keys_values(context_BQD, at)):
            window.update(layer, *own)


def draft_logits(model: DFlashModel, target: Target, anchors_B: torch.Tensor, window: CacheWindow) -> torch.Tensor:
    """Logits [B, S, V] of the slots behind the anchors; slot s predicts the token at its own position."""
    config, size = model.settings, window.new - 1
    masks_BS = anchors_B.new_full((anchors_B.shape[0], size), config.mask_token_id)
    block_ids = torch.cat((anchors_B[:, None], masks_BS), dim=1)
    x_BSD = target.embed(block_ids).to(model.device, model.dtype) * config.input_embedding_scale
    masks = {
        key: window.mask(model.device, causal=key[0], window=key[1])
        for key in {(config.causal(i), config.window(i)) for i in range(config.num_hidden_layers)}
    }
    hidden_BSD = model.read_block(
        x_BSD,
        model.rotation(window.positions(model.device)),
        lambda layer, own: KeyValue(*window.update(layer, *own)),
        lambda layer, _: masks[config.causal(layer), config.window(layer)],
    )[:, 1:]
    if model.lm_head is not None:
        return model.scale_logits(model.lm_head(hidden_BSD))
    return model.scale_logits(target.head(hidden_BSD.to(target.device, target.dtype)))


def _in_target_ids(draft: Draft, d2t: torch.Tensor, vocab_size: int) -> Draft:
    """From the drafter's reduced vocabulary to the target's."""
    probs = draft.probs_BSV
    if probs is not None:
        to = torch.arange(len(d2t), device=d2t.device) + d2t
        probs = probs.new_zeros(*probs.shape[:2], vocab_size).index_copy(2, to, probs)
    return Draft(draft.ids_BS + d2t[draft.ids_BS], probs, draft.confidence_BS)
