# SPDX-License-Identifier: Apache-2.0
"""Registers, local memory and instructions of a compiled CUDA kernel, read with the tools that come with triton."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"


def resource_usage(cubin: bytes) -> tuple[int, int]:
    """Return the registers per thread and the bytes of local memory per thread, which hold spilled registers."""
    usage = re.search(r"REG:(\d+) STACK:(\d+)", dump("cuobjdump", "--dump-resource-usage", cubin=cubin))
    if usage is None:
        raise RuntimeError("cuobjdump reports no resource usage")
    return int(usage[1]), int(usage[2])


def disassemble(cubin: bytes) -> str:
    """Return the instructions of a kernel, as nvdisasm prints them."""
    return dump("nvdisasm", "-c", cubin=cubin)


def dump(tool: str, *arguments: str, cubin: bytes) -> str:
    """Run a tool of the CUDA toolkit on a cubin and return its output."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [TOOLS / tool, *arguments, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout  # noqa: S603
