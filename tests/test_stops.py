"""Where an answer ends, however many tokens a round emitted: the reports of end tokens, limits and stop strings gone
wrong inside a block, each as a test against plain decoding."""

from __future__ import annotations

import pytest
import torch
from conftest import Ids, answer_drafted, answer_plain, random_prompts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers_for_tests import byte_tokenizer

from flashdraft.core import Completion, SamplingParams, UserError
from flashdraft.decode.engine import Engine
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.lookup import LookupDrafter
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.target.hf import HfTarget
from flashdraft.target.tiny import tiny_model, tiny_target

BLOCK = 8
TOKENIZER = byte_tokenizer()
PROMPT = random_prompts([7])[0]


@pytest.fixture(scope="module")
def byte_target() -> HfTarget:
    """A target whose ids are all tokens of the byte tokenizer."""
    return tiny_target(vocab_size=len(TOKENIZER), seed=3)


@pytest.fixture(scope="module")
def truth(byte_target: HfTarget) -> Ids:
    return answer_plain(byte_target, PROMPT, SamplingParams(max_new_tokens=48)).ids


def drafted(target: HfTarget, truth: Ids, params: SamplingParams, script=(7, 3, 0, 5), block=BLOCK) -> Completion:
    drafter = ScriptedDrafter({PROMPT: truth}, script, block)
    (done,) = answer_drafted(target, drafter, [PROMPT], params, tokenizer=TOKENIZER)
    check_agreement(done)
    return done


def check_agreement(done: Completion) -> None:
    """Ids, text, log-probabilities, usage and statistics say the same."""
    assert done.usage["completion_tokens"] == len(done.ids)
    if done.logprobs:
        assert [entry.token_id for entry in done.logprobs] == list(done.ids)
    whole = TOKENIZER.decode(done.ids, skip_special_tokens=True)
    assert whole.startswith(done.text)
    stats = done.stats
    assert stats.emitted == max(len(done.ids) - 1, 0)
    assert stats.accepted <= stats.emitted and stats.accepted <= stats.drafted
    assert sum(stats.accepted_per_slot) == stats.accepted


def first_places(truth: Ids) -> list[int]:
    """Places of tokens that did not occur before, so that an answer ends there and not earlier."""
    return [i for i, token in enumerate(truth) if token not in truth[:i]]


@pytest.mark.parametrize("kind", ["model eos", "model eos list", "stop_token_ids"])
def test_end_token_at_every_slot(byte_target: HfTarget, truth: Ids, kind: str) -> None:
    """D2: an end token that is accepted in mid-block ends the answer right there: as the first token of all, in the
    middle, as the last draft token, as the target's own token."""
    places = first_places(truth)[:20]
    assert places[0] == 0 and len(places) > 12
    for place in places:
        token, eos, extra = truth[place], (), ()
        if kind == "stop_token_ids":
            extra = (token,)
        else:
            eos = (token,) if kind == "model eos" else (1, token, 2)
        target = HfTarget(byte_target.model)
        target.eos_token_ids = eos
        params = SamplingParams(max_new_tokens=48, stop_token_ids=extra, logprobs=0)
        expected = answer_plain(target, PROMPT, params, TOKENIZER).ids
        for script in ((7,), (0,), (3, 1)):
            done = drafted(target, truth, params, script)
            assert done.ids == expected and done.ids[-1] in (token, *eos)
            assert done.finish_reason == "stop"


def test_eos_of_the_generation_config_as_int_and_list() -> None:
    model = tiny_model()
    model.generation_config.eos_token_id = 5
    assert HfTarget(model).eos_token_ids == (5,)
    model.generation_config.eos_token_id = [5, 9]
    assert HfTarget(model).eos_token_ids == (5, 9)
    model.generation_config.eos_token_id = None
    model.config.eos_token_id = 7
    assert HfTarget(model).eos_token_ids == (7,)


