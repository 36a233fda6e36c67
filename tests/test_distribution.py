"""Sampled answers are distributed as the target's, whatever proposes: chi-square over whole short answers.

The target is a table: logits of the next token given the last one. So the exact probability of every short answer can
be written down, with the processors applied to the exact prefix of each token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import product

import pytest
import torch
from conftest import Ids, answer_drafted, answer_plain, random_prompts
from scipy.stats import chisquare
from transformers import NoBadWordsLogitsProcessor, PrefixConstrainedLogitsProcessor

from flashdraft.core import SamplingParams
from flashdraft.decode import sampler as sampler_module
from flashdraft.decode.sampler import Sampler
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.sampling import DRAFT, draw, probabilities, process_prefix
from flashdraft.target.hf import HfTarget

VOCAB, LENGTH, SAMPLES = 6, 3, 20_000
TABLE = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(1))
OTHER = 1.5 * torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(2))
ANCHOR = 2
WRONG = 1e-6  # p-value below which a sampler is called wrong; seeds are fixed, so the outcome never changes

PARAMS = {
    "temperature": {"temperature": 0.8},
    "top_k": {"temperature": 1.0, "top_k": 3},
    "top_p": {"temperature": 1.2, "top_p": 0.8},
    "min_p": {"temperature": 1.0, "min_p": 0.15},
    "penalties": {"temperature": 1.0, "repetition_penalty": 1.5, "frequency_penalty": 0.7},
    "bias": {"temperature": 1.0, "logit_bias": {1: 1.5, 4: -2.0}, "top_k": 4},
}

Propose = Callable[[Sampler, list[int]], tuple[torch.Tensor, "torch.Tensor | None"]]


def zero(sampler: Sampler, ids: list[int]) -> tuple[torch.Tensor, None]:
    """D15: always the same token, mostly wrong."""
    return torch.zeros(LENGTH - 1, dtype=torch.long), None


def likeliest(sampler: Sampler, ids: list[int]) -> tuple[torch.Tensor, None]:
    """An argmax drafter that is often right."""
    draft, last = [], ids[-1]
    for _ in range(LENGTH - 1):
        last = int(TABLE[last].argmax())
        draft.append(last)
    return torch.tensor(draft), None


def sampled(sampler: Sampler, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """A drafter that samples from another table, with its proposal recorded."""
    place = len(ids) - 1
    draft, rows, last = [], [], ids[-1]
    for uniform in sampler.noise.at(place, LENGTH - 1, DRAFT):
        rows.append(probabilities(OTHER[last][None], SamplingParams(temperature=1.0))[0])
        last = int(draw(rows[-1][None], uniform[None])[0])
        draft.append(last)
    return torch.tensor(draft), torch.stack(rows)


def sampled_narrow(sampler: Sampler, ids: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The same from two tokens only: most of the target's tokens can come from the residual alone."""
    draft, rows, last = [], [], ids[-1]
    for uniform in sampler.noise.at(len(ids) - 1, LENGTH - 1, DRAFT):
        rows.append(torch.zeros(VOCAB).index_fill(0, torch.tensor([last, (last + 3) % VOCAB]), 0.5))
        last = int(draw(rows[-1][None], uniform[None])[0])
        draft.append(last)
    return torch.tensor(draft), torch.stack(rows)


def answers(params: SamplingParams, propose: Propose | None) -> Iterator[Ids]:
    """Short answers, round by round, each with its own seed."""
    for seed in range(SAMPLES):
        sampler, ids = Sampler(SamplingParams(**{**vars(params), "seed": seed}), ()), [ANCHOR]
        while len(ids) <= LENGTH:
            draft, q = propose(sampler, ids) if propose else (torch.empty(0, dtype=torch.long), None)
            chain = [ids[-1], *draft.tolist()]
            kept, own = sampler.judge(TABLE[torch.tensor(chain)], draft, q, ids, 1)
            ids += [*draft[:kept].tolist(), own]
        yield tuple(ids[1 : LENGTH + 1])


def exact(params: SamplingParams) -> dict[Ids, float]:
    """Probability of every answer."""
    out = {}
    for answer in product(range(VOCAB), repeat=LENGTH):
        ids, mass = [ANCHOR], 1.0
        for token in answer:
            logits = TABLE[ids[-1]].clone()
            for biased, value in params.logit_bias.items():
                logits[biased] += value
            logits = process_prefix(logits, ids, 1, params, ()) if params.needs_prefix else logits
            mass *= float(probabilities(logits[None], params)[0, token])
            ids.append(token)
        out[answer] = mass
    return out


