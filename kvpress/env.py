"""The only module that reads environment variables."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_kernels_enabled() -> bool:
    """Whether the C++ kernels may be compiled and used; ``KVPRESS_CPU_KERNELS=0`` turns them off."""
    return os.environ.get("KVPRESS_CPU_KERNELS", "1") != "0"


def cpu_level() -> str | None:
    """The instruction-set level that ``KVPRESS_CPU_LEVEL`` asks for, such as ``avx2``; the fastest there is without it."""
    return os.environ.get("KVPRESS_CPU_LEVEL") or None


def cache_dir() -> Path:
    """Where compiled kernels are kept: ``$XDG_CACHE_HOME/kvpress``, by default ``~/.cache/kvpress``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvpress"


def cxx_compiler() -> str | None:
    """The C++ compiler the user asked for with ``CXX``, if any."""
    return os.environ.get("CXX") or None
