# SPDX-License-Identifier: Apache-2.0
"""Attention mass of tiles of keys over blocks of queries, without a queries x keys matrix.

Query m of head h sees the keys 0 to last[m] of its KV head g, where query heads of a GQA group are next to each other:

    p[h, m, k] = exp(scale * q[h, m] . keys[g, k]) / sum of the same over the keys that m sees
    mass[h, i, j] = sum of p[h, m, k] over the queries m of block i and the keys k of tile j

Blocks have `tile[0]` queries and tiles `tile[1]` keys; the last ones may have fewer. Logits are float32 for all dtypes of
queries and keys.

Every back end has a function ``receive(q, keys, last, tile, scale)``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks

Tile = tuple[int, int]


def check(q: Tensor, keys: Tensor, last: Tensor, tile: Tile) -> None:
    """Refuse queries, keys and tile sizes that do not match."""
    checks.shape("q", q, ("H", "M", "D"), *checks.FLOATS)
    heads, queries, channels = q.shape
    checks.shape("keys", keys, ("G", "K", channels), q.dtype)
    checks.shape("last", last, (queries,), torch.int64)
    checks.same_device(q, keys, last)
    if not keys.shape[0] or heads % keys.shape[0]:
        raise ValueError(f"the {heads} heads of q must be a multiple of the {keys.shape[0]} of keys")
    if min(tile) < 1:
        raise ValueError(f"tile must have at least one query and one key, got {tile}")


def blocks(count: int, size: int) -> int:
    """Return the number of blocks of `size` in `count` items; the last block may be shorter."""
    return -(-count // size)
