# SPDX-License-Identifier: Apache-2.0
"""Operands of decode attention as the Triton kernels take them."""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels.formats.operand import Listed, Options, Where


def streams(where: Where) -> tuple[Tensor | None, Tensor | None, Tensor]:
    """Listed rows, first rows, and numbers of rows of every stream; one of the first two."""
    if isinstance(where, Listed):
        return where.rows.contiguous(), None, where.counts.contiguous()
    return None, where.starts.contiguous(), where.lengths.contiguous()


def width(where: Where) -> int:
    """Entries of a list of rows."""
    return where.rows.shape[1] if isinstance(where, Listed) else 0


def causal(options: Options) -> int | None:
    """New tokens of a stream; None without a mask, as for one new token, the last row of its stream, which sees every row."""
    return options.causal if options.causal > 1 else None
