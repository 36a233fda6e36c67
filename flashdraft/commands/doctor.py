"""`flashdraft doctor`: what this machine can do, and whether drafting is lossless on it."""

from __future__ import annotations

import json
import platform
import sys
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from flashdraft.core import SamplingParams
from flashdraft.device import choose, load_average
from flashdraft.target.zoo import list_models

PACKAGES = ("flashdraft", "torch", "transformers", "tokenizers", "safetensors", "gguf")
ROUND_TRIP_TOKENS = 24


@dataclass(frozen=True, kw_only=True)
class Args:
    """Show device, types, threads, load, versions, attention back ends and cached models, then decode with a random
    tiny target and two drafters and compare with plain decoding. Exit code 1 when an answer differs."""

    device: str | None = None
    """cpu, cuda, cuda:1 or mps; the best one there is by default."""

    json: bool = False
    """Print one JSON object instead of a table."""


def run(args: Args) -> int:
    facts = machine(args.device)
    trips = round_trips(args.device)
    if args.json:
        print(json.dumps({**facts, "round_trips": trips}))
    else:
        table = Table(show_header=False, box=None)
        for name, value in facts.items():
            table.add_row(name, str(value))
        for name, equal in trips.items():
            table.add_row(f"round trip, {name}", "ids equal to plain decoding" if equal else "[red]ids DIFFER[/red]")
        Console().print(table)
    if not all(trips.values()):
        print("drafted answers differ from plain ones on this machine: please report it", file=sys.stderr)
        return 1
    return 0


def machine(device: str | None) -> dict[str, Any]:
    """What matters here for speed and for reports."""
    place = choose(device)
    busy = load_average()
    return {
        "python": f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        **{name: _version(name) for name in PACKAGES},
        "device": str(place.device),
        "dtype": place.reason,
        "threads": torch.get_num_threads(),
        "load": "unknown" if busy is None else f"{busy:.2f}" + (" (busy: timings mislead)" if busy > 1 else ""),
        "cpu capability": torch.backends.cpu.get_cpu_capability(),
        "oneDNN": "yes" if torch.backends.mkldnn.is_available() else "no",
        "attention": ", ".join(_attention_backends(place.device)),
        "models cached": ", ".join(m.name for m in list_models() if m.cached) or "none",
    }


@torch.inference_mode()
def round_trips(device: str | None) -> dict[str, bool]:
    """Drafter -> whether its greedy and its sampled answers equal the plain ones, for a random tiny pair in float32."""
    from flashdraft.decode.plain import plain
    from flashdraft.decode.rounds import given, rounds
    from flashdraft.decode.row import Request, Row
    from flashdraft.drafters.dflash.drafter import DFlashDrafter
    from flashdraft.drafters.dflash.tiny import tiny_drafter_model
    from flashdraft.drafters.lookup import LookupDrafter
    from flashdraft.target.tiny import tiny_target

    target = tiny_target().to(choose(device).device)
    drafters = {
        "DFlash": DFlashDrafter(tiny_drafter_model(target).to(target.device)),
        "prompt lookup": LookupDrafter(),
    }
    equal = {}
    for name, drafter in drafters.items():
        equal[name] = True
        for temperature in (0.0, 1.0):
            params = SamplingParams(max_new_tokens=ROUND_TRIP_TOKENS, temperature=temperature, seed=1)
            request = Request((11, 22, 33, 11, 22), params)
            alone, drafted = Row(request, target), Row(request, target)
            list(plain(target, alone))
            list(rounds(target, drafter, given([drafted])))
            equal[name] &= alone.answer.ids == drafted.answer.ids
    return equal


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _attention_backends(device: torch.device) -> list[str]:
    names = ["sdpa", "eager"]
    if device.type == "cuda":
        names += ["flash"] if torch.backends.cuda.flash_sdp_enabled() else []
        names += ["memory efficient"] if torch.backends.cuda.mem_efficient_sdp_enabled() else []
    return names
