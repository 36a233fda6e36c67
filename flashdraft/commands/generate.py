"""`flashdraft generate`: a prompt in, its answer out."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro

from flashdraft.commands.show import stats_line, stats_record, warn_if_busy
from flashdraft.core import LoadOptions, Piece, SamplingParams, UserError
from flashdraft.decode.compare import Comparison, compare
from flashdraft.decode.engine import Engine, load


@dataclass(frozen=True, kw_only=True)
class Args:
    """Answer one prompt; the text streams to standard output, speed and tau go to standard error.

    flashdraft generate "Why is the sky blue?"
    flashdraft generate --compare --max-new-tokens 128 "Natalia sold 48 clips ..."
    flashdraft generate --model ./my-model --drafter ./my-drafter --prompt-file question.txt
    echo "Tell me a story" | flashdraft generate - --temperature 0.8 --seed 1
    """

    prompt: tyro.conf.Positional[str | None] = None
    """The question; `-` reads it from standard input."""

    prompt_file: Path | None = None
    """Read the question from a file."""

    system: str | None = None
    """System turn in front of the question."""

    raw: bool = False
    """Continue the text as it is, without the chat template."""

    compare: bool = False
    """Answer by plain decoding as well: both speeds, tau, and whether the ids are equal (exit code 1 if not)."""

    json: bool = False
    """Print one JSON object instead of text."""

    load: Annotated[LoadOptions, tyro.conf.arg(name="")] = field(default_factory=LoadOptions)
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)


def run(args: Args) -> int:
    prompt = read_prompt(args)
    engine = load(**vars(args.load))
    if args.compare:
        return run_compare(args, engine, prompt)
    pieces = engine.stream(prompt, args.sampling, raw=args.raw)
    text, ids, last = show(pieces, quiet=args.json)
    if args.json:
        print(json.dumps({"text": text, "ids": ids, "finish_reason": last.finish_reason, **stats_record(last.stats)}))
    else:
        print(f"[{stats_line(last.stats, len(ids))}]", file=sys.stderr)
    return 0


def run_compare(args: Args, engine: Engine, prompt: Any) -> int:
    """Both loops on the same prompt, and what came out of the comparison."""
    warn_if_busy()
    result = compare(engine, prompt, args.sampling, raw=args.raw, watch=None if args.json else echo)
    if args.json:
        print(json.dumps(comparison_record(result)))
    else:
        print()
        for line in comparison_lines(result):
            print(line)
    return 0 if result.same else 1


def comparison_lines(result: Comparison) -> list[str]:
    """The comparison for people."""
    plain, drafted = result.plain.stats, result.drafted.stats
    ratio = drafted.tokens_per_second / plain.tokens_per_second if plain.tokens_per_second else float("nan")
    verdict = "ids equal" if result.divergence is None else result.divergence.describe()
    return [
        f"plain    {plain.tokens_per_second:7.1f} tokens/s",
        f"drafted  {drafted.tokens_per_second:7.1f} tokens/s   {ratio:.2f}x   tau {drafted.tau:.2f}",
        f"{len(result.drafted.ids)} tokens, {verdict}",
    ]


def comparison_record(result: Comparison) -> dict[str, Any]:
    """The comparison for programs."""
    divergence = result.divergence
    return {
        "text": result.drafted.text,
        "ids": list(result.drafted.ids),
        "same": result.same,
        "divergence": None if divergence is None else {"place": divergence.place, "gap": divergence.gap},
        "drafted": stats_record(result.drafted.stats),
        "plain": stats_record(result.plain.stats),
    }


def read_prompt(args: Args) -> Any:
    """Text or messages, from wherever the user put them. Raises UserError when there are none, or two."""
    if (args.prompt is None) == (args.prompt_file is None):
        raise UserError("give the prompt either as an argument (- for standard input) or with --prompt-file")
    if args.prompt_file is not None:
        try:
            text = args.prompt_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"cannot read the prompt from {args.prompt_file}: {error}") from error
    else:
        text = sys.stdin.read() if args.prompt == "-" else str(args.prompt)
    if not text.strip():
        raise UserError("the prompt is empty")
    if args.system is None:
        return text
    if args.raw:
        raise UserError("--system has no effect with --raw; leave one of them out")
    return [{"role": "system", "content": args.system}, {"role": "user", "content": text}]


def show(pieces: Iterator[Piece], *, quiet: bool = False) -> tuple[str, list[int], Piece]:
    """Print an answer as it comes; its text, its ids and the last piece."""
    text, last = "", None
    ids: list[int] = []
    for last in pieces:
        text += last.text
        ids += last.ids
        if not quiet:
            echo(last.text)
    assert last is not None, "an answer has at least one piece"
    if not quiet:
        print()
    return text, ids, last


def echo(text: str) -> None:
    """Print without a line end, at once."""
    print(text, end="", flush=True)
