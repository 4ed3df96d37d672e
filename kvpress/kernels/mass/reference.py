# SPDX-License-Identifier: Apache-2.0
"""Statistics of softmax weights in plain torch, one block of queries after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.formats.operand import Options, Ranges, Rows
from kvpress.kernels.mass.contract import Statistic

BLOCK = 2**22
"""Most logits in memory at a time."""


def receive(
    q: Tensor,
    rows: Rows,
    where: Ranges,
    options: Options,
    statistic: Statistic,
    lse: Tensor | None = None,
    query_weight: Tensor | None = None,
) -> Tensor:
    """Compute the statistic of each row, float32 [R]; arguments as in `kvpress.kernels.column_mass`."""
    where.check_stored(rows.count)
    out = torch.zeros(rows.count, device=q.device)
    queries = torch.arange(q.shape[1], device=q.device)
    for n, numbers in enumerate(where.numbers()):
        if len(numbers) == 0:
            continue
        keys = rows.keys.read(numbers)
        log_weight = None if rows.log_weight is None else rows.log_weight[numbers]
        for block in queries.split(max(1, BLOCK // len(numbers))):
            logits = options.logits(q[n, block].float() @ keys.T, log_weight, block)
            if lse is not None:
                log_sum = lse[n, block]
            else:
                log_sum = logits.logsumexp(-1)
                if options.sinks is not None:
                    log_sum = torch.logaddexp(log_sum, options.sinks[n, block])
            # A query that sees no row has lse = -inf; its weights must be 0, not exp(-inf + inf).
            weights = torch.exp(logits - log_sum.clamp_min(torch.finfo(torch.float32).min)[:, None])
            if query_weight is not None:
                weights = weights * query_weight[n, block, None]
            if statistic == "max":
                out[numbers] = torch.maximum(out[numbers], weights.amax(0))
            else:
                out[numbers] += (weights if statistic == "sum" else weights.square()).sum(0)
    return out
