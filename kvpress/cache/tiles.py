"""Attention that reads some tiles only: blocks of keys that each block of queries of each head is given."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.cache.attention import Logits, Partial, attend


def attend_tiles(
    queries: Tensor, keys: Tensor, values: Tensor, tiles: Tensor, block: int, logits: Logits, real: Tensor | None = None
) -> Partial:
    """Attend causally from the newest tokens to the keys in the tiles that are read; the others cost nothing.

    Args:
        queries: `[B, Hq, Q, D]`, those of the last Q of T tokens.
        keys: `[B, H, T, D]`.
        values: `[B, H, T, Dv]`.
        tiles: which tiles are read, bool `[B, Hq, ceil(Q / block), ceil(T / block)]`; a query's own tile always is.
        block: tokens per tile, in both directions; query tile i holds the tokens from `T - Q + i * block`.
        logits: how logits are formed.
        real: real tokens, bool `[B, T]`; None where nothing is padded.

    Returns:
        Outputs `[B, Hq, Q, Dv]` and log-sum-exp `[B, Hq, Q]`, float32.
    """
    batch, heads, new, _ = queries.shape
    total, groups = keys.shape[2], heads // keys.shape[1]
    short = -total % block
    blocks = (total + short) // block
    held = torch.ones(batch, total, dtype=torch.bool, device=keys.device) if real is None else real.to(keys.device)
    held = pad(held, (0, short))
    cut_keys, cut_values = (
        pad(part, (0, 0, 0, short)).unflatten(2, (blocks, block)).repeat_interleave(groups, dim=1)
        for part in (keys, values)
    )
    outs, lses = [], []
    for i, start in enumerate(range(0, new, block)):
        at = torch.arange(total - new + start, total - new + min(start + block, new), device=keys.device)
        chosen = tiles[:, :, i].to(keys.device).clone()
        own, last = int(at[0]) // block, int(at[-1]) // block + 1
        chosen[..., own:last], chosen[..., last:] = True, False
        most = int(chosen.sum(dim=-1).max())
        order = chosen.to(torch.uint8).argsort(dim=-1, descending=True, stable=True)[..., :most]
        index = order[..., None, None]
        parts = [
            part.gather(2, index.expand(-1, -1, -1, block, part.shape[-1])).flatten(2, 3)
            for part in (cut_keys, cut_values)
        ]
        column = (order[..., None] * block + torch.arange(block, device=keys.device)).flatten(2)
        row = torch.arange(batch, device=keys.device)[:, None, None]
        visible = chosen.gather(2, order).repeat_interleave(block, dim=2) & held[row, column]
        visible = visible[:, :, None] & (column[:, :, None] <= at[:, None])
        asked = queries[:, :, start : start + block]
        flat = (asked.flatten(0, 1), parts[0].flatten(0, 1), parts[1].flatten(0, 1))
        out, lse = attend(*flat, logits, visible.flatten(0, 1))
        outs.append(out.unflatten(0, (batch, heads)))
        lses.append(lse.unflatten(0, (batch, heads)))
    return torch.cat(outs, dim=2), torch.cat(lses, dim=2)
