# SPDX-License-Identifier: Apache-2.0
"""What a codec is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.cache.offset import Spread
from kvpress.cache.rotation import Rotation
from kvpress.cache.segment import SLOT, DenseSegment, Segment
from kvpress.cache.tier import FileTier

GPU_INTERVAL = 256
"""Generated tokens between two sealings on a GPU at least: each one stalls it, and recorded steps are recorded anew."""

WIDTH = "width"
"""Name of the per-pair array that says in how many bits a pair that waits to be encoded is to be held, 0 where nothing does."""


@dataclass(frozen=True)
class Sealing:
    """What a codec may look at beside the pairs that it encodes.

    Stream `n` of a segment belongs to kv head `n % heads`; `earlier` are the layer's encoded segments, oldest first.
    `generated` says that the newest of the pairs are tokens that were generated, not read. `seen` counts the tokens of the
    sequence, of which `mask [B, seen]` marks the real ones, None where nothing is padded. `rotation` is None where keys
    are never rotated, or outside a model.

    `state` is what codecs of this layer keep from one sealing to the next (`KVStore.codec_state`), `shared` what all layers of
    the cache have in common. A copied cache has a `state` and a `shared` of its own. `observers` are those of the
    layer, by what was wanted.
    """

    heads: int
    earlier: Sequence[Segment] = ()
    generated: bool = False
    seen: int = 0
    mask: Tensor | None = None
    rotation: Rotation | None = None
    state: dict[str, Any] = field(default_factory=dict)
    observers: dict[Any, Any] = field(default_factory=dict)
    shared: dict[str, Any] = field(default_factory=dict)


class Codec(ABC):
    """Turns sealed dense pairs of one layer into a segment of another storage format.

    Pairs are encoded once, oldest first, in tiles of `group` pairs per stream; the newest `residual` and the first
    `sinks` pairs of a stream always stay dense.
    """

    group: int
    residual: int
    sinks: int = 0
    whole: ClassVar[bool] = False
    """Whether pairs that fill no tile are encoded too, of a row that holds no encoded ones yet and after a turn."""
    slot_bytes: ClassVar[int] = SLOT
    """Bytes that the place of an encoded pair takes, where a stream has gaps."""
    reads_side: ClassVar[tuple[str, ...]] = ()
    """Per-pair arrays that were recorded for this codec only; encoded pairs do not carry them on."""
    spread: Spread | None = "length"
    """What the error of keys grows with, so that what they share is taken out of them where it makes that large.

    None where keys are stored as they are, or before their rotary embedding."""
    tier: FileTier | None = None
    """Where encoded pairs are kept, None for the memory of their device."""

    def tiles(
        self, lengths: Sequence[int], heads: int, begun: Sequence[bool] = (), turn: bool = False
    ) -> tuple[list[int], list[int]]:
        """Return between which ranks of its dense pairs every stream is encoded: begins and ends.

        Each row is looked at by itself: its first pairs are left out until some pairs of it are encoded, which `begun` marks
        by stream, and a row without a full tile has all its begins and ends at 0. `turn` marks the end of a prompt or turn.
        """
        begins, ends = [0] * len(lengths), [0] * len(lengths)
        for start in range(0, len(lengths), heads):
            row, first = range(start, start + heads), not any(begun[start : start + heads])
            sinks, size = self.sinks if first else 0, self.tile_size(first or turn)
            full = [max(0, lengths[n] - min(sinks, lengths[n]) - self.residual) // size for n in row]
            for n, tiles in zip(row, full, strict=True):
                if any(full):
                    begins[n] = min(sinks, lengths[n])
                    ends[n] = begins[n] + tiles * size
        return begins, ends

    def tile_size(self, ends: bool) -> int:
        """Encoded lengths are multiples of this; `ends` for the first pairs of a row and at the end of a turn."""
        return 1 if ends and self.whole else self.group

    def gathered(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments of a layer at the end of a turn; `whole` codecs join neighbours of one format.

        A segment holds some bytes per stream however short it is, and each turn makes one. Files are not written again.
        """
        parts: list[list[Segment]] = []
        for segment in segments:
            if self.whole and self.tier is None and parts and parts[-1][0].joinable(segment):
                parts[-1].append(segment)
            else:
                parts.append([segment])
        return [part[0] if len(part) == 1 else Segment.join(part) for part in parts]

    def interval(self, device: torch.device) -> int:
        """Return after how many generated tokens full tiles are looked for: `group`, and a multiple of it on a GPU."""
        return -(-GPU_INTERVAL // self.group) * self.group if device.type == "cuda" else self.group

    def at(self, tokens: int) -> Codec:
        """Return the codec of a row whose prompt has so many tokens; another one where its format follows from that."""
        del tokens
        return self

    @abstractmethod
    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        """Return the encoded pairs of `segment`, same rows, same order.

        Stream lengths are multiples of `group`, those of rows that nothing was encoded of yet where the codec is not `whole`.
        """

    @abstractmethod
    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        """Bytes per encoded pair of head dim `dim`, scales included; what is held once per tile or stream is left out."""

    def tile_bytes(self, pairs: int, dim: int, dtype: torch.dtype, generated: bool = False) -> float:
        """Bytes of `pairs` pairs of a stream that are encoded together; `generated` ones may be held in another way."""
        del generated
        return pairs * self.pair_bytes(dim, dtype)

    def fixed_bytes(self, dim: int) -> float:
        """Bytes that every stream of a segment holds once, whatever its length."""
        del dim
        return 0

    def table_bytes(self, dim: int) -> int:
        """Bytes that the layer holds once, whatever its batch, such as codebooks."""
        del dim
        return 0

    def observed_bytes(self, dim: int) -> int:
        """Bytes of what observers hold of every stream for this codec alone."""
        del dim
        return 0

    def shared_bytes(self, tokens: int, dim: int) -> int:
        """Bytes that all layers of a cache have in common once it has seen so many tokens, such as tables of angles."""
        del tokens, dim
        return 0


class DenseCodec(Codec):
    """Seals pairs as they are, so that a selector can index them and read some of them."""

    spread = None

    def __init__(self, group: int, residual: int) -> None:
        self.group, self.residual = group, residual

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        return DenseSegment(segment.keys, segment.values, segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return 2 * dim * dtype.itemsize
