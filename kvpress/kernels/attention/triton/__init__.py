# SPDX-License-Identifier: Apache-2.0
"""Decode attention in Triton. Lengths are read on the GPU, so streams outside the storage are not refused."""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels.attention.triton import basis, coded, dense, packed
from kvpress.kernels.attention.triton.merge import Partials
from kvpress.kernels.attention.triton.merge import as_partials as as_partials
from kvpress.kernels.attention.triton.merge import merge_partials as merge_partials
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Rows, Where
from kvpress.kernels.triton.device import on_device

_LAUNCHERS = {"dense": dense.launch, "packed": packed.launch, "coded": coded.launch}


@on_device
def launch(q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None) -> Partials:
    """Run the kernel of the format on checked arguments; the caller merges the results and applies bases and sinks.

    `added` holds the products of the queries with the offset of the keys, by position.
    """
    return _LAUNCHERS[rows.keys.name](q, rows, where, options, added)


def decode(
    q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None
) -> tuple[Tensor, Tensor]:
    """Run the kernel and merge its results: outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M]."""
    return merge_partials(q, [launch(q, rows, where, options, added)])


def attend(
    q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None
) -> tuple[Tensor, Tensor]:
    """Decode rows that may be stored in another basis; arguments and results as in `decode`, without sinks."""
    shift = None
    if rows.key_basis is not None:
        q, shift = basis.enter(q, rows.key_basis, where.stream, options.scale)
    out, lse = decode(q, rows, where, options, added)
    if rows.value_basis is not None:
        return basis.leave(out, lse, rows.value_basis, where.stream, shift)
    return out, lse if shift is None else lse + shift
