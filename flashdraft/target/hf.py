"""Any Hugging Face causal language model as a Target: the only file that knows transformers' model classes.

The model's own forward does all the work, so that every family keeps its scalings, soft caps and norms. We bring the
cache, the mask and the positions, read the tapped layers through hooks, and pick in front of the head the slots whose
logits are wanted.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils import logging as hf_logging

from flashdraft.cache import CacheWindow, KVCache
from flashdraft.core import UserError
from flashdraft.device import Placement
from flashdraft.fast import speed_up
from flashdraft.target.base import Target, TargetOutput

ROLLBACK_KINDS = ("full_attention", "sliding_attention")
"""Kinds of layers whose past is keys and values only, so that rejected tokens can be taken back."""


class HfTarget(Target):
    """A `transformers` causal language model.

    Raises UserError for models whose past cannot be rolled back (recurrent or hybrid layers, shared keys).
    """

    def __init__(self, model: PreTrainedModel, name: str | None = None, num_tokens: int | None = None) -> None:
        """`num_tokens`: size of the tokenizer, for models whose head is padded beyond it."""
        self.model = model.eval()
        text = model.config.get_text_config()
        self.name = name or str(model.config.name_or_path or type(model).__name__)
        self.device = model.device
        self.dtype = model.dtype
        self.num_layers = int(text.num_hidden_layers)
        self.hidden_size = int(text.hidden_size)
        self.context_length = _context_length(text)
        self.eos_token_ids = _eos_token_ids(model)
        self._kinds = layer_kinds(model)
        self._window = getattr(text, "sliding_window", None)
        attention = text._attn_implementation
        if attention not in ("sdpa", "eager"):
            raise UserError(
                f"{self.name}: attention {attention!r} takes no mask of our own; load the model with "
                "attn_implementation='sdpa'"
            )
        self._additive_mask = attention == "eager"
        self._cache_argument = cache_argument(model)
        head = model.get_output_embeddings()
        if head is None:
            raise UserError(f"{self.name}: {type(model).__name__} has no language model head; give a causal model")
        self._head: nn.Module = head
        self.vocab_size = min(int(head.weight.shape[0]), num_tokens or int(head.weight.shape[0]))
        self.embedding_rows = int(model.get_input_embeddings().weight.shape[0])
        decoder, layers = find_decoder(model)
        # The last entry of transformers' hidden_states is normed: it is the output of the whole decoder.
        self._tappable = [*layers[:-1], decoder]

    def to(self, device: torch.device) -> HfTarget:
        """The same target on another device."""
        return HfTarget(self.model.to(device), self.name, self.vocab_size)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        table: torch.Tensor = self.model.get_input_embeddings().weight
        return nn.functional.embedding(ids.to(table.device), table)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head(hidden)
        return logits[..., : self.vocab_size]

    def new_cache(self) -> KVCache:
        return KVCache(self.num_layers)

    def forward(
        self,
        ids_BQ: torch.Tensor,
        cache: KVCache,
        rows: slice,
        *,
        taps: tuple[int, ...] = (),
        keep_BS: torch.Tensor | None = None,
    ) -> TargetOutput:
        window = cache.window(rows, ids_BQ.shape[1])
        positions_BQ = window.positions(self.device)
        if self.context_length is not None:
            # Slots past the end belong to tokens that no row may emit; their logits are thrown away.
            positions_BQ = positions_BQ.clamp(max=self.context_length - 1)
        with self._reading(taps, keep_BS) as tapped:
            out = self.model(
                input_ids=ids_BQ,
                position_ids=positions_BQ,
                attention_mask=self._mask(window),
                use_cache=True,
                **{self._cache_argument: _CacheView(window)},
            )
        features_BQF = torch.cat([tapped[i] for i in taps], dim=-1) if taps else None
        return TargetOutput(out.logits[..., : self.vocab_size], features_BQF)

    def _mask(self, window: CacheWindow) -> torch.Tensor | dict[str, torch.Tensor] | None:
        """Four-dimensional masks, which every family takes as they are: one, or one for each kind of layer.

        None where all rows are equally long and a step or a whole prompt is read: transformers then makes the plain
        causal mask itself, or leaves it out, which is faster.
        """
        if window.even and (window.new == 1 or window.span == window.new):
            return None
        masks = {kind: self._mask_of(kind, window) for kind in self._kinds}
        return masks if len(masks) > 1 else next(iter(masks.values()))

    def _mask_of(self, kind: str, window: CacheWindow) -> torch.Tensor:
        seen = window.mask(self.device, window=self._window if kind == "sliding_attention" else None)
        if seen is None:
            seen = torch.ones(len(window.starts), window.new, window.span, dtype=torch.bool, device=self.device)
        mask_B1QK = seen[:, None]
        if not self._additive_mask:
            return mask_B1QK
        lowest = torch.finfo(self.dtype).min
        return torch.zeros(mask_B1QK.shape, dtype=self.dtype, device=self.device).masked_fill(~mask_B1QK, lowest)

    @contextmanager
    def _reading(self, taps: tuple[int, ...], keep_BS: torch.Tensor | None) -> Iterator[dict[int, torch.Tensor]]:
        """Hooks for one pass: outputs of the tapped layers come into the yielded dict, and only the slots `keep_BS`
        reach the head. Nothing stays on the model, which belongs to the user."""
        tapped: dict[int, torch.Tensor] = {}

        def listener(layer: int) -> Callable[[nn.Module, Any, Any], None]:
            def listen(_module: nn.Module, _args: Any, output: Any) -> None:
                tapped[layer] = output if isinstance(output, torch.Tensor) else output[0]

            return listen

        def pick_slots(_module: nn.Module, args: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
            assert keep_BS is not None
            hidden_BQD, *rest = args
            return (hidden_BQD.gather(1, keep_BS[..., None].expand(-1, -1, hidden_BQD.shape[-1])), *rest)

        hooks = [self._tappable[i].register_forward_hook(listener(i)) for i in set(taps)]
        if keep_BS is not None:
            hooks.append(self._head.register_forward_pre_hook(pick_slots))
        try:
            yield tapped
        finally:
            for hook in hooks:
                hook.remove()


class _CacheView(Cache):  # type: ignore[misc]
    """Our cache behind the few methods that transformers' models call."""

    def __init__(self, window: CacheWindow) -> None:
        super().__init__(layers=[])
        self._window = window

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self._window.update(layer_idx, key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._window.span - self._window.new

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return self.get_seq_length(layer_idx)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self._window.span, 0


def load_target(
    source: str,
    placement: Placement,
    *,
    name: str | None = None,
    trust_remote_code: bool = False,
    fast: bool = True,
    notes: Path | None = None,
) -> tuple[HfTarget, PreTrainedTokenizerBase]:
    """A model folder or hub id, in memory, with its tokenizer; `fast` brings in the CPU path (see flashdraft.fast),
    whose timings are kept in the folder `notes`.

    Raises UserError with what to do.
    """
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=trust_remote_code)
        refuse_recurrent(config, name or source)
        # Soft-capped attention scores exist in the eager path only.
        eager = getattr(config.get_text_config(), "attn_logit_softcapping", None) is not None
        with _no_bars():
            model, report = AutoModelForCausalLM.from_pretrained(
                source,
                dtype=placement.dtype,
                attn_implementation="eager" if eager else "sdpa",
                trust_remote_code=trust_remote_code,
                ignore_mismatched_sizes=True,  # reported below, by name
                output_loading_info=True,
            )
        _refuse_random_weights(report, name or source)
        model = model.to(placement.device)
        if fast:
            speed_up(model, notes)
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code)
    except (OSError, ValueError, ImportError, SafetensorError) as error:
        if isinstance(error, UserError):
            raise
        where = "folder" if Path(source).is_dir() else "hub id"
        raise UserError(f"cannot load the target from {where} {source!r}: {error}") from error
    # Not len(tokenizer): ids may have holes, and tokens above them can be generated like any other.
    return HfTarget(model, name or source, max(tokenizer.get_vocab().values()) + 1), tokenizer


