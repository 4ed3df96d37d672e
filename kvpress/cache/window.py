"""The open end of a layer: a preallocated dense block that new tokens are written into."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.attention import Logits, Partial, attend

GROWTH = 16
"""Smallest number of tokens by which a full window grows."""


class Window:
    """`keys [B, H, capacity, D]` and `values [B, H, capacity, Dv]`, of which the first `length` tokens are filled.

    Token `i` of the window is column `first + i` of the sequence, in every row and head. Growth is by 1/64 of the
    length, so that writing stays amortised constant and the slack stays below 2%.
    """

    def __init__(self, keys: Tensor, values: Tensor, first: int = 0) -> None:
        self.keys = keys
        self.values = values
        self.length = keys.shape[2]
        self.first = first
        self.side: dict[str, Tensor] = {}

    @classmethod
    def empty_like(cls, keys: Tensor, values: Tensor, first: int = 0) -> Window:
        """Return a window without tokens and without memory, for pairs shaped like these."""
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

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Write new tokens `[B, H, n, D]` after the filled part."""
        new = keys.shape[2]
        if self.capacity == 0 and owns_storage(keys) and owns_storage(values):
            # A prefill hands its tensors over instead of being copied; the next growth makes them contiguous.
            self.keys, self.values, self.length = keys, values, new
        else:
            end = self.length + new
            if end > self.capacity:
                self._grow(end if self.length == 0 else max(end, self.length + max(GROWTH, self.length // 64)))
            self.keys[:, :, self.length : end] = keys
            self.values[:, :, self.length : end] = values
            self.length = end
        for name, array in self.side.items():
            grown = array.new_zeros(*array.shape[:2], self.length)
            grown[..., : array.shape[-1]] = array
            self.side[name] = grown

    def _grow(self, capacity: int) -> None:
        for name in ("keys", "values"):
            old = getattr(self, name)
            new = _empty(old, capacity)
            new[:, :, : self.length] = old[:, :, : self.length]
            setattr(self, name, new)

    def clear(self, first: int) -> None:
        """Forget all tokens; the next one is column `first`. Buffers are released: sealed pairs may be views of them."""
        self.keys, self.values = _empty(self.keys, 0), _empty(self.values, 0)
        self.length, self.first = 0, first
        self.side = {name: array[..., :0] for name, array in self.side.items()}

    def crop(self, tokens: int) -> None:
        """Forget the newest `tokens` tokens."""
        self.length -= tokens
        self.side = {name: array[..., : self.length] for name, array in self.side.items()}

    def attend(self, queries: Tensor, logits: Logits, new: int, real: Tensor | None) -> Partial:
        """Attend from the `new` newest tokens' `queries [N, G * new, D]`; `real [B, length]` marks tokens, None all."""
        pads = None if real is None else left_padding(real)
        if (real is None or pads is not None) and kernels.serves(queries, self.keys):
            return self._attend_flat(queries, logits, new, pads)
        visible = self.visible(queries.shape[1], new, real)
        return attend(queries, self.filled_keys.flatten(0, 1), self.filled_values.flatten(0, 1), logits, visible)

    def _attend_flat(self, queries: Tensor, logits: Logits, new: int, pads: Tensor | None) -> Partial:
        """Read the preallocated block as flat rows: stream `n` starts at `n * capacity`, after its padding."""
        starts, lengths = self.streams(pads)
        keys, values = self.keys.flatten(0, 2), self.values.flatten(0, 2)
        causal = new if new > 1 else 0
        return kernels.dense_decode(
            queries, keys, values, starts, lengths, logits.scale, softcap=logits.softcap, causal=causal
        )

    def streams(self, pads: Tensor | None) -> tuple[Tensor, Tensor]:
        """First row and number of rows of every stream in the block as flat rows; `pads [B]` counts left padding."""
        batch, heads = self.keys.shape[:2]
        starts = torch.arange(batch * heads, device=self.keys.device) * self.capacity
        lengths = torch.full_like(starts, self.length)
        if pads is None:
            return starts, lengths
        pads = pads.to(starts.device).repeat_interleave(heads)
        return starts + pads, lengths - pads

    def visible(self, rows: int, new: int, real: Tensor | None) -> Tensor | None:
        """Which tokens each of the `rows = G * new` query rows sees: broadcasts to `[N, M, length]`, None for all."""
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
        """Keep the given batch rows, in that order; repeats are allowed."""
        rows = rows.to(self.keys.device)
        self.keys, self.values = self.keys.index_select(0, rows), self.values.index_select(0, rows)
        self.side = {name: array.index_select(0, rows.to(array.device)) for name, array in self.side.items()}

    def to(self, device: torch.device | str) -> None:
        """Move everything to a device, in place."""
        self.keys, self.values = self.keys.to(device), self.values.to(device)
        self.side = {name: array.to(device) for name, array in self.side.items()}


def _empty(like: Tensor, capacity: int) -> Tensor:
    batch, heads, _, dim = like.shape
    return like.new_empty(batch, heads, capacity, dim)


def left_padding(real: Tensor) -> Tensor | None:
    """Padding tokens `[B]` in front of each row of a mask `[B, n]`; None if there are holes elsewhere."""
    pads = (~real).sum(dim=1)
    contiguous = torch.arange(real.shape[1], device=real.device) >= pads[:, None]
    return pads if torch.equal(contiguous, real) else None


def owns_storage(tensor: Tensor) -> bool:
    """Whether a tensor is all of its storage, so that keeping it keeps nothing else alive."""
    return tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
