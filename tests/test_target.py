"""Any transformers model as a target: same logits and features as its own forward, rolled back, ragged, refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import answer_drafted, answer_plain, random_prompts
from safetensors.torch import load_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers_for_tests import byte_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from flashdraft.core import SamplingParams, UserError
from flashdraft.device import choose
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.target.hf import HfTarget, load_target, refuse_recurrent
from flashdraft.target.tiny import tiny_model, tiny_target

ONE = slice(0, 1)
SPECIAL = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
SHAPE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
         "num_key_value_heads": 2, "max_position_embeddings": 512, "vocab_size": 97}  # fmt: skip


def model_of(kind: str, **changes: Any) -> Any:
    """A random model of a family that has no tiny target: exotic ones that users bring all the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = AutoConfig.for_model(kind, **{**SPECIAL, **SHAPE, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float().eval()
        for parameter in model.parameters():
            if parameter.dim() == 2:
                torch.nn.init.normal_(parameter, std=0.3)
    return model


def random_ids(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_pieces_equal_one_pass(family_target: HfTarget) -> None:
    """A prompt, steps and blocks behind each other give the logits and hidden states of transformers' one pass, past
    every sliding window (D33); the last tap is the normed output, as in hidden_states."""
    pieces_equal_one_pass(family_target)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "scaled logits": ("granite", {"logits_scaling": 4.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.5}),
    "scaled logits, window": ("cohere2", {"sliding_window": 8, "head_dim": 16,
                                          "layer_types": ["sliding_attention", "full_attention"] * 2}),
    "half of the layers slide": ("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2}),
    "window not used": ("qwen2", {"use_sliding_window": False, "sliding_window": 8}),
    "experts": ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    "no rotation in some layers": ("smollm3", {"no_rope_layers": [1, 0, 1, 0]}),
    "decoder inside": ("opt", {"ffn_dim": 64, "word_embed_proj_dim": 32}),
    "no prefix": ("llama4_text", {"layer_types": ["full_attention"] * 4, "num_local_experts": 2, "head_dim": 16,
                                  "num_experts_per_tok": 1, "intermediate_size_mlp": 64}),
    "wide keys of one rank": ("deepseek_v3", {"num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16,
                                              "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
                                              "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
                                              "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}  # fmt: skip


@pytest.mark.parametrize("other", OTHERS)
@torch.inference_mode()
def test_pieces_equal_one_pass_in_other_families(other: str) -> None:
    """The last tap of OPT was never read (a hook on a module that its forward goes round), that of Llama 4 was its
    logits: the decoder is not always what transformers calls the base model."""
    kind, changes = OTHERS[other]
    target = HfTarget(model_of(kind, **changes))
    pieces_equal_one_pass(target)
    rows_of_different_length(target)


def pieces_equal_one_pass(target: HfTarget) -> None:
    taps = (3, 0, 2)
    ids = random_ids(1, 30)
    whole = target.model(ids, output_hidden_states=True)
    cache = target.new_cache()
    cache.join()
    logits, features, at = [], [], 0
    for size in (12, 1, 5, 5, 1, 6):
        out = target.forward(ids[:, at : at + size], cache, ONE, taps=taps)
        cache.commit(0, size)
        at += size
        logits.append(out.logits)
        features.append(out.features)
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, atol=1e-4, rtol=1e-4)
    expected = torch.cat([whole.hidden_states[i + 1] for i in taps], -1)
    torch.testing.assert_close(torch.cat(features, 1), expected, atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_rejected_slots_leave_no_trace(family_target: HfTarget) -> None:
    """Rollback: slots that were not committed are overwritten, as if they had never been."""
    ids, wrong = random_ids(1, 20), random_ids(1, 9, seed=1)
    cache = family_target.new_cache()
    cache.join()
    family_target.forward(ids[:, :11], cache, ONE)
    cache.commit(0, 11)
    family_target.forward(torch.cat((ids[:, 11:13], wrong), 1), cache, ONE)
    cache.commit(0, 2)
    after = family_target.forward(ids[:, 13:], cache, ONE).logits
    torch.testing.assert_close(after, family_target.model(ids).logits[:, 13:], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_rows_of_different_length(family_target: HfTarget) -> None:
    """D30: every row of a ragged batch has its own positions and sees its own past only."""
    rows_of_different_length(family_target)
    rows_of_different_length(family_target, lengths=(11, 11, 11))  # even rows take another way through mask and cache


def rows_of_different_length(target: HfTarget, lengths: tuple[int, ...] = (3, 14, 9)) -> None:
    """Blocks of 4 and then steps of 1 for three rows together, against one pass for each."""
    blocks = [random_ids(3, n, seed=n) for n in (4, 1)]
    texts = [random_ids(1, n, seed=n + row) for row, n in enumerate(lengths)]
    cache = target.new_cache()
    for row, prompt in enumerate(texts):
        cache.join()
        target.forward(prompt, cache, slice(row, row + 1))
        cache.commit(row, prompt.shape[1])
    for block in blocks:
        out = target.forward(block, cache, slice(0, 3), taps=(1,))
        for row in range(3):
            cache.commit(row, block.shape[1])
            texts[row] = torch.cat((texts[row], block[row : row + 1]), 1)
            alone = target.model(texts[row], output_hidden_states=True)
            slots = slice(-block.shape[1], None)
            torch.testing.assert_close(out.logits[row], alone.logits[0, slots], atol=1e-4, rtol=1e-4)
            torch.testing.assert_close(out.features[row], alone.hidden_states[2][0, slots], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_slots_behind_the_context_do_not_matter(family_target: HfTarget) -> None:
    """A block may reach over the last position of the model (gpt2 has no embedding there): no crash, and the slots
    before the end are right."""
    target = tiny_target(family_target.name.removeprefix("tiny "), max_position_embeddings=20, n_positions=20)
    assert target.context_length == 20
    ids = random_ids(1, 24)
    cache = target.new_cache()
    cache.join()
    target.forward(ids[:, :17], cache, ONE)
    cache.commit(0, 17)
    logits = target.forward(ids[:, 17:], cache, ONE).logits[:, :3]
    torch.testing.assert_close(logits, target.model(ids[:, :20]).logits[:, 17:], atol=1e-4, rtol=1e-4)


@torch.inference_mode()
def test_kept_slots_only(family_target: HfTarget) -> None:
    ids, keep = random_ids(2, 8), torch.tensor([[7, 0], [3, 3]])
    cache = family_target.new_cache()
    cache.join()
    cache.join()
    every = family_target.forward(ids, cache, slice(0, 2)).logits
    some = family_target.forward(ids, cache, slice(0, 2), keep_BS=keep).logits
    for row in range(2):
        torch.testing.assert_close(some[row], every[row, keep[row]], atol=1e-5, rtol=1e-5)


def hooks(model: torch.nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


def test_a_vision_tower_is_not_the_decoder() -> None:
    """A tower with as many layers as the text model stood first in the model: its layers were tapped, and the first
    pass died with a KeyError."""
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    text = {**SHAPE, "head_dim": 16, "sliding_window": 8}
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=4)
    target = HfTarget(AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").float())
    with torch.inference_mode():
        pieces_equal_one_pass(target)


def test_nothing_stays_on_the_users_model() -> None:
    """Hooks live for one pass, also when it fails."""
    model = tiny_model()
    before = hooks(model)
    target = HfTarget(model)
    cache = target.new_cache()
    cache.join()
    target.forward(random_ids(1, 5), cache, ONE, taps=(0, 3), keep_BS=torch.zeros(1, 1, dtype=torch.long))
    assert hooks(model) == before
    with pytest.raises(IndexError):
        target.forward(torch.tensor([[999]]), cache, ONE, taps=(0,))
    assert hooks(model) == before


FEW = {"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "mamba": ({**FEW, "state_size": 4}, "layer 0 is of type 'linear_attention'"),
    "lfm2": ({**SHAPE, "layer_types": ["full_attention", "conv"] * 2}, "layer 1 is of type 'conv'"),
    "jamba": ({**SHAPE, "attn_layer_period": 2, "attn_layer_offset": 0, "num_experts": 2, "mamba_d_state": 4,
               "mamba_dt_rank": 4, "use_mamba_kernels": False}, "layer 1 is of type 'linear_attention'"),
    "qwen3_next": ({**SHAPE, "head_dim": 8, "num_experts": 2, "moe_intermediate_size": 16,
                    "shared_expert_intermediate_size": 16, "num_experts_per_tok": 1, "linear_num_value_heads": 2,
                    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
                   "layer 0 is of type 'linear_attention'"),
    "rwkv": ({**FEW, "attention_hidden_size": 32, "context_length": 64}, "recurrent state"),
    "gpt_neo": ({"hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]],
                 "window_size": 8, "vocab_size": 97}, "'local' attention"),
    "bloom": ({"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}, "ALiBi"),
    "bert": ({**FEW, "num_attention_heads": 4, "intermediate_size": 32}, "is_decoder is False"),
    "openai-gpt": ({"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 97}, "keeps no keys and values"),
}  # fmt: skip


def refused_model(kind: str) -> Any:
    changes, _ = REFUSED[kind]
    special = SPECIAL if kind not in ("bert", "openai-gpt") else {}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**special, **changes}))


@pytest.mark.parametrize("kind", REFUSED)
def test_targets_that_cannot_be_kept_are_refused(kind: str) -> None:
    """D32: a past that cannot be rolled back is refused before the first token, by the name of the layer; so are models
    whose own masks are wrong for ragged rows (GPT Neo answered another text in a batch)."""
    with pytest.raises(UserError, match=REFUSED[kind][1]):
        HfTarget(refused_model(kind))


@pytest.mark.parametrize("kind", ["mamba", "lfm2", "qwen3_next", "jamba"])
def test_recurrent_folders_are_refused(tmp_path: Path, kind: str) -> None:
    """D32: by the config alone, before gigabytes of weights are read (there are none here)."""
    changes, message = REFUSED[kind]
    AutoConfig.for_model(kind, **{**SPECIAL, **changes}).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=message):
        load_target(str(tmp_path), choose("cpu"))


def test_shared_keys_are_refused() -> None:
    config = AutoConfig.for_model("llama", num_kv_shared_layers=2)
    with pytest.raises(UserError, match="num_kv_shared_layers"):
        refuse_recurrent(config, "some model")


def test_other_attention_is_refused() -> None:
    """flash_attention_2 takes our mask for a padding mask, and answers something else."""
    model = tiny_model()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(UserError, match="'flash_attention_2'.*attn_implementation='sdpa'"):
        HfTarget(model)


def test_longrope_ends_at_its_original_length() -> None:
    """Phi-3 turns all keys anew when a text grows past the original length; with keys cached before that, drafted and
    plain answers differed."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
            "original_max_position_embeddings": 24}  # fmt: skip
    model = model_of("phi3", max_position_embeddings=64, original_max_position_embeddings=24, rope_parameters=rope)
    target, (prompt,), params = HfTarget(model), random_prompts([10]), SamplingParams(max_new_tokens=40)
    truth = answer_plain(target, prompt, params)
    assert (len(truth.ids), truth.finish_reason) == (14, "length")
    drafter = ScriptedDrafter({prompt: truth.ids}, (7, 0, 3, 5))
    assert answer_drafted(target, drafter, [prompt], params)[0].ids == truth.ids
    theirs = model.generate(torch.tensor([prompt]), max_new_tokens=14, do_sample=False, pad_token_id=0)
    assert theirs[0, 10:].tolist() == list(truth.ids)


def test_padded_heads_are_cut() -> None:
    """D24: rows of the head beyond the tokenizer's tokens can never be generated; ids in prompts may use them."""
    model = tiny_model(vocab_size=97)
    target = HfTarget(model, num_tokens=90)
    assert (target.vocab_size, target.embedding_rows) == (90, 97)
    cache = target.new_cache()
    cache.join()
    ids = torch.tensor([[95, 8]])
    torch.testing.assert_close(target.forward(ids, cache, ONE).logits, model(ids).logits[..., :90])
    assert target.head(torch.randn(1, 32)).shape[-1] == 90
    # The mask token is one that cannot be generated: 151669 in the drafters of Qwen3.
    drafter = DFlashDrafter(tiny_drafter_model(target, mask_token_id=95, vocab_size=97))
    drafter.check(target)
    (prompt,), params = random_prompts([7], vocab_size=90), SamplingParams(max_new_tokens=12)
    assert answer_drafted(target, drafter, [prompt], params)[0].ids == answer_plain(target, prompt, params).ids


def test_padded_tokens_never_come() -> None:
    """D24: a padded row of the head that would win is left out of the argmax, of samples and of the drafter's head."""
    model = tiny_model(vocab_size=97)
    with torch.no_grad():
        model.lm_head.weight[90:] *= 50
    params = [SamplingParams(max_new_tokens=20), SamplingParams(max_new_tokens=20, temperature=1.5, seed=1)]
    (prompt,) = random_prompts([6], vocab_size=90)
    for num_tokens, beyond in ((90, False), (None, True)):
        target = HfTarget(model, num_tokens=num_tokens)
        drafter = DFlashDrafter(tiny_drafter_model(target, mask_token_id=80))
        for each in params:
            done = answer_drafted(target, drafter, [prompt], each)[0].ids
            assert (max(done) >= 90) == beyond
            assert done == answer_plain(target, prompt, each).ids


def test_moved() -> None:
    """The copy on another device forgot that the head is padded, and its name."""
    target = HfTarget(tiny_model(), "some name", num_tokens=90)
    moved = target.to(torch.device("cpu"))
    assert isinstance(moved, HfTarget)
    assert (moved.name, moved.vocab_size, moved.embedding_rows) == ("some name", 90, 97)
    assert moved.device == torch.device("cpu") and moved.eos_token_ids == target.eos_token_ids


def test_embeddings_are_raw_rows() -> None:
    """D51: Gemma scales its embeddings in the model; a drafter gets the table's rows and its own scale."""
    ids = torch.tensor([[4, 9]])
    for family, scaled in (("gemma2", True), ("gemma3", True), ("llama", False)):
        target = tiny_target(family)
        table = target.model.get_input_embeddings().weight
        assert torch.equal(target.embed(ids), table[ids])
        whole = target.model(ids, output_hidden_states=True).hidden_states[0]
        assert torch.allclose(whole, target.embed(ids)) != scaled


def test_head_is_the_models_own(family_target: HfTarget) -> None:
    """D48: tied or not, the head turns the last hidden states into the model's logits; soft caps are left out."""
    model, ids = family_target.model, random_ids(1, 5)
    with torch.inference_mode():
        whole = model(ids, output_hidden_states=True)
        logits = family_target.head(whole.hidden_states[-1])
    cap = getattr(model.config, "final_logit_softcapping", None)
    capped = torch.tanh(logits / cap) * cap if cap else logits
    torch.testing.assert_close(capped, whole.logits)
    assert (cap is not None) == (family_target.name == "tiny gemma2")


def save_pair(folder: Path, tokenizer: Any, **changes: Any) -> Any:
    model = tiny_model(**{"vocab_size": len(tokenizer), **changes})
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded(tmp_path: Path, tied: bool) -> None:
    """D48: tied heads have no weight of their own in the file, untied ones have; neither comes back random."""
    tokenizer = byte_tokenizer()
    model = save_pair(tmp_path, tokenizer, tie_word_embeddings=tied)
    assert ("lm_head.weight" in load_file(tmp_path / "model.safetensors")) != tied
    target, loaded = load_target(str(tmp_path), choose("cpu"), fast=False)
    ids = random_ids(1, 6)
    cache = target.new_cache()
    cache.join()
    torch.testing.assert_close(target.forward(ids, cache, ONE).logits, model(ids).logits)
    assert loaded("hi")["input_ids"] == tokenizer("hi")["input_ids"]


def test_holes_in_a_vocabulary(tmp_path: Path) -> None:
    """Ids need not be counted through: the length of this tokenizer is 3, its last id is 6, and 6 can be generated."""
    inner = Tokenizer(WordLevel({"a": 0, "b": 1, "c": 6}, unk_token="a"))
    save_pair(tmp_path, PreTrainedTokenizerFast(tokenizer_object=inner), vocab_size=10)
    assert load_target(str(tmp_path), choose("cpu"), fast=False)[0].vocab_size == 7


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_half_a_model_is_refused(tmp_path: Path) -> None:
    """transformers fills missing tensors with random numbers, and says so in its log only; broken files raised errors
    of other packages."""
    save_pair(tmp_path, byte_tokenizer())
    change_config(tmp_path, num_hidden_layers=5)
    with pytest.raises(UserError, match=r"9 missing tensors \['model.layers.4.input_layernorm.weight'"):
        load_target(str(tmp_path), choose("cpu"))
    change_config(tmp_path, num_hidden_layers=4, intermediate_size=48)
    with pytest.raises(UserError, match=r"12 of another shape .*mlp.down_proj.weight.*32, 64.*32, 48"):
        load_target(str(tmp_path), choose("cpu"))
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot load the target from folder .*incomplete"):
        load_target(str(tmp_path), choose("cpu"))


def test_unloadable_targets_say_why(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match="cannot load the target from folder"):
        load_target(str(tmp_path), choose("cpu"))
    with pytest.raises(UserError, match="hub id 'nobody/nothing'"):
        load_target("nobody/nothing", choose("cpu"))


def test_taps_out_of_range(target: HfTarget) -> None:
    """D39: N-1 is a layer, N and negative numbers are not."""
    target.check_taps((3,))
    for taps in ((4,), (-1,), (0, 7)):
        with pytest.raises(UserError, match="target_layer_ids .*layers 0 to 3"):
            target.check_taps(taps)
