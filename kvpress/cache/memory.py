# SPDX-License-Identifier: Apache-2.0
"""Allocation on huge pages, for pairs that every token reads."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

LEAST_BYTES = 8 * 2**20
"""Smaller tensors get ordinary pages, as the ends of a mapping, up to 2 MiB each, may get in any case."""


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialised tensor of the type and on the device of `like`, on huge pages where that helps."""
    huge = _on_huge_pages(shape, like)
    return like.new_empty(shape) if huge is None else huge


def moved(rows: Tensor) -> Tensor:
    """Copy rows to huge pages where that helps; return small, pinned and memory-mapped tensors unchanged."""
    stay = rows.is_pinned() or not rows.untyped_storage().resizable()
    huge = None if stay else _on_huge_pages(rows.shape, rows)
    return rows if huge is None else huge.copy_(rows)


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows at `index [n]`, on huge pages where that helps."""
    huge = _on_huge_pages((len(index), *rows.shape[1:]), rows)
    return rows.index_select(0, index) if huge is None else torch.index_select(rows, 0, index, out=huge)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Concatenate along a dimension, on huge pages where that helps.

    Parts of several dtypes, or with a gradient, get ordinary pages.
    """
    parts, first = list(parts), parts[0]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    plain = all(part.dtype == first.dtype and not part.requires_grad for part in parts)
    huge = _on_huge_pages(shape, first) if plain else None
    return torch.cat(parts, dim) if huge is None else torch.cat(parts, dim, out=huge)


def _on_huge_pages(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Return memory on huge pages for a large tensor on the host (Linux, on request), or None where unavailable.

    With pages of 4 KiB, reads of scattered rows are limited by TLB misses; with pages of 2 MiB, the TLB covers all pages.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or like.requires_grad or size < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages, or no memory, where torch raises
        return None
    return torch.frombuffer(cast(bytearray, memory), dtype=like.dtype).view(*shape)
