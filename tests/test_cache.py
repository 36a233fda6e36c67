"""The cache against a naive one, and its masks against the definition, pair by pair."""

from __future__ import annotations

from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashdraft.cache import KVCache, visible

HEADS, WIDTH = 2, 3

KEPT = st.lists(st.integers(0, 5), min_size=10, max_size=10)
step = st.one_of(
    st.tuples(st.just("join")),
    st.tuples(st.just("leave"), st.integers(0, 9)),
    st.tuples(st.just("write"), st.integers(1, 5), KEPT, st.booleans()),
    st.tuples(st.just("write"), st.sampled_from((1, 200, 300)), KEPT, st.just(True)),
)


@settings(deadline=None, max_examples=100)
@given(steps=st.lists(step, min_size=10, max_size=20))
def test_against_lists(steps: list[tuple]) -> None:
    """Rows join and leave; all of them, or the newest alone, write blocks behind ragged lengths and keep parts of them:
    after every step each row holds what a list of its tokens would, also when storage grows."""
    cache, lists, serial = KVCache(2), [], 0
    for action, *args in [("join",), ("join",), ("write", 3, [3, 1] * 5, False), *steps]:
        if action == "join":
            assert cache.join() == len(lists)
            lists.append([])
        elif action == "leave" and lists:
            row = args[0] % len(lists)
            cache.leave(row)
            lists[row] = lists[-1]
            lists.pop()
        elif action == "write" and lists:
            new, kept_each, newest_alone = args
            first = len(lists) - 1 if newest_alone else 0
            tokens = torch.arange(serial, serial + (len(lists) - first) * new).view(-1, new)
            serial += tokens.numel()
            write(cache, lists, first, tokens)
            for row, ids in enumerate(tokens.tolist(), first):
                kept = min(kept_each[row % 10], new)
                cache.commit(row, kept)
                lists[row] += ids[:kept]
        assert cache.lengths == [len(held) for held in lists]
        if lists:
            write(cache, lists, 0, torch.full((len(lists), 1), -7))  # read all by one more token, which is not kept


def write(cache: KVCache, lists: list[list[int]], first: int, tokens: torch.Tensor) -> None:
    """Write tokens behind the rows from `first` on, and look at all that the pass would read: heads and layers differ,
    so do keys and values."""
    scale = torch.tensor([1.0, 2.0]).view(HEADS, 1, 1).expand(-1, -1, WIDTH)
    window = cache.window(slice(first, len(lists)), tokens.shape[1])
    numbers = tokens[:, None, :, None] * scale
    for layer in range(2):
        keys, values = window.update(layer, numbers + layer, -numbers - layer)
        for index, held in enumerate(lists[first:]):
            expected = torch.tensor(held + tokens[index].tolist())[:, None] * scale + layer
            assert torch.equal(keys[index, :, : expected.shape[1]], expected)
            assert torch.equal(values[index, :, : expected.shape[1]], -expected)


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


def test_a_row_that_never_wrote_can_leave() -> None:
    """A request that ends before its first pass leaves rows behind that the storage does not even hold yet."""
    cache = KVCache(1)
    cache.join()
    cache.window(slice(0, 1), 2).update(0, torch.ones(1, HEADS, 2, WIDTH), torch.ones(1, HEADS, 2, WIDTH))
    cache.commit(0, 2)
    cache.join()
    cache.leave(0)
    assert cache.lengths == [0]
    cache.leave(0)
    assert cache.lengths == [] and cache.rows == 0


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    new=st.integers(1, 6),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
)
def test_leftovers_never_count(lengths: list[int], new: int, causal: bool, window: int | None) -> None:
    """Slots behind a row's end hold rejected drafts and other rows' past; huge values there change no bit of what
    attention gives."""
    outputs = []
    for leftover in (0.0, 1e30):
        generator = torch.Generator().manual_seed(0)
        cache = KVCache(1)
        for length in lengths:
            cache.commit(cache.join(), length)
        view = cache.window(slice(0, len(lengths)), new)
        like = torch.zeros(len(lengths), HEADS, new, WIDTH)
        for storage in cache.storage(0, like, like, view.span):
            storage.fill_(leftover)
            for row, length in enumerate(lengths):
                storage[row, :, :length] = torch.randn(HEADS, length, WIDTH, generator=generator)
        query, key, value = (torch.randn(like.shape, generator=generator) for _ in range(3))
        keys, values = view.update(0, key, value)
        mask = view.mask(torch.device("cpu"), causal=causal, window=window)
        mask = None if mask is None else mask[:, None]
        outputs.append(torch.nn.functional.scaled_dot_product_attention(query, keys, values, attn_mask=mask))
    assert torch.equal(*outputs) and outputs[0].isfinite().all()


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    new=st.integers(1, 6),
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
)
def test_masks_against_the_definition(lengths: list[int], new: int, causal: bool, window: int | None) -> None:
    masks_follow_the_definition(lengths, new, causal, window)


def test_masks_at_every_edge() -> None:
    """One row, every way of a text to fill a window: here masks are left out where they would hide nothing."""
    for length, new, causal, window in product(range(8), range(1, 5), (True, False), (None, 1, 2, 3, 7)):
        masks_follow_the_definition([length], new, causal, window)
        masks_follow_the_definition([length] * 2, new, causal, window)


def masks_follow_the_definition(lengths: list[int], new: int, causal: bool, window: int | None) -> None:
    """A query sees a key of its own row that is not later (if causal) and less than `window` away; never what lies
    behind the row's own new tokens."""
    cache = KVCache(1)
    for length in lengths:
        cache.commit(cache.join(), length)
    view = cache.window(slice(0, len(lengths)), new)
    assert view.positions(torch.device("cpu")).tolist() == [list(range(n, n + new)) for n in lengths]
    mask = view.mask(torch.device("cpu"), causal=causal, window=window)
    seen = torch.ones(len(lengths), new, view.span) if mask is None else mask
    for row, length in enumerate(lengths):
        for query in range(length, length + new):
            near = [
                key < length + new and (key <= query or not causal) and (window is None or abs(query - key) < window)
                for key in range(view.span)
            ]
            assert seen[row, query - length].tolist() == near, (row, query)


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
