# SPDX-License-Identifier: Apache-2.0
"""Driver that Triton's runtime calls in place of CUDA's, and the switch that sends tensors of the host to it."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import pytest
from torch import Tensor
from torch.utils._pytree import tree_leaves

with warnings.catch_warnings():
    warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
    from triton.backends.compiler import GPUTarget
    from triton.runtime.driver import driver as active_driver

from benchmarks.cubin import resource_usage
from kvpress.kernels.cpu import launch
from kvpress.kernels.triton import device, grid
from tests.fakegpu.chips import CHIPS, MOST_BLOCKS, MOST_THREADS, REGISTER_UNIT, REGISTERS, WARP, Chip


class LaunchError(RuntimeError):
    """A launch that the driver of the chip would refuse."""


@dataclass(frozen=True)
class Launch:
    """One launch that was within the limits."""

    kernel: str
    grid: tuple[int, int, int]
    threads: int
    """Threads of a block."""
    shared: int
    """Bytes of shared memory of a block."""
    registers: int
    """Registers per thread."""
    spills: int
    """Bytes of local memory per thread."""


@dataclass(frozen=True)
class Function:
    """A loaded kernel: registers and bytes of local memory per thread."""

    registers: int
    spills: int


@functools.cache
def _usage(cubin: bytes) -> Function:
    return Function(*resource_usage(cubin))


@dataclass
class Utils:
    """Functions that Triton's runtime calls when it loads a kernel."""

    chip: Chip

    def get_device_properties(self, device: int) -> dict[str, int]:
        del device
        return {
            "max_shared_mem": self.chip.shared,
            "multiprocessor_count": self.chip.multiprocessors,
            "max_num_regs": REGISTERS,
            "warpSize": WARP,
        }

    def load_binary(self, name: str, cubin: bytes, shared: int, device: int) -> tuple[Any, Any, int, int, int]:
        """Return a module, a function, registers and spilled words per thread, and the maximum of threads per block."""
        del name, shared, device
        function = _usage(cubin)
        return object(), function, function.registers, function.spills // 4, MOST_THREADS

    def unload_module(self, module: Any) -> None:
        del module


@dataclass
class FakeDriver:
    """Stands in for Triton's CUDA driver; records the launches that were within the limits of the chip.

    Triton caches compiled kernels by device, so the number of the device is that of the chip.
    """

    chip: Chip
    launches: list[Launch] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.utils = Utils(self.chip)

    def launcher_cls(self, source: Any, metadata: Any) -> Launcher:
        return Launcher(kernel_name(source.fn.fn), metadata.num_warps * WARP, metadata.shared)

    def get_current_device(self) -> int:
        return self.chip.capability

    def get_current_stream(self, device: int | None = None) -> int:
        del device
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.chip.capability, WARP)

    def counts(self) -> Counter[str]:
        """Launches by the name of the kernel."""
        return Counter(launch.kernel for launch in self.launches)

    def spilling(self) -> list[Launch]:
        """Launches of kernels that keep registers in local memory."""
        return [launch for launch in self.launches if launch.spills]


@dataclass(frozen=True)
class Launcher:
    """Launches one compiled kernel: checks the limits of the chip; the active driver records the launch.

    Triton caches launchers with compiled kernels, so they outlive the driver that they were made for.
    """

    kernel: str
    threads: int
    shared: int

    def __call__(self, x: int, y: int, z: int, stream: int, function: Function, *arguments: Any) -> None:
        del stream
        blocks = (x, y, z)
        if 0 in blocks:  # Triton launches nothing for an empty grid
            return
        self._check(blocks, function)
        places = {str(leaf.device) for leaf in tree_leaves(arguments) if isinstance(leaf, Tensor)}
        if len(places) > 1:
            raise LaunchError(
                f"{self.kernel} is launched with tensors of {' and '.join(sorted(places))}; use one device"
            )
        launched = Launch(self.kernel, blocks, self.threads, self.shared, function.registers, function.spills)
        active_driver.active.launches.append(launched)

    def _check(self, blocks: tuple[int, int, int], function: Function) -> None:
        for axis, size, limit in zip("xyz", blocks, MOST_BLOCKS, strict=True):
            if not (isinstance(size, int) and 0 < size <= limit):
                raise LaunchError(
                    f"{self.kernel} is launched with {size} blocks on axis {axis}, which takes 1 to {limit}"
                )
        if self.threads > MOST_THREADS:
            raise LaunchError(
                f"{self.kernel} is launched with {self.threads} threads a block, which has {MOST_THREADS} at most"
            )
        per_warp = -(-function.registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
        if per_warp * (self.threads // WARP) > REGISTERS:
            raise LaunchError(
                f"{self.kernel} needs {function.registers} registers for each of {self.threads} threads; a block has "
                f"{REGISTERS} at most"
            )


def kernel_name(function: Any) -> str:
    """Return the name of a kernel: its package under `kvpress.kernels`, and its function where that is not `_kernel`."""
    package, module = function.__module__.split(".")[-2:]
    name = package if module == "triton" else module.removesuffix("_kernel")
    special = function.__name__.strip("_").removesuffix("kernel").strip("_")
    return f"{name} {special}" if special and special != "decode" else name


@contextmanager
def fake_gpu(capability: int = 90) -> Iterator[FakeDriver]:
    """Launch the Triton kernels for tensors of any device on a chip that only checks them."""
    chip = CHIPS[capability]
    fake, before = FakeDriver(chip), active_driver._active
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device, "available", lambda storage: True)
        patch.setattr(launch, "available", lambda storage: False)
        patch.setattr(grid, "WITHOUT_DEVICE", chip.multiprocessors)
        active_driver.set_active(fake)
        forget_sizes(grid)
        try:
            yield fake
        finally:
            active_driver._active = before
            forget_sizes(grid)


def forget_sizes(module: ModuleType) -> None:
    """Clear cached results, which depend on the chip."""
    for value in vars(module).values():
        if hasattr(value, "cache_clear"):
            value.cache_clear()
