"""The command line: a table of commands, each imported when it is chosen."""

from __future__ import annotations

import difflib
import gc
import sys
from importlib import import_module

COMMANDS = {
    "generate": "answer one prompt, streamed; --compare runs plain decoding too",
    "chat": "talk with the model",
    "data": "let the target answer prompts, to train a drafter on",
    "models": "list, fetch and remove models",
    "doctor": "what this machine can do, with a lossless round trip",
}
"""Command -> what it does; its module is flashdraft.commands.<command>."""

COLLECT_RARELY = 200_000  # new objects between two collections: imports make many and leave none, and start sooner

EPILOG = "`flashdraft COMMAND --help` explains a command and its options."


def main(argv: list[str] | None = None) -> int:
    """Run a command. Exit codes: 0 done, 1 the command found something wrong, 2 bad usage or input, 130 interrupted."""
    gc.set_threshold(COLLECT_RARELY)
    args = sys.argv[1:] if argv is None else argv
    if not args or args[0] in ("-h", "--help", "help"):
        print(usage())
        return 0
    if args[0] == "--version":
        from flashdraft import __version__

        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        near = difflib.get_close_matches(args[0], COMMANDS, 1)
        hint = f"did you mean {near[0]!r}?" if near else f"commands are {', '.join(COMMANDS)}"
        return complain(f"no command {args[0]!r}; {hint}")
    return run(args[0], args[1:])


def run(command: str, args: list[str]) -> int:
    """Parse the arguments of a command and run it; what the user can mend becomes one line, without a traceback."""
    import tyro

    from flashdraft.core import UserError

    module = import_module(f"flashdraft.commands.{command}")
    try:
        return int(module.run(tyro.cli(module.Args, prog=f"flashdraft {command}", args=args)))
    except UserError as error:
        return complain(str(error))
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 0


def usage() -> str:
    """The list of commands."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(["usage: flashdraft COMMAND [options]", "", *lines, "", EPILOG])


def complain(message: str) -> int:
    """One line on standard error, and the exit code for it."""
    print(f"flashdraft: {message}", file=sys.stderr)
    return 2
