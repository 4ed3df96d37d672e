# SPDX-License-Identifier: Apache-2.0
"""The only module that reads environment variables."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cpu_kernels_enabled() -> bool:
    """Whether the C++ kernels may be compiled and used; ``KVPRESS_CPU_KERNELS=0`` turns them off."""
    return os.environ.get("KVPRESS_CPU_KERNELS", "1") != "0"


def cpu_level() -> str | None:
    """The instruction-set level that ``KVPRESS_CPU_LEVEL`` asks for, such as ``avx2``; the fastest there is without it."""
    return os.environ.get("KVPRESS_CPU_LEVEL") or None


def wheel_levels() -> str:
    """The levels that ``KVPRESS_WHEEL_LEVELS`` wants in a wheel: ``all``, ``none``, or names with commas between them."""
    return os.environ.get("KVPRESS_WHEEL_LEVELS") or "all"


def user() -> int:
    """Number of the user that runs this process; 0 where the system has none."""
    return os.getuid() if hasattr(os, "getuid") else 0


def cache_dirs() -> list[Path]:
    """Where compiled kernels may be kept, best first: ``$XDG_CACHE_HOME/kvpress``, by default ``~/.cache/kvpress``.

    Then a folder of this user's own among the temporary files: containers run as users without a home, or without one that
    can be written to.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    own = Path(tempfile.gettempdir()) / f"kvpress-{user()}"
    # Without HOME, and as a user that the system does not know, the name stays as it was written.
    return [*([Path(base) / "kvpress"] if os.path.isabs(base) else []), own]


def cxx_compiler() -> str | None:
    """The C++ compiler the user asked for with ``CXX``, if any."""
    return os.environ.get("CXX") or None
