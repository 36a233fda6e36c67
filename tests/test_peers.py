"""The same numbers from two independent implementations: z-lab's package `dflash` and transformers' own DFlash path."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ids, answer_drafted, answer_plain, random_prompts

from flashdraft.core import SamplingParams
from flashdraft.decode.compat import DFlashDraftModel
from flashdraft.decode.rounds import given, rounds
from flashdraft.decode.row import Request, Row
from flashdraft.drafters.dflash.drafter import DFlashDrafter, draft_logits
from flashdraft.drafters.dflash.model import DFlashModel, KeyValue
from flashdraft.drafters.dflash.tiny import tiny_config, tiny_drafter_model
from flashdraft.target.hf import HfTarget
from flashdraft.target.tiny import tiny_target

peer = pytest.mark.peer
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None, reason="package dflash is absent; scripts/peers installs it"
)

LLAMA3 = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "full": {},
    "one layer": {"num_hidden_layers": 1},
    "one layer, sliding": {"num_hidden_layers": 1, "layer_types": ("sliding_attention",), "sliding_window": 8},
    "three layers": {"num_hidden_layers": 3, "target_layer_ids": (0, 1, 2)},
    "three layers, mixed": {"num_hidden_layers": 3, "sliding_window": 8, "target_layer_ids": (3, 0),
                            "layer_types": ("sliding_attention", "sliding_attention", "full_attention")},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8},
    "sliding, not causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "is_causal": False},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    "mixed, not causal": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8,
                          "is_causal": False},
    "causal": {"is_causal": True},
    "wide heads": {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
    "one group": {"num_key_value_heads": 1},
    "no groups": {"num_key_value_heads": 4},
    "biases": {"attention_bias": True},
    "scales": {"input_embedding_scale": 4.0, "output_multiplier": 0.5, "final_logit_softcapping": 2.0},
    "llama3 rotation": {"rope_parameters": LLAMA3, "max_position_embeddings": 64},
    "linear rotation": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                 "original_max_position_embeddings": 16}, "max_position_embeddings": 64},
}  # fmt: skip


SLIDING_KINDS = ("full", "sliding", "sliding, not causal", "mixed", "causal", "three layers, mixed")


def reference(folder: Path) -> Any:
    """z-lab's class, reading our folder."""
    from dflash.model import DFlashDraftModel as Reference

    return Reference.from_pretrained(folder, dtype=torch.float32).eval()


def random_model(target: HfTarget, **changes: Any) -> DFlashModel:
    """A drafter whose norms and biases are random too: ones and zeros would hide a forgotten weight."""
    model = tiny_drafter_model(target, **changes)
    generator = torch.Generator().manual_seed(8)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


@peer
@needs_package
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [4, 8, 16])
def test_draft_logits(tmp_path: Path, target: HfTarget, shape: str, size: int) -> None:
    """Round after round behind a growing context, each side with its own cache: the same logits."""
    mine = random_model(target, block_size=size, **SHAPES[shape])
    mine.save_pretrained(tmp_path)
    theirs = reference(tmp_path)
    assert theirs.block_size == size and tuple(theirs.target_layer_ids) == mine.settings.target_layer_ids
    same_logits(mine, theirs, target)


