"""Drafted answers equal plain ones and transformers' own, for every family, drafter, batch and acceptance pattern."""

from __future__ import annotations

import pytest
import torch
from conftest import Ids, answer_drafted, answer_plain, random_prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashdraft.core import SamplingParams
from flashdraft.drafters.base import Drafter, NoDrafter
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.lookup import LookupDrafter
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.target.hf import HfTarget

LENGTHS = (3, 17, 1, 9)  # prompts of a batch; past the window (8) of the sliding families too
COUNT = 24

SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=COUNT),
    "sampled": SamplingParams(max_new_tokens=COUNT, temperature=1.0, seed=3),
    "penalised": SamplingParams(max_new_tokens=COUNT, repetition_penalty=1.3, presence_penalty=0.4),
    "all": SamplingParams(
        max_new_tokens=COUNT, temperature=0.7, top_k=20, top_p=0.9, min_p=0.01, frequency_penalty=0.3, seed=5
    ),
}


def drafters(target: HfTarget) -> dict[str, Drafter]:
    sliding = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8}
    return {
        "none": NoDrafter(),
        "lookup": LookupDrafter(6),
        "dflash": DFlashDrafter(tiny_drafter_model(target)),
        "dflash sliding": DFlashDrafter(tiny_drafter_model(target, **sliding)),
    }


def transformers_answer(target: HfTarget, prompt: Ids, count: int) -> Ids:
    out = target.model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False, pad_token_id=0)
    return tuple(out[0, len(prompt) :].tolist())


def test_plain_equals_transformers(family_target: HfTarget) -> None:
    for prompt in random_prompts(LENGTHS):
        mine = answer_plain(family_target, prompt, SAMPLINGS["greedy"]).ids
        assert mine == transformers_answer(family_target, prompt, COUNT)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_drafted_equals_plain(family_target: HfTarget, sampling: str) -> None:
    """Alone where nothing is drafted, else three at a time, so that rows leave and join."""
    prompts, params = random_prompts(LENGTHS), SAMPLINGS[sampling]
    truth = [answer_plain(family_target, prompt, params).ids for prompt in prompts]
    for name, drafter in drafters(family_target).items():
        done = answer_drafted(family_target, drafter, prompts, params, max_rows=1 if name == "none" else 3)
        assert [c.ids for c in done] == truth, name


@pytest.mark.parametrize("max_rows", [1, 3])
def test_scripted_acceptance_in_every_family(family_target: HfTarget, max_rows: int) -> None:
    """Random drafters are never right; a scripted one is, by 0 to all of its tokens."""
    prompts, params = random_prompts(LENGTHS), SAMPLINGS["greedy"]
    truth = {p: answer_plain(family_target, p, params).ids for p in prompts}
    drafter = ScriptedDrafter(truth, script=(7, 0, 3, 1, 6, 5), block_size=8)
    for prompt, done in zip(
        prompts, answer_drafted(family_target, drafter, prompts, params, max_rows=max_rows), strict=True
    ):
        assert done.ids == truth[prompt]
        assert done.stats.accepted > 0 and done.stats.accepted < done.stats.drafted


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    script=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    block_size=st.integers(2, 8),
    counts=st.lists(st.integers(0, 24), min_size=1, max_size=5),
    max_rows=st.integers(1, 3),
)
def test_any_script(target: HfTarget, true_answers, script, block_size, counts, max_rows) -> None:
    """Rows of different lengths and limits, accepting differently, joining and leaving between rounds."""
    prompts = random_prompts([2 + 5 * i for i in range(len(counts))])
    truth = true_answers(prompts, 24)
    drafter = ScriptedDrafter(truth, script, block_size)
    each = [SamplingParams(max_new_tokens=n) for n in counts]
    for prompt, count, done in zip(
        prompts, counts, answer_drafted(target, drafter, prompts, each, max_rows=max_rows), strict=True
    ):
        assert done.ids == truth[prompt][:count]
        assert done.usage["completion_tokens"] == count
        stats = done.stats
        assert stats.emitted == max(count - 1, 0)
        assert stats.accepted + stats.rounds >= stats.emitted >= stats.accepted


def test_statistics_follow_the_script(target: HfTarget, true_answers) -> None:
    """Block 4, always right: every round emits 4; always wrong: 1. tau counts the target's own token."""
    prompts = random_prompts([5])
    truth = true_answers(prompts, 21)
    for script, tau, per_slot in (((3,), 4.0, [5, 5, 5]), ((0,), 1.0, [0, 0, 0]), ((1,), 2.0, [10, 0, 0])):
        (done,) = answer_drafted(target, ScriptedDrafter(truth, script, 4), prompts, SamplingParams(max_new_tokens=21))
        assert done.stats.tau == tau
        assert done.stats.accepted_per_slot == per_slot


def test_seed_does_not_depend_on_neighbours(target: HfTarget) -> None:
    """The same request alone, in a batch of others, and with a drafter that samples."""
    prompts = random_prompts((6, 11, 4, 8))
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=11, sample_drafts=True)
    drafter = DFlashDrafter(tiny_drafter_model(target))
    alone = answer_drafted(target, drafter, prompts[:1], params)[0].ids
    others = [SamplingParams(max_new_tokens=n, temperature=1.0, seed=n) for n in (7, 30, 13)]
    together = answer_drafted(target, drafter, prompts, [params, *others], max_rows=4)[0].ids
    assert alone == together
