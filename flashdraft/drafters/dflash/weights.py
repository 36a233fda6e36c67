"""Read and write DFlash checkpoint folders: names of tensors, their aliases, and what to leave alone."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from flashdraft.core import UserError
from flashdraft.drafters.dflash.config import config_to_dict, read_config
from flashdraft.drafters.dflash.model import DFlashModel

Model = TypeVar("Model", bound=DFlashModel)

ALIASES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^encoder\.fc\."), "fc."),
    (re.compile(r"^encoder\.output_norm_enc\."), "hidden_norm."),
    (re.compile(r"^midlayer\."), "layers.0."),
)
"""Other names under which published drafters store the same tensors."""

FROM_TARGET = re.compile(r"^(embed_tokens\.weight|mask_embedding|t2d|verifier_.*|rotary_emb\..*)$")
"""Tensors that some exporters store although target or config determine them: not read."""


def load(cls: type[Model], source: str | Path, *, device: torch.device, dtype: torch.dtype | None) -> Model:
    """A drafter of class `cls` from a folder or hub id, in its stored dtype unless another is given.

    Raises UserError for a missing, unexpected or misshapen tensor, naming it and both shapes.
    """
    folder = local_folder(source)
    config = read_config(folder)
    tensors = _read_tensors(folder)
    _split_fused(tensors, config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim)
    if config.draft_vocab_size is None:
        # A stored full head is a copy of the target's; the target's own is used.
        tensors.pop("lm_head.weight", None)
        tensors.pop("d2t", None)
    with torch.device("meta"):
        model = cls(config)
    wanted = {name: tuple(t.shape) for name, t in model.state_dict().items()}
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        raise UserError(
            f"{folder}: the weights do not fit config.json; missing tensors: {missing or 'none'}; "
            f"unexpected tensors: {unexpected or 'none'}"
        )
    for name, shape in wanted.items():
        if tuple(tensors[name].shape) != shape:
            raise UserError(f"{folder}: tensor {name} has shape {tuple(tensors[name].shape)}, config.json says {shape}")
    stored = tensors["fc.weight"].dtype
    placed = {n: t.to(device, (dtype or stored) if t.is_floating_point() else None) for n, t in tensors.items()}
    model.load_state_dict(placed, assign=True)
    return model.eval()


def save(model: DFlashModel, folder: Path) -> None:
    """Write the folder so that a killed run leaves the old files or the new ones."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    config = config_to_dict(model.settings, str(model.dtype).removeprefix("torch."))
    weights, text = folder / "model.safetensors", folder / "config.json"
    save_file(tensors, folder / "model.safetensors.new", metadata={"format": "pt"})
    (folder / "config.json.new").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    (folder / "model.safetensors.new").replace(weights)
    (folder / "config.json.new").replace(text)


def local_folder(source: str | Path) -> Path:
    """The folder itself, or the local snapshot of a hub id."""
    if Path(source).is_dir():
        return Path(source)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", str(source)):
        raise UserError(f"drafter {str(source)!r}: no such folder, and not a hub id (owner/name)")
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(str(source), allow_patterns=["*.json", "*.safetensors"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise UserError(f"drafter {str(source)!r}: no such folder, and the hub gave nothing: {error}") from error


def _read_tensors(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise UserError(f"{folder} has no *.safetensors file (other formats can run code on loading and are not read)")
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():
                    short = name
                    for pattern, replacement in ALIASES:
                        short = pattern.sub(replacement, short)
                    if not FROM_TARGET.match(short):
                        tensors[short] = stored.get_tensor(name)
        except SafetensorError as error:
            raise UserError(f"{file} is not a whole safetensors file (fetch or save it again): {error}") from error
    return tensors


def _split_fused(tensors: dict[str, torch.Tensor], wide_q: int, wide_kv: int) -> None:
    """Some exporters fuse q, k and v into one matrix (and gate and up into another)."""
    for name in [n for n in tensors if ".qkv_proj." in n]:
        q, k, v = tensors.pop(name).split([wide_q, wide_kv, wide_kv], dim=0)
        for part, value in (("q_proj", q), ("k_proj", k), ("v_proj", v)):
            tensors[name.replace("qkv_proj", part)] = value.contiguous()
    for name in [n for n in tensors if ".gate_up_proj." in n]:
        gate, up = tensors.pop(name).chunk(2, dim=0)
        tensors[name.replace("gate_up_proj", "gate_proj")] = gate.contiguous()
        tensors[name.replace("gate_up_proj", "up_proj")] = up.contiguous()
