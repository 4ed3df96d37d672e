# SPDX-License-Identifier: Apache-2.0
"""Interface of codecs, and the dense codec."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from kvpress.cache.offset import Spread
from kvpress.cache.rotation import Rotation
from kvpress.cache.segment import SLOT, DenseSegment, Segment
from kvpress.cache.tier import FileTier

T = TypeVar("T")
GPU_INTERVAL = 256
"""Minimum number of generated tokens between two sealings on a GPU: each synchronises and re-records CUDA graphs."""
DENSE_INTERVAL = 64
"""Minimum number of generated tokens between two sealings of pairs that are only indexed."""


@dataclass(frozen=True)
class Sealing:
    """Input of a codec besides the pairs that it encodes."""

    heads: int
    """KV heads; stream `n` of a segment belongs to head `n % heads`."""
    earlier: Sequence[Segment] = ()
    """Encoded segments of the layer, oldest first."""
    generated: bool = False
    """Whether the newest pairs belong to generated tokens."""
    seen: int = 0
    """Tokens of the sequence, padding included."""
    mask: Tensor | None = None
    """Real tokens, bool `[B, seen]`; None where nothing is padded."""
    rotation: Rotation | None = None
    """Rotary embedding of the layer; None where keys are not rotated, and outside a model."""
    state: dict[str, Any] = field(default_factory=dict)
    """State of the layer's codecs between sealings (`KVStore.codec_state`); copied with the cache."""
    observers: dict[Any, Any] = field(default_factory=dict)
    """Observers of the layer, by request."""
    shared: dict[str, Any] = field(default_factory=dict)
    """State that all layers of the cache share; copied with the cache."""
    trial: bool = False
    """Whether only decoded keys are read from the result, so that values need no codes; the keys are encoded again later."""
    tried: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = field(default_factory=dict)
    """Results of a trial encoding in the same pass, each with the tensors that it was computed from."""

    def once(self, name: Hashable, tensors: tuple[Tensor, ...], encode: Callable[[], T]) -> T:
        """Return `encode()`, or its result in the trial encoding before, if that had the same name and equal tensors."""
        before, result = self.tried.pop(name, ((), None))
        if len(before) == len(tensors) and all(map(torch.equal, before, tensors)):
            return cast(T, result)
        result = encode()
        if self.trial:
            self.tried[name] = tensors, result
        return result

    def tokens(self, rows: int) -> list[int]:
        """Return the number of real tokens of each of `rows` rows."""
        return [self.seen] * rows if self.mask is None else self.mask.sum(dim=1).tolist()


