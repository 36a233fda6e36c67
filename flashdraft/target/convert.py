"""From a GGUF file to a model folder: dequantized once, so that every later start reads plain safetensors."""

from __future__ import annotations

import io
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch


def convert_gguf(gguf: Path, out: Path, dtype: torch.dtype, tell: Callable[[float], object]) -> None:
    """Write model and tokenizer of a GGUF file into the folder `out`, with its chat template and special tokens.

    `tell` hears the share that is done, from 0 to 1.
    """
    with redirect_stderr(io.StringIO()):  # transformers draws bars of its own
        from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

        source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
        # A model left in its quantized form does not save.
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
        tell(0.3)
        model.save_pretrained(out)
        tell(0.4)
        AutoTokenizer.from_pretrained(**source).save_pretrained(out)
        tell(1.0)
