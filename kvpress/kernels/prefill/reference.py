# SPDX-License-Identifier: Apache-2.0
"""Sparse causal attention in plain torch: gathers the keys of one query block after the other."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.formats.operand import Options
from kvpress.kernels.prefill.contract import Lists


def attend(
    q: Tensor, keys: Tensor, values: Tensor, lists: Lists, real: Tensor | None, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return outputs [B, Hq, Q, Dv] and log-sum-exp [B, Hq, Q], float32; arguments as in `kvpress.kernels.block_prefill`."""
    (batch, heads, queries, _), (kv_heads, total) = q.shape, keys.shape[1:3]
    out = q.new_zeros(batch, heads, queries, values.shape[-1], dtype=torch.float32)
    lse = q.new_full((batch, heads, queries), -torch.inf, dtype=torch.float32)
    options, none = Options(scale, softcap), torch.arange(0)
    starts = range(0, queries, lists.block)
    ends = [0, *lists.ends.tolist()]
    column_ends = None if lists.column_ends is None else [0, *lists.column_ends.tolist()]
    inside = torch.arange(lists.block, device=q.device)
    for n in range(batch * heads):
        row, head = divmod(n, heads)
        kv = head // (heads // kv_heads)
        single = (
            None
            if column_ends is None or lists.columns is None
            else lists.columns[column_ends[n] : column_ends[n + 1]].long()
        )
        for i, start in enumerate(starts):
            span = slice(start, min(start + lists.block, queries))
            at = torch.arange(total - queries + start, total - queries + span.stop, device=q.device)
            tiles = lists.tiles[ends[n * len(starts) + i] : ends[n * len(starts) + i + 1]].long()
            read = (tiles[:, None] * lists.block + inside).flatten()
            if single is not None:
                read = torch.cat([read, single[(single < at[0]) & ~torch.isin(single // lists.block, tiles)]])
            read = read[read < total]
            if real is not None:
                read = read[real[row, read]]
            logits = options.logits(q[row, head, span].float() @ keys[row, kv, read].float().T, None, none)
            logits = logits.masked_fill(read > at[:, None], -torch.inf)
            log_sum = logits.logsumexp(dim=-1)
            weights = torch.exp(logits - log_sum.clamp_min(torch.finfo(torch.float32).min)[:, None])
            out[row, head, span], lse[row, head, span] = weights @ values[row, kv, read].float(), log_sum
    return out, lse
