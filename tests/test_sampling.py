"""Processing, probabilities, draws and acceptance as pure functions, against transformers and naive loops."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
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


@settings(deadline=None)
@given(bias=st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, -0.5, 2.5, float("-inf")]), max_size=6))
def test_bias_as_in_transformers(bias: dict[int, float]) -> None:
    logits = random_logits()
    mine = process_static(logits, SamplingParams(logit_bias=bias))
    if not bias:
        assert torch.equal(mine, logits)
        return
    theirs = SequenceBiasLogitsProcessor([[[token], value] for token, value in bias.items()])
    torch.testing.assert_close(mine, theirs(torch.zeros(len(logits), 1, dtype=torch.long), logits.clone()))


@pytest.mark.parametrize("length", [0, 1, 2, 3])
@pytest.mark.parametrize("eos", [(8,), (8, 9), ()])
def test_minimum_length_as_in_transformers(length: int, eos: tuple[int, ...]) -> None:
    logits, ids = random_logits(1)[0], [1, 4, *[2] * length]
    mine = process_prefix(logits, ids, 2, SamplingParams(min_new_tokens=2), eos)
    if not eos:
        assert torch.equal(mine, logits)
        return
    theirs = MinNewTokensLengthLogitsProcessor(2, 2, list(eos), device="cpu")
    torch.testing.assert_close(mine, theirs(torch.tensor([ids]), logits[None].clone())[0])


def test_processing_leaves_the_logits_alone() -> None:
    """Log-probabilities are read from the same tensor afterwards, and the next round may be judged on a view of it."""
    logits = random_logits(2)
    before = logits.clone()

    def inplace(_ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return row.fill_(0.0)

    params = SamplingParams(
        temperature=0.5, top_k=3, top_p=0.5, min_p=0.1, repetition_penalty=2.0, frequency_penalty=1.0,
        min_new_tokens=9, logit_bias={3: 1.0}, logits_processors=(inplace,),
    )  # fmt: skip
    process_static(logits, params)
    process_prefix(logits[0], [1, 2, 3], 1, params, (4,))
    probabilities(logits, params)
    assert torch.equal(logits, before)


def test_prompt_ids_that_are_never_generated_take_no_penalty() -> None:
    """A prompt may hold rows of a padded embedding table: the repetition penalty looked them up among the logits."""
    logits = random_logits(1)[0]
    params = SamplingParams(repetition_penalty=1.5)
    mine = process_prefix(logits, [VOCAB + 3, 4], 1, params, ())
    assert torch.equal(mine, process_prefix(logits, [4], 1, params, ()))
    assert torch.equal(process_prefix(logits, [VOCAB + 3], 1, params, ()), logits)


def test_processors_follow_in_their_order() -> None:
    """Our own penalties first, then the caller's processors one after the other, on the ids so far."""
    logits, seen = random_logits(1)[0], []

    def double(ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        seen.append(ids.tolist())
        return 2 * row

    def add(_ids: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        return row + 1

    params = SamplingParams(presence_penalty=0.5, logits_processors=(double, add))
    expected = logits.clone()
    expected[7] -= 0.5
    torch.testing.assert_close(process_prefix(logits, [3, 7], 1, params, ()), 2 * expected + 1)
    assert seen == [[[3, 7]]]


@pytest.mark.parametrize("temperature", [1e-3, 1e-12, 1e-40, 1e-60, 5e-324])
def test_a_very_low_temperature_is_greedy(temperature: float) -> None:
    """Logits divided by 1e-40 overflow float32, and every token came out as id 0."""
    logits = random_logits()
    probs = probabilities(logits, SamplingParams(temperature=temperature))
    assert torch.equal(probs.argmax(dim=-1), logits.argmax(dim=-1))
    torch.testing.assert_close(probs.amax(dim=-1), torch.ones(len(logits)))


def test_the_best_token_is_never_excluded() -> None:
    """Tiny top_p, min_p near 1, top_k 1, in flat, peaked and masked distributions."""
    flat, peaked = torch.zeros(1, VOCAB), torch.full((1, VOCAB), -50.0).index_fill(1, torch.tensor([9]), 50.0)
    masked = random_logits(1).masked_fill(torch.arange(VOCAB) % 7 != 3, float("-inf"))
    for params in (
        {"top_p": 1e-12},
        {"min_p": 0.999999},
        {"top_k": 1},
        {"top_k": 1, "top_p": 1e-12, "min_p": 0.999999},
    ):
        for logits in (flat, peaked, masked):
            probs = probabilities(logits, SamplingParams(temperature=1.0, **params))
            assert float(probs.sum()) == pytest.approx(1.0) and not probs.isnan().any()
            assert float(logits[0, probs[0] > 0].max()) == float(logits.max())


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


@settings(deadline=None, max_examples=200)
@given(
    weights=st.lists(st.sampled_from([0, 0, 1, 2, 5, 1000]), min_size=1, max_size=9).filter(any),
    uniform=st.floats(0, 1, exclude_max=True) | st.sampled_from([0.0, 0.25, 0.5, 1 - 2**-53]),
)
def test_draw_against_a_loop(weights: list[int], uniform: float) -> None:
    """The first token at which the sum of the weights exceeds the point; no rounding in these whole numbers."""
    (mine,) = draw(torch.tensor([weights], dtype=torch.float32), torch.tensor([uniform], dtype=torch.float64)).tolist()
    point, sums = uniform * sum(weights), [sum(weights[: i + 1]) for i in range(len(weights))]
    last = max(i for i, weight in enumerate(weights) if weight)
    assert mine == min((i for i, reached in enumerate(sums) if reached > point), default=last)
    assert weights[mine] > 0


def test_draw_from_a_large_vocabulary() -> None:
    """Float32 sums over 150k tokens lose the last ones: every token keeps its share of the unit interval."""
    size = 150_000
    probs = torch.full((1, size), 1 / size)
    for token in (0, 1, size // 3, size - 2, size - 1):
        assert draw(probs, torch.tensor([(token + 0.5) / size], dtype=torch.float64)).tolist() == [token]


def test_noise_belongs_to_a_place() -> None:
    """Whatever rounds asked for before, the token at a place meets the same numbers; columns are independent."""
    whole = Noise(7).at(0, 200, 0)
    other = Noise(7)
    parts = [other.at(start, 13, 0) for start in range(0, 195, 13)]
    assert torch.equal(torch.cat(parts), whole[:195])
    assert torch.equal(Noise(7).at(150, 3, 0), whole[150:153])
    for one, other_column in ((0, 1), (0, 2), (1, 2)):
        columns = torch.stack((Noise(7).at(0, 2000, one), Noise(7).at(0, 2000, other_column)))
        assert abs(float(torch.corrcoef(columns)[0, 1])) < 0.1
    assert whole.min() >= 0 and whole.max() < 1 and Noise(7).at(5, 0, 0).shape == (0,)
    assert torch.equal(Noise(-1).at(0, 9, 0), Noise(2**63 - 1).at(0, 9, 0))
    assert not torch.equal(Noise(8).at(0, 200, 0), whole)
    assert torch.equal(Noise(2**63 + 7).at(0, 9, 0), Noise(7).at(0, 9, 0))


SAME_LENGTH = st.integers(0, 6).flatmap(lambda s: st.tuples(*[st.lists(st.integers(0, 2), min_size=s, max_size=s)] * 2))


@settings(deadline=None)
@given(pair=SAME_LENGTH, other=st.integers(0, 2))
def test_match_against_a_loop(pair: tuple[list[int], list[int]], other: int) -> None:
    """Also in a batch, where rows are counted separately, and without any draft."""
    draft, own = pair
    expected = next((i for i, (a, b) in enumerate(zip(draft, own, strict=True)) if a != b), len(draft))
    rows = torch.tensor([draft, own, draft]).long().view(3, -1)
    own_rows = torch.tensor([[*own, other]] * 3)
    assert match(rows, own_rows).tolist() == [expected, len(draft), expected]


def reject_slowly(draft: list[int], q: list[list[float]], p: list[list[float]], accept: list[float], own: list[float]):
    """Leviathan et al. 2023, algorithm 1, number by number."""
    kept = 0
    while kept < len(draft) and accept[kept] * q[kept][draft[kept]] < p[kept][draft[kept]]:
        kept += 1
    rest = p[kept] if kept == len(draft) else [max(a - b, 0.0) for a, b in zip(p[kept], q[kept], strict=True)]
    rest = rest if sum(rest) > 0 else p[kept]
    reached = [math.fsum(rest[: i + 1]) for i in range(len(rest))]
    return kept, next(i for i, r in enumerate(reached) if r > own[kept] * reached[-1])


def distributions(rows: int) -> st.SearchStrategy[list[list[float]]]:
    """Rows of probabilities that are exact in binary, zeros included."""
    cuts = st.lists(st.integers(0, 16), min_size=3, max_size=3).map(lambda c: [0, *sorted(c), 16])
    row = cuts.map(lambda c: [(b - a) / 16 for a, b in zip(c[:-1], c[1:], strict=True)])
    return st.lists(row, min_size=rows, max_size=rows)


@settings(deadline=None, max_examples=200)
@given(data=st.data(), size=st.integers(0, 3))
def test_reject_against_a_loop(data: st.DataObject, size: int) -> None:
    q, p = data.draw(distributions(size)), data.draw(distributions(size + 1))
    draft = [data.draw(st.sampled_from([i for i, mass in enumerate(row) if mass])) for row in q]
    sixteenths = st.integers(0, 511).map(lambda n: (n + 0.5) / 512)
    accept = data.draw(st.lists(sixteenths, min_size=size, max_size=size))
    own = data.draw(st.lists(sixteenths, min_size=size + 1, max_size=size + 1))
    mine = reject(
        torch.tensor(draft, dtype=torch.long), torch.tensor(q).view(size, 4), torch.tensor(p),
        torch.tensor(accept, dtype=torch.float64), torch.tensor(own, dtype=torch.float64),
    )  # fmt: skip
    assert mine == reject_slowly(draft, q, p, accept, own)


def test_reject_is_the_target_distribution() -> None:
    """One slot, all pairs of 60 x 60 noises and every draft: the outcome has the target's probabilities, exactly."""
    p, q = [0.5, 0.25, 0.25, 0.0], [0.25, 0.5, 0.0, 0.25]
    both, grid = torch.tensor([p, p]), (torch.arange(60, dtype=torch.float64) + 0.5) / 60
    mass = [0.0] * 4
    for draft, chance in enumerate(q):
        for accept in grid if chance else ():
            for own in grid:
                kept, token = reject(torch.tensor([draft]), torch.tensor([q]), both, accept[None], own.expand(2))
                mass[draft if kept else token] += chance / len(grid) ** 2
    assert mass == pytest.approx(p, abs=1e-9)


def test_reject_keeps_what_target_and_drafter_agree_on() -> None:
    """Equal distributions: everything is kept. Disjoint ones: nothing is, and the replacement is the target's."""
    q = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(3, 1)
    p = torch.tensor([[0.5, 0.5, 0.0, 0.0]]).repeat(4, 1)
    high = torch.full((4,), 0.999999, dtype=torch.float64)
    assert reject(torch.tensor([0, 1, 0]), q, p, high[:3], high) == (3, 1)
    other = torch.tensor([[0.0, 0.0, 0.25, 0.75]]).repeat(4, 1)
    assert reject(torch.tensor([0, 1, 0]), q, other, 0 * high[:3], high) == (0, 3)
    assert reject(torch.tensor([0, 1, 0]), q, other, 0 * high[:3], 0 * high) == (0, 2)
