"""Attention over streams of rows in plain torch: the ground truth of every decode kernel, and their fallback.

Written to be obviously right: all logits of one stream, a softmax, a weighted sum. Rows are read in blocks through a
callback, so a quantised cache is never dequantised as a whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 4096


def attend(
    q: Tensor,
    rows: list[Tensor],
    read_keys: Callable[[Tensor], Tensor],
    read_values: Callable[[Tensor], Tensor],
    scale: float,
    softcap: float | None = None,
    causal: int = 0,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend stream by stream, in float32.

    Args:
        q: queries [N, M, D].
        rows: for each of the N streams the row numbers it attends to, int64 [length].
        read_keys: maps row numbers [S] to float32 keys [S, D].
        read_values: maps row numbers [S] to float32 values [S, Dv].
        scale: factor of the logits.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        causal: number Q of new query tokens, the last Q rows of each stream; 0 lets every query see every row.
        bias: added to the logit of each row, float32 [R].

    Returns:
        Outputs, float32 [N, M, Dv], and natural log-sum-exp of the logits, float32 [N, M].
    """
    queries = q.shape[1]
    nothing = torch.zeros(0, dtype=torch.int64, device=q.device)
    out = torch.zeros(len(rows), queries, read_values(nothing).shape[-1], device=q.device)
    lse = torch.full((len(rows), queries), float("-inf"), device=q.device)
    for n, listed in enumerate(rows):
        if len(listed) == 0:
            continue
        blocks = listed.split(BLOCK)
        logits = torch.cat([q[n].float() @ read_keys(block).T for block in blocks], dim=-1) * scale
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        if bias is not None:
            logits = logits + bias[listed]
        if causal:
            token = torch.arange(queries, device=q.device) % causal
            limit = len(listed) - causal + token + 1
            hidden = torch.arange(len(listed), device=q.device) >= limit[:, None]
            logits = logits.masked_fill(hidden, float("-inf"))
        lse[n] = logits.logsumexp(-1)
        # A query that sees nothing has lse = -inf; its weights must be 0, not exp(-inf + inf).
        weights = torch.exp(logits - lse[n].clamp_min(torch.finfo(torch.float32).min)[:, None])
        for block, weight in zip(blocks, weights.split(BLOCK, dim=-1), strict=True):
            out[n] += weight @ read_values(block)
    return out, lse


def ranges(starts: Tensor, lengths: Tensor) -> list[Tensor]:
    """Row numbers ``start .. start + length`` of each stream."""
    pairs = zip(starts.tolist(), lengths.tolist(), strict=True)
    return [torch.arange(start, start + length, device=starts.device) for start, length in pairs]


def listed(rows: Tensor, counts: Tensor) -> list[Tensor]:
    """The first ``counts[n]`` row numbers of each stream of rows [N, K]."""
    return [row[:count].long() for row, count in zip(rows, counts.tolist(), strict=True)]
