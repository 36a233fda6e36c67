"""Any transformers model as a target: same logits and features as its own forward, rolled back, ragged, refused."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from flashdraft.core import UserError
from flashdraft.device import choose
from flashdraft.drafters.dflash.drafter import DFlashDrafter
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.target.hf import HfTarget, load_target, refuse_recurrent
from flashdraft.target.tiny import tiny_model, tiny_target

ONE = slice(0, 1)


def random_ids(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(6, 97, (rows, count), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def test_pieces_equal_one_pass(family_target: HfTarget) -> None:
    """A prompt, steps and blocks behind each other give the logits and hidden states of transformers' one pass, past
    every sliding window (D33); the last tap is the normed output, as in hidden_states."""
    target, taps = family_target, (3, 0, 2)
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
    lengths, block = (3, 14, 9), random_ids(3, 4, seed=5)
    prompts = [random_ids(1, n, seed=n) for n in lengths]
    cache = family_target.new_cache()
    for row, prompt in enumerate(prompts):
        cache.join()
        family_target.forward(prompt, cache, slice(row, row + 1))
        cache.commit(row, prompt.shape[1])
    together = family_target.forward(block, cache, slice(0, 3)).logits
    for row, prompt in enumerate(prompts):
        alone = family_target.model(torch.cat((prompt, block[row : row + 1]), 1)).logits[0, -4:]
        torch.testing.assert_close(together[row], alone, atol=1e-4, rtol=1e-4)


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


RECURRENT = {
    "mamba": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "state_size": 4}, "recurrent state|layer"),
    "lfm2": ({"hidden_size": 32, "num_hidden_layers": 2, "vocab_size": 97, "layer_types": ["conv", "full_attention"],
              "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}, "'conv'"),
    "qwen3_next": ({"hidden_size": 32, "num_hidden_layers": 4, "vocab_size": 97, "intermediate_size": 32,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts": 2,
                    "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16, "num_experts_per_tok": 1,
                    "linear_num_value_heads": 2, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                    "linear_value_head_dim": 8}, "'linear_attention'"),
}  # fmt: skip


@pytest.mark.parametrize("kind", RECURRENT)
def test_recurrent_targets_are_refused(kind: str) -> None:
    """D32: a state that cannot be rolled back is refused before the first token, by the name of the layer."""
    shape, message = RECURRENT[kind]
    special = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**special, **shape}))
    with pytest.raises(UserError, match=message):
        HfTarget(model)


def test_shared_keys_are_refused() -> None:
    config = AutoConfig.for_model("llama", num_kv_shared_layers=2)
    with pytest.raises(UserError, match="num_kv_shared_layers"):
        refuse_recurrent(config, "some model")


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
    drafter = DFlashDrafter(tiny_drafter_model(target, mask_token_id=80))
    drafter.check(target)


def test_embeddings_are_raw_rows() -> None:
    """D51: Gemma scales its embeddings in the model; a drafter gets the table's rows and its own scale."""
    for family in ("gemma2", "gemma3", "llama"):
        target = tiny_target(family)
        table = target.model.get_input_embeddings().weight
        assert torch.equal(target.embed(torch.tensor([4, 9])), table[[4, 9]])


@pytest.mark.parametrize("tied", [True, False])
def test_saved_and_loaded(tmp_path, tied: bool) -> None:
    """D48: tied heads have no weight of their own in the file, untied ones have; neither comes back random."""
    from tokenizers_for_tests import byte_tokenizer

    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    target, loaded = load_target(str(tmp_path), choose("cpu"), fast=False)
    ids = random_ids(1, 6)
    cache = target.new_cache()
    cache.join()
    torch.testing.assert_close(target.forward(ids, cache, ONE).logits, model(ids).logits)
    assert loaded("hi")["input_ids"] == tokenizer("hi")["input_ids"]


def test_unloadable_targets_say_why(tmp_path) -> None:
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
