# SPDX-License-Identifier: Apache-2.0
"""SQuat: errors of keys are pushed out of the directions in which the prompt's queries lie."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.codec import Sealing
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.core.checks import Count, NotNegative
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import register
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.quant.kivi import KIVIPress
from kvpress.quant.uniform import UniformCodec, UniformRows, UniformSegment


@register("squat", "quantise", "Wang et al., 2025, arXiv:2503.24358", example="squat:bits=2,residual_length=32")
@dataclass
class SQuatPress(KIVIPress):
    """Store pairs as `KIVIPress` does, but let each block of key channels make up for the error of those before it.

        A = 1 + weight * sum over the prompt's queries of q q^T, its `rank` largest directions
        for blocks i of `block_size` channels:  code k[i],  e = decoded - k[i],  k[rest] -= A[rest, rest]^-1 A[rest, i] e

    The sum of all errors is then small where queries look, at the same bits: what is stored, and how it is read, are those of
    `kivi`, whose other settings it takes. A belongs to a head of a sequence and stays that of the prompt: later keys are coded
    with it too. `rank` is how many directions count, and `weight` is how much more an error counts in these, 0 is `kivi`.
    `block_size` is how many channels are coded together.

    Paper: Wang et al., SQuat: Subspace-orthogonal KV Cache Quantization, 2025, arXiv:2503.24358.
    Differs from the paper: keys are coded after their rotary embedding, as queries are seen, where its default is before;
    of a batch every sequence has its own queries; tails are those of `kivi`; where a head has no more channels than
    `block_size`, blocks are half a head; a large bias of keys is stored apart (`QuantisingPress`).
    """

    rank: Count = 60
    weight: NotNegative = 1e-3
    block_size: Count = 64

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if self.rotate:
            raise ValueError("rotate must be False for squat: its queries are those of keys that are not rotated")
        return replace(super().recipe(model), observers=(Wanted(QueryGram),))

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        if layer.head_dim % self.block_size and layer.head_dim > self.block_size:
            raise ValueError(
                f"block_size must divide the head dim {layer.head_dim} of the model, got {self.block_size}"
            )

    def layer_codec(self, layer: int) -> OrthogonalCodec:
        plain: dict[str, Any] = vars(super().layer_codec(layer))
        return OrthogonalCodec(**plain, rank=self.rank, weight=self.weight, channels=self.block_size)


class QueryGram(Observer):
    """Sum over the real queries of a prompt, and those of a group, of their outer products: `gram [B, H, D, D]`."""

    held = ("gram",)

    def __init__(self) -> None:
        self.gram: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        if call.phase != "prefill":
            return
        heads = call.store.heads
        queries = call.queries.float().unflatten(1, (heads, -1))
        if call.tokens.mask is not None:
            real = call.tokens.mask[:, -queries.shape[3] :].to(queries.device)
            queries = queries * real[:, None, None, :, None]
        new = torch.einsum("bhgqd,bhgqe->bhde", queries, queries)
        self.gram = new if self.gram is None else self.gram + new


@dataclass
class OrthogonalCodec(UniformCodec):
    """Uniform codes whose later channels make up for the errors of earlier ones; see `SQuatPress`."""

    rank: int = 60
    weight: float = 1e-3
    channels: int = 64

    def observed_bytes(self, dim: int) -> int:
        return 4 * dim**2

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        watched = sealing.observers.get(Wanted(QueryGram))
        found = super().encode(segment, sealing)
        if watched is None or watched.gram is None or self.weight == 0:
            return found
        assert isinstance(found, UniformSegment)  # noqa: S101 - for the type checker
        moved = self.moved(segment, watched.gram.flatten(0, 1))
        keys = UniformRows.encode(moved, self.key_bits, self.key_group, segment.keys.dtype)
        return UniformSegment(keys, found.values, segment.layout)

    def moved(self, segment: DenseSegment, gram: Tensor) -> Tensor:
        """Keys, float32 [total, D], whose nearest codes have errors that make up for each other; gram [N, D, D]."""
        dim = segment.keys.shape[1]
        width = self.channels if dim > self.channels else max(1, dim // 2)
        values, vectors = torch.linalg.eigh(gram.double())
        top = values.clamp_min(0)[:, -self.rank :], vectors[:, :, -self.rank :]
        matrix = torch.eye(dim, dtype=torch.float64, device=gram.device)
        matrix = matrix + self.weight * (top[1] * top[0][:, None, :]) @ top[1].mT
        keys = segment.keys.double()
        for start in range(0, dim - width, width):
            block, rest = slice(start, start + width), slice(start + width, dim)
            coded = UniformRows.encode(keys[:, block].float(), self.key_bits, self.key_group, segment.keys.dtype)
            error = coded.read(slice(None)).double() - keys[:, block]
            answer = torch.linalg.solve(matrix[:, rest, rest], matrix[:, rest, block])
            for n in range(segment.layout.streams):
                mine = segment.layout.rows(n)
                keys[mine, rest] -= error[mine] @ answer[n].mT
        return keys.float()
