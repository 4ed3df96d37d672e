# SPDX-License-Identifier: Apache-2.0
"""What a cache of a size may hold of a prompt, and a codec whose width follows from the prompt's length."""

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

DENSE = 16
"""Bits that stand for pairs as they are."""
WIDTHS = {8: 8.6, 4: 2.6, 3: 0.53, 2: 0.0}
"""Bits of a channel, and from how many bits a number may take on average they are used."""
GROUP = 32
"""Tokens that follow a prompt and are encoded together."""
OFFSETS = 24
"""Bytes of the place and length of a stream."""
CLOSE = 0.95
"""Share of a factor that counts as reached."""
WARNED = "sliding windows"
"""Entry of a cache for which the warning about sliding windows was issued."""
LEAST = 16
"""Pairs of a head that stay whatever the size."""


@dataclass(frozen=True)
class Room:
    """What the cache of one row may hold: `smaller` times less than uncompressed, or so many `bytes` in all layers.

    Of bytes, what layers with a sliding window take comes first. `weighs` says that pairs have log-weights. `width` are the
    bits that pairs are encoded in already, None before any are.
    """

    model: ModelFacts | None
    smaller: float | None = None
    bytes: int | None = None
    weighs: bool = False
    width: int | None = None

    @property
    def layers(self) -> Sequence[LayerFacts]:
        """Those that grow; one with a head of 128 numbers where no model is given."""
        return [LayerFacts(0, 0, "full_attention", 1, 1, 128)] if self.model is None else self.model.growing

    @property
    def itemsize(self) -> int:
        """Bytes of a number of the model."""
        return 2 if self.model is None else self.model.dtype.itemsize

    def _of_stream(self, bytes_of: Callable[[LayerFacts], float]) -> float:
        """Mean over all heads of all layers that grow."""
        return sum(layer.kv_heads * bytes_of(layer) for layer in self.layers) / self.streams

    @property
    def streams(self) -> int:
        """Heads of all layers that grow."""
        return sum(layer.kv_heads for layer in self.layers)

    @property
    def beside_codes(self) -> int:
        """Bytes of the place and the weight of a pair, where others of its layer were dropped."""
        return SLOT + WEIGHT * self.weighs

    @property
    def full(self) -> float:
        """Bytes of a pair as it is, of a mean head."""
        return self._of_stream(lambda layer: layer.pair_dim * self.itemsize)

    def beside(self, tokens: int) -> int:
        """Return the bytes of layers that hold a window only."""
        if self.model is None:
            return 0
        held = min(tokens, self.model.window)
        return sum(layer.kv_heads * held * layer.pair_dim * self.itemsize for layer in self.model.sliding)

    def allowed(self, tokens: int) -> float:
        """Return the bytes that a mean head may hold of a prompt of so many tokens."""
        if self.bytes is None:
            return tokens * self.full / (self.smaller or 1.0)
        return (self.bytes - self.beside(tokens)) / self.streams

    def bits(self, tokens: int) -> int:
        """Return the bits of a channel; `DENSE` where all fits as it is."""
        if self.width is not None:
            return self.width
        allowed, whole = self.allowed(tokens), tokens * self.full
        if allowed >= whole:
            return DENSE
        room = 8 * self.itemsize * max(0.0, allowed) / whole
        return next(bits for bits, least in WIDTHS.items() if room >= least)

    def held(self, pairs: float, bits: int) -> float:
        """Return the bytes of so many pairs of a mean head, all that is held beside their codes counted."""
        pair, once, codec = self.full, 0.0, of_width(bits)
        if bits != DENSE:
            pair = self._of_stream(lambda layer: codec.pair_bytes(layer.head_dim, torch.float16))
            once = self._of_stream(lambda layer: codec.fixed_bytes(layer.head_dim))
        return once + OFFSETS + pairs * (pair + self.beside_codes)

    def pairs(self, tokens: int) -> int:
        """Return how many pairs of a head stay of so many tokens, on average."""
        bits = self.bits(tokens)
        if self.allowed(tokens) >= tokens * self.full:
            return tokens
        once, pair = self.held(0, bits), self.held(1, bits) - self.held(0, bits)
        return min(tokens, max(LEAST, int((self.allowed(tokens) - once) / pair)))

    def warn_of_windows(self, view: View) -> None:
        """Warn, once for a cache, where layers with a sliding window keep it well above the size that was given."""
        beside, growing = self.beside(view.seen), self.streams * view.seen * self.full
        smaller = self.smaller or 1.0
        reached = (growing + beside) / (growing / smaller + beside)
        if reached > CLOSE * smaller or WARNED in view.call.tokens.shared or not view.call.is_first_prompt:
            return
        view.call.tokens.shared[WARNED] = True
        layers = len(self.layers) + len(self.model.sliding if self.model is not None else ())
        share = growing / (growing + beside)
        warnings.warn(
            f"smaller={smaller:g} holds for the {len(self.layers)} of {layers} layers that grow, {share:.0%} of a cache of "
            f"{view.seen} tokens: the others hold a sliding window, which stays as it is, and the whole cache gets "
            f"{reached:.1f} times smaller; bytes= counts the windows too",
            RuntimeWarning,
            stacklevel=2,
        )

    def check(self, tokens: int) -> None:
        """Refuse bytes that do not hold what stays of a prompt of so many tokens whatever the size.

        Raises:
            ValueError: they do not; says how many are needed.
        """
        bits = self.bits(tokens)
        if self.bytes is None or bits == DENSE:
            return
        kept, beside = min(tokens, LEAST), self.beside(tokens)
        least = beside + self.streams * self.held(kept, min(WIDTHS))
        if self.bytes < least:
            windows = f", and layers with a sliding window take {beside} bytes of it" if beside else ""
            raise ValueError(
                f"bytes={self.bytes} is too small for a prompt of {tokens} tokens: {kept} pairs of each of {self.streams} "
                f"heads stay, in {min(WIDTHS)} bits{windows}, so give at least {int(least) + 1} "
                f"({format_bytes(least)})"
            )


