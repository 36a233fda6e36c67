"""Processing, probabilities, draws and acceptance as pure functions, against transformers and naive loops."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from flashdraft import sampling
from flashdraft.core import SamplingParams, UserError
from flashdraft.decode.verify import match, reject
from flashdraft.sampling import Noise, draw, probabilities, process_prefix, process_static

VOCAB = 50


def random_logits(rows: int = 6, seed: int = 0) -> torch.Tensor:
    return 3 * torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=60)
@given(
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 5, 49, 50, 99]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.4]),
    seed=st.integers(0, 5),
)
def test_probabilities_as_in_transformers(
    temperature: float, top_k: int, top_p: float, min_p: float, seed: int
) -> None:
    logits = random_logits(seed=seed)
    theirs = LogitsProcessorList([TemperatureLogitsWarper(temperature)])
    if top_k:
        theirs.append(TopKLogitsWarper(top_k))
    if top_p < 1:
        theirs.append(TopPLogitsWarper(top_p))
    if min_p:
        theirs.append(MinPLogitsWarper(min_p))
    mine = probabilities(logits, SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    expected = theirs(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone()).softmax(dim=-1)
    torch.testing.assert_close(mine, expected)


@pytest.mark.parametrize("guess", [1, 3, 50])
def test_nucleus_does_not_depend_on_the_guess(guess: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The nucleus is looked for among the best tokens first; a flat distribution needs the whole vocabulary."""
    logits = torch.cat((random_logits(), torch.zeros(1, VOCAB), torch.linspace(0, 0.1, VOCAB)[None]))
    params = SamplingParams(temperature=1.0, top_p=0.93)
    monkeypatch.setattr(sampling, "NUCLEUS_GUESS", VOCAB)
    expected = probabilities(logits, params)
    monkeypatch.setattr(sampling, "NUCLEUS_GUESS", guess)
    torch.testing.assert_close(probabilities(logits, params), expected)


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=12), penalty=st.sampled_from([0.7, 1.0, 1.8]))
def test_repetition_penalty_as_in_transformers(ids: list[int], penalty: float) -> None:
    logits = random_logits(1)[0]
    mine = process_prefix(logits, ids, 1, SamplingParams(repetition_penalty=penalty), ())
    expected = RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([ids]), logits[None].clone())[0]
    torch.testing.assert_close(mine, expected)


@settings(deadline=None)
@given(prompt=st.lists(st.integers(0, 9), min_size=1, max_size=5), answer=st.lists(st.integers(0, 9), max_size=9))
def test_presence_and_frequency_count_the_answer_only(prompt: list[int], answer: list[int]) -> None:
    logits = random_logits(1)[0]
    params = SamplingParams(presence_penalty=0.5, frequency_penalty=0.25)
    mine = process_prefix(logits, prompt + answer, len(prompt), params, ())
    for token in range(VOCAB):
        count = answer.count(token)
        assert float(mine[token]) == pytest.approx(float(logits[token]) - 0.25 * count - 0.5 * (count > 0), abs=1e-5)


def test_bias_and_minimum_length() -> None:
    logits = random_logits(2)
    biased = process_static(logits, SamplingParams(logit_bias={3: -100.0, 7: 2.5}))
    assert torch.equal(biased[:, 3], logits[:, 3] - 100) and torch.equal(biased[:, 7], logits[:, 7] + 2.5)
    assert torch.equal(biased[:, 4:7], logits[:, 4:7])
    params = SamplingParams(min_new_tokens=2)
    for length, banned in ((0, True), (1, True), (2, False)):
        out = process_prefix(logits[0], [1, *[2] * length], 1, params, (8, 9))
        assert bool(torch.isinf(out[8:10]).all()) == banned


@pytest.mark.parametrize(
    ("name", "value"),
    [("top_p", 0.0), ("top_p", 1.5), ("temperature", -1.0), ("top_k", -1), ("min_p", 1.0), ("repetition_penalty", 0.0),
     ("max_new_tokens", -1), ("stop", ("",)), ("stop", "text"), ("logprobs", -1), ("min_new_tokens", -2)],
)  # fmt: skip
def test_senseless_parameters_are_refused(name: str, value: object) -> None:
    with pytest.raises(UserError, match=f"{name} must be .*got"):
        SamplingParams(**{name: value})


def test_draw_never_gives_probability_zero() -> None:
    """The very ends of the unit interval, with forbidden tokens at both ends of the vocabulary and in the middle."""
    probs = torch.tensor([[0.0, 0.25, 0.0, 0.75, 0.0]]).repeat(5, 1)
    ends = torch.tensor([0.0, 0.2499999, 0.25, 0.9999999999999999, 1.0], dtype=torch.float64)
    assert draw(probs, ends).tolist() == [1, 1, 3, 3, 3]
    assert draw(3 * probs, ends).tolist() == [1, 1, 3, 3, 3]


def test_noise_belongs_to_a_place() -> None:
    """Whatever rounds asked for before, the token at a place meets the same numbers; columns are independent."""
    whole = Noise(7).at(0, 200, 0)
    other = Noise(7)
    parts = [other.at(start, 13, 0) for start in range(0, 195, 13)]
    assert torch.equal(torch.cat(parts), whole[:195])
    assert torch.equal(Noise(7).at(150, 3, 0), whole[150:153])
    assert not torch.equal(Noise(7).at(0, 200, 1), whole)
    assert not torch.equal(Noise(8).at(0, 200, 0), whole)
    assert torch.equal(Noise(2**63 + 7).at(0, 9, 0), Noise(7).at(0, 9, 0))


@settings(deadline=None)
@given(st.integers(1, 6).flatmap(lambda s: st.tuples(*[st.lists(st.integers(0, 2), min_size=s, max_size=s)] * 2)))
def test_match_against_a_loop(pair: tuple[list[int], list[int]]) -> None:
    draft, own = pair
    expected = next((i for i, (a, b) in enumerate(zip(draft, own, strict=True)) if a != b), len(draft))
    own_row = torch.tensor([[*own, 0]])
    assert match(torch.tensor([draft]), own_row).tolist() == [expected]


def test_reject_keeps_what_target_and_drafter_agree_on() -> None:
    """Equal distributions: everything is kept. Disjoint ones: nothing is, and the replacement is the target's."""
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(3, 1)
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(4, 1)
    high = torch.full((4,), 0.999999, dtype=torch.float64)
    assert reject(torch.tensor([0, 1, 0]), q, p, high[:3], high) == (3, 1)
    other = torch.tensor([[0.0, 0.0, 0.25, 0.75]]).repeat(4, 1)
    assert reject(torch.tensor([0, 1, 0]), q, other, 0 * high[:3], high) == (0, 3)
    assert reject(torch.tensor([0, 1, 0]), q, other, 0 * high[:3], 0 * high) == (0, 2)
