# SPDX-License-Identifier: Apache-2.0
"""Attention in parts: each part returns its output and log-sum-exp, and `merge` combines them exactly.

Shapes used here and in `kvpress.cache`: a *stream* is one (batch row, KV head), `n = b * H + h`; `N = B * H`
streams; `M = G * Q` query rows per stream, row `m = g * Q + t`; `T` stored pairs; `D` and `Dv` head dims.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.matmul import multiply

BLOCK_BYTES = 64 * 2**20
"""Maximum bytes of float32 logits in memory at once."""
FLASH_DIM = 256
"""Largest head dim of FlashAttention on a GPU."""

Partial = tuple[Tensor, Tensor]
"""(out [N, M, Dv], lse [N, M]), both float32. A part without any visible pair has out 0 and lse -inf."""


@dataclass(frozen=True)
class Logits:
    """Computation of logits from `q . k`: scale, optional soft cap and log-weights."""

    scale: float
    """Factor of `q . k`."""
    softcap: float | None = None
    """Soft cap, as `cap * tanh(x / cap)`; None for no cap."""

    def __call__(self, queries: Tensor, keys: Tensor, log_weight: Tensor | None = None) -> Tensor:
        """Return float32 logits `[..., M, T]` of queries `[..., M, D]` on keys `[..., T, D]`.

        A pair with `log_weight [..., T]` counts as `exp(log_weight)` equal pairs.
        """
        logits = self.of_products(multiply(queries.to(keys.dtype), keys.transpose(-1, -2)).float())
        return logits if log_weight is None else logits + log_weight.unsqueeze(-2)

    def of_products(self, products: Tensor) -> Tensor:
        """Return the logits of float32 `products` q . k of any shape, without log-weights."""
        logits = products * self.scale
        return logits if self.softcap is None else torch.tanh(logits / self.softcap) * self.softcap


def flash(queries: Tensor, keys: Tensor, values: Tensor, logits: Logits) -> Partial | None:
    """Attend from every query to every pair by torch's FlashAttention; None where torch has none for such tensors.

    Args:
        queries: `[B, H, M, D]`.
        keys: `[B, H, T, D]`, at least one.
        values: `[B, H, T, D]`.
        logits: scale; a soft cap gives None.

    Returns:
        Outputs `[B * H, M, D]` and log-sum-exp `[B * H, M]`.
    """
    dim, aten, settings = keys.shape[-1], torch.ops.aten, {"scale": logits.scale}
    if logits.softcap is not None or values.shape[-1] != dim or not keys.shape[2]:
        return None
    tensors = queries.to(keys.dtype), keys, values
    if keys.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*tensors, 0.0, False, **settings)
    elif keys.is_cuda and keys.dtype in (torch.float16, torch.bfloat16) and dim % 8 == 0 and dim <= FLASH_DIM:
        out, lse = aten._scaled_dot_product_flash_attention(*tensors, 0.0, False, False, **settings)[:2]
    else:
        return None
    return out.flatten(0, 1).float(), lse.flatten(0, 1)


def attend(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    logits: Logits,
    visible: Tensor | None = None,
    log_weight: Tensor | None = None,
) -> Partial:
    """Attend from `queries [S, M, D]` to `keys [S, T, D]` and `values [S, T, Dv]`.

    `visible` is an optional boolean mask that broadcasts to `[S, M, T]`, `log_weight [S, T]` is added to the logits.
    Many query rows are computed in blocks, so that logits of a long turn on a long cache are never all in memory.
    """
    blocks = query_blocks(queries, keys)
    if len(blocks) > 1:
        parts = []
        for rows in blocks:
            seen = visible if visible is None or visible.shape[1] == 1 else visible[:, rows]
            parts.append(attend(queries[:, rows], keys, values, logits, seen, log_weight))
        return torch.cat([part[0] for part in parts], dim=1), torch.cat([part[1] for part in parts], dim=1)
    scores = logits(queries, keys, log_weight)
    if visible is not None:
        scores = scores.masked_fill(~visible, float("-inf"))
    if scores.shape[-1] == 0:
        return scores.new_zeros(*scores.shape[:-1], values.shape[-1]), scores.new_full(scores.shape[:-1], -torch.inf)
    top = scores.amax(dim=-1, keepdim=True)
    if visible is not None:
        top = top.masked_fill(top.isinf(), 0.0)
    weights = scores.sub_(top).exp_()
    total = weights.sum(dim=-1, keepdim=True)
    out = multiply(weights.to(values.dtype), values).float()
    if visible is None:
        return out / total, (total.log() + top).squeeze(-1)
    return out / total.clamp_min(torch.finfo(torch.float32).tiny), (total.log() + top).squeeze(-1)


def query_blocks(queries: Tensor, keys: Tensor) -> list[slice]:
    """Split the query rows `[S, M, D]` so that the float32 logits of a block on `keys [S, T, D]` take at most BLOCK_BYTES."""
    block_rows = max(1, BLOCK_BYTES // (4 * max(1, keys.shape[0] * keys.shape[1])))
    return [slice(start, start + block_rows) for start in range(0, max(1, queries.shape[1]), block_rows)]


def merge(parts: list[Partial]) -> Partial:
    """Combine partial attentions over disjoint sets of pairs; exact in float32."""
    return parts[0] if len(parts) == 1 else kernels.merge(parts)


def group_queries(queries: Tensor, kv_heads: int) -> Tensor:
    """View `queries [B, Hq, Q, D]` as `[N, G * Q, D]`: the query rows that read each stream."""
    batch, heads, length, dim = queries.shape
    return queries.reshape(batch * kv_heads, heads // kv_heads * length, dim)


def ungroup(out: Tensor, batch: int, heads: int) -> Tensor:
    """View `out [N, G * Q, Dv]` as the `[B, Q, Hq, Dv]` that a transformers attention function returns."""
    if out.shape[0] * out.shape[1] == batch * heads:  # one token: one view, in half the host time
        return out.view(batch, 1, heads, out.shape[-1])
    return out.reshape(batch, heads, -1, out.shape[-1]).transpose(1, 2)
