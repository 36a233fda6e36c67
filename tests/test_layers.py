"""The shape of the code: floors, imports, public names, sizes, module docstrings."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import flashdraft

PACKAGE = Path(flashdraft.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))

FLOORS = {"target": 1, "drafters": 2, "decode": 3, "train": 4, "commands": 5}
"""Folder -> floor. Files at the top are floor 0, but for cli.py and what starts it."""
TOP = {"cli.py": 6, "__main__.py": 7, "__init__.py": 7}

LONGEST_FILE, LONGEST_FUNCTION = 400, 80


def floor(module: str) -> int:
    parts = module.split(".")[1:]
    if parts and parts[0] in FLOORS:
        return FLOORS[parts[0]]
    return TOP.get(f"{parts[0]}.py" if parts else "__init__.py", 0)


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> list[str]:
    """Every flashdraft module that a file imports at run time, inside functions too."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in ast.walk(block)
    }
    found = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("flashdraft"):
            if node.module == "flashdraft":  # from flashdraft import device
                found += [f"flashdraft.{a.name}" for a in node.names if (PACKAGE / f"{a.name}.py").exists()]
            else:
                found.append(str(node.module))
        elif isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.startswith("flashdraft.")]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    me = module_name(path)
    folder = me.split(".")[1] if me.count(".") > 1 else ""
    for other in imports(path):
        other_folder = other.split(".")[1] if other.count(".") > 1 else ""
        if folder == other_folder and folder:
            continue
        if not folder and not other_folder and floor(me) == floor(other) == 0:
            continue
        assert floor(other) < floor(me), f"{me} (floor {floor(me)}) imports {other} (floor {floor(other)})"


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_sizes_and_docstrings(path: Path) -> None:
    text = path.read_text()
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "module docstring"
    assert text.count("\n") <= LONGEST_FILE
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            assert (node.end_lineno or 0) - node.lineno < LONGEST_FUNCTION, node.name


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


def test_import_is_light() -> None:
    """`import flashdraft` loads neither transformers nor torch; the records load no transformers."""
    heavy = "transformers", "torch", "datasets", "fastapi", "tyro", "rich"
    code = f"import sys, flashdraft; print([m for m in {heavy!r} if m in sys.modules])"
    assert run_python(code) == "[]"
    code = "import sys; from flashdraft import SamplingParams, Completion; print('transformers' in sys.modules)"
    assert run_python(code) == "False"


def test_transformers_models_have_one_door() -> None:
    """Model classes of transformers are imported by the target's file only (and by random tiny models for tests)."""
    doors = {
        str(path.relative_to(PACKAGE))
        for path in FILES
        if any(name in path.read_text() for name in ("AutoModelForCausalLM", "PreTrainedModel"))
    }
    assert doors <= {"target/hf.py", "target/tiny.py", "target/convert.py"}


def test_public_names() -> None:
    for name in flashdraft.__all__:
        assert getattr(flashdraft, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = flashdraft.nonsense


def test_nothing_happens_at_import() -> None:
    """Importing every module prints nothing, seeds nothing and starts no thread."""
    names = [module_name(p) for p in FILES if p.name != "__main__.py"]
    code = (
        "import threading, torch; before = torch.random.get_rng_state().sum().item(), threading.active_count()\n"
        f"import importlib\nfor name in {names!r}: importlib.import_module(name)\n"
        "assert before == (torch.random.get_rng_state().sum().item(), threading.active_count())"
    )
    assert run_python(code) == ""
