"""Split-KV decode attention on packed codes; contract and float32 reference are those of `kvpress.kernels.uniform`.

Products are float16 with float32 sums; see `kvpress.kernels.triton.uniform_kernel` for how codes become factors of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.correction import Correction
from kvpress.kernels.packed import Packed
from kvpress.kernels.triton import correction
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded, plan
from kvpress.kernels.triton.merge import merged, partials
from kvpress.kernels.triton.uniform_kernel import decode_kernel
from kvpress.kernels.uniform import check
from kvpress.kernels.uniform import reference as reference

TRITON = tuple(int(part) for part in triton.__version__.split(".")[:2])

LEAST_ROWS = 4
"""Query rows of a tile, padded to a power of two: each costs registers and work on scales, unlike with dense rows."""

WARPS, STAGES = 2, 3
"""Few warps repeat less of each other's work, and still copy a block of codes in pieces of 128 bits."""


@dataclass(frozen=True)
class Limits:
    """Query rows and cached rows of a tile at most, and registers per thread: what fits without a spill."""

    queries: int
    block: int
    registers: int | None


def limits(channels: int, corrected: bool) -> Limits:
    """Limits for so many key and value channels, with corrections or without."""
    if corrected:
        return Limits(8, 32, 255) if channels <= 256 else Limits(4, 16, 255)
    if channels > 256:
        return Limits(16, 64, 255)
    # ptxas would spill from small tiles, as from large ones, to run more of them.
    return Limits(16, 64, 128 if channels <= 128 else None)


@dataclass(frozen=True)
class Columns:
    """How the byte columns of one side are read: ``chunks`` times ``width``, padded to ``padded``, of ``parts`` channels."""

    chunks: int
    width: int
    padded: int
    parts: int


def columns(channels: int, bits: int, group: int | None) -> Columns:
    """One chunk per channel group of at least 16 columns where that divides a part, else all columns at once."""
    parts = 4 if bits == 3 else 8 // bits
    width = channels // parts
    if group is not None and group == padded(group) and width % group == 0:
        return Columns(width // group, group, group, parts)
    return Columns(1, width, padded(width), parts)


def block_rows(group_rows: int, contiguous: bool, most: int = 64) -> tuple[int, bool]:
    """Rows per block, and whether every block lies inside one row group of the keys."""
    if contiguous:
        for block in (64, 32, 16):
            if block <= most and group_rows % block == 0:
                return block, True
    return most, False


def rank(terms: Correction) -> int:
    """Rank of the low-rank terms, 0 without any."""
    return 0 if terms.factor is None else terms.factor.shape[1]


def padded_rank(rank: int) -> int:
    """Rank padded to the least sum that triton accepts in a product of float32."""
    return padded(rank, 8 if TRITON >= (3, 8) else 16)


def outlier_tiles(channels: int) -> int:
    """How many times the outliers of a row take a tile of `correction.LOW` channels."""
    return padded(channels) // correction.LOW.value


@on_device
def uniform_decode(
    q: Tensor,
    keys: Packed,
    values: Packed,
    starts: Tensor,
    lengths: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    row_group: Tensor | None = None,
    causal: int = 0,
    capacity: int | None = None,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the rows ``starts[n] .. starts[n] + lengths[n]``, as `kvpress.kernels.uniform_decode` does.

    Args:
        q: queries [N, M, D].
        keys: codes, scales and zeros of the keys.
        values: codes, scales and zeros of the values.
        starts: int64 [N].
        lengths: int64 [N]; read on the device, so streams outside the storage are not refused.
        scale: factor of the logits.
        softcap: bound of the logits.
        bias: float32 [R].
        row_group: int32 [R].
        causal: number of new tokens.
        capacity: most rows that a stream can have, all by default; it bounds the number of splits.
        key_correction: terms added to the decoded keys.
        value_correction: terms added to the decoded values.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    terms = (key_correction, value_correction)
    check(q, keys, values, softcap, causal, bias, row_group, *terms)
    checks.streams(starts, lengths, q)
    capacity = keys.codes.shape[0] if capacity is None else capacity
    return _launch(q, keys, values, None, starts, lengths, scale, softcap, causal, bias, row_group, capacity, *terms)


@on_device
def uniform_select(
    q: Tensor,
    keys: Packed,
    values: Packed,
    rows: Tensor,
    counts: Tensor,
    scale: float,
    *,
    softcap: float | None = None,
    bias: Tensor | None = None,
    row_group: Tensor | None = None,
    key_correction: Correction | None = None,
    value_correction: Correction | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the first ``counts[n]`` rows listed in ``rows [N, K]``; the rest as in `uniform_decode`."""
    terms = (key_correction, value_correction)
    check(q, keys, values, softcap, 0, bias, row_group, *terms)
    checks.selection(rows, counts, q)
    return _launch(q, keys, values, rows, None, counts, scale, softcap, 0, bias, row_group, rows.shape[1], *terms)


def _launch(
    q: Tensor,
    keys: Packed,
    values: Packed,
    rows: Tensor | None,
    starts: Tensor | None,
    lengths: Tensor,
    scale: float,
    softcap: float | None,
    causal: int,
    bias: Tensor | None,
    row_group: Tensor | None,
    capacity: int,
    key_correction: Correction | None,
    value_correction: Correction | None,
) -> tuple[Tensor, Tensor]:
    D, DV = q.shape[2], values.codes.shape[1] * 8 // values.bits
    if row_group is not None and keys.group[0] == values.group[0] == 1:
        row_group = None
    key_terms, value_terms = key_correction or Correction(), value_correction or Correction()
    terms = (*key_terms.tensors(), *value_terms.tensors())
    most = limits(D + DV, corrected=any(term is not None for term in terms))
    block, fold = block_rows(keys.group[0], rows is None and row_group is None, most.block)
    key = columns(D, keys.bits, None if fold else keys.group[1])
    value = columns(DV, values.bits, values.group[1])
    key_rank, value_rank = rank(key_terms), rank(value_terms)
    grid = plan(q, capacity, block, LEAST_ROWS, most.queries)
    out, lse = partials(q, grid.splits, DV)
    if lse.numel():
        decode_kernel[grid.programs](
            q.contiguous(),
            keys.codes,
            keys.scale,
            keys.zero,
            values.codes,
            values.scale,
            values.zero,
            None if rows is None else rows.contiguous(),
            None if row_group is None else row_group.contiguous(),
            None if starts is None else starts.contiguous(),
            lengths.contiguous(),
            None if bias is None else bias.contiguous(),
            tuple(key_terms.tensors()),
            tuple(value_terms.tensors()),
            out,
            lse,
            q.shape[1],
            0 if rows is None else rows.shape[1],
            causal if causal > 1 else None,  # one new token, the last row of its stream, sees every row
            scale,
            softcap,
            D,
            keys.bits,
            *keys.group,
            DV,
            values.bits,
            *values.group,
            key.chunks,
            key.width,
            key.padded,
            key.parts,
            fold,
            value.chunks,
            value.width,
            value.padded,
            value.parts,
            grid.rows,
            block,
            key_rank,
            padded_rank(key_rank),
            value_rank,
            padded_rank(value_rank),
            outlier_tiles(DV),
            num_warps=WARPS,
            num_stages=STAGES,
            maxnreg=most.registers,
        )
    return merged(out, lse)