def test_ignore_eos_goes_on(byte_target: HfTarget, truth: Ids) -> None:
    target = HfTarget(byte_target.model)
    target.eos_token_ids = (truth[4],)
    done = drafted(target, truth, SamplingParams(max_new_tokens=48, ignore_eos=True))
    assert done.ids == truth and done.finish_reason == "length"


@pytest.mark.parametrize("count", range(1, 2 * BLOCK + 2))
def test_limit_is_exact(byte_target: HfTarget, truth: Ids, count: int) -> None:
    """D5, D7: never a token more than max_new_tokens, and usage says what was delivered."""
    for script in ((7,), (2,)):
        done = drafted(byte_target, truth, SamplingParams(max_new_tokens=count, logprobs=2), script)
        assert done.ids == truth[:count] and done.finish_reason == "length"


def test_limit_of_nothing_then_a_normal_call(byte_target: HfTarget, truth: Ids) -> None:
    """D6: no room for a draft, or for anything, leaves no stale state behind."""
    engine = Engine(byte_target, ScriptedDrafter({PROMPT: truth}, (5, 1), BLOCK), TOKENIZER)
    none, one, many = (engine.generate(PROMPT, SamplingParams(max_new_tokens=n)) for n in (0, 1, 20))
    assert (none.ids, none.text, none.finish_reason) == ((), "", "length")
    assert one.ids == truth[:1] and many.ids == truth[:20]
    assert [piece.ids for piece in engine.stream(PROMPT, SamplingParams(max_new_tokens=0))] == [()]
    batch = engine.generate([PROMPT, PROMPT, PROMPT], [SamplingParams(max_new_tokens=n) for n in (0, 9, 0)], max_rows=1)
    assert [len(c.ids) for c in batch] == [0, 9, 0]


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("max_rows", [1, 2])
def test_end_of_the_context(family: str, max_rows: int) -> None:
    """The context fills up in mid-block, beside a row that has room: the answer ends with it (also where positions are
    a table that has no more rows)."""
    limit = {"n_positions": 24} if family == "gpt2" else {"max_position_embeddings": 24}
    target = tiny_target(family, **limit)
    prompts = random_prompts((17, 4, 24, 23))
    params = SamplingParams(max_new_tokens=19)
    expected = [answer_plain(target, p, params).ids for p in prompts]
    assert [len(ids) for ids in expected] == [7, 19, 0, 1]
    answers = dict(zip(prompts, [(*ids, *[9] * 24) for ids in expected], strict=True))
    for drafter in (ScriptedDrafter(answers, (7, 2)), DFlashDrafter(tiny_drafter_model(target))):
        done = answer_drafted(target, drafter, prompts, params, max_rows=max_rows)
        assert [c.ids for c in done] == expected
        assert all(c.finish_reason == "length" for c in done)


def test_bad_prompts_are_refused(target: HfTarget) -> None:
    """D14: a prompt of one token works; none, too long or with unknown ids is a clear error."""
    assert len(answer_plain(target, (9,), SamplingParams(max_new_tokens=3)).ids) == 3
    for prompt, message in (((), "empty"), ((3, 97), "id 97"), ((-1,), "id -1"), ((5,) * 513, "513 tokens")):
        with pytest.raises(UserError, match=message):
            answer_plain(target, prompt, SamplingParams())


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, 40), length=st.integers(1, 9), script=st.lists(st.integers(0, 7), min_size=1, max_size=4))
def test_stop_string_anywhere(byte_target: HfTarget, truth: Ids, start: int, length: int, script: list[int]) -> None:
    """D9, D11: a stop string inside a block, across blocks, or in the middle of a token: text is cut before it, ids end
    with the token that completed it, and all is as in plain decoding."""
    text = TOKENIZER.decode(truth, skip_special_tokens=True)
    stop = text[start : start + length]
    if not stop or "\ufffd" in stop:
        return
    params = SamplingParams(max_new_tokens=48, stop=(stop, "never this"), logprobs=1)
    expected = answer_plain(byte_target, PROMPT, params, TOKENIZER)
    done = drafted(byte_target, truth, params, script)
    assert (done.ids, done.text, done.finish_reason) == (expected.ids, expected.text, expected.finish_reason)
    assert stop not in done.text
    if done.finish_reason == "stop":
        assert stop in TOKENIZER.decode(done.ids, skip_special_tokens=True)
        assert stop not in TOKENIZER.decode(done.ids[:-1], skip_special_tokens=True)
        assert done.text == text[: text.index(stop)]


