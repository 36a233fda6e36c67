"""Shape of a DFlash drafter, and the only place that knows the keys of its config.json.

Published drafters spell the same thing in several ways; all are read, and both spellings of the two that matter
(`block_size` at either place, `rope_theta` and `rope_parameters`) are written, so that every engine finds its own.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashdraft.core import UserError

FULL, SLIDING = "full_attention", "sliding_attention"

ARCHITECTURES = ("DFlashDraftModel", "QwenDFlashDraftModel", "MuseGlimmerAssistantModel")
"""Names under which this architecture is published."""

OTHER_FAMILIES = {
    "DFlash2": ("conv_kernel_size", "selector_rank"),
    "DSpark": ("markov_rank", "enable_confidence_head"),
    "Domino": ("gru_hidden_dim", "emb_dim"),
    "XPress": ("xpress_config",),
    "DFlare": ("dflare_config", "target_layer_mixture"),
}
"""Relatives with the same body and more parts: name -> config keys that give them away."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "sample_from_anchor": (None, False),
    "is_neox_style": (None, True),
    "rope_is_neox_style": (None, True),
    "hidden_act": (None, "silu"),
}
"""Keys that change the mathematics in ways that are not supported, and the values that do not."""

MUSE = "muse_glimmer_assistant"
"""transformers' own DFlash drafter class, whose sight has a rule of its own."""


@dataclass(frozen=True, kw_only=True)
class DFlashConfig:
    """Everything that fixes a DFlash drafter's tensors and mathematics."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    target_layer_ids: tuple[int, ...]
    """Target layers read, counted from 0, in the order in which `fc` takes them."""
    mask_token_id: int
    block_size: int = 16
    """Anchor and masked slots."""
    num_target_layers: int | None = None
    layer_types: tuple[str, ...] = ()
    """`full_attention` or `sliding_attention` for every draft layer; all full when empty."""
    sliding_window: int | None = None
    is_causal: bool | None = None
    """Causal inside the block in every layer (or in none); None: sliding layers are causal, full ones are not."""
    rms_norm_eps: float = 1e-6
    rope_parameters: dict[str, Any] = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    max_position_embeddings: int = 32768
    attention_bias: bool = False
    draft_vocab_size: int | None = None
    """Rows of the drafter's own reduced head; None: the target's head over its whole vocabulary."""
    input_embedding_scale: float = 1.0
    output_multiplier: float = 1.0
    final_logit_softcapping: float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    """Keys of a published config that change nothing here; kept so that a round trip loses none."""

    def __post_init__(self) -> None:
        if not self.layer_types:
            object.__setattr__(self, "layer_types", (FULL,) * self.num_hidden_layers)
        _demand(len(self.layer_types) == self.num_hidden_layers, "layer_types", list(self.layer_types),
                f"one entry for each of the num_hidden_layers = {self.num_hidden_layers}")  # fmt: skip
        unknown = set(self.layer_types) - {FULL, SLIDING}
        _demand(not unknown, "layer_types", list(self.layer_types), f"{FULL} or {SLIDING}")
        _demand(SLIDING not in self.layer_types or (self.sliding_window or 0) > 0, "sliding_window",
                self.sliding_window, "at least 1, because layer_types has sliding layers")  # fmt: skip
        _demand(self.block_size >= 2, "block_size", self.block_size, "at least 2 (the anchor and one draft token)")
        _demand(len(self.target_layer_ids) > 0, "target_layer_ids", [], "a list of target layers")
        top = self.num_target_layers
        bad = [i for i in self.target_layer_ids if i < 0 or (top is not None and i >= top)]
        _demand(not bad, "target_layer_ids", list(self.target_layer_ids),
                f"layers 0 to {(top or 0) - 1}" if top is not None else "not negative")  # fmt: skip
        _demand(len(set(self.target_layer_ids)) == len(self.target_layer_ids), "target_layer_ids",
                list(self.target_layer_ids), "free of repeats")  # fmt: skip
        _demand(self.num_attention_heads % self.num_key_value_heads == 0, "num_attention_heads",
                self.num_attention_heads, f"a multiple of num_key_value_heads {self.num_key_value_heads}")  # fmt: skip
        _demand(self.head_dim % 2 == 0, "head_dim", self.head_dim, "even (its halves are rotated)")
        _demand(0 <= self.mask_token_id < self.vocab_size, "mask_token_id", self.mask_token_id,
                f"an id below vocab_size = {self.vocab_size}")  # fmt: skip

    def causal(self, layer: int) -> bool:
        """Whether slots of a block see only slots before them in this layer."""
        return self.layer_types[layer] == SLIDING if self.is_causal is None else self.is_causal

    def window(self, layer: int) -> int | None:
        """Sliding window of this layer, None for full attention."""
        return self.sliding_window if self.layer_types[layer] == SLIDING else None


def _demand(ok: bool, key: str, given: object, rule: str) -> None:
    if not ok:
        raise UserError(f"drafter config: {key} is {given!r}, but must be {rule}")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Taps for a new drafter, spread from the second to the third-from-last layer (paper, appendix A.1).

    Only for drafters that are made here: guessing for published ones was wrong more often than right.
    Raises UserError when the target has too few layers for that many different taps.
    """
    if num_taps == 1:
        return (num_target_layers // 2,)
    span = num_target_layers - 4
    ids = tuple(round(1 + i * span / (num_taps - 1)) for i in range(num_taps))
    if len(set(ids)) < num_taps or span < 1:
        raise UserError(
            f"a target of {num_target_layers} layers has no {num_taps} different layers to tap from 1 to "
            f"{num_target_layers - 3}; give target_layer_ids yourself"
        )
    return ids


def read_config(folder: Path) -> DFlashConfig:
    """The config of a checkpoint folder in the z-lab format. Raises UserError naming the key that is wrong."""
    path = folder / "config.json"
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"{folder} has no config.json: it is not a drafter folder") from error
    except json.JSONDecodeError as error:
        raise UserError(f"{path} is not JSON: {error}") from error
    if not isinstance(raw, dict) or not isinstance(raw.get("dflash_config") or {}, dict):
        raise UserError(f"{path} is not a drafter's config: it and dflash_config must hold keys and values")
    return config_from_dict(raw, str(path))


