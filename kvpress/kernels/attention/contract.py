# SPDX-License-Identifier: Apache-2.0
"""Decode attention over stored rows, for streams of any length in one flat storage.

    logit[m, r] = softcap(scale * q[m] . (keys[r] + offset[r])) + log_weight[r]
    out = softmax(logit) values,   lse = log sum exp(logit)

    q [N, M, D]      keys [R, D]      values [R, Dv]      out float32 [N, M, Dv]      lse float32 [N, M]

All sums are float32. A stream without visible rows has ``out = 0`` and ``lse = -inf``, the neutral element of an LSE merge.

Errors, as a fraction of the largest output:

    dense     summation in another order; on a GPU also rounding of queries and weights to the dtype of the rows
    packed    below 1e-3: scales are folded into queries and weights, which are rounded to 16 bits. Corrections are added
              without that rounding; where they cancel most of the codes, the bound refers to the output of the codes alone
    coded     on a CPU summation in another order, and below 1e-3 where the model computes in 16 bits: long streams of
              rotated keys are then multiplied as integers. On a GPU rounding to the dtype of the books

A query with NaN gives NaN, and so do queries of the same stream where they are rounded together. A query that sees a dense key
with NaN gives NaN.

Every back end has a function ``decode(q, rows, where, options, added)`` that leaves bases and sinks to its caller.
`added` holds the products of queries with offsets of keys, None for keys without (`kvpress.kernels.formats.offset`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.operand import Listed, Options, Part


def check(q: Tensor, parts: Sequence[Part], options: Options) -> None:
    """Refuse arguments that do not match; row numbers are checked by the kernel or reference that reads the rows."""
    checks.shape("q", q, ("N", "M", "D"), *checks.FLOATS)
    if not parts:
        raise ValueError("parts must hold at least one, got none")
    options.check(q)
    query = q.shape[0], q.shape[2], q.device
    for part in parts:
        part.check(q, query)
        if part.value_channels != parts[0].value_channels:
            channels = f"{parts[0].value_channels} and {part.value_channels}"
            raise ValueError(f"values of all parts must have the same number of channels, got {channels}")
        basis = part.rows.key_basis
        if options.softcap is not None and basis is not None and basis.centre is not None:
            raise ValueError(
                f"softcap must be None for keys with a centre, which changes logits after the cap, got {options.softcap}"
            )
    if options.causal and isinstance(parts[-1].where, Listed):
        raise ValueError(f"causal must be 0 for listed rows, which have no order, got {options.causal}")


def check_parts(parts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Refuse partial results of different shapes, dtypes or devices."""
    if not parts:
        raise ValueError("parts must hold at least one result, got none")
    shape = tuple(parts[0][0].shape)
    for out, lse in parts:
        checks.shape("out", out, shape, torch.float32)
        checks.shape("lse", lse, shape[:-1], torch.float32)
        checks.same_device(out, lse)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """Add to each query's softmax a sink: a row of value 0 with the query's own logit.

    Args:
        out: outputs without sinks, float32 [N, M, Dv].
        lse: log-sum-exp of the logits without sinks, float32 [N, M].
        sinks: logit of the sink for each query, float32 [N, M]; None returns `out` and `lse` unchanged.
    """
    if sinks is None:
        return out, lse
    # Where a query sees no row and its sink is -inf the difference is NaN; its output is 0 already.
    kept = torch.sigmoid(lse - sinks).masked_fill(lse.isneginf(), 0.0)
    return out * kept[..., None], torch.logaddexp(lse, sinks)
