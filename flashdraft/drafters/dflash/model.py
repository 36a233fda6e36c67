"""The DFlash network (paper, section 4.1).

Features of the target are fused once (`project`) and enter every draft layer as additional keys and values, made by the
layer's own k_proj and v_proj. The block itself is read in the same way in decoding, in training and inside
transformers' generate; only what its keys are joined with differs (`Join`).

Letters: B rows, T context positions, S slots of a block, K keys, D width, F = taps * D, H query heads, G key/value
heads, E head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F

from flashdraft.drafters.dflash.config import DFlashConfig
from flashdraft.drafters.dflash.rope import Rotation, frequencies, rotate, rotation


class KeyValue(NamedTuple):
    """Keys and values [B, G, K, E], keys normed and rotated."""

    keys: torch.Tensor
    values: torch.Tensor


Join = Callable[[int, KeyValue], KeyValue]
"""(layer, the block's own keys and values) -> all that the block's queries look at, context first."""

Sight = Callable[[int, int], torch.Tensor | None]
"""(layer, K keys) -> mask [B or 1, S, K] of what each slot sees; None when it sees everything."""


class RMSNorm(nn.Module):
    """Root mean square norm, computed in float32 like the targets' own."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class Attention(nn.Module):
    """Queries from the block; keys and values from the context and the block, by the same projections."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        wide, bias = config.head_dim, config.attention_bias
        self.head_dim = wide
        self.grouped = config.num_attention_heads != config.num_key_value_heads
        self.q_proj = nn.Linear(config.hidden_size, config.num_attention_heads * wide, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * wide, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, config.num_key_value_heads * wide, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * wide, config.hidden_size, bias=bias)
        self.q_norm = RMSNorm(wide, config.rms_norm_eps)
        self.k_norm = RMSNorm(wide, config.rms_norm_eps)

    def keys_values(self, x_BKD: torch.Tensor, at: Rotation) -> KeyValue:
        keys = rotate(self.k_norm(self._heads(self.k_proj(x_BKD))).transpose(1, 2), at)
        return KeyValue(keys, self._heads(self.v_proj(x_BKD)).transpose(1, 2))

    def forward(self, x_BSD: torch.Tensor, at: Rotation, seen: KeyValue, mask: torch.Tensor | None) -> torch.Tensor:
        query_BHSE = rotate(self.q_norm(self._heads(self.q_proj(x_BSD))).transpose(1, 2), at)
        mask_B1SK = None if mask is None else mask[:, None]
        out_BHSE = F.scaled_dot_product_attention(
            query_BHSE, seen.keys, seen.values, attn_mask=mask_B1SK, enable_gqa=self.grouped
        )
        out: torch.Tensor = self.o_proj(out_BHSE.transpose(1, 2).flatten(2))
        return out

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    """A Qwen3 decoder layer whose attention also looks at the projected context."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config)
        self.mlp = MLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x_BSD: torch.Tensor, at: Rotation, index: int, join: Join, sight: Sight) -> torch.Tensor:
        normed_BSD = self.input_layernorm(x_BSD)
        seen = join(index, self.self_attn.keys_values(normed_BSD, at))
        x_BSD = x_BSD + self.self_attn(normed_BSD, at, seen, sight(index, seen.keys.shape[2]))
        out: torch.Tensor = x_BSD + self.mlp(self.post_attention_layernorm(x_BSD))
        return out


class DFlashModel(nn.Module):
    """The drafter's own weights; embedding and head are the target's."""

    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.settings = config
        # Not a buffer: a cast of the model must not round them.
        self._frequencies: dict[torch.device, tuple[torch.Tensor, float]] = {}
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.fc = nn.Linear(len(config.target_layer_ids) * config.hidden_size, config.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # A reduced vocabulary brings its own head and the offsets from draft ids to target ids.
        self.lm_head: nn.Linear | None = None
        self.d2t: torch.Tensor | None
        self.register_buffer("d2t", None)
        if config.draft_vocab_size is not None:
            self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
            self.d2t = torch.zeros(config.draft_vocab_size, dtype=torch.long)

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.fc.weight.dtype

    def rotation(self, positions_BQ: torch.Tensor) -> Rotation:
        """Rotation at absolute positions."""
        device = positions_BQ.device
        if device not in self._frequencies:
            with torch.inference_mode(False):  # training uses them too
                self._frequencies[device] = frequencies(self.settings, device)
        return rotation(positions_BQ, *self._frequencies[device], self.dtype)

    def project(self, features_BTF: torch.Tensor) -> torch.Tensor:
        """Fuse the target's features into the context [B, T, D] that all layers share."""
        context: torch.Tensor = self.hidden_norm(self.fc(features_BTF.to(self.dtype)))
        return context

    def context_keys_values(self, context_BTD: torch.Tensor, at: Rotation) -> list[KeyValue]:
        """Keys and values of the context in every layer: computed once for a position, then cached."""
        return [layer.self_attn.keys_values(context_BTD, at) for layer in self._layers()]

    def read_block(self, x_BSD: torch.Tensor, at: Rotation, join: Join, sight: Sight) -> torch.Tensor:
        """Final hidden states [B, S, D] of a block of embeddings (anchor and masks)."""
        for i, layer in enumerate(self._layers()):
            x_BSD = layer(x_BSD, at, i, join, sight)
        out: torch.Tensor = self.norm(x_BSD)
        return out

    def scale_logits(self, logits: torch.Tensor) -> torch.Tensor:
        """The multiplier and soft cap that some published drafters ask for."""
        logits = logits * self.settings.output_multiplier if self.settings.output_multiplier != 1.0 else logits
        cap = self.settings.final_logit_softcapping
        return torch.tanh(logits / cap) * cap if cap else logits

    def _layers(self) -> Sequence[Layer]:
        return self.layers  # type: ignore[return-value]

    @classmethod
    def from_pretrained(
        cls, source: str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype | None = None
    ) -> DFlashModel:
        """Read a drafter from a folder or hub id in the z-lab format. Raises UserError naming key or tensor."""
        from flashdraft.drafters.dflash.weights import load

        return load(cls, source, device=torch.device(device), dtype=dtype)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write `config.json` and `model.safetensors` in the z-lab format."""
        from flashdraft.drafters.dflash.weights import save

        save(self, Path(folder))
