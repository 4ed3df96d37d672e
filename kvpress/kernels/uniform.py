"""Decode attention straight on uniformly quantised keys and values; the cache is never dequantised.

Streams, queries and results are those of `kvpress.kernels.dense`; codes, scales and groups are laid out as in
`kvpress.kernels.packed`. Scales are folded into queries and probabilities, so errors come from rounding those to 16 bits
and stay below 1e-3 of the largest output. Corrections, `kvpress.kernels.correction`, are added to the decoded rows without
that rounding; where they cancel most of the codes, the bound refers to the output of the codes alone. Columns and rotations,
`kvpress.kernels.transform`, apply to corrected rows.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from kvpress.kernels import checks, transform
from kvpress.kernels import reference as plain
from kvpress.kernels.correction import Correction
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.packed import BITS, Packed, check_groups, check_side, dequantise
from kvpress.kernels.sinks import with_sinks
from kvpress.kernels.triton import device


def uniform_decode(
    q: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    key_bits: int,
    value_bits: int,
    key_group: tuple[int, int],
    value_group: tuple[int, int],
    softcap: float | None = None,
    bias: Tensor | None = None,
    row_group: Tensor | None = None,
    causal: int = 0,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
    key_column: Tensor | None = None,
    value_column: Tensor | None = None,
    key_rotation: Tensor | None = None,
    value_rotation: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the quantised rows ``starts[n] .. starts[n] + lengths[n]``.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        key_codes: uint8 [R, D * key_bits / 8].
        key_scale: float16 or float32 [ceil(R / gr), D / gc] with ``key_group = (gr, gc)``.
        key_zero: as key_scale.
        value_codes: uint8 [R, Dv * value_bits / 8].
        value_scale: as key_scale, for ``value_group``.
        value_zero: as value_scale.
        starts: first row of each stream, int64 [N].
        lengths: number of rows of each stream, int64 [N].
        scale: factor of the logits.
        key_bits: bits per key code: 1, 2, 3, 4 or 8.
        value_bits: bits per value code.
        key_group: rows and channels that share a key scale.
        value_group: rows and channels that share a value scale.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        bias: added to the logit of each row, float32 [R].
        row_group: group of each row where it is not ``r // gr``, int32 [R].
        causal: number of new query tokens, as in `dense_decode`.
        key_correction: terms added to the decoded keys.
        value_correction: terms added to the decoded values.
        key_column: factor of each channel of a stream's corrected keys, float32 [N, D].
        value_column: factor of each channel of a stream's corrected values, float32 [N, Dv].
        key_rotation: what keys were multiplied by before they were stored, float32 [D, D].
        value_rotation: the same for values, float32 [Dv, Dv].
        sinks: logits without a value that take part in the softmax, float32 [N, M].

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    keys = Packed(key_codes, key_scale, key_zero, key_bits, key_group)
    values = Packed(value_codes, value_scale, value_zero, value_bits, value_group)
    check(q, keys, values, softcap, causal, bias, row_group, key_correction, value_correction)
    checks.streams(starts, lengths, q)
    sides = (*_flat(keys), *_flat(values))
    terms = (_terms(key_correction), _terms(value_correction))
    transform.check("key", q, q.shape[2], key_column, key_rotation)
    transform.check("value", q, values.scale.shape[1] * value_group[1], value_column, value_rotation)
    q = transform.to_stored(q, key_column, key_rotation)
    out, lse = _uniform_decode(q, *sides, starts, lengths, scale, softcap, causal, bias, row_group, *terms)
    return with_sinks(transform.from_stored(out, value_column, value_rotation), lse, sinks)


def uniform_select(
    q: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    rows: Tensor,
    counts: Tensor,
    scale: float,
    *,
    key_bits: int,
    value_bits: int,
    key_group: tuple[int, int],
    value_group: tuple[int, int],
    softcap: float | None = None,
    bias: Tensor | None = None,
    row_group: Tensor | None = None,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
    key_column: Tensor | None = None,
    value_column: Tensor | None = None,
    key_rotation: Tensor | None = None,
    value_rotation: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to listed quantised rows only; the other arguments are those of `uniform_decode`.

    Args:
        q: queries [N, M, D].
        key_codes: uint8 [R, D * key_bits / 8].
        key_scale: float16 or float32.
        key_zero: as key_scale.
        value_codes: uint8 [R, Dv * value_bits / 8].
        value_scale: float16 or float32.
        value_zero: as value_scale.
        rows: row numbers, int32 or int64 [N, K]; entries past ``counts[n]`` are not read.
        counts: how many row numbers of each stream are valid, int64 [N].
        scale: factor of the logits.
        key_bits: bits per key code.
        value_bits: bits per value code.
        key_group: rows and channels that share a key scale.
        value_group: rows and channels that share a value scale.
        softcap: bound of the logits.
        bias: float32 [R].
        row_group: int32 [R].
        key_correction: terms added to the decoded keys.
        value_correction: terms added to the decoded values.
        key_column: float32 [N, D].
        value_column: float32 [N, Dv].
        key_rotation: float32 [D, D].
        value_rotation: float32 [Dv, Dv].
        sinks: float32 [N, M].

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    keys = Packed(key_codes, key_scale, key_zero, key_bits, key_group)
    values = Packed(value_codes, value_scale, value_zero, value_bits, value_group)
    check(q, keys, values, softcap, 0, bias, row_group, key_correction, value_correction)
    checks.selection(rows, counts, q)
    sides = (*_flat(keys), *_flat(values))
    terms = (_terms(key_correction), _terms(value_correction))
    transform.check("key", q, q.shape[2], key_column, key_rotation)
    transform.check("value", q, values.scale.shape[1] * value_group[1], value_column, value_rotation)
    q = transform.to_stored(q, key_column, key_rotation)
    out, lse = _uniform_select(q, *sides, rows, counts, scale, softcap, bias, row_group, *terms)
    return with_sinks(transform.from_stored(out, value_column, value_rotation), lse, sinks)


def reference(
    q: Tensor,
    keys: Packed,
    values: Packed,
    rows: list[Tensor],
    scale: float,
    softcap: float | None = None,
    causal: int = 0,
    bias: Tensor | None = None,
    row_group: Tensor | None = None,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
) -> tuple[Tensor, Tensor]:
    """Ground truth in float32: attention over the dequantised and corrected rows, one block at a time."""

    def reader(side: Packed, correction: Correction | None) -> Callable[[Tensor], Tensor]:
        def read(listed: Tensor) -> Tensor:
            decoded = dequantise(side, listed, row_group)
            return decoded if correction is None else decoded + correction.dense(listed, decoded.shape[1])

        return read

    return plain.attend(
        q, rows, reader(keys, key_correction), reader(values, value_correction), scale, softcap, causal, bias
    )


@torch.library.custom_op("kvpress::uniform_decode", mutates_args=())
def _uniform_decode(
    q: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    key_bits: int,
    key_group: list[int],
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    value_bits: int,
    value_group: list[int],
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
    row_group: Tensor | None,
    key_terms: list[Tensor | None],
    value_terms: list[Tensor | None],
) -> tuple[Tensor, Tensor]:
    keys = Packed(key_codes, key_scale, key_zero, key_bits, (key_group[0], key_group[1]))
    values = Packed(value_codes, value_scale, value_zero, value_bits, (value_group[0], value_group[1]))
    key_correction, value_correction = _correction(key_terms), _correction(value_terms)
    if launch.available(key_codes):
        count("uniform_decode")
        return launch.attend(
            q,
            keys,
            values,
            lengths,
            scale,
            starts=starts,
            softcap=softcap,
            causal=causal,
            bias=bias,
            row_group=row_group,
            key_correction=key_correction,
            value_correction=value_correction,
        )
    if device.available(key_codes):
        from kvpress.kernels.triton import uniform as gpu

        count("uniform_decode")
        return gpu.uniform_decode(
            q,
            keys,
            values,
            starts,
            lengths,
            scale,
            softcap=softcap,
            bias=bias,
            row_group=row_group,
            causal=causal,
            key_correction=key_correction,
            value_correction=value_correction,
        )
    checks.in_range(starts, lengths, key_codes.shape[0])
    rows = plain.ranges(starts, lengths)
    _check_stored(rows, keys, values, row_group, key_correction, value_correction)
    return reference(q, keys, values, rows, scale, softcap, causal, bias, row_group, key_correction, value_correction)


@torch.library.custom_op("kvpress::uniform_select", mutates_args=())
def _uniform_select(
    q: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    key_bits: int,
    key_group: list[int],
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    value_bits: int,
    value_group: list[int],
    rows: Tensor,
    counts: Tensor,
    scale: float,
    softcap: float | None,
    bias: Tensor | None,
    row_group: Tensor | None,
    key_terms: list[Tensor | None],
    value_terms: list[Tensor | None],
) -> tuple[Tensor, Tensor]:
    keys = Packed(key_codes, key_scale, key_zero, key_bits, (key_group[0], key_group[1]))
    values = Packed(value_codes, value_scale, value_zero, value_bits, (value_group[0], value_group[1]))
    key_correction, value_correction = _correction(key_terms), _correction(value_terms)
    if launch.available(key_codes):
        count("uniform_select")
        return launch.attend(
            q,
            keys,
            values,
            counts,
            scale,
            rows=rows,
            softcap=softcap,
            bias=bias,
            row_group=row_group,
            key_correction=key_correction,
            value_correction=value_correction,
        )
    if device.available(key_codes):
        from kvpress.kernels.triton import uniform as gpu

        count("uniform_select")
        return gpu.uniform_select(
            q,
            keys,
            values,
            rows,
            counts,
            scale,
            softcap=softcap,
            bias=bias,
            row_group=row_group,
            key_correction=key_correction,
            value_correction=value_correction,
        )
    checks.listed_in_range(rows, counts, key_codes.shape[0])
    listed = plain.listed(rows, counts)
    _check_stored(listed, keys, values, row_group, key_correction, value_correction)
    return reference(q, keys, values, listed, scale, softcap, 0, bias, row_group, key_correction, value_correction)


def _fake(
    q: Tensor,
    key_codes: Tensor,
    key_scale: Tensor,
    key_zero: Tensor,
    key_bits: int,
    key_group: list[int],
    value_codes: Tensor,
    value_scale: Tensor,
    value_zero: Tensor,
    value_bits: int,
    value_group: list[int],
    *_: object,
) -> tuple[Tensor, Tensor]:
    streams, queries = q.shape[:2]
    out = q.new_empty(streams, queries, value_scale.shape[1] * value_group[1], dtype=torch.float32)
    return out, q.new_empty(streams, queries, dtype=torch.float32)


_uniform_decode.register_fake(_fake)
_uniform_select.register_fake(_fake)


def _flat(side: Packed) -> tuple[Tensor, Tensor, Tensor, int, list[int]]:
    return side.codes, side.scale, side.zero, side.bits, list(side.group)


def _terms(correction: Correction | None) -> list[Tensor | None]:
    return [] if correction is None else correction.tensors()


def _correction(terms: list[Tensor | None]) -> Correction | None:
    return Correction(*terms) if terms else None


def _check_stored(
    rows: list[Tensor],
    keys: Packed,
    values: Packed,
    row_group: Tensor | None,
    key_correction: Correction | None,
    value_correction: Correction | None,
) -> None:
    check_groups(rows, row_group, keys, values)
    for name, side, correction in (("key", keys, key_correction), ("value", values, value_correction)):
        if correction is not None:
            correction.check_stored(name, rows, side.scale.shape[1] * side.group[1])


def check(
    q: Tensor,
    keys: Packed,
    values: Packed,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
    row_group: Tensor | None,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
) -> None:
    """Refuse queries and quantised rows that do not belong together."""
    rows = keys.codes.shape[0]
    checks.options(q, rows, softcap, causal, bias)
    check_side("key", keys, rows, q.shape[2], row_group)
    channels = values.codes.shape[-1] * 8 // values.bits if values.bits in BITS else 0
    check_side("value", values, rows, channels, row_group)
    if row_group is not None:
        checks.shape("row_group", row_group, (rows,), torch.int32)
    for name, correction, width in (("key", key_correction, q.shape[2]), ("value", value_correction, channels)):
        if correction is not None:
            correction.check(name, rows, width)
            checks.same_device(q, *correction.tensors())
    tensors = (keys.codes, keys.scale, keys.zero, values.codes, values.scale, values.zero)
    checks.same_device(q, *tensors, bias, row_group)
