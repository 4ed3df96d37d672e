# SPDX-License-Identifier: Apache-2.0
"""Attention to sealed pairs: by an operator that reads codes, or block by block on decoded pairs."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial, attend, merge, query_blocks
from kvpress.cache.layout import Layout

RowsT = TypeVar("RowsT", bound="kernels.Rows | None")

BLOCK_ROWS = 4096
"""Rows decoded at a time where a packed format is read without a fused kernel."""
GPU_BLOCK_ROWS = 32 * BLOCK_ROWS
"""Rows encoded or decoded at a time on a GPU, whose kernels are small otherwise."""


def block_rows(device: torch.device) -> int:
    """Return the rows that are encoded or decoded at a time."""
    return BLOCK_ROWS if device.type == "cpu" else GPU_BLOCK_ROWS


@dataclass
class DenseBlock:
    """Dense pairs of some streams."""

    streams: slice
    """Streams of the pairs."""
    rows: slice
    """Flat rows of the pairs."""
    keys: Tensor
    """Keys `[S, n, D]`."""
    values: Tensor
    """Values `[S, n, Dv]`."""


class Attended(ABC):
    """Base class of segments for attention: by operators where possible, else on decoded rows."""

    layout: Layout

    @property
    @abstractmethod
    def log_weight(self) -> Tensor | None:
        """Log-weights [total], added to the logits; None for zeros."""

    @property
    @abstractmethod
    def value_dim(self) -> int:
        """Head dim of the values."""

    @abstractmethod
    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        """Return dense `(keys [n, D], values [n, Dv])` of flat rows, in the dtype of the model."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "attend" in vars(cls) and "as_parts" not in vars(cls):
            cls.as_parts = Attended._no_parts  # type: ignore[method-assign]
        if "attend_rows" in vars(cls) and "chosen_part" not in vars(cls):
            cls.chosen_part = Attended._no_chosen_part  # type: ignore[method-assign]

    def _no_parts(self, queries: Tensor, logits: Logits) -> list[kernels.Part] | None:
        del queries, logits
        return None

    def _no_chosen_part(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> kernels.Part | None:
        del queries, logits, rows, counts
        return None

    def __setattr__(self, name: str, value: Any) -> None:
        vars(self)["_read_as"] = None  # it may refer to the old tensors
        super().__setattr__(name, value)

    def blocks(self) -> Iterator[DenseBlock]:
        """Yield dense blocks that cover all pairs, each small enough to avoid a dense copy."""
        layout = self.layout
        for n in range(layout.streams):
            rows = layout.rows(n)
            for start in range(rows.start, rows.stop, BLOCK_ROWS):
                part = slice(start, min(start + BLOCK_ROWS, rows.stop))
                keys, values = self.read(part)
                yield DenseBlock(slice(n, n + 1), part, keys[None], values[None])

    @property
    def computes_operands(self) -> bool:
        """Whether an operand has temporary tensors besides stored ones, which must be freed after each call."""
        return False

    def operand(self) -> kernels.Rows | None:
        """Return the pairs as operand of operators; None where they can only be read block by block."""
        return None

    def as_rows(self) -> kernels.Rows | None:
        """Return `operand`, cached for the next token."""
        return self._keep("operand", self.operand)

    def _keep(self, name: str, make: Callable[[], RowsT]) -> RowsT:
        """Return `make()`, cached until an attribute of the segment is set, so that operands are checked once, not per token.

        Not cached where `computes_operands`, since a cached operand would keep its temporary tensors in memory.
        """
        if self.computes_operands:
            return make()
        kept = self._kept()
        if name not in kept:
            made = make()
            kept = self._kept()  # looked up again, since `make` may have grown the tables
            kept[name] = made
        rows: RowsT = kept[name]
        return rows

    def _kept(self) -> dict[str, Any]:
        """Return the cache of `_keep` by name, emptied if the tables have changed."""
        read_as = vars(self).get("_read_as")
        if read_as is None or read_as[0] is not self._tables():
            read_as = vars(self)["_read_as"] = self._tables(), {}
        return read_as[1]

    def drop_stale_operands(self) -> None:
        """Free cached operands that refer to tables which have been replaced by larger ones."""
        read_as = vars(self).get("_read_as")
        if read_as is not None and read_as[0] is not self._tables():
            vars(self)["_read_as"] = None
        for inner in vars(self).values():
            if isinstance(inner, Attended):
                inner.drop_stale_operands()

    def _tables(self) -> Tensor | None:
        """Return the tensor of an operand that can change without setting an attribute of the segment."""
        return None

    def serves(self, queries: Tensor, logits: Logits) -> bool:
        """Return whether an operator can attend from these queries, without decoded copies."""
        return self._served(queries, logits) is not None

    def _served(self, queries: Tensor, logits: Logits) -> kernels.Rows | None:
        """Return the operand if an operator should attend from these queries, else None."""
        rows = self.as_rows()
        if logits.softcap is not None and rows is not None and rows.key_basis is not None:
            rows = rows if rows.key_basis.centre is None else None
        stored = None if rows is None else rows.keys.tensors()[0]
        return rows if stored is not None and kernels.serves(queries, stored) else None

    def _part(self, rows: kernels.Rows) -> kernels.Part:
        """Return all pairs as one part for an operator, cached as long as its rows are."""
        kept = self._kept()
        lasting = kept.get("operand") is rows
        part: kernels.Part | None = kept.get("part") if lasting else None
        if part is None:
            part = kernels.Part(rows, self._ranges(rows.keys.storage))
            if lasting:
                kept["part"] = part
        return part

    def as_parts(self, queries: Tensor, logits: Logits) -> list[kernels.Part] | None:
        """Return the parts for an operator that computes `attend` together with other segments; None without one."""
        rows = self._served(queries, logits)
        return None if rows is None else [self._part(rows)]

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        """Attend from `queries [N, M, D]` to all pairs; `hidden [total]` marks pairs to leave out.

        A format that overrides this must override `as_parts` to match; otherwise it is computed in a separate call.
        """
        if hidden is None and (rows := self._served(queries, logits)) is not None:
            return kernels.decode_parts(queries, [self._part(rows)], options_of(logits))
        parts: dict[int, list[Partial]] = {}
        for block in self.blocks():
            visible = None if hidden is None else ~hidden[block.rows].view(len(block.keys), 1, -1)
            block_queries, weight = queries[block.streams], self._weight_of(block)
            partial = attend(block_queries, block.keys, block.values, logits, visible, weight)
            parts.setdefault(block.streams.start, []).append(partial)
        merged = {start: merge(partials) for start, partials in parts.items()}
        if 0 in merged and len(merged[0][0]) == len(queries):
            return merged[0]
        out = torch.zeros(*queries.shape[:2], self.value_dim, device=queries.device)
        lse = torch.full(out.shape[:2], -torch.inf, device=queries.device)
        for start, (stream_out, stream_lse) in merged.items():
            out[start], lse[start] = stream_out[0], stream_lse[0]
        return out, lse

    def _weight_of(self, block: DenseBlock) -> Tensor | None:
        weight = self.log_weight
        return None if weight is None else weight[block.rows].view(block.keys.shape[:2])

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        """Attend to selected pairs only: the first `counts[i]` of the flat `rows [q * N, K]`, int64, for query stream i.

        The pairs belong to stream `streams[i]`, int64, or to stream `i % N` without `streams`. A format that overrides this
        must override `chosen_part` to match; otherwise it is computed in a separate call.
        """
        if (operand := self._served(queries, logits)) is not None:
            if streams is None and len(rows) != self.layout.streams:
                streams = torch.arange(len(rows), device=rows.device) % self.layout.streams
            return kernels.decode(queries, operand, kernels.Listed(rows, counts, streams), options_of(logits))
        keys, values = self.read(rows.flatten())
        shape, weight = (*rows.shape, -1), self.log_weight
        visible = torch.arange(rows.shape[1], device=rows.device) < counts[:, None]
        weight = None if weight is None else weight[rows]
        return attend(queries, keys.view(shape), values.view(shape), logits, visible[:, None, :], weight)

    def chosen_part(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> kernels.Part | None:
        """Return the part for an operator that computes `attend_rows` together with other segments; None without one.

        There is one query stream for each stream: `queries [N, M, D]`, `rows [N, K]`.
        """
        operand = self._served(queries, logits)
        return None if operand is None else kernels.Part(operand, kernels.Listed(rows, counts))

    def mass(self, queries: Tensor, logits: Logits, lse: Tensor) -> Tensor:
        """Return the attention of every pair, summed over query rows, float32 [total]; `lse [N, M]` covers all stored pairs."""
        rows = self.as_rows()
        dense = rows is not None and rows.is_plain and isinstance(rows.keys, kernels.Dense)
        if dense and kernels.available(rows.keys.storage):  # type: ignore[union-attr]
            return kernels.column_mass(queries, rows, self._ranges(queries), options_of(logits), lse=lse)  # type: ignore[arg-type]
        received = torch.zeros(self.layout.total, device=queries.device)
        for block in self.blocks():
            block_queries, total, weight = queries[block.streams], lse[block.streams, :, None], self._weight_of(block)
            for query_rows in query_blocks(block_queries, block.keys):
                shares = torch.exp(logits(block_queries[:, query_rows], block.keys, weight) - total[:, query_rows])
                received[block.rows] += shares.sum(dim=1).flatten()
        return received

    def _ranges(self, like: Tensor) -> kernels.Ranges:
        return kernels.Ranges(*self.layout.on(like.device), longest=self.layout.longest)


def options_of(logits: Logits, causal: int = 0) -> kernels.Options:
    """Return the options of operators for these logits, and for a causal mask of so many new tokens."""
    return _options(logits.scale, logits.softcap, causal)


@functools.lru_cache(maxsize=64)
def _options(scale: float, softcap: float | None, causal: int) -> kernels.Options:
    return kernels.Options(scale, softcap, causal)
