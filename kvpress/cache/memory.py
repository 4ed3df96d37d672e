# SPDX-License-Identifier: Apache-2.0
"""Memory for pairs that every token reads."""

from __future__ import annotations

import math
import mmap
from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor

LEAST_BYTES = 8 * 2**20
"""Tensors below this get ordinary pages: the ends of a mapping, up to 2 MiB each, may get those anyway."""


def empty(shape: Sequence[int], like: Tensor) -> Tensor:
    """Return an uninitialised tensor of the type and on the device of `like`, on huge pages where that helps."""
    found = _on_huge_pages(shape, like)
    return like.new_empty(shape) if found is None else found


def moved(rows: Tensor) -> Tensor:
    """Copy rows to huge pages where that helps; others stay, and so do those that are pinned or in no memory of torch's."""
    stay = rows.is_pinned() or not rows.untyped_storage().resizable()
    found = None if stay else _on_huge_pages(rows.shape, rows)
    return rows if found is None else found.copy_(rows)


def taken(rows: Tensor, index: Tensor) -> Tensor:
    """Return the rows that `index` [n] names, on huge pages where that helps."""
    found = _on_huge_pages((len(index), *rows.shape[1:]), rows)
    return rows.index_select(0, index) if found is None else torch.index_select(rows, 0, index, out=found)


def joined(parts: Sequence[Tensor], dim: int = 0) -> Tensor:
    """Return the parts one after the other along a dimension, on huge pages where that helps.

    Parts of several types, or with a gradient, are joined as torch joins them.
    """
    parts, first = list(parts), parts[0]
    shape = list(first.shape)
    shape[dim] = sum(part.shape[dim] for part in parts)
    plain = all(part.dtype == first.dtype and not part.requires_grad for part in parts)
    found = _on_huge_pages(shape, first) if plain else None
    return torch.cat(parts, dim) if found is None else torch.cat(parts, dim, out=found)


def _on_huge_pages(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Memory for a large tensor on the host, where the system grants huge pages on request (Linux); otherwise None.

    With pages of 4 KiB, rows are read as fast as the processor finds out where their pages are, and rows that lie apart
    each touch another one; with pages of 2 MiB it knows them all.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or like.requires_grad or size < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages; or no memory, and then torch says so
        return None
    return torch.frombuffer(cast(bytearray, memory), dtype=like.dtype).view(*shape)
