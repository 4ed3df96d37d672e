# SPDX-License-Identifier: Apache-2.0
"""Decode attention in plain torch: ground truth of every decode kernel, and the fallback.

The code is kept simple: all logits of one stream, a softmax, a weighted sum. Rows are read in blocks, so that a quantised cache
is never decoded all at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Options, Rows, Where

BLOCK = 4096


def decode(
    q: Tensor, rows: Rows, where: Where, options: Options, added: Products | None = None
) -> tuple[Tensor, Tensor]:
    """Attend stream by stream, in float32; arguments and results as in `kvpress.kernels.decode`.

    `added` holds the products of the queries with the offset of the keys, by position.
    """
    where.check_stored(rows.count)
    listed = where.numbers()
    streams = list(range(len(listed))) if where.stream is None else where.stream.tolist()
    rows.check_stored(listed, streams)
    queries = torch.arange(q.shape[1], device=q.device)
    out = torch.zeros(*q.shape[:2], rows.values.channels, device=q.device)
    lse = torch.full(q.shape[:2], float("-inf"), device=q.device)
    for n, (numbers, stream) in enumerate(zip(listed, streams, strict=True)):
        if len(numbers) == 0:
            continue
        blocks = numbers.split(BLOCK)
        products = torch.cat([q[n].float() @ rows.keys.read(block, stream).T for block in blocks], dim=-1)
        if added is not None:
            products = products + added.of(n, numbers)
        log_weight = None if rows.log_weight is None else rows.log_weight[numbers]
        logits = options.logits(products, log_weight, queries)
        lse[n] = logits.logsumexp(-1)
        # A query that sees no row has lse = -inf; its weights must be 0, not exp(-inf + inf).
        weights = torch.exp(logits - lse[n].clamp_min(torch.finfo(torch.float32).min)[:, None])
        for block, weight in zip(blocks, weights.split(BLOCK, dim=-1), strict=True):
            out[n] += weight @ rows.values.read(block, stream)
    return out, lse


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge results over disjoint rows; arguments and results as in `kvpress.kernels.merge`."""
    lse = torch.stack([part[1].detach() for part in parts])
    total = lse.logsumexp(dim=0)
    # Where no part sees a row, all shares are exp(-inf) instead of exp(-inf + inf).
    shares = torch.exp(lse - total.clamp_min(torch.finfo(torch.float32).min)).unsqueeze(-1).unbind()
    out = parts[0][0].detach() * shares[0]
    for part, share in zip(parts[1:], shares[1:], strict=True):
        out = torch.addcmul(out, part[0].detach(), share)
    return out, total
