"""When the compiled operators are the right choice."""

from __future__ import annotations

from torch import Tensor

from kvpress.kernels.cpu import launch
from kvpress.kernels.triton import device

MOST_ROWS = 64
"""Query rows per stream past which a matrix product on decoded blocks is faster than a decode kernel."""


def serves(queries: Tensor, storage: Tensor) -> bool:
    """Whether a compiled operator should attend from `queries [N, M, D]` to pairs kept in `storage`."""
    return queries.shape[1] <= MOST_ROWS and (launch.available(storage) or device.available(storage))
