"""Where an answer ends, however many tokens a round emitted: the reports of end tokens, limits and stop strings gone
wrong inside a block, each as a test against plain decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence

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
    assert stats.accepted <= stats.emitted <= stats.accepted + stats.rounds
    assert stats.accepted <= stats.drafted and stats.rounds <= stats.emitted
    assert stats.accepted_per_slot == sorted(stats.accepted_per_slot, reverse=True)
    assert all(count <= stats.rounds for count in stats.accepted_per_slot)


def forcing(ids: Sequence[int]) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """A processor that lets the target say just this after PROMPT; IndexError if it is asked for more."""

    def force(prefix: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        place = torch.tensor([ids[prefix.shape[1] - len(PROMPT)]])
        return torch.full_like(logits, -1e9).index_fill(1, place, 0.0)

    return force


def first_places(truth: Ids) -> list[int]:
    """Places of tokens that did not occur before, so that an answer ends there and not earlier."""
    return [i for i, token in enumerate(truth) if token not in truth[:i]]


@pytest.mark.parametrize("kind", ["model eos", "model eos list", "stop_token_ids"])
def test_end_token_at_every_slot(byte_target: HfTarget, truth: Ids, kind: str) -> None:
    """D2: an end token that is accepted in mid-block ends the answer right there: as the first token of all, in the
    middle, as the last draft token, as the target's own token."""
    places = first_places(truth)[:18]
    assert places[0] == 0 and {place % BLOCK for place in places} == set(range(BLOCK))
    for place in places:
        token, eos, extra = truth[place], (), ()
        if kind == "stop_token_ids":
            extra = (token,)
        else:
            eos = (token,) if kind == "model eos" else (TOKENIZER.eos_token_id, token, 10**6)
        target = HfTarget(byte_target.model)
        target.eos_token_ids = eos
        params = SamplingParams(max_new_tokens=48, stop_token_ids=extra, logprobs=0)
        expected = answer_plain(target, PROMPT, params, TOKENIZER)
        assert expected.ids == truth[: place + 1]
        for script in ((7,), (3, 1)):
            done = drafted(target, truth, params, script)
            assert (done.ids, done.text, done.finish_reason) == (expected.ids, expected.text, "stop")


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


@pytest.mark.parametrize("count", [1, 2, 3, 6])
def test_limit_beside_a_longer_neighbour(byte_target: HfTarget, truth: Ids, count: int) -> None:
    """D5 in a batch: the neighbour's block is longer than what this row may take. No processor is asked behind the
    limit, and the row's statistics are those that it has alone."""
    other = random_prompts([len(PROMPT)], seed=1)[0]
    drafter = ScriptedDrafter({PROMPT: truth, other: truth}, (7,), BLOCK)
    short = SamplingParams(max_new_tokens=count, logits_processors=(forcing(truth[:count]),))
    long = SamplingParams(max_new_tokens=40, logits_processors=(forcing(truth),))
    for params in (short, SamplingParams(max_new_tokens=count)):
        (alone,) = answer_drafted(byte_target, drafter, [PROMPT], params)
        done, neighbour = answer_drafted(byte_target, drafter, [PROMPT, other], [params, long], max_rows=2)
        assert done.ids == alone.ids == truth[:count] and neighbour.ids == truth[:40]
        assert done.stats.drafted == alone.stats.drafted == max(count - 2, 0)
        assert done.stats.accepted_per_slot == alone.stats.accepted_per_slot


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


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    text=st.lists(
        st.sampled_from(["\U0001f642", "\u65e5", "\u00e9", "a", " the", "ing", "12", "x", "\n"]), min_size=1, max_size=9
    ).map("".join),
    cuts=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 6)), min_size=1, max_size=3),
    script=st.lists(st.integers(0, 7), min_size=1, max_size=3),
    block=st.integers(2, BLOCK),
)
def test_stop_strings_in_any_text(byte_target: HfTarget, text: str, cuts, script: list[int], block: int) -> None:
    """Several stop strings, of emoji split over tokens and of tokens' halves: the first token that completes one is the
    last one, the text ends before the earliest stop string, and no processor is asked for more."""
    ids = tuple(TOKENIZER(text)["input_ids"])
    stops = tuple({text[start : start + length] for start, length in cuts} - {""}) or ("zz",)
    expected = (ids, text, "length")
    for end in range(len(ids), 0, -1):
        whole = TOKENIZER.decode(ids[:end]).rstrip("\ufffd")
        if found := [whole.find(stop) for stop in stops if stop in whole]:
            expected = (ids[:end], whole[: min(found)], "stop")
    params = SamplingParams(max_new_tokens=len(ids), stop=stops, logits_processors=(forcing(ids),), logprobs=1)
    for done in (
        answer_plain(byte_target, PROMPT, params, TOKENIZER),
        drafted(byte_target, ids, params, script, block),
    ):
        assert (done.ids, done.text, done.finish_reason) == expected
        assert len(done.logprobs) == len(done.ids)


