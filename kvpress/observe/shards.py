# SPDX-License-Identifier: Apache-2.0
"""Heads of a model on several ranks (tensor parallel): which ones a rank holds, and exchange of numbers between ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(eq=False)
class Shards:
    """Ranks among which the heads of every layer are divided in equal, consecutive parts.

    All ranks run the same passes, so each of them calls the functions below in the same order.
    """

    rank: int = 0
    """Number of this rank."""
    count: int = 1
    """Number of ranks; 1 without tensor parallel."""
    group: Any = field(default=None, repr=False)
    """Process group of the ranks; None without tensor parallel."""
    received: int = 0
    """Bytes of tensors received from other ranks so far."""

    @property
    def is_divided(self) -> bool:
        """Whether this rank holds only some of the heads."""
        return self.count > 1

    def heads(self, local: slice, held: int) -> slice:
        """Return the heads of the model that are the heads `local` of the `held` ones of this rank."""
        start, stop, _ = local.indices(held)
        return slice(self.rank * held + start, self.rank * held + stop)

    def part(self, tensor: Tensor, dim: int = 0) -> Tensor:
        """Return the part of this rank of a tensor whose axis `dim` covers the heads of the model, in equal parts."""
        return tensor.chunk(self.count, dim)[self.rank] if self.is_divided else tensor

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """Return the tensors of all ranks, which have the shape of this one, in the order of ranks."""
        if not self.is_divided:
            return [tensor]
        tensor = tensor.contiguous()
        tensors = [torch.empty_like(tensor) for _ in range(self.count)]
        dist.all_gather(tensors, tensor, group=self.group)
        self.received += (self.count - 1) * tensor.nbytes
        return tensors

    def gather_objects(self, item: Any) -> list[Any]:
        """Return the objects of all ranks, in the order of ranks."""
        if not self.is_divided:
            return [item]
        items: list[Any] = [None] * self.count
        dist.all_gather_object(items, item, group=self.group)
        return items

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum of the tensors of all ranks, added in the order of ranks."""
        total, *others = self.gather(tensor)
        for other in others:
            total = total + other
        return total

    def mean(self, tensor: Tensor) -> Tensor:
        """Return the mean of the tensors of all ranks."""
        return self.sum(tensor) / self.count if self.is_divided else tensor


UNDIVIDED = Shards()
"""Shards of a model that is not divided: one rank with all heads."""
