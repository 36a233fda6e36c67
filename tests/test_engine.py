"""The Python interface and the commands, on a tiny pair saved to disk as a user's own would be."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tokenizers_for_tests import byte_tokenizer

import flashdraft
from flashdraft import cli
from flashdraft.core import SamplingParams, UserError
from flashdraft.decode.compare import Divergence, compare, divergence
from flashdraft.decode.engine import Engine
from flashdraft.drafters.dflash.tiny import tiny_drafter_model
from flashdraft.drafters.scripted import ScriptedDrafter
from flashdraft.target import zoo
from flashdraft.target.hf import HfTarget
from flashdraft.target.tiny import tiny_model

SHORT = SamplingParams(max_new_tokens=12)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny target with its tokenizer, and of a drafter for it."""
    root = tmp_path_factory.mktemp("pair")
    tokenizer = byte_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    model.generation_config.eos_token_id = 0
    model.save_pretrained(root / "target")
    tokenizer.save_pretrained(root / "target")
    tiny_drafter_model(HfTarget(model)).save_pretrained(root / "drafter")
    return str(root / "target"), str(root / "drafter")


@pytest.fixture(scope="module")
def engine(pair: tuple[str, str], tmp_path_factory: pytest.TempPathFactory) -> Engine:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(zoo.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
        return flashdraft.load(pair[0], pair[1], device="cpu")


def test_prompts_of_every_kind(engine: Engine) -> None:
    """Text is a user's turn; messages, ids and raw text are what they are."""
    as_text = engine.encode("hello")
    assert engine.tokenizer.decode(as_text) == "<user>hello<end><assistant>"
    assert engine.encode([{"role": "user", "content": "hello"}]) == as_text
    assert engine.encode(list(as_text)) == as_text
    assert engine.tokenizer.decode(engine.encode("hello", raw=True)) == "hello"
    first = engine.generate("hello", SHORT)
    assert first.ids == engine.generate(as_text, SHORT).ids
    assert first.text == engine.tokenizer.decode(first.ids, skip_special_tokens=True)
    with pytest.raises(UserError, match="empty"):
        engine.generate([], SHORT)


def test_without_a_chat_template(engine: Engine) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = None
    bare = Engine(engine.target, engine.drafter, tokenizer)
    assert bare.encode("hello") == tuple(tokenizer("hello")["input_ids"])
    with pytest.raises(UserError, match="no chat template"):
        bare.encode([{"role": "user", "content": "hello"}])


def test_many_prompts(engine: Engine) -> None:
    """A list of prompts gives a list in the same order, with common or separate parameters."""
    prompts = ["a", "bc", "def", "ghij"]
    alone = [engine.generate(p, SHORT) for p in prompts]
    together = engine.generate(prompts, SHORT, max_rows=3)
    assert [c.ids for c in together] == [c.ids for c in alone]
    each = [SamplingParams(max_new_tokens=n) for n in (1, 5, 2, 7)]
    assert [len(c.ids) for c in engine.generate(prompts, each)] == [1, 5, 2, 7]
    with pytest.raises(UserError, match="4 prompts were given with 1 sampling parameters"):
        engine.generate(prompts, [SHORT])


def test_streams_do_not_disturb_each_other(engine: Engine) -> None:
    """Two streams taken in turns, one of them dropped in the middle, then a third."""
    a, b = engine.stream("one", SHORT), engine.stream("two", SHORT)
    taken = [next(a), next(b), next(a), next(b)]
    del b
    rest = list(a)
    assert tuple(i for p in (taken[0], taken[2], *rest) for i in p.ids) == engine.generate("one", SHORT).ids


def test_compare_finds_differences(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    result = compare(engine, "hello", SHORT)
    assert result.same and result.divergence is None and result.plain.ids == result.drafted.ids
    ids, prompt = list(result.plain.ids), engine.encode("hello")
    assert divergence(engine.target, prompt, ids, ids) is None
    found = divergence(engine.target, prompt, ids, [*ids[:4], 99, *ids[5:]])
    assert found is not None and found.place == 4 and found.gap > 1e-3 and not found.near_tie
    assert "NOT a near tie" in found.describe() and "token 4" in found.describe()
    assert divergence(engine.target, prompt, ids, ids[:3]).place == 3
    assert Divergence(3, 1e-5).near_tie
    sampled = compare(engine, "hello", SamplingParams(max_new_tokens=12, temperature=1.0))
    assert sampled.same


def test_drafter_and_target_must_fit(pair: tuple[str, str], tmp_path: Path) -> None:
    wrong = tiny_drafter_model(HfTarget(tiny_model(hidden_size=64)))
    wrong.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="hidden_size is 64 in the drafter and 32"):
        flashdraft.load(pair[0], str(tmp_path), device="cpu")


def test_half_precision_reports_its_divergences(pair: tuple[str, str]) -> None:
    """D27: in bfloat16 a block may round differently from a step; where ids part, the two best logits are close."""
    half = flashdraft.load(pair[0], pair[1], device="cpu", dtype="bfloat16", block_size=5)
    truth = half.complete("hello", SHORT, drafted=False).ids
    drafter = ScriptedDrafter({half.encode("hello"): truth}, (3, 0, 7))
    drafted = Engine(half.target, drafter, half.tokenizer).complete("hello", SHORT).ids
    found = divergence(half.target, half.encode("hello"), truth, drafted)
    assert found is None or found.gap < 0.25


def command(*args: str, stdin: str = "") -> tuple[int, str, str]:
    """Run a command in this process."""
    out, err, old = io.StringIO(), io.StringIO(), (sys.stdin, sys.stdout, sys.stderr)
    sys.stdin, sys.stdout, sys.stderr = io.StringIO(stdin), out, err
    try:
        code = cli.main(list(args))
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.stdin, sys.stdout, sys.stderr = old
    return code, out.getvalue(), err.getvalue()


@pytest.fixture
def own(pair: tuple[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, ...]:
    monkeypatch.setenv(zoo.CACHE_VARIABLE, str(tmp_path / "cache"))
    return ("--model", pair[0], "--drafter", pair[1], "--device", "cpu", "--max-new-tokens", "12")


def test_generate(own: tuple[str, ...], engine: Engine, tmp_path: Path) -> None:
    expected = engine.generate("hello", SHORT)
    code, out, err = command("generate", "hello", *own)
    assert (code, out) == (0, expected.text + "\n") and "tokens/s" in err
    (tmp_path / "q.txt").write_text("hello")
    assert command("generate", "--prompt-file", str(tmp_path / "q.txt"), *own)[1] == out
    assert command("generate", "-", *own, stdin="hello")[1] == out
    code, out, _ = command("generate", "hello", *own, "--json")
    assert json.loads(out)["ids"] == list(expected.ids)
    code, out, _ = command("generate", "hello", *own, "--compare")
    assert code == 0 and "ids equal" in out and "plain" in out
    code, out, _ = command("generate", "hello", *own, "--compare", "--json")
    assert json.loads(out)["same"] is True


def test_every_option_reaches_the_answer(own: tuple[str, ...]) -> None:
    """D56: an option that is parsed and forgotten would leave the answer as it was."""
    own = (*own, "--max-new-tokens", "60", "--ignore-eos")  # long enough to repeat itself
    base = json.loads(command("generate", "hello", *own, "--json")[1])

    def changed(*options: str) -> bool:
        return json.loads(command("generate", "hello", *own, "--json", *options)[1])["ids"] != base["ids"]

    token = str(base["ids"][3])
    for options in (
        ("--temperature", "5", "--seed", "1"), ("--repetition-penalty", "3"), ("--presence-penalty", "999"),
        ("--frequency-penalty", "999"), ("--logit-bias", token, "-100"), ("--max-new-tokens", "5"),
        ("--stop-token-ids", token), ("--system", "be odd"), ("--raw",), ("--dtype", "bfloat16"),
    ):  # fmt: skip
        assert changed(*options) or options[0] == "--dtype", options
    hot = ("--temperature", "5", "--seed", "1")
    sampled = json.loads(command("generate", "hello", *own, "--json", *hot)[1])["ids"]
    for options in (("--top-k", "1"), ("--top-p", "0.01"), ("--min-p", "0.9"), ("--seed", "2"), ("--sample-drafts",)):
        got = json.loads(command("generate", "hello", *own, "--json", *hot, *options)[1])["ids"]
        assert got != sampled, options
    block = json.loads(command("generate", "hello", *own, "--json", "--block-size", "3")[1])
    assert len(block["accepted_per_slot"]) == 2


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("generat",), "did you mean 'generate'"),
        (("nonsense",), "commands are generate"),
        (("generate",), "give the prompt"),
        (("generate", "x", "--prompt-file", "y"), "give the prompt either"),
        (("generate", "  "), "the prompt is empty"),
        (("generate", "x", "--top-p", "3"), "top_p must be above 0"),
        (("generate", "--prompt-file", "/no/such/file"), "cannot read the prompt"),
        (("generate", "x", "--model", "smollm2-135"), "did you mean 'smollm2-135m'"),
        (("generate", "x", "--device", "toaster"), "not known to torch"),
        (("generate", "x", "--dtype", "int3"), "is not one of float32"),
    ],
)
def test_user_errors_are_one_line(args: tuple[str, ...], message: str) -> None:
    """No traceback, exit code 2, and what to do."""
    code, out, err = command(*args)
    assert code == 2 and message in err and "Traceback" not in err and out == ""


