# SPDX-License-Identifier: Apache-2.0
"""Attention mass of tiles in C++."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.fields import DTYPES
from kvpress.kernels.tile_mass.contract import Tile, blocks


def receive(q: Tensor, keys: Tensor, last: Tensor, tile: Tile, scale: float, level: str | None = None) -> Tensor:
    """Run the kernel on checked arguments; arguments and result as in `kvpress.kernels.tile_mass`."""
    (heads, queries, channels), (kv_heads, count) = q.shape, keys.shape[:2]
    keys = keys if keys.stride(-1) == 1 else keys.contiguous()
    out = torch.empty(heads, blocks(queries, tile[0]), blocks(count, tile[1]), dtype=torch.float32)
    launch.run(
        "tile_mass.cpp",
        "kvpress_tile_mass",
        q.contiguous(),
        keys,
        last.contiguous(),
        out,
        heads,
        kv_heads,
        queries,
        count,
        channels,
        *tile,
        *keys.stride()[:2],
        DTYPES[q.dtype],
        torch.get_num_threads(),
        float(scale),
        level=level,
    )
    return out
