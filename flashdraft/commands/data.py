"""`flashdraft data`: prompts in, the target's own answers out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from flashdraft.core import LoadOptions, UserError
from flashdraft.decode.engine import Engine, load
from flashdraft.train.prompts import Prompt, distinct, read_prompts, self_written
from flashdraft.train.responses import ResponseConfig, answer_all, answered


@dataclass(frozen=True, kw_only=True)
class Args:
    """Let the target answer prompts; the answers are what a drafter is trained on.

    flashdraft data --prompts questions.jsonl --out answers.jsonl

    flashdraft data --self-written 2000 --out answers.jsonl

    Run the same command again to go on after a stop: prompts that have an answer in the file are passed over.
    """

    out: Path
    """File for the answers, one JSON object a line; answers are added to it."""

    prompts: tuple[str, ...] = ()
    """Prompts: .jsonl, .json or .txt files, folders of them, or hub datasets (owner/name)."""

    suffix: str = ""
    """Text to add to every user's first turn."""

    self_written: int = 0
    """User's turns that the target writes itself, from the head of its chat template alone."""

    limit: int | None = None
    """Answer at most so many prompts."""

    time_limit: float | None = None
    """Begin no new answer after so many minutes."""

    load: Annotated[LoadOptions, tyro.conf.arg(name="")] = field(default_factory=lambda: LoadOptions(drafter="none"))
    responses: Annotated[ResponseConfig, tyro.conf.arg(name="")] = field(default_factory=ResponseConfig)


def run(args: Args) -> int:
    if not args.prompts and not args.self_written:
        raise UserError("give --prompts, --self-written or both")
    engine = load(**vars(args.load))
    known = list(distinct(p for source in args.prompts for p in read_prompts(source, suffix=args.suffix)))
    total = min(len(known) + args.self_written, args.limit or sys.maxsize)
    before = len(answered(args.out))
    seconds = None if args.time_limit is None else 60 * args.time_limit
    last = None
    with bars() as progress:
        task = progress.add_task("answers", total=total, completed=min(before, total), speed="")
        for last in answer_all(engine, prompts(engine, known, args), args.out, args.responses, time_limit=seconds):
            speed = f"{last.tokens / last.seconds:.0f} tokens/s"
            progress.update(task, completed=before + last.answers, speed=speed)
    added = {"answers": last.answers, "tokens": last.tokens, "seconds": round(last.seconds, 1)} if last else {}
    print(json.dumps({"out": str(args.out), "answers_before": before, **added}))
    return 0


def prompts(engine: Engine, known: list[Prompt], args: Args) -> Iterator[Prompt]:
    """The user's prompts, then as many self-written ones as were asked for, up to the limit."""
    given = 0
    for source in (iter(known), self_written(engine, args.self_written, args.responses.seed)):
        for prompt in source:
            if args.limit is not None and given >= args.limit:
                return
            given += 1
            yield prompt


def bars() -> Progress:
    """Count, speed and time left."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    return Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=Console(stderr=True))