def test_unknown_options_are_errors() -> None:
    code, _, err = command("generate", "x", "--nonsense", "3")
    assert code == 2 and "--nonsense" in err


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_teaches(name: str) -> None:
    code, out, _ = command(name, "--help")
    assert code == 0 and "usage: flashdraft" in out and len(out.splitlines()) > 8


def test_usage_lists_every_command() -> None:
    code, out, _ = command()
    assert code == 0 and all(name in out for name in cli.COMMANDS)
    assert command("--version")[1].strip() == flashdraft.__version__


def test_chat(own: tuple[str, ...], engine: Engine) -> None:
    """Two turns on one engine: the second answers the whole conversation; reset forgets it."""
    first = engine.generate("hello", SHORT)
    history = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": first.text},
        {"role": "user", "content": "more"},
    ]  # fmt: skip
    second = engine.generate(history, SHORT)
    lines = "hello\nmore\n/reset\nhello\n/history\n/nonsense\n/help\n/exit\nnever read\n"
    code, out, err = command("chat", *own, stdin=lines)
    assert code == 0 and out.startswith(f"{first.text}\n{second.text}\n{first.text}\nuser: hello\nassistant: ")
    assert err.count("tokens/s") == 3 and "(forgotten)" in err and "no command /nonsense" in err
    code, out, err = command("chat", *own, stdin="x" * 600 + "\nhello\n")
    assert code == 0 and "/reset starts anew" in err and out == f"{first.text}\n"


def test_doctor(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(zoo.CACHE_VARIABLE, str(tmp_path))
    code, out, _ = command("doctor", "--device", "cpu", "--json")
    report = json.loads(out)
    assert code == 0 and all(report["round_trips"].values()) and report["torch"] == torch.__version__
    code, out, _ = command("doctor", "--device", "cpu")
    assert code == 0 and "ids equal to plain decoding" in out


def test_doctor_sees_a_lossy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashdraft.decode import rounds as rounds_module

    monkeypatch.setattr(rounds_module, "match", lambda draft, own: torch.ones(len(draft), dtype=torch.long))
    code, _, err = command("doctor", "--device", "cpu", "--json")
    assert code == 1 and "differ" in err


def test_as_a_module() -> None:
    done = subprocess.run([sys.executable, "-m", "flashdraft", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == flashdraft.__version__
