"""Decode attention on coupled codes: each code names a centroid for a few neighbouring channels (CQ, scalar codebooks).

Streams, queries and results are those of `kvpress.kernels.dense`. With c coupled channels and E entries per book:

    codes [R, D / c] uint8 (E <= 256) or int16      book [books, D / c, E, c] float16 or float32

    key[r, g * c + j] = key_book[book_of_stream[n], g, key_codes[r, g], j],   values alike

Keys coded before their rotary embedding are given `positions` and are rotated as they are read; rotate-half layout, the
leading channels only where the rotary embedding is partial. Tables and sums are float32: the error is that of summing in
another order.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels import reference as plain
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.triton import device


@dataclass(frozen=True)
class Rotary:
    """Rotary embedding of keys that are stored without it: `cos`, `sin` float32 [P, rotary / 2], `positions` int32 [R]."""

    positions: Tensor
    cos: Tensor
    sin: Tensor

    def turn(self, keys: Tensor, rows: Tensor) -> Tensor:
        """Rotate keys [S, D] of the given rows [S]."""
        at = self.positions[rows].long()
        cos, sin = self.cos[at], self.sin[at]
        half = cos.shape[1]
        low, high, rest = keys[:, :half], keys[:, half : 2 * half], keys[:, 2 * half :]
        return torch.cat([low * cos - high * sin, high * cos + low * sin, rest], dim=-1)


def lookup_decode(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    book_of_stream: Tensor | None = None,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the coded rows ``starts[n] .. starts[n] + lengths[n]``.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16. After rotation, whether or not the keys are.
        key_codes: uint8 or int16 [R, D / c]; every code must be below E, which the kernel does not check.
        key_book: centroids [books, D / c, E, c], float16 or float32.
        value_codes: uint8 or int16 [R, Dv / c'], with a coupling of its own.
        value_book: centroids [books, Dv / c', E', c'].
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        scale: factor of the logits.
        book_of_stream: book of each stream, int64 [N]; by default ``n % books``, one per key-value head.
        positions: position of each row whose key is rotated when read, int32 [R]; None for keys stored as attended.
        cos: float32 [P, rotary / 2], given with positions.
        sin: as cos.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        bias: added to the logit of each row, float32 [R].
        causal: number of new query tokens, as in `dense_decode`.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    if book_of_stream is None:
        book_of_stream = torch.arange(q.shape[0], device=q.device) % max(1, key_book.shape[0])
    check(q, key_codes, key_book, value_codes, value_book, book_of_stream, softcap, causal, bias)
    checks.streams(starts, lengths, q)
    _check_rotary(q, key_codes.shape[0], positions, cos, sin)
    return _lookup_decode(
        q,
        key_codes,
        key_book,
        value_codes,
        value_book,
        starts,
        lengths,
        book_of_stream,
        scale,
        positions,
        cos,
        sin,
        softcap,
        bias,
        causal,
    )


def reference(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    rows: list[Tensor],
    books: list[int],
    scale: float,
    rotary: Rotary | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
) -> tuple[Tensor, Tensor]:
    """Ground truth in float32: stream n attends to the decoded ``rows[n]``."""
    out = torch.zeros(*q.shape[:2], value_book.shape[1] * value_book.shape[3], device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    for n, book in enumerate(books):

        def keys(r: Tensor, book: int = book) -> Tensor:
            stored = decode(key_codes, key_book[book], r)
            return stored if rotary is None else rotary.turn(stored, r)

        def values(r: Tensor, book: int = book) -> Tensor:
            return decode(value_codes, value_book[book], r)

        one = plain.attend(q[n : n + 1], rows[n : n + 1], keys, values, scale, softcap, causal, bias)
        out[n], lse[n] = one[0][0], one[1][0]
    return out, lse


def decode(codes: Tensor, book: Tensor, rows: Tensor) -> Tensor:
    """Float32 channels [S, groups * c] of the given rows [S] of codes [R, groups]; book [groups, E, c]."""
    groups = torch.arange(book.shape[0], device=codes.device)
    return book[groups, codes[rows].long()].float().flatten(1)


@torch.library.custom_op("kvpress::lookup_decode", mutates_args=())
def _lookup_decode(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    starts: Tensor,
    lengths: Tensor,
    book_of_stream: Tensor,
    scale: float,
    positions: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
    causal: int,
) -> tuple[Tensor, Tensor]:
    sides = (key_codes, key_book, value_codes, value_book)
    if launch.available(key_codes):
        count("lookup_decode")
        where = (starts, lengths, book_of_stream, scale)
        return _launch(q, *sides, *where, positions, cos, sin, softcap, bias, causal)
    if positions is None and device.available(key_codes):
        from kvpress.kernels.triton import lookup as gpu

        count("lookup_decode")
        return gpu.lookup_decode(
            q, *sides, starts, lengths, book_of_stream, scale, softcap=softcap, bias=bias, causal=causal
        )
    checks.in_range(starts, lengths, key_codes.shape[0])
    rotary = None
    rows = plain.ranges(starts, lengths)
    for n, (book, listed) in enumerate(zip(book_of_stream.tolist(), rows, strict=True)):
        if not 0 <= book < key_book.shape[0]:
            raise ValueError(f"stream {n} must name one of {key_book.shape[0]} books, got {book}")
        if positions is not None and cos is not None and sin is not None:
            rotary = Rotary(positions, cos, sin)
            at = positions[listed]
            if len(at) and not 0 <= int(at.min()) <= int(at.max()) < cos.shape[0]:
                raise ValueError(f"stream {n} has positions outside the {cos.shape[0]} rows of cos")
    return reference(q, *sides, rows, book_of_stream.tolist(), scale, rotary, softcap, bias, causal)


@_lookup_decode.register_fake
def _fake(
    q: Tensor, key_codes: Tensor, key_book: Tensor, value_codes: Tensor, value_book: Tensor, *_: object
) -> tuple[Tensor, Tensor]:
    streams, queries = q.shape[:2]
    out = q.new_empty(streams, queries, value_book.shape[1] * value_book.shape[3], dtype=torch.float32)
    return out, q.new_empty(streams, queries, dtype=torch.float32)


def _launch(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    starts: Tensor,
    lengths: Tensor,
    book_of_stream: Tensor,
    scale: float,
    positions: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
    level_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    streams, queries, channels = q.shape
    value_channels = value_book.shape[1] * value_book.shape[3]
    out = torch.empty(streams, queries, value_channels, dtype=torch.float32)
    lse = torch.empty(streams, queries, dtype=torch.float32)
    stream = launch.run(
        "lookup.cpp",
        "kvpress_lookup",
        q.to(torch.float32).contiguous(),
        starts.contiguous(),
        lengths.contiguous(),
        book_of_stream.contiguous(),
        positions,
        cos,
        sin,
        bias,
        out,
        lse,
        key_codes.shape[0],
        streams,
        queries,
        key_book.shape[0],
        0 if cos is None else cos.shape[0],
        0 if cos is None else 2 * cos.shape[1],
        causal,
        torch.get_num_threads(),
        float(scale),
        float(softcap or 0),
        *_describe(key_codes, key_book, channels),
        *_describe(value_codes, value_book, value_channels),
        level_name=level_name,
    )
    if stream >= 0:
        raise ValueError(f"stream {stream} refers to rows, books or positions that are not stored")
    return out, lse


def _describe(codes: Tensor, book: Tensor, channels: int) -> tuple[Tensor | int, ...]:
    """The fields of ``Coded`` in lookup.h."""
    wide, half = codes.dtype == torch.int16, book.dtype == torch.float16
    return codes, book, codes.stride(0), int(wide), int(half), channels, book.shape[2], book.shape[3]


def check(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    book_of_stream: Tensor,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
) -> None:
    """Refuse queries, codes and books that do not belong together."""
    rows = key_codes.shape[0]
    checks.options(q, rows, softcap, causal, bias)
    for name, codes, book in (("key", key_codes, key_book), ("value", value_codes, value_book)):
        checks.shape(f"{name}_book", book, ("books", "groups", "E", "c"), torch.float16, torch.float32)
        checks.shape(f"{name}_codes", codes, (rows, book.shape[1]), torch.uint8, torch.int16)
        checks.rows_layout(f"{name}_codes", codes)
        most = 256 if codes.dtype == torch.uint8 else 32768
        if not 1 <= book.shape[2] <= most:
            raise ValueError(f"{name}_book must have 1 to {most} entries for its codes, got {book.shape[2]}")
        if not book.is_contiguous():
            raise ValueError(f"{name}_book must be contiguous, got strides {book.stride()}")
    if key_book.shape[1] * key_book.shape[3] != q.shape[2]:
        raise ValueError(f"key_book must hold {q.shape[2]} channels like q, got {list(key_book.shape)}")
    if value_book.shape[0] != key_book.shape[0]:
        raise ValueError(f"value_book must hold {key_book.shape[0]} books like key_book, got {value_book.shape[0]}")
    checks.shape("book_of_stream", book_of_stream, (q.shape[0],), torch.int64)
    checks.same_device(q, key_codes, key_book, value_codes, value_book, book_of_stream, bias)


def _check_rotary(q: Tensor, rows: int, positions: Tensor | None, cos: Tensor | None, sin: Tensor | None) -> None:
    if positions is None and cos is None and sin is None:
        return
    if positions is None or cos is None or sin is None:
        raise ValueError("positions, cos and sin must be given together")
    checks.shape("positions", positions, (rows,), torch.int32)
    checks.shape("cos", cos, ("P", "rotary / 2"), torch.float32)
    checks.shape("sin", sin, tuple(cos.shape), torch.float32)
    if 2 * cos.shape[1] > q.shape[2]:
        raise ValueError(f"cos must turn at most the {q.shape[2]} channels of q, got {2 * cos.shape[1]}")
    for name, tensor in (("positions", positions), ("cos", cos), ("sin", sin)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {tensor.stride()}")
    checks.same_device(q, positions, cos, sin)
