"""A drafter that knows the answer and errs on command: forces every acceptance pattern without any training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from flashdraft.drafters.base import Draft, Drafter, DraftRow, DraftState
from flashdraft.target.base import Target


class ScriptedDrafter(Drafter):
    """Proposes the true answer of every row, with a wrong token after as many right ones as the script says.

    `answers`: prompt ids -> the answer that plain decoding gives. `script`: right tokens in round 0, 1, ... of a row,
    repeated from its start; a number of at least `block_size - 1` means a wholly right draft.
    """

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], script: Sequence[int], block_size: int = 8
    ) -> None:
        self.answers = answers
        self.script = script
        self.block_size = block_size

    def new_state(self, target: Target) -> DraftState:
        return _ScriptedState(self, target)


class _ScriptedState(DraftState):
    def __init__(self, drafter: ScriptedDrafter, target: Target) -> None:
        self._drafter = drafter
        self._target = target
        self._prompts: list[tuple[int, ...]] = []
        self._rounds: list[int] = []

    def join(self, ids: Sequence[int], features_1TF: torch.Tensor | None) -> None:
        self._prompts.append(tuple(ids))
        self._rounds.append(0)

    def propose(self, rows: Sequence[DraftRow], size: int) -> Draft:
        drafts = [self._draft(b, len(row.ids), size) for b, row in enumerate(rows)]
        return Draft(torch.tensor(drafts, dtype=torch.long, device=self._target.device).view(len(rows), size))

    def commit(self, features_BQF: torch.Tensor | None, kept: Sequence[int]) -> None:
        pass

    def leave(self, row: int) -> None:
        self._prompts[row], self._rounds[row] = self._prompts[-1], self._rounds[-1]
        self._prompts.pop()
        self._rounds.pop()

    def _draft(self, row: int, length: int, size: int) -> list[int]:
        prompt, script = self._prompts[row], self._drafter.script
        right = script[self._rounds[row] % len(script)]
        self._rounds[row] += 1
        place = length - len(prompt)
        truth = list(self._drafter.answers[prompt][place : place + size])
        draft = truth + [0] * (size - len(truth))
        if right < size:
            draft[right] = (draft[right] + 1) % self._target.vocab_size
        return draft
