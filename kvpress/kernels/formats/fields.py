# SPDX-License-Identifier: Apache-2.0
"""Fields of the plain C structures that compiled kernels take, eight bytes each (``cpu/problem.h``)."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import TypeAlias

import torch
from torch import Tensor

Field: TypeAlias = Tensor | float | None
"""Value of a field: a tensor for its address, None for a null pointer or zero."""

DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Number of each dtype, as enumerated in ``cpu/problem.h``."""

_ADDRESS = struct.Struct("=q")
_NUMBERS = frozenset({int, float, bool})


def packed(fields: Sequence[Field]) -> bytes:
    """Return the bytes of a C struct: tensors become addresses, None becomes 0, int and bool an int64, float a double."""
    # `type(field) in` is faster than `isinstance`, and this runs in every layer of every decode step.
    values = [
        field if type(field) in _NUMBERS else 0 if field is None else field.data_ptr()  # type: ignore[union-attr]
        for field in fields
    ]
    layout = "".join(["d" if type(value) is float else "q" for value in values])
    return struct.pack(layout, *values)


class CallTemplate:
    """Packed C struct in which some tensors change from call to call."""

    def __init__(self, fields: Sequence[Field], varying: Sequence[Tensor]) -> None:
        """Pack `fields`; those that are one of the `varying` tensors are replaced at every call."""
        self._bytes = packed(fields)
        self._kept = [field for field in fields if not any(field is tensor for tensor in varying)]
        """Fields that do not vary, whose tensors must stay alive."""
        self._offsets = [8 * next(i for i, field in enumerate(fields) if field is tensor) for tensor in varying]

    def filled(self, *tensors: Tensor) -> bytes:
        """Return the struct with these tensors in the place of the varying ones, in the same order."""
        structure = bytearray(self._bytes)
        for offset, tensor in zip(self._offsets, tensors, strict=True):
            _ADDRESS.pack_into(structure, offset, tensor.data_ptr())
        return bytes(structure)
