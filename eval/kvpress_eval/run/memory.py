# SPDX-License-Identifier: Apache-2.0
"""Memory of a run: what is free, what was used, and which caches fit beside each other."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import psutil
import torch

import kvpress
from kvpress.plan import Geometry, plan

Item = TypeVar("Item")

SHARE = 0.5
"""Part of the free memory that the caches of one reading may take; answers and activations need the rest."""


def fitting(
    model: Any,
    items: Sequence[Item],
    press_of: Callable[[Item], Any],
    batch: int,
    tokens: int,
    generated: int = 0,
    free_bytes: int | None = None,
) -> list[list[Item]]:
    """Divide items with presses into groups whose caches of `batch` contexts of `tokens` tokens fit beside each other.

    Up to `generated` tokens are read behind the contexts, one by one, in one cache of a group at a time. A press whose cache
    does not fit at all has a group of its own. `free_bytes` None is what the device has left.
    """
    try:
        geometry = Geometry.of(model.config)
    except NotImplementedError:  # a cache that no formula describes
        return [list(items)] if items else []
    free = SHARE * (available_bytes(model.device) if free_bytes is None else free_bytes)
    groups: list[list[Item]] = []
    held = most = 0
    for item in items:
        size, grown = (cache_bytes(press_of(item), geometry, batch, tokens, new) for new in (0, generated))
        if not groups or held + size + max(most, grown - size) > free:
            groups.append([])
            held = most = 0
        groups[-1].append(item)
        held, most = held + size, max(most, grown - size)
    return groups


def cache_bytes(press: Any, geometry: Geometry, batch: int, tokens: int, generated: int) -> int:
    """Return what a press leaves of the contexts, everything if it refuses them: reading will say why."""
    try:
        return plan(press, geometry, tokens, batch, generated).total_bytes
    except (ValueError, NotImplementedError):
        return plan(kvpress.get_press("none"), geometry, tokens, batch, generated).total_bytes


def available_bytes(device: torch.device) -> int:
    """Return the memory that more tensors can take on a device."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(torch.cuda.mem_get_info(device)[0]) + cached


def peak_bytes(device: torch.device) -> int:
    """Return the most memory in use so far: of the accelerator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return process_peak_bytes()


def process_peak_bytes() -> int:
    """Return the most memory that this process had in use so far; where the system does not record it, what it uses now."""
    try:
        import resource
    except ImportError:  # Windows
        used = psutil.Process().memory_info()
        return int(getattr(used, "peak_wset", used.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def release() -> None:
    """Give back what a failed attempt held."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
