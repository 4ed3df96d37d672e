# SPDX-License-Identifier: Apache-2.0
"""Decode attention in Triton. Lengths are read on the GPU, so streams outside the storage are not refused."""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels.attention.triton import coded, dense, packed
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Rows, Where
from kvpress.kernels.triton.device import on_device

_LAUNCHERS = {"dense": dense.launch, "packed": packed.launch, "coded": coded.launch}


@on_device
def decode(
    q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel of the format on checked arguments; the caller applies bases and sinks.

    `added` holds the products of the queries with the offset of the keys, by position.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    return _LAUNCHERS[rows.keys.name](q, rows, where, options, added)
