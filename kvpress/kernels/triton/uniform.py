"""Split-KV decode attention on packed codes; contract and float32 reference are those of `kvpress.kernels.uniform`.

Products are float16 with float32 sums; see `kvpress.kernels.triton.uniform_kernel` for how codes become factors of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.packed import Packed
from kvpress.kernels.triton.device import on_device
from kvpress.kernels.triton.grid import padded, plan
from kvpress.kernels.triton.merge import merged, partials
from kvpress.kernels.triton.uniform_kernel import decode_kernel
from kvpress.kernels.uniform import check
from kvpress.kernels.uniform import reference as reference

LEAST_ROWS, MOST_ROWS = 4, 16
"""Query rows of a tile, padded to a power of two: each costs registers and work on scales, unlike with dense rows."""

WARPS, STAGES = 2, 3
"""Few warps repeat less of each other's work, and still copy a block of codes in pieces of 128 bits."""


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


def block_rows(group_rows: int, contiguous: bool) -> tuple[int, bool]:
    """Rows per block, and whether every block lies inside one row group of the keys."""
    if contiguous:
        for block in (64, 32, 16):
            if group_rows % block == 0:
                return block, True
    return 64, False


def registers(channels: int) -> int | None:
    """Registers per thread for so many key and value channels: ptxas would spill from small tiles to run more of them."""
    return 128 if channels <= 128 else None


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

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    check(q, keys, values, softcap, causal, bias, row_group)
    checks.streams(starts, lengths, q)
    capacity = keys.codes.shape[0] if capacity is None else capacity
    return _launch(q, keys, values, None, starts, lengths, scale, softcap, causal, bias, row_group, capacity)


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
) -> tuple[Tensor, Tensor]:
    """Attend each stream to the first ``counts[n]`` rows listed in ``rows [N, K]``; the rest as in `uniform_decode`."""
    check(q, keys, values, softcap, 0, bias, row_group)
    checks.selection(rows, counts, q)
    return _launch(q, keys, values, rows, None, counts, scale, softcap, 0, bias, row_group, rows.shape[1])


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
) -> tuple[Tensor, Tensor]:
    D, DV = q.shape[2], values.codes.shape[1] * 8 // values.bits
    if row_group is not None and keys.group[0] == values.group[0] == 1:
        row_group = None
    block, fold = block_rows(keys.group[0], contiguous=rows is None and row_group is None)
    key = columns(D, keys.bits, None if fold else keys.group[1])
    value = columns(DV, values.bits, values.group[1])
    grid = plan(q, capacity, block, LEAST_ROWS, MOST_ROWS)
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
            num_warps=WARPS,
            num_stages=STAGES,
            maxnreg=registers(D + DV),
        )
    return merged(out, lse)
