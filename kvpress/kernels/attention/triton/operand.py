# SPDX-License-Identifier: Apache-2.0
"""Operands of decode attention as the Triton kernels take them."""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Listed, Options, Where


def streams(where: Where) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Listed rows, first rows, and numbers of rows of every stream; one of the first two."""
    if isinstance(where, Listed):
        return where.rows.contiguous(), None, where.counts.contiguous()
    return None, where.starts.contiguous(), where.lengths.contiguous()


def offsets(added: Products | None) -> tuple[Tensor | None, ...]:
    """Products by position, and where rows stand, as `online.added` reads them; all None without an offset."""
    return (None, None, None) if added is None else (added.by_position.contiguous(), added.shift, added.positions)


def positions(added: Products | None) -> int:
    """Positions that `offsets` has products for."""
    return 0 if added is None else added.by_position.shape[2]


def width(where: Where) -> int:
    """Entries of a list of rows."""
    return where.rows.shape[1] if isinstance(where, Listed) else 0


def causal(options: Options) -> int | None:
    """New tokens of a stream; None without a mask, as for one new token, the last row of its stream, which sees every row."""
    return options.causal if options.causal > 1 else None
