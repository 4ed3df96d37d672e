# SPDX-License-Identifier: Apache-2.0
"""Size limit of a cache, and a codec whose width follows from the length of the prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.codec import WIDTH, Codec, DenseCodec, Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.mixed import Flags, MixedSegment, by_format
from kvpress.cache.report import format_bytes
from kvpress.cache.segment import SLOT, WEIGHT, DenseSegment, Segment
from kvpress.cache.store import KVStore
from kvpress.core.amount import Amount
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.observe.view import View
from kvpress.quant.rotated import CentredCodec, RotatedSegment
from kvpress.quant.uniform import UniformCodec

DENSE = 16
"""Bits of pairs that stay dense."""
WIDTHS = {8: 8.6, 4: 2.6, 3: 0.53, 2: 0.0}
"""Bits per channel, and the least bits available per uncompressed number at which they are used."""
CHANNEL_WIDTHS = {8: 10.0, 4: 0.0}
"""The same for keys that are coded by channel, whose scales take another half a bit."""
GROUP = 32
"""Number of generated tokens that are encoded together, and of pairs whose keys share scales by channel."""
OFFSETS = 24
"""Bytes of the start and the length of a stream."""
CLOSE = 0.95
"""Share of the compression factor above which no warning is issued."""
WARNED = "sliding windows"
"""Key that marks a cache for which the warning about sliding windows was issued."""
LEAST = 16
"""Pairs of a head that stay at every size."""


@dataclass(frozen=True)
class SizeLimit:
    """Size limit of the cache of one row, as a factor or in bytes; layers with a sliding window use the bytes first."""

    model: ModelFacts | None
    smaller: float | None = None
    """Compression factor against the uncompressed cache."""
    bytes: int | None = None
    """Bytes of all layers, used instead of `smaller`."""
    weighs: bool = False
    """True if pairs have log-weights."""
    width: int | None = None
    """Bits that earlier pairs of the row are encoded in; None before any are."""
    by_channel: bool = False
    """True if keys are coded by channel, as by `KiviPress`."""

    def codec(self, bits: int) -> Codec:
        """Return the codec with `bits` bits per channel."""
        return by_channel(bits) if self.by_channel else of_width(bits)

    @property
    def fewest(self) -> int:
        """Pairs of a head that stay at every size."""
        return GROUP if self.by_channel else LEAST

    @property
    def layers(self) -> Sequence[LayerFacts]:
        """Layers that grow; without a model, one layer with one head of 128 channels."""
        return [LayerFacts(0, 0, "full_attention", 1, 1, 128)] if self.model is None else self.model.growing

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the model."""
        return 2 if self.model is None else self.model.dtype.itemsize

    def _of_stream(self, bytes_of: Callable[[LayerFacts], float]) -> float:
        """Return the mean of `bytes_of` over all heads of all layers that grow."""
        return sum(layer.kv_heads * bytes_of(layer) for layer in self.layers) / self.streams

    @property
    def streams(self) -> int:
        """Heads of all layers that grow."""
        return sum(layer.kv_heads for layer in self.layers)

    @property
    def beside_codes(self) -> int:
        """Bytes of the index and the weight of a pair, for layers that dropped pairs."""
        return SLOT + WEIGHT * self.weighs

    @property
    def full(self) -> float:
        """Bytes of a dense pair, as a mean over heads."""
        return self._of_stream(lambda layer: layer.pair_dim * self.itemsize)

    def beside(self, tokens: int) -> int:
        """Return the bytes of layers with a sliding window."""
        if self.model is None:
            return 0
        window = min(tokens, self.model.window)
        return sum(layer.kv_heads * window * layer.pair_dim * self.itemsize for layer in self.model.sliding)

    def allowed(self, tokens: int) -> float:
        """Return the bytes that a head may take for a prompt of `tokens`, as a mean over heads."""
        if self.bytes is None:
            return tokens * self.full / (self.smaller or 1.0)
        return (self.bytes - self.beside(tokens)) / self.streams

    def bits(self, tokens: int) -> int:
        """Return the bits per channel; `DENSE` if the prompt fits uncompressed."""
        if self.width is not None:
            return self.width
        allowed, uncompressed = self.allowed(tokens), tokens * self.full
        if allowed >= uncompressed:
            return DENSE
        room = 8 * self.itemsize * max(0.0, allowed) / uncompressed
        widths = CHANNEL_WIDTHS if self.by_channel else WIDTHS
        return next(bits for bits, threshold in widths.items() if room >= threshold)

    def held(self, pairs: float, bits: int) -> float:
        """Return the bytes of `pairs` pairs including scales, indexes and weights, as a mean over heads."""
        pair, once, codec = self.full, 0.0, self.codec(bits)
        if bits != DENSE:
            pair = self._of_stream(lambda layer: codec.pair_bytes(layer.head_dim, torch.float16))
            once = self._of_stream(lambda layer: codec.fixed_bytes(layer.head_dim))
        return once + OFFSETS + pairs * (pair + self.beside_codes)

    def pairs(self, tokens: int) -> int:
        """Return how many of `tokens` pairs stay, as a mean over heads."""
        bits = self.bits(tokens)
        if self.allowed(tokens) >= tokens * self.full:
            return tokens
        once, pair = self.held(0, bits), self.held(1, bits) - self.held(0, bits)
        return min(tokens, max(self.fewest, int((self.allowed(tokens) - once) / pair)))

    def warn_of_windows(self, view: View) -> None:
        """Warn once per cache if layers with a sliding window keep it well above the size limit."""
        sliding, growing = self.beside(view.seen), self.streams * view.seen * self.full
        smaller = self.smaller or 1.0
        reached = (growing + sliding) / (growing / smaller + sliding)
        if reached > CLOSE * smaller or WARNED in view.call.tokens.shared or not view.call.is_first_prompt:
            return
        view.call.tokens.shared[WARNED] = True
        layers = len(self.layers) + len(self.model.sliding if self.model is not None else ())
        share = growing / (growing + sliding)
        warnings.warn(
            f"smaller={smaller:g} holds for the {len(self.layers)} of {layers} layers that grow, {share:.0%} of a cache of "
            f"{view.seen} tokens: the others hold a sliding window, which is not compressed, and the whole cache gets "
            f"{reached:.1f} times smaller; bytes= counts the windows too",
            RuntimeWarning,
            stacklevel=2,
        )

    def check(self, tokens: int) -> None:
        """Refuse bytes that are too few for the smallest cache of a prompt of `tokens`.

        Raises:
            ValueError: with the bytes that are needed.
        """
        bits = self.bits(tokens)
        if self.bytes is None or bits == DENSE:
            return
        kept, sliding = min(tokens, LEAST), self.beside(tokens)
        needed = sliding + self.streams * self.held(kept, min(WIDTHS))
        if self.bytes < needed:
            windows = f", and layers with a sliding window take {sliding} bytes of it" if sliding else ""
            raise ValueError(
                f"bytes={self.bytes} is too small for a prompt of {tokens} tokens: {kept} pairs of each of {self.streams} "
                f"heads stay, in {min(WIDTHS)} bits{windows}, so give at least {int(needed) + 1} "
                f"({format_bytes(needed)})"
            )


