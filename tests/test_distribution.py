"""Sampled answers are distributed as the target's, whatever proposes: chi-square over whole short answers.

The target is a table: logits of the next token given the last one. So the exact probability of every short answer can
be written down, with the processors applied to the exact prefix of each token, in plain Python that shares no line with
what is tested. Seeds are fixed, so an outcome never changes from run to run.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from types import ModuleType

import pytest
import torch
from conftest import Ids, answer_drafted, answer_plain, random_prompts
from scipy.stats import chisquare
from transformers import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from flashdraft.cache import KVCache
from flashdraft.core import SamplingParams
from flashdraft.decode import sampler as sampler_module
from flashdraft.decode.pace import Costs, Pace
from flashdraft.decode.rounds import given, rounds
from flashdraft.decode.row import Request, Row
from flashdraft.decode.sampler import Sampler
from flashdraft.drafters import propose as propose_module
from flashdraft.drafters.base import Draft, Drafter, DraftRow, DraftState
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.propose import pick
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.sampling import DRAFT, OWN, draw
from flashdraft.target.base import Target, TargetOutput
from flashdraft.target.hf import HfTarget

VOCAB, LENGTH, SAMPLES, FEWER = 6, 3, 20_000, 2_000
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
OTHER = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
ANCHOR = 2
RIGHT, WRONG = 1e-3, 1e-6  # p-values above which a sampler passes and below which it is found out

PARAMS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"min_p": 0.15},
    "bias": {"logit_bias": {1: 1.5, 4: -2.0}, "top_k": 4},
    "all static": {"temperature": 0.9, "top_k": 5, "top_p": 0.95, "min_p": 0.01},
    "repetition": {"repetition_penalty": 2.0},
    "all": {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
}


def params_of(name: str) -> SamplingParams:
    return SamplingParams(**{"temperature": 1.0, **PARAMS[name]})


# The truth, in plain Python.


def next_token(ids: Sequence[int], params: SamplingParams) -> list[float]:
    """Probabilities of the token after `ids` (the first of which is the prompt)."""
    scores = [score + params.logit_bias.get(token, 0.0) for token, score in enumerate(TABLE[ids[-1]].tolist())]
    for token in set(ids):
        above = scores[token] > 0
        scores[token] *= 1 / params.repetition_penalty if above else params.repetition_penalty
    scores = [s - params.frequency_penalty * ids[1:].count(token) for token, s in enumerate(scores)]
    weights = [math.exp(s / params.temperature) for s in scores]
    order = sorted(range(VOCAB), key=lambda token: -weights[token])
    if params.top_k:
        order = order[: params.top_k]
    total, reached, nucleus = sum(weights[token] for token in order), 0.0, []
    for token in order:
        if reached < params.top_p * total:
            nucleus.append(token)
        reached += weights[token]
    best = [token for token in nucleus if weights[token] >= params.min_p * weights[nucleus[0]]]
    total = sum(weights[token] for token in best)
    return [weights[token] / total if token in best else 0.0 for token in range(VOCAB)]


def exact(params: SamplingParams) -> dict[Ids, float]:
    """Probability of every answer of LENGTH tokens."""
    out = {}
    for answer in product(range(VOCAB), repeat=LENGTH):
        ids, mass = [ANCHOR], 1.0
        for token in answer:
            mass *= next_token(ids, params)[token]
            ids.append(token)
        out[answer] = mass
    return out


def p_value(answers: Iterator[Ids], params: SamplingParams) -> float:
    """Chi-square of the counts against the exact probabilities; rare answers are put together. 0 where an impossible
    answer was given."""
    seen, true = Counter(answers), exact(params)
    if any(true[answer] == 0 for answer in seen):
        return 0.0
    count = sum(seen.values())
    common = [answer for answer, mass in true.items() if mass * count >= 10]
    observed = [seen[answer] for answer in common]
    expected = [true[answer] * count for answer in common]
    if count - sum(expected) > 1e-6:
        observed.append(count - sum(observed))
        expected.append(count - sum(expected))
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)


# Drafters for one sampler: (ids so far, uniform numbers, size) -> (draft, what it was drawn from).

Proposal = tuple[list[int], "torch.Tensor | None"]
Propose = Callable[[list[int], list[float], int], Proposal]
OTHER_PROBS, NARROW_PROBS = OTHER.softmax(dim=-1), torch.zeros(VOCAB, VOCAB)
for row in range(VOCAB):
    NARROW_PROBS[row, row] = NARROW_PROBS[row, (row + 3) % VOCAB] = 0.5


def zero(ids: list[int], noise: list[float], size: int) -> Proposal:
    """D15: always the same token, mostly wrong."""
    return [0] * size, None


def likeliest(ids: list[int], noise: list[float], size: int) -> Proposal:
    """An argmax drafter that is often right."""
    chain = [ids[-1]]
    for _ in range(size):
        chain.append(int(TABLE[chain[-1]].argmax()))
    return chain[1:], None


def chain_from(probs: torch.Tensor, ids: list[int], noise: list[float], size: int) -> Proposal:
    chain = [ids[-1]]
    for u in noise[:size]:
        sums = probs[chain[-1]].double().cumsum(0).tolist()
        chain.append(next(token for token, reached in enumerate(sums) if reached > u * sums[-1]))
    return chain[1:], probs[chain[:-1]]


def sampled(ids: list[int], noise: list[float], size: int) -> Proposal:
    """A drafter that samples from another table, with its proposal recorded."""
    return chain_from(OTHER_PROBS, ids, noise, size)


def sampled_narrow(ids: list[int], noise: list[float], size: int) -> Proposal:
    """The same from two tokens only: most of the target's tokens can come from the residual alone."""
    return chain_from(NARROW_PROBS, ids, noise, size)


