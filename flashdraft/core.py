"""Records that cross folders: what a request asks for, and what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

import torch

FinishReason = Literal["stop", "length"]
"""`stop`: an end token or a stop string; `length`: the token limit or the end of the context."""

LogitsProcessor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""transformers' convention: (ids [1, T], logits [1, V]) -> logits [1, V]."""


class UserError(ValueError):
    """Something that the caller can mend: the message says what was wrong, what was given and what to do."""


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """Which target and drafter, and where they run. These fields are the only home of their defaults."""

    model: str = "smollm2-135m"
    """Target: a known name (see `flashdraft models`), a local folder, a .gguf file or a hub id (owner/name)."""

    drafter: str = "auto"
    """`auto` (the one that ships for this target, else prompt lookup with a warning), `lookup`, `none`, a folder or a
    hub id."""

    device: str | None = None
    """cpu, cuda, cuda:1 or mps; the best one there is by default."""

    dtype: str | None = None
    """float32, bfloat16 or float16; what suits the device by default."""

    block_size: int | None = None
    """Anchor and draft tokens of every round; by default each round is as long as pays on this machine, up to what the
    drafter was trained with."""

    fast: bool = True
    """On a CPU: replace the modules for which this machine has a faster kernel (more memory, same answers)."""

    trust_remote_code: bool = False
    """Let a hub model run Python code of its own."""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one answer is drawn and where it ends. These fields are the only home of their defaults."""

    max_new_tokens: int = 512
    """Tokens to generate at most, the end token included."""

    temperature: float = 0.0
    """0 takes the most likely token (greedy); 1 samples the model's own distribution."""

    top_k: int = 0
    """Sample only among the k most likely tokens; 0 means all."""

    top_p: float = 1.0
    """Sample only among the most likely tokens whose probabilities sum to p."""

    min_p: float = 0.0
    """Drop tokens less likely than min_p times the most likely one."""

    repetition_penalty: float = 1.0
    """Divide positive (multiply negative) logits of tokens seen in the prompt or the answer."""

    presence_penalty: float = 0.0
    """Subtract from the logits of tokens that the answer already holds."""

    frequency_penalty: float = 0.0
    """Subtract from the logit of a token once for every time the answer holds it."""

    logit_bias: dict[int, float] = field(default_factory=dict)
    """Token id -> value added to its logit."""

    min_new_tokens: int = 0
    """End tokens are forbidden until this many tokens were generated."""

    seed: int | None = None
    """Equal seeds give equal answers whatever else is in the batch, and (without `sample_drafts`) with any drafter or
    none; None draws a seed."""

    stop: tuple[str, ...] = ()
    """Strings that end the answer; the text is cut before them."""

    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, besides the model's own end tokens."""

    ignore_eos: bool = False
    """Go on after the model's own end tokens."""

    logprobs: int | None = None
    """Log-probabilities of the chosen tokens and of this many alternatives; None gives none."""

    sample_drafts: bool = False
    """At temperature > 0: let the drafter sample (its proposal recorded) instead of taking its argmax."""

    logits_processors: tuple[LogitsProcessor, ...] = ()
    """Further processors in transformers' convention, each called once per emitted token on its exact prefix."""

    def __post_init__(self) -> None:
        def demand(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise UserError(f"{name} must be {rule}, got {getattr(self, name)!r}")

        demand(self.max_new_tokens >= 0, "max_new_tokens", "at least 0")
        demand(self.temperature >= 0, "temperature", "at least 0")
        demand(self.top_k >= 0, "top_k", "at least 0 (0 means all tokens)")
        demand(0 < self.top_p <= 1, "top_p", "above 0 and at most 1")
        demand(0 <= self.min_p < 1, "min_p", "at least 0 and below 1")
        demand(self.repetition_penalty > 0, "repetition_penalty", "above 0 (1 means none)")
        demand(self.min_new_tokens >= 0, "min_new_tokens", "at least 0")
        demand(self.logprobs is None or self.logprobs >= 0, "logprobs", "None or at least 0")
        demand(not isinstance(self.stop, str), "stop", "a tuple of strings")
        demand(all(self.stop), "stop", "strings that are not empty")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def needs_prefix(self) -> bool:
        """Whether the distribution of a slot depends on the tokens before it in other ways than through the model."""
        return bool(
            self.repetition_penalty != 1
            or self.presence_penalty
            or self.frequency_penalty
            or self.min_new_tokens
            or self.logits_processors
        )


@dataclass(frozen=True)
class TokenLogprob:
    """Log-probability of one emitted token under the target's raw distribution, with the best alternatives."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass
class Stats:
    """What one answer cost. Times are seconds."""

    rounds: int = 0
    drafted: int = 0
    """Draft tokens proposed."""
    emitted: int = 0
    """Tokens delivered by rounds (the first token of an answer comes from the prompt's own pass)."""
    accepted_per_slot: list[int] = field(default_factory=list)
    """How often the draft token of slot 1, 2, ... was kept."""
    time_to_first_token: float = 0.0
    decode_time: float = 0.0
    """From the first token to the last one."""

    @property
    def accepted(self) -> int:
        return sum(self.accepted_per_slot)

    @property
    def tau(self) -> float:
        """Mean tokens emitted per round, the target's own token included ("acceptance length" of the papers)."""
        return self.emitted / self.rounds if self.rounds else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed after the first token."""
        return self.emitted / self.decode_time if self.decode_time else 0.0


@dataclass(frozen=True)
class Piece:
    """What a round added to an answer: text that is final, and the ids delivered (their text may lag behind)."""

    text: str
    ids: tuple[int, ...]
    drafted: tuple[bool, ...]
    """For every id whether it came from the drafter."""
    logprobs: tuple[TokenLogprob, ...]
    finish_reason: FinishReason | None
    stats: Stats


@dataclass(frozen=True)
class Completion:
    """A whole answer. `ids`, `logprobs` and `usage` always agree; `text` is their text, cut before a stop string."""

    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    logprobs: tuple[TokenLogprob, ...]
    stats: Stats

    @property
    def usage(self) -> dict[str, int]:
        """Token counts, by the names of the OpenAI interface."""
        prompt, answer = len(self.prompt_ids), len(self.ids)
        return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer}
