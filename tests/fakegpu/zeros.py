# SPDX-License-Identifier: Apache-2.0
"""Allocated memory holds zeros, so that a model runs on kernels that compute nothing."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

ALLOCATING = {
    torch.ops.aten.empty.memory_format,
    torch.ops.aten.empty_strided.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_empty.default,
    torch.ops.aten.new_empty_strided.default,
}


class ZeroFilled(TorchDispatchMode):
    """Fills tensors that are allocated meanwhile with zeros."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in ALLOCATING else result
