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
    """Instruction-set level of ``KVPRESS_CPU_LEVEL``, such as ``avx2``; None selects the fastest available."""
    return os.environ.get("KVPRESS_CPU_LEVEL") or None


def wheel_levels() -> str:
    """Levels to compile into a wheel, from ``KVPRESS_WHEEL_LEVELS``: ``all``, ``none``, or names separated by commas."""
    return os.environ.get("KVPRESS_WHEEL_LEVELS") or "all"


def repository() -> str | None:
    """Address of the repository from ``KVPRESS_REPOSITORY``, for the links of the README in a package; None without one."""
    return os.environ.get("KVPRESS_REPOSITORY") or None


def user() -> int:
    """User id of this process; 0 if the system has no user ids."""
    return os.getuid() if hasattr(os, "getuid") else 0


def cache_dirs() -> list[Path]:
    """Folders for compiled kernels and published files: ``$XDG_CACHE_HOME/kvpress``, by default ``~/.cache/kvpress``.

    The fallback is a folder for this user among the temporary files, for containers without a writable home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    temporary = Path(tempfile.gettempdir()) / f"kvpress-{user()}"
    # Without HOME, and for a user without a system account, expanduser leaves the ~ in the path.
    return [*([Path(base) / "kvpress"] if os.path.isabs(base) else []), temporary]


def triton_cache_dir() -> Path:
    """Folder in which triton stores compiled kernels: ``$TRITON_CACHE_DIR``, by default ``~/.triton``."""
    return Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton"))


def hub_cache_dir() -> Path:
    """Folder of downloaded models: ``$HF_HUB_CACHE``, else ``$HF_HOME/hub``, by default ``~/.cache/huggingface/hub``."""
    home = os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def cxx_compiler() -> str | None:
    """C++ compiler of ``CXX``, or None."""
    return os.environ.get("CXX") or None
