"""Decode attention on coupled codes: each code names a centroid for a few neighbouring channels (CQ, scalar codebooks).

Streams, queries and results are those of `kvpress.kernels.dense`; codes and books are laid out as in `kvpress.kernels.coded`.
Keys coded before their rotary embedding come with its angles and are rotated as they are read; rotate-half layout, the
leading channels only where the rotary embedding is partial. Tables and sums are float32: the error is that of summing in
another order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels import reference as plain
from kvpress.kernels.coded import Coded, Rotary, check, rotary_of
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.sinks import with_sinks
from kvpress.kernels.triton import device


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
    key_bits: int = 8,
    value_bits: int = 8,
    book_of_stream: Tensor | None = None,
    coarse: Tensor | None = None,
    fine: Tensor | None = None,
    shift: Tensor | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the coded rows ``starts[n] .. starts[n] + lengths[n]``.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16. After rotation, whether or not the keys are.
        key_codes: packed codes, uint8 [R, D / c * key_bits / 8].
        key_book: centroids [books, D / c, E, c], float16 or float32, with ``E <= 2 ** key_bits``.
        value_codes: uint8 [R, Dv / c' * value_bits / 8], with a coupling c' of its own.
        value_book: centroids [books, Dv / c', E', c'].
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        scale: factor of the logits.
        key_bits: bits per key code: 1, 2, 3, 4, 8, 9, 10 or 12.
        value_bits: bits per value code.
        book_of_stream: book of each stream, int64 [N]; by default ``n % books``, one per key-value head.
        coarse: angles of every `STEP`-th position, float32 [P / STEP, 2, rotary / 2], given where keys are rotated as they
            are read; see `kvpress.kernels.coded.Rotary`.
        fine: angles of the positions in between, float32 [STEP, 2, rotary / 2], given with coarse.
        shift: position minus row number of each stream, int64 [N], given with coarse.
        positions: what stands for the row number there, int32 [R], where rows are not one position apart.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        bias: added to the logit of each row, float32 [R].
        causal: number of new query tokens, as in `dense_decode`.
        sinks: logits without a value that take part in the softmax, float32 [N, M].

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    keys, values = Coded(key_codes, key_book, key_bits), Coded(value_codes, value_book, value_bits)
    rotary = rotary_of(coarse, fine, shift, positions)
    books = _books(q, keys, book_of_stream)
    check(q, keys, values, books, rotary, softcap, causal, bias)
    checks.streams(starts, lengths, q)
    sides = (*_flat(keys), *_flat(values))
    angles = (coarse, fine, shift, positions)
    out, lse = _lookup_decode(q, *sides, starts, lengths, books, scale, *angles, softcap, bias, causal)
    return with_sinks(out, lse, sinks)


def lookup_select(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    value_codes: Tensor,
    value_book: Tensor,
    rows: Tensor,
    counts: Tensor,
    scale: float,
    *,
    key_bits: int = 8,
    value_bits: int = 8,
    book_of_stream: Tensor | None = None,
    coarse: Tensor | None = None,
    fine: Tensor | None = None,
    shift: Tensor | None = None,
    positions: Tensor | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to listed coded rows only; the other arguments are those of `lookup_decode`.

    Args:
        q: queries [N, M, D].
        key_codes: uint8 [R, D / c * key_bits / 8].
        key_book: centroids [books, D / c, E, c].
        value_codes: uint8 [R, Dv / c' * value_bits / 8].
        value_book: centroids [books, Dv / c', E', c'].
        rows: row numbers, int32 or int64 [N, K]; entries past ``counts[n]`` are not read.
        counts: how many row numbers of each stream are valid, int64 [N].
        scale: factor of the logits.
        key_bits: bits per key code.
        value_bits: bits per value code.
        book_of_stream: int64 [N].
        coarse: float32 [P / STEP, 2, rotary / 2].
        fine: float32 [STEP, 2, rotary / 2].
        shift: int64 [N].
        positions: int32 [R].
        softcap: bound of the logits.
        bias: float32 [R].
        sinks: float32 [N, M].

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    keys, values = Coded(key_codes, key_book, key_bits), Coded(value_codes, value_book, value_bits)
    rotary = rotary_of(coarse, fine, shift, positions)
    books = _books(q, keys, book_of_stream)
    check(q, keys, values, books, rotary, softcap, 0, bias)
    checks.selection(rows, counts, q)
    sides = (*_flat(keys), *_flat(values))
    angles = (coarse, fine, shift, positions)
    out, lse = _lookup_select(q, *sides, rows, counts, books, scale, *angles, softcap, bias)
    return with_sinks(out, lse, sinks)


def reference(
    q: Tensor,
    keys: Coded,
    values: Coded,
    rows: list[Tensor],
    books: list[int],
    scale: float,
    rotary: Rotary | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
) -> tuple[Tensor, Tensor]:
    """Ground truth in float32: stream n attends to the decoded ``rows[n]``."""
    out = torch.zeros(*q.shape[:2], values.channels, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    for n, book in enumerate(books):

        def read_keys(r: Tensor, n: int = n, book: int = book) -> Tensor:
            stored = keys.rows(book, r)
            return stored if rotary is None else rotary.turn(stored, rotary.at(n, r))

        def read_values(r: Tensor, book: int = book) -> Tensor:
            return values.rows(book, r)

        one = plain.attend(q[n : n + 1], rows[n : n + 1], read_keys, read_values, scale, softcap, causal, bias)
        out[n], lse[n] = one[0][0], one[1][0]
    return out, lse


@torch.library.custom_op("kvpress::lookup_decode", mutates_args=())
def _lookup_decode(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    key_bits: int,
    value_codes: Tensor,
    value_book: Tensor,
    value_bits: int,
    starts: Tensor,
    lengths: Tensor,
    book_of_stream: Tensor,
    scale: float,
    coarse: Tensor | None,
    fine: Tensor | None,
    shift: Tensor | None,
    positions: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
    causal: int,
) -> tuple[Tensor, Tensor]:
    keys, values = Coded(key_codes, key_book, key_bits), Coded(value_codes, value_book, value_bits)
    rotary = rotary_of(coarse, fine, shift, positions)
    if launch.available(key_codes):
        count("lookup_decode")
        return _launch(
            q,
            keys,
            values,
            lengths,
            book_of_stream,
            scale,
            starts=starts,
            rotary=rotary,
            softcap=softcap,
            bias=bias,
            causal=causal,
        )
    if device.available(key_codes):
        from kvpress.kernels.triton import lookup as gpu

        count("lookup_decode")
        sides = (key_codes, key_book, value_codes, value_book)
        return gpu.lookup_decode(
            q,
            *sides,
            starts,
            lengths,
            scale,
            key_bits=key_bits,
            value_bits=value_bits,
            book_of_stream=book_of_stream,
            coarse=coarse,
            fine=fine,
            shift=shift,
            positions=positions,
            softcap=softcap,
            bias=bias,
            causal=causal,
        )
    checks.in_range(starts, lengths, key_codes.shape[0])
    rows = plain.ranges(starts, lengths)
    return reference(
        q, keys, values, rows, _checked(book_of_stream, keys, rotary, rows), scale, rotary, softcap, bias, causal
    )


@torch.library.custom_op("kvpress::lookup_select", mutates_args=())
def _lookup_select(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    key_bits: int,
    value_codes: Tensor,
    value_book: Tensor,
    value_bits: int,
    rows: Tensor,
    counts: Tensor,
    book_of_stream: Tensor,
    scale: float,
    coarse: Tensor | None,
    fine: Tensor | None,
    shift: Tensor | None,
    positions: Tensor | None,
    softcap: float | None,
    bias: Tensor | None,
) -> tuple[Tensor, Tensor]:
    keys, values = Coded(key_codes, key_book, key_bits), Coded(value_codes, value_book, value_bits)
    rotary = rotary_of(coarse, fine, shift, positions)
    if launch.available(key_codes):
        count("lookup_select")
        return _launch(
            q, keys, values, counts, book_of_stream, scale, rows=rows, rotary=rotary, softcap=softcap, bias=bias
        )
    if device.available(key_codes):
        from kvpress.kernels.triton import lookup as gpu

        count("lookup_select")
        sides = (key_codes, key_book, value_codes, value_book)
        return gpu.lookup_select(
            q,
            *sides,
            rows,
            counts,
            scale,
            key_bits=key_bits,
            value_bits=value_bits,
            book_of_stream=book_of_stream,
            coarse=coarse,
            fine=fine,
            shift=shift,
            positions=positions,
            softcap=softcap,
            bias=bias,
        )
    checks.listed_in_range(rows, counts, key_codes.shape[0])
    listed = plain.listed(rows, counts)
    return reference(
        q, keys, values, listed, _checked(book_of_stream, keys, rotary, listed), scale, rotary, softcap, bias
    )


def _fake(
    q: Tensor,
    key_codes: Tensor,
    key_book: Tensor,
    key_bits: int,
    value_codes: Tensor,
    value_book: Tensor,
    *_: object,
) -> tuple[Tensor, Tensor]:
    streams, queries = q.shape[:2]
    out = q.new_empty(streams, queries, value_book.shape[1] * value_book.shape[3], dtype=torch.float32)
    return out, q.new_empty(streams, queries, dtype=torch.float32)


_lookup_decode.register_fake(_fake)
_lookup_select.register_fake(_fake)


def _launch(
    q: Tensor,
    keys: Coded,
    values: Coded,
    lengths: Tensor,
    book_of_stream: Tensor,
    scale: float,
    *,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    rotary: Rotary | None = None,
    softcap: float | None = None,
    bias: Tensor | None = None,
    causal: int = 0,
    level_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the C++ kernel; exactly one of starts and rows is given."""
    streams, queries = q.shape[:2]
    out = torch.empty(streams, queries, values.channels, dtype=torch.float32)
    lse = torch.empty(streams, queries, dtype=torch.float32)
    angles = (None,) * 4 if rotary is None else (rotary.positions, rotary.shift, rotary.coarse, rotary.fine)
    stream = launch.run(
        "lookup.cpp",
        "kvpress_lookup",
        q.to(torch.float32).contiguous(),
        None if starts is None else starts.contiguous(),
        None if rows is None else rows.to(torch.int32).contiguous(),
        lengths.contiguous(),
        book_of_stream.contiguous(),
        *angles,
        None if bias is None else bias.contiguous(),
        out,
        lse,
        keys.codes.shape[0],
        streams,
        queries,
        0 if rows is None else rows.shape[1],
        keys.book.shape[0],
        0 if rotary is None else rotary.coarse.shape[0],
        0 if rotary is None else 2 * rotary.fine.shape[2],
        causal,
        torch.get_num_threads(),
        float(scale),
        float(softcap or 0),
        *_describe(keys),
        *_describe(values),
        level_name=level_name,
    )
    if stream >= 0:
        raise ValueError(f"stream {stream} refers to rows, books or positions that are not stored")
    return out, lse


def _describe(side: Coded) -> tuple[Tensor | int, ...]:
    """The fields of ``Coded`` in lookup_problem.h."""
    _, groups, entries, coupled = side.book.shape
    half = int(side.book.dtype == torch.float16)
    return side.codes, side.book, side.codes.stride(0), side.bits, half, groups, entries, coupled


def _flat(side: Coded) -> tuple[Tensor, Tensor, int]:
    return side.codes, side.book, side.bits


def _books(q: Tensor, keys: Coded, book_of_stream: Tensor | None) -> Tensor:
    """The book of each stream; by default the key-value heads take turns."""
    if book_of_stream is not None:
        return book_of_stream
    return torch.arange(q.shape[0], device=q.device) % max(1, keys.book.shape[0])


def _checked(book_of_stream: Tensor, keys: Coded, rotary: Rotary | None, rows: list[Tensor]) -> list[int]:
    """The book of each stream, once books and positions are known to be stored."""
    books: list[int] = book_of_stream.tolist()
    for n, book in enumerate(books):
        if not 0 <= book < keys.book.shape[0]:
            raise ValueError(f"stream {n} must name one of {keys.book.shape[0]} books, got {book}")
    if rotary is not None:
        rotary.check_positions(rows)
    return books