def config_from_dict(raw: dict[str, Any], where: str = "config.json") -> DFlashConfig:
    """Read any published spelling. Keys inside `dflash_config` win over the top level, as in z-lab and SGLang."""
    nested = raw.get("dflash_config") or {}
    _refuse_relatives(raw, nested, where)
    flat = {**raw, **{k: v for k, v in nested.items() if v is not None}}
    _refuse_unsupported(flat, where)
    muse = raw.get("model_type") == MUSE

    def need(key: str) -> Any:
        if flat.get(key) is None:
            raise UserError(
                f"{where}: key {key!r} is missing; add it (it is not guessed, a wrong guess costs acceptance)"
            )
        return flat[key]

    def number(key: str) -> int:
        value = need(key)
        if not isinstance(value, int):
            raise UserError(f"{where}: key {key!r} is {value!r}, but must be a whole number")
        return value

    def numbers(key: str) -> tuple[int, ...]:
        value = need(key)
        if not isinstance(value, list) or not all(isinstance(i, int) for i in value):
            raise UserError(f"{where}: key {key!r} is {value!r}, but must be a list of whole numbers")
        return tuple(value)

    hidden, heads = number("hidden_size"), number("num_attention_heads")
    causal = flat["is_causal"] if raw.get("is_causal") is None and "is_causal" in flat else raw.get("is_causal")
    if causal is None:
        causal = nested.get("causal")
    window = flat.get("swa_window_size") or flat.get("sliding_window")
    if muse:  # transformers' class: both sides of a block seen in every layer, distances up to the window included
        causal = False if causal is None else causal
        window = window + 1 if window else None
    layers = number("num_hidden_layers")
    vocab_size = int(flat.get("vocab_size") or number("mask_token_id") + 1)
    draft_vocab_size = flat.get("draft_vocab_size")
    return DFlashConfig(
        hidden_size=hidden,
        intermediate_size=number("intermediate_size"),
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=int(flat.get("num_key_value_heads") or heads),
        head_dim=int(flat.get("head_dim") or hidden // heads),
        vocab_size=vocab_size,
        target_layer_ids=numbers("target_layer_ids"),
        mask_token_id=number("mask_token_id"),
        block_size=number("block_size"),
        num_target_layers=flat.get("num_target_layers"),
        layer_types=_layer_types(flat, layers, SLIDING if muse or flat.get("use_swa") else FULL),
        sliding_window=window,
        is_causal=causal,
        rms_norm_eps=float(flat.get("rms_norm_eps") or 1e-6),
        rope_parameters=_rope_parameters(flat),
        max_position_embeddings=int(flat.get("max_position_embeddings") or 32768),
        attention_bias=bool(flat.get("attention_bias", False)),
        draft_vocab_size=None if draft_vocab_size == vocab_size else draft_vocab_size,
        input_embedding_scale=float(flat.get("input_embedding_scale") or 1.0),
        output_multiplier=float(flat.get("output_multiplier") or 1.0),
        final_logit_softcapping=flat.get("final_logit_softcapping"),
        extra={k: v for k, v in raw.items() if k in KEPT_KEYS},
    )


KEPT_KEYS = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "initializer_range", "attention_dropout")


