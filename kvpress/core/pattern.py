# SPDX-License-Identifier: Apache-2.0
"""What a pattern is: which blocks of keys the queries of a prompt read."""

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
"""A prompt of up to so many blocks is read whole: there is nothing to choose from."""


@dataclass(frozen=True)
class Prompt:
    """What is read of some rows that hold equally many tokens, without their padding.

    `queries [b, Hq, Q, D]` are those of the last Q of T tokens, `keys [b, H, T, D]` and `values [b, H, T, Dv]` those that are
    not sealed; query heads of a group are next to each other. `layer` counts attention layers, `rows` are those of the batch.
    `shared` is state that all layers of a cache have in common; no layer follows the `final` one. The tokens stand in the
    columns `at [T]` of the window of `call`.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    logits: Logits
    layer: int = 0
    rows: tuple[int, ...] = ()
    shared: dict[str, Any] = field(default_factory=dict)
    final: bool = False
    call: LayerCall | None = None
    at: Tensor | None = None

    @property
    def new(self) -> int:
        """Query tokens Q."""
        return self.queries.shape[2]

    @property
    def total(self) -> int:
        """Key tokens T."""
        return self.keys.shape[2]

    @property
    def group(self) -> int:
        """Query heads of a kv head."""
        return self.queries.shape[1] // self.keys.shape[1]

    def shape(self, block: int) -> tuple[int, int, int, int]:
        """Shape of the tiles: rows, query heads, query blocks, key blocks."""
        return (*self.queries.shape[:2], -(-self.new // block), -(-self.total // block))

    def attend(self, tiles: Tiles) -> Partial:
        """Return what the queries read of the tiles, out `[b, Hq, Q, Dv]` and log-sum-exp `[b, Hq, Q]`, both float32."""
        queries = self.queries
        return block_prefill(
            queries, self.keys.to(queries), self.values.to(queries), tiles,
            scale=self.logits.scale, softcap=self.logits.softcap,
        )  # fmt: skip


class Pattern(ABC):
    """Chooses, while a prompt is read, which tiles of `block` queries by `block` keys attention computes.

    It takes the place of the model's own attention where several tokens come at once. What is sealed already, such as the
    compressed pairs of earlier turns, is read as without a pattern, and merged. A row is read as that row alone would be:
    its blocks begin at its first real token. Prompts of up to two blocks are read whole.
    """

    block: int = 64

    @abstractmethod
    def tiles(self, prompt: Prompt) -> Tiles:
        """Return which blocks of keys, and which single ones, are read; tiles that hold a query itself always are."""

    def read(self, prompt: Prompt) -> Partial:
        """Attend from the queries of a prompt of more than two blocks: out `[b, Hq, Q, Dv]` and log-sum-exp `[b, Hq, Q]`."""
        return prompt.attend(self.tiles(prompt))

    def attend(self, call: LayerCall, window: Window, mask: RealTokens | None) -> Partial:
        """Attend from the queries of a call to the tokens of a window: out `[N, G * Q, Dv]` and log-sum-exp `[N, G * Q]`.

        The call is told the latter too: by it observers that need attention over all pairs know what was left out.
        """
        queries, keys, values = call.queries, window.filled_keys, window.filled_values
        (batch, heads, new, _), total = queries.shape, window.length
        out = queries.new_zeros(batch, heads, new, values.shape[-1], dtype=torch.float32)
        lse = queries.new_full((batch, heads, new), -torch.inf, dtype=torch.float32)
        for rows, kept in _alike(window, mask, batch):
            asked = kept[kept >= total - new] - (total - new)
            if len(asked) == 0:
                continue
            prompt = Prompt(
                _of(queries, rows, asked), _of(keys, rows, kept), _of(values, rows, kept), call.logits, call.layer.index,
                tuple(rows), call.tokens.shared, call.layer.depth + 1 == call.layer.depths, call, kept,
            )  # fmt: skip
            whole = prompt.total <= FEWEST_BLOCKS * self.block
            found = prompt.attend(everything(prompt, self.block)) if whole else self.read(prompt)
            if len(rows) == batch and len(asked) == new:
                out, lse = found
                continue
            at = torch.tensor(rows, device=out.device)[:, None], asked.to(out.device)
            out.transpose(1, 2)[at] = found[0].transpose(1, 2)
            lse.transpose(1, 2)[at] = found[1].transpose(1, 2)
        streams = batch * call.store.heads
        call.window_lse = lse.reshape(streams, -1)
        return out.reshape(streams, -1, out.shape[-1]), call.window_lse


def everything(prompt: Prompt, block: int) -> Tiles:
    """Return all tiles."""
    return Tiles(torch.ones(prompt.shape(block), dtype=torch.bool, device=prompt.keys.device), block)


def _alike(window: Window, mask: RealTokens | None, batch: int) -> list[tuple[list[int], Tensor]]:
    """Rows whose real tokens lie in the same places of a window, and these places."""
    if mask is None:
        return [(list(range(batch)), torch.arange(window.length))]
    real = mask.real[:, window.first : window.first + window.length].cpu()
    found: dict[bytes, list[int]] = {}
    for row in range(batch):
        found.setdefault(real[row].numpy().tobytes(), []).append(row)
    return [(rows, real[rows[0]].nonzero().flatten()) for rows in found.values()]


def _of(tensor: Tensor, rows: list[int], places: Tensor) -> Tensor:
    """Take some rows and tokens of `[B, heads, n, D]`; a view where that is all of them, or the newest of one row."""
    if len(rows) < tensor.shape[0]:
        tensor = tensor[rows[0] : rows[0] + 1] if len(rows) == 1 else tensor[rows]
    first = int(places[0])
    if len(places) == tensor.shape[2] - first:
        return tensor[:, :, first:]
    return tensor[:, :, places.to(tensor.device)]
