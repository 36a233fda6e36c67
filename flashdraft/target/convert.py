"""From a GGUF file to a model folder: dequantized once, so that every later start reads plain safetensors."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError


def convert_gguf(gguf: Path, out: Path, dtype: torch.dtype, tell: Callable[[float], object]) -> None:
    """Write model and tokenizer of a GGUF file into the folder `out`, with its chat template and special tokens.

    `tell` hears the share that is done, from 0 to 1.
    """
    # Imported before the stream is changed: transformers' log keeps the one that it finds, for the whole process.
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    source: dict[str, Any] = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    with redirect_stderr(io.StringIO()):  # transformers draws bars of its own
        # A model left in its quantized form does not save.
        model = AutoModelForCausalLM.from_pretrained(
            **source, dtype=dtype, quantization_config=GgufConfig(dequantize=True)
        )
        tell(0.3)
        try:
            model.save_pretrained(out)
        except SafetensorError as error:  # a full disk, for one: give it the type that Python's own writes raise
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), str(error)) from error
        tell(0.4)
        AutoTokenizer.from_pretrained(**source).save_pretrained(out)
        tell(1.0)
