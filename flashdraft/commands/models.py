"""`flashdraft models`: what can be fetched by name, and what is on this disk."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flashdraft.core import UserError
from flashdraft.target.zoo import cache_folder, list_models, remove, resolve


@dataclass(frozen=True, kw_only=True)
class Args:
    """List the models that are known by name and those in the cache; fetch or remove one.

    flashdraft models
    flashdraft models --fetch smollm2-135m
    flashdraft models --remove smollm2-135m
    """

    fetch: str | None = None
    """Fetch and convert this model now."""

    remove: str | None = None
    """Delete this model from the cache."""

    json: bool = False
    """Print the list as one JSON object on the last line, instead of a table."""


def run(args: Args) -> int:
    if args.fetch is not None and args.remove is not None:
        raise UserError("give --fetch or --remove, not both")
    if args.fetch is not None:
        print(fetch(args.fetch))
    if args.remove is not None:
        print(f"removed {args.remove}: {_megabytes(remove(args.remove))} are free again")
    if args.json:
        print(json.dumps({"models": [{**asdict(m), "path": str(m.path)} for m in list_models()]}))
    elif args.fetch is None and args.remove is None:
        show()
    return 0


def fetch(model: str) -> str:
    """The folder of a model, made now if need be."""
    folder = resolve(model)
    if not Path(folder).is_dir():
        raise UserError(f"{model!r} is a hub id: the hub's own client fetches it when it is first used; nothing to do")
    return folder


def show() -> None:
    """The table for people."""
    table = Table("name", "download", "on disk", "licence", "what", box=None)
    for model in list_models():
        disk = _megabytes(model.bytes_on_disk) if model.cached else "-"
        table.add_row(model.name, _megabytes(model.download_bytes), disk, model.licence, model.description)
    Console().print(table)
    print(f"cache: {cache_folder()}")


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f} MB" if count else "-"
