# SPDX-License-Identifier: Apache-2.0
"""Memory of a run: free bytes, peak bytes, and groups of caches that fit at the same time."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psutil
import torch

import kvpress
from kvpress.hf.shards import shards_of
from kvpress.plan import Geometry, plan

Item = TypeVar("Item")

SHARE = 0.5
"""Fraction of the free memory for the caches of one reading; answers and activations need the remainder."""


def fitting(
    model: Any,
    items: Sequence[Item],
    press_of: Callable[[Item], Any],
    batch: int,
    tokens: int,
    generated: int = 0,
    free_bytes: int | None = None,
) -> list[list[Item]]:
    """Divide items with presses into groups whose caches of `batch` contexts of `tokens` tokens fit at the same time.

    Up to `generated` tokens are appended to one cache of a group at a time. A press whose cache does not fit has a group of its
    own. `free_bytes` None is the free memory of the device; of tensor-parallel ranks, the least one.
    """
    try:
        geometry = Geometry.of(model)
    except NotImplementedError:  # a cache that no formula describes
        return [list(items)] if items else []
    available = available_bytes(model.device) if free_bytes is None else free_bytes
    free = SHARE * min(shards_of(model).gather_objects(available))
    groups: list[list[Item]] = []
    total_size = largest_growth = 0
    for item in items:
        size, grown = (cache_bytes(press_of(item), geometry, batch, tokens, new) for new in (0, generated))
        if not groups or total_size + size + max(largest_growth, grown - size) > free:
            groups.append([])
            total_size = largest_growth = 0
        groups[-1].append(item)
        total_size, largest_growth = total_size + size, max(largest_growth, grown - size)
    return groups


def cache_bytes(press: Any, geometry: Geometry, batch: int, tokens: int, generated: int) -> int:
    """Return the planned peak bytes after the prompt under a press; those of the full cache if it refuses the contexts.

    The refusal is raised when the contexts are read.
    """
    try:
        return plan(press, geometry, tokens, batch, generated).decode_peak_bytes
    except (ValueError, NotImplementedError):
        return plan(kvpress.get_press("none"), geometry, tokens, batch, generated).total_bytes


def planned_peak(press: Any, model: Any, tokens: int) -> int | None:
    """Return the planned peak bytes of the cache while a context of `tokens` tokens is read in one pass.

    Returns None for a model or a press that `kvpress plan` has no formula for.
    """
    try:
        return plan(press, Geometry.of(model), tokens).peak_bytes
    except (ValueError, NotImplementedError):
        return None


def available_bytes(device: torch.device) -> int:
    """Return the free bytes of a device, with the unused part of torch's allocator."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def peak_bytes(device: torch.device) -> int:
    """Return the peak memory so far: of the accelerator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak_bytes()


def process_peak_bytes() -> int:
    """Return the peak memory of this process; its current memory if the system does not record the peak."""
    try:
        import resource
    except ImportError:  # Windows
        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release() -> None:
    """Free the memory of a failed attempt."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