class Uniforms:
    """A request's noise, handed in."""

    def __init__(self, numbers_P3: torch.Tensor) -> None:
        self.numbers_P3 = numbers_P3

    def at(self, start: int, count: int, column: int) -> torch.Tensor:
        return self.numbers_P3[start : start + count, column]


class OneForAll(Uniforms):
    """Wrong: every place meets the same number."""

    def at(self, start: int, count: int, column: int) -> torch.Tensor:
        return self.numbers_P3[:1, column].expand(count)


def judged(
    params: SamplingParams, propose: Propose, count: int = SAMPLES, noise: type[Uniforms] = Uniforms
) -> Iterator[Ids]:
    """Short answers by rounds of one sampler; a round drafts as many tokens as there is room for."""
    numbers_NP3 = torch.rand(count, LENGTH, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(7))
    sampler = Sampler(params, ())
    with remembering(sampler_module):
        for numbers_P3, for_drafts in zip(numbers_NP3, numbers_NP3[..., DRAFT].tolist(), strict=True):
            sampler.noise, ids = noise(numbers_P3), [ANCHOR]  # type: ignore[assignment]
            while len(ids) <= LENGTH:
                draft, q = propose(ids, for_drafts[len(ids) - 1 :], LENGTH - len(ids))
                chain = torch.tensor([ids[-1], *draft])
                kept, own = sampler.judge(TABLE[chain], chain[1:], q, ids, 1)
                ids += [*draft[:kept], own]
            yield tuple(ids[1:])


@contextmanager
def remembering(*modules: ModuleType) -> Iterator[None]:
    """Pure functions that these modules call with the same few tensors again and again are computed once: 20,000
    answers take seconds. What is tested is what is made of their results."""
    with pytest.MonkeyPatch.context() as patch:
        for module in modules:
            for name in {"probabilities", "process_prefix"} & vars(module).keys():
                patch.setattr(module, name, Remembered(vars(module)[name]))
        yield


