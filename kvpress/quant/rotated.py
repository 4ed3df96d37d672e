# SPDX-License-Identifier: Apache-2.0
"""Centred vectors rotated by a Hadamard matrix, with one step size per vector: few bits without groups or calibration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import block_rows
from kvpress.cache.storage import Held, part, per_pair, per_stream
from kvpress.core.checks import Size
from kvpress.core.least_squares import block_bytes
from kvpress.core.refit import KEPT_DESIGNS, KeptDesigns
from kvpress.core.registry import register
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryGram
from kvpress.quant.bits import Bits
from kvpress.quant.hadamard import hadamard
from kvpress.quant.press import QuantisingPress
from kvpress.quant.rounding import QueryMetric, compensated, rounding_order

ROUNDS = 3
"""Rounds that fit codes and steps to each other; one more round changes the error by less than 1%."""
WEIGHED_BITS = (3, 4)
"""Bits at which keys are rounded for the queries of the prompt; with fewer, other queries lose more than these gain."""
GRAM = Wanted(QueryGram)
"""Observer that the codec rounds keys with."""
COMPENSATED_BITS = (2, 3)
"""Bits at which values are rounded for the queries of a refit; with 4, the errors of values hardly change answers."""
MOST = 2048
"""Most pairs of a head that make up for each other's errors, which bounds their Gram matrix."""


@register("rotated", "quantise", example="rotated:bits=3", status="recommended")
@dataclass
class RotatedPress(QuantisingPress):
    """Subtract the mean of a head, rotate by a Hadamard matrix, and store codes of `bits` bits and one step per vector.

        y = (x - c) H,   code[d] = round(y[d] / a + m) in [0, 2**bits - 1],   x' = a (code - m) H^T + c,   m = (2**bits - 1) / 2

    The centre c is the mean of the first encoded pairs of a head, one for keys and one for values; later pairs use it too.
    The step a of a vector starts at the best step for Gaussian channels; then codes and step are fitted to each other by
    least squares. Keys of a prompt in 3 or 4 bits are rounded for the queries q of the prompt and of the head's group: the
    error e of a key is measured as the sum of (q . e)^2, channels are rounded one after another, and later ones make up for the
    errors of earlier ones. Values of a prompt in 2 or 3 bits that `RefitPress` solves for are rounded for the outputs of its
    queries: in 16 steps, each for every 16th pair, after which the values that remain are solved for again, with the ridge of
    the refit; more than 2048 pairs of a head are divided into groups for this. This changes codes and steps only, not what is
    stored; pairs of generated tokens, and those of models that read their cache by themselves, are rounded to the nearest code.
    `bits` is the number of bits of a code, for keys and for values alike. A pair takes 2 (bits D + 16) bits.
    Every pair has its own steps, so a prompt is encoded to its last pair. If D is not a power of two, H consists of blocks.
    The newest `residual_length` pairs and the first `sinks` stay dense, and up to 31 more while tokens are generated (255 on
    a GPU).

    Paper: none; similar to `TurboQuantPress`. Rounding with feedback is that of GPTQ (Frantar et al., 2022), which rounds
    weights so.
    Differs from the paper: unlike TurboQuant, a mean is subtracted; the rotation is a Hadamard matrix, the same for all heads
    and layers, and is not stored; levels are evenly spaced, so that kernels multiply the codes as integers, and the step is
    fitted to each vector to compensate; a large bias of keys is stored separately (`QuantisingPress`).
    """

    bits: Bits = 2
    residual_length: Size = 32
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def layer_codec(self, layer: int) -> CentredCodec:
        return CentredCodec(self.layer_bits().at(layer), self.residual_length, self.sinks)


