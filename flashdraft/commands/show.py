"""How commands show numbers."""

from __future__ import annotations

import sys
from typing import Any

import torch

from flashdraft.core import Stats
from flashdraft.device import load_average


def stats_line(stats: Stats, tokens: int) -> str:
    """Speed of an answer in one line."""
    parts = [f"{tokens} tokens", f"{stats.tokens_per_second:.1f} tokens/s"]
    if stats.drafted:
        parts.append(f"tau {stats.tau:.2f}")
    parts.append(f"first token {stats.time_to_first_token:.2f} s")
    return ", ".join(parts)


def stats_record(stats: Stats) -> dict[str, Any]:
    """The same for programs."""
    return {
        "rounds": stats.rounds,
        "drafted": stats.drafted,
        "accepted": stats.accepted,
        "accepted_per_slot": stats.accepted_per_slot,
        "tau": round(stats.tau, 4),
        "tokens_per_second": round(stats.tokens_per_second, 3),
        "time_to_first_token": round(stats.time_to_first_token, 4),
        "decode_time": round(stats.decode_time, 4),
    }


def warn_if_busy() -> None:
    """Timings on a busy machine mean little: say so."""
    busy, threads = load_average(), torch.get_num_threads()
    if busy is not None and busy > threads / 2:
        print(
            f"warning: the machine is busy (load {busy:.1f}, {threads} threads); timings are not to be trusted",
            file=sys.stderr,
        )