@dataclass(frozen=True)
class Sized(Amount):
    """As many pairs as the `room` has, of any number of tokens."""

    room: Room = field(default_factory=lambda: Room(None), kw_only=True)

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
    """Holds prompts as they are, to their last pair."""

    whole: ClassVar[bool] = True


@dataclass
class FittingCodec(Codec):
    """Encodes each row in the width that its prompt leaves room for; what follows the prompt, in the same one.

    Rows of a batch are usually of one width. Where they are not, those of further widths are further parts of the segment. With
    `per_pair`, pairs of a prompt have widths of their own, which wait at them; others are of the width that there is room for.
    """

    room: Room
    group: int = GROUP
    residual: int = 0
    per_pair: bool = False

    whole: ClassVar[bool] = True
    reads_side: ClassVar[tuple[str, ...]] = (WIDTH,)
    spread = "stream"

    def at(self, tokens: int) -> Codec:
        return of_width(self.room.bits(tokens))

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        widths = torch.tensor(self._widths(segment, sealing))[segment.layout.stream_of_row]
        given = segment.side_array(WIDTH).long().cpu()
        widths = torch.where(given > 0, given, widths)
        own = replace(sealing, earlier=tuple(leaves(sealing.earlier)))
        return _encode(segment, widths, widths.unique().tolist(), own)

    def _widths(self, segment: DenseSegment, sealing: Sealing) -> list[int]:
        """Return the bits of every stream: those of the first pairs of its row, if there are any that all have the same."""
        rows = segment.layout.streams // sealing.heads
        held = {} if self.per_pair else widths_held(sealing.earlier, sealing.heads)
        seen = [sealing.seen] * rows if sealing.mask is None else sealing.mask.sum(dim=1).tolist()
        bits = [held.get(row) or self.room.bits(int(tokens)) for row, tokens in enumerate(seen)]
        return [width for width in bits for _ in range(sealing.heads)]

    def gathered(self, segments: Sequence[Segment]) -> list[Segment]:
        plain = all(isinstance(segment, (MixedSegment, RotatedSegment, DenseSegment)) for segment in segments)
        return [by_format(segments)] if segments and plain else list(segments)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        raise TypeError("the bytes of a pair follow from the length of a prompt: ask `at(tokens)`")


def of_width(bits: int) -> Codec:
    """Return the codec of so many bits a channel."""
    return WholeDenseCodec(GROUP, 0) if bits == DENSE else CentredCodec((bits, bits), 0, group=GROUP)


def widths_held(parts: Iterable[Segment], heads: int) -> dict[int, int]:
    """Return the bits of every row that holds encoded pairs, with so many kv `heads` a row."""
    found: dict[int, int] = {}
    for part in leaves(part.known() for part in parts):
        found |= {n // heads: _bits(part) for n, length in enumerate(part.layout.lengths) if length}
    return found


def _bits(part: Segment) -> int:
    """Return the bits of a channel of a segment of one width."""
    return part.keys.bits if isinstance(part, RotatedSegment) else DENSE


def pair_widths(store: KVStore, stream: int) -> Tensor:
    """Return the bits of all pairs of a stream in order, `[n]` on the host; 0 for those that are not encoded."""
    found = [_bits_of(part, torch.arange(part.layout.total)[part.layout.rows(stream)]) for part in store.segments]
    encoded = torch.cat(found) if found else torch.empty(0, dtype=torch.long)
    return torch.nn.functional.pad(encoded, (0, store.stored()[stream] - len(encoded)))


def _bits_of(part: Segment, rows: Tensor) -> Tensor:
    part, rows = part.located(rows.to(part.device))
    if isinstance(part, MixedSegment):
        second, found = part.in_second[rows].cpu(), torch.zeros(len(rows), dtype=torch.long)
        ranks = torch.where(part.in_second, part.in_second.cumsum(0), (~part.in_second).cumsum(0)) - 1
        for held, mine in ((part.one, ~second), (part.other, second)):
            found[mine] = _bits_of(held, ranks[rows][mine.to(rows.device)])
        return found
    return torch.full((len(rows),), _bits(part))


def leaves(parts: Iterable[Segment]) -> Iterator[Segment]:
    """Yield the segments of one width that segments consist of."""
    for part in parts:
        if isinstance(part, MixedSegment):
            yield from leaves(part.parts)
        else:
            yield part


def _encode(segment: DenseSegment, bits: Tensor, widths: Sequence[int], sealing: Sealing) -> Segment:
    """Encode every pair in the `bits [total]` that its stream takes, all widths being given in order."""
    if len(widths) == 1:
        return of_width(widths[0]).encode(segment, sealing)
    second, parts = bits != widths[0], []
    for mine, left in ((~second, widths[:1]), (second, widths[1:])):
        rows = mine.nonzero().flatten()
        counts = torch.bincount(segment.layout.streams_of(rows), minlength=segment.layout.streams)
        at = rows.to(segment.device)
        pairs = DenseSegment(segment.keys[at], segment.values[at], Layout(counts.tolist()))
        parts.append(_encode(pairs, bits[mine], left, sealing))
    return MixedSegment(parts[0], parts[1], Flags.of(second.to(segment.device)), segment.layout)