@torch.inference_mode()
def same_logits(mine: DFlashModel, theirs: Any, target: HfTarget) -> None:
    from dflash.model import _draft_value, _raw_input_embeddings

    size = mine.settings.block_size
    cache = make_cache(theirs)
    width = mine.fc.weight.shape[1]
    scale = float(_draft_value(theirs.config, "input_embedding_scale", 1.0))
    generator = torch.Generator().manual_seed(3)
    state, start = DFlashDrafter(mine).new_state(target), 0
    for new, anchor in ((19, 7), (1, 8), (size, 9), (3, 10), (2, 11)):
        features = torch.randn(1, new, width, generator=generator)
        state.join([0] * new, features) if start == 0 else state.commit(features, [new])
        logits = draft_logits(mine, target, torch.tensor([anchor]), state._cache.window(slice(0, 1), size))
        block = torch.tensor([[anchor, *[mine.settings.mask_token_id] * (size - 1)]])
        hidden = theirs(
            target_hidden=features, noise_embedding=_raw_input_embeddings(target.model, block, scale),
            past_key_values=cache, use_cache=True, position_ids=torch.arange(start, start + new + size)[None],
        )  # fmt: skip
        cache.crop(-size)
        expected = theirs.compute_logits(hidden[:, 1:], target.model.lm_head)
        torch.testing.assert_close(logits, expected, atol=1e-5, rtol=1e-5)
        start += new


def make_cache(model: Any) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


@peer
@needs_package
@torch.inference_mode()
def test_folders_go_both_ways(tmp_path: Path, target: HfTarget) -> None:
    """Ours read by z-lab's class and saved again, and one that z-lab's class made: bit-equal tensors, same drafts."""
    from dflash.model import DFlashDraftModel as Reference

    mine = random_model(target, layer_types=("sliding_attention", "full_attention"), sliding_window=8)
    mine.save_pretrained(tmp_path / "mine")
    theirs = reference(tmp_path / "mine")
    theirs.save_pretrained(tmp_path / "theirs")
    made = Reference(theirs.config).eval()
    made.save_pretrained(tmp_path / "made")
    for folder, model in (("theirs", theirs), ("made", made)):
        back = DFlashModel.from_pretrained(tmp_path / folder)
        settings = back.settings
        assert (settings.target_layer_ids, settings.mask_token_id) == ((0, 2), 5)
        assert [settings.window(i) for i in range(2)] == [8, None]
        state = model.state_dict()
        assert {n for n, t in back.state_dict().items() if torch.equal(t, state[n])} == set(state)
        same_logits(back, model, target)
    for (name, tensor), other in zip(mine.state_dict().items(), back.state_dict().values(), strict=True):
        assert tensor.shape == other.shape, name


SPELLINGS: dict[str, dict[str, Any]] = {
    "theta at the top": {"rope_parameters": None, "rope_theta": 50000.0, "rope_scaling": None},
    "rope_parameters alone": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}, "rope_theta": None},
    "scaled at the top": {"rope_parameters": None, "rope_theta": 50000.0, "max_position_embeddings": 64,
                          "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}},
    "the old word inside": {"rope_scaling": None, "rope_theta": None, "max_position_embeddings": 64,
                            "rope_parameters": {"type": "yarn", "factor": 4.0, "rope_theta": 50000.0,
                                                "original_max_position_embeddings": 16}},
    "both, nested wins": {"block_size": 3},
    "nested only": {"block_size": None},
}  # fmt: skip


@peer
@needs_package
@pytest.mark.parametrize("spelling", SPELLINGS)
def test_configs_are_read_alike(tmp_path: Path, target: HfTarget, spelling: str) -> None:
    """D36: what a release wrote in its own way makes the same network there and here."""
    random_model(target, block_size=6, layer_types=("sliding_attention", "full_attention"), sliding_window=8
                 ).save_pretrained(tmp_path)  # fmt: skip
    path = tmp_path / "config.json"
    raw = {**json.loads(path.read_text()), **SPELLINGS[spelling]}
    path.write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
    mine = DFlashModel.from_pretrained(tmp_path)
    assert mine.settings.block_size == 6
    same_logits(mine, reference(tmp_path), target)


