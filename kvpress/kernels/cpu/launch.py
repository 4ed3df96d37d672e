# SPDX-License-Identifier: Apache-2.0
"""Call the compiled kernels at the best instruction-set level."""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from kvpress import env
from kvpress.kernels.cpu import build
from kvpress.kernels.cpu.libraries import BuildError
from kvpress.kernels.formats.fields import Field, packed

logger = logging.getLogger("kvpress")


class Packable(Protocol):
    """Object with a packed C struct."""

    @property
    def structure(self) -> bytes:
        """Bytes of the struct."""


@functools.cache
def level() -> str | None:
    """Return the instruction-set level that runs, see `build.best_level`; None, with one warning, if none can be built."""
    try:
        return build.best_level()
    except BuildError as error:
        logger.warning(
            "CPU kernels are not available, decoding falls back to plain torch: %s; install a C++ compiler or a wheel that "
            "brings the kernels",
            error,
        )
        return None


def available(tensor: Tensor) -> bool:
    """Whether the C++ kernels can run on the device of a tensor."""
    return tensor.is_cpu and _can_run()


def runs_on(device: torch.device) -> bool:
    """Whether the C++ kernels can run on a device; the first call in a process loads or compiles them."""
    return device.type == "cpu" and _can_run()


def _can_run() -> bool:
    return env.cpu_kernels_enabled() and level() is not None


def run(source: str, entry: str, *fields: Field, stored: Packable | None = None, level: str | None = None) -> int:
    """Call an entry point that takes one C structure of eight-byte fields, and return its result.

    Args:
        source: file that defines the entry point.
        entry: name of the entry point.
        fields: fields of the structure in order, see `formats.fields.packed`.
        stored: object whose packed struct follows these fields.
        level: instruction-set level; the fastest one by default.
    """
    return call(source, entry, packed(fields) + (b"" if stored is None else stored.structure), level)


def call(source: str, entry: str, structure: bytes, level: str | None = None) -> int:
    """Call an entry point with a packed structure; other arguments and result as in `run`."""
    result: int = _function(source, entry, level or build.best_level())(structure)
    return result


@functools.cache
def _function(source: str, entry: str, level: str) -> Callable[[bytes], int]:
    function: Callable[[bytes], int] = getattr(build.load(level, source), entry)
    return function


def address(source: str, entry: str, level: str | None = None) -> int:
    """Return the address of an entry point, for one that calls others; arguments as in `run`."""
    return _address(source, entry, level or build.best_level())


@functools.cache
def _address(source: str, entry: str, level: str) -> int:
    pointer = ctypes.cast(getattr(build.load(level, source), entry), ctypes.c_void_p).value
    assert pointer is not None  # noqa: S101 - for type checkers
    return pointer