class Remembered:
    """A function of (tensor, ...) that is called once for each different call."""

    def __init__(self, function: Callable[..., torch.Tensor]) -> None:
        self.function = function
        self.known: dict[object, torch.Tensor] = {}

    def __call__(self, logits: torch.Tensor, *rest: object) -> torch.Tensor:
        key = (logits.numpy().tobytes(), *(tuple(part) if isinstance(part, list) else None for part in rest))
        if key not in self.known:
            self.known[key] = self.function(logits, *rest)
        return self.known[key]


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("propose", [zero, likeliest, sampled, sampled_narrow], ids=lambda f: f.__name__)
def test_distribution(params: str, propose: Propose) -> None:
    assert p_value(judged(params_of(params), propose), params_of(params)) > RIGHT


def test_distribution_of_points() -> None:
    """The fast suite's share of the test above; recorded proposals have theirs below."""
    params = params_of("all static")
    assert p_value(judged(params, likeliest), params) > RIGHT


# Power: each of these mistakes is found out, with fewer samples. The mistakes stand in for what is tested above.


@pytest.mark.parametrize("propose", [zero, sampled, sampled_narrow], ids=lambda f: f.__name__)
def test_no_mistake_is_seen_where_there_is_none(propose: Propose) -> None:
    """So that what is seen below are the mistakes."""
    params = params_of("temperature")
    assert p_value(judged(params, propose, 3_000), params) > RIGHT


def accept_always(draft, q, p, accept, own):
    return len(draft), int(draw(p[-1:], own[-1:])[0])


def forgetful(draft, q, p, accept, own):
    """The proposal is not taken out of the residual."""
    kept, _ = REJECT(draft, q, p, accept, own)
    return kept, int(draw(p[kept : kept + 1], own[kept : kept + 1])[0])


def late(draft, q, p, accept, own):
    """D26: the first draft token is taken unchecked."""
    return REJECT(draft, q, p, torch.cat((0 * accept[:1], accept[1:])), own)


def askew(draft, q, p, accept, own):
    """The residual of the first slot, wherever the refusal was."""
    kept, token = REJECT(draft, q, p, accept, own)
    if kept == len(draft):
        return kept, token
    left = (p[kept] - q[0]).clamp(min=0)
    return kept, int(draw(left[None], own[kept : kept + 1])[0])


REJECT = sampler_module.reject


@pytest.mark.parametrize("mistake", [accept_always, forgetful, late, askew], ids=lambda f: f.__name__)
def test_mistakes_of_rejection_are_seen(mistake: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "reject", mistake)
    params = params_of("temperature")
    assert p_value(judged(params, sampled, 3_000), params) < WRONG


