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
    """Copy rows to huge pages where that helps; return others as they are."""
    found = _on_huge_pages(rows.shape, rows)
    return rows if found is None else found.copy_(rows)


def _on_huge_pages(shape: Sequence[int], like: Tensor) -> Tensor | None:
    """Memory for a large tensor on the host, where the system grants huge pages on request (Linux); otherwise None.

    With pages of 4 KiB, rows are read as fast as the processor finds out where their pages are, and rows that lie apart
    each touch another one; with pages of 2 MiB it knows them all.
    """
    size = math.prod(shape) * like.element_size()
    if like.device.type != "cpu" or size < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages; or no memory, and then torch says so
        return None
    return torch.frombuffer(cast(bytearray, memory), dtype=like.dtype).view(*shape)