@peer
@torch.inference_mode()
def test_the_native_drafter_of_transformers(tmp_path: Path) -> None:
    """MuseGlimmerAssistantModel, which is DFlash inside transformers: we read its folder and draft the same, behind a
    window of 8; was read as causal and one position too near-sighted."""
    from transformers import MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel
    from transformers.cache_utils import DFlashCache

    target, size = tiny_target(), 6
    for types in (["sliding_attention"] * 2, ["sliding_attention", "full_attention"]):
        torch.manual_seed(0)
        config = MuseGlimmerAssistantConfig(
            hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            head_dim=16, sliding_window=8, block_size=size, mask_token_id=5, target_layer_ids=[0, 2], layer_types=types,
        )  # fmt: skip
        theirs = MuseGlimmerAssistantModel(config).eval()
        theirs.save_pretrained(tmp_path)
        mine = DFlashDraftModel.from_pretrained(tmp_path)
        cache = DFlashCache(config=theirs.config)
        cache.activate_past_recording()
        state, start = DFlashDrafter(mine).new_state(target), 0
        generator = torch.Generator().manual_seed(0)
        for new, anchor in ((3, 7), (1, 8), (2, 9), (6, 11), (1, 12), (4, 13), (6, 14)):
            features = torch.randn(1, new, 64, generator=generator)
            state.join([0] * new, features) if start == 0 else state.commit(features, [new])
            logits = draft_logits(mine, target, torch.tensor([anchor]), state._cache.window(slice(0, 1), size))
            if start:
                cache.crop(-size)
            cache.set_previous_accepted_tokens(new)
            hidden = theirs(
                noise_embeds=target.embed(torch.tensor([[anchor, *[5] * (size - 1)]])), context_hidden_states=features,
                position_ids=torch.arange(start, start + new + size)[None], cache=cache,
                attention_mask=torch.ones(1, start + new + size, dtype=torch.long),
            ).last_hidden_state  # fmt: skip
            torch.testing.assert_close(logits, target.head(hidden[:, 1:]), atol=1e-5, rtol=1e-5)
            start += new


def echo_pair(family: str = "llama") -> tuple[HfTarget, DFlashDraftModel]:
    """A target that goes round a cycle of tokens, and a drafter fitted to it: accepted often, not always."""
    target = tiny_target(family, seed=1)
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in target.model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(0.5)
    model = DFlashDraftModel(tiny_drafter_model(target, block_size=6).settings)
    prompts = random_prompts((12, 30), seed=9)
    truth = {p: answer_plain(target, p, SamplingParams(max_new_tokens=40)).ids for p in prompts}
    fit(model, target, truth)
    return target, model


def fit(model: DFlashDraftModel, target: HfTarget, truth: dict[Ids, Ids], steps: int = 500) -> None:
    """A few steps of training at random anchors, written out for a batch of one block."""
    settings, optimizer = model.settings, torch.optim.AdamW(model.parameters(), lr=3e-3)
    size = settings.block_size
    kept = []
    for prompt, answer in truth.items():
        cache = target.new_cache()
        cache.join()
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            kept.append((ids, target.forward(ids, cache, slice(0, 1), taps=settings.target_layer_ids).features))
    for step in range(steps):
        ids, features = kept[step % len(kept)]
        start = int(torch.randint(ids.shape[1] - 40, ids.shape[1] - size, (1,)))
        at_context, at_block = (
            model.rotation(torch.arange(start)[None]),
            model.rotation(torch.arange(start, start + size)[None]),
        )
        context = model.context_keys_values(model.project(features[:, :start]), at_context)

        def join(i: int, own: KeyValue, context: list[KeyValue] = context) -> KeyValue:
            return KeyValue(*(torch.cat(pair, 2) for pair in zip(context[i], own, strict=True)))

        block = torch.tensor([[int(ids[0, start]), *[settings.mask_token_id] * (size - 1)]])
        hidden = model.read_block(target.embed(block), at_block, join, lambda _i, _n: None)
        loss = torch.nn.functional.cross_entropy(target.head(hidden[0, 1:]), ids[0, start + 1 : start + size])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()


@pytest.fixture(scope="module")
def fitted() -> tuple[HfTarget, DFlashDraftModel]:
    return echo_pair()


