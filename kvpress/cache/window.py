# SPDX-License-Identifier: Apache-2.0
"""Open end of a layer: a preallocated dense block that new tokens are written to."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache import memory
from kvpress.cache.attention import Logits, Partial, attend, flash
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment

if TYPE_CHECKING:
    from kvpress.cache.decode_plan import DecodePlan

GROWTH = 16
"""Smallest number of tokens by which a full window grows."""


class RealTokens:
    """Mask of the real tokens among those seen, `real [B, seen]`, with counts cached on the host.

    The left padding of each row is read from the device once, or copied without synchronisation from `before`, the mask of an
    earlier pass that this one extends by real tokens only. If all other tokens are real, every count follows from it. Otherwise
    each count synchronises with the device and is cached, so all layers of a forward pass share one object.
    """

    def __init__(self, real: Tensor, before: RealTokens | None = None) -> None:
        self.real = real
        self._counts: dict[int, list[int]] = {}
        self._pads: dict[tuple[int, int], list[int] | None] = {}
        self._front: list[int] | None = None
        self._has_holes = False
        if before is not None and before.real.shape[0] == real.shape[0]:
            self._front, self._has_holes = before._front, before._has_holes

    def _in_front(self) -> list[int] | None:
        """Return the left padding of each row; None if there is padding after a real token."""
        if self._front is None and not self._has_holes:
            pads, contiguous = _padding(self.real)
            *counts, exact = torch.cat([pads, contiguous[None].to(pads.dtype)]).tolist()
            self._front, self._has_holes = counts if exact else None, not exact
        return self._front

    @property
    def unpadded(self) -> bool:
        """Whether all tokens are real."""
        pads = self._in_front()
        return pads is not None and not any(pads)

    def counts(self, end: int) -> list[int]:
        """Return the number of real tokens of each row among the first `end`."""
        if (pads := self._in_front()) is not None:
            return [max(0, min(end, self.real.shape[1]) - pad) for pad in pads]
        if end not in self._counts:
            self._counts[end] = self.real[:, :end].sum(dim=1).tolist()
        return self._counts[end]

    def left_padding(self, first: int, length: int) -> list[int] | None:
        """Return the left padding of each row in slots `first, ..., first + length - 1`; None if there is other padding."""
        if (in_front := self._in_front()) is not None:
            return [min(max(0, pad - first), length) for pad in in_front]
        key = (first, length)
        if key not in self._pads:
            pads = left_padding(self.real[:, first : first + length])
            self._pads[key] = None if pads is None else pads.tolist()
        return self._pads[key]


class Cursor:
    """Filled length of a window, on its device: a recorded step reads and advances it instead of host counters.

    `starts` and `lengths [N]` are the streams of the block as flat rows, after `pads[b]` tokens of left padding;
    `end [1]` is the first free token. `part` caches the block as an operator reads it, `plan` the call that reads the layer.
    """

    def __init__(self, window: Window, pads: list[int]) -> None:
        self.pads = pads
        self.starts, lengths = window.streams(pads)
        self._counters = torch.cat([lengths, lengths.new_full((1,), window.length)])
        self.lengths, self.end = self._counters[:-1], self._counters[-1:]
        self.part: kernels.Part | None = None
        self.plan: DecodePlan | None = None

    def move(self, tokens: int) -> None:
        """Advance by `tokens` new tokens."""
        self._counters += tokens

    def tensors(self) -> list[Tensor]:
        """Return the tensors of the cursor, for the memory report."""
        return [self.starts, self._counters]


class Window:
    """`keys [B, H, capacity, D]` and `values [B, H, capacity, Dv]`, of which the first `length` tokens are filled.

    Token `i` of the window is in slot `first + i` of the sequence, in every row and head. Growth is by 1/64 of the
    length, so that appending is amortised constant time and slack stays below 2%. `cursor`, created on demand,
    follows `length` on the device until the block or its weights are replaced. `log_weight [B, H, capacity]`, None for
    zeros, is added to the logits of the tokens; it is zero past the filled part.
    """

    def __init__(self, keys: Tensor, values: Tensor, first: int = 0) -> None:
        self.keys = keys
        self.values = values
        self.length = keys.shape[2]
        self.first = first
        self.side: dict[str, Tensor] = {}
        self.log_weight: Tensor | None = None
        self.cursor: Cursor | None = None

    @classmethod
    def empty_like(cls, keys: Tensor, values: Tensor, first: int = 0) -> Window:
        """Return a window without tokens and without memory, for pairs of this shape."""
        return cls(_empty(keys, 0), _empty(values, 0), first)

    @property
    def capacity(self) -> int:
        """Tokens that fit before the window has to grow."""
        return self.keys.shape[2]

    @property
    def filled_keys(self) -> Tensor:
        """Keys of the filled part, a view `[B, H, length, D]`."""
        return self.keys[:, :, : self.length]

    @property
    def filled_values(self) -> Tensor:
        """Values of the filled part, a view `[B, H, length, Dv]`."""
        return self.values[:, :, : self.length]

    @property
    def filled_log_weight(self) -> Tensor | None:
        """Log-weights of the filled part, a view `[B, H, length]`; None for zeros."""
        return None if self.log_weight is None else self.log_weight[..., : self.length]

    def weigh(self, log_weight: Tensor | None) -> None:
        """Set the log-weights `[B, H, length]` of the filled tokens; None for zeros."""
        self.log_weight = self.cursor = None
        if log_weight is not None:
            spare = (0, self.capacity - self.length)
            self.log_weight = torch.nn.functional.pad(log_weight.to(self.keys.device, torch.float32), spare)

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write new tokens `[B, H, n, D]` after the filled part."""
        new = keys.shape[2]
        if self.capacity == 0 and owns_storage(keys) and owns_storage(values):
            # The tensors of a prefill are adopted, not copied; the next growth makes them contiguous.
            self.keys, self.values, self.length, self.log_weight, self.cursor = keys, values, new, None, None
        else:
            end = self.length + new
            if end > self.capacity:
                self._grow(end if self.length == 0 else max(end, self.length + max(GROWTH, self.length // 64)))
            self.keys.narrow(2, self.length, new).copy_(keys)  # half the host time of an indexed assignment
            self.values.narrow(2, self.length, new).copy_(values)
            self.length = end
            if self.cursor is not None:
                self.cursor.move(new)
        for name, array in self.side.items():
            grown = array.new_zeros(*array.shape[:2], self.length)
            grown[..., : array.shape[-1]] = array
            self.side[name] = grown

    def reserve(self, tokens: int) -> None:
        """Grow a full window by `tokens` tokens, or by 1/64 of its length if that is more."""
        if self.length == self.capacity:
            self._grow(self.length + max(tokens, self.length // 64))

    def write(self, keys: Tensor, values: Tensor) -> None:
        """Write one token `[B, H, 1, D]` at the cursor and advance it, all on the device; the caller updates `length`."""
        assert self.cursor is not None  # noqa: S101 - for type checkers; `cursor_at` made it
        self.keys.index_copy_(2, self.cursor.end, keys)
        self.values.index_copy_(2, self.cursor.end, values)
        self.cursor.move(1)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"cursor": None}  # it refers to the tensors of this window

    def cursor_at(self, pads: list[int]) -> Cursor:
        """Return the cursor for rows with left padding `pads`."""
        if self.cursor is None or self.cursor.pads != pads:
            self.cursor = Cursor(self, pads)
        return self.cursor

    def pads(self, mask: RealTokens | None, length: int) -> list[int] | None:
        """Return the left padding of each row in the first `length` tokens; None if there is other padding."""
        return [0] * self.keys.shape[0] if mask is None else mask.left_padding(self.first, length)

    def _grow(self, capacity: int) -> None:
        self.cursor = None
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = _empty(old, capacity)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)
        if self.log_weight is not None:
            spare = (0, capacity - self.log_weight.shape[2])
            self.log_weight = torch.nn.functional.pad(self.log_weight, spare)

    def emptied(self, first: int) -> Window:
        """Return an empty window with the same shape and per-pair arrays, whose next token gets slot `first`."""
        window = Window.empty_like(self.keys, self.values, first)
        window.side = {name: array[..., :0].clone() for name, array in self.side.items()}
        return window

    def crop(self, tokens: int) -> None:
        """Remove the newest `tokens` tokens."""
        self.length, self.cursor = self.length - tokens, None
        self.weigh(self.filled_log_weight)
        self.side = {name: array[..., : self.length] for name, array in self.side.items()}

    def attend(self, queries: Tensor, logits: Logits, new: int, mask: RealTokens | None) -> Partial:
        """Attend from the `new` newest tokens' `queries [N, G * new, D]` to the real tokens, in plain torch."""
        if new == 1 and queries.shape[1] > kernels.MOST_QUERIES and self.log_weight is None:
            partial = self._flash(queries, logits, mask)
            if partial is not None:
                return partial
        real = None if mask is None else mask.real[:, self.first : self.first + self.length]
        visible = self.visible(queries.shape[1], new, real)
        weight = self.filled_log_weight
        weight = None if weight is None else weight.flatten(0, 1)
        return attend(
            queries, self.filled_keys.flatten(0, 1), self.filled_values.flatten(0, 1), logits, visible, weight
        )

    def _flash(self, queries: Tensor, logits: Logits, mask: RealTokens | None) -> Partial | None:
        """Attend from `queries [N, M, D]` to the real tokens by FlashAttention; None where that cannot run."""
        pads = self.pads(mask, self.length)
        if pads is None or max(pads) >= self.length:
            return None
        by_row, keys, values = queries.unflatten(0, self.keys.shape[:2]), self.filled_keys, self.filled_values
        if not any(pads):
            return flash(by_row, keys, values, logits)
        parts = [
            flash(by_row[row : row + 1], keys[row : row + 1, :, pad:], values[row : row + 1, :, pad:], logits)
            for row, pad in enumerate(pads)
        ]
        known = [part for part in parts if part is not None]
        if len(known) < len(parts):
            return None
        return torch.cat([out for out, _ in known]), torch.cat([lse for _, lse in known])

    def as_part(self, queries: Tensor, mask: RealTokens | None) -> kernels.Part | None:
        """Return the real tokens as input of an operator; None where operators do not run."""
        pads = self.pads(mask, self.length)
        return None if pads is None or not kernels.serves(queries, self.keys) else self.part(pads)

    def part(self, pads: list[int]) -> kernels.Part:
        """Return the block as flat rows: stream `n` starts at `n * capacity`, after its padding.

        The result is cached, unless a prefill's tensors were adopted: their rows are a copy, freed after the call.
        """
        cursor = self.cursor_at(pads)
        if cursor.part is not None:
            return cursor.part
        ranges = kernels.Ranges(cursor.starts, cursor.lengths, longest=self.capacity)  # lengths grow on the device
        part = kernels.Part(self.rows(), ranges)
        if self.keys.is_contiguous() and self.values.is_contiguous():
            cursor.part = part
        return part

    def rows(self) -> kernels.Rows:
        """Return the block as flat rows."""
        weight = None if self.log_weight is None else self.log_weight.flatten()
        return kernels.Rows(
            kernels.Dense(self.keys.flatten(0, 2)), kernels.Dense(self.values.flatten(0, 2)), log_weight=weight
        )

    def streams(self, pads: list[int]) -> tuple[Tensor, Tensor]:
        """Return the first flat row and the number of rows of every stream, left padding excluded."""
        batch, heads = self.keys.shape[:2]
        starts = torch.arange(batch * heads, device=self.keys.device) * self.capacity
        lengths = torch.full_like(starts, self.length)
        if not any(pads):
            return starts, lengths
        before = torch.tensor(pads, device=starts.device).repeat_interleave(heads)
        return starts + before, lengths - before

    def counts(self, mask: Tensor | None) -> list[int]:
        """Return the number of tokens of every row that `mask [B, seen]` marks, or of all."""
        if mask is None:
            return [self.length] * self.keys.shape[0]
        counts: list[int] = mask[:, self.first : self.first + self.length].sum(dim=1).tolist()
        return counts

    def segment(self, mask: Tensor | None) -> DenseSegment:
        """Return the tokens that `mask [B, seen]` marks, or all, as a sealed segment; the window does not change."""
        (batch, heads), chosen, counts = self.keys.shape[:2], None, self.counts(mask)
        if mask is not None and min(counts) < self.length:
            real = mask[:, self.first : self.first + self.length].to(self.keys.device)
            chosen = real[:, None].expand(-1, heads, -1)

        def flat(array: Tensor) -> Tensor:
            array = array[:, :, : self.length]
            return array.flatten(0, 2) if chosen is None else array[chosen]

        side = {name: flat(array) for name, array in self.side.items()}
        layout = Layout(count for count in counts for _ in range(heads))
        first = [self.first] * (batch * heads)
        sealed = DenseSegment(flat(self.keys), flat(self.values), layout, first=first, side=side)
        if self.log_weight is not None:
            sealed.log_weight = flat(self.log_weight)
        if chosen is not None:
            sealed._set_slots(chosen.nonzero()[:, 2] + self.first)
        return sealed

    def visible(self, rows: int, new: int, real: Tensor | None) -> Tensor | None:
        """Return a mask of visible tokens for `rows = G * new` query rows, broadcastable to `[N, M, length]`; None for all."""
        visible = None
        device = self.keys.device
        if new > 1:
            newest = torch.arange(self.length - new, self.length, device=device)
            causal = torch.arange(self.length, device=device) <= newest[:, None]
            visible = causal.repeat(rows // new, 1)[None]
        if real is not None:
            real = real.to(device).repeat_interleave(self.keys.shape[1], dim=0)[:, None]
            visible = real if visible is None else visible & real
        return visible

    def select_rows(self, rows: Tensor) -> None:
        """Keep some batch rows, in this order; repeats are allowed."""
        rows = rows.to(self.keys.device)
        self.cursor = None
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        self.side = {name: array.index_select(0, rows.to(array.device)) for name, array in self.side.items()}
        self.log_weight = None if self.log_weight is None else self.log_weight.index_select(0, rows)

    def written(self) -> dict[str, Any]:
        """Return the state for a file: the filled part, without free capacity."""
        filled = {"keys": self.filled_keys, "values": self.filled_values, "log_weight": self.filled_log_weight}
        return {**vars(self), **filled, "cursor": None}

    def tensors(self) -> list[Tensor]:
        """Return all tensors except per-pair arrays."""
        cursor = [] if self.cursor is None else self.cursor.tensors()
        return [self.keys, self.values, *cursor] + ([] if self.log_weight is None else [self.log_weight])

    def to(self, device: torch.device | str) -> None:
        """Move all tensors to a device, in place."""
        self.cursor = None
        self.keys, self.values = self.keys.to(device), self.values.to(device)
        self.side = {name: array.to(device) for name, array in self.side.items()}
        self.log_weight = None if self.log_weight is None else self.log_weight.to(device)


def _empty(like: Tensor, capacity: int) -> Tensor:
    batch, heads, _, dim = like.shape
    return memory.empty((batch, heads, capacity, dim), like)


def left_padding(real: Tensor) -> Tensor | None:
    """Return the left padding `[B]` of each row of a mask `[B, n]`; None if there is other padding."""
    pads, contiguous = _padding(real)
    return pads if bool(contiguous) else None


def _padding(real: Tensor) -> tuple[Tensor, Tensor]:
    """Return the pads `[B]` of each row of a mask `[B, n]`, and whether all are on the left, a bool on its device."""
    pads = (~real).sum(dim=1)
    in_front = torch.arange(real.shape[1], device=real.device) >= pads[:, None]
    return pads, (in_front == real).all()


def owns_storage(tensor: Tensor) -> bool:
    """Return whether a tensor covers its whole storage, so that a reference to it keeps no other memory alive."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
