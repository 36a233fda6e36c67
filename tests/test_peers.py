"""The same numbers from two independent implementations: z-lab's package `dflash` and transformers' own DFlash path."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Ids, answer_drafted, answer_plain, random_prompts

from flashdraft.core import SamplingParams
from flashdraft.decode.compat import DFlashDraftModel
from flashdraft.drafters.dflash.drafter import DFlashDrafter, draft_logits
from flashdraft.drafters.dflash.model import DFlashModel
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.target.hf import HfTarget
from flashdraft.target.tiny import tiny_target

peer = pytest.mark.peer
needs_package = pytest.mark.skipif(
    importlib.util.find_spec("dflash") is None, reason="package dflash is absent; scripts/peers installs it"
)

SHAPES = {
    "full": {},
    "one layer": {"num_hidden_layers": 1},
    "three layers": {"num_hidden_layers": 3, "target_layer_ids": (0, 1, 2)},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8},
    "sliding, not causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "is_causal": False},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    "causal": {"is_causal": True},
    "wide heads": {"head_dim": 24, "num_attention_heads": 6, "num_key_value_heads": 3},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                 "original_max_position_embeddings": 16}, "max_position_embeddings": 64},
}  # fmt: skip


def reference(folder: Path) -> Any:
    """z-lab's class, reading our folder."""
    from dflash.model import DFlashDraftModel as Reference

    return Reference.from_pretrained(folder, dtype=torch.float32).eval()


@peer
@needs_package
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("size", [4, 8, 16])
@torch.inference_mode()
def test_draft_logits(tmp_path: Path, target: HfTarget, shape: str, size: int) -> None:
    """Round after round behind a growing context, each side with its own cache: the same logits."""
    mine = tiny_drafter_model(target, block_size=size, **SHAPES[shape])
    mine.save_pretrained(tmp_path)
    theirs = reference(tmp_path)
    theirs_cache = make_cache(theirs)
    width = mine.fc.weight.shape[1]
    generator = torch.Generator().manual_seed(3)
    state, start = DFlashDrafter(mine).new_state(target), 0
    for new, anchor in ((19, 7), (1, 8), (size, 9), (3, 10)):
        features = torch.randn(1, new, width, generator=generator)
        state.join([0] * new, features) if start == 0 else state.commit(features, [new])
        logits = draft_logits(mine, target, torch.tensor([anchor]), state._cache.window(slice(0, 1), size))
        block = torch.tensor([[anchor, *[mine.settings.mask_token_id] * (size - 1)]])
        hidden = theirs(
            target_hidden=features, noise_embedding=target.embed(block), past_key_values=theirs_cache, use_cache=True,
            position_ids=torch.arange(start, start + new + size)[None],
        )  # fmt: skip
        theirs_cache.crop(-size)
        torch.testing.assert_close(logits, target.head(hidden[:, 1:]), atol=1e-5, rtol=1e-5)
        start += new


def make_cache(model: Any) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    return cache


@peer
@needs_package
def test_folders_go_both_ways(tmp_path: Path, target: HfTarget) -> None:
    mine = tiny_drafter_model(target)
    mine.save_pretrained(tmp_path / "mine")
    theirs = reference(tmp_path / "mine")
    theirs.config.architectures = ["DFlashDraftModel"]
    theirs.save_pretrained(tmp_path / "theirs")
    back = DFlashModel.from_pretrained(tmp_path / "theirs")
    assert back.settings.target_layer_ids == mine.settings.target_layer_ids
    state = mine.state_dict()
    assert {n for n, t in back.state_dict().items() if torch.equal(t, state[n])} == set(state)


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
    from flashdraft.drafters.dflash.model import KeyValue

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


@peer
@needs_package
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_their_loop_accepts_what_ours_accepts(tmp_path: Path, fitted, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop of z-lab's package on the CPU: same ids, same emitted tokens in every round."""
    import time

    import dflash.model as package

    target, model = fitted
    model.save_pretrained(tmp_path)
    theirs = reference(tmp_path)
    monkeypatch.setattr(package, "_cuda_time", time.perf_counter)
    accepted = 0
    for prompt in random_prompts((12, 30), seed=9):
        stats = package.dflash_generate(theirs, target.model, torch.tensor([prompt]), 40, None, return_stats=True)
        mine, rounds_of_mine = ours(target, model, prompt, 40)
        assert stats.output_ids[0, len(prompt) :].tolist() == list(mine)
        # Their last block is cut to the limit before it is drafted; ours is drafted whole. All others are the same.
        assert stats.acceptance_lengths[:-2] == rounds_of_mine[: len(stats.acceptance_lengths) - 2]
        accepted += sum(stats.acceptance_lengths) - len(stats.acceptance_lengths)
        mine_whole = model.spec_generate(
            target=target.model, input_ids=torch.tensor([prompt]), max_new_tokens=40, stop_token_ids=[mine[7]]
        )
        theirs_whole = theirs.spec_generate(
            target=target.model, input_ids=torch.tensor([prompt]), max_new_tokens=40, stop_token_ids=[mine[7]]
        )
        assert mine_whole.tolist() == theirs_whole.tolist()
    assert accepted > 10


def ours(target: HfTarget, model: DFlashModel, prompt: Ids, count: int) -> tuple[Ids, list[int]]:
    """Our answer, and the tokens that each round emitted."""
    from flashdraft.decode.rounds import given, rounds
    from flashdraft.decode.row import Request, Row

    row = Row(Request(prompt, SamplingParams(max_new_tokens=count)), target)
    lengths = [len(row.answer.ids) for _ in rounds(target, DFlashDrafter(model), given([row]))]
    return tuple(row.answer.ids), [b - a for a, b in zip(lengths, lengths[1:], strict=False)]


@peer
@pytest.mark.parametrize("kind", ["fitted", "sliding", "mixed", "causal"])
def test_transformers_generate_takes_our_drafter(fitted, kind: str) -> None:
    """model.generate(assistant_model=ours, speculation_type="dflash"): same ids as plain decoding, and as many passes
    of the target as our own loop makes, so the same drafts were accepted."""
    target, model = fitted
    if kind != "fitted":
        model = DFlashDraftModel(tiny_drafter_model(target, **SHAPES[kind]).settings).eval()
    for prompt in random_prompts((12, 30), seed=9):
        calls: list[int] = []
        hook = target.model.model.register_forward_pre_hook(lambda *_, calls=calls: calls.append(1))
        out = target.model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
            assistant_model=model, speculation_type="dflash", max_new_tokens=41, do_sample=False, pad_token_id=0,
        )  # fmt: skip
        hook.remove()
        mine, emitted = ours(target, model, prompt, 41)
        assert tuple(out[0, len(prompt) :].tolist()) == mine
        assert (
            abs(len(calls) - 1 - len(emitted)) <= 1
        )  # they read the prompt, and may stop a round earlier at the limit
        assert kind != "fitted" or len(emitted) < 20


@peer
def test_fitted_pair_is_lossless_in_a_batch(fitted) -> None:
    """The same pair through our own batches."""
    target, model = fitted
    prompts = random_prompts((12, 30, 5, 8), seed=9)
    params = SamplingParams(max_new_tokens=40)
    done = answer_drafted(target, DFlashDrafter(model), prompts, params, max_rows=3)
    assert [c.ids for c in done] == [answer_plain(target, p, params).ids for p in prompts]
