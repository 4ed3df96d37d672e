"""Coupled quantisation: neighbouring channels share one code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress import calibration
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.store import Sealing
from kvpress.calibration import Calibration
from kvpress.checks import check_count
from kvpress.kernels.packed import CODE_BITS, check_packing
from kvpress.quant.base import Codec
from kvpress.quant.bits import Bits
from kvpress.quant.codebook import Angles, CodedSegment, Turning, encode
from kvpress.quant.press import QuantisingPress, pair
from kvpress.registry import register
from kvpress.shapes import LayerShape

METHOD = "cq"


@register("cq", "quantise", "Zhang et al., 2024, arXiv:2405.03917")
@dataclass
class CoupledQuantPress(QuantisingPress):
    """Store `coupled` neighbouring channels of a head as one code of `bits` bits into a learned book of centroids.

        code = argmin_e |x[group] - book[head, group, e]|^2

    That is ``bits / coupled`` bits per value: CQ-4c8b is `coupled=4, bits=8`. Keys are coded before their rotary embedding
    and turned when they are read. Books come from `calibration`, a file made by `kvpress calibrate --method cq`; those of the
    bundled reference model are found without it. One number each, or a pair (keys, values), sets `coupled` and `bits`.

    Paper: Zhang et al., KV Cache is 1 Bit Per Channel: Efficient Large Language Model Inference with Coupled
    Quantization, 2024, arXiv:2405.03917.
    Differs from the paper: pairs wait in a dense tail of `residual_length` to `residual_length + 31` tokens, so that they
    are coded 32 at a time; the first `sinks` tokens stay dense.
    """

    bits: Bits = 8
    coupled: int | tuple[int, int] = 4
    calibration: str | None = None
    residual_length: int = 128
    skip_layers: tuple[int, ...] = ()
    sinks: int = 4

    allowed_bits: ClassVar[tuple[int, ...]] = CODE_BITS

    def validate(self) -> None:
        super().validate()
        for coupled in pair("coupled", self.coupled):
            check_count("coupled", coupled)
        if self.layer_bits().per_layer:
            raise ValueError(f"bits must be one number or a pair (keys, values) for codebooks, got {self.bits!r}")

    @property
    def source(self) -> Path:
        """The calibration file."""
        if self.calibration is not None:
            return Path(self.calibration)
        return calibration.shipped(name_of(self.layer_bits().at(0), pair("coupled", self.coupled)))

    def books(self) -> Calibration:
        """Read the calibration file."""
        if self.calibration is None and not self.source.is_file():
            raise ValueError(
                f"no books are shipped for coupled={self.coupled} and bits={self.bits}; make a file with `kvpress calibrate "
                "--method cq` and give it as `calibration`"
            )
        return calibration.read(self.source)

    def post_init_from_model(self, model: Any) -> None:
        from kvpress.hf import check_halves_rotate

        super().post_init_from_model(model)
        found = self.books()
        found.check(METHOD, model, str(self.source))
        wanted = {"bits": list(self.layer_bits().at(0)), "coupled": list(pair("coupled", self.coupled))}
        made = {name: found.provenance["settings"][name] for name in wanted}
        if made != wanted:
            raise ValueError(f"{self.source} was made for {made}, but the press asks for {wanted}")
        check_halves_rotate(model)

    def check_shape(self, layer: int, shape: LayerShape) -> None:
        check_coupling(shape.head_dim, pair("coupled", self.coupled), self.layer_bits().at(layer))

    def codec_at(self, layer: int) -> Codec | None:
        # Sliding-window layers have no books, and need none.
        return super().codec_at(layer) if f"{layer}.keys" in self.books().tensors else None

    def layer_codec(self, layer: int) -> CoupledCodec:
        bits = self.layer_bits().at(layer)
        tensors = self.books().tensors
        return CoupledCodec(
            tensors[f"{layer}.keys"], tensors[f"{layer}.values"], bits, pair("coupled", self.coupled),
            self.residual_length, self.sinks,
        )  # fmt: skip


def check_coupling(dim: int, coupled: tuple[int, int], bits: tuple[int, int]) -> None:
    """Refuse channels per code and bits per code, of keys and of values, that do not suit a head dim."""
    for channels, width in zip(coupled, bits, strict=True):
        if channels < 1 or dim % channels:
            raise ValueError(f"coupled must divide the head dim {dim} of the model, got {channels}")
        check_packing(dim // channels, width)


def name_of(bits: tuple[int, int], coupled: tuple[int, int]) -> str:
    """Name of a setting as in the paper, such as cq-4c8b."""
    sides = [f"{c}c{b}b" for c, b in zip(coupled, bits, strict=True)]
    return "cq-" + "-".join(sides[: 1 if sides[0] == sides[1] else 2])


@dataclass
class CoupledCodec(Codec):
    """Codes pairs with books `[H, D / c, E, c]` of one layer; see `CoupledQuantPress`."""

    key_book: Tensor
    value_book: Tensor
    bits: tuple[int, int]
    coupled: tuple[int, int]
    residual: int
    sinks: int = 0

    group: ClassVar[int] = 32  # type: ignore[misc]

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        books = [book.to(segment.device) for book in (self.key_book, self.value_book)]
        turning = _turning(sealing, segment.layout.streams)
        for earlier in sealing.earlier:
            if isinstance(earlier, CodedSegment):
                books = [earlier.keys.book, earlier.values.book]
        keys = segment.keys if turning is None else turning.turn_back(segment)
        coded_keys = encode(keys, books[0], self.bits[0], segment.layout)
        coded_values = encode(segment.values, books[1], self.bits[1], segment.layout)
        return CodedSegment(coded_keys, coded_values, segment.layout, segment.keys.dtype, turning)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        del dtype
        return sum(dim / coupled * bits / 8 for coupled, bits in zip(self.coupled, self.bits, strict=True))

    def table_bytes(self) -> int:
        return self.key_book.nbytes + self.value_book.nbytes


def _turning(sealing: Sealing, streams: int) -> Turning | None:
    """Positions of a layer's pairs; None where its keys are never rotated, or outside a model."""
    call = sealing.call
    if call is None or not getattr(call.module, "use_rope", True):
        return None
    kind, device = getattr(call.module, "layer_type", None), call.queries.device
    angles: Angles = call.shared.setdefault(f"angles {kind} {device}", Angles())
    angles.grow(call.store.seen, call.angles, device, type(call.module).__name__)
    if call.columns is None:
        return Turning(angles)
    pads = (~call.columns).sum(dim=1).to(device)
    return Turning(angles, pads.repeat_interleave(streams // len(pads)))
