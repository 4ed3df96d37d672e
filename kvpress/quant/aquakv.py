# SPDX-License-Identifier: Apache-2.0
"""AQUA-KV within a layer: values are predicted from decoded keys, and only the prediction error is encoded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import Logits, Partial
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.rotation import angle_bytes, rotation_of
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS, options_of
from kvpress.cache.storage import per_layer
from kvpress.core.checks import Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import Refusal, register
from kvpress.quant.bits import Bits
from kvpress.quant.calibrated import CalibratedPress
from kvpress.quant.codebook import CodedRows, CodedSegment
from kvpress.quant.hadamard import hadamard
from kvpress.quant.turboquant import encode, levels

METHOD = "aquakv"
FITTED_BITS = (2, 3, 4)


@register(
    "aquakv",
    "quantise",
    "after Shutova et al., 2025, arXiv:2501.19392",
    example="aquakv:bits=3",
    needs="predictors of the model: `kvpress calibrate aquakv` (`calibration`)",
    refuses=(
        Refusal("aquakv:bits=3", "without a file of its own, a model other than the bundled reference model"),
        Refusal("aquakv:bits=8", "predictors are fitted for keys of 2, 3 and 4 bits"),
    ),
)
@dataclass
class AquaKVPress(CalibratedPress):
    """Predict values from the decoded keys of the same layer, and store only the error of the prediction.

        keys      k' = level[d, code],                      nearest of `2**bits` levels fitted to channel d of the head
        values    v' = k' W + c + a * level[code] H^T,      codes of (v - k' W - c) H, a restores its norm

    Keys are encoded before their rotary embedding, and rotated when they are read. W `[D, D]` and c `[D]` of each head come
    from a ridge regression on decoded keys, so they correct part of the error of keys. H is a Hadamard matrix; its levels are
    optimal for a Gaussian. Attention decodes no segment: it multiplies the attention-weighted mean of k' by W once per query,
    at the cost of a second pass over the codes of keys. `calibration` is a file made by `kvpress calibrate aquakv`,
    which serves all widths; the bundled reference model needs none. `bits` is 2, 3 or 4, a pair (keys, values), a list with
    either for every layer, or a file of them. Pairs are encoded 32 at a time; the newest `residual_length` and the first
    `sinks` stay dense, as do the layers in `skip_layers`.

    Paper: after Shutova et al., Cache Me If You Must: Adaptive Key-Value Quantization for Large Language Models, 2025,
    arXiv:2501.19392.
    Differs from the paper: its core, the prediction from the layer below, is not here. There, keys are predicted from the
    decoded keys of that layer, and values from the decoded keys of their own layer and the decoded values below, with all
    heads at once; here, values are predicted from the keys of the same head and layer, and keys are not predicted but have
    levels fitted to the model. A chain of layers needs the same pairs in all heads and layers, which evictions by head break,
    and every decode step would decode all pairs of all layers, which attention here never does. Prediction errors are encoded
    by levels of single channels, not by a grid of vectors; all layers have the same bits unless `bits` lists them.
    """

    bits: Bits = 4
    calibration: str | None = None
    residual_length: Size = 0
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 4

    allowed_bits: ClassVar[tuple[int, ...]] = FITTED_BITS
    method: ClassVar[str] = METHOD
    tables: ClassVar[str] = "predictors"

    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        heads, dim = layer.kv_heads, layer.head_dim
        return {
            name: shape
            for b in FITTED_BITS
            for name, shape in (
                (f"keys.{b}", (heads, dim, 2**b, 1)),
                (f"weight.{b}", (heads, dim, dim)),
                (f"offset.{b}", (heads, dim)),
            )
        }

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        if layer.value_dim is not None:
            raise NotImplementedError("the model caches latents, which hold no values that keys could predict")

    def layer_codec(self, layer: int) -> PredictingCodec:
        bits, tensors = self.layer_bits().at(layer), self.found().tensors
        levels, weight, offset = (tensors[f"{layer}.{name}.{bits[0]}"].half() for name in ("keys", "weight", "offset"))
        return PredictingCodec(levels, weight, offset, bits, self.residual_length, self.sinks)


@dataclass
class PredictingCodec(Codec):
    """Codec of keys, and of the errors of values predicted by ``keys @ weight + offset``; see `AquaKVPress`."""

    levels: Tensor
    """Levels of each key channel, `[H, D, E, 1]`."""
    weight: Tensor
    """Prediction matrix of each head, `[H, D, D]`."""
    offset: Tensor
    """Prediction offset of each head, `[H, D]`."""
    bits: tuple[int, int]
    residual: int
    sinks: int = 0
    group: int = 32

    slot_bytes: ClassVar[int] = 4
    spread = None

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        layout, device = segment.layout, segment.device
        book, error_book, weight, offset = self._tables(sealing, device)
        rotation = rotation_of(sealing, segment)
        exact = segment.keys if rotation is None else rotation.unrotate(segment)
        keys = CodedRows.encode(exact, book, self.bits[0], layout)
        errors = torch.empty(segment.values.shape, device=device)
        head = layout.stream_of_row.to(device) % len(book)
        for rows in torch.arange(layout.total, device=device).split(BLOCK_ROWS):
            errors[rows] = segment.values[rows].float() - predicted(
                keys.read(rows, head[rows]), head[rows], weight, offset
            )
        values = replace(encode(errors, hadamard(errors.shape[1], device), self.bits[1]), book=error_book)
        return PredictedSegment(keys, values, layout, segment.keys.dtype, rotation, weight=weight, offset=offset)

    def _tables(self, sealing: Sealing, device: torch.device) -> tuple[Tensor, ...]:
        """Return levels of keys and of errors `[H, 1, E, 1]`, weights and offsets, shared by all segments of a layer."""
        for earlier in sealing.earlier:
            if isinstance(earlier, PredictedSegment):
                return earlier.keys.book, earlier.values.book, earlier.weight, earlier.offset
        error_levels = levels(self.bits[1], device).expand(len(self.levels), -1, -1, -1).half().contiguous()
        return self.levels.to(device), error_levels, self.weight.to(device), self.offset.to(device)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 2

    def table_bytes(self, dim: int) -> int:
        value_levels = len(self.levels) * (1 << self.bits[1])
        return self.levels.nbytes + self.weight.nbytes + self.offset.nbytes + 2 * value_levels

    def shared_bytes(self, tokens: int, dim: int) -> int:
        return angle_bytes(tokens, dim)


@dataclass(eq=False, repr=False)
class PredictedSegment(CodedSegment):
    """Coded keys and coded prediction errors of values; see `PredictingCodec`."""

    weight: Annotated[Tensor, per_layer("tables")] = None  # type: ignore[assignment]
    offset: Annotated[Tensor, per_layer("tables")] = None  # type: ignore[assignment]

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        streams = self.layout.streams_of(rows)
        head = streams % len(self.weight)
        keys = self.keys.read(rows, head)
        errors = self.values.read(rows, head) @ hadamard(self.weight.shape[2], self.device)
        values = predicted(keys, head, self.weight, self.offset) + errors
        rotary = self._rotary()
        keys = keys if rotary is None else rotary.rotate(keys, rotary.at(streams, rows))
        return keys.to(self.dtype), values.to(self.dtype)

    def operand(self) -> kernels.Rows:
        """Return keys with their rotary embedding, and the prediction errors of values."""
        basis = kernels.Basis(rotation=hadamard(self.weight.shape[2], self.device))
        return kernels.Rows(self.keys.operand(self._rotary()), self.values.operand(), self.log_weight, None, basis)

    def keys_only(self) -> kernels.Rows:
        """Return keys with their rotary embedding, and keys without it in place of values."""
        return kernels.Rows(self.keys.operand(self._rotary()), self.keys.operand(), self.log_weight)

    def attend(self, queries: Tensor, logits: Logits, hidden: Tensor | None = None) -> Partial:
        partial = super().attend(queries, logits, hidden)
        if hidden is not None or not self.serves(queries, logits):
            return partial
        streams = torch.arange(len(queries), device=queries.device)
        return self._complete(partial, queries, self._ranges(queries), logits, streams)

    def attend_rows(
        self, queries: Tensor, logits: Logits, rows: Tensor, counts: Tensor, streams: Tensor | None = None
    ) -> Partial:
        partial = super().attend_rows(queries, logits, rows, counts, streams)
        if not self.serves(queries, logits):
            return partial
        if streams is None:
            streams = torch.arange(len(rows), device=rows.device) % self.layout.streams
        return self._complete(partial, queries, kernels.Listed(rows, counts, streams), logits, streams)

    def _complete(
        self, partial: Partial, queries: Tensor, where: kernels.Where, logits: Logits, streams: Tensor
    ) -> Partial:
        """Add the values predicted from the mean decoded keys to the mean prediction errors."""
        means = kernels.decode(queries, self._keep("keys only", self.keys_only), where, options_of(logits))[0]
        head = streams % len(self.weight)
        return partial[0] + torch.baddbmm(self.offset[head, None].float(), means, self.weight[head].float()), partial[1]


def predicted(keys: Tensor, head: Tensor, weight: Tensor, offset: Tensor) -> Tensor:
    """Return the values, float32 [R, D], predicted from decoded `keys [R, D]` of heads `head [R]`."""
    values = torch.empty(len(keys), weight.shape[2], device=keys.device)
    for h in head.unique().tolist():
        values[head == h] = torch.addmm(offset[h].float(), keys[head == h].float(), weight[h].float())
    return values
