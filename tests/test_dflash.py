"""DFlash drafters: every spelling of their configs, clear refusals, exact tensors, and the network's sight."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import answer_drafted, answer_plain, random_prompts
from safetensors.torch import load_file, save_file

from flashdraft.core import SamplingParams, UserError
from flashdraft.decode.compat import DFlashDraftModel
from flashdraft.drafters.choose import choose_drafter
from flashdraft.drafters.dflash.config import config_from_dict, config_to_dict, default_target_layer_ids
from flashdraft.drafters.dflash.drafter import DFlashDrafter, draft_logits
from flashdraft.drafters.dflash.model import DFlashModel
from flashdraft.drafters.dflash.rope import frequencies, rotate, rotation
from flashdraft.drafters.dflash.tiny import tiny_config, tiny_drafter_model
from flashdraft.target.hf import HfTarget
from flashdraft.target.tiny import tiny_target

PUBLISHED: dict[str, Any] = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "block_size": 16,
    "dflash_config": {"mask_token_id": 90, "target_layer_ids": [1, 9, 17, 25, 33]},
    "num_target_layers": 36,
    "num_hidden_layers": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "layer_types": ["full_attention", "full_attention"],
    "sliding_window": None,
    "use_sliding_window": False,
    "max_window_layers": 2,
    "max_position_embeddings": 4096,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "attention_bias": False,
    "vocab_size": 97,
    "dtype": "bfloat16",
}


def published(**changes: Any) -> dict[str, Any]:
    """The published config with keys changed, moved into dflash_config (`nested__x`) or dropped (`None` for "gone")."""
    raw = json.loads(json.dumps(PUBLISHED))
    for key, value in changes.items():
        place = raw["dflash_config"] if key.startswith("nested__") else raw
        key = key.removeprefix("nested__")
        if value == "gone":
            place.pop(key, None)
        else:
            place[key] = value
    return raw


SPELLINGS = {
    "block size nested": published(block_size="gone", nested__block_size=16),
    "block size in both": published(block_size=3, nested__block_size=16),
    "rope_parameters": published(rope_theta="gone", rope_scaling="gone",
                                 rope_parameters={"rope_theta": 1000000, "rope_type": "default"}),
    "flat keys": published(dflash_config="gone", mask_token_id=90, target_layer_ids=[1, 9, 17, 25, 33]),
    "no auto_map, old dtype": published(auto_map="gone", dtype="gone", torch_dtype="bfloat16"),
    "AngelSlim": published(architectures=["QwenDFlashDraftModel"], num_anchors=512, loss_decay_gamma=7.0,
                           attention_backend="flex"),
    "no layer types": published(layer_types="gone"),
    "an empty nested key hides nothing": published(nested__block_size=None, nested__num_target_layers=None),
    "a head for the whole vocabulary": published(draft_vocab_size=97),
    "the same rotation for each kind of layer": published(rope_theta="gone", rope_parameters={
        kind: {"rope_theta": 1000000, "rope_type": "default"} for kind in ("full_attention", "sliding_attention")}),
    "what the target's rotation leaves behind": published(rope_parameters={
        "rope_theta": 1000000, "rope_type": "default", "partial_rotary_factor": 1.0, "mrope_section": [4, 2, 2]}),
    "keys of engines, neutral": published(nested__sample_from_anchor=False, nested__attention_value_scale=1.0,
                                          nested__attention_sink_bias=False, is_neox_style=True),
}  # fmt: skip


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_the_same_drafter(spelling: str) -> None:
    """D36: block size and rotation are found wherever a release put them."""
    assert config_from_dict(SPELLINGS[spelling]) == config_from_dict(PUBLISHED)


YARN = {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 1000000}
YARNS = {
    "rope_scaling": published(rope_scaling={"rope_type": "yarn", **YARN}),
    "rope_scaling, theta beside it": published(
        rope_scaling={"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    ),
    "rope_parameters": published(rope_theta="gone", rope_parameters={"rope_type": "yarn", **YARN}),
    "old word": published(rope_theta="gone", rope_parameters={"type": "yarn", **YARN}),
}


def test_scaled_rotation_in_every_spelling() -> None:
    """`type` for `rope_type` inside rope_parameters was read as plain rotation, without a word."""
    first, *others = [config_from_dict(raw) for raw in YARNS.values()]
    assert first.rope_parameters == {"rope_type": "yarn", **YARN}
    assert all(other == first for other in others)
    inverse, factor = frequencies(first, torch.device("cpu"))
    plain, one = frequencies(config_from_dict(PUBLISHED), torch.device("cpu"))
    assert factor != one and not torch.allclose(inverse, plain)
    nonsense = config_from_dict(published(rope_scaling={"type": "nonsense", "factor": 2.0}))
    with pytest.raises(UserError, match="rope_type is 'nonsense'"):
        frequencies(nonsense, torch.device("cpu"))


def test_muse_sees_both_sides() -> None:
    """transformers' own class (Muse-Glimmer) has flat keys, no vocabulary, slides in every layer, sees both sides of a
    block, and counts the window's own distance in; it was read as causal."""
    raw = published(
        architectures=["MuseGlimmerAssistantModel"], model_type="muse_glimmer_assistant", dflash_config="gone",
        mask_token_id=90, target_layer_ids=[1, 13, 25], vocab_size="gone", layer_types="gone", sliding_window=2048,
        num_target_layers="gone",
    )  # fmt: skip
    config = config_from_dict(raw)
    assert config.layer_types == ("sliding_attention",) * 2
    assert [config.causal(0), config.window(0)] == [False, 2049]
    assert (config.vocab_size, config.target_layer_ids) == (91, (1, 13, 25))
    assert config_from_dict(config_to_dict(config, "float32")) == config


