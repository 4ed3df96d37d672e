"""Rows stored in another basis: undone on queries and outputs, so that no kernel needs to know of it.

    key or value of stream n = (row * column[n]) @ rotation.T

with column [N, D] and rotation [D, D] orthonormal: what was stored is the key or value times rotation, over column.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress.kernels import checks


def check(name: str, q: Tensor, channels: int, column: Tensor | None, rotation: Tensor | None) -> None:
    """Refuse columns and rotations that do not fit rows of `channels`."""
    if column is not None:
        checks.shape(f"{name}_column", column, (q.shape[0], channels), torch.float32)
    if rotation is not None:
        checks.shape(f"{name}_rotation", rotation, (channels, channels), torch.float32)
    checks.same_device(q, column, rotation)


def to_stored(q: Tensor, column: Tensor | None, rotation: Tensor | None) -> Tensor:
    """Turn queries [N, M, D] so that their products with stored rows are those with the keys."""
    if rotation is not None:
        q = q.float() @ rotation
    return q if column is None else q * column[:, None]


def from_stored(out: Tensor, column: Tensor | None, rotation: Tensor | None) -> Tensor:
    """Turn weighted sums of stored rows [N, M, Dv] into those of the values."""
    if column is not None:
        out = out * column[:, None]
    return out if rotation is None else out @ rotation.T
