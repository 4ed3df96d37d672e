# SPDX-License-Identifier: Apache-2.0
"""Floating-point formats of 8 and 4 bits that accelerators support, with scales per token or per block of channels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Annotated, ClassVar, Literal, TypeAlias

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.cache.storage import Held, part, per_pair, per_stream
from kvpress.core.checks import Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import register
from kvpress.quant.press import QuantisingPress
from kvpress.quant.uniform import WHOLE_HEAD

E4M3_MOST, E2M1_MOST = 448.0, 6.0
WIDEST = E4M3_MOST * torch.finfo(torch.float16).max
"""Largest magnitude that `fp8` can store."""
HEADROOM = 16
"""Factor by which later values of a head may exceed its first encoded values before `nvfp4` clips them."""
Format: TypeAlias = Literal["fp8", "nvfp4", "mxfp4"]
BLOCKS: dict[str, int] = {"fp8": WHOLE_HEAD, "nvfp4": 16, "mxfp4": 32}
"""Channels that share a scale."""


class FloatPress(QuantisingPress):
    """Base of presses that store channels as small floating-point numbers; subclasses set the format."""

    residual_length: Size
    skip_layers: tuple[int, ...]
    sinks: Size

    format: ClassVar[Format]

    def check_shape(self, layer: LayerFacts) -> None:
        block = BLOCKS[self.format]
        if layer.head_dim % min(block, layer.head_dim):
            raise ValueError(
                f"{self.format} needs a head dim that is a multiple of {block}, the model has {layer.head_dim}"
            )
        super().check_shape(layer)

    def layer_codec(self, layer: int) -> FloatCodec:
        return FloatCodec(self.format, self.residual_length, self.sinks)


@register("fp8", "quantise", "Micikevicius et al., 2022, arXiv:2209.05433", example="fp8:sinks=4")
@dataclass
class FP8Press(FloatPress):
    """Store every channel as an 8-bit float (e4m3) and one 16-bit scale per token and head.

        s = max |x| / 448,   code = e4m3(x / s),   x' = s * code

    Every code has three bits of mantissa at every magnitude, so small channels keep their relative precision if another channel
    is large. The newest `residual_length` pairs of every head and its first `sinks` stay dense, and up to 31 more while tokens
    are generated (255 on a GPU); `skip_layers` stay dense.

    Paper: Micikevicius et al., FP8 Formats for Deep Learning, 2022, arXiv:2209.05433, which defines the numbers.
    Differs from the paper: the paper has one scale per tensor of weights or activations; here every token of a head has one,
    and nothing is calibrated; a large bias of keys is stored separately (`QuantisingPress`).
    """

    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    bits: ClassVar[int] = 8  # type: ignore[misc]
    format: ClassVar[Format] = "fp8"


@register("nvfp4", "quantise", example="nvfp4:sinks=4", status="reproduction")
@dataclass
class NVFP4Press(FloatPress):
    """Store channels as 4-bit floats (e2m1), with an 8-bit scale (e4m3) per 16 channels and a 32-bit scale per head.

        s = e4m3(max |x| / 6 / t),   code = e2m1(x / (s t)),   x' = s t * code,   e2m1 = +-{0, .5, 1, 1.5, 2, 3, 4, 6}

    A value takes 4.5 bits. The factor t is set by the first encoded pairs of a head, so that later values may be 16 times
    larger before they are clipped. The newest `residual_length` pairs of every head and its first `sinks` stay dense, and up
    to 31 more while tokens are generated (255 on a GPU); `skip_layers` stay dense.

    Paper: none; the format NVFP4 as accelerators define it.
    Differs from the paper: t belongs to a head of a sequence, not to a tensor of a calibrated model; a large bias of keys
    is stored separately (`QuantisingPress`).
    """

    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    bits: ClassVar[int] = 4  # type: ignore[misc]
    format: ClassVar[Format] = "nvfp4"


@register("mxfp4", "quantise", "Rouhani et al., 2023, arXiv:2310.10537", example="mxfp4:sinks=4")
@dataclass
class MXFP4Press(FloatPress):
    """Store channels as 4-bit floats (e2m1), with an 8-bit power of two (e8m0) as the scale of 32 channels.

        s = 2**(floor(log2(max |x|)) - 2),   code = e2m1(x / s),   x' = s * code,   e2m1 = +-{0, .5, 1, 1.5, 2, 3, 4, 6}

    A value takes 4.25 bits. Values above 6 s are clipped, as the format defines, by at most a quarter of the value. The newest
    `residual_length` pairs of every head and its first `sinks` stay dense, and up to 31 more while tokens are generated (255
    on a GPU); `skip_layers` stay dense.

    Paper: Rouhani et al., Microscaling Data Formats for Deep Learning, 2023, arXiv:2310.10537.
    Differs from the paper: ties between two codes go to the smaller one, not to the even one; a large bias of keys is
    stored separately (`QuantisingPress`).
    """

    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 0

    bits: ClassVar[int] = 4  # type: ignore[misc]
    format: ClassVar[Format] = "mxfp4"


@dataclass
class FloatCodec(Codec):
    """Codec that encodes every pair independently; see `FP8Press`, `NVFP4Press` and `MXFP4Press`."""

    format: Format
    residual: int
    sinks: int = 0
    group: int = 32

    whole: ClassVar[bool] = True

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        factors: list[Tensor | None] = [None, None]
        if self.format == "nvfp4":
            earlier = [previous for previous in sealing.earlier if isinstance(previous, FloatSegment)]
            factors = [_factors(segment, name, earlier) for name in ("key", "value")]
        stream = segment.layout.stream_of_row.to(segment.device)
        sides = zip((segment.keys, segment.values), factors, strict=True)
        keys, values = (FloatRows.encode(side, self.format, factor, stream) for side, factor in sides)
        return FloatSegment(keys, values, segment.layout, segment.keys.dtype, *factors)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        if self.format == "fp8":
            return 2 * (dim + 2)
        return 2 * (dim / 2 + dim / min(BLOCKS[self.format], dim))

    def fixed_bytes(self, dim: int) -> float:
        return 8 if self.format == "nvfp4" else 0


@dataclass(eq=False)
class FloatRows(Held):
    """Rows `level[code] * scale`: `codes [R, D * bits / 8]` and `scale [R, D / block]`, float16 or the bytes of the format."""

    codes: Annotated[Tensor, per_pair("codes")]
    scale: Annotated[Tensor, per_pair("scales")]
    format: Format

    @classmethod
    def encode(cls, side: Tensor, format: Format, factor: Tensor | None, stream: Tensor) -> FloatRows:
        """Encode `side [R, D]`, divided by the `factor [N]` of the `stream [R]` of each row, in blocks that keep copies small.

        Raises:
            ValueError: a row needs a larger scale than the format has.
        """
        codes, scales = [], []
        for rows, row_stream in zip(side.split(BLOCK_ROWS), stream.split(BLOCK_ROWS), strict=True):
            x = rows.float() if factor is None else rows.float() / factor[row_stream][:, None]
            x = x.unflatten(1, (-1, min(BLOCKS[format], x.shape[1])))
            scale, step = _steps(x.abs().amax(dim=2), format)
            codes.append(_codes(x / step[..., None], format).flatten(1))
            scales.append(scale)
        bits, scale = 8 if format == "fp8" else 4, torch.cat(scales)
        if format == "fp8" and bool(scale.isinf().any()):
            raise ValueError(
                f"fp8 stores the scale of a row in float16, for magnitudes up to {WIDEST:.3g}, but these keys or values are "
                "larger; use mxfp4, whose scales have a wider range, or kivi"
            )
        return cls(kernels.pack(torch.cat(codes), bits), scale, format)

    def operand(self) -> kernels.Packed:
        """Return the kernel operand."""
        bits = 8 if self.format == "fp8" else 4
        kind = {"nvfp4": torch.float8_e4m3fn, "mxfp4": torch.float8_e8m0fnu}.get(self.format)
        scale = self.scale if kind is None else self.scale.view(kind)
        block = self.codes.shape[1] * 8 // bits // scale.shape[1]
        levels = _levels(bits, self.codes.device)
        return kernels.Packed(self.codes, scale, None, bits, (1, block), levels=levels)


@dataclass(eq=False, repr=False)
class FloatSegment(Segment):
    """Pairs as small floating-point numbers, times a factor per stream `[N]` if the format has one."""

    keys: Annotated[FloatRows, part()]
    values: Annotated[FloatRows, part()]
    layout: OfStreams
    dtype: torch.dtype
    key_factor: Annotated[Tensor | None, per_stream("scales")] = None
    value_factor: Annotated[Tensor | None, per_stream("scales")] = None

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        streams = self.layout.streams_of(rows)
        sides = []
        for side, factor in ((self.keys, self.key_factor), (self.values, self.value_factor)):
            decoded = side.operand().read(rows)
            sides.append((decoded if factor is None else decoded * factor[streams, None]).to(self.dtype))
        return sides[0], sides[1]

    def operand(self) -> kernels.Rows:
        keys, values = self.keys.operand(), self.values.operand()
        bases = [
            None if factor is None else kernels.Basis(scale=factor[:, None].expand(-1, side.channels))
            for side, factor in ((keys, self.key_factor), (values, self.value_factor))
        ]
        return kernels.Rows(keys, values, self.log_weight, bases[0], bases[1])


def _factors(segment: DenseSegment, side: Literal["key", "value"], earlier: list[FloatSegment]) -> Tensor:
    """Return the factor t of every stream, float32 [N]: that of its earlier pairs, else one for its largest magnitude."""
    rows = segment.keys if side == "key" else segment.values
    largest = torch.zeros(segment.layout.streams, device=segment.device)
    for n, length in enumerate(segment.layout.lengths):
        if length:
            largest[n] = rows[segment.layout.rows(n)].abs().amax()
    factor = torch.where(largest > 0, largest * (HEADROOM / E2M1_MOST / E4M3_MOST), 1.0)
    for previous in earlier:
        previous_factor = getattr(previous, f"{side}_factor")
        factor = torch.where(previous.layout.lengths_tensor.to(segment.device) > 0, previous_factor, factor)
    return factor


def _steps(largest: Tensor, format: Format) -> tuple[Tensor, Tensor]:
    """Return the scales of blocks with these largest magnitudes, in stored form and as float32."""
    if format == "fp8":
        scale = (largest / E4M3_MOST).clamp_min(2.0**-24).half()
        return scale, scale.float()
    if format == "nvfp4":
        rounded = (largest / E2M1_MOST).clamp(2.0**-9, E4M3_MOST).to(torch.float8_e4m3fn)
        return rounded.view(torch.uint8), rounded.float()
    exponent = (torch.frexp(largest).exponent - 3).clamp(-126, 127)  # frexp returns mantissas from 1 / 2 to 1
    return (exponent + 127).to(torch.uint8), torch.exp2(exponent.float())


def _codes(numbers: Tensor, format: Format) -> Tensor:
    """Return the nearest codes, uint8; magnitudes above the largest level are clipped."""
    if format == "fp8":
        return numbers.clamp(-E4M3_MOST, E4M3_MOST).to(torch.float8_e4m3fn).view(torch.uint8)
    levels = _levels(4, numbers.device)[:8].float()
    magnitude = torch.bucketize(numbers.abs(), (levels[1:] + levels[:-1]) / 2)
    return (magnitude + 8 * (numbers < 0)).to(torch.uint8)


@cache
@torch.inference_mode(False)
def _levels(bits: int, device: torch.device) -> Tensor:
    """Return the values of the codes of e4m3 (8 bits) or e2m1 (4 bits), float16.

    The NaN codes 127 and 255 are never stored; here they have the value that kernels compute from their bits.
    """
    if bits == 8:
        every = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).half()
        every[[127, 255]] = torch.tensor([480.0, -480.0], dtype=torch.float16)
        return every.to(device)
    positive = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float16)
    return torch.cat([positive, -positive]).to(device)
