"""Load a target with its drafter, and ask it: the Python interface."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, cast, overload

import torch

from flashdraft import device as devices
from flashdraft.core import Completion, LoadOptions, Piece, SamplingParams, UserError
from flashdraft.decode.pace import Costs, Pace, costs_of
from flashdraft.decode.plain import plain
from flashdraft.decode.rounds import given, rounds
from flashdraft.decode.row import Request, Row
from flashdraft.drafters.base import Drafter
from flashdraft.drafters.choose import choose_drafter
from flashdraft.target.base import Target
from flashdraft.target.zoo import cache_folder, drafter_folder, resolve

Message = Mapping[str, str]
Prompt = str | Sequence[Message] | Sequence[int]
"""A user's turn, a conversation, or token ids."""


def load(
    model: str = LoadOptions.model,
    drafter: str = LoadOptions.drafter,
    *,
    device: str | None = LoadOptions.device,
    dtype: str | torch.dtype | None = LoadOptions.dtype,
    block_size: int | None = LoadOptions.block_size,
    fast: bool = LoadOptions.fast,
    trust_remote_code: bool = LoadOptions.trust_remote_code,
    progress: bool = True,
) -> Engine:
    """A target with its drafter, ready to answer.

    `core.LoadOptions` says what each argument takes; `progress` shows bars while a model is fetched and converted.
    Raises UserError with what to do when something cannot be had or does not fit.
    """
    from flashdraft.target.hf import load_target

    placement = devices.choose(device, dtype)
    source, notes = resolve(model, progress=progress), cache_folder().parent
    target, tokenizer = load_target(
        source, placement, name=model, trust_remote_code=trust_remote_code, fast=fast, notes=notes
    )
    shipped = drafter_folder(model)
    chosen = choose_drafter(drafter, target, placement, shipped=shipped, block_size=block_size, fast=fast, notes=notes)
    paced = block_size is None and chosen.block_size > 1
    return Engine(target, chosen, tokenizer, costs_of(target, chosen, notes) if paced else None)


class Engine:
    """A target, a drafter and a tokenizer. Holds no state of requests: calls may follow each other in any order.

    With `costs` every round is as long as pays on this machine; without, every round uses the drafter's whole block.
    """

    def __init__(self, target: Target, drafter: Drafter, tokenizer: Any, costs: Costs | None = None) -> None:
        self.costs = costs
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer

    def encode(self, prompt: Prompt, *, raw: bool = False) -> tuple[int, ...]:
        """Token ids of a prompt. Text becomes a user's turn in the model's chat template (if any), unless `raw`."""
        if not isinstance(prompt, str) and all(isinstance(part, int) for part in prompt):
            return tuple(cast(Sequence[int], prompt))
        if isinstance(prompt, str) and (raw or not self.tokenizer.chat_template):
            return tuple(self.tokenizer(prompt)["input_ids"])
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
        if not self.tokenizer.chat_template:
            raise UserError(f"{self.target.name} has no chat template; give text or token ids instead of messages")
        text = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        return tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def stream(self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False) -> Iterator[Piece]:
        """Answer one prompt; yields a piece for the first token and after every round."""
        row = self._row(prompt, params, raw)
        for _ in self._rounds([row]):
            yield row.piece()

    def stream_plain(
        self, prompt: Prompt, params: SamplingParams | None = None, *, raw: bool = False
    ) -> Iterator[Piece]:
        """The same without a drafter, token by token: what the answer costs without us."""
        for row in plain(self.target, self._row(prompt, params, raw)):
            yield row.piece()

    def complete(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        drafted: bool = True,
        watch: Callable[[str], None] | None = None,
    ) -> Completion:
        """Answer one prompt, with the drafter or by plain decoding; `watch` gets the text as it comes."""
        row = self._row(prompt, params, raw)
        steps = self._rounds([row]) if drafted else plain(self.target, row)
        for _ in steps:
            text = row.piece().text
            if watch is not None:
                watch(text)
        return row.completion()

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a sequence of str too; the first match is meant
        self, prompt: str, params: SamplingParams | None = None, *, raw: bool = False, max_rows: int = 8
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Message] | Sequence[int],
        params: SamplingParams | None = None,
        *,
        raw: bool = False,
        max_rows: int = 8,
    ) -> Completion: ...

    @overload
    def generate(
        self,
        prompt: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        max_rows: int = 8,
    ) -> list[Completion]: ...

    def generate(
        self,
        prompt: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        raw: bool = False,
        max_rows: int = 8,
    ) -> Completion | list[Completion]:
        """Answer one prompt (a Completion) or many (a list, in their order), `max_rows` at a time in one batch.

        For many prompts `params` may be one for all or one for each.
        """
        if not _is_many(prompt):
            rows = [self._row(cast(Prompt, prompt), cast("SamplingParams | None", params), raw)]
        else:
            prompts = cast(Sequence[Prompt], prompt)
            each = [params] * len(prompts) if params is None or isinstance(params, SamplingParams) else list(params)
            if len(each) != len(prompts):
                raise UserError(
                    f"{len(prompts)} prompts were given with {len(each)} sampling parameters; give one each"
                )
            rows = [self._row(p, s, raw) for p, s in zip(prompts, each, strict=True)]
        for _ in self._rounds(rows, max_rows):
            pass
        done = [row.completion() for row in rows]
        return done if _is_many(prompt) else done[0]

    def _rounds(self, rows: Sequence[Row], max_rows: int = 1) -> Iterator[object]:
        return rounds(self.target, self.drafter, given(rows), max_rows, Pace(self.costs))

    def _row(self, prompt: Prompt, params: SamplingParams | None, raw: bool) -> Row:
        request = Request(self.encode(prompt, raw=raw), params or SamplingParams())
        return Row(request, self.target, self.tokenizer)


def _is_many(prompt: Prompt | Sequence[Prompt]) -> bool:
    """Whether this is a list of prompts and not one prompt that is a list."""
    return not isinstance(prompt, str) and len(prompt) > 0 and not isinstance(prompt[0], (int, Mapping))
