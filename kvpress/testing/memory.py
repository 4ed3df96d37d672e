# SPDX-License-Identifier: Apache-2.0
"""Tensors and bytes that a cache keeps alive, found by walking through its attributes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kvpress import kernels


def reachable(root: Any, skip: tuple[type, ...] | type = ()) -> list[Tensor]:
    """Return every tensor that an object keeps alive, through attributes and containers of any name.

    Objects of the types in `skip` count as empty. So do the operands of segments and indexes, which refer to tensors of
    these, to a few numbers for each stream, and to constants of the process.
    """
    tensors, seen, stack = [], set(), [root]
    skipped = skip if isinstance(skip, tuple) else (skip,)
    leaves = (type, torch.dtype, torch.device, str, int, float, kernels.Rows, kernels.Pages, *skipped)
    while stack:
        item = stack.pop()
        if id(item) in seen or isinstance(item, leaves):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            tensors.append(item)
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple, set, frozenset)):
            stack += item
        else:
            stack += getattr(item, "__dict__", {}).values()
            stack += [getattr(item, name) for name in getattr(type(item), "__slots__", ()) if hasattr(item, name)]
    return tensors


def held_bytes(root: Any) -> int:
    """Return the bytes of the storages behind all reachable tensors, each once."""
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in reachable(root)}
    return sum(storages.values())


def held_by_cache(cache: Any) -> int:
    """Return the bytes that a cache holds; of layers with a sliding window, the keys and values."""
    return held_bytes([layer if hasattr(layer, "store") else [layer.keys, layer.values] for layer in cache.layers])