def test_stop_string_of_half_a_token(byte_target: HfTarget) -> None:
    """The stop string ends inside a longer token: what stands before it shows, the rest of the token does not."""
    engine = Engine(byte_target, LookupDrafter(), TOKENIZER)
    ids = TOKENIZER("x the end")["input_ids"]
    forced = iter(ids)

    def force(_ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        return torch.full_like(logits, -1e9).index_fill(1, torch.tensor([next(forced)]), 0.0)

    done = engine.generate(PROMPT, SamplingParams(stop=(" t",), logits_processors=(force,), max_new_tokens=9))
    assert done.text == "x" and done.finish_reason == "stop"
    assert done.ids == tuple(ids[: len(done.ids)]) and TOKENIZER.decode(done.ids) == "x the"


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(st.integers(0, 7), min_size=1, max_size=5), stop=st.sampled_from(["", "a", "q", "T"]))
def test_pieces_add_up(byte_target: HfTarget, truth: Ids, script: list[int], stop: str) -> None:
    """D3: the stream is the completion, piece by piece, and only the last piece is finished."""
    params = SamplingParams(max_new_tokens=40, stop=(stop,) if stop else (), logprobs=0)
    engine = Engine(byte_target, ScriptedDrafter({PROMPT: truth}, script, BLOCK), TOKENIZER)
    pieces, whole = list(engine.stream(PROMPT, params)), engine.generate(PROMPT, params)
    plain_pieces = list(engine.stream_plain(PROMPT, params))
    for parts in (pieces, plain_pieces):
        assert "".join(p.text for p in parts) == whole.text
        assert tuple(i for p in parts for i in p.ids) == whole.ids
        for mine, other in zip((e for p in parts for e in p.logprobs), whole.logprobs, strict=True):
            assert mine.token_id == other.token_id and abs(mine.logprob - other.logprob) < 1e-4
        assert [p.finish_reason for p in parts[:-1]] == [None] * (len(parts) - 1)
        assert parts[-1].finish_reason == whole.finish_reason
        assert all(len(p.drafted) == len(p.ids) for p in parts)


def test_mask_token_is_a_token_like_others(target: HfTarget) -> None:
    """D1: output and prompt may hold the drafter's mask id; nothing is stripped."""
    prompt = random_prompts([9])[0]
    answer = answer_plain(target, prompt, SamplingParams(max_new_tokens=20)).ids
    mask = answer[3]
    prompt_with_mask = (mask, *prompt)
    drafter = DFlashDrafter(tiny_drafter_model(target, mask_token_id=mask))
    (done,) = answer_drafted(target, drafter, [prompt], SamplingParams(max_new_tokens=20))
    assert done.ids == answer and mask in done.ids
    expected = answer_plain(target, prompt_with_mask, SamplingParams(max_new_tokens=20))
    (done,) = answer_drafted(target, drafter, [prompt_with_mask], SamplingParams(max_new_tokens=20))
    assert (done.ids, done.prompt_ids) == (expected.ids, prompt_with_mask)


def test_minimum_length_forbids_the_end(byte_target: HfTarget, truth: Ids) -> None:
    target = HfTarget(byte_target.model)
    target.eos_token_ids = (truth[2],)
    params = SamplingParams(max_new_tokens=20, min_new_tokens=9)
    expected = answer_plain(target, PROMPT, params, TOKENIZER)
    done = drafted(target, truth, params)
    assert done.ids == expected.ids and len(done.ids) >= 9 and truth[2] not in done.ids[:8]
