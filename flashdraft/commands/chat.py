"""`flashdraft chat`: a conversation in the terminal."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated

import tyro

from flashdraft.commands.show import stats_line
from flashdraft.core import LoadOptions, SamplingParams, UserError
from flashdraft.decode.engine import Engine, Message, load

HELP = """/reset    forget the conversation
/history  show the conversation
/help     this list
/exit     leave (as does end of input)"""


@dataclass(frozen=True, kw_only=True)
class Args:
    """Talk with the model, turn by turn; after every answer its speed and tau are shown.

    Inside: /reset forgets the conversation, /history shows it, /exit leaves. Ctrl-C stops an answer.
    """

    system: str | None = None
    """System turn at the head of the conversation."""

    load: Annotated[LoadOptions, tyro.conf.arg(name="")] = field(default_factory=LoadOptions)
    sampling: Annotated[SamplingParams, tyro.conf.arg(name="")] = field(default_factory=SamplingParams)


def run(args: Args) -> int:
    engine = load(**vars(args.load))
    head: list[Message] = [] if args.system is None else [{"role": "system", "content": args.system}]
    history = list(head)
    print(f"{engine.target.name} on {engine.target.device}. /help lists the commands.", file=sys.stderr)
    while (line := ask()) is not None:
        if line == "/exit":
            break
        if line == "/reset":
            history = list(head)
            print("(forgotten)", file=sys.stderr)
        elif line == "/history":
            print("\n".join(f"{m['role']}: {m['content']}" for m in history) or "(nothing yet)")
        elif line.startswith("/"):
            print(HELP if line == "/help" else f"no command {line}\n{HELP}", file=sys.stderr)
        elif line:
            history = answer(engine, [*history, {"role": "user", "content": line}], args.sampling)
    return 0


def ask() -> str | None:
    """The user's next line; None at the end of input."""
    try:
        return input("> " if sys.stdin.isatty() else "").strip()
    except EOFError:
        return None


def answer(engine: Engine, history: list[Message], params: SamplingParams) -> list[Message]:
    """Stream the model's turn; the conversation with it. A turn that does not fit is refused and forgotten."""
    text, tokens, stats = "", 0, None
    try:
        for piece in engine.stream(history, params):
            print(piece.text, end="", flush=True)
            text, tokens, stats = text + piece.text, tokens + len(piece.ids), piece.stats
    except UserError as error:
        print(f"{error} (/reset starts anew)", file=sys.stderr)
        return history[:-1]
    except KeyboardInterrupt:
        print(" (stopped)", end="")
    print()
    if stats is not None:
        print(f"[{stats_line(stats, tokens)}]", file=sys.stderr)
    return [*history, {"role": "assistant", "content": text}]
