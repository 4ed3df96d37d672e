"""Rows of codes that name centroids of a few neighbouring channels (CQ, scalar codebooks), and their decoding in plain torch.

With c coupled channels and E entries per book, codes of b bits packed as in `kvpress.kernels.packed`:

    codes uint8 [R, D / c * b / 8]      book [books, D / c, E, c] float16 or float32, E <= 2 ** b

    row[r, g * c + j] = book[book of the stream, g, unpack(codes[r])[g], j]

A code past the end of its book names the last entry.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.packed import CODE_BITS, row_step, unpack

STEP = 64
"""Positions that share a row of the coarse angles; lookup_problem.h and the Triton kernel know it too."""


@dataclass(frozen=True)
class Coded:
    """One side of a coded cache: packed codes uint8 [R, groups * bits / 8] and their books [books, groups, E, c]."""

    codes: Tensor
    book: Tensor
    bits: int

    @property
    def channels(self) -> int:
        """Channels of a decoded row."""
        return self.book.shape[1] * self.book.shape[3]

    def rows(self, book: int, rows: Tensor) -> Tensor:
        """Float32 channels [S, D] of the given rows [S], read with one of the books."""
        codes = unpack(self.codes[rows], self.bits).long().clamp_max(self.book.shape[2] - 1)
        groups = torch.arange(self.book.shape[1], device=codes.device)
        return self.book[book, groups, codes].float().flatten(1)


def per_pair(angles: Tensor) -> Tensor:
    """Cosines or sines `[..., rotary / 2]` by pair of channels; most models give those of both channels, `[..., rotary]`."""
    half = angles.shape[-1] // 2
    return angles[..., :half] if torch.equal(angles[..., :half], angles[..., half:]) else angles


def turn_halves(keys: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate channels i and i + rotary / 2 of keys [S, D] as pairs by angles [S, rotary / 2]; the other channels stay."""
    half = cos.shape[-1]
    low, high, rest = keys[:, :half], keys[:, half : 2 * half], keys[:, 2 * half :]
    return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of keys that are stored without it: row r of stream n stands at ``positions[r] + shift[n]``.

    A rotation by a position is one by the whole blocks of `STEP` positions before it and one by the rest; as complex
    numbers, with a cosine and a sine for each pair of channels,

        e(p) = coarse[p // STEP] * fine[p % STEP]

    `coarse` float32 [P / STEP, 2, rotary / 2] and `fine` float32 [STEP, 2, rotary / 2] hold cosines, then sines. `shift` is
    int64 [N]; `positions` are int32 [R], or None for the row numbers themselves.
    """

    coarse: Tensor
    fine: Tensor
    shift: Tensor
    positions: Tensor | None = None

    def at(self, stream: int | Tensor, rows: Tensor) -> Tensor:
        """Positions of rows [S] of one stream, or of a stream for each row, int64 [S]."""
        return (rows if self.positions is None else self.positions[rows]).long() + self.shift[stream]

    def angles(self, at: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines at positions [S], float32 [S, rotary / 2] each."""
        (a, b), (c, d) = self.coarse[at // STEP].unbind(1), self.fine[at % STEP].unbind(1)
        return a * c - b * d, a * d + b * c

    def turn(self, keys: Tensor, at: Tensor) -> Tensor:
        """Rotate keys [S, D] that stand at positions [S]."""
        return turn_halves(keys, *self.angles(at))

    def check_positions(self, rows: list[Tensor]) -> None:
        """Refuse streams with a row whose angles are not in the tables."""
        limit = STEP * self.coarse.shape[0]
        for n, listed in enumerate(rows):
            at = self.at(n, listed)
            if len(at) and not 0 <= int(at.min()) <= int(at.max()) < limit:
                raise ValueError(f"stream {n} has positions outside the {limit} of the angles")


def rotary_of(
    coarse: Tensor | None, fine: Tensor | None, shift: Tensor | None, positions: Tensor | None
) -> Rotary | None:
    """The angles together, or None where none of them is given."""
    if coarse is None and fine is None and shift is None and positions is None:
        return None
    if coarse is None or fine is None or shift is None:
        raise ValueError("coarse, fine and shift must be given together, and positions only with them")
    return Rotary(coarse, fine, shift, positions)


def check(
    q: Tensor,
    keys: Coded,
    values: Coded,
    book_of_stream: Tensor,
    rotary: Rotary | None,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
) -> None:
    """Refuse queries, codes, books and angles that do not belong together."""
    rows = keys.codes.shape[0]
    checks.options(q, rows, softcap, causal, bias)
    _check_side("key", keys, rows)
    _check_side("value", values, rows)
    if keys.channels != q.shape[2]:
        raise ValueError(f"key_book must hold {q.shape[2]} channels like q, got {list(keys.book.shape)}")
    if values.book.shape[0] != keys.book.shape[0]:
        raise ValueError(f"value_book must hold {keys.book.shape[0]} books like key_book, got {values.book.shape[0]}")
    checks.shape("book_of_stream", book_of_stream, (q.shape[0],), torch.int64)
    checks.same_device(q, keys.codes, keys.book, values.codes, values.book, book_of_stream, bias)
    if rotary is not None:
        _check_rotary(q, rows, rotary)


def _check_side(name: str, side: Coded, rows: int) -> None:
    codes, book, bits = side.codes, side.book, side.bits
    if bits not in CODE_BITS:
        raise ValueError(f"{name}_bits must be one of {CODE_BITS}, got {bits}")
    checks.shape(f"{name}_book", book, ("books", "groups", "E", "c"), torch.float16, torch.float32)
    _, groups, entries, coupled = book.shape
    if groups * coupled < 1:
        raise ValueError(f"{name}_book must hold at least one channel, got {list(book.shape)}")
    if groups % row_step(bits):
        raise ValueError(f"{name}_book must hold a multiple of {row_step(bits)} groups for {bits} bits, got {groups}")
    if not 1 <= entries <= 2**bits:
        raise ValueError(f"{name}_book must have 1 to {2**bits} entries for {bits} bits, got {entries}")
    if not book.is_contiguous():
        raise ValueError(f"{name}_book must be contiguous, got strides {book.stride()}")
    checks.shape(f"{name}_codes", codes, (rows, groups * bits // 8), torch.uint8)
    checks.rows_layout(f"{name}_codes", codes)


def _check_rotary(q: Tensor, rows: int, rotary: Rotary) -> None:
    checks.shape("fine", rotary.fine, (STEP, 2, "rotary / 2"), torch.float32)
    half = rotary.fine.shape[2]
    if 2 * half > q.shape[2]:
        raise ValueError(f"fine must turn at most the {q.shape[2]} channels of q, got {2 * half}")
    checks.shape("coarse", rotary.coarse, ("P / STEP", 2, half), torch.float32)
    checks.shape("shift", rotary.shift, (q.shape[0],), torch.int64)
    if rotary.positions is not None:
        checks.shape("positions", rotary.positions, (rows,), torch.int32)
    for name, tensor in vars(rotary).items():
        if tensor is not None and not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    checks.same_device(q, *vars(rotary).values())
