# SPDX-License-Identifier: Apache-2.0
"""Memory for pairs that are read one here and one there."""

from __future__ import annotations

import mmap
from typing import cast

import torch
from torch import Tensor

LEAST_BYTES = 8 * 2**20
"""Tensors below this stay where they are: the ends of a mapping, up to 2 MiB each, may get small pages."""


def for_scattered_reads(rows: Tensor) -> Tensor:
    """Copy large host tensors to huge pages, where the system grants them on request; return others as they are.

    Rows that lie apart each touch another page. With pages of 4 KiB, looking up where a page is takes longer than
    fetching the row; with pages of 2 MiB the processor knows them all.
    """
    size = rows.numel() * rows.element_size()
    if rows.device.type != "cpu" or size < LEAST_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return rows
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError:  # a kernel without huge pages
        return rows
    return torch.frombuffer(cast(bytearray, memory), dtype=rows.dtype).view(rows.shape).copy_(rows)
