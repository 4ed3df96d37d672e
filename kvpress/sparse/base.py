"""What a selector is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from kvpress.attention import Logits, Partial
from kvpress.cache.segment import Segment
from kvpress.cache.store import KVStore
from kvpress.quant.base import Codec


class Selector(ABC):
    """Chooses, for every decode step, which pairs of the sealed segments are read.

    The dense tail and the open window are always read: how many pairs of a row they hold depends on its neighbours in the
    batch, so what is chosen must not. `sealing` says in what tiles pairs are sealed
    where no codec does it, so that they can be indexed.
    """

    sealing: Codec

    @abstractmethod
    def reads(self, layer: int) -> bool:
        """Whether this selector is used in the given layer."""

    @abstractmethod
    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        """Bytes of the index over `pairs` sealed pairs of one head."""

    @abstractmethod
    def prepare(self, segment: Segment) -> None:
        """Index a sealed segment, so that its memory shows and no query waits for it."""

    @abstractmethod
    def attend(self, queries: Tensor, logits: Logits, store: KVStore) -> list[Partial]:
        """Attend from `queries [N, G, D]` to the chosen pairs of `store.segments`."""