def small_pair(family: str, kind: str, seed: int) -> tuple[HfTarget, DFlashDraftModel, list[Ids]]:
    """With a vocabulary of 4 a random drafter is often right: rounds of every length, without training. The mask token
    is one that the target emits (D1)."""
    target = tiny_target(family, vocab_size=4, seed=seed)
    shape = {**SHAPES[kind], "block_size": 5, "mask_token_id": 3}
    model = DFlashDraftModel(tiny_config(target, **shape)).eval()
    model.load_state_dict(tiny_drafter_model(target, seed=seed + 1, **shape).state_dict())
    generator = torch.Generator().manual_seed(seed)
    return target, model, [tuple(torch.randint(0, 4, (n,), generator=generator).tolist()) for n in (7, 20)]


PAIRS = [("llama", kind) for kind in SLIDING_KINDS] + [
    ("qwen3", "sliding"),
    ("mistral", "mixed"),
    ("gemma2", "full"),
    ("llama", "scales"),
]
pairs = pytest.mark.parametrize(("family", "kind"), PAIRS)


def ours(target: HfTarget, model: DFlashModel, prompt: Ids, count: int) -> tuple[Ids, list[int]]:
    """Our answer, and the tokens that each round emitted."""
    row = Row(Request(prompt, SamplingParams(max_new_tokens=count)), target)
    lengths = [len(row.answer.ids) for _ in rounds(target, DFlashDrafter(model), given([row]))]
    return tuple(row.answer.ids), [b - a for a, b in zip(lengths, lengths[1:], strict=False)]


def whole_rounds(emitted: list[int], count: int, size: int) -> int:
    """Rounds before the first whose block does not fit. From there on z-lab's loop drafts a shorter block, whose slots
    see less of each other; we draft it whole and cut it."""
    answered = 1
    for number, tokens in enumerate(emitted):
        if count - answered + 1 < size:
            return number
        answered += tokens
    return len(emitted)


def same_rounds(target: HfTarget, model: DFlashDraftModel, theirs: Any, prompt: Ids, count: int) -> list[int]:
    """z-lab's loop against ours; what our rounds emitted."""
    from dflash.model import dflash_generate

    stats = dflash_generate(theirs, target.model, torch.tensor([prompt]), count, None, return_stats=True)
    mine, emitted = ours(target, model, prompt, count)
    assert stats.output_ids[0, len(prompt) :].tolist() == list(mine)
    whole = whole_rounds(emitted, count, model.settings.block_size)
    assert stats.acceptance_lengths[:whole] == emitted[:whole]
    if all(model.settings.causal(i) for i in range(model.settings.num_hidden_layers)):
        assert stats.acceptance_lengths == emitted  # causal slots see nothing that was cut off
    return emitted


loop = pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")


@pytest.fixture
def cpu_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """z-lab's loop waits for a CUDA device before it looks at the clock."""
    import dflash.model as package

    monkeypatch.setattr(package, "_cuda_time", time.perf_counter)


@peer
@needs_package
@loop
@pytest.mark.usefixtures("cpu_clock")
@pairs
def test_their_loop_accepts_what_ours_accepts(tmp_path: Path, family: str, kind: str) -> None:
    """The loop of z-lab's package on the CPU: same ids, same emitted tokens in every round."""
    seen: set[int] = set()
    for seed in (0, 2):
        target, model, prompts = small_pair(family, kind, seed)
        model.save_pretrained(tmp_path)
        theirs = reference(tmp_path)
        for prompt in prompts:
            seen |= set(same_rounds(target, model, theirs, prompt, 40))
    assert len(seen) >= 2  # else nothing was compared


