"""The CPU path: the same modules with faster kernels, each chosen by a short measurement and checked against its twin.

A block of a few rows meets the worst spot of a stock matrix product: too few rows for a blocked kernel, too many for a
vector one. oneDNN does better on weights that were reordered once. Which is faster, and from how many rows on,
depends on the machine and on the shape, so it is measured when a model is loaded: what does not win is not replaced.
"""

from __future__ import annotations

import hashlib
import json
import platform
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from flashdraft.device import load_average

ROW_COUNTS = (1, 2, 4, 8, 16)
"""Rows of the products that decoding makes: a plain step, blocks, small batches."""

MOST_ROWS = 64  # beyond, stock kernels are at home
GAIN = 0.95  # a reordered weight costs its memory a second time: it must win by more than noise
SECONDS_PER_TIMING = 0.02  # at most, beyond the fewest calls
FEWEST_CALLS = 4


class PackedLinear(nn.Module):
    """A linear layer that also holds its weight reordered for oneDNN, for products of `fewest` to MOST_ROWS rows."""

    def __init__(self, linear: nn.Linear, packed: torch.Tensor, fewest: int) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.packed = packed
        self.fewest = fewest

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.numel() // self.in_features
        if not self.fewest <= rows <= MOST_ROWS or torch.is_grad_enabled():
            return F.linear(x, self.weight, self.bias)
        return packed_product(x, self.packed, self.bias)


class FusedRMSNorm(nn.Module):
    """A root mean square norm as one kernel instead of seven."""

    def __init__(self, weight: nn.Parameter, eps: float) -> None:
        super().__init__()
        self.weight = weight
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


@dataclass
class Report:
    """What was replaced."""

    linears: dict[tuple[int, int], int] = field(default_factory=dict)
    """(in, out) -> rows from which the reordered weight is used."""
    norms: int = 0
    extra_bytes: int = 0
    """Memory of the reordered weights."""


def speed_up(model: nn.Module, notes: Path | None = None) -> Report:
    """Replace modules of a float32 model on the CPU by faster twins, in place. Others are left as they are.

    Timings are kept in the folder `notes`, so that the next start need not take them again.
    """
    report = Report()
    first = next(model.parameters())
    if first.device.type != "cpu" or first.dtype != torch.float32:
        return report
    with torch.inference_mode(False), torch.no_grad():
        _fuse_norms(model, report)
        if torch.backends.mkldnn.is_available():
            _pack_linears(model, report, notes)
    return report


def pack(linear: nn.Linear) -> torch.Tensor:
    """The weight, reordered for products with a block of rows."""
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), ROW_COUNTS[-2])
    return packed


def packed_product(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x [..., in] times a reordered weight, plus bias: what PyTorch's own compiler uses for frozen weights."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out


def _pack_linears(model: nn.Module, report: Report, notes: Path | None) -> None:
    places: dict[tuple[int, int], list[tuple[nn.Module, str, nn.Linear]]] = defaultdict(list)
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                places[child.in_features, child.out_features].append((parent, name, child))
    file = None if notes is None else notes / f"kernels-{_machine()}.json"
    known = read_note(file)
    before = dict(known)
    for shape, found in places.items():
        linears = [linear for *_, linear in found]
        key = f"{shape[0]} {shape[1]} {len(found)}"
        if key in known and known[key] is None:
            continue
        packed = [pack(linear) for linear in linears]
        if key not in known:
            known[key] = _fewest_rows(linears, packed)
        fewest = known[key]
        if fewest is None:
            continue
        report.linears[shape] = fewest
        for (parent, name, linear), reordered in zip(found, packed, strict=True):
            setattr(parent, name, PackedLinear(linear, reordered, fewest))
            report.extra_bytes += linear.weight.nbytes
    if known != before:
        write_note(file, known)


def _machine() -> str:
    """What timings of kernels depend on."""
    parts = (platform.machine(), torch.backends.cpu.get_cpu_capability(), torch.get_num_threads(), torch.__version__)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]


def read_note(file: Path | None) -> dict[str, Any]:
    """Timings of an earlier start; empty when there are none, or none that can be read."""
    if file is None:
        return {}
    try:
        return dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return {}


def write_note(file: Path | None, note: Mapping[str, Any]) -> None:
    """Keep timings for later starts: none taken on a busy machine, for a note is for ever. A folder that cannot be
    written only means that the next start times again."""
    busy = load_average()
    if file is None or (busy is not None and busy > torch.get_num_threads() / 2):
        return
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(note), encoding="utf-8")
    except OSError:
        pass


def _fewest_rows(linears: Sequence[nn.Linear], packed: Sequence[torch.Tensor]) -> int | None:
    """Rows from which on reordered weights win at every measured count; None if they never do."""
    fewest = None
    for rows in reversed(ROW_COUNTS):
        x = torch.randn(rows, linears[0].in_features)
        stock = _time([partial(F.linear, x, m.weight, m.bias) for m in linears])
        ours = _time([partial(packed_product, x, p, m.bias) for m, p in zip(linears, packed, strict=True)])
        if ours > GAIN * stock:
            break
        fewest = rows
    return fewest


def _time(calls: Sequence[Callable[[], torch.Tensor]]) -> float:
    """Median seconds of a call. The layers of a shape take turns, so that their weights come from memory as they do
    in decoding, and not from a cache."""
    calls[-1]()
    taken: list[float] = []
    end = time.perf_counter() + SECONDS_PER_TIMING
    while len(taken) < FEWEST_CALLS or time.perf_counter() < end:
        begin = time.perf_counter()
        calls[len(taken) % len(calls)]()
        taken.append(time.perf_counter() - begin)
    return sorted(taken)[len(taken) // 2]


def _fuse_norms(model: nn.Module, report: Report) -> None:
    """Fuse every norm that computes the plain formula (some families add one to the weight: those stay)."""
    for parent in model.modules():
        for name, child in parent.named_children():
            weight = getattr(child, "weight", None)
            eps = getattr(child, "variance_epsilon", getattr(child, "eps", None))
            if not type(child).__name__.endswith("RMSNorm") or not isinstance(weight, nn.Parameter) or eps is None:
                continue
            fused = FusedRMSNorm(weight, float(eps))
            x = torch.randn(3, weight.shape[0])
            if torch.allclose(fused(x), child(x), rtol=1e-6, atol=1e-6):
                setattr(parent, name, fused)
                report.norms += 1
