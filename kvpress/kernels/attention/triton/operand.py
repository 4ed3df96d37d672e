# SPDX-License-Identifier: Apache-2.0
"""Arguments of the Triton decode kernels, made of operands."""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Listed, Options, Where


def streams(where: Where) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Return the list of rows, the first row and the number of rows of every stream; one of the first two is None."""
    if isinstance(where, Listed):
        return where.rows.contiguous(), None, where.counts.contiguous()
    return None, where.starts.contiguous(), where.lengths.contiguous()


def offsets(added: Products | None) -> tuple[Tensor | None, ...]:
    """Return the products by position, shifts and positions that `online.added` reads; all None without an offset."""
    return (None, None, None) if added is None else (added.by_position.contiguous(), added.shift, added.positions)


def positions(added: Products | None) -> int:
    """Return the number of positions that `offsets` has products for."""
    return 0 if added is None else added.by_position.shape[2]


def width(where: Where) -> int:
    """Return the number of entries of each list of rows, 0 for ranges."""
    return where.rows.shape[1] if isinstance(where, Listed) else 0


def causal(options: Options) -> int | None:
    """Return the number of new tokens of a stream; None without a mask, and for one new token, which sees every row."""
    return options.causal if options.causal > 1 else None
