"""What the README and the docs say is true: commands exist, files exist, the Python block runs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import flashdraft
from flashdraft import cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "flashdraft"


def test_short_enough() -> None:
    assert README.count("\n") < 200


def test_commands_exist_and_take_their_options() -> None:
    """Every `flashdraft X` line parses as far as a missing model."""
    import tyro

    lines = re.findall(r"^flashdraft (.+?)(?:\s+#.*)?$", README, re.MULTILINE)
    assert len(lines) > 6
    for line in lines:
        import shlex
        from importlib import import_module

        command, *args = shlex.split(line)
        assert command in cli.COMMANDS, line
        tyro.cli(import_module(f"flashdraft.commands.{command}").Args, args=args)
    assert set(cli.COMMANDS) <= {line.split()[0] for line in lines}, "a command is not shown"


def test_scripts_and_pages_exist() -> None:
    for path in re.findall(r"`(docs/\S+?|scripts/\w+)`", README):
        assert (ROOT / path).exists(), path


def test_structure_names_every_file() -> None:
    text = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
    for path in PACKAGE.rglob("*.py"):
        name = path.stem if path.parent != PACKAGE else path.name
        if path.name != "__init__.py":
            assert f"`{name}`" in text or f"`{name}.py`" in text, f"docs/structure.md has no line for {path}"


@pytest.mark.slow
def test_python_block_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    scope: dict[str, object] = {}
    exec(block, scope)
    assert len(capsys.readouterr().out) > 50
    assert isinstance(scope["engine"], flashdraft.Engine)
