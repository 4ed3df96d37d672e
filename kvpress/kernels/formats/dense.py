# SPDX-License-Identifier: Apache-2.0
"""Keys or values as the model computed them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.formats.fields import DTYPES, Field


@dataclass(frozen=True)
class Dense:
    """Keys or values of a cache in the model's dtype."""

    data: Tensor
    """Rows [R, D]; float32, bfloat16 or float16. Rows may be strided, elements of a row may not."""

    name: ClassVar[str] = "dense"

    @property
    def storage(self) -> Tensor:
        """Tensor of R rows; its device runs the kernels."""
        return self.data

    @property
    def channels(self) -> int:
        """Channels D of a row."""
        return self.data.shape[1]

    def read(self, rows: Tensor, stream: int = 0) -> Tensor:
        """Return the rows with numbers [S], float32 [S, D]."""
        return self.data[rows].float()

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Return all tensors."""
        return (self.data,)

    def check(self, name: str, rows: int, channels: int | None = None) -> None:
        """Refuse data of another shape or dtype; `channels` is the number of channels of the queries, None for any."""
        checks.shape(name, self.data, (rows, "Dv" if channels is None else channels), *checks.FLOATS)
        checks.rows_layout(name, self.data)

    def check_stored(self, name: str, listed: list[Tensor], streams: list[int]) -> None:
        """Accept all streams: dense rows refer to nothing else."""

    def fields(self) -> tuple[Field, ...]:
        """Return the fields of ``Rows`` in cpu/problem.h."""
        data = self.data
        return (data, None, None, None, data.shape[1], data.stride(0), DTYPES[data.dtype], *_UNUSED)


_UNUSED = (0,) * 19