class Codec(ABC):
    """Encodes sealed dense pairs of one layer as a segment of another storage format.

    Pairs are encoded once, oldest first, in tiles of `group` pairs per stream; the newest `residual` and the first
    `sinks` pairs of a stream always stay dense.
    """

    group: int
    residual: int
    sinks: int = 0
    whole: ClassVar[bool] = False
    """Whether to encode a partial tile at the first encoding of a row and at the end of a turn."""
    slot_bytes: ClassVar[int] = SLOT
    """Bytes of the slot of an encoded pair, where a stream has gaps."""
    reads_side: ClassVar[tuple[str, ...]] = ()
    """Per-pair arrays recorded for this codec only, which encoded pairs drop."""
    spread: Spread | None = "length"
    """Statistic of keys that the encoding error grows with; a common key offset is subtracted where that makes it much smaller.

    None where keys are stored losslessly, or before their rotary embedding."""
    tier: FileTier | None = None
    """Files for encoded pairs; None for the memory of their device."""

    @property
    def aids(self) -> tuple[Any, ...]:
        """Observers of a prompt's queries that codes get better with; left out where no queries can be watched."""
        return ()

    def begins(self, row: int, turn: bool, sealing: Sealing | None) -> bool:
        """Return whether pairs of a row that has no encoded ones are encoded now; `turn` and `sealing` as in `tiles`."""
        del row, turn, sealing
        return True

    def tiles(
        self,
        lengths: Sequence[int],
        heads: int,
        begun: Sequence[bool] = (),
        turn: bool = False,
        sealing: Sealing | None = None,
    ) -> tuple[list[int], list[int]]:
        """Return the range of dense pairs to encode in every stream: first ranks and ends.

        Rows are independent. Sinks are skipped only until some pairs of the row are encoded, which `begun` marks by stream. In
        a row without a full tile, all ranges are empty, from 0 to 0. `turn` marks the end of a prompt or turn, and `sealing`
        has the tokens of each row so far, for codecs that depend on them.
        """
        begins, ends = [0] * len(lengths), [0] * len(lengths)
        for start in range(0, len(lengths), heads):
            row, first = range(start, start + heads), not any(begun[start : start + heads])
            if first and not self.begins(start // heads, turn, sealing):
                continue
            sinks, size = self.sinks if first else 0, self.tile_size(first or turn)
            full = [max(0, lengths[n] - min(sinks, lengths[n]) - self.residual) // size for n in row]
            for n, tiles in zip(row, full, strict=True):
                if any(full):
                    begins[n] = min(sinks, lengths[n])
                    ends[n] = begins[n] + tiles * size
        return begins, ends

    def tile_size(self, ends: bool) -> int:
        """Return the divisor of encoded lengths; `ends` for the first pairs of a row and at the end of a turn."""
        return 1 if ends and self.whole else self.group

    def gathered(self, segments: Sequence[Segment]) -> list[Segment]:
        """Return the segments of a layer at the end of a turn; `whole` codecs join neighbours of one format.

        Each turn makes a segment, which takes some bytes per stream at any length. Segments in files are not joined.
        """
        parts: list[list[Segment]] = []
        for segment in segments:
            if self.whole and self.tier is None and parts and parts[-1][0].joinable(segment):
                parts[-1].append(segment)
            else:
                parts.append([segment])
        return [part[0] if len(part) == 1 else Segment.join(part) for part in parts]

    least_interval: ClassVar[int] = 1
    """Minimum number of generated tokens between two checks for full tiles, except on a GPU."""

    def interval(self, device: torch.device) -> int:
        """Return the number of generated tokens between two checks for full tiles, a multiple of `group`."""
        least = GPU_INTERVAL if device.type == "cuda" else self.least_interval
        return -(-least // self.group) * self.group

    def at(self, tokens: int) -> Codec:
        """Return the codec for a row with a prompt of so many tokens, where the format depends on the length."""
        del tokens
        return self

    @abstractmethod
    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        """Encode the pairs of `segment`, in the same layout.

        Stream lengths are multiples of `group`, those of rows that nothing was encoded of yet where the codec is not `whole`.
        """

    @abstractmethod
    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        """Return bytes per encoded pair of head dim `dim`, scales included, without bytes per tile or stream."""

    def tile_bytes(self, pairs: int, dim: int, dtype: torch.dtype, generated: bool = False) -> float:
        """Return bytes of `pairs` pairs of a stream that are encoded together; `generated` ones may have another format."""
        del generated
        return pairs * self.pair_bytes(dim, dtype)

    def fixed_bytes(self, dim: int) -> float:
        """Return bytes per stream of a segment, independent of its length."""
        del dim
        return 0

    def table_bytes(self, dim: int) -> int:
        """Return bytes per layer, independent of the batch, such as codebooks."""
        del dim
        return 0

    def observed_bytes(self, dim: int) -> int:
        """Return bytes per stream of observers that only this codec uses."""
        del dim
        return 0

    def shared_bytes(self, tokens: int, dim: int) -> int:
        """Return bytes that all layers of a cache share after `tokens` tokens, such as tables of angles."""
        del tokens, dim
        return 0


class JointCodec(Codec):
    """Encodes the same tokens of several adjacent layers together, so that the segments of these layers can share tensors.

    All layers have the same `group`, `residual` and `sinks`. Their pairs stay dense until the last of them has read the pass.
    """

    layers: tuple[int, ...]
    """Indexes of the attention layers, ascending."""

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del segment, sealing
        raise NotImplementedError(
            f"layers {', '.join(map(str, self.layers))} are encoded together, and one of them came alone: use the press inside "
            "`with press(model)`"
        )

    @abstractmethod
    def encode_together(self, segments: Sequence[DenseSegment], sealings: Sequence[Sealing]) -> list[Segment]:
        """Encode the pairs of all `layers`, each in its own layout; see `encode`.

        Layers may hold different pairs, or lie on different devices; such pairs stay dense.
        """


class DenseCodec(Codec):
    """Seals pairs without encoding, so that a selector can index them."""

    spread = None
    least_interval = DENSE_INTERVAL  # sealing saves no memory here, and costs the host as much as a token

    def __init__(self, group: int, residual: int) -> None:
        self.group, self.residual = group, residual

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        del sealing
        return DenseSegment(segment.keys, segment.values, segment.layout)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return 2 * dim * dtype.itemsize