@pytest.mark.parametrize("script", [(7,), (2,), (0,)])
def test_stop_string_of_half_a_token(byte_target: HfTarget, script: tuple[int, ...]) -> None:
    """D11: the stop string ends inside a longer token: what stands before it shows, the rest of the token does not."""
    ids = TOKENIZER("x the end")["input_ids"]
    params = SamplingParams(stop=(" t",), logits_processors=(forcing(ids),), logprobs=0, max_new_tokens=9)
    done = drafted(byte_target, ids, params, script)
    assert done.text == "x" and done.finish_reason == "stop"
    assert TOKENIZER.decode(done.ids) == "x the"


@pytest.mark.parametrize("script", [(7,), (1,)])
def test_the_last_token_allowed_may_be_the_end(byte_target: HfTarget, script: tuple[int, ...]) -> None:
    """An end token or a stop string that arrives with the last token is a stop, not a length; text that was held back
    for a stop string is given at the end; the end token itself does not show."""
    target = HfTarget(byte_target.model)
    target.eos_token_ids = (TOKENIZER.eos_token_id,)
    words = TOKENIZER("x the a")["input_ids"]
    ended = [*words, TOKENIZER.eos_token_id]
    for ids, limit, stop, expected in (
        (ended, len(ended), (), ("x the a", "stop")),
        (ended, len(ended), ("a?",), ("x the a", "stop")),
        (ended, len(words), ("a?",), ("x the a", "length")),
        (words, len(words), (" a",), ("x the", "stop")),
        (words, len(words), ("x the a",), ("", "stop")),
    ):
        params = SamplingParams(max_new_tokens=limit, stop=stop, logits_processors=(forcing(ids),))
        done = drafted(target, ids, params, script)
        assert (done.text, done.finish_reason) == expected and list(done.ids) == ids[:limit]


def test_a_cut_character_may_complete_a_stop_string(byte_target: HfTarget) -> None:
    """The limit cuts an emoji: its replacement character shows, and is text like other text."""
    ids = TOKENIZER("ab\U0001f642")["input_ids"][:-1]
    for stop, expected in (((), ("ab\ufffd", "length")), (("b\ufffd",), ("a", "stop"))):
        params = SamplingParams(max_new_tokens=len(ids), stop=stop, logits_processors=(forcing(ids),))
        done = drafted(byte_target, ids, params, (7,))
        assert (done.text, done.finish_reason, list(done.ids)) == (*expected, ids)


def test_stop_strings_do_not_reach_into_the_prompt(byte_target: HfTarget) -> None:
    """The prompt ends with the beginning of the stop string."""
    prompt = tuple(TOKENIZER("xxxxxxa")["input_ids"])
    assert len(prompt) == len(PROMPT)
    ids = TOKENIZER("bab")["input_ids"]
    params = SamplingParams(max_new_tokens=3, stop=("ab", "xa"), logits_processors=(forcing(ids),))
    (done,) = answer_drafted(byte_target, ScriptedDrafter({prompt: ids}, (7,)), [prompt], params, tokenizer=TOKENIZER)
    assert (done.text, list(done.ids), done.finish_reason) == ("b", ids, "stop")


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(script=st.lists(st.integers(0, 7), min_size=1, max_size=5), stop=st.sampled_from(["", "a", "q", "T"]))
def test_pieces_add_up(byte_target: HfTarget, truth: Ids, script: list[int], stop: str) -> None:
    """D3: the stream is the completion, piece by piece, and only the last piece is finished."""
    params = SamplingParams(max_new_tokens=24, stop=(stop,) if stop else (), logprobs=0)
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
    assert sum(flag for p in pieces for flag in p.drafted) == pieces[-1].stats.accepted
    assert not any(flag for p in plain_pieces for flag in p.drafted)


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