@dataclass
class CentredCodec(Codec):
    """Codec of vectors minus the mean of their stream; see `RotatedPress`."""

    bits: tuple[int, int]
    residual: int
    sinks: int = 0
    group: int = 32

    whole: ClassVar[bool] = True
    spread = "stream"

    @property
    def aids(self) -> tuple[Wanted, ...]:
        keys = (GRAM,) if self.bits[0] in WEIGHED_BITS else ()
        return (*keys, KEPT_DESIGNS) if self.bits[1] in COMPENSATED_BITS else keys

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        # The centre of a segment with the same bits comes last and wins, so that the new segment can be joined to it.
        earlier = [previous for previous in sealing.earlier if isinstance(previous, RotatedSegment)]
        earlier.sort(key=lambda previous: (previous.keys.bits, previous.values.bits) == self.bits)
        watched: QueryGram | None = None if sealing.generated or not self.aids else sealing.observers.get(GRAM)
        gram = None if watched is None else watched.gram
        centres = []
        for name, side in (("key_centre", segment.keys), ("value_centre", segment.values)):
            centre = _means(side, segment)
            for previous in earlier:
                has_pairs = previous.layout.lengths_tensor.to(segment.device) > 0
                centre = torch.where(has_pairs[:, None], getattr(previous, name), centre)
            centres.append(centre)
        layout, (key_bits, value_bits) = segment.layout, self.bits
        sources = (segment.keys, centres[0]) if gram is None else (segment.keys, centres[0], gram)
        keys = sealing.once(
            ("keys", key_bits, layout.lengths),
            sources,
            lambda: SteppedRows.encode(segment.keys, centres[0], layout, key_bits, gram),
        )
        if sealing.trial:  # only keys are read
            values = SteppedRows.zeros(segment.values, value_bits)
        else:
            fitted = not sealing.generated and value_bits in COMPENSATED_BITS
            designs: KeptDesigns | None = sealing.observers.get(KEPT_DESIGNS) if fitted else None
            side = segment.values if designs is None else self._compensated(segment, centres[1], designs)
            values = SteppedRows.encode(side, centres[1], layout, value_bits)
        return RotatedSegment(keys, values, layout, segment.keys.dtype, centres[0], centres[1])

    def _compensated(self, segment: DenseSegment, centre: Tensor, designs: KeptDesigns) -> Tensor:
        """Return values `[R, D]`, float32, whose nearest codes give the queries of a refit nearly the outputs of the values."""
        layout, values = segment.layout, segment.values.to(torch.float32, copy=True)
        device, basis = values.device, hadamard(values.shape[1], values.device)
        taken = {n: designs.take(n) for n, length in enumerate(layout.lengths) if length}
        fitted = {n: kept for n, kept in taken.items() if kept is not None}
        groups = [(n, ranks) for n in fitted for ranks in _groups(layout.lengths[n])]
        for together in _batches(groups, device):
            order, slices = rounding_order(max(len(ranks) for _, ranks in together))
            gram = torch.eye(len(order), device=device).repeat(len(together), 1, 1)
            y = values.new_zeros(len(together), len(order), values.shape[1])
            indexes = []
            for index, (n, group) in enumerate(together):
                places = torch.where(order < len(group))[0]  # on the host, which would wait for a GPU
                ranks, places = group[order[places]].to(device), places.to(device)
                rows, (design, ridge, unit) = layout.rows(n).start + ranks, fitted[n]
                first = len(design.keys) - self.residual - layout.lengths[n]  # the newest pairs stay dense
                gram[index, places[:, None], places] = design.part(first + ranks).ridged_gram(ridge, unit)
                y[index, places] = (values[rows] - centre[n].float()) @ basis
                indexes.append((n, places, rows))
            y = compensated(y, gram, slices, self._nearest_values)
            for rounded, (n, places, rows) in zip(y, indexes, strict=True):
                values[rows] = rounded[places] @ basis + centre[n].float()
        return values

    def _nearest_values(self, y: Tensor) -> Tensor:
        """Return centred, rotated values `[N, l, D]`, rounded to the nearest codes."""
        z, step = _nearest(y.flatten(0, 1), self.bits[1])
        return (z * step).view_as(y)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4

    def fixed_bytes(self, dim: int) -> float:
        return 4 * dim


