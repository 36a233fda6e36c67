"""Device, dtype, threads and clocks: the only file that says cuda or mps."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

import torch

from flashdraft.core import UserError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Placement:
    """Where a model runs, in which type, and why."""

    device: torch.device
    dtype: torch.dtype
    reason: str


def choose(device: str | None = None, dtype: str | torch.dtype | None = None) -> Placement:
    """Where to run when the user left something open. Raises UserError for what this machine cannot do."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise UserError(f"device {device!r} is not known to torch; give cpu, cuda, cuda:0 or mps") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise UserError(f"device {device!r} was asked for, but torch sees no CUDA device; give --device cpu")
    if place.type == "mps" and not torch.backends.mps.is_available():
        raise UserError(f"device {device!r} was asked for, but torch sees no Apple GPU; give --device cpu")
    if isinstance(dtype, torch.dtype):
        return Placement(place, dtype, "dtype given")
    if dtype is not None:
        if dtype not in DTYPES:
            raise UserError(f"dtype {dtype!r} is not one of {', '.join(DTYPES)}")
        return Placement(place, DTYPES[dtype], "dtype given")
    if place.type == "cuda" and torch.cuda.is_bf16_supported():
        return Placement(place, torch.bfloat16, "bfloat16: this GPU computes in it")
    if place.type == "cpu":
        return Placement(place, torch.float32, "float32: on a CPU a block costs least over a step, and ids are exact")
    return Placement(place, torch.float16, "float16: this GPU has no fast bfloat16")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done what was asked of it, so that a clock read means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def now(device: torch.device) -> float:
    """Seconds on a monotonic clock, after the device has caught up."""
    synchronize(device)
    return time.perf_counter()


def fresh_seed() -> int:
    """A seed for a request that gave none."""
    return int.from_bytes(os.urandom(7), "little")


def load_average() -> float | None:
    """Mean number of running processes over the last minute, where the system tells."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
