# SPDX-License-Identifier: Apache-2.0
"""Instruction-set levels, for benchmarks that measure several on one processor."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from kvpress.kernels.cpu import build, launch

TORCH_LEVELS = {
    "baseline": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41", "MKL_ENABLE_INSTRUCTIONS": "SSE4_2"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx2_vnni": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI", "MKL_ENABLE_INSTRUCTIONS": "AVX2"},
    "avx512": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE"},
    "avx512_vnni": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
    "avx512_vbmi": {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_VNNI"},
}
"""Environment variables that limit torch and its libraries to a level; they are read at first use."""


def levels_of(text: str | None) -> tuple[str, ...]:
    """Return instruction-set levels by name, slowest first: `all` of this processor, or the fastest one without a text.

    Raises:
        ValueError: this processor lacks one, or there is none of that name.
    """
    supported = build.supported_levels()
    named = supported if text == "all" else (text or build.best_level()).split(",")
    if lacking := [level for level in named if level not in supported]:
        raise ValueError(f"no level {lacking[0]!r} on this processor; use all, or some of {', '.join(supported)}")
    return tuple(level for level in supported if level in named)


def use(level: str | None) -> None:
    """Run the kernels of one level from here on, of the fastest with None; they are loaded when this returns."""
    os.environ["KVPRESS_CPU_LEVEL"] = level or ""
    build.best_level.cache_clear()
    launch.level.cache_clear()
    build.best_level()


@contextmanager
def torch_held_to(level: str) -> Iterator[None]:
    """Limit torch to a level in the processes that start meanwhile, as on a processor without the higher levels.

    At the last level of this processor torch chooses freely. The user's settings are restored afterwards.
    """
    variables = {} if level == build.supported_levels()[-1] else TORCH_LEVELS[level]
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
