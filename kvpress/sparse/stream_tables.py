# SPDX-License-Identifier: Apache-2.0
"""Tables that a selector fits to the sealed keys of each stream, such as directions or centroids."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.segment import read_keys
from kvpress.cache.storage import Held, per_stream
from kvpress.cache.store import KVStore


@dataclass(eq=False)
class StreamTables(Held):
    """Tables of every stream that has sealed pairs."""

    tables: Annotated[Tensor, per_stream("codec state")]
    """Table of each stream, `[N, ...]`; zeros for a stream without pairs."""
    fitted_pairs: tuple[int, ...]
    """Number of sealed pairs of each stream when its table was fitted; 0 without a table."""
    heads: int
    """KV heads H, the streams of a row."""

    def select_rows(self, rows: Tensor) -> None:
        """Keep the batch rows `rows`, in that order."""
        streams = [row * self.heads + head for row in rows.tolist() for head in range(self.heads)]
        self.tables = self.tables[streams]
        self.fitted_pairs = tuple(self.fitted_pairs[n] for n in streams)

    def joined(self, states: Sequence[StreamTables | None], rows: Sequence[int]) -> StreamTables:
        """Return the tables of the rows of all `states`; None stands for the given number of rows without any."""
        without = [self.tables.new_zeros(count * self.heads, *self.tables.shape[1:]) for count in rows]
        tables = [empty if state is None else state.tables for state, empty in zip(states, without, strict=True)]
        fitted = [
            (0,) * len(empty) if state is None else state.fitted_pairs
            for state, empty in zip(states, without, strict=True)
        ]
        return StreamTables(torch.cat(tables), tuple(count for row in fitted for count in row), self.heads)


def fitted_tables(
    store: KVStore,
    name: str,
    shape: tuple[int, ...],
    fit: Callable[[int, int], Tensor],
    enough: int = 1,
    dtype: torch.dtype = torch.float32,
) -> StreamTables:
    """Return the tables of every stream of a layer, fitted when its first pairs are sealed.

    Args:
        store: layer, whose `codec_state` keeps the tables under `name`.
        name: name of the tables and of their settings.
        shape: shape of a table.
        fit: returns the table of a stream with so many sealed pairs.
        enough: number of pairs from which on a table never changes; tables of fewer pairs are fitted again to more pairs.
        dtype: type of the stored tables.
    """
    state: StreamTables | None = store.codec_state.get(name)
    if state is not None and min(state.fitted_pairs) >= enough:
        return state
    counts = [sum(lengths) for lengths in zip(*(segment.layout.lengths for segment in store.segments), strict=True)]
    if state is None:
        zeros = torch.zeros(len(counts), *shape, dtype=dtype, device=store.segments[0].device)
        state = StreamTables(zeros, (0,) * len(counts), store.heads)
    fitted = state.fitted_pairs
    due = [n for n, count in enumerate(counts) if fitted[n] < min(count, enough)]
    if due:
        fits = torch.stack([fit(n, counts[n]) for n in due]).to(state.tables)
        tables = state.tables.index_copy(0, torch.tensor(due, device=fits.device), fits)
        fitted = tuple(counts[n] if n in due else count for n, count in enumerate(fitted))
        state = StreamTables(tables, fitted, store.heads)
    store.codec_state[name] = state
    return state


def spaced_keys(store: KVStore, stream: int, count: int, limit: int, first: int = 0) -> Tensor:
    """Return at most `limit` evenly spaced keys `[n, D]` of the `count` sealed pairs of a stream, from rank `first` on."""
    spaced = min(limit, count - first)
    ranks = first + torch.arange(spaced) * (count - first) // spaced
    return read_keys(store.segments, torch.tensor([stream]), ranks[None])[0]
