# SPDX-License-Identifier: Apache-2.0
"""Processor that a benchmark runs on. Imports no torch: some contenders run in processes without it."""

from __future__ import annotations

import platform
from pathlib import Path

AT_LEAST_STREAMED = 192 * 2**20


def cpu_model() -> str:
    """Return the name of the processor, from /proc/cpuinfo where that exists."""
    info = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line) if info.exists() else {}
    values = {key.strip(): value.strip() for key, value in fields.items()}
    if "model name" not in values:
        return platform.processor() or platform.machine()
    return f"{values['model name']} (family {values.get('cpu family')}, model {values.get('model')})"


def streamed_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Return the bytes to read for cold caches between two calls: the size of the largest cache, at least 192 MiB."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max([AT_LEAST_STREAMED, *(int(size.removesuffix("K")) * 1024 for size in sizes)])