def test_config_round_trip() -> None:
    """D83: causality, layer types, window, soft cap and what we do not use survive; both spellings are written."""
    for changes in (
        {},
        {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8},
        {"is_causal": True}, {"is_causal": False}, {"nested__causal": True},
        {"nested__input_embedding_scale": 5.5, "nested__final_logit_softcapping": 30.0},
        {"nested__output_multiplier": 2.0},
        {"rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
        {"draft_vocab_size": 50}, {"tie_word_embeddings": True, "eos_token_id": 3},
    ):  # fmt: skip
        config = config_from_dict(published(**changes))
        written = config_to_dict(config, "bfloat16")
        assert config_from_dict(json.loads(json.dumps(written))) == config
        assert written["block_size"] == written["dflash_config"]["block_size"] == 16
        assert written["rope_theta"] == written["rope_parameters"]["rope_theta"] == 1000000
        nested = written["dflash_config"]
        for half in (  # engines that know one place only
            {k: v for k, v in written.items() if k not in ("block_size", "rope_theta", "rope_scaling", "is_causal")},
            {k: v for k, v in written.items() if k != "rope_parameters"}
            | {"dflash_config": {k: v for k, v in nested.items() if k not in ("block_size", "causal")}},
        ):
            assert config_from_dict(half) == config


def test_causality_rule() -> None:
    """Sliding layers are causal and full ones are not, unless is_causal or dflash_config.causal says so for all."""
    mixed = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 8}
    for changes, expected in (
        ({}, [True, False]), ({"is_causal": False}, [False, False]), ({"is_causal": True}, [True, True]),
        ({"nested__causal": True}, [True, True]), ({"is_causal": False, "nested__causal": True}, [False, False]),
    ):  # fmt: skip
        config = config_from_dict(published(**mixed, **changes))
        assert [config.causal(i) for i in range(2)] == expected
        assert [config.window(i) for i in range(2)] == [8, None]
    swa = config_from_dict(published(layer_types="gone", nested__use_swa=True, nested__swa_window_size=12))
    assert swa.layer_types == ("sliding_attention",) * 2 and swa.sliding_window == 12