@pytest.mark.parametrize("column", [OWN, DRAFT])
def test_noise_used_twice_is_seen(column: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test of a proposal shares its random number with the draw of the draft, or of the replacement."""
    monkeypatch.setattr(sampler_module, "ACCEPT", column)
    params = params_of("temperature")
    assert p_value(judged(params, sampled_narrow, FEWER), params) < WRONG


def test_noise_of_another_place_is_seen() -> None:
    """Every token alone is right; only the answers as wholes are not."""
    params = params_of("temperature")
    assert p_value(judged(params, zero, FEWER, OneForAll), params) < WRONG


def test_a_wrong_record_is_seen() -> None:
    """D15: an argmax draft, tested as if it had been sampled."""

    def pretended(ids: list[int], noise: list[float], size: int) -> Proposal:
        draft, _ = likeliest(ids, noise, size)
        return draft, OTHER_PROBS[[ids[-1], *draft[:-1]]] if draft else OTHER_PROBS[:0]

    params = params_of("temperature")
    assert p_value(judged(params, pretended, FEWER), params) < WRONG


def test_unprocessed_logits_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """D17: drafts are checked without top-p. D18: penalties do not see the draft tokens before a slot."""
    params = params_of("top_p")
    with monkeypatch.context() as patch:
        patch.setattr(sampler_module, "probabilities", lambda logits, p: (logits / p.temperature).softmax(dim=-1))
        assert p_value(judged(params, likeliest, FEWER), params) < WRONG
    right = sampler_module.process_prefix
    monkeypatch.setattr(
        sampler_module, "process_prefix", lambda logits, ids, *rest: right(logits, ids[:1], *rest)
    )  # fmt: skip
    params = params_of("repetition")
    assert p_value(judged(params, likeliest, FEWER), params) < WRONG


# The same through rows, rounds and batches.


class TableTarget(Target):
    """The table as a target."""

    name, device, dtype = "table", torch.device("cpu"), torch.float32
    num_layers, hidden_size, vocab_size, embedding_rows = 0, 0, VOCAB, VOCAB
    context_length, eos_token_ids = None, ()

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def new_cache(self) -> KVCache:
        return KVCache(0)

    def forward(
        self,
        ids_BQ: torch.Tensor,
        cache: KVCache,
        rows: slice,
        *,
        taps: tuple[int, ...] = (),
        keep_BS: torch.Tensor | None = None,
    ) -> TargetOutput:
        return TargetOutput(TABLE[ids_BQ if keep_BS is None else ids_BQ.gather(1, keep_BS)], None)


class TableDrafter(Drafter):
    """Slots that are independent of each other given the anchor, as a block drafter's are; argmax or sampled as the
    request says."""

    block_size = LENGTH

    def new_state(self, target: Target) -> DraftState:
        return TableDraftState()


class TableDraftState(DraftState):
    def join(self, ids: Sequence[int], features_1TF: torch.Tensor | None) -> None:
        pass

    def propose(self, rows: Sequence[DraftRow], size: int) -> Draft:
        first_BV = OTHER[[row.ids[-1] for row in rows]]
        return pick(torch.stack([first_BV.roll(slot, dims=1) for slot in range(size)], dim=1), rows)

    def commit(self, features_BQF: torch.Tensor | None, kept: Sequence[int]) -> None:
        pass

    def leave(self, row: int) -> None:
        pass


def by_rounds(params: SamplingParams, count: int = SAMPLES) -> Iterator[Ids]:
    """The first tokens of answers of many requests, many at a time; limits differ, and rows leave and join. The first
    token has no draft, and the last one before a limit has none either."""
    target = TableTarget()
    for start in range(0, count, 500):
        each = [replace(params, seed=s, max_new_tokens=LENGTH + 1 + (s % 8 == 0)) for s in range(start, start + 500)]
        rows = [Row(Request((ANCHOR,), one), target) for one in each]
        with remembering(sampler_module, propose_module):
            for _ in rounds(target, TableDrafter(), given(rows), max_rows=16):
                pass
        yield from (tuple(row.answer.ids[:LENGTH]) for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize("sample_drafts", [False, True])
@pytest.mark.parametrize("params", ["temperature", "top_p", "bias", "all"])
def test_distribution_by_rounds(params: str, sample_drafts: bool) -> None:
    asked = replace(params_of(params), sample_drafts=sample_drafts)
    assert p_value(by_rounds(asked), asked) > RIGHT


def test_distribution_by_rounds_of_one() -> None:
    """The fast suite's share: sampled drafts, and penalties that depend on the draft tokens before a slot."""
    asked = replace(params_of("all"), sample_drafts=True)
    assert p_value(by_rounds(asked), asked) > RIGHT


def test_excluded_tokens_never_appear() -> None:
    """D17: with top_k=2 a proposal of the third-ranked token is always refused; so with top_p and min_p."""
    order = TABLE[ANCHOR].argsort(descending=True).tolist()
    probs = TABLE[ANCHOR].softmax(0)[order].tolist()
    third = torch.tensor([order[2]])
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=probs[0] + 0.01),
        SamplingParams(temperature=1.0, min_p=(probs[1] + probs[2]) / 2 / probs[0]),
        SamplingParams(temperature=1.0, top_k=2, presence_penalty=0.1),
    ):
        for q in (None, torch.nn.functional.one_hot(third, VOCAB).float()):
            seen = set()
            for seed in range(200):
                sampler = Sampler(replace(params, seed=seed), ())
                kept, own = sampler.judge(TABLE[torch.tensor([ANCHOR, order[2]])], third, q, [ANCHOR], 1)
                assert kept == 0
                seen.add(own)
            assert seen == set(order[:2])


