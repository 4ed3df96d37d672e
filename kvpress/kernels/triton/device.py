# SPDX-License-Identifier: Apache-2.0
"""Choice of tensors that Triton kernels serve, made without importing triton for any other tensor."""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

from kvpress import env

P = ParamSpec("P")
R = TypeVar("R")

LEAST_CAPABILITY = (8, 0)
"""Lowest compute capability with bfloat16 products and asynchronous copies to shared memory."""


def available(storage: Tensor) -> bool:
    """Whether Triton kernels serve rows in this tensor: on a recent enough NVIDIA GPU, with triton installed."""
    return storage.is_cuda and _capable(storage.device) and _importable()


def on_device(launcher: Callable[P, R]) -> Callable[P, R]:
    """Make a launcher run on the GPU of its first argument, which may differ from the current GPU."""

    @functools.wraps(launcher)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        first = args[0] if args else next(iter(kwargs.values()))
        with torch.cuda.device_of(first):
            return launcher(*args, **kwargs)

    return run


@functools.cache
def _capable(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= LEAST_CAPABILITY


def kernels_of(device: torch.device) -> str:
    """Return the kernels that run on a GPU, or the reason why plain torch does."""
    if torch.version.hip is not None:
        return "plain torch: an AMD GPU"
    if not _capable(device):
        return f"plain torch: older than compute capability {'.'.join(map(str, LEAST_CAPABILITY))}"
    return "Triton" if _importable() else "plain torch: triton is not installed (pip install 'kvpress-toolkit[triton]')"


@functools.cache
def _importable() -> bool:
    try:
        triton = importlib.import_module("triton")
    except ImportError:
        return False
    _give_home(getattr(triton, "knobs", None))
    return True


def _give_home(knobs: Any) -> None:
    """Make triton store compiled kernels with the temporary files if the user's home cannot be written to."""
    cache = getattr(knobs, "cache", None)
    home = Path(getattr(cache, "home_dir", None) or "/")
    folder = home / ".triton" if (home / ".triton").is_dir() else home
    if cache is not None and not (home.is_absolute() and os.access(folder, os.W_OK)):
        cache.home_dir = str(env.cache_dirs()[-1])
