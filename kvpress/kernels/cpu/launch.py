# SPDX-License-Identifier: Apache-2.0
"""Call the compiled kernels: pack the fields of a C structure, and run the best instruction-set level."""

from __future__ import annotations

import functools
import logging
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from kvpress import env
from kvpress.kernels.cpu import build
from kvpress.kernels.formats.dense import Field

logger = logging.getLogger("kvpress")


@functools.cache
def level() -> str | None:
    """The instruction-set level that runs here, see `build.best_level`; None, with one warning, if none can be built."""
    try:
        return build.best_level()
    except build.BuildError as error:
        logger.warning(
            "CPU kernels are not available, decoding falls back to plain torch: %s; install a C++ compiler or a wheel that "
            "brings the kernels",
            error,
        )
        return None


def available(tensor: Tensor) -> bool:
    """Whether the kernels can run on this tensor's device."""
    return runs_on(tensor.device)


def runs_on(device: torch.device) -> bool:
    """Whether the kernels can run on a device. They are found, loaded or compiled when this is first asked in a process."""
    return device.type == "cpu" and env.cpu_kernels_enabled() and level() is not None


def run(source: str, entry: str, *fields: Field, level: str | None = None) -> int:
    """Call an entry point that takes one C structure of eight-byte fields, and return its result.

    Args:
        source: file that defines the entry point.
        entry: its name.
        fields: the structure in order: tensors become addresses, None a null, int an int64, float a double.
        level: instruction-set level; the best one by default.
    """
    kernels = build.load(level or build.best_level(), source)
    result: int = kernels[entry](packed(fields))
    return result


def packed(fields: Sequence[Field]) -> bytes:
    """Pack the fields of a structure as `run` takes them."""
    # Numbers are asked for before tensors, whose class takes much longer to check: this runs in every layer of every token.
    values = [0 if field is None else field if isinstance(field, int | float) else field.data_ptr() for field in fields]
    layout = "".join(["d" if isinstance(value, float) else "q" for value in values])
    return struct.pack(layout, *values)
