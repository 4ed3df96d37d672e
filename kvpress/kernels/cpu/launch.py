"""Call the compiled kernels: fill in the C structures of ``problem.h`` from tensors."""

from __future__ import annotations

import ctypes
import functools
import logging
import struct

import torch
from torch import Tensor

from kvpress import env
from kvpress.kernels.correction import Correction
from kvpress.kernels.cpu import build
from kvpress.kernels.packed import Packed

logger = logging.getLogger("kvpress")

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Number of each dtype, the enumeration of ``problem.h``."""


class _Correction(ctypes.Structure):
    _fields_ = (
        ("factor", ctypes.c_void_p),
        ("basis", ctypes.c_void_p),
        ("chunk", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("channel", ctypes.c_void_p),
        ("delta", ctypes.c_void_p),
        ("factor_dtype", ctypes.c_int64),
        ("delta_dtype", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("bases", ctypes.c_int64),
        ("outliers", ctypes.c_int64),
    )


class _Rows(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("zero", ctypes.c_void_p),
        ("channels", ctypes.c_int64),
        ("stride", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("bits", ctypes.c_int64),
        ("group_rows", ctypes.c_int64),
        ("group_channels", ctypes.c_int64),
        ("groups", ctypes.c_int64),
        ("correction", _Correction),
    )


class _Problem(ctypes.Structure):
    _fields_ = (
        ("q", ctypes.c_void_p),
        ("starts", ctypes.c_void_p),
        ("lengths", ctypes.c_void_p),
        ("listed", ctypes.c_void_p),
        ("row_group", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("streams", ctypes.c_int64),
        ("queries", ctypes.c_int64),
        ("listed_stride", ctypes.c_int64),
        ("causal", ctypes.c_int64),
        ("bf16_queries", ctypes.c_int64),
        ("threads", ctypes.c_int64),
        ("scale", ctypes.c_double),
        ("softcap", ctypes.c_double),
        ("keys", _Rows),
        ("values", _Rows),
    )


@functools.cache
def level() -> str | None:
    """The fastest instruction-set level whose kernels compile and load here; None, with one warning, if there is none."""
    try:
        best = build.supported_levels()[-1]
        build.load(best)
    except build.BuildError as error:
        logger.warning("CPU kernels are not available, decoding falls back to plain torch: %s", error)
        return None
    return best


def available(tensor: Tensor) -> bool:
    """Whether the kernels can run on this tensor's device."""
    return tensor.device.type == "cpu" and env.cpu_kernels_enabled() and level() is not None


def attend(
    q: Tensor,
    keys: Tensor | Packed,
    values: Tensor | Packed,
    lengths: Tensor,
    scale: float,
    *,
    starts: Tensor | None = None,
    rows: Tensor | None = None,
    softcap: float | None = None,
    causal: int = 0,
    bias: Tensor | None = None,
    row_group: Tensor | None = None,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
    level_name: str | None = None,
) -> tuple[Tensor, Tensor]:
    """Run the kernel on validated arguments; see `kvpress.kernels.dense` and `kvpress.kernels.uniform`.

    Args:
        q: queries [N, M, D].
        keys: dense rows [R, D] or packed codes.
        values: dense rows [R, Dv] or packed codes.
        lengths: int64 [N].
        scale: factor of the logits.
        starts: first row of each stream, int64 [N]; exactly one of starts and rows is given.
        rows: row numbers [N, K] of which the first ``lengths[n]`` count.
        softcap: bound of the logits.
        causal: number of new query tokens, or 0.
        bias: float32 [R].
        row_group: int32 [R].
        key_correction: terms added to the rows of packed keys.
        value_correction: terms added to the rows of packed values.
        level_name: instruction-set level; the best one by default.
    """
    streams, queries, _ = q.shape
    key_rows, value_rows = _describe(keys, key_correction), _describe(values, value_correction)
    out = torch.empty(streams, queries, value_rows.channels, dtype=torch.float32)
    lse = torch.empty(streams, queries, dtype=torch.float32)
    # Named, so that converted copies outlive the call that holds only their addresses.
    q32 = q.to(torch.float32).contiguous()
    lengths, starts = lengths.contiguous(), None if starts is None else starts.contiguous()
    listed = None if rows is None else rows.to(torch.int32).contiguous()
    problem = _Problem(
        q=q32.data_ptr(),
        starts=_address(starts),
        lengths=lengths.data_ptr(),
        listed=_address(listed),
        row_group=_address(row_group),
        bias=_address(bias),
        out=out.data_ptr(),
        lse=lse.data_ptr(),
        rows=_data(keys).shape[0],
        streams=streams,
        queries=queries,
        listed_stride=0 if listed is None else listed.shape[1],
        causal=causal,
        bf16_queries=q.dtype == torch.bfloat16,
        threads=torch.get_num_threads(),
        scale=scale,
        softcap=softcap or 0.0,
        keys=key_rows,
        values=value_rows,
    )
    kernels = build.load(level_name or build.supported_levels()[-1])
    run = kernels.kvpress_dense if isinstance(keys, Tensor) else kernels.kvpress_uniform
    stream = run(ctypes.byref(problem))
    if stream >= 0:
        raise ValueError(
            f"stream {stream} refers to rows outside the {_data(keys).shape[0]} stored ones, or to groups or corrections "
            "that do not exist"
        )
    return out, lse


def run(source: str, entry: str, *fields: Tensor | float | None, level_name: str | None = None) -> int:
    """Call an entry point that takes one C structure of eight-byte fields, and return its result.

    Args:
        source: file that defines the entry point.
        entry: its name.
        fields: the structure in order: tensors become addresses, None a null, int an int64, float a double.
        level_name: instruction-set level; the best one by default.
    """
    values = [field.data_ptr() if isinstance(field, Tensor) else 0 if field is None else field for field in fields]
    layout = "".join("d" if isinstance(value, float) else "q" for value in values)
    kernels = build.load(level_name or build.supported_levels()[-1], source)
    result: int = kernels[entry](struct.pack(layout, *values))
    return result


def _data(side: Tensor | Packed) -> Tensor:
    return side if isinstance(side, Tensor) else side.codes


def _describe(side: Tensor | Packed, correction: Correction | None) -> _Rows:
    if isinstance(side, Tensor):
        return _Rows(data=side.data_ptr(), channels=side.shape[1], stride=side.stride(0), dtype=DTYPES[side.dtype])
    group_rows, group_channels = side.group
    return _Rows(
        data=side.codes.data_ptr(),
        scale=side.scale.data_ptr(),
        zero=side.zero.data_ptr(),
        channels=side.scale.shape[1] * group_channels,
        stride=side.codes.stride(0),
        dtype=DTYPES[side.scale.dtype],
        bits=side.bits,
        group_rows=group_rows,
        group_channels=group_channels,
        groups=side.scale.shape[0],
        correction=_Correction() if correction is None else _describe_correction(correction),
    )


def _describe_correction(correction: Correction) -> _Correction:
    terms = _Correction(*map(_address, correction.tensors()))
    if correction.low_rank is not None:
        factor, basis, _ = correction.low_rank
        terms.factor_dtype, terms.rank, terms.bases = DTYPES[factor.dtype], factor.shape[1], basis.shape[0]
    if correction.outliers is not None:
        _, channel, delta = correction.outliers
        terms.delta_dtype, terms.outliers = DTYPES[delta.dtype], channel.shape[0]
    return terms


def _address(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