@contextmanager
def _no_bars() -> Iterator[None]:
    """Keep transformers' bars for work of a second out of an answer's terminal."""
    shown = hf_logging.is_progress_bar_enabled()
    hf_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            hf_logging.enable_progress_bar()


def _refuse_random_weights(report: dict[str, Any], name: str) -> None:
    """Raise UserError for tensors that transformers filled with random numbers, for which it only logs a warning."""
    missing = sorted(report["missing_keys"])
    misshapen = sorted(str(key) for key in report["mismatched_keys"])
    if missing or misshapen:
        raise UserError(
            f"{name}: the weights do not fit config.json; {len(missing)} missing tensors {missing[:3]}, "
            f"{len(misshapen)} of another shape {misshapen[:3]}"
        )


def refuse_recurrent(config: Any, name: str) -> None:
    """Raise UserError when the past of a model of this config cannot be rolled back after a rejected draft."""
    text = config.get_text_config()
    for layer, kind in enumerate(getattr(text, "layer_types", None) or ()):
        if kind not in ROLLBACK_KINDS:
            raise UserError(
                f"{name}: layer {layer} is of type {kind!r}, whose state cannot be rolled back when a draft is "
                f"rejected; targets may have layers of type {' and '.join(ROLLBACK_KINDS)} only"
            )
    if "local" in (getattr(text, "attention_layers", None) or ()):
        raise UserError(f"{name}: its 'local' attention layers make their own masks, wrong for rows of unequal length")
    if getattr(text, "alibi", False) or text.model_type == "bloom":
        raise UserError(f"{name}: its position bias (ALiBi) needs padded rows, which are not supported")
    if getattr(text, "num_kv_shared_layers", 0):
        raise UserError(f"{name}: its layers share keys and values (num_kv_shared_layers), which is not supported yet")


