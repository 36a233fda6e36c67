"""The decoding loop: draft, verify, commit. Command, chat, server, benchmark and training evaluation all consume it.

Letters: B rows, S draft tokens, Q = S + 1 slots of a block (the anchor first), V vocabulary, F feature width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch

from flashdraft.cache import KVCache
from flashdraft.decode.pace import Pace
from flashdraft.decode.row import Row
from flashdraft.decode.verify import match
from flashdraft.drafters.base import Draft, Drafter, DraftState
from flashdraft.target.base import Target

Source = Callable[[int], Sequence[Row]]
"""Gives at most so many new rows; none when nothing waits."""


def given(rows: Sequence[Row]) -> Source:
    """A source that has these rows and then no more."""
    waiting = list(reversed(rows))
    return lambda room: [waiting.pop() for _ in range(min(room, len(waiting)))]


@torch.inference_mode()
def rounds(
    target: Target, drafter: Drafter, source: Source, max_rows: int = 1, pace: Pace | None = None
) -> Iterator[list[Row]]:
    """Answer the rows that `source` gives, at most `max_rows` at a time; `pace` sets the length of drafts.

    Yields the rows that just joined (with their first token), and after every round the rows that were in it; rows that
    finished are among them for the last time. Ends when no row is left and the source has none.
    """
    cache, state, pace = target.new_cache(), drafter.new_state(target), pace or Pace()
    rows: list[Row] = []
    while True:
        if joined := list(source(max_rows - len(rows))):
            rows += [row for row in joined if prefill(row, target, drafter, cache, state)]
            yield joined
            drop_finished(rows, cache, state)
        elif not rows:
            return
        if not rows:
            continue

        draft = propose(rows, drafter, state, pace, target.device)

        anchors_B1 = torch.tensor([row.ids[-1:] for row in rows], device=target.device)
        block_BQ = torch.cat((anchors_B1, draft.ids_BS), dim=1)
        logits_BQV, features_BQF = target.forward(block_BQ, cache, slice(0, len(rows)), taps=drafter.taps)
        emitted = verify(rows, draft, logits_BQV)
        pace.learn(draft.ids_BS.shape[1], [count - 1 for count in emitted])

        for index, count in enumerate(emitted):
            cache.commit(index, count)
        state.commit(features_BQF, emitted)
        yield list(rows)
        drop_finished(rows, cache, state)


def prefill(row: Row, target: Target, drafter: Drafter, cache: KVCache, state: DraftState) -> bool:
    """Read the prompt of a row and take its first token. A row that may have no token does not join (False)."""
    if row.finished:
        return False
    index = cache.join()
    prompt_1T = torch.tensor([row.ids], device=target.device)
    last_11 = torch.tensor([[len(row.ids) - 1]], device=target.device)
    only = slice(index, index + 1)
    logits_11V, features_1TF = target.forward(prompt_1T, cache, only, taps=drafter.taps, keep_BS=last_11)
    cache.commit(index, len(row.ids))
    state.join(row.ids, features_1TF)
    row.first(logits_11V[0, 0])
    return True


def propose(rows: Sequence[Row], drafter: Drafter, state: DraftState, pace: Pace, device: torch.device) -> Draft:
    """The drafter's block, cut to what pays and to what some row has room for.

    A whole block is drafted even when less fits: slots of a block see each other, and what is proposed to a row must
    not depend on how much its neighbours still want. For the same reason drafts that are sampled are never cut to pay:
    with a recorded proposal the length of a draft decides which random numbers its tokens meet.
    """
    room = min(drafter.block_size, max(row.answer.remaining for row in rows)) - 1
    recorded = any(row.params.sample_drafts for row in rows)
    if room == 0 or (not recorded and pace.resting()):
        return Draft(torch.empty(len(rows), 0, dtype=torch.long, device=device))
    draft = state.propose(rows, drafter.block_size - 1)
    return draft.cut(room if recorded else pace.size(draft.confidence_BS, len(rows), room), device)


def verify(rows: Sequence[Row], draft: Draft, logits_BQV: torch.Tensor) -> list[int]:
    """Let every row take its kept draft tokens and the target's own token after them; tokens emitted by each."""
    draft_ids = draft.ids_BS.tolist()
    own_BQ = logits_BQV.argmax(dim=-1)
    kept_B, own = match(draft.ids_BS, own_BQ).tolist(), own_BQ.tolist()
    emitted = []
    for b, row in enumerate(rows):
        size = min(len(draft_ids[b]), row.answer.remaining - 1)
        if row.sampler.argmax_only:
            kept = min(kept_B[b], size)
            token = own[b][kept]
        else:
            proposal_SV = None if draft.probs_BSV is None else draft.probs_BSV[b, :size]
            kept, token = row.judge(logits_BQV[b, : size + 1], draft.ids_BS[b, :size], proposal_SV)
        emitted.append(row.take(draft_ids[b][:kept], token, size, logits_BQV[b]))
    return emitted


def drop_finished(rows: list[Row], cache: KVCache, state: DraftState) -> None:
    """Free the places of finished rows; the last row moves into each, in all three at once."""
    for index in reversed(range(len(rows))):
        if rows[index].finished:
            cache.leave(index)
            state.leave(index)
            rows[index] = rows[-1]
            rows.pop()
