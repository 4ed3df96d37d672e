# SPDX-License-Identifier: Apache-2.0
"""Base class of patterns: sparse attention of the queries of a prompt to blocks of keys."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.attention import Logits, Partial
from kvpress.cache.window import RealTokens, Window
from kvpress.kernels import Tiles, block_prefill
from kvpress.observe.call import LayerCall

FEWEST_BLOCKS = 2
"""Prompts of up to this many blocks get full attention."""


@dataclass(frozen=True)
class PromptTensors:
    """Queries, keys and values of rows with equally many tokens, without padding."""

    queries: Tensor
    """Queries `[b, Hq, Q, D]` of the last Q of T tokens; query heads of a GQA group are adjacent."""
    keys: Tensor
    """Unsealed keys `[b, H, T, D]`."""
    values: Tensor
    """Unsealed values `[b, H, T, Dv]`."""
    logits: Logits
    """Scale and softcap of the logits."""
    layer: int = 0
    """Index among attention layers."""
    rows: tuple[int, ...] = ()
    """Rows of the batch."""
    shared: dict[str, Any] = field(default_factory=dict)
    """State that all layers of a cache share."""
    final: bool = False
    """The layer is the last one."""
    call: LayerCall | None = None
    """Call of the layer."""
    at: Tensor | None = None
    """Columns `[T]` of the tokens in the window of `call`."""

    @property
    def new(self) -> int:
        """Number of query tokens Q."""
        return self.queries.shape[2]

    @property
    def total(self) -> int:
        """Number of key tokens T."""
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """Number of query heads per KV head, G."""
        return self.queries.shape[1] // self.keys.shape[1]

    def shape(self, block: int) -> tuple[int, int, int, int]:
        """Return the shape of the tiles: rows, query heads, query blocks, key blocks."""
        return (*self.queries.shape[:2], -(-self.new // block), -(-self.total // block))

    def attend(self, tiles: Tiles) -> Partial:
        """Return the attention over the tiles: out `[b, Hq, Q, Dv]` and log-sum-exp `[b, Hq, Q]`, both float32."""
        queries = self.queries
        return block_prefill(
            queries, self.keys.to(queries), self.values.to(queries), tiles,
            scale=self.logits.scale, softcap=self.logits.softcap,
        )  # fmt: skip


class Pattern(ABC):
    """Chooses the tiles of `block` queries by `block` keys whose attention is computed while a prompt is read.

    It replaces the model's attention in passes of several tokens. Sealed pairs, such as those of earlier turns, are read in
    full and merged with the result. Blocks of a row begin at its first real token, so a padded row gets the result of
    the row alone. Prompts of up to two blocks get full attention.
    """

    block: int = 64
    """Tokens per block."""

    @abstractmethod
    def tiles(self, prompt: PromptTensors) -> Tiles:
        """Return the blocks of keys, and the single keys, to read; tiles on the diagonal are always read."""

    def read(self, prompt: PromptTensors) -> Partial:
        """Attend from the queries of a prompt of more than two blocks: out `[b, Hq, Q, Dv]` and log-sum-exp `[b, Hq, Q]`."""
        return prompt.attend(self.tiles(prompt))

    def attend(self, call: LayerCall, window: Window, mask: RealTokens | None) -> Partial:
        """Attend from the queries of a call to the tokens of a window: out `[N, G * Q, Dv]` and log-sum-exp `[N, G * Q]`.

        The log-sum-exp is also stored in `call.window_lse`, from which observers compute weights over all pairs.
        """
        queries, keys, values = call.queries, window.filled_keys, window.filled_values
        (batch, heads, new, _), total = queries.shape, window.length
        out = queries.new_zeros(batch, heads, new, values.shape[-1], dtype=torch.float32)
        lse = queries.new_full((batch, heads, new), -torch.inf, dtype=torch.float32)
        for rows, kept in _rows_by_columns(window, mask, batch):
            query_columns = kept[kept >= total - new] - (total - new)
            if len(query_columns) == 0:
                continue
            prompt = PromptTensors(
                _take(queries, rows, query_columns), _take(keys, rows, kept), _take(values, rows, kept), call.logits,
                call.layer.index, tuple(rows), call.tokens.shared, call.layer.depth + 1 == call.layer.depths, call, kept,
            )  # fmt: skip
            is_short = prompt.total <= FEWEST_BLOCKS * self.block
            partial = prompt.attend(everything(prompt, self.block)) if is_short else self.read(prompt)
            if len(rows) == batch and len(query_columns) == new:
                out, lse = partial
                continue
            at = torch.tensor(rows, device=out.device)[:, None], query_columns.to(out.device)
            out.transpose(1, 2)[at] = partial[0].transpose(1, 2)
            lse.transpose(1, 2)[at] = partial[1].transpose(1, 2)
        streams = batch * call.store.heads
        call.window_lse = lse.reshape(streams, -1)
        return out.reshape(streams, -1, out.shape[-1]), call.window_lse


def everything(prompt: PromptTensors, block: int) -> Tiles:
    """Return tiles that cover the whole prompt."""
    return Tiles(torch.ones(prompt.shape(block), dtype=torch.bool, device=prompt.keys.device), block)


def _rows_by_columns(window: Window, mask: RealTokens | None, batch: int) -> list[tuple[list[int], Tensor]]:
    """Return groups of rows whose real tokens are in the same columns of a window, with these columns."""
    if mask is None:
        return [(list(range(batch)), torch.arange(window.length))]
    real = mask.real[:, window.first : window.first + window.length].cpu()
    groups: dict[bytes, list[int]] = {}
    for row in range(batch):
        groups.setdefault(real[row].numpy().tobytes(), []).append(row)
    return [(rows, real[rows[0]].nonzero().flatten()) for rows in groups.values()]


def _take(tensor: Tensor, rows: list[int], columns: Tensor) -> Tensor:
    """Return some rows and columns of `[B, heads, n, D]`; a view if they are all, or the newest columns of one row."""
    if len(rows) < tensor.shape[0]:
        tensor = tensor[rows[0] : rows[0] + 1] if len(rows) == 1 else tensor[rows]
    first = int(columns[0])
    if len(columns) == tensor.shape[2] - first:
        return tensor[:, :, first:]
    return tensor[:, :, columns.to(tensor.device)]