# On a tiny model.


def test_penalties_in_greedy_decoding(target: HfTarget) -> None:
    """D18: penalties count with drafts as without."""
    (prompt,) = random_prompts([8])
    for params in (
        SamplingParams(max_new_tokens=40, repetition_penalty=1.5),
        SamplingParams(max_new_tokens=40, presence_penalty=1.0, frequency_penalty=1.0),
    ):
        plain = answer_plain(target, prompt, params)
        bare = answer_plain(target, prompt, SamplingParams(max_new_tokens=40))
        assert plain.ids != bare.ids
        for truth in (plain.ids, bare.ids):  # a drafter that knows the penalties, and one that does not (D28)
            (done,) = answer_drafted(target, ScriptedDrafter({prompt: truth}, (7, 2, 5)), [prompt], params)
            assert done.ids == plain.ids


def test_penalties_come_to_an_end(target: HfTarget) -> None:
    """D21: with penalties and drafts the end token was pushed away for ever. Plain decoding ends here, so drafted
    decoding does, at the same token."""
    (prompt,) = random_prompts([8])
    ended = HfTarget(target.model)
    ended.eos_token_ids = (3,)
    params = SamplingParams(max_new_tokens=200, repetition_penalty=1.3, frequency_penalty=0.1, logit_bias={3: 1.0})
    plain = answer_plain(ended, prompt, params)
    assert plain.finish_reason == "stop" and len(plain.ids) > 3
    for script in ((7,), (0,), (2, 5)):
        (done,) = answer_drafted(ended, ScriptedDrafter({prompt: plain.ids}, script), [prompt], params)
        assert (done.ids, done.finish_reason) == (plain.ids, "stop")


class Numbers:
    """A tokenizer that writes ids as numbers."""

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        return "".join(f"<{i}>" for i in token_ids)


class Remembering:
    """A processor with a memory: it notes every prefix that it was shown, and what it does depends on how many."""

    def __init__(self) -> None:
        self.shown: list[Ids] = []

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.shown.append(tuple(ids[0].tolist()))
        logits[:, ids[0, -3:]] -= 1.0 * len(self.shown)
        return logits


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0}, {"temperature": 1.0, "sample_drafts": True}])
def test_a_processor_with_memory_sees_plain_decoding(target: HfTarget, sampling: dict[str, object]) -> None:
    """D20: rejected drafts never reach a processor; it is called once per emitted token, on its exact prefix."""
    (prompt,) = random_prompts([8])
    seen = []
    truth: Ids = ()
    for script in (None, (7,), (0,), (2, 5, 1)):
        memory = Remembering()
        params = SamplingParams(max_new_tokens=24, seed=4, logits_processors=(memory,), **sampling)
        if script is None:
            truth = answer_plain(target, prompt, params).ids
        else:
            (done,) = answer_drafted(target, ScriptedDrafter({prompt: truth}, script), [prompt], params)
            assert done.ids == truth
        seen.append(memory.shown)
    assert all(shown == seen[0] for shown in seen)
    assert len(seen[0]) == 24


def test_a_processor_with_memory_and_sampled_drafts(target: HfTarget) -> None:
    """The same with recorded proposals: one call for each emitted token, each on the tokens before it."""
    (prompt,) = random_prompts([8])
    memory = Remembering()
    params = SamplingParams(max_new_tokens=24, temperature=1.5, seed=4, sample_drafts=True, logits_processors=(memory,))
    (done,) = answer_drafted(target, DFlashDrafter(tiny_drafter_model(target)), [prompt], params)
    assert memory.shown == [(*prompt, *done.ids[:n]) for n in range(24)]


