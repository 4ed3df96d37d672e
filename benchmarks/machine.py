# SPDX-License-Identifier: Apache-2.0
"""The processor that a benchmark runs on. Imports no torch: some contenders run in processes without it."""

from __future__ import annotations

import platform
from pathlib import Path

AT_LEAST_STREAMED = 192 * 2**20


def cpu_model() -> str:
    """Name of the processor, from /proc/cpuinfo where there is one."""
    info = Path("/proc/cpuinfo")
    fields = dict(line.split(":", 1) for line in info.read_text().splitlines() if ":" in line) if info.exists() else {}
    known = {key.strip(): value.strip() for key, value in fields.items()}
    if "model name" not in known:
        return platform.processor() or platform.machine()
    return f"{known['model name']} (family {known.get('cpu family')}, model {known.get('model')})"


def streamed_bytes(caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> int:
    """Bytes to read between two calls, so that the second meets cold caches: as much as the largest holds, 192 MiB or more."""
    sizes = [path.read_text().strip() for path in caches.glob("index*/size")]
    return max([AT_LEAST_STREAMED, *(int(size.removesuffix("K")) * 1024 for size in sizes)])