@dataclass(eq=False)
class SteppedRows(Held):
    """Rows `(code - m) * step`: `codes [R, D * bits / 8]` uint8, `step [R]` float16."""

    codes: Annotated[Tensor, per_pair("codes")]
    step: Annotated[Tensor, per_pair("scales")]
    bits: int

    @classmethod
    def encode(
        cls, side: Tensor, centre: Tensor, layout: OfStreams, bits: int, gram: Tensor | None = None
    ) -> SteppedRows:
        """Encode `side [R, D]` minus the `centre [N, D]` of each row's stream, in blocks that keep float32 copies small.

        With the second moments `gram [B, H, D, D]` of the queries of each stream, codes are rounded for these queries.

        Raises:
            ValueError: the step of a row does not fit into float16.
        """
        basis, top_code = hadamard(side.shape[1], side.device), 2**bits - 1
        stream = layout.stream_of_row.to(side.device)

        def rotated(rows: Tensor | slice) -> Tensor:
            return (side[rows].float() - centre[stream[rows]].float()) @ basis

        codes = torch.empty(side.shape, dtype=torch.uint8, device=side.device)
        step = side.new_empty(len(side), 1, dtype=torch.float32)
        block = block_rows(side.device)
        for start in range(0, len(side), block):
            rows = slice(start, min(start + block, len(side)))
            z, step[rows] = _nearest(rotated(rows), bits)
            codes[rows] = (z + top_code / 2).to(torch.uint8)
        if gram is not None and len(side):
            turn = basis.double()  # products of float32 numbers may be rounded to 16 bits
            metric = QueryMetric(turn.T @ gram.flatten(0, 1).double() @ turn)
            for index, real in _by_stream(layout, max(1, block // layout.streams), side.device):
                z, fitted = metric.fit(rotated(index), codes[index] - top_code / 2, step[index], top_code)
                codes[index[real]] = (z[real] + top_code / 2).to(torch.uint8)
                step[index[real]] = fitted[real]
        limit = torch.finfo(torch.float16).max / max(1.0, top_code / 2)  # decoded values are float16 on a GPU
        if len(step) and (largest := float(step.detach().amax())) > limit:
            raise ValueError(
                f"rotated stores the step of a row in float16, at most {limit:.0f} with {bits} bits, but these keys or values "
                f"need {largest:.3g}; use kivi, whose scales may be float32"
            )
        return cls(kernels.pack(codes, bits), step[:, 0].half(), bits)

    @classmethod
    def zeros(cls, side: Tensor, bits: int) -> SteppedRows:
        """Return rows of the shape of `side [R, D]` with a step of zero."""
        codes = torch.zeros(len(side), side.shape[1] * bits // 8, dtype=torch.uint8, device=side.device)
        return cls(codes, codes.new_zeros(len(side), dtype=torch.float16), bits)

    @property
    def channels(self) -> int:
        """Channels D of a row."""
        return self.codes.shape[1] * 8 // self.bits

    def operand(self) -> kernels.Packed:
        """Return the kernel operand; m is the same for every row, so no zero points are stored."""
        middle = (2**self.bits - 1) / 2
        return kernels.Packed(self.codes, self.step[:, None], None, self.bits, (1, self.channels), zero_point=middle)


@dataclass(eq=False, repr=False)
class RotatedSegment(Segment):
    """Pairs minus the centres `[N, D]` of their streams, rotated by a Hadamard matrix and coded."""

    keys: Annotated[SteppedRows, part()]
    values: Annotated[SteppedRows, part()]
    layout: OfStreams
    dtype: torch.dtype
    key_centre: Annotated[Tensor, per_stream("scales")]
    value_centre: Annotated[Tensor, per_stream("scales")]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        streams = self.layout.streams_of(rows)
        keys, values = (
            basis.leave(side.operand().read(rows)[:, None], streams)[:, 0].to(self.dtype)
            for side, basis in zip((self.keys, self.values), self._bases(), strict=True)
        )
        return keys, values

    def operand(self) -> kernels.Rows:
        return kernels.Rows(self.keys.operand(), self.values.operand(), self.log_weight, *self._bases())

    def _bases(self) -> tuple[kernels.Basis, kernels.Basis]:
        pairs = ((self.keys, self.key_centre), (self.values, self.value_centre))
        key_basis, value_basis = (
            kernels.Basis(rotation=hadamard(side.channels, self.device), centre=centre) for side, centre in pairs
        )
        return key_basis, value_basis


def _nearest(y: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Return the centred codes `[R, D]` and steps `[R, 1]` closest to `y [R, D]`."""
    top_code = 2**bits - 1
    step = (y.norm(dim=1, keepdim=True) * (gaussian_step(bits) / y.shape[1] ** 0.5)).clamp_min(1e-30)
    for _ in range(ROUNDS):
        z = (y / step + top_code / 2).round_().clamp_(0, top_code).sub_(top_code / 2)
        step = ((y * z).sum(dim=1, keepdim=True) / z.square().sum(dim=1, keepdim=True)).clamp_min(1e-30)
    return z, step


def _by_stream(layout: OfStreams, ranks: int, device: torch.device) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield flat rows `[N, l]` of all streams, at most `ranks` of each at a time, and which of them are real, bool `[N, l]`."""
    starts, lengths = torch.tensor([layout.offsets[:-1], layout.lengths], device=device)
    for begin in range(0, layout.longest, ranks):
        rank = torch.arange(begin, min(begin + ranks, layout.longest), device=device)
        yield (starts[:, None] + rank).clamp_max(layout.total - 1), rank < lengths[:, None]


def _groups(length: int) -> list[Tensor]:
    """Return the ranks of the pairs of a stream, in groups whose errors cancel out: neighbours are in different groups."""
    count = -(-length // MOST)
    return [torch.arange(first, length, count) for first in range(count)]


def _batches(groups: Sequence[tuple[int, Tensor]], device: torch.device) -> Iterator[list[tuple[int, Tensor]]]:
    """Yield groups whose Gram matrices are factored together: one on a CPU, as many as fit into a block on a GPU."""
    limit = 0 if device.type == "cpu" else block_bytes(device)
    batch: list[tuple[int, Tensor]] = []
    for group in groups:
        longest = max(len(ranks) for _, ranks in (*batch, group))
        if batch and 4 * (len(batch) + 1) * longest**2 > limit:
            yield batch
            batch = []
        batch.append(group)
    if batch:
        yield batch


def _means(side: Tensor, segment: DenseSegment) -> Tensor:
    """Mean of every stream in 16 bits, `[N, D]`; zeros for empty streams."""
    dtype = torch.float16 if side.dtype == torch.float16 else torch.bfloat16
    zeros = side.new_zeros(side.shape[1], dtype=torch.float32)
    parts = side.split(segment.layout.lengths)
    return torch.stack([part.mean(dim=0, dtype=torch.float32) if len(part) else zeros for part in parts]).to(dtype)


def gaussian_step(bits: int) -> float:
    """Return the step of `2**bits` even levels around zero that quantises a unit Gaussian with the least squared error."""
    return _best_step(bits)[0]


def gaussian_error(bits: int) -> float:
    """Return the squared error of a unit Gaussian quantised with `gaussian_step(bits)`."""
    return _best_step(bits)[1]


@cache
def _best_step(bits: int) -> tuple[float, float]:
    x = torch.linspace(0, 8, 4001, dtype=torch.float64)
    density, middle = (-x.square() / 2).exp(), (2**bits - 1) / 2
    steps = torch.linspace(0.005, 2, 400, dtype=torch.float64)[:, None]
    level = ((x / steps - 0.5).round().clamp(0, middle - 0.5) + 0.5) * steps
    errors = ((x - level).square() * density).sum(dim=1) / density.sum()
    return float(steps[errors.argmin()]), float(errors.min())
