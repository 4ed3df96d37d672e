"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

import torch

from kvpress.cache.memory import for_scattered_reads
from kvpress.cache.segment import DenseSegment, Segment

if TYPE_CHECKING:
    from kvpress.cache.store import Sealing


class Codec(ABC):
    """Turns sealed dense pairs of one layer into a segment of another storage format.

    Pairs are encoded once, oldest first, in tiles of `group` pairs per stream; the newest `residual` and the first
    `sinks` pairs of a stream always stay dense.
    """

    group: int
    residual: int
    sinks: int = 0
    reads_side: ClassVar[tuple[str, ...]] = ()
    """Per-pair arrays that were recorded for this codec only; encoded pairs do not carry them on."""

    @abstractmethod
    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        """Return the encoded pairs of `segment`, whose stream lengths are multiples of `group`; same rows, same order."""

    @abstractmethod
    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        """Bytes per encoded pair of head dim `dim`, scales included; what is held once per stream is left out."""

    def fixed_bytes(self, dim: int) -> float:
        """Bytes that every stream holds once, whatever its length."""
        del dim
        return 0

    def table_bytes(self) -> int:
        """Bytes that the layer holds once, whatever its batch, such as codebooks."""
        return 0


class DenseCodec(Codec):
    """Seals pairs as they are, so that a selector can index them and read some of them."""

    def __init__(self, group: int, residual: int) -> None:
        self.group, self.residual = group, residual

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        return DenseSegment(for_scattered_reads(segment.keys), for_scattered_reads(segment.values), segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return 2 * dim * dtype.itemsize
