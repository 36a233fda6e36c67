"""How much to draft and to verify, so that tokens come fastest (CaDDTree's rule, arXiv 2606.01813, for a chain).

A round of S draft tokens emits 1 + sum_k prod_{i<=k} c_i tokens on average, where c_i is the drafter's own confidence
in its token of slot i: a trained drafter's probabilities are calibrated well enough to be taken at their word. It costs
a draft and a target pass over S + 1 tokens, which were timed on this machine. S is chosen to give most tokens a second.
Where even the best S gives less than plain steps do, drafting rests for some rounds and is then tried again.

The answer does not depend on any of this: fewer draft tokens only mean that fewer are accepted in one pass.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from flashdraft.core import SamplingParams
from flashdraft.device import now
from flashdraft.drafters.base import Drafter
from flashdraft.fast import read_note, write_note
from flashdraft.target.base import Target

TIMED_TOKENS = (1, 2, 3, 4, 6, 8, 12, 16)
TIMED_CONTEXT = 128
REPEATS = 3
FIRST_REST, LONGEST_REST = 4, 32  # rounds
CREDIT = 1.2  # gain that drafting is believed to have at first: it takes a few poor drafts to rest
MEMORY = 0.8  # weight of the past in running means
UNKNOWN_RATE = 0.5  # acceptance of a slot of which nothing is known yet


@dataclass(frozen=True)
class Costs:
    """Seconds on this machine: of target passes over so many new tokens, and of one draft with its upkeep."""

    tokens: tuple[int, ...]
    verify: tuple[float, ...]
    draft: float

    def of(self, tokens: int) -> float:
        """Seconds of a target pass over `tokens` new tokens; straight lines between and beyond the timed points."""
        upper = next((i for i, n in enumerate(self.tokens) if n >= tokens), len(self.tokens) - 1)
        upper = max(upper, 1) if len(self.tokens) > 1 else 0
        if upper == 0:
            return self.verify[0]
        (x0, x1), (y0, y1) = self.tokens[upper - 1 : upper + 1], self.verify[upper - 1 : upper + 1]
        return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class Pace:
    """Chooses the length of each round's draft. Without costs, the drafter's whole block is used always."""

    def __init__(self, costs: Costs | None = None) -> None:
        self._costs = costs
        self._gain = CREDIT  # running mean of (tokens per second of drafted rounds) / (of plain steps)
        self._rest = 0
        self._next_rest = FIRST_REST
        self._rates: list[float] = []

    def resting(self) -> bool:
        """Whether this round is to be a plain step."""
        if self._rest == 0:
            return False
        self._rest -= 1
        return True

    def size(self, confidence_BS: torch.Tensor | None, rows: int, room: int) -> int:
        """How many of at most `room` draft tokens to verify, for all rows of a batch."""
        costs = self._costs
        if costs is None:
            return room
        hoped_S = self._hoped(confidence_BS, rows, room)
        plain = rows / costs.of(rows)
        speeds = [hoped / (costs.draft + costs.of(rows * (s + 1))) for s, hoped in enumerate(hoped_S)]
        best = max(range(len(speeds)), key=speeds.__getitem__)
        self._gain = MEMORY * self._gain + (1 - MEMORY) * speeds[best] / plain
        if self._gain >= 1:
            self._next_rest = FIRST_REST
        else:
            self._rest, self._next_rest = self._next_rest, min(2 * self._next_rest, LONGEST_REST)
            self._gain = 1.0  # after the rest, the next draft alone decides
        return best

    def learn(self, proposed: int, accepted: Sequence[int]) -> None:
        """What came of a round: draft tokens kept in each row. For drafters that do not tell their confidence."""
        while len(self._rates) < proposed:
            self._rates.append(UNKNOWN_RATE)
        for kept in accepted:
            for slot in range(min(kept + 1, proposed)):
                self._rates[slot] = MEMORY * self._rates[slot] + (1 - MEMORY) * (slot < kept)

    def _hoped(self, confidence_BS: torch.Tensor | None, rows: int, room: int) -> list[float]:
        """Tokens that a round is expected to emit with 0, 1, ... room draft tokens, over all rows."""
        if confidence_BS is not None:
            kept_S = confidence_BS[:, :room].double().cumprod(dim=1).sum(dim=0)
        else:
            rates = (self._rates + [UNKNOWN_RATE] * room)[:room]
            kept_S = rows * torch.tensor(rates, dtype=torch.float64).cumprod(dim=0)
        return [float(rows), *(rows + kept_S.cumsum(dim=0)).tolist()]


def costs_of(target: Target, drafter: Drafter, cache_folder: Path) -> Costs:
    """Costs of a pair on this machine: from an earlier run's notes in `cache_folder`, or timed now and noted."""
    file = cache_folder / f"costs-{_fingerprint(target, drafter)}.json"
    note = read_note(file)
    if note.keys() >= {"tokens", "verify", "draft"}:
        return Costs(tuple(note["tokens"]), tuple(note["verify"]), note["draft"])
    costs = time_costs(target, drafter)
    write_note(file, asdict(costs))
    return costs


@torch.inference_mode()
def time_costs(target: Target, drafter: Drafter) -> Costs:
    """Time target passes and drafts behind a short context. The least of a few times: what the machine can do."""
    cache, state = target.new_cache(), drafter.new_state(target)
    cache.join()
    only, context = slice(0, 1), [0] * TIMED_CONTEXT
    ids_1T = torch.tensor([context], device=target.device)
    keep_11 = torch.zeros(1, 1, dtype=torch.long, device=target.device)
    features = target.forward(ids_1T, cache, only, taps=drafter.taps, keep_BS=keep_11).features
    cache.commit(0, TIMED_CONTEXT)
    state.join(context, features)
    verify = []
    for tokens in TIMED_TOKENS:
        taken = []
        for _ in range(REPEATS):
            begin = now(target.device)
            logits = target.forward(ids_1T[:, :tokens], cache, only, taps=drafter.taps).logits
            logits.argmax(dim=-1).tolist()
            taken.append(now(target.device) - begin)
        verify.append(min(taken))
    return Costs(TIMED_TOKENS, tuple(verify), _time_draft(target, drafter, features))


def _time_draft(target: Target, drafter: Drafter, features_1TF: torch.Tensor | None) -> float:
    """Seconds of one draft and of committing two tokens to the drafter."""
    state = drafter.new_state(target)
    state.join([0] * TIMED_CONTEXT, features_1TF)
    taken = []
    for _ in range(REPEATS + 1):
        begin = now(target.device)
        draft = state.propose([_TimedRow()], drafter.block_size - 1)
        draft.ids_BS.tolist()
        state.commit(None if features_1TF is None else features_1TF[:, :2], [1])
        taken.append(now(target.device) - begin)
    return min(taken)


class _TimedRow:
    """The least that a drafter asks of a row."""

    def __init__(self) -> None:
        self.ids = [0] * (TIMED_CONTEXT + 1)
        self.params = SamplingParams()

    def draft_noise(self, count: int) -> torch.Tensor:
        return torch.zeros(count)


def _fingerprint(target: Target, drafter: Drafter) -> str:
    """Everything that the costs depend on."""
    device = torch.cuda.get_device_name(target.device) if target.device.type == "cuda" else platform.processor()
    parts = (target.name, target.dtype, target.device, device, torch.get_num_threads(), torch.__version__)
    shape = (type(drafter).__name__, drafter.block_size, drafter.taps, target.num_layers, target.hidden_size)
    return hashlib.sha256(repr((*parts, *shape)).encode()).hexdigest()[:12]
