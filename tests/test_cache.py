"""The cache against a naive one, and its masks against the definition, pair by pair."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdraft.cache import KVCache, visible

HEADS, WIDTH = 2, 3

step = st.one_of(
    st.tuples(st.just("join")),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("write"), st.integers(1, 5), st.lists(st.integers(0, 5), min_size=10, max_size=10)),
)


@settings(deadline=None, max_examples=80)
@given(steps=st.lists(step, max_size=25))
def test_against_lists(steps: list[tuple]) -> None:
    """Rows join and leave, write ragged blocks and keep parts of them: each row holds what a list of its tokens
    would."""
    cache, lists, serial = KVCache(2), [], 0
    for action, *args in steps:
        if action == "join":
            assert cache.join() == len(lists)
            lists.append([])
        elif action == "leave" and lists:
            row = args[0] % len(lists)
            cache.leave(row)
            lists[row] = lists[-1]
            lists.pop()
        elif action == "write" and lists:
            new = args[0]
            tokens = torch.arange(serial, serial + len(lists) * new).view(len(lists), new)
            serial += tokens.numel()
            values = tokens[:, None, :, None].expand(-1, HEADS, -1, WIDTH).float()
            window = cache.window(slice(0, len(lists)), new)
            for layer in range(2):
                keys, _ = window.update(layer, values + layer, -values)
            for row, held in enumerate(lists):
                assert keys[row, 0, : len(held) + new, 0].tolist() == [1.0 + t for t in held + tokens[row].tolist()]
            for row, held in enumerate(lists):
                kept = min(args[1][row], new)
                cache.commit(row, kept)
                held += tokens[row, :kept].tolist()
        assert cache.lengths == [len(held) for held in lists]


def test_growth_keeps_what_is_there() -> None:
    cache = KVCache(1)
    cache.join()
    first = torch.randn(1, HEADS, 7, WIDTH)
    cache.window(slice(0, 1), 7).update(0, first, first)
    cache.commit(0, 7)
    for _ in range(5):
        cache.join()
    assert cache.nbytes > 0
    more = torch.randn(1, HEADS, 900, WIDTH)
    keys, values = cache.window(slice(0, 1), 900).update(0, more, -more)
    assert torch.equal(keys, torch.cat((first, more), 2)) and torch.equal(values, torch.cat((first, -more), 2))


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    new=st.integers(1, 6),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
)
def test_masks_against_the_definition(lengths: list[int], new: int, causal: bool, window: int | None) -> None:
    """A query sees a key of its own row that is not later (if causal) and less than `window` away; never what lies
    behind the row's own new tokens."""
    cache = KVCache(1)
    for length in lengths:
        cache.commit(cache.join(), length)
    view = cache.window(slice(0, len(lengths)), new)
    mask = view.mask(torch.device("cpu"), causal=causal, window=window)
    for row, length in enumerate(lengths):
        for query in range(length, length + new):
            for key in range(view.span):
                seen = key < length + new
                seen &= key <= query or not causal
                seen &= window is None or abs(query - key) < window
                got = True if mask is None else bool(mask[row, query - length, key])
                assert got == seen, (row, query, key)


def test_visible_is_the_only_rule() -> None:
    """The predicate itself, looped over pairs."""
    positions = torch.arange(9)
    for causal in (True, False):
        for window in (None, 1, 4):
            got = visible(positions, positions, causal=causal, window=window)
            for q in range(9):
                for k in range(9):
                    near = window is None or (q - k < window and (causal or k - q < window))
                    assert bool(got[q, k]) == ((k <= q or not causal) and near)
