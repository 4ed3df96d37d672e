# SPDX-License-Identifier: Apache-2.0
"""Size limit of a cache, and a codec whose width follows from the length of the prompt."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, DenseCodec, Sealing
from kvpress.cache.common import CommonSegment
from kvpress.cache.mixed import Flags, MixedSegment, by_format, divided, plain_segments
from kvpress.cache.report import format_bytes
from kvpress.cache.segment import SLOT, DenseSegment, Segment
from kvpress.core.amount import Amount
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.quant.rotated import CentredCodec, RotatedSegment

Width: TypeAlias = tuple[int, int]
"""Bits per channel of keys and of values."""
DENSE: Width = (16, 16)
"""Width of pairs that stay dense."""
WIDTHS: dict[Width, float] = {(8, 8): 8.6, (8, 4): 2.6, (4, 4): 1.3, (4, 3): 0.0}
"""Widths of encoded pairs, and the least bits available per uncompressed number at which they are used."""
GROUP = 32
"""Number of generated tokens that are encoded together."""
SINKS = 1
"""First pairs of a head that stay dense: errors of an attention sink count in every output."""
OFFSETS = 24
"""Bytes of the start and the length of a stream."""
CLOSE = 0.95
"""Share of the compression factor above which no warning is issued."""
WARNED = "sliding windows"
"""Key that marks a cache for which the warning about sliding windows was issued."""
FEWEST = 16
"""Pairs of a head that stay at every size, the dense ones included."""


@dataclass(frozen=True)
class SizeLimit:
    """Size limit of the cache of one row, as a factor or in bytes; layers with a sliding window use the bytes first."""

    model: ModelFacts | None
    smaller: float | None = None
    """Compression factor against the uncompressed cache."""
    bytes: int | None = None
    """Bytes of all layers, used instead of `smaller`."""
    beside_pair: int = 0
    """Bytes that each pair takes besides its codes and its index: log-weights and recorded numbers."""
    width: Width | None = None
    """Width that earlier pairs of the row are encoded in; None before any are."""
    narrowest: bool = False
    """Encodes in the narrowest width, since the prompt is longer than the tokens seen."""

    def codec(self, width: Width) -> Codec:
        """Return the codec of a width."""
        return CentredCodec(width, 0, SINKS, GROUP)

    @property
    def layers(self) -> Sequence[LayerFacts]:
        """Layers that grow; without a model, one layer with one head of 128 channels."""
        return [LayerFacts(0, 0, "full_attention", 1, 1, 128)] if self.model is None else self.model.growing

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model; bfloat16 without one."""
        return torch.bfloat16 if self.model is None else self.model.dtype

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the model."""
        return self.dtype.itemsize

    def _of_stream(self, bytes_of: Callable[[LayerFacts], float]) -> float:
        """Return the mean of `bytes_of` over all heads of all layers that grow."""
        return sum(layer.kv_heads * bytes_of(layer) for layer in self.layers) / self.streams

    @property
    def streams(self) -> int:
        """Heads of all layers that grow."""
        return sum(layer.kv_heads for layer in self.layers)

    @property
    def beside_codes(self) -> int:
        """Bytes of a pair besides its codes, for layers that dropped pairs."""
        return SLOT + self.beside_pair

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

    def fitting(self, tokens: int) -> Width:
        """Return the width for a prompt of `tokens`; `DENSE` if it fits uncompressed."""
        if self.width is not None:
            return self.width
        allowed, uncompressed = self.allowed(tokens), tokens * self.full
        if allowed >= uncompressed:
            return DENSE
        if self.narrowest:
            return min(WIDTHS)
        room = 8 * self.itemsize * max(0.0, allowed) / uncompressed
        holds = [width for width in WIDTHS if self.bytes is None or self.held(FEWEST, width) <= allowed]
        return next((width for width in holds if room >= WIDTHS[width]), min(WIDTHS))

    def held(self, pairs: int, width: Width) -> float:
        """Return the bytes of `pairs` pairs, as a mean over heads."""
        codec, sinks = self.codec(width), min(SINKS, pairs)
        pair = self._of_stream(lambda layer: codec.pair_bytes(layer.head_dim, self.dtype))
        fixed = self._of_stream(lambda layer: codec.fixed_bytes(layer.head_dim)) + 2 * OFFSETS
        return fixed + sinks * self.full + (pairs - sinks) * pair + pairs * self.beside_codes

    def pairs(self, tokens: int) -> int:
        """Return how many of `tokens` pairs stay, as a mean over heads."""
        return min(tokens, self.capacity(tokens, self.fitting(tokens)))

    def capacity(self, tokens: int, width: Width) -> int:
        """Return how many pairs of a width a head may hold after `tokens`, as a mean over heads."""
        allowed = self.allowed(tokens)
        if width == DENSE:
            return int(allowed / self.full)
        once, pair = self.held(SINKS, width), self.held(SINKS + 1, width) - self.held(SINKS, width)
        return max(FEWEST, SINKS + int((allowed - once) / pair))

    def warn_of_windows(self, view: View) -> None:
        """Warn once per cache if layers with a sliding window keep it well above the size limit."""
        sliding, growing = self.beside(view.seen), self.streams * view.seen * self.full
        if not growing:
            return
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
        width = self.fitting(tokens)
        if self.bytes is None or width == DENSE:
            return
        kept, sliding = min(tokens, FEWEST), self.beside(tokens)
        needed = sliding + self.streams * self.held(kept, min(WIDTHS))
        if self.bytes < needed:
            windows = f", and layers with a sliding window take {sliding} bytes of it" if sliding else ""
            raise ValueError(
                f"bytes={self.bytes} is too small for a prompt of {tokens} tokens: {kept} pairs of each of {self.streams} "
                f"heads stay, keys in {min(WIDTHS)[0]} bits and values in {min(WIDTHS)[1]}{windows}, so give at least "
                f"{int(needed) + 1} ({format_bytes(needed)})"
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

    def while_generating(self, view: View, left: int) -> int:
        """Return `left`, or as many pairs as fit into `bytes` in the width of the row, if these are more."""
        if self.room.bytes is None:
            return left
        room = self.beside(view).room
        width = DENSE if room.width is None else room.width
        return max(left, room.capacity(view.seen, width))

    def check(self, tokens: int) -> None:
        self.room.check(tokens)


@dataclass
class FittingCodec(Codec):
    """Codec that encodes each row in the width that fits its prompt, and later tokens in the same width.

    If rows of a batch have different widths, each width is a part of the segment. A row that fits at the end of a turn
    stays dense until the next turn.
    """

    room: SizeLimit
    """Size limit that sets the width."""
    group: int = GROUP
    """Pairs that are encoded together."""
    residual: int = 0
    """Newest pairs that stay dense."""
    sinks: int = SINKS

    whole: ClassVar[bool] = True
    spread = "stream"

    @property
    def aids(self) -> tuple[Wanted, ...]:
        return tuple(dict.fromkeys(aid for width in WIDTHS for aid in self.room.codec(width).aids))

    def at(self, tokens: int) -> Codec:
        width = self.room.fitting(tokens)
        return DenseCodec(GROUP, 0) if width == DENSE else self.room.codec(width)

    def begins(self, row: int, turn: bool, sealing: Sealing | None) -> bool:
        return turn and sealing is not None and self.room.fitting(sealing.tokens(row + 1)[row]) != DENSE

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        heads, earlier = sealing.heads, widths_held(sealing.earlier, sealing.heads)
        tokens = sealing.tokens(segment.layout.streams // heads)
        widths = [earlier.get(row) or self.room.fitting(count) for row, count in enumerate(tokens)]
        filled = {widths[n // heads] for n, length in enumerate(segment.layout.lengths) if length}
        kinds = sorted(filled)
        numbers = torch.tensor([kinds.index(width) if width in filled else 0 for width in widths for _ in range(heads)])
        plain = replace(sealing, earlier=tuple(plain_segments(sealing.earlier)))
        return self._encode(segment, numbers[segment.layout.stream_of_row], kinds, plain)

    def _encode(self, segment: DenseSegment, number: Tensor, kinds: Sequence[Width], sealing: Sealing) -> Segment:
        """Encode every pair in the width `kinds[number]`, where `number [total]` holds one index for each pair."""
        if len(kinds) == 1:
            return self.room.codec(kinds[0]).encode(segment, sealing)
        second = number > 0
        parts = divided(segment, second)
        first = self.room.codec(kinds[0]).encode(parts[0], sealing)
        others = self._encode(parts[1], number[second] - 1, kinds[1:], sealing)
        return MixedSegment(first, others, Flags.of(second.to(segment.device)), segment.layout)

    def gathered(self, segments: Sequence[Segment]) -> list[Segment]:
        parts = super().gathered(segments)
        apart = DenseSegment, CommonSegment  # rows that share pairs, as beams do, go on sharing them
        encoded = [part for part in parts if not isinstance(part, apart)]
        if any(isinstance(part, MixedSegment) for part in encoded):
            parts = [*(part for part in parts if isinstance(part, apart)), by_format(encoded)]
        return parts

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        raise TypeError("the bytes of a pair depend on the length of the prompt: use `at(tokens)`")


def widths_held(parts: Iterable[Segment], heads: int) -> dict[int, Width]:
    """Return the width of every row that has encoded pairs, the fewest bits where pairs differ; a row has `heads` streams."""
    held: dict[int, Width] = {}
    for part in plain_segments(part.known() for part in parts):
        if not isinstance(part, RotatedSegment):
            continue
        for row in {n // heads for n, length in enumerate(part.layout.lengths) if length}:
            held[row] = min((part.keys.bits, part.values.bits), held.get(row, DENSE))
    return held
