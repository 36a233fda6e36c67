"""Rotary positions at absolute positions, always computed in float32 (a bfloat16 frequency drifts at far positions)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashdraft.core import UserError
from flashdraft.drafters.dflash.config import DFlashConfig


class Rotation(NamedTuple):
    """cos and sin [B, Q, E] of some positions."""

    cos: torch.Tensor
    sin: torch.Tensor


def frequencies(config: DFlashConfig, device: torch.device) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [E/2] in float32 and the factor on cos and sin, for plain and scaled (YaRN, ...) rotation."""
    kind, theta = config.rope_parameters["rope_type"], float(config.rope_parameters["rope_theta"])
    if kind == "default":
        exponent = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=device) / config.head_dim
        return 1.0 / theta**exponent, 1.0
    from transformers import Qwen3Config
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind not in ROPE_INIT_FUNCTIONS:
        raise UserError(f"drafter config: rope_type is {kind!r}, but must be default or {sorted(ROPE_INIT_FUNCTIONS)}")
    like = Qwen3Config(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_position_embeddings,
        rope_parameters=dict(config.rope_parameters),
    )
    inverse, factor = ROPE_INIT_FUNCTIONS[kind](like, device)
    return inverse.float(), float(factor)


def rotation(positions_BQ: torch.Tensor, inverse_E2: torch.Tensor, factor: float, dtype: torch.dtype) -> Rotation:
    """Rotation at these positions, in the dtype of the vectors to rotate."""
    angle_BQE = (positions_BQ[..., None].float() * inverse_E2).repeat(1, 1, 2)
    return Rotation((angle_BQE.cos() * factor).to(dtype), (angle_BQE.sin() * factor).to(dtype))


def rotate(x_BHQE: torch.Tensor, at: Rotation) -> torch.Tensor:
    """Rotate the halves of every head (the layout of Llama and Qwen)."""
    low, high = x_BHQE.chunk(2, dim=-1)
    turned = torch.cat((-high, low), dim=-1)
    return x_BHQE * at.cos[:, None] + turned * at.sin[:, None]
