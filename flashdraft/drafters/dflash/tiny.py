"""Random DFlash drafters for tiny targets: for tests, docs and `flashdraft doctor`."""

from __future__ import annotations

from typing import Any

import torch

from flashdraft.drafters.dflash.config import DFlashConfig
from flashdraft.drafters.dflash.model import DFlashModel
from flashdraft.target.base import Target


def tiny_config(target: Target, **changes: Any) -> DFlashConfig:
    """A small drafter's shape that fits a target of at least four layers."""
    shape: dict[str, Any] = {
        "hidden_size": target.hidden_size,
        "intermediate_size": 2 * target.hidden_size,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": target.vocab_size,
        "num_target_layers": target.num_layers,
        "target_layer_ids": (0, target.num_layers - 2),
        "mask_token_id": 5,
        "block_size": 5,
    }
    return DFlashConfig(**{**shape, **changes})


def tiny_drafter_model(target: Target, *, seed: int = 1, **changes: Any) -> DFlashModel:
    """A random drafter for a target; `changes` go into its config."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return DFlashModel(tiny_config(target, **changes)).eval()
