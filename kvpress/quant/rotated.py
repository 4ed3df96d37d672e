# SPDX-License-Identifier: Apache-2.0
"""Centred vectors behind a Hadamard matrix, in even steps of one size per vector: few bits without groups or calibration."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.cache.storage import Held, part, per_pair, per_stream
from kvpress.core.checks import Size
from kvpress.core.registry import register
from kvpress.quant.bits import Bits
from kvpress.quant.hadamard import hadamard
from kvpress.quant.press import QuantisingPress

ROUNDS = 3
"""How often codes and steps are fitted to each other; a further time changes the error by less than 1%."""


@register("rotated", "quantise", example="rotated:bits=3")
@dataclass
class RotatedPress(QuantisingPress):
    """Subtract the mean of a head, rotate by a Hadamard matrix, and store codes of `bits` bits beside one step per vector.

        y = (x - c) H,   code[d] = round(y[d] / a + m) in [0, 2**bits - 1],   x' = a (code - m) H^T + c,   m = (2**bits - 1) / 2

    c is the mean of the pairs of a head that are encoded first, for keys and for values; later ones use it too. The step a of
    a vector begins with the best one for Gaussian channels; then codes and step are fitted to each other by least squares. A
    pair takes 2 (bits D + 16) bits: every pair has a scale of its own, so that a prompt is encoded to its last pair. Where D
    is no power of two, H is made of blocks. The newest `residual_length` and the first `sinks` stay dense; while tokens are
    generated, up to 31 more do, 255 on a GPU.

    Paper: none; of the kind of `TurboQuantPress`.
    Differs from the paper: from TurboQuant, a mean is subtracted; the matrix is that of Hadamard and the same everywhere,
    so that nothing is held of it; levels are evenly spaced, so that kernels multiply the codes as integers, and their
    distance follows each vector, which makes up for it; a large bias of keys is stored apart (`QuantisingPress`).
    """

    bits: Bits = 2
    residual_length: Size = 32
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    def layer_codec(self, layer: int) -> CentredCodec:
        return CentredCodec(self.layer_bits().at(layer), self.residual_length, self.sinks)


@dataclass
class CentredCodec(Codec):
    """Codes what differs from the mean of a stream; see `RotatedPress`."""

    bits: tuple[int, int]
    residual: int
    sinks: int = 0
    group: int = 32

    whole: ClassVar[bool] = True
    spread = "stream"

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        # The centre of the same bits counts most: what is encoded now can then be joined to it.
        earlier = [other for other in sealing.earlier if isinstance(other, RotatedSegment)]
        earlier.sort(key=lambda other: (other.keys.bits, other.values.bits) == self.bits)
        stream = segment.layout.stream_of_row.to(segment.device)
        centres, coded = [], []
        for name, side, bits in zip(
            ("key_centre", "value_centre"), (segment.keys, segment.values), self.bits, strict=True
        ):
            centre = _means(side, segment)
            for other in earlier:
                held = other.layout.lengths_tensor.to(segment.device) > 0
                centre = torch.where(held[:, None], getattr(other, name), centre)
            centres.append(centre)
            coded.append(SteppedRows.encode(side, centre, stream, bits))
        return RotatedSegment(coded[0], coded[1], segment.layout, segment.keys.dtype, centres[0], centres[1])

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
    def encode(cls, side: Tensor, centre: Tensor, stream: Tensor, bits: int) -> SteppedRows:
        """Code `side [R, D]` minus the centre of the `stream [R]` of each row, in blocks whose float32 copies are small.

        Raises:
            ValueError: for rows whose step does not fit into 16 bits.
        """
        basis, most = hadamard(side.shape[1], side.device), 2**bits - 1
        codes, steps = [], []
        for rows, of in zip(side.split(BLOCK_ROWS), stream.split(BLOCK_ROWS), strict=True):
            y = (rows.float() - centre[of].float()) @ basis
            step = (y.norm(dim=1, keepdim=True) * (gaussian_step(bits) / y.shape[1] ** 0.5)).clamp_min(1e-30)
            for _ in range(ROUNDS):
                z = (y / step + most / 2).round_().clamp_(0, most).sub_(most / 2)
                step = ((y * z).sum(dim=1, keepdim=True) / z.square().sum(dim=1, keepdim=True)).clamp_min(1e-30)
            codes.append(kernels.pack((z + most / 2).to(torch.uint8), bits))
            steps.append(step[:, 0])
        step = torch.cat(steps)
        limit = torch.finfo(torch.float16).max / max(1.0, most / 2)  # decoded values are float16 on a GPU
        if len(step) and (found := float(step.detach().amax())) > limit:
            raise ValueError(
                f"rotated holds the step of a row in float16, at most {limit:.0f} with {bits} bits, and keys or values here "
                f"need {found:.3g}; use kivi, whose scales may be float32"
            )
        return cls(torch.cat(codes), step.half(), bits)

    @property
    def channels(self) -> int:
        """Channels D of a row."""
        return self.codes.shape[1] * 8 // self.bits

    def operand(self) -> kernels.Packed:
        """Return the rows as operators take them: they need no zeros, since m is the same for every row."""
        middle = (2**self.bits - 1) / 2
        return kernels.Packed(self.codes, self.step[:, None], None, self.bits, (1, self.channels), zero_point=middle)


@dataclass(eq=False, repr=False)
class RotatedSegment(Segment):
    """Pairs as coded rows of what is left of them without the centres `[N, D]` of their stream, times a Hadamard matrix."""

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
        one, other = (
            kernels.Basis(rotation=hadamard(side.channels, self.device), centre=centre) for side, centre in pairs
        )
        return one, other


def _means(side: Tensor, segment: DenseSegment) -> Tensor:
    """Mean of every stream in 16 bits, `[N, D]`; zeros where it is empty."""
    dtype = torch.float16 if side.dtype == torch.float16 else torch.bfloat16
    means = torch.zeros(segment.layout.streams, side.shape[1], dtype=dtype, device=side.device)
    for n, length in enumerate(segment.layout.lengths):
        if length:
            means[n] = side[segment.layout.rows(n)].mean(dim=0, dtype=torch.float32).to(dtype)
    return means


def gaussian_step(bits: int) -> float:
    """Return the distance of `2**bits` even levels around zero that quantise a unit Gaussian with the least squared error."""
    return _best_step(bits)[0]


def gaussian_error(bits: int) -> float:
    """Return the squared error of a unit Gaussian that is quantised in that step."""
    return _best_step(bits)[1]


@cache
def _best_step(bits: int) -> tuple[float, float]:
    x = torch.linspace(0, 8, 4001, dtype=torch.float64)
    density, most = (-x.square() / 2).exp(), (2**bits - 1) / 2
    steps = torch.linspace(0.005, 2, 400, dtype=torch.float64)[:, None]
    level = ((x / steps - 0.5).round().clamp(0, most - 0.5) + 0.5) * steps
    errors = ((x - level).square() * density).sum(dim=1) / density.sum()
    return float(steps[errors.argmin()]), float(errors.min())
