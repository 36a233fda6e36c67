"""Random small targets of every family we support, for tests, docs and `flashdraft doctor`: no download, no meaning."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flashdraft.core import UserError
from flashdraft.target.hf import HfTarget

SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
NO_SPECIAL: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
GEMMA: dict[str, Any] = {**SHAPE, "head_dim": 16, "sliding_window": 8}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", SHAPE),
    "llama-tied": ("llama", {**SHAPE, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", SHAPE),
    "qwen3": ("qwen3", {**SHAPE, "head_dim": 16}),
    "mistral": ("mistral", {**SHAPE, "sliding_window": 8}),
    "gemma2": ("gemma2", {**GEMMA, "final_logit_softcapping": 3.0, "attn_logit_softcapping": 5.0}),
    "gemma3": ("gemma3_text", {**GEMMA, "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 512}),
}


def tiny_model(family: str = "llama", *, vocab_size: int = 97, seed: int = 0, **changes: Any) -> Any:
    """A random transformers model in float32. Larger weights than usual, so that its logits are far from ties."""
    if family not in FAMILIES:
        raise UserError(f"no tiny target of family {family!r}; there are {', '.join(FAMILIES)}")
    kind, shape = FAMILIES[family]
    config = AutoConfig.for_model(kind, **{**NO_SPECIAL, **shape, "vocab_size": vocab_size, **changes})
    attention = "eager" if shape.get("attn_logit_softcapping") else "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def tiny_target(family: str = "llama", *, vocab_size: int = 97, seed: int = 0, **changes: Any) -> HfTarget:
    """The same as a Target."""
    return HfTarget(tiny_model(family, vocab_size=vocab_size, seed=seed, **changes), f"tiny {family}")