def layer_kinds(model: PreTrainedModel) -> tuple[str, ...]:
    """The distinct kinds of attention layers. Raises UserError for kinds that cannot be rolled back."""
    config = model.config
    refuse_recurrent(config, str(config.name_or_path or type(model).__name__))
    if getattr(config, "is_decoder", None) is False:
        raise UserError(f"{type(model).__name__}: is_decoder is False in its config, so its tokens see later ones")
    if getattr(model, "_is_stateful", False):
        raise UserError(
            f"{type(model).__name__} keeps a recurrent state, which cannot be rolled back when a draft is rejected; "
            "give a model whose layers are all attention"
        )
    text = config.get_text_config()
    kinds = getattr(text, "layer_types", None)
    if kinds:
        return tuple(dict.fromkeys(kinds))
    return ("sliding_attention",) if getattr(text, "sliding_window", None) is not None else ("full_attention",)


def find_decoder(model: PreTrainedModel) -> tuple[nn.Module, nn.ModuleList]:
    """The module that runs the text layers and norms what comes out, and the list of these layers, whatever the family
    calls them. A vision tower may have as many layers: only the text decoder is searched."""
    count = model.config.get_text_config().num_hidden_layers
    for owner in model.get_decoder().modules():
        for part in owner.children():
            if isinstance(part, nn.ModuleList) and len(part) == count:
                return owner, part
    raise UserError(f"{type(model).__name__}: found no list of its {count} decoder layers to read features from")


def cache_argument(model: PreTrainedModel) -> str:
    """What the model's forward calls its cache: transformers renamed it, and the old name warns."""
    parameters = inspect.signature(model.forward).parameters
    for name in ("cache", "past_key_values"):
        if name in parameters:
            return name
    raise UserError(f"{type(model).__name__} keeps no keys and values of past tokens, so nothing can be drafted for it")


def _context_length(text: Any) -> int | None:
    """Positions that the model can take. LongRoPE turns all keys anew when a text outgrows its original length: what is
    cached is wrong from there on (transformers throws it away), so the context ends there."""
    rope = getattr(text, "rope_parameters", None) or {}
    if rope.get("rope_type") == "longrope":
        return rope.get("original_max_position_embeddings") or getattr(text, "original_max_position_embeddings", None)
    return getattr(text, "max_position_embeddings", None)


def _eos_token_ids(model: PreTrainedModel) -> tuple[int, ...]:
    """End tokens as a tuple; the generation config, where it says so, has the last word as in transformers."""
    generation = getattr(model, "generation_config", None)
    eos = getattr(generation, "eos_token_id", None)
    if eos is None:
        eos = model.config.get_text_config().eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, (list, tuple)) else (int(eos),)