def test_calls_leave_nothing_behind(byte_target: HfTarget, truth: Ids) -> None:
    """D3, D6: ends in mid-block, streams that were left, two streams at once: the next answer of the same engine is as
    the first one was, for every drafter."""
    other = random_prompts([12], seed=1)[0]
    answers = {PROMPT: truth, other: answer_plain(byte_target, other, SamplingParams(max_new_tokens=48)).ids}
    limit = SamplingParams(max_new_tokens=20)
    first = {prompt: ids[:20] for prompt, ids in answers.items()}
    for drafter in (
        ScriptedDrafter(answers, (7, 3)),
        LookupDrafter(),
        DFlashDrafter(tiny_drafter_model(byte_target)),
    ):
        engine = Engine(byte_target, drafter, TOKENIZER)
        left = engine.stream(other, limit)
        next(left)
        next(left)
        stopped = engine.generate(PROMPT, SamplingParams(stop_token_ids=(truth[3],)))
        assert stopped.ids == truth[:4] and stopped.finish_reason == "stop"
        both = {prompt: engine.stream(prompt, limit) for prompt in answers}
        got: dict[Ids, Ids] = {PROMPT: (), other: ()}
        while both:
            for prompt, stream in list(both.items()):
                piece = next(stream)
                got[prompt] += piece.ids
                if piece.finish_reason:
                    del both[prompt]
        assert got == first
        left.close()
        assert engine.generate(other, limit).ids == first[other]


def test_logprobs_are_those_of_the_model(byte_target: HfTarget, truth: Ids) -> None:
    """Raw log-probabilities of each token and of the best alternatives, as the model itself gives them for the whole
    text, whatever was done to the logits."""
    params = SamplingParams(max_new_tokens=19, logprobs=3, logit_bias={5: 9.0}, repetition_penalty=1.3)
    done = drafted(byte_target, answer_plain(byte_target, PROMPT, params).ids, params)
    with torch.inference_mode():
        logits = byte_target.model(torch.tensor([[*PROMPT, *done.ids]])).logits[0, len(PROMPT) - 1 : -1]
    true = logits.log_softmax(dim=-1)
    best = true.topk(3)
    assert len(done.logprobs) == 19
    for place, entry in enumerate(done.logprobs):
        assert entry.token_id == done.ids[place]
        assert entry.logprob == pytest.approx(float(true[place, entry.token_id]), abs=1e-4)
        assert [token for token, _ in entry.top] == best.indices[place].tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values[place].tolist(), abs=1e-4)


def test_ids_beyond_the_vocabulary() -> None:
    """A head padded beyond the tokenizer: such rows never come out; an end token, a stop token or a prompt may name
    them (each was an IndexError in mid-answer), a bias may not."""
    target = HfTarget(tiny_model(), num_tokens=60)
    target.eos_token_ids = (70, 5)
    prompt = (65, *random_prompts([5], vocab_size=60)[0])
    for changes in (
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 5},
        {"min_new_tokens": 5, "stop_token_ids": (10**6,), "temperature": 1.0, "seed": 1},
        {"presence_penalty": 0.5, "frequency_penalty": 0.5},
    ):
        params = SamplingParams(max_new_tokens=30, logprobs=60, **changes)
        expected = answer_plain(target, prompt, params)
        assert max(expected.ids) < 60
        for drafter in (ScriptedDrafter({prompt: expected.ids}, (7, 2)), DFlashDrafter(tiny_drafter_model(target))):
            (done,) = answer_drafted(target, drafter, [prompt], params)
            assert done.ids == expected.ids
    for changes, message in (
        ({"logit_bias": {60: 1.0}}, "logit_bias names id 60, .* ids 0 to 59"),
        ({"logit_bias": {-1: 1.0}}, "logit_bias names id -1"),
        ({"logprobs": 61}, "logprobs must be at most the 60 tokens .* got 61"),
    ):
        with pytest.raises(UserError, match=message):
            answer_plain(target, prompt, SamplingParams(**changes))


def test_minimum_length_forbids_the_end(byte_target: HfTarget, truth: Ids) -> None:
    target = HfTarget(byte_target.model)
    target.eos_token_ids = (truth[2],)
    params = SamplingParams(max_new_tokens=20, min_new_tokens=9)
    expected = answer_plain(target, PROMPT, params, TOKENIZER)
    done = drafted(target, truth, params)
    assert done.ids == expected.ids and len(done.ids) >= 9 and truth[2] not in done.ids[:8]
