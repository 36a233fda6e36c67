"""How long a draft is: the best by the costs of a machine, and none where drafting does not pay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from conftest import answer_plain, random_prompts
from hypothesis import given as given_values
from hypothesis import strategies as st

from flashdraft import fast
from flashdraft.core import SamplingParams
from flashdraft.decode import pace as pace_module
from flashdraft.decode.pace import Costs, Pace, costs_of, time_costs
from flashdraft.decode.rounds import given, rounds
from flashdraft.decode.row import Request, Row
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.lookup import LookupDrafter
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.target.hf import HfTarget

FLAT = Costs((1, 8), (1.0, 1.0), 0.1)  # a machine on which a block costs a step
STEEP = Costs((1, 8), (1.0, 8.0), 0.1)  # one on which every token costs a step


def test_costs_between_and_beyond_the_points() -> None:
    costs = Costs((1, 2, 4), (1.0, 1.5, 3.5), 0.5)
    assert [costs.of(n) for n in (1, 2, 3, 4, 6)] == [1.0, 1.5, 2.5, 3.5, 5.5]
    assert Costs((1,), (2.0,), 0.0).of(5) == 2.0


@given_values(
    confidence=st.lists(st.floats(0, 1), min_size=1, max_size=7),
    slope=st.floats(0, 1.5),
    draft=st.floats(0, 1),
    rows=st.integers(1, 3),
)
def test_the_best_length_by_trying_all(confidence: list[float], slope: float, draft: float, rows: int) -> None:
    """Tokens per second of every length, written out."""
    costs = Costs((1, 2), (1.0, 1.0 + slope), draft)
    best, speed = 0, 0.0
    for size in range(len(confidence) + 1):
        hoped, alive = 1.0, 1.0
        for chance in confidence[:size]:
            alive *= chance
            hoped += alive
        this = rows * hoped / (draft + 1.0 + slope * (rows * (size + 1) - 1))
        if this > speed * (1 + 1e-9):
            best, speed = size, this
    got = Pace(costs).size(torch.tensor([confidence] * rows), rows, len(confidence))
    assert got == best or abs(got - best) <= len(confidence)
    hoped = 1 + sum(float(torch.tensor(confidence[:n]).double().prod()) for n in range(1, got + 1))
    assert rows * hoped / (draft + 1.0 + slope * (rows * (got + 1) - 1)) == pytest.approx(speed, rel=1e-5)


def test_whole_block_without_costs_or_where_it_is_free() -> None:
    low = torch.full((1, 7), 0.05)
    assert Pace().size(low, 1, 7) == 7
    assert Pace(FLAT).size(low, 1, 7) == 7
    assert Pace(STEEP).size(low, 1, 7) == 0
    assert Pace(STEEP).size(torch.ones(1, 7), 1, 3) <= 3


def test_rest_and_return() -> None:
    """Poor drafts lead to rests that grow; good ones end them."""
    pace, drafted = Pace(STEEP), 0
    for _ in range(200):
        if not pace.resting():
            drafted += 1
            pace.size(torch.full((1, 7), 0.1), 1, 7)
    assert drafted < 20
    pace, rested = Pace(FLAT), 0
    for _ in range(100):
        rested += pace.resting()
        pace.size(torch.full((1, 7), 0.5), 1, 7)
    assert rested == 0


def test_rates_stand_in_for_confidence() -> None:
    """A drafter that tells nothing is judged by what was kept of its drafts."""
    costs = Costs((1, 8), (1.0, 2.0), 0.0)
    good, bad = Pace(costs), Pace(costs)
    for _ in range(30):
        good.learn(7, [7])
        bad.learn(7, [0])
    assert good.size(None, 1, 7) == 7 and bad.size(None, 1, 7) == 0


@pytest.mark.parametrize("costs", [FLAT, STEEP, Costs((1, 8), (1.0, 2.5), 0.2)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_do_not_depend_on_the_pace(target: HfTarget, costs: Costs, temperature: float) -> None:
    prompts = random_prompts((5, 12, 8))
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5)
    truth = {p: answer_plain(target, p, params).ids for p in prompts}
    for drafter in (ScriptedDrafter(truth, (7, 0, 3)), LookupDrafter(), DFlashDrafter(tiny_drafter_model(target))):
        rows = [Row(Request(p, params), target) for p in prompts]
        for _ in rounds(target, drafter, given(rows), 2, Pace(costs)):
            pass
        assert [tuple(r.answer.ids) for r in rows] == [truth[p] for p in prompts]


def test_sampled_drafts_keep_their_length(target: HfTarget) -> None:
    """A recorded proposal must not depend on timings: equal seeds give equal answers at any pace."""
    (prompt,) = random_prompts([9])
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=5, sample_drafts=True)
    answers = []
    for costs in (None, FLAT, STEEP):
        row = Row(Request(prompt, params), target)
        for _ in rounds(target, DFlashDrafter(tiny_drafter_model(target)), given([row]), 1, Pace(costs)):
            pass
        answers.append(row.answer.ids)
    assert answers[0] == answers[1] == answers[2]


def test_costs_are_timed_once(target: HfTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noted for the next start; a broken note or a folder that cannot be written only costs the time."""
    monkeypatch.setattr(fast, "load_average", lambda: 0.0)
    drafter = DFlashDrafter(tiny_drafter_model(target))
    first = costs_of(target, drafter, tmp_path / "cache")
    assert all(seconds > 0 for seconds in (*first.verify, first.draft))
    (note,) = (tmp_path / "cache").iterdir()
    monkeypatch.setattr(pace_module, "time_costs", lambda *_: FLAT)
    assert costs_of(target, drafter, tmp_path / "cache") == first
    note.write_text("{broken")
    assert costs_of(target, drafter, tmp_path / "cache") == FLAT
    (tmp_path / "file").write_text("")
    assert costs_of(target, drafter, tmp_path / "file" / "below") == FLAT


def test_a_busy_machine_notes_nothing(target: HfTarget, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "load_average", lambda: 99.0)
    assert costs_of(target, LookupDrafter(), tmp_path).draft > 0
    assert list(tmp_path.iterdir()) == []


def test_every_drafter_can_be_timed(target: HfTarget) -> None:
    for drafter in (LookupDrafter(), DFlashDrafter(tiny_drafter_model(target))):
        assert time_costs(target, drafter).draft > 0
