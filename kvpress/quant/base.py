"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from kvpress.cache.segment import DenseSegment, Segment


class Codec(ABC):
    """Turns sealed dense pairs into a segment of another storage format.

    Pairs are encoded once, oldest first, in tiles of `group` pairs per stream; the newest `residual` pairs of a stream
    always stay dense.
    """

    group: int
    residual: int

    @abstractmethod
    def encode(self, segment: DenseSegment) -> Segment:
        """Return the encoded pairs of `segment`, whose stream lengths are multiples of `group`; same rows, same order."""

    @abstractmethod
    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        """Bytes per encoded pair of head dim `dim`, scales included."""

    def stores(self, layer: int) -> bool:
        """Whether this codec stores the given layer."""
        del layer
        return True


class DenseCodec(Codec):
    """Seals pairs as they are, so that a selector can index them."""

    def __init__(self, group: int, residual: int) -> None:
        self.group, self.residual = group, residual

    def encode(self, segment: DenseSegment) -> Segment:
        return segment

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return 2 * dim * dtype.itemsize
