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
