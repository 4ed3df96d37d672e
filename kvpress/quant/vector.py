# SPDX-License-Identifier: Apache-2.0
"""Keep, approximate or evict: pairs without values, which a linear map predicts from their keys."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Annotated

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.codec import Codec, DenseCodec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.mixed import Flags, MixedSegment, divided, plain_segments
from kvpress.cache.rotation import Angles, angle_bytes, rotation_of
from kvpress.cache.segment import DenseSegment, OfStreams, Segment
from kvpress.cache.segment_attention import options_of
from kvpress.cache.storage import per_layer, per_pair
from kvpress.core.amount import Amount
from kvpress.core.checks import Share
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Eviction, Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.quant.aquakv import AquaKVPress, PredictingCodec, predicted
from kvpress.quant.zipcache import top_per_stream

BITS = 4
"""Width of the keys that the predictors of `aquakv` were fitted to; 4 bits are the nearest to exact keys."""
NEVER = 2**30
"""Number of generated tokens that are encoded together: more than any answer has, so that all stay dense."""
POSITION = 4
"""Bytes of the position of a pair without a value."""
_REWRITTEN = "values that it changes cannot be predicted from keys"


@register(
    "vector",
    "evict",
    "after Lin et al., 2026, arXiv:2605.23258",
    example="vector(snapkv:0.5)",
    needs="predictors of the model: `kvpress calibrate aquakv` (`calibration`)",
    refuses=(
        Refusal("vector(merging(knorm:0.5))", _REWRITTEN),
        Refusal("vector(refit(knorm:0.5))", _REWRITTEN),
        Refusal("vector(h2o:0.5)", "values are dropped once, after a prompt"),
        Refusal("decoding(vector(knorm))", "values are dropped once, after a prompt"),
        Refusal("vector(knorm:0.5) + kivi", "the same pairs have one codec"),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE,
            "needs a file per model; its own tests run a plain reference, padding, turns, codecs' suites and files with one",
        ),
    ),
    status="experimental",
)
@dataclass
class VectorPress(WrapperPress):
    """Keep more pairs than another press would, and make room by dropping the values that their keys predict best.

        n tokens of a prompt, of which the inner press would keep b pairs for each head
        a       = floor(share * min((n - b) / 2, (b - 1) / 2))
        stay    the b + a best pairs of the inner press
        v'      = W k + c,   k the key before its rotary embedding
        drop    the values v of the 2 a pairs of each head with the smallest |v - v'|^2;   attention reads v' in their place

    (b + a) keys and (b - a) values take the memory of b pairs. Keys stay exact, so the logits of all b + a pairs do. Attention
    multiplies the attention-weighted mean of the keys, rotated back, by W once for each query. A pair without a value also
    stores its position, in 4 bytes. `calibration` is a file of `kvpress calibrate aquakv`, with W `[D, D]` and c `[D]` of each
    KV head, fitted to keys of 4 bits; the bundled reference model needs none. `share` scales a; 0 is the inner press. Where
    heads keep different numbers of pairs, each drops the same share of its values.

    Values are dropped once, at the end of a prompt or turn; generated tokens stay whole until the next turn. In a later turn,
    pairs of earlier turns keep or lack their values as before, and the share is that of all tokens so far. Any press that
    scores a prompt may be inside, but none that changes values or keys, as `RefitPress` and `MergingPress` do.

    Paper: after Lin et al., A Simple Plug-in for Improving Eviction-Based KV Cache Compression (VECTOR), 2026,
    arXiv:2605.23258.
    Differs from the paper: written from its abstract and a summary of its method. There, W is fitted to exact keys by ordinary
    least squares on 10,000 texts of 4096 tokens and has no offset; here, it is the ridge regression of `aquakv`, one for each
    head. Its p_a is a / n here, with one pair as its small constant.
    """

    press: BasePress
    share: Share = 1.0
    calibration: str | None = None

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        (step,) = recipe.evictions
        predictors = AquaKVPress(BITS, self.calibration).recipe(model).codec
        assert predictors is not None  # noqa: S101 - for type checkers
        depths = {} if model is None else {layer.index: depth for depth, layer in enumerate(model.growing)}

        def codec(layer: int) -> RoutingCodec | None:
            predictor = predictors(layer)
            if not isinstance(predictor, PredictingCodec):  # sliding windows have no predictors
                return None
            amount = step.amount.at(depths.get(layer, 0))
            assert isinstance(amount, Routed)  # noqa: S101 - for type checkers
            return RoutingCodec(amount, predictor.weight, predictor.offset)

        return replace(recipe, codec=codec)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        name = type(self.inner).__name__
        if step.rewrite is not None or step.refit is not None or step.closes_gaps or step.beside:
            raise TypeError(
                f"VectorPress predicts the values of the model from its keys, and {name} changes pairs: put a press that only "
                "chooses pairs inside, such as SnapKVPress"
            )
        if step.schedule.every is not None or not step.schedule.prompt or step.allocator.decides:
            raise TypeError(
                f"VectorPress drops values once, by the number of pairs that stay of a prompt, and {name} evicts by another "
                "rule: put a press with a ratio or a budget inside, such as SnapKVPress"
            )
        return replace(step, amount=Routed(**vars(step.amount), share=self.share))


@dataclass(frozen=True)
class Routed(Amount):
    """Number of pairs that stay if some of them lack their values; see `VectorPress`."""

    share: float = field(default=1.0, kw_only=True)
    """Share of the largest possible number of additional pairs."""

    def of(self, tokens: int) -> int:
        kept = super().of(tokens)
        return kept if self.ratios else kept + self.added(tokens)

    def added(self, tokens: int) -> int:
        """Return the number of pairs that stay in addition to the b of the inner press."""
        kept = super().of(tokens)
        return int(self.share * max(0, min(tokens - kept, kept - 1)) / 2)

    def dropped(self, tokens: int) -> float:
        """Return the share of the pairs of a prompt of `tokens` tokens that lack their values."""
        return 2 * self.added(tokens) / max(1, self.of(tokens))


@dataclass
class RoutingCodec(Codec):
    """Codec that drops the values that are predicted best; see `VectorPress`."""

    amount: Routed
    weight: Tensor
    """Prediction matrix of each head, `[H, D, D]`."""
    offset: Tensor
    """Prediction offset of each head, `[H, D]`."""
    group: int = NEVER
    residual: int = 0
    dropped: float = 0.0
    """Share of pairs without values, once the length of the prompt is known (`at`)."""

    whole = True
    spread = None

    def at(self, tokens: int) -> Codec:
        dropped = self.amount.dropped(tokens)
        return replace(self, dropped=dropped) if dropped else DenseCodec(self.group, self.residual)

    def begins(self, row: int, turn: bool, sealing: Sealing | None) -> bool:
        return turn and sealing is not None and self.amount.added(sealing.tokens(row + 1)[row]) > 0

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        layout, device = segment.layout, segment.device
        weight, offset = self._tables(sealing, device)
        rotation = rotation_of(sealing, segment)
        head = layout.stream_of_row.to(device) % len(weight)
        keys = segment.keys.float() if rotation is None else rotation.unrotate(segment)
        error = (segment.values.float() - predicted(keys, head, weight, offset)).square().sum(dim=1)
        shares = [self.amount.dropped(tokens) for tokens in sealing.tokens(layout.streams // sealing.heads)]
        counts = [round(shares[n // sealing.heads] * length) for n, length in enumerate(layout.lengths)]
        lacking = top_per_stream(-error, layout, counts)
        whole, others = divided(segment, lacking)
        places = angles = None
        if rotation is not None:
            rotary, rows = rotation.rotary(rotation.shift(segment), segment.positions), lacking.nonzero().flatten()
            places, angles = rotary.at(layout.streams_of(rows), rows).to(torch.int32), rotation.angles
        bare = KeySegment(others.keys, others.layout, places, angles, weight, offset)
        return MixedSegment(whole, bare, Flags.of(lacking), layout)

    def _tables(self, sealing: Sealing, device: torch.device) -> tuple[Tensor, Tensor]:
        """Return weights and offsets, shared by all segments of a layer."""
        for earlier in plain_segments(sealing.earlier):
            if isinstance(earlier, KeySegment):
                return earlier.weight, earlier.offset
        return self.weight.to(device), self.offset.to(device)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return (2 - self.dropped) * dim * dtype.itemsize + POSITION * self.dropped + 1 / 8

    def table_bytes(self, dim: int) -> int:
        return self.weight.nbytes + self.offset.nbytes

    def shared_bytes(self, tokens: int, dim: int) -> int:
        return angle_bytes(tokens, dim)


@dataclass(eq=False, repr=False)
class KeySegment(Segment):
    """Dense keys, whose values are predicted; see `VectorPress`."""

    keys: Annotated[Tensor, per_pair("dense")]
    """Keys with their rotary embedding, `[total, D]`."""
    layout: OfStreams
    places: Annotated[Tensor | None, per_pair("indexes")]
    """Position of each pair, int32 `[total]`; None where keys are not rotated. The slots are those of the mixed segment."""
    angles: Annotated[Angles | None, per_layer("tables")]
    """Tables of angles; None where keys are not rotated."""
    weight: Annotated[Tensor, per_layer("tables")]
    offset: Annotated[Tensor, per_layer("tables")]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        keys = self.keys[rows]
        head = self.layout.streams_of(rows) % len(self.weight)
        return keys, predicted(self._rotated_back(rows), head, self.weight, self.offset).to(keys.dtype)

    def _rotated_back(self, rows: Tensor | slice) -> Tensor:
        """Return keys before their rotary embedding, float32 [n, D]."""
        keys = self.keys[rows]
        if self.angles is None or self.places is None:
            return keys.float()
        at = self.places[rows].long()
        return kernels.Rotary(self.angles.coarse, self.angles.fine, shift=at).rotate_back(keys, at)

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        """Predict the mean value from the mean key, rotated back: both are linear."""
        if hidden is not None or not self.layout.total or not kernels.serves(queries, self.keys):
            return super().attend(queries, logits, hidden)
        exact = self._rotated_back(slice(None)).to(self.keys.dtype)
        rows = kernels.Rows(kernels.Dense(self.keys), kernels.Dense(exact), self.log_weight)
        means, lse = kernels.decode(queries, rows, self._ranges(queries), options_of(logits))
        head = torch.arange(len(queries), device=queries.device) % len(self.weight)
        return torch.baddbmm(self.offset[head, None].float(), means, self.weight[head].float()), lse
