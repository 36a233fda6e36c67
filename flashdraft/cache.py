"""Keys and values of past tokens, one kind for target and drafter.

The slot of a token is its position, so a row needs no padding and no bookkeeping beyond its length. A forward pass
writes behind the length; committing moves the length over what was kept; whatever was rejected is simply overwritten by
the next pass. Rollback therefore copies nothing.

Letters: B rows, G key/value heads, Q new positions, K slots read, E head width.
"""

from __future__ import annotations

import torch

FIRST_CAPACITY = 256  # slots of a new cache; it doubles from there


class KVCache:
    """Preallocated keys and values of every layer, with a length for each row.

    Rows are always 0 .. rows-1: a row that leaves is replaced by the last one, so a batch is a slice, never a gather.
    """

    def __init__(self, num_layers: int) -> None:
        self.lengths: list[int] = []
        self._keys: list[torch.Tensor | None] = [None] * num_layers
        self._values: list[torch.Tensor | None] = [None] * num_layers

    @property
    def rows(self) -> int:
        return len(self.lengths)

    @property
    def nbytes(self) -> int:
        """Bytes allocated."""
        return sum(t.nbytes for t in (*self._keys, *self._values) if t is not None)

    def join(self) -> int:
        """Add an empty row; its index is returned and may change when another row leaves."""
        self.lengths.append(0)
        return self.rows - 1

    def leave(self, row: int) -> None:
        """Forget a row. The last row takes its index."""
        last, length = self.rows - 1, self.lengths[-1]
        if row != last and length:
            for tensor in (*self._keys, *self._values):
                if tensor is not None:
                    tensor[row, :, :length] = tensor[last, :, :length]
        self.lengths[row] = length
        self.lengths.pop()

    def commit(self, row: int, kept: int) -> None:
        """Keep the first `kept` slots that the last pass wrote for this row."""
        self.lengths[row] += kept

    def window(self, rows: slice, new: int) -> CacheWindow:
        """What one pass over `rows` with `new` positions each writes and reads."""
        return CacheWindow(self, rows, self.lengths[rows], new)

    def storage(
        self, layer: int, like_k: torch.Tensor, like_v: torch.Tensor, capacity: int
    ) -> tuple[torch.Tensor, ...]:
        """Keys and values of a layer, grown by doubling until they hold all rows and `capacity` slots."""
        keys = self._keys[layer] = _grown(self._keys[layer], like_k, self.rows, capacity)
        values = self._values[layer] = _grown(self._values[layer], like_v, self.rows, capacity)
        return keys, values


class CacheWindow:
    """The part of a cache that one forward pass over a slice of rows writes and reads."""

    def __init__(self, cache: KVCache, rows: slice, starts: list[int], new: int) -> None:
        self.starts = starts
        self.new = new
        self.span = max(starts, default=0) + new
        """Slots read: everything that any row holds, plus the new positions."""
        self._cache = cache
        self._rows = rows
        self.even = len(set(starts)) == 1

    def positions(self, device: torch.device) -> torch.Tensor:
        """Absolute positions [B, Q] of the new tokens."""
        starts_B1 = torch.tensor(self.starts, device=device)[:, None]
        return starts_B1 + torch.arange(self.new, device=device)

    def mask(self, device: torch.device, *, causal: bool = True, window: int | None = None) -> torch.Tensor | None:
        """Who sees whom in this pass, [B, Q, K]; None when everybody sees everything."""
        whole = self.even and (not causal or self.new == 1) and (window is None or self.span <= window)
        if whole:
            return None
        slots_K = torch.arange(self.span, device=device)
        queries_BQ = self.positions(device)
        seen = visible(queries_BQ, slots_K, causal=causal, window=window)
        # Behind a row's own end lie leftovers of rejected drafts and of longer rows' passes.
        return seen & (slots_K <= queries_BQ[:, -1:, None])

    def update(
        self, layer: int, keys_BGQE: torch.Tensor, values_BGQE: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write new keys and values; return views [B, G, K, E] of all that these rows hold, new ones included."""
        keys, values = self._cache.storage(layer, keys_BGQE, values_BGQE, self.span)
        keys, values = keys[self._rows], values[self._rows]
        if self.even:
            start = self.starts[0]
            keys[:, :, start : start + self.new] = keys_BGQE
            values[:, :, start : start + self.new] = values_BGQE
        else:
            slots = self.positions(keys.device)[:, None, :, None]
            keys.scatter_(2, slots.expand_as(keys_BGQE), keys_BGQE)
            values.scatter_(2, slots.expand_as(values_BGQE), values_BGQE)
        return keys[:, :, : self.span], values[:, :, : self.span]


def _grown(old: torch.Tensor | None, like: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    """`old` if it is large enough, else a larger copy of it."""
    if old is not None and old.shape[0] >= rows and old.shape[2] >= capacity:
        return old
    have_rows, have_slots = (old.shape[0], old.shape[2]) if old is not None else (1, FIRST_CAPACITY)
    while have_rows < rows:
        have_rows *= 2
    while have_slots < capacity:
        have_slots *= 2
    # Zeros, not garbage: a masked slot still enters the product of attention, and 0 * nan is nan.
    new = like.new_zeros(have_rows, like.shape[1], have_slots, like.shape[3])
    if old is not None:
        new[: old.shape[0], :, : old.shape[2]] = old
    return new


def visible(
    query_positions: torch.Tensor, key_positions: torch.Tensor, *, causal: bool = True, window: int | None = None
) -> torch.Tensor:
    """The one rule of sight between positions in a row: [..., Q] and [..., K] -> bool [..., Q, K].

    A key is seen when it is not later than the query (if causal) and less than `window` positions away. Every mask of
    target and drafter, in decoding and in training, is made from this.
    """
    distance = query_positions[..., :, None] - key_positions[..., None, :]
    seen = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
    if window is not None:
        seen = seen & (distance < window)
        if not causal:
            seen = seen & (-distance < window)
    return seen