def p_value(params: SamplingParams, propose: Propose | None) -> float:
    """Chi-square of the counts against the exact probabilities; rare answers are put together."""
    seen, true = Counter(answers(params, propose)), exact(params)
    assert all(true[answer] > 0 for answer in seen), "an impossible answer was given"
    common = [a for a, mass in true.items() if mass * SAMPLES >= 10]
    rest = SAMPLES * (1 - sum(true[a] for a in common))
    observed = [seen[a] for a in common] + [SAMPLES - sum(seen[a] for a in common)]
    expected = [true[a] * SAMPLES for a in common] + [rest]
    if rest < 1e-6:
        observed, expected = observed[:-1], expected[:-1]
    scale = sum(observed) / sum(expected)
    return float(chisquare(observed, [e * scale for e in expected]).pvalue)


@pytest.mark.slow
@pytest.mark.parametrize("params", PARAMS)
@pytest.mark.parametrize("propose", [zero, likeliest, sampled, sampled_narrow], ids=lambda f: f.__name__)
def test_distribution(params: str, propose: Propose) -> None:
    assert p_value(SamplingParams(**PARAMS[params]), propose) > WRONG


def test_distribution_with_everything() -> None:
    """The fast suite's sample of the test above."""
    params = SamplingParams(temperature=0.9, top_k=5, top_p=0.95, frequency_penalty=0.5)
    assert p_value(params, sampled) > WRONG


def test_the_test_sees_a_wrong_verifier(monkeypatch: pytest.MonkeyPatch) -> None:
    """Power: a verifier that forgets to take the proposal out of the residual is found out."""

    def forgetful(draft, q, p, accept, own):
        ratio = p[:-1].gather(1, draft[:, None])[:, 0] / q.gather(1, draft[:, None])[:, 0]
        kept = int((accept < ratio).long().cumprod(0).sum())
        return kept, int(draw(p[kept][None], own[kept : kept + 1])[0])

    monkeypatch.setattr(sampler_module, "reject", forgetful)
    assert p_value(SamplingParams(temperature=1.0), sampled) < WRONG


def test_the_test_sees_a_wrong_acceptance() -> None:
    """Power: point proposals taken with a ratio test (D15) instead of by matching change the distribution."""
    counts: Counter[int] = Counter()
    p = probabilities(TABLE[ANCHOR][None], SamplingParams(temperature=1.0))[0]
    generator = torch.Generator().manual_seed(0)
    best = int(p.argmax())
    for _ in range(SAMPLES):
        u = torch.rand(2, dtype=torch.float64, generator=generator)
        counts[best if u[0] < p[best] / p.max() else int(draw(p[None], u[1:])[0])] += 1
    expected = p.double() * SAMPLES / p.double().sum()
    assert chisquare([counts[i] for i in range(VOCAB)], expected.tolist()).pvalue < WRONG


def test_excluded_tokens_never_appear() -> None:
    """D17: with top_k=2 a proposal of the third-ranked token is always refused; so with top_p."""
    order = TABLE[ANCHOR].argsort(descending=True).tolist()
    third = torch.tensor([order[2]])
    for params in (
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.0, top_p=float(TABLE[ANCHOR].softmax(0)[order[0]]) + 0.01),
    ):
        for q in (None, torch.nn.functional.one_hot(third, VOCAB).float()):
            for seed in range(300):
                sampler = Sampler(SamplingParams(**{**vars(params), "seed": seed}), ())
                kept, own = sampler.judge(TABLE[torch.tensor([ANCHOR, order[2]])], third, q, [ANCHOR], 1)
                assert kept == 0 and own in order[:2]


def test_penalties_in_greedy_decoding(target: HfTarget) -> None:
    """D18, D21: penalties count with drafts as without, and the answer still ends."""
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
        assert done.finish_reason == "length"


class Remembering:
    """A processor with a memory: it notes every prefix that it was shown, and lets no token come twice."""

    def __init__(self) -> None:
        self.shown: list[Ids] = []

    def __call__(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        self.shown.append(tuple(ids[0].tolist()))
        logits[:, ids[0, -3:]] -= 1.0 * len(self.shown)
        return logits


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_processor_with_memory_sees_plain_decoding(target: HfTarget, temperature: float) -> None:
    """D20: rejected drafts never reach a processor; it is called once per emitted token, on its exact prefix."""
    (prompt,) = random_prompts([8])
    seen = []
    truth: Ids = ()
    for script in (None, (7,), (0,), (2, 5, 1)):
        memory = Remembering()
        params = SamplingParams(max_new_tokens=24, temperature=temperature, seed=4, logits_processors=(memory,))
        if script is None:
            truth = answer_plain(target, prompt, params).ids
        else:
            (done,) = answer_drafted(target, ScriptedDrafter({prompt: truth}, script), [prompt], params)
            assert done.ids == truth
        seen.append(memory.shown)
    assert all(shown == seen[0] for shown in seen)
    assert len(seen[0]) == 24


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
