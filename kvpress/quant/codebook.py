"""Pairs stored as codes into books of centroids; keys optionally as they were before their rotary embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.attention import Logits, Partial
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.kernels.coded import STEP, Coded, Rotary, per_pair, turn_halves
from kvpress.kernels.packed import pack
from kvpress.quant.kmeans import assign

TOLERANCE = 1e-2
"""Largest difference of an embedding that counts as linear from the model's cosines and sines, rounding apart."""


@dataclass
class Angles:
    """Angles of a rotary embedding in the two tables of `Rotary`: one pair of tables for all layers of a cache.

    The model rounds position times frequency to float32, which moves its angles at position 32k by up to 2e-3 rad and those
    of the tables by another amount; a key that is turned back and forth by the same tables does not see the difference.
    """

    coarse: Tensor = field(default_factory=lambda: torch.zeros(0, 2, 0))
    fine: Tensor = field(default_factory=lambda: torch.zeros(0, 2, 0))

    def grow(
        self,
        positions: int,
        compute: Callable[[Tensor], tuple[Tensor, Tensor]],
        device: torch.device,
        owner: str,
    ) -> None:
        """Hold at least that many positions.

        Args:
            positions: number of positions.
            compute: maps positions `[1, n]` to `(cos, sin)` of the model, `[1, n, rotary]` or `[1, n, rotary / 2]` each.
            device: where the positions go and the tables lie.
            owner: what is embedded so, for the message of the error.

        Raises:
            NotImplementedError: the angles are not linear in the position.
        """
        held = STEP * len(self.coarse)
        if held >= positions:
            return
        starts = torch.arange(held, positions, STEP, device=device)
        # One call, which asks for no position past the last: some embeddings choose their frequencies by the largest.
        probes = (starts[[0, len(starts) // 2, -1]] + STEP - 1).clamp_max(positions - 1)
        parts = torch.arange(STEP, device=device), starts, probes
        cos, sin = compute(torch.cat(parts)[None])
        table = torch.stack([per_pair(cos[0]), per_pair(sin[0])], dim=1).float()
        fine, coarse, expected = table.split([len(part) for part in parts])
        if held:
            fine, coarse = self.fine, torch.cat([self.coarse, coarse])
        else:
            # Scaled embeddings (YaRN) carry a factor in cos and sin, which stays in the coarse table.
            fine, coarse = fine / fine[:1, :1], coarse.contiguous()
        found = torch.stack(Rotary(coarse, fine, shift=probes).angles(probes), dim=1)
        # Three entries are rounded to the dtype of the model, and the product of position and frequency to float32.
        rounding = 2 * torch.finfo(cos.dtype).eps + positions * torch.finfo(torch.float32).eps
        if (found - expected).abs().max() > TOLERANCE + rounding:
            raise NotImplementedError(
                f"the rotary embedding of {owner} is not linear in the position; its keys cannot be coded"
            )
        self.coarse, self.fine = coarse, fine

    def __deepcopy__(self, memo: dict[int, Any]) -> Angles:
        """A copied cache shares the tables."""
        return self


@dataclass
class Turning:
    """Where the pairs of a segment stand: the pair in column c of stream n has position ``c - pads[n]``."""

    angles: Angles
    pads: Tensor | None = None

    def rotary(self, shift: Tensor, positions: Tensor | None) -> Rotary:
        """Angles of all pairs of a segment, as the operators take them."""
        return Rotary(self.angles.coarse, self.angles.fine, shift, positions)

    def shift(self, segment: Segment) -> Tensor:
        """Position minus row number of each stream, or minus column where a segment lists them, int64 [N]."""
        starts, _ = segment.layout.on(segment.device)
        shift = torch.zeros_like(starts)
        if segment.positions is None:
            shift = torch.tensor(segment.first, dtype=torch.int64, device=segment.device) - starts
        return shift if self.pads is None else shift - self.pads

    def turn_back(self, segment: DenseSegment) -> Tensor:
        """Keys of a segment as they were before their rotary embedding, float32 [total, D]."""
        rotary = self.rotary(self.shift(segment), segment.positions)
        keys = torch.empty(segment.keys.shape, device=segment.device)
        for n in range(segment.layout.streams):
            rows = segment.layout.rows(n)
            cos, sin = rotary.angles(rotary.at(n, torch.arange(rows.start, rows.stop, device=segment.device)))
            scale = cos.square() + sin.square()
            keys[rows] = turn_halves(segment.keys[rows].float(), cos / scale, -sin / scale)
        return keys

    def to(self, device: torch.device | str) -> Turning:
        """Return a copy on a device."""
        angles = Angles(self.angles.coarse.to(device), self.angles.fine.to(device))
        return Turning(angles, None if self.pads is None else self.pads.to(device))


class CodedSegment(Segment):
    """Pairs as codes; `keys.book` and `values.book` hold one book per kv head, and stream n belongs to head `n % heads`.

    With `turning`, keys were coded before their rotary embedding and are turned when they are read.
    """

    def __init__(
        self, keys: Coded, values: Coded, layout: Layout, dtype: torch.dtype, turning: Turning | None = None
    ) -> None:
        super().__init__(layout, None, [0] * layout.streams)
        self.keys = keys
        self.values = values
        self.dtype = dtype
        self.turning = turning
        self._shift: Tensor | None = None

    @property
    def heads(self) -> int:
        """Number of kv heads, each with a book of its own."""
        return self.keys.book.shape[0]

    def _rotary(self) -> Rotary | None:
        if self.turning is None:
            return None
        if self._shift is None:  # made once: a step that is recorded copies nothing from the host
            self._shift = self.turning.shift(self)
        return self.turning.rotary(self._shift, self.positions)

    def read(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        streams = self.layout.streams_of(rows)
        head = streams % self.heads
        keys = torch.empty(len(rows), self.keys.channels, device=self.device)
        values = torch.empty(len(rows), self.values.channels, device=self.device)
        for h in head.unique().tolist():
            mine = head == h
            keys[mine], values[mine] = self.keys.rows(h, rows[mine]), self.values.rows(h, rows[mine])
        rotary = self._rotary()
        keys = keys if rotary is None else rotary.turn(keys, rotary.at(streams, rows))
        return keys.to(self.dtype), values.to(self.dtype)

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        if hidden is None and kernels.serves(queries, self.keys.codes):
            at, lengths = self.layout.on(self.device)
            return kernels.lookup_decode(
                queries, *self._operands(), at, lengths, logits.scale, **self._settings(logits)
            )
        return super().attend(queries, logits, hidden)

    def attend_rows(self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor) -> Partial:
        if kernels.serves(queries, self.keys.codes):
            return kernels.lookup_select(
                queries, *self._operands(), rows, counts, logits.scale, **self._settings(logits)
            )
        return super().attend_rows(queries, logits, rows, counts)

    def _operands(self) -> tuple[Tensor, ...]:
        return self.keys.codes, self.keys.book, self.values.codes, self.values.book

    def _settings(self, logits: Logits) -> dict[str, Any]:
        rotary = self._rotary()
        turned = {} if rotary is None else vars(rotary)
        return {"key_bits": self.keys.bits, "value_bits": self.values.bits, "softcap": logits.softcap, **turned}

    def _take(self, rows: Tensor, layout: Layout) -> CodedSegment:
        turning = self.turning
        if turning is not None and turning.pads is not None:
            turning = replace(turning, pads=turning.pads[self._sources(rows, layout)])
        keys = replace(self.keys, codes=self.keys.codes[rows])
        values = replace(self.values, codes=self.values.codes[rows])
        return CodedSegment(keys, values, layout, self.dtype, turning)

    @classmethod
    def _concatenate(cls, segments: Sequence[CodedSegment]) -> CodedSegment:
        one = segments[0]
        keys, values = (
            replace(sides[0], codes=torch.cat([side.codes for side in sides]))
            for sides in ([s.keys for s in segments], [s.values for s in segments])
        )
        layout = Layout(length for segment in segments for length in segment.layout.lengths)
        turning = one.turning
        if turning is not None and turning.pads is not None:
            pads = [s.turning.pads for s in segments if s.turning is not None and s.turning.pads is not None]
            turning = replace(turning, pads=torch.cat(pads))
        return CodedSegment(keys, values, layout, one.dtype, turning)

    def joinable(self, other: Segment) -> bool:
        return (
            isinstance(other, CodedSegment)
            and self.keys.book is other.keys.book
            and self.values.book is other.values.book
            and self._same_turning(other.turning)
        )

    def _same_turning(self, other: Turning | None) -> bool:
        if self.turning is None or other is None:
            return self.turning is other
        return self.turning.angles is other.angles and (self.turning.pads is None) == (other.pads is None)

    def storage(self) -> dict[str, list[Tensor]]:
        held = {"codes": [self.keys.codes, self.values.codes], "tables": [self.keys.book, self.values.book]}
        if self.turning is not None:
            held["tables"] += [self.turning.angles.coarse, self.turning.angles.fine]
            held["indexes"] = [tensor for tensor in (self.turning.pads, self._shift) if tensor is not None]
        return held

    def _to(self, device: torch.device | str) -> None:
        for name in ("keys", "values"):
            side: Coded = getattr(self, name)
            setattr(self, name, replace(side, codes=side.codes.to(device), book=side.book.to(device)))
        self.turning = None if self.turning is None else self.turning.to(device)
        self._shift = None

    @property
    def value_dim(self) -> int:
        return self.values.channels


def encode(vectors: Tensor, book: Tensor, bits: int, layout: Layout) -> Coded:
    """Code `vectors [total, D]` by their nearest centroids in `book [heads, groups, E, c]`, stream by stream."""
    heads, groups, _, coupled = book.shape
    codes = torch.empty(layout.total, groups, dtype=torch.int16 if bits > 8 else torch.uint8, device=vectors.device)
    for n in range(layout.streams):
        rows = layout.rows(n)
        points = vectors[rows].float().unflatten(1, (groups, coupled)).transpose(0, 1)
        codes[rows] = assign(points, book[n % heads].float())[0].T.to(codes.dtype)
    return Coded(pack(codes, bits), book, bits)