@dataclass(frozen=True)
class Sized(Amount):
    """Number of pairs that fit into `room`, for any number of tokens."""

    room: SizeLimit = field(default_factory=lambda: SizeLimit(None), kw_only=True)

    @property
    def keeps_all(self) -> bool:
        return False

    def beside(self, view: View) -> Sized:
        if self.room.bytes is None:
            self.room.warn_of_windows(view)
            return self
        store = view.call.store
        return replace(self, room=replace(self.room, width=widths_held(store.segments, store.heads).get(view.rows[0])))

    def of(self, tokens: int) -> int:
        return self.room.pairs(tokens)

    def check(self, tokens: int) -> None:
        self.room.check(tokens)


class WholeDenseCodec(DenseCodec):
    """Codec that stores prompts dense, to their last pair."""

    whole: ClassVar[bool] = True


@dataclass
class FittingCodec(Codec):
    """Codec that encodes each row in the width that fits its prompt, and generated tokens in the same width.

    If rows of a batch have different widths, each width is a part of the segment. With `per_pair`, the allocator stores the
    width of each pair of a prompt beside it; pairs without one get the width that fits.
    """

    room: SizeLimit
    """Size limit that sets the width."""
    group: int = GROUP
    """Generated tokens that are encoded together."""
    residual: int = 0
    """Newest pairs that stay dense."""
    per_pair: bool = False
    """True if pairs of a prompt may have different widths."""

    whole: ClassVar[bool] = True
    reads_side: ClassVar[tuple[str, ...]] = (WIDTH,)
    spread = "stream"

    def at(self, tokens: int) -> Codec:
        return of_width(self.room.bits(tokens))

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        widths = torch.tensor(self._widths(segment, sealing))[segment.layout.stream_of_row]
        assigned = segment.side_array(WIDTH).long().cpu()
        widths = torch.where(assigned > 0, assigned, widths)
        sealing_by_width = replace(sealing, earlier=tuple(leaves(sealing.earlier)))
        return _encode(segment, widths, widths.unique().tolist(), sealing_by_width)

    def _widths(self, segment: DenseSegment, sealing: Sealing) -> list[int]:
        """Return the bits of every stream: those of its row's earlier pairs (not with `per_pair`), else the width that fits."""
        rows = segment.layout.streams // sealing.heads
        earlier = {} if self.per_pair else widths_held(sealing.earlier, sealing.heads)
        seen = [sealing.seen] * rows if sealing.mask is None else sealing.mask.sum(dim=1).tolist()
        bits = [earlier.get(row) or self.room.bits(int(tokens)) for row, tokens in enumerate(seen)]
        return [width for width in bits for _ in range(sealing.heads)]

    def gathered(self, segments: Sequence[Segment]) -> list[Segment]:
        plain = all(isinstance(segment, (MixedSegment, RotatedSegment, DenseSegment)) for segment in segments)
        return [by_format(segments)] if segments and plain else list(segments)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        raise TypeError("the bytes of a pair depend on the length of the prompt: use `at(tokens)`")


