"""The names and calls that users of DFlash know from z-lab's package and from transformers."""

from __future__ import annotations

from functools import cached_property
from types import SimpleNamespace
from typing import Any

import torch

from flashdraft.cache import visible
from flashdraft.core import SamplingParams, UserError
from flashdraft.decode.rounds import given, rounds
from flashdraft.decode.row import Request, Row
from flashdraft.drafters.dflash.config import config_to_dict
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.model import DFlashModel, KeyValue


class DFlashDraftModel(DFlashModel):
    """A DFlash drafter that decodes by itself (`spec_generate`, as in z-lab's package), and that transformers' own
    `model.generate(assistant_model=draft, speculation_type="dflash")` accepts."""

    def spec_generate(
        self,
        target: Any,
        input_ids: torch.Tensor,
        max_new_tokens: int,
        stop_token_ids: list[int] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        seed: int | None = None,
    ) -> torch.Tensor:
        """Prompt and answer ids [1, T + new]; `target` is a transformers model.

        Only `stop_token_ids` end the answer before `max_new_tokens`.
        """
        from flashdraft.target.hf import HfTarget

        if input_ids.shape[0] != 1:
            raise UserError(f"input_ids has {input_ids.shape[0]} rows, spec_generate takes one; use Engine.generate")
        wrapped = HfTarget(target)
        drafter = DFlashDrafter(self)
        drafter.check(wrapped)
        params = SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            seed=seed,
            ignore_eos=True,
            stop_token_ids=tuple(stop_token_ids or ()),
        )
        row = Row(Request(tuple(input_ids[0].tolist()), params), wrapped)
        for _ in rounds(wrapped, drafter, given([row])):
            pass
        return torch.tensor([row.ids], device=input_ids.device)

    @cached_property
    def config(self) -> Any:
        """The configuration that transformers' generate reads."""
        from transformers import Qwen3Config

        if self.lm_head is not None:
            raise UserError("transformers drafts with the target's head; a drafter with a head of its own needs ours")
        keys = config_to_dict(self.settings, str(self.dtype).removeprefix("torch."))
        known = {
            k: v for k, v in keys.items() if k not in ("architectures", "model_type", "rope_theta", "rope_scaling")
        }
        config = Qwen3Config(**known)
        config.mask_token_id = self.settings.mask_token_id
        config.target_layer_ids = list(self.settings.target_layer_ids)
        return config

    def forward(
        self,
        noise_embeds: torch.Tensor,
        context_hidden_states: torch.Tensor,
        position_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        cache: Any = None,
    ) -> SimpleNamespace:
        """One draft pass in transformers' convention.

        noise_embeds [1, S, D], context_hidden_states [1, T, F] (new context only), position_ids [1, T + S]; `cache`
        holds the earlier context. The mask is not needed: rows of one sequence, without padding.
        """
        size = noise_embeds.shape[1]
        at = self.rotation(position_ids)
        at_context, at_block = (
            type(at)(*(part[:, s] for part in at)) for s in (slice(None, -size), slice(-size, None))
        )
        context = self.context_keys_values(self.project(context_hidden_states), at_context)

        def join(layer: int, own: KeyValue) -> KeyValue:
            new = (torch.cat(pair, dim=2) for pair in zip(context[layer], own, strict=True))
            return KeyValue(*cache.update(*new, layer))

        def sight(layer: int, count: int) -> torch.Tensor | None:
            # The cache gives the last `count` positions (all, or a sliding window of them).
            queries_1S = position_ids[:, -size:]
            keys_1K = queries_1S[:, -1:] - torch.arange(count - 1, -1, -1, device=position_ids.device)
            return visible(queries_1S, keys_1K, causal=self.settings.causal(layer), window=self.settings.window(layer))

        scaled = noise_embeds * self.settings.input_embedding_scale
        return SimpleNamespace(last_hidden_state=self.read_block(scaled, at_block, join, sight))
