"""FlashDraft: the same answers from a language model, sooner.

engine = flashdraft.load("smollm2-135m")
for piece in engine.stream("Why is the sky blue?"):
    print(piece.text, end="", flush=True)
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashdraft.core import Completion, Piece, SamplingParams, Stats, UserError
    from flashdraft.decode.compat import DFlashDraftModel
    from flashdraft.decode.engine import Engine, load

__version__ = "0.1.0"
__all__ = ["Completion", "DFlashDraftModel", "Engine", "Piece", "SamplingParams", "Stats", "UserError", "load"]

_HOMES = {
    "Completion": "core",
    "DFlashDraftModel": "decode.compat",
    "Engine": "decode.engine",
    "Piece": "core",
    "SamplingParams": "core",
    "Stats": "core",
    "UserError": "core",
    "load": "decode.engine",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that `import flashdraft` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'flashdraft' has no attribute {name!r}")
    return getattr(import_module(f"flashdraft.{_HOMES[name]}"), name)
