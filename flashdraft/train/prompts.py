"""Prompts to answer: from files, folders and hub datasets in the usual shapes, or written by the target itself."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashdraft.core import SamplingParams, UserError
from flashdraft.decode.engine import Engine, Message

TEXT_KEYS = ("prompt", "question", "query", "text", "problem")
"""Keys under which a record may hold a user's turn as text, tried in this order."""
ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


@dataclass(frozen=True)
class Prompt:
    """A conversation that waits for the model's turn."""

    messages: tuple[Message, ...]
    source: str

    @property
    def key(self) -> str:
        """The same for equal conversations, wherever they come from."""
        text = json.dumps([[m["role"], m["content"]] for m in self.messages], ensure_ascii=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_prompts(source: str, *, suffix: str = "", split: str = "train") -> Iterator[Prompt]:
    """Prompts of a file (.jsonl, .json, .txt: one a line), a folder of such files, or a hub dataset (owner/name).

    `suffix` is added to every user's first turn (such as "reason step by step"). Raises UserError for a source that
    cannot be read and for records in no known shape, naming the record.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        for file in sorted(p for p in path.rglob("*") if p.suffix in (".jsonl", ".json", ".txt")):
            yield from read_prompts(str(file), suffix=suffix)
        return
    name = path.stem if path.exists() else source
    for number, record in enumerate(_records(path) if path.exists() else _hub_records(source, split)):
        messages = messages_of(record)
        if messages is None:
            keys = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise UserError(
                f"{source}, record {number}: found no prompt in {keys}; expected messages, conversations, instruction "
                f"or one of {', '.join(TEXT_KEYS)}"
            )
        if suffix:
            first = next(i for i, m in enumerate(messages) if m["role"] == "user")
            messages[first] = {"role": "user", "content": messages[first]["content"] + suffix}
        own_name = record.get("source") if isinstance(record, dict) else None
        yield Prompt(tuple(messages), own_name or name)


def messages_of(record: Any) -> list[Message] | None:
    """The turns of a record up to the last user's turn, or None when it has no known shape."""
    if isinstance(record, str):
        return [{"role": "user", "content": record}] if record.strip() else None
    if not isinstance(record, dict):
        return None
    turns = record.get("messages") or record.get("conversations")
    if isinstance(turns, list):
        read = [_turn(turn) for turn in turns]
        if any(turn is None for turn in read):
            return None
        messages = [turn for turn in read if turn is not None]
        while messages and messages[-1]["role"] != "user":
            messages.pop()
        return messages or None
    if isinstance(record.get("instruction"), str):
        extra = record.get("input") or ""
        return [{"role": "user", "content": record["instruction"] + (f"\n\n{extra}" if extra else "")}]
    text = next((record[key] for key in TEXT_KEYS if isinstance(record.get(key), str)), "")
    return [{"role": "user", "content": text}] if text.strip() else None


def distinct(prompts: Iterable[Prompt]) -> Iterator[Prompt]:
    """Each conversation once."""
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.key not in seen:
            seen.add(prompt.key)
            yield prompt


def self_written(engine: Engine, count: int, seed: int = 0, *, max_new_tokens: int = 160) -> Iterator[Prompt]:
    """User's turns that the target writes itself, given only the head of its chat template (Magpie, arXiv 2406.08464).

    So a drafter can be trained with no data at all. Turns that the model did not end by itself are left out.
    """
    head = user_head(engine)
    choices = random.Random(seed)
    written = 0
    while written < count:
        each = [
            SamplingParams(max_new_tokens=max_new_tokens, temperature=1.0, top_p=0.95, seed=choices.getrandbits(48))
            for _ in range(min(count - written, 64))
        ]
        for done in engine.generate([head] * len(each), each, max_rows=32):
            text = done.text.strip()
            if done.finish_reason == "stop" and len(text) > 8:
                written += 1
                yield Prompt(({"role": "user", "content": text},), "self-written")


def user_head(engine: Engine) -> Sequence[int]:
    """Ids of the chat template up to where the user's first words would stand."""
    mark = "\u0001"
    if not engine.tokenizer.chat_template:
        raise UserError(f"{engine.target.name} has no chat template, so it cannot write user's turns; give prompts")
    text = engine.tokenizer.apply_chat_template([{"role": "user", "content": mark}], tokenize=False)
    head = text.partition(mark)[0]
    return tuple(engine.tokenizer(head, add_special_tokens=False)["input_ids"])


def _turn(turn: Any) -> Message | None:
    """One turn in either usual shape."""
    if not isinstance(turn, dict):
        return None
    role = ROLES.get(str(turn.get("role", turn.get("from"))))
    content = turn.get("content", turn.get("value"))
    return {"role": role, "content": content} if role and isinstance(content, str) else None


def _records(path: Path) -> Iterator[Any]:
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".jsonl":
            # Not splitlines(): JSON strings may hold other line separators.
            yield from (json.loads(line) for line in text.split("\n") if line.strip())
        elif path.suffix == ".json":
            whole = json.loads(text)
            yield from whole if isinstance(whole, list) else [whole]
        elif path.suffix == ".txt":
            yield from (line for line in text.split("\n") if line.strip())
        else:
            raise UserError(f"{path}: prompts are read from .jsonl, .json and .txt files, and from folders of them")
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f"cannot read prompts from {path}: {error}") from error


def _hub_records(name: str, split: str) -> Iterator[Any]:
    if name.count("/") != 1:
        raise UserError(f"prompts {name!r}: no such file or folder, and not a hub dataset (owner/name)")
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise UserError("hub datasets need the extra: pip install 'flashdraft[train]'") from error
    yield from load_dataset(name, split=split, streaming=True)
