"""Shared by all tests: offline, tiny random targets, and the answers that plain decoding gives."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

from flashdraft.core import Completion, SamplingParams
from flashdraft.decode.plain import plain
from flashdraft.decode.rounds import given, rounds
from flashdraft.decode.row import Request, Row
from flashdraft.drafters.base import Drafter
from flashdraft.target.hf import HfTarget
from flashdraft.target.tiny import FAMILIES, tiny_target

SHARED = Path(__file__).resolve().parents[2] / "shared"
"""Prompts and benchmark questions beside the checkout; tests that read them skip where they are absent."""

Ids = tuple[int, ...]

torch.set_num_threads(1)  # tiny models: a second thread only waits


@pytest.fixture(scope="session")
def target() -> HfTarget:
    """The tiny target that most tests use."""
    return tiny_target()


@pytest.fixture(scope="session", params=list(FAMILIES))
def family_target(request: pytest.FixtureRequest) -> HfTarget:
    """A tiny target of every family."""
    return tiny_target(request.param)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    if not SHARED.is_dir():
        pytest.skip(f"no shared data at {SHARED}")
    return SHARED / "data"


def random_prompts(lengths: Sequence[int], vocab_size: int = 97, seed: int = 0) -> list[Ids]:
    """Prompts of the given lengths; ids below 6 are left out (tests use them as end or mask tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return [tuple(torch.randint(6, vocab_size, (n,), generator=generator).tolist()) for n in lengths]


def answer_plain(target: HfTarget, prompt: Ids, params: SamplingParams, tokenizer: object = None) -> Completion:
    """The judge: decoding without a drafter."""
    row = Row(Request(prompt, params), target, tokenizer)  # type: ignore[arg-type]
    for _ in plain(target, row):
        pass
    return row.completion()


def answer_drafted(
    target: HfTarget,
    drafter: Drafter,
    prompts: Sequence[Ids],
    params: SamplingParams | Sequence[SamplingParams],
    *,
    max_rows: int = 1,
    tokenizer: object = None,
) -> list[Completion]:
    """The same through rounds, `max_rows` at a time."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    rows = [Row(Request(p, s), target, tokenizer) for p, s in zip(prompts, each, strict=True)]  # type: ignore[arg-type]
    for _ in rounds(target, drafter, given(rows), max_rows):
        pass
    return [row.completion() for row in rows]


@pytest.fixture(scope="session")
def true_answers(target: HfTarget) -> Callable[[Sequence[Ids], int], dict[Ids, Ids]]:
    """Greedy answers of the tiny target by plain decoding, for scripted drafters."""

    def answers(prompts: Sequence[Ids], count: int) -> dict[Ids, Ids]:
        params = SamplingParams(max_new_tokens=count, ignore_eos=True)
        return {p: answer_plain(target, p, params).ids for p in prompts}

    return answers