REFUSED = {
    "no ids": (published(nested__target_layer_ids="gone"), "'target_layer_ids' is missing"),
    "no mask": (published(nested__mask_token_id="gone"), "'mask_token_id' is missing"),
    "no block size": (published(block_size="gone"), "'block_size' is missing"),
    "no width": (published(hidden_size="gone"), "'hidden_size' is missing"),
    "negative id": (published(nested__target_layer_ids=[-1, 3]), r"target_layer_ids is \[-1, 3\].*0 to 35"),
    "id too large": (published(nested__target_layer_ids=[1, 36]), r"target_layer_ids is \[1, 36\].*0 to 35"),
    "same id twice": (published(nested__target_layer_ids=[1, 1]), "free of repeats"),
    "mask outside": (published(nested__mask_token_id=97), "mask_token_id is 97.*vocab_size = 97"),
    "block of one": (published(block_size=1), "block_size is 1"),
    "window missing": (published(layer_types=["sliding_attention"] * 2), "sliding_window is None"),
    "layer types short": (published(layer_types=["full_attention"]), "num_hidden_layers = 2"),
    "partial rotary": (published(rope_parameters={"partial_rotary_factor": 0.25}), "partial_rotary_factor is 0.25"),
    "DSpark": (published(architectures=["Qwen3DSparkModel"], markov_rank=256), "DSpark drafter"),
    "Domino": (published(nested__projector_type="domino"), "Domino drafter"),
    "XPress": (published(architectures=["XPressDraftModel"]), "XPress drafter"),
    "DFlare": (published(architectures=["QwenDFlareDraftModel"]), "DFlare drafter"),
    "DFlash2": (published(architectures=["DFlash2DraftModel"], nested__conv_kernel_size=2), "DFlash2 drafter"),
    "speculators": (published(speculators_model_type="dflash"), "speculators_model_type 'dflash'"),
    "another model": (published(architectures=["LlamaForCausalLM"]), r"architectures is \['LlamaForCausalLM'\]"),
    "sinks": (published(nested__attention_sink_bias=True), "attention_sink_bias is True"),
    "scaled values": (published(nested__attention_value_scale=0.5), "attention_value_scale is 0.5"),
    "anchor predicts": (published(nested__sample_from_anchor=True), "sample_from_anchor is True"),
    "interleaved rotation": (published(is_neox_style=False), "is_neox_style is False"),
    "another activation": (published(hidden_act="gelu"), "hidden_act is 'gelu'"),
    "partial rotary beside": (published(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "two rotations": (
        published(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}),
        "rope_parameters is .*same",
    ),
    "no window": (published(layer_types=["sliding_attention"] * 2, sliding_window=0), "sliding_window is 0"),
    "unknown layer": (published(layer_types=["full_attention", "conv"]), "layer_types is .*'conv'"),
    "heads and groups": (published(num_key_value_heads=3), "num_attention_heads is 4.*num_key_value_heads 3"),
    "odd head": (published(head_dim=15), "head_dim is 15"),
    "no list": (published(nested__target_layer_ids="1,2"), "'target_layer_ids' is '1,2'"),
    "no ids at all": (published(nested__target_layer_ids=[]), r"target_layer_ids is \[\]"),
    "mask as text": (published(nested__mask_token_id="90"), "'mask_token_id' is '90'"),
    "no number": (published(hidden_size="32"), "'hidden_size' is '32'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals_name_the_key(case: str) -> None:
    """D39, D53, D81 and relatives of DFlash: the message names the key and what it holds."""
    raw, message = REFUSED[case]
    with pytest.raises(UserError, match=message):
        config_from_dict(raw)


def test_the_last_layer_can_be_tapped(target: HfTarget) -> None:
    """D39: N-1 is a layer (whose features are normed), N is none; its drafter stays lossless."""
    assert config_from_dict(published(nested__target_layer_ids=[0, 35])).target_layer_ids == (0, 35)
    assert config_from_dict(published(nested__target_layer_ids=[35, 0])).target_layer_ids == (35, 0)  # fc's order
    drafter = DFlashDrafter(tiny_drafter_model(target, target_layer_ids=(3, 0)))
    drafter.check(target)
    (prompt,), params = random_prompts([9]), SamplingParams(max_new_tokens=12)
    (done,) = answer_drafted(target, drafter, [prompt], params)
    assert done.ids == answer_plain(target, prompt, params).ids


def test_default_taps() -> None:
    """The paper's rule for new drafters; a target too small for different taps is refused."""
    assert default_target_layer_ids(36, 5) == (1, 9, 17, 25, 33)
    assert default_target_layer_ids(24, 5) == (1, 6, 11, 16, 21)
    assert default_target_layer_ids(30, 1) == (15,)
    for layers in (4, 5, 3):
        with pytest.raises(UserError, match=f"{layers} layers"):
            default_target_layer_ids(layers, 4)


def test_pairs_that_do_not_fit(target: HfTarget) -> None:
    """D63: both values of what does not fit."""
    for changes, message in (
        ({"hidden_size": 48}, "hidden_size is 48 in the drafter and 32"),
        ({"num_target_layers": 7}, "num_target_layers is 7 .* has 4 layers"),
        ({"num_target_layers": None, "target_layer_ids": (1, 4)}, "layer 4.*layers 0 to 3"),
        ({"vocab_size": 200, "mask_token_id": 150}, "mask_token_id 150 is outside the 97"),
    ):
        with pytest.raises(UserError, match=message):
            DFlashDrafter(tiny_drafter_model(target, **changes)).check(target)
    with pytest.raises(UserError, match="block_size must be at least 2"):
        DFlashDrafter(tiny_drafter_model(target), block_size=1)


def test_reduced_vocabulary_must_fit(target: HfTarget) -> None:
    """An offset that leads out of the target's vocabulary died in the target's embedding, many tokens later."""
    model = tiny_drafter_model(target, draft_vocab_size=20)
    DFlashDrafter(model).check(target)
    for offset, message in ((78, "d2t gives ids 0 to 97, but .* 0 to 96"), (-20, "d2t gives ids -1 to 18")):
        model.d2t = torch.zeros(20, dtype=torch.long)
        model.d2t[-1] = offset
        with pytest.raises(UserError, match=message):
            DFlashDrafter(model).check(target)


def test_names_of_the_ecosystem_refuse_what_they_cannot(target: HfTarget) -> None:
    """spec_generate answered the first of two prompts and dropped the other; transformers would put the target's head
    on a drafter that has its own."""
    model = DFlashDraftModel(tiny_config(target))
    with pytest.raises(UserError, match="2 rows"):
        model.spec_generate(target=target.model, input_ids=torch.ones(2, 3, dtype=torch.long), max_new_tokens=4)
    with pytest.raises(UserError, match="head of its own"):
        _ = DFlashDraftModel(tiny_config(target, draft_vocab_size=20)).config


@pytest.fixture
def folder(tmp_path: Path, target: HfTarget) -> Path:
    tiny_drafter_model(target).save_pretrained(tmp_path)
    return tmp_path


def rewrite(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")


def equal_weights(a: DFlashModel, b: DFlashModel) -> bool:
    theirs = b.state_dict()
    return all(torch.equal(t, theirs[n]) for n, t in a.state_dict().items()) and len(a.state_dict()) == len(theirs)


def test_saved_and_loaded_bit_equal(folder: Path, target: HfTarget) -> None:
    """D47, D49: no embedding or head is stored or wanted, and every tensor comes back as it was."""
    model, loaded = tiny_drafter_model(target), DFlashModel.from_pretrained(folder)
    assert loaded.settings == model.settings and equal_weights(model, loaded)
    assert not [n for n in load_file(folder / "model.safetensors") if "embed" in n or "lm_head" in n]
    assert not list(folder.glob("*.new"))
    half = DFlashModel.from_pretrained(folder, dtype=torch.bfloat16)
    half.save_pretrained(folder)
    assert DFlashModel.from_pretrained(folder).dtype == torch.bfloat16


def fuse(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {n: t for n, t in tensors.items() if not any(f".{p}_proj." in n for p in "qkv")}
    for i in range(2):
        parts = [tensors[f"layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"]
        out[f"layers.{i}.self_attn.qkv_proj.weight"] = torch.cat(parts)
        gate_up = [out.pop(f"layers.{i}.mlp.{p}_proj.weight") for p in ("gate", "up")]
        out[f"layers.{i}.mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    return out


VARIANTS = {
    "prefix": lambda t: {f"model.{n}": v for n, v in t.items()},
    "fused": fuse,
    "midlayer": lambda t: {n.replace("layers.0.", "midlayer."): v for n, v in t.items()},
    "muse": lambda t: {
        n.replace("fc.", "encoder.fc.").replace("hidden_norm.", "encoder.output_norm_enc."): v for n, v in t.items()
    },
    "copies of the target's": lambda t: {
        **t, "embed_tokens.weight": torch.randn(97, 32), "lm_head.weight": torch.randn(97, 32),
        "rotary_emb.inv_freq": torch.ones(8), "t2d": torch.ones(97, dtype=torch.bool),
    },
}  # fmt: skip


@pytest.mark.parametrize("variant", VARIANTS)
def test_names_of_other_exporters(folder: Path, target: HfTarget, variant: str) -> None:
    rewrite(folder, VARIANTS[variant])
    assert equal_weights(DFlashModel.from_pretrained(folder), tiny_drafter_model(target))


def test_broken_folders_say_what_is_wrong(folder: Path, tmp_path: Path) -> None:
    rewrite(folder, lambda t: {**{n: v for n, v in t.items() if n != "norm.weight"}, "nonsense": torch.ones(1)})
    with pytest.raises(UserError, match=r"missing tensors: \['norm.weight'\]; unexpected tensors: \['nonsense'\]"):
        DFlashModel.from_pretrained(folder)
    rewrite(folder, lambda t: {**{n: v for n, v in t.items() if n != "nonsense"}, "norm.weight": torch.ones(5)})
    with pytest.raises(UserError, match=r"norm.weight has shape \(5,\), config.json says \(32,\)"):
        DFlashModel.from_pretrained(folder)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])
    with pytest.raises(UserError, match="model.safetensors is not a whole safetensors file"):
        DFlashModel.from_pretrained(folder)
    weights.rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="no .*safetensors file.*can run code"):
        DFlashModel.from_pretrained(folder)
    for text in ("[1]", '{"dflash_config": [1]}'):
        (folder / "config.json").write_text(text)
        with pytest.raises(UserError, match="not a drafter's config"):
            DFlashModel.from_pretrained(folder)
    (folder / "config.json").write_text("{not json")
    with pytest.raises(UserError, match="is not JSON"):
        DFlashModel.from_pretrained(folder)
    (folder / "config.json").unlink()
    with pytest.raises(UserError, match="has no config.json"):
        DFlashModel.from_pretrained(folder)
    with pytest.raises(UserError, match="no such folder"):
        DFlashModel.from_pretrained(tmp_path / "nowhere" / "at" / "all")
    with pytest.raises(UserError, match="the hub gave nothing"):
        DFlashModel.from_pretrained("nobody/nothing")


def test_a_save_that_fails_leaves_the_old_folder(folder: Path, target: HfTarget, monkeypatch) -> None:
    """A full disk in the middle of a save must not cost the drafter that was there."""
    import flashdraft.drafters.dflash.weights as module

    def half(tensors: dict[str, torch.Tensor], path: Path, **_: Any) -> None:
        path.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(module, "save_file", half)
    with pytest.raises(OSError, match="disk full"):
        tiny_drafter_model(target, seed=7, is_causal=True).save_pretrained(folder)
    loaded = DFlashModel.from_pretrained(folder)
    assert loaded.settings.is_causal is None and equal_weights(loaded, tiny_drafter_model(target))


KINDS = {
    "full": {},
    "sliding": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8},
    "sliding, not causal": {"layer_types": ("sliding_attention",) * 2, "sliding_window": 8, "is_causal": False},
    "mixed": {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 8},
    "causal": {"is_causal": True},
    "yarn": {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0,
                                 "original_max_position_embeddings": 16}, "max_position_embeddings": 64},
}  # fmt: skip


@torch.inference_mode()
def by_definition(model: DFlashModel, target: HfTarget, features: torch.Tensor, anchor: int, size: int) -> torch.Tensor:
    """Draft logits written out pair by pair: context and block in one sequence, no cache."""
    config, start = model.settings, features.shape[1]
    context = model.hidden_norm(model.fc(features))[0]
    x = target.embed(torch.tensor([anchor, *[config.mask_token_id] * (size - 1)]))
    positions = torch.arange(start + size)
    at = model.rotation(positions[None])
    for index, layer in enumerate(model.layers):
        attention, normed = layer.self_attn, layer.input_layernorm(x)
        both = torch.cat((context, normed))
        heads = lambda t: t.view(1, len(t), -1, config.head_dim)  # noqa: E731
        keys = rotate(attention.k_norm(heads(attention.k_proj(both))).transpose(1, 2), at)[0]
        values = heads(attention.v_proj(both)).transpose(1, 2)[0]
        block_at = type(at)(at.cos[:, start:], at.sin[:, start:])
        queries = rotate(attention.q_norm(heads(attention.q_proj(normed))).transpose(1, 2), block_at)[0]
        outs = []
        for slot in range(size):
            q_pos = start + slot
            window, causal = config.window(index), config.causal(index)
            seen = [
                k for k in range(start + size)
                if (k <= q_pos or not causal) and (window is None or abs(q_pos - k) < window)
            ]  # fmt: skip
            for head in range(config.num_attention_heads):
                group = head // (config.num_attention_heads // config.num_key_value_heads)
                scores = keys[group, seen] @ queries[head, slot] * config.head_dim**-0.5
                outs.append(scores.softmax(0) @ values[group, seen])
        x = x + attention.o_proj(torch.stack(outs).view(size, -1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    return target.head(model.norm(x))[1:]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("size", [4, 8])
@torch.inference_mode()
def test_cached_drafts_equal_the_definition(target: HfTarget, kind: str, size: int) -> None:
    """D34: context that came in pieces, projected once and cached, gives the logits of the written-out network, behind
    a window of 8 at a context of 30."""
    model = tiny_drafter_model(target, block_size=size, **KINDS[kind])
    features = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(1))
    state = DFlashDrafter(model).new_state(target)
    state.join([9] * 17, features[:, :17])
    for start, kept, junk in ((17, 5, 2), (22, 1, 6), (23, 7, 0)):
        new = torch.cat((features[:, start : start + kept], torch.randn(1, junk, 64)), 1)
        draft_logits(model, target, torch.tensor([11]), state._cache.window(slice(0, 1), size))
        state.commit(new, [kept])
    got = draft_logits(model, target, torch.tensor([11]), state._cache.window(slice(0, 1), size))[0]
    torch.testing.assert_close(got, by_definition(model, target, features, 11, size), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_ragged_rows_draft_as_if_alone(target: HfTarget, kind: str) -> None:
    """Rows of different length, before and after one of them left and another took its place."""
    model = tiny_drafter_model(target, **KINDS[kind])
    generator = torch.Generator().manual_seed(4)
    texts = [torch.randn(1, n, 64, generator=generator) for n in (5, 19, 12)]
    state = DFlashDrafter(model).new_state(target)
    for features in texts:
        state.join([9] * features.shape[1], features)

    def check() -> None:
        anchors = torch.arange(20, 20 + len(texts))
        got = draft_logits(model, target, anchors, state._cache.window(slice(0, len(texts)), 5))
        for row, features in enumerate(texts):
            expected = by_definition(model, target, features, int(anchors[row]), 5)
            torch.testing.assert_close(got[row], expected, atol=1e-4, rtol=1e-4)

    check()
    new = torch.randn(3, 5, 64, generator=generator)
    kept = (5, 1, 3)
    state.commit(new, kept)
    texts = [torch.cat((text, new[b : b + 1, : kept[b]]), 1) for b, text in enumerate(texts)]
    check()
    state.leave(0)
    texts = [texts[2], texts[1]]
    check()
    texts.append(torch.randn(1, 2, 64, generator=generator))
    state.join([9, 9], texts[-1])
    check()


def test_window_matters(target: HfTarget) -> None:
    """The test above would notice a drafter that ignores its window."""
    features = torch.randn(1, 30, 64, generator=torch.Generator().manual_seed(1))
    full, sliding = tiny_drafter_model(target), tiny_drafter_model(target, **KINDS["sliding"])
    assert not torch.allclose(
        by_definition(full, target, features, 11, 4), by_definition(sliding, target, features, 11, 4), atol=1e-3
    )


def test_rotation_in_half_precision_is_computed_in_full(target: HfTarget) -> None:
    """D42: a bfloat16 drafter's frequencies are not rounded, so far positions do not drift."""
    config = tiny_config(target, rope_parameters={"rope_type": "default", "rope_theta": 1e6})
    positions = torch.tensor([[5000, 31999]])
    half = DFlashModel(config).to(torch.bfloat16).rotation(positions)
    exponent = torch.arange(0, 16, 2, dtype=torch.float64) / 16
    exact = (positions[0, :, None].double() / 1e6**exponent).repeat(1, 2)
    assert half.cos.dtype == torch.bfloat16
    torch.testing.assert_close(half.cos[0].double(), exact.cos(), atol=1e-2, rtol=0)
    wide = rotation(positions, (1 / 1e6**exponent).float(), 1.0, torch.float32)
    torch.testing.assert_close(wide.cos[0].double(), exact.cos(), atol=2e-3, rtol=0)


@pytest.mark.parametrize("kind", ["full", "yarn"])
def test_rotation_is_transformers(target: HfTarget, kind: str) -> None:
    """The other tests here take our rotation for granted; this one knows the formula of Qwen3 from its source."""
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding, apply_rotary_pos_emb

    config = tiny_config(target, **KINDS[kind])
    theirs = Qwen3RotaryEmbedding(Qwen3Config(head_dim=16, rope_parameters=dict(config.rope_parameters),
                                              max_position_embeddings=config.max_position_embeddings))  # fmt: skip
    positions, x = torch.tensor([[0, 3, 40, 63]]), torch.randn(1, 4, 4, 16)
    expected, _ = apply_rotary_pos_emb(x, x, *theirs(x, positions))
    torch.testing.assert_close(rotate(x, DFlashModel(config).rotation(positions)), expected)


def test_context_beyond_the_drafters_positions(target: HfTarget) -> None:
    """D38: a drafter made for 32 positions drafts behind 40."""
    drafter = DFlashDrafter(tiny_drafter_model(target, max_position_embeddings=32))
    (prompt,) = random_prompts([40])
    params = SamplingParams(max_new_tokens=12)
    (done,) = answer_drafted(target, drafter, [prompt], params)
    assert done.ids == answer_plain(target, prompt, params).ids and done.stats.drafted > 0


@torch.inference_mode()
def test_reduced_vocabulary(tmp_path: Path, target: HfTarget) -> None:
    """A drafter with a head of its own over 20 tokens proposes target ids, and its samples stay lossless."""
    model = tiny_drafter_model(target, draft_vocab_size=20)
    kept = torch.randperm(97, generator=torch.Generator().manual_seed(0))[:20].sort().values
    model.d2t = kept - torch.arange(20)
    model.save_pretrained(tmp_path)
    loaded = DFlashModel.from_pretrained(tmp_path)
    assert torch.equal(loaded.d2t, model.d2t) and equal_weights(loaded, model)
    (prompt,) = random_prompts([9])
    for params in (SamplingParams(max_new_tokens=16), SamplingParams(max_new_tokens=16, temperature=1.0, seed=2)):
        (done,) = answer_drafted(target, DFlashDrafter(loaded), [prompt], params)
        assert done.ids == answer_plain(target, prompt, params).ids
    state = DFlashDrafter(loaded).new_state(target)
    features = torch.randn(1, 9, 64)
    state.join(prompt, features)

    class Row:
        ids, params = [*prompt, 7], SamplingParams(temperature=1.0, sample_drafts=True)

        def draft_noise(self, count: int) -> torch.Tensor:
            return torch.full((count,), 0.5, dtype=torch.float64)

    draft = state.propose([Row()], 4)
    own = draft_logits(loaded, target, torch.tensor([7]), state._cache.window(slice(0, 1), 5))
    assert draft.probs_BSV.shape == (1, 4, 97)
    torch.testing.assert_close(draft.probs_BSV[..., kept], own.softmax(-1))
    assert torch.allclose(draft.probs_BSV.sum(-1), torch.ones(1, 4))
    assert (draft.probs_BSV.gather(2, draft.ids_BS[..., None]) > 0).all()
    Row.params = SamplingParams()
    assert state.propose([Row()], 4).ids_BS.tolist() == kept[own.argmax(-1)].tolist()


def test_scale_and_soft_cap_of_draft_logits(target: HfTarget) -> None:
    plain = tiny_drafter_model(target)
    scaled = tiny_drafter_model(target, output_multiplier=2.0, final_logit_softcapping=3.0, input_embedding_scale=4.0)
    assert torch.equal(plain.scale_logits(torch.tensor([1.0])), torch.tensor([1.0]))
    expected = torch.tanh(torch.tensor([2.0 / 3])) * 3
    torch.testing.assert_close(scaled.scale_logits(torch.tensor([1.0])), expected)
    larger = tiny_target()  # the same target with embeddings of four times the size, and its own head
    with torch.no_grad():
        larger.model.get_input_embeddings().weight *= 4
    logits = []
    capped = tiny_drafter_model(target, output_multiplier=2.0, final_logit_softcapping=3.0)
    for model, of in (
        (capped, target),
        (tiny_drafter_model(target, input_embedding_scale=4.0), target),
        (plain, larger),
        (plain, target),
    ):
        state = DFlashDrafter(model).new_state(of)
        state.join([9], torch.ones(1, 1, 64))
        logits.append(draft_logits(model, of, torch.tensor([11]), state._cache.window(slice(0, 1), 4)))
    torch.testing.assert_close(logits[1], logits[2])
    assert not torch.allclose(logits[1], logits[3])
    torch.testing.assert_close(logits[0], torch.tanh(logits[3] * 2 / 3) * 3)


@torch.inference_mode()
def test_gemma_is_drafted_for_in_the_stated_scale() -> None:
    """D51: a drafter trained on Gemma's scaled embeddings says so in its config: 32**0.5 times the raw rows are what
    the model itself reads, once, not twice."""
    target = tiny_target("gemma3")
    model = tiny_drafter_model(target, input_embedding_scale=32**0.5)
    state = DFlashDrafter(model).new_state(target)
    features = torch.randn(1, 7, 64, generator=torch.Generator().manual_seed(2))
    state.join([9] * 7, features)
    got = draft_logits(model, target, torch.tensor([11]), state._cache.window(slice(0, 1), 4))[0]
    table = target.model.get_input_embeddings()
    neutral = tiny_drafter_model(target)  # same weights, scale 1

    class Scaled:
        head = target.head
        embed = staticmethod(lambda ids: table(ids))  # transformers' module, which scales

    expected = by_definition(neutral, Scaled(), features, 11, 4)
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)


def test_choice_by_name(folder: Path, target: HfTarget) -> None:
    """D57: without a drafter of its own a target gets prompt lookup, and a visible warning says so."""
    from flashdraft.device import choose

    cpu = choose("cpu")
    with pytest.warns(UserWarning, match="no drafter ships"):
        assert choose_drafter("auto", target, cpu).block_size > 1
    assert choose_drafter("auto", target, cpu, shipped=folder).taps == (0, 2)
    assert choose_drafter(str(folder), target, cpu, block_size=3).block_size == 3
    assert choose_drafter("lookup", target, cpu, block_size=5).block_size == 5
    assert choose_drafter("none", target, cpu).block_size == 1
    with pytest.raises(UserError, match="no effect without a drafter"):
        choose_drafter("none", target, cpu, block_size=4)
    with pytest.raises(UserError, match="hidden_size"):
        choose_drafter(str(folder), tiny_target(hidden_size=64), cpu)


def test_every_head_is_read() -> None:
    """Grouped queries: key heads belong to their own group (a permutation of groups changes the logits)."""
    target = tiny_target()
    model = tiny_drafter_model(target)
    features = torch.randn(1, 6, 64)
    before = by_definition(model, target, features, 11, 4)
    with torch.no_grad():
        for layer in model.layers:
            weight = layer.self_attn.v_proj.weight
            weight.copy_(torch.cat((weight[16:], weight[:16])))
    assert not torch.allclose(before, by_definition(model, target, features, 11, 4), atol=1e-4)