def of_width(bits: int) -> Codec:
    """Return the codec with `bits` bits per channel."""
    return WholeDenseCodec(GROUP, 0) if bits == DENSE else CentredCodec((bits, bits), 0, group=GROUP)


def by_channel(bits: int) -> Codec:
    """Return the codec with `bits` bits per channel, keys in groups of tokens and values in groups of channels."""
    return UniformCodec(bits, bits, (GROUP, 1), (1, GROUP), GROUP, 0)


def widths_held(parts: Iterable[Segment], heads: int) -> dict[int, int]:
    """Return the bits of every row that has encoded pairs, the fewest where pairs differ; a row has `heads` streams."""
    bits_by_row: dict[int, int] = {}
    for part in leaves(part.known() for part in parts):
        bits = _bits(part)
        for row in {n // heads for n, length in enumerate(part.layout.lengths) if length}:
            bits_by_row[row] = min(bits, bits_by_row.get(row, bits))
    return bits_by_row


def _bits(part: Segment) -> int:
    """Return the bits per channel of a segment of one width."""
    return part.keys.bits if isinstance(part, RotatedSegment) else DENSE


def pair_widths(store: KVStore, stream: int) -> Tensor:
    """Return the bits of all pairs of a stream in order, `[n]` on the CPU; 0 for pairs that are not encoded."""
    widths = [_bits_of(part, torch.arange(part.layout.total)[part.layout.rows(stream)]) for part in store.segments]
    encoded = torch.cat(widths) if widths else torch.empty(0, dtype=torch.long)
    return torch.nn.functional.pad(encoded, (0, store.stored()[stream] - len(encoded)))


def _bits_of(part: Segment, rows: Tensor) -> Tensor:
    part, rows = part.located(rows.to(part.device))
    if isinstance(part, MixedSegment):
        second, widths = part.in_second[rows].cpu(), torch.zeros(len(rows), dtype=torch.long)
        ranks = torch.where(part.in_second, part.in_second.cumsum(0), (~part.in_second).cumsum(0)) - 1
        for half, selected in ((part.one, ~second), (part.other, second)):
            widths[selected] = _bits_of(half, ranks[rows][selected.to(rows.device)])
        return widths
    return torch.full((len(rows),), _bits(part))


def leaves(parts: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the single-width segments within mixed segments."""
    for part in parts:
        if isinstance(part, MixedSegment):
            yield from leaves(part.parts)
        else:
            yield part


def _encode(segment: DenseSegment, bits: Tensor, widths: Sequence[int], sealing: Sealing) -> Segment:
    """Encode every pair in its `bits [total]`; `widths` lists all different bits in ascending order."""
    if len(widths) == 1:
        return of_width(widths[0]).encode(segment, sealing)
    second, parts = bits != widths[0], []
    for selected, half_widths in ((~second, widths[:1]), (second, widths[1:])):
        rows = selected.nonzero().flatten()
        counts = torch.bincount(segment.layout.streams_of(rows), minlength=segment.layout.streams)
        at = rows.to(segment.device)
        pairs = DenseSegment(segment.keys[at], segment.values[at], Layout(counts.tolist()))
        parts.append(_encode(pairs, bits[selected], half_widths, sealing))
    return MixedSegment(parts[0], parts[1], Flags.of(second.to(segment.device)), segment.layout)
