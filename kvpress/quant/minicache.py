# SPDX-License-Identifier: Apache-2.0
"""MiniCache: adjacent layers share one direction for each key and value, and keep their own magnitudes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from torch import Tensor

from kvpress.cache.codec import JointCodec, Sealing
from kvpress.cache.layout import Layout, row_numbers
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.cache.shared import SharedHeld
from kvpress.cache.storage import part, per_group, per_pair
from kvpress.core.checks import Count, Share, Size
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.kernels import BITS, check_packing
from kvpress.quant.press import check_channel_group
from kvpress.quant.runs import RowList
from kvpress.quant.uniform import UniformRows, parameter_bytes

DENSE_BITS = 16
"""Value of `bits` that stores directions in the dtype of the model."""
ROW = 4
"""Bytes of the number of a retained row."""
FLAT = 1e-4
"""Sine of the angle below which directions count as parallel or opposite, and are interpolated linearly."""


@register(
    "minicache",
    "quantise",
    "Liu et al., 2024, arXiv:2405.14366",
    example="minicache:retained=0.1",
    status="experimental",
    refuses=(
        Refusal(
            "snapkv:0.5 + minicache", "merged layers must hold the same pairs, and evictions differ between layers"
        ),
        Refusal("minicache:first_layer=1000", "no such layer"),
    ),
    exempt=(
        Exemption(
            "fuzz",
            "it refuses evictions, which most cases draw, and models with windows; its own tests run batches, turns, beams and "
            "files",
        ),
    ),
)
@dataclass
class MiniCachePress(BasePress):
    """Merge the pairs of two adjacent layers: one shared direction for each key and each value, one magnitude per layer.

        W = arccos(u . u'),   e = (sin((1 - t) W) u + sin(t W) u') / sin(W),   x ~ |x| e,   x' ~ |x'| e

    u and u' are the directions of x in the lower and x' in the upper layer, of the same token and KV head; keys are merged
    after their rotary embedding. t is `interpolation`; at 1, the upper layer keeps its own directions. Layers are merged in
    twos from `first_layer` on, by default from the middle of the model; a last layer without a partner stays dense. The share
    `retained` of the tokens of a head, those with the largest W among the tokens that are encoded together, stays exact in
    both layers, for keys and for values separately. Pairs are merged after the layers have read a prompt, and `group_size` at
    a time while tokens are generated (256 on a GPU); the newest `residual_length` stay dense.

    With `bits=16`, e is stored in the dtype of the model, once for both layers: merged layers take half of their bytes, and a
    model whose upper half is merged three quarters, plus magnitudes and retained tokens. Fewer bits store e in codes: keys per
    channel over `group_size` tokens, values per token over `group_size` channels; a large bias of keys is a part of e.
    Attention decodes one block of tokens at a time; no kernel reads this format.

    It needs layers whose keys and values point alike. Those of SmolLM2-135M do not: the mean cosine between neighbouring
    layers is 0.00 for values and lies between -0.59 and 0.56 for the keys of single heads, and the default settings lose
    every answer there. Compare cosines, or measure by `kvpress recall`, before use.

    Only neighbours among full-attention layers of one shape are merged. Layers with a sliding window, and layers next to one or
    to a recurrent layer, stay dense; models without any such neighbours, and models that cache latents, are refused. So are
    presses that evict, because each layer may keep other tokens. Pairs of two layers on different devices stay dense.

    Paper: Liu et al., MiniCache: KV Cache Compression in Depth Dimension for Large Language Models, NeurIPS 2024,
    arXiv:2405.14366; written after its abstract and the tests of KVCache-Factory. That t is 0.6, that merging begins in the
    middle, and that the paper retains tokens whose distance W / pi is in the top 5% of its range, is from memory.
    Differs from the paper: a share of the tokens of each head is retained, so that the bytes do not depend on the text. Its
    4-bit codes are combined here by `bits`, in the groups of `kivi`; its ratio of 1.53 without codes is above the 1.33 that
    merging the upper half of the layers in twos can reach. We know of no code by the authors.
    """

    bits: int = DENSE_BITS
    first_layer: Size | None = None
    interpolation: Share = 0.6
    retained: Share = 0.05
    group_size: Count = 32
    residual_length: Size = 0

    def validate(self) -> None:
        super().validate()
        if isinstance(self.bits, bool) or self.bits not in (DENSE_BITS, *BITS):
            raise ValueError(
                f"bits must be {DENSE_BITS}, for directions in the dtype of the model, or one of {list(BITS)}, "
                f"got {self.bits!r}"
            )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        codecs: dict[int, MergingCodec] = {}
        for lower, upper in () if model is None else self.merged_layers(model):
            if self.bits != DENSE_BITS:
                check_packing(lower.head_dim, self.bits)
                check_channel_group(lower.head_dim, self.group_size)
            layers = lower.index, upper.index
            codec = MergingCodec(
                layers, self.interpolation, self.retained, self.bits, self.group_size, self.residual_length
            )
            codecs |= dict.fromkeys(layers, codec)
        return Recipe(codec=codecs.get, joint=True)

    def merged_layers(self, model: ModelFacts) -> list[tuple[LayerFacts, LayerFacts]]:
        """Return the layers of a model that are merged, in twos.

        Raises:
            ValueError: the model has no layer `first_layer`, or none behind it.
            NotImplementedError: no two adjacent layers can be merged.
        """
        count = len(model.layers)
        first = count // 2 if self.first_layer is None else self.first_layer
        if self.first_layer is not None and first > count - 2:
            raise ValueError(
                f"first_layer must be in [0, {count - 2}], a layer of {model.name} with another behind it, got {first}"
            )
        merged: list[tuple[LayerFacts, LayerFacts]] = []
        for lower, upper in zip(model.layers[first:], model.layers[first + 1 :], strict=False):
            is_free = not merged or merged[-1][1] is not lower
            if is_free and _mergeable(lower, upper):
                merged.append((lower, upper))
        if not merged:
            raise NotImplementedError(
                f"minicache merges two adjacent full-attention layers of one shape that cache keys and values, and "
                f"{model.name} has none from layer {first} on; use a codec of single layers, such as kivi"
            )
        return merged


def _mergeable(lower: LayerFacts, upper: LayerFacts) -> bool:
    """Return whether two layers are adjacent and cache keys and values of the same shape."""
    shapes = [(layer.kv_heads, layer.head_dim, layer.merged_heads) for layer in (lower, upper)]
    return (
        lower.grows
        and upper.grows
        and (upper.index - lower.index, upper.cache_index - lower.cache_index) == (1, 1)
        and lower.value_dim is None
        and upper.value_dim is None
        and shapes[0] == shapes[1]
    )


@dataclass
class MergingCodec(JointCodec):
    """Codec that merges the pairs of two layers; see `MiniCachePress`."""

    layers: tuple[int, int]
    interpolation: float
    """Place of the shared direction between that of the lower layer, 0, and that of the upper layer, 1."""
    retained: float
    """Share of the tokens that stay exact."""
    bits: int
    """Bits of a number of a direction; `DENSE_BITS` for the dtype of the model."""
    group: int
    residual: int

    spread = None

    def encode_together(self, segments: Sequence[DenseSegment], sealings: Sequence[Sealing]) -> list[Segment]:
        lower, upper = segments
        if not _same_tokens(lower, upper):
            return [DenseSegment(pairs.keys, pairs.values, pairs.layout) for pairs in segments]
        keys = self._merged(lower.keys, upper.keys, lower.layout, (self.group, 1))
        values = self._merged(lower.values, upper.values, lower.layout, (1, min(self.group, lower.values.shape[1])))
        return [MergedSegment(keys, values, pairs.layout, member) for member, pairs in enumerate(segments)]

    def _merged(self, lower: Tensor, upper: Tensor, layout: Layout, group: tuple[int, int]) -> MergedRows:
        """Merge rows `[R, D]` of both layers; codes have groups of so many rows and channels."""
        direction, angle = directions(lower, upper, self.interpolation)
        norms = torch.stack([rows.float().norm(dim=1) for rows in (lower, upper)], dim=1)
        norms = norms.clamp_max(torch.finfo(lower.dtype).max)  # float16 ends at 65504
        largest = []
        for rows in map(layout.rows, range(layout.streams)):
            count = num_retained(rows.stop - rows.start, self.retained)
            largest.append(rows.start + angle[rows].topk(count).indices)
        exact_rows = torch.cat(largest).sort().values
        retained, exact = (
            RowList(exact_rows.to(torch.int32)),
            torch.stack([lower[exact_rows], upper[exact_rows]], dim=1),
        )
        direction = direction.to(lower.dtype)
        if self.bits != DENSE_BITS:
            codes = UniformRows.encode(direction, self.bits, group)
            return MergedRows(norms.to(lower.dtype), retained, exact, codes=codes)
        # The row of a retained token is free for its vector in the lower layer.
        direction[exact_rows], norms[exact_rows] = lower[exact_rows], 1.0
        return MergedRows(norms.to(lower.dtype), retained, exact[:, 1:].clone(), direction)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        long = 2**20
        return self.tile_bytes(long, dim, dtype) / long

    def tile_bytes(self, pairs: int, dim: int, dtype: torch.dtype, generated: bool = False) -> float:
        del generated
        row_bytes = dim * dtype.itemsize
        pair_bytes, exact_bytes = 2.0 * row_bytes, row_bytes
        if self.bits != DENSE_BITS:
            groups = dim / self.group + dim / min(self.group, dim)
            pair_bytes = 2 * dim * self.bits / 8 + 2 * parameter_bytes(dtype) * groups
            exact_bytes = 2 * row_bytes
        magnitudes = 2 * 2 * dtype.itemsize
        num_exact = 2 * num_retained(pairs, self.retained)
        return (pairs * (pair_bytes + magnitudes) + num_exact * (exact_bytes + ROW)) / 2  # one of the two layers


@dataclass(eq=False)
class MergedRows(SharedHeld):
    """Keys or values of two layers: a direction of each of R rows for both, and a magnitude for each.

    The direction is stored as it is or in codes. Retained rows are exact.
    """

    norms: Annotated[Tensor, per_pair("magnitudes")]
    """Magnitude of each row in each layer, `[R, 2]`."""
    retained: Annotated[RowList, part("indexes")]
    """Retained rows."""
    exact: Annotated[Tensor, per_group("retained", axis="retained")]
    """Retained rows of both layers `[E, 2, D]`, or of the upper layer `[E, 1, D]`, if `direction` has those of the lower."""
    direction: Annotated[Tensor | None, per_pair("merged")] = None
    """Directions `[R, D]`."""
    codes: Annotated[UniformRows | None, part("merged")] = None
    """Directions in codes, if `direction` is None."""

    def check(self, total: int, streams: int) -> None:
        super().check(total, streams)
        stored = self.direction if self.codes is None else self.codes.codes
        shapes = self.norms.shape[1:], self.exact.shape[1:2]
        if stored is None or stored.dim() != 2 or shapes not in (((2,), (1,)), ((2,), (2,))) or self.exact.dim() != 3:
            raise ValueError("merged rows do not have the magnitudes and retained rows of two layers")

    def read(self, rows: Tensor | slice, member: int) -> Tensor:
        """Return restored rows `[n, D]` of the lower layer, 0, or the upper layer, 1."""
        direction = self.codes.read(rows) if self.direction is None else self.direction[rows]  # type: ignore[union-attr]
        restored = (direction.float() * self.norms[rows, member, None].float()).to(self.exact.dtype)
        column = member - 2 + self.exact.shape[1]
        if column < 0 or not len(self.exact):
            return restored
        # Without a synchronisation, so that a decode step can be recorded as a CUDA graph.
        place = self.retained.places(row_numbers(rows, len(self.norms), self.device))
        return torch.where(place[:, None] >= 0, self.exact[place.clamp_min(0), column], restored)


@dataclass(eq=False, repr=False)
class MergedSegment(Segment):
    """Pairs of one of two layers whose keys and values are merged; see `MergingCodec`."""

    keys: Annotated[MergedRows, part()]
    values: Annotated[MergedRows, part()]
    layout: OfStreams
    member: int
    """Which of the two layers: 0 for the lower, 1 for the upper."""

    def check(self, total: int, streams: int) -> None:
        super().check(total, streams)
        if self.member not in (0, 1):
            raise ValueError(f"member of a MergedSegment must be 0 or 1, got {self.member}")

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        return self.keys.read(rows, self.member), self.values.read(rows, self.member)


def num_retained(length: int, share: float) -> int:
    """Return how many of `length` tokens are retained."""
    return round(share * length)


def directions(lower: Tensor, upper: Tensor, interpolation: float) -> tuple[Tensor, Tensor]:
    """Interpolate the directions of rows `[R, D]` of two layers on the sphere (SLERP).

    A row of zeros has the direction of the other layer.

    Returns:
        Unit vectors, float32 `[R, D]`, and the angles between both directions in radians, float32 `[R]`.
    """
    merged, angles = [], []
    for rows in zip(lower.split(BLOCK_ROWS), upper.split(BLOCK_ROWS), strict=True):
        norms = [side.float().norm(dim=1, keepdim=True) for side in rows]
        units = [side.float() / norm.clamp_min(1e-30) for side, norm in zip(rows, norms, strict=True)]
        first, second = (
            torch.where(norm > 0, unit, other) for norm, unit, other in zip(norms, units, reversed(units), strict=True)
        )
        angle = (first * second).sum(dim=1, keepdim=True).clamp(-1, 1).arccos()
        sine = angle.sin()
        is_flat = sine < FLAT
        weights = [
            torch.where(is_flat, share, (share * angle).sin() / sine) for share in (1 - interpolation, interpolation)
        ]
        mixed = weights[0] * first + weights[1] * second
        merged.append(mixed / mixed.norm(dim=1, keepdim=True).clamp_min(1e-30))
        angles.append(angle[:, 0])
    return torch.cat(merged), torch.cat(angles)


def _same_tokens(lower: DenseSegment, upper: DenseSegment) -> bool:
    """Return whether two layers store pairs of the same tokens, on one device."""
    return (
        lower.layout.lengths == upper.layout.lengths
        and lower.device == upper.device
        and torch.equal(lower.slots(), upper.slots())
    )