def config_to_dict(config: DFlashConfig, dtype: str) -> dict[str, Any]:
    """The z-lab config.json, with both spellings of what engines look for in different places."""
    theta = config.rope_parameters["rope_theta"]
    scaling = {k: v for k, v in config.rope_parameters.items() if k != "rope_theta"}
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.target_layer_ids),
        "block_size": config.block_size,
    }
    if config.is_causal is not None:
        nested["causal"] = config.is_causal
    for key, neutral in (("input_embedding_scale", 1.0), ("output_multiplier", 1.0), ("final_logit_softcapping", None)):
        if getattr(config, key) != neutral:
            nested[key] = getattr(config, key)
    out: dict[str, Any] = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": config.block_size,
        "dflash_config": nested,
        "num_target_layers": config.num_target_layers,
        "layer_types": list(config.layer_types),
        "sliding_window": config.sliding_window,
        "use_sliding_window": SLIDING in config.layer_types,
        "max_window_layers": config.num_hidden_layers,
        "rope_theta": theta,
        "rope_scaling": None if scaling.get("rope_type", "default") == "default" else scaling,
        "rope_parameters": dict(config.rope_parameters),
        "hidden_act": "silu",
        "dtype": dtype,
        "use_cache": True,
        **config.extra,
    }
    for key in ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
                "head_dim", "max_position_embeddings", "rms_norm_eps", "attention_bias", "vocab_size"):  # fmt: skip
        out[key] = getattr(config, key)
    if config.is_causal is not None:
        out["is_causal"] = config.is_causal
    if config.draft_vocab_size is not None:
        out["draft_vocab_size"] = config.draft_vocab_size
    return out


def _layer_types(flat: dict[str, Any], layers: int, usual: str) -> tuple[str, ...]:
    given = flat.get("layer_types")
    return tuple(given) if given else (usual,) * layers


def _rope_parameters(flat: dict[str, Any]) -> dict[str, Any]:
    """Rotation of the draft itself: `rope_parameters`, or `rope_theta` with `rope_scaling`."""
    rope = dict(flat.get("rope_parameters") or {})
    if FULL in rope or SLIDING in rope:  # one set for each kind of layer
        sets = [rope[kind] for kind in (FULL, SLIDING) if rope.get(kind)]
        _demand(all(s == sets[0] for s in sets), "rope_parameters", rope, "the same for every kind of layer")
        rope = dict(sets[0])
    if "type" in rope:
        rope.setdefault("rope_type", rope.pop("type"))
    for key, value in (flat.get("rope_scaling") or {}).items():
        rope.setdefault("rope_type" if key == "type" else key, value)
    rope.setdefault("rope_type", "default")
    rope.setdefault("rope_theta", float(flat.get("rope_theta") or 10000.0))
    factor = rope.pop("partial_rotary_factor", None) or flat.get("partial_rotary_factor") or 1.0
    if factor != 1.0:
        raise UserError(
            f"drafter config: partial_rotary_factor is {factor}, but DFlash drafters rotate the whole head (factor 1); "
            "the key was probably copied from the target: set it to what the drafter was trained with"
        )
    rope.pop("mrope_section", None)
    return rope


def _refuse_relatives(raw: dict[str, Any], nested: dict[str, Any], where: str) -> None:
    """Raise UserError for drafters of other families, which share tensor names but not the mathematics."""
    names = [str(a) for a in raw.get("architectures") or []]
    described = " ".join([*names, str(nested.get("projector_type", raw.get("projector_type", "")))]).lower()
    for family, keys in OTHER_FAMILIES.items():
        telling = [k for k in keys if k in raw or k in nested]
        if family.lower() in described or telling:
            sign = f"key {telling[0]!r}" if telling else f"architectures {names}"
            raise UserError(
                f"{where}: {sign} says this is a {family} drafter, which is not supported; give a DFlash one"
            )
    if "speculators_model_type" in raw:
        kind = raw["speculators_model_type"]
        raise UserError(f"{where}: speculators_model_type {kind!r}: convert it to the z-lab folder format first")
    if names and not any(name in ARCHITECTURES for name in names):
        raise UserError(f"{where}: architectures is {names}, but a DFlash drafter says one of {list(ARCHITECTURES)}")


def _refuse_unsupported(flat: dict[str, Any], where: str) -> None:
    """Raise UserError for keys that would silently mean another network."""
    for key, neutral in NEUTRAL.items():
        if flat.get(key) not in neutral:
            raise UserError(f"{where}: {key} is {flat[key]!r}, which is not supported (only {neutral[-1]!r} is)")