@peer
@needs_package
@loop
@pytest.mark.usefixtures("cpu_clock")
def test_their_loop_with_a_fitted_drafter(tmp_path: Path, fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A drafter that was trained a little: long rounds, and stops inside a block."""
    target, model = fitted
    model.save_pretrained(tmp_path)
    theirs, emitted = reference(tmp_path), []
    for prompt in random_prompts((12, 30), seed=9):
        emitted += same_rounds(target, model, theirs, prompt, 40)
        answer = answer_plain(target, prompt, SamplingParams(max_new_tokens=40)).ids
        # Only the stop tokens of the call count, not what the model says of its end.
        monkeypatch.setattr(target.model.generation_config, "eos_token_id", answer[5])
        for stop in (None, [answer[0]], [answer[3]], [answer[7], answer[30]], [96]):
            asked = {"input_ids": torch.tensor([prompt]), "max_new_tokens": 40, "stop_token_ids": stop}
            mine = model.spec_generate(target=target.model, **asked)
            assert mine.tolist() == theirs.spec_generate(target=target.model, **asked).tolist()
            assert stop is None or mine.shape[1] < len(prompt) + 40 or stop == [96]
    assert max(emitted) == 6 and sum(emitted) > 3 * len(emitted)


def transformers_rounds(target: HfTarget, model: Any, prompt: Ids, count: int) -> tuple[Ids, list[int]]:
    """The answer of transformers' own loop, and the tokens that each of its passes emitted, read off the positions at
    which the target is called."""
    anchors: list[int] = []
    hook = target.model.register_forward_pre_hook(
        lambda _m, _args, kwargs: anchors.append(int(kwargs["position_ids"][0, 0])), with_kwargs=True
    )
    out = target.model.generate(
        torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), assistant_model=model,
        speculation_type="dflash", max_new_tokens=count, do_sample=False, pad_token_id=0,
    )  # fmt: skip
    hook.remove()
    assert anchors[:2] == [0, len(prompt)]
    ends = [*anchors[2:], out.shape[1] - 1]
    return tuple(out[0, len(prompt) :].tolist()), [b - a for a, b in zip(anchors[1:], ends, strict=True)]


@peer
@pairs
def test_transformers_generate_takes_our_drafter(family: str, kind: str) -> None:
    """model.generate(assistant_model=ours, speculation_type="dflash"): same ids as plain decoding, and every pass of
    the target emits as many tokens as our own rounds do, to the last."""
    seen: set[int] = set()
    for seed in (0, 2):
        target, model, prompts = small_pair(family, kind, seed)
        for prompt in prompts:
            mine, emitted = ours(target, model, prompt, 40)
            assert transformers_rounds(target, model, prompt, 40) == (mine, emitted)
            assert mine == answer_plain(target, prompt, SamplingParams(max_new_tokens=40)).ids
            seen |= set(emitted)
    assert len(seen) >= 2


@peer
def test_transformers_generate_takes_a_fitted_drafter(fitted) -> None:
    """Long rounds: the drafter is right most of the time in their loop too."""
    target, model = fitted
    for prompt in random_prompts((12, 30), seed=9):
        theirs = transformers_rounds(target, model, prompt, 41)
        assert theirs == ours(target, model, prompt, 41)
        assert len(theirs[1]) < 20


@peer
def test_transformers_generate_stays_lossless_with_scaled_embeddings() -> None:
    """Gemma 3 hands out scaled embeddings there: other drafts than ours, the same answer."""
    target, model, prompts = small_pair("gemma3", "mixed", 0)
    for prompt in prompts:
        answer, _ = transformers_rounds(target, model, prompt, 40)
        assert answer == answer_plain(target, prompt, SamplingParams(max_new_tokens=40)).ids


@peer
def test_fitted_pair_is_lossless_in_a_batch(fitted) -> None:
    """The same pair through our own batches."""
    target, model = fitted
    prompts = random_prompts((12, 30, 5, 8), seed=9)
    params = SamplingParams(max_new_tokens=40)
    done = answer_drafted(target, DFlashDrafter(model), prompts, params, max_rows=3)
    assert [c.ids for c in done] == [answer_plain(target, p, params).ids for p in prompts]
    assert sum(c.stats.accepted for c in done) > 30