@pytest.mark.parametrize("end", ["end token", "stop id", "stop string", "limit"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_is_not_shown_what_comes_behind_the_end(target: HfTarget, end: str, temperature: float) -> None:
    """An end token, or a stop string, accepted in mid-block: the rest of the block went through the processors too, and
    a grammar that has ended fails on a token behind its end (D2, D29)."""
    (prompt,) = random_prompts([8])
    free = SamplingParams(max_new_tokens=24, seed=4, temperature=temperature, logits_processors=(Remembering(),))
    truth = answer_plain(target, prompt, free).ids
    place = next(i for i in range(3, 7) if truth[i] not in truth[:i])
    ended = HfTarget(target.model)
    changes: dict[str, object] = {"logits_processors": (memory := Remembering(),)}
    if end == "end token":
        ended.eos_token_ids = (truth[place],)
    elif end == "stop id":
        changes["stop_token_ids"] = (truth[place],)
    elif end == "stop string":
        changes["stop"] = (f"<{truth[place]}>",)
    else:
        changes["max_new_tokens"] = place + 1
    drafter = ScriptedDrafter({prompt: truth}, (7,))
    (done,) = answer_drafted(ended, drafter, [prompt], replace(free, **changes), tokenizer=Numbers())
    assert done.ids == truth[: place + 1]
    assert done.finish_reason == ("length" if end == "limit" else "stop")
    assert memory.shown == [(*prompt, *truth[:n]) for n in range(place + 1)]
    assert done.stats.accepted == place - (end == "limit")


def test_forbidden_tokens_stay_forbidden(target: HfTarget) -> None:
    """D23: a bias of -100 on the greedy token, and transformers' bad words, hold at every slot."""
    (prompt,) = random_prompts([8])
    truth = answer_plain(target, prompt, SamplingParams(max_new_tokens=20)).ids
    bad = truth[2]
    drafter = ScriptedDrafter({prompt: truth}, (7, 4))
    words = NoBadWordsLogitsProcessor([[bad]], eos_token_id=None)
    for params in (
        SamplingParams(max_new_tokens=20, logit_bias={bad: -100.0}),
        SamplingParams(max_new_tokens=20, logits_processors=(words,)),
    ):
        (done,) = answer_drafted(target, drafter, [prompt], params)
        assert bad not in done.ids and done.ids == answer_plain(target, prompt, params).ids


def test_a_grammar_holds_at_every_slot(target: HfTarget) -> None:
    """D29: a constraint that depends on the prefix, through transformers' own processor."""
    (prompt,) = random_prompts([8])

    def allowed(_batch: int, ids: torch.Tensor) -> list[int]:
        return list(range(10, 20)) if int(ids[-1]) % 2 else list(range(30, 47))

    grammar = PrefixConstrainedLogitsProcessor(allowed, num_beams=1)
    params = SamplingParams(max_new_tokens=20, logits_processors=(grammar,))
    truth = answer_plain(target, prompt, params).ids
    (done,) = answer_drafted(target, ScriptedDrafter({prompt: truth}, (3, 7, 0)), [prompt], params)
    assert done.ids == truth
    for before, token in zip((prompt[-1], *truth[:-1]), truth, strict=True):
        assert token in allowed(0, torch.tensor([before]))


def test_the_first_draft_token_is_checked(target: HfTarget) -> None:
    """D26: block 2 with a wrong proposal."""
    (prompt,) = random_prompts([8])
    truth = answer_plain(target, prompt, SamplingParams(max_new_tokens=12)).ids
    (done,) = answer_drafted(
        target, ScriptedDrafter({prompt: truth}, (0,), 2), [prompt], SamplingParams(max_new_tokens=12)
    )
    assert done.ids == truth and done.stats.accepted == 0
    assert done.stats.drafted == 10  # the first token has no draft, the last one no room for a draft


def test_equal_seeds_equal_answers(target: HfTarget) -> None:
    """Drafted or plain, alone or beside others; other seeds give other answers."""
    prompts = random_prompts((8, 5, 11))
    each = [SamplingParams(max_new_tokens=30, temperature=1.0, top_p=0.9, seed=s) for s in (1, 2, 3)]
    plain = [answer_plain(target, p, s).ids for p, s in zip(prompts, each, strict=True)]
    for drafter in (ScriptedDrafter(dict(zip(prompts, plain, strict=True)), (7, 1)),
                    DFlashDrafter(tiny_drafter_model(target))):  # fmt: skip
        for max_rows in (1, 3):
            assert [c.ids for c in answer_drafted(target, drafter, prompts, each, max_rows=max_rows)] == plain
    assert answer_plain(target, prompts[0], each[1]).ids != plain[0]
    assert answer_plain(target, prompts[0], replace(each[0], seed=None)).ids != plain[0]


@pytest.mark.parametrize("draft_cost", [0.01, 1.0])
def test_the_pace_does_not_change_answers(target: HfTarget, draft_cost: float) -> None:
    """Drafts cut short, or left out for some rounds, meet the same noise as whole ones."""
    prompts = random_prompts((8, 5, 11))
    each = [SamplingParams(max_new_tokens=30, temperature=1.0, seed=s, frequency_penalty=0.3 * s) for s in range(3)]
    plain = [answer_plain(target, p, s).ids for p, s in zip(prompts, each, strict=True)]
    drafter = ScriptedDrafter(dict(zip(prompts, plain, strict=True)), (7, 7, 0, 1, 0))
    rows = [Row(Request(p, s), target) for p, s in zip(prompts, each, strict=True)]
    pace = Pace(Costs((1, 24), (1.0, 3.0), draft_cost))
    for _ in rounds(target, drafter, given(rows), 3, pace):
        pass
    assert [row.completion().ids for row in rows] == plain
    drafted = sum(row.stats.drafted for row in rows)
    assert 0 < drafted < 7 * sum(row.stats.rounds for row in rows)


def test_rows_that_sample_drafts_beside_rows_that_do_not(target: HfTarget) -> None:
    """One batch, every kind of request: each gets the answer that it gets alone."""
    kinds = [
        SamplingParams(max_new_tokens=20, temperature=1.0, seed=1, sample_drafts=True),
        SamplingParams(max_new_tokens=26, temperature=1.0, seed=2),
        SamplingParams(max_new_tokens=9, sample_drafts=True),
        SamplingParams(max_new_tokens=23, temperature=0.7, top_k=9, seed=3, sample_drafts=True, presence_penalty=0.5),
        SamplingParams(max_new_tokens=14, repetition_penalty=1.3),
    ]
    prompts = random_prompts((8, 5, 11, 3, 6))
    drafter = DFlashDrafter(tiny_drafter_model(target))
    alone = [answer_drafted(target, drafter, [p], s)[0].ids for p, s in zip(prompts, kinds, strict=True)]
    for max_rows in (2, 5):
        assert [c.ids for c in answer_drafted(target, drafter, prompts, kinds, max_rows=max_rows)] == alone
    rows = [Row(Request(p, s), target) for p, s in zip(prompts, kinds, strict=True)]
    for _ in rounds(target, drafter, given(rows), 5, Pace(Costs((1, 80), (1.0, 9.0), 0.1))):
        pass  # drafts that are sampled are not cut to pay: their length decides which noise meets which token
    assert [row.completion().ids for row in rows] == alone
    for index in (1, 2, 4):  # nothing is recorded for these: plain decoding gives the same
        assert answer_plain(target, prompts[index], kinds[index]).ids == alone[index]
