# SPDX-License-Identifier: Apache-2.0
"""Coupled quantisation: neighbouring channels share one code."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.rotation import angle_bytes, rotation_of
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.calibration import Calibration
from kvpress.core.checks import Size, check_count
from kvpress.core.model import LayerFacts
from kvpress.core.registry import Refusal, register
from kvpress.kernels import CODE_BITS, check_packing
from kvpress.quant.bits import Bits
from kvpress.quant.calibrated import CalibratedPress
from kvpress.quant.codebook import CodedRows, CodedSegment
from kvpress.quant.press import pair

METHOD = "cq"


@register(
    "cq",
    "quantise",
    "Zhang et al., 2024, arXiv:2405.03917",
    example="cq:bits=8,coupled=8",
    needs="codebooks of the model: `kvpress calibrate cq` (`calibration`)",
    refuses=(
        Refusal("cq:bits=8,coupled=8", "without a file of its own, a model other than the bundled reference model"),
        Refusal("cq:bits=8,coupled=2", "no codebooks were made for these settings"),
    ),
)
@dataclass
class CoupledQuantPress(CalibratedPress):
    """Store `coupled` neighbouring channels of a head as one code of `bits` bits into a learned codebook.

        code = argmin_e |x[group] - book[head, group, e]|^2

    A value takes ``bits / coupled`` bits: CQ-4c8b is `coupled=4, bits=8`. Keys are encoded before their rotary embedding and
    rotated when they are read. Codebooks come from `calibration`, a file made by `kvpress calibrate cq`; the bundled
    reference model needs none. `coupled` and `bits` are one number each, or a pair (keys, values).

    Paper: Zhang et al., KV Cache is 1 Bit Per Channel: Efficient Large Language Model Inference with Coupled
    Quantization, 2024, arXiv:2405.03917.
    Differs from the paper: the newest `residual_length` to `residual_length + 63` tokens stay in a dense tail, because
    pairs are encoded 32 at a time; the first `sinks` tokens stay dense.
    """

    bits: Bits = 8
    coupled: int | tuple[int, int] = 4
    calibration: str | None = None
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 4

    allowed_bits: ClassVar[tuple[int, ...]] = CODE_BITS
    method: ClassVar[str] = METHOD
    tables: ClassVar[str] = "books"

    def validate(self) -> None:
        super().validate()
        for coupled in pair("coupled", self.coupled):
            check_count("coupled", coupled)
        if self.layer_bits().per_layer:
            raise ValueError(f"bits must be one number or a pair (keys, values) for codebooks, got {self.bits!r}")

    @property
    def shipped_as(self) -> str:
        return name_of(self.layer_bits().at(0), pair("coupled", self.coupled))

    def check_settings(self, file: Calibration) -> None:
        expected = {"bits": list(self.layer_bits().at(0)), "coupled": list(pair("coupled", self.coupled))}
        actual = {name: file.provenance["settings"].get(name) for name in expected}
        if file.provenance["method"] == METHOD and actual != expected:
            raise ValueError(f"{self.source} was made for {actual}, but the press is set to {expected}")

    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        sides = zip(("keys", "values"), self.layer_bits().at(0), pair("coupled", self.coupled), strict=True)
        return {name: (layer.kv_heads, layer.head_dim // c, 2**b, c) for name, b, c in sides}

    def check_shape(self, layer: LayerFacts) -> None:
        check_coupling(layer.head_dim, pair("coupled", self.coupled), self.layer_bits().at(layer.index))

    def layer_codec(self, layer: int) -> CoupledCodec:
        bits = self.layer_bits().at(layer)
        tensors = self.found().tensors
        return CoupledCodec(
            tensors[f"{layer}.keys"], tensors[f"{layer}.values"], bits, pair("coupled", self.coupled),
            self.residual_length, self.sinks,
        )  # fmt: skip


def check_coupling(dim: int, coupled: tuple[int, int], bits: tuple[int, int]) -> None:
    """Refuse channels per code and bits per code, of keys and values, that do not fit the head dim."""
    for channels, width in zip(coupled, bits, strict=True):
        if channels < 1 or dim % channels:
            raise ValueError(f"coupled must divide the head dim {dim} of the model, got {channels}")
        check_packing(dim // channels, width)


def name_of(bits: tuple[int, int], coupled: tuple[int, int]) -> str:
    """Return the name of a setting as in the paper, such as cq-4c8b."""
    sides = [f"{c}c{b}b" for c, b in zip(coupled, bits, strict=True)]
    return "cq-" + "-".join(sides[: 1 if sides[0] == sides[1] else 2])


@dataclass
class CoupledCodec(Codec):
    """Codec with codebooks `[H, D / c, E, c]` of one layer; see `CoupledQuantPress`."""

    key_book: Tensor
    value_book: Tensor
    bits: tuple[int, int]
    coupled: tuple[int, int]
    residual: int
    sinks: int = 0

    group: ClassVar[int] = 32  # type: ignore[misc]
    slot_bytes: ClassVar[int] = 4
    spread = None

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        books = [book.to(segment.device) for book in (self.key_book, self.value_book)]
        rotation = rotation_of(sealing, segment)
        for earlier in sealing.earlier:
            if isinstance(earlier, CodedSegment):
                books = [earlier.keys.book, earlier.values.book]
        keys = segment.keys if rotation is None else rotation.unrotate(segment)
        sides = zip((keys, segment.values), books, self.bits, strict=True)
        coded = [CodedRows.encode(vectors, book, bits, segment.layout) for vectors, book, bits in sides]
        return CodedSegment(coded[0], coded[1], segment.layout, segment.keys.dtype, rotation)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        del dtype
        return sum(dim / coupled * bits / 8 for coupled, bits in zip(self.coupled, self.bits, strict=True))

    def table_bytes(self, dim: int) -> int:
        del dim
        return self.key_book.nbytes + self.value_book.nbytes

    def shared_bytes(self, tokens: int, dim: int) -> int:
        return angle_bytes(tokens, dim)
