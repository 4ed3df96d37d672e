# SPDX-License-Identifier: Apache-2.0
"""SQuat: errors of keys are moved out of the subspace of the prompt's queries."""

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
from kvpress.kernels import row_step
from kvpress.observe.observer import Wanted
from kvpress.observe.queries import QueryGram
from kvpress.quant.kivi import KIVIPress
from kvpress.quant.uniform import UniformCodec, UniformRows, UniformSegment


@register("squat", "quantise", "Wang et al., 2025, arXiv:2503.24358", example="squat:bits=2,residual_length=32")
@dataclass
class SQuatPress(KIVIPress):
    """Store pairs as `KIVIPress` does, but blocks of key channels compensate earlier errors; a bit more at 1024 tokens.

        A = 1 + weight * sum over the prompt's queries of q q^T, its `rank` largest directions
        for blocks i of `block_size` channels:  code k[i],  e = decoded - k[i],  k[rest] -= A[rest, rest]^-1 A[rest, i] e

    The total error is then small in the directions of the queries, at the same bits. Storage and attention are those of
    `kivi`, which also defines all other settings. Each head of a sequence has a matrix A, computed from the prompt; later keys
    are encoded with it too. `rank` is the number of directions in A. `weight` is the additional weight of errors in them;
    0 is `kivi`. `block_size` is the number of channels encoded together.

    The matrices A are held in float32. At 1024 tokens and 64 channels they take 1 bit a value more than `kivi`: with
    `bits=2`, SmolLM2 holds 5.6 bits a value, and 4.4 with `residual_length=32`.

    Paper: Wang et al., SQuat: Subspace-orthogonal KV Cache Quantization, 2025, arXiv:2503.24358.
    Differs from the paper: keys are encoded after their rotary embedding, like the observed queries, where the default of the
    paper is before; every sequence of a batch has a separate A; dense tails are those of `kivi`; if a head has at most
    `block_size` channels, blocks are half a head; a large bias of keys is stored separately (`QuantisingPress`).
    """

    rank: Count = 60
    weight: NotNegative = 1e-3
    block_size: Count = 64

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if self.rotate:
            raise ValueError(
                "rotate must be False for squat: the observed queries are not rotated by the Hadamard matrix"
            )
        return replace(super().recipe(model), observers=(Wanted(QueryGram),))

    def check_shape(self, layer: LayerFacts) -> None:
        super().check_shape(layer)
        bits, dim = self.layer_bits().at(layer.index)[0], layer.head_dim
        width, step = block_width(dim, self.block_size), row_step(bits)
        if dim % width or (self.weight and width % step):
            allowed = [size for size in range(step, dim, step) if dim % size == 0]
            raise ValueError(
                f"block_size must divide the head dim {dim} of the model into blocks of whole bytes, for {bits}-bit keys "
                f"one of {allowed}, got {self.block_size}"
            )

    def layer_codec(self, layer: int) -> OrthogonalCodec:
        plain: dict[str, Any] = vars(super().layer_codec(layer))
        return OrthogonalCodec(**plain, rank=self.rank, weight=self.weight, channels=self.block_size)


def block_width(dim: int, size: int) -> int:
    """Return the channels of a block: `size`, or half a head of at most `size` channels."""
    return size if dim > size else max(1, dim // 2)


@dataclass
class OrthogonalCodec(UniformCodec):
    """Codec of uniform codes whose later channels compensate the errors of earlier ones; see `SQuatPress`."""

    rank: int = 60
    weight: float = 1e-3
    channels: int = 64

    def observed_bytes(self, dim: int) -> int:
        return 4 * dim**2

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        watched = sealing.observers.get(Wanted(QueryGram))
        uniform = super().encode(segment, sealing)
        if watched is None or watched.gram is None or self.weight == 0:
            return uniform
        assert isinstance(uniform, UniformSegment)  # noqa: S101 - for the type checker
        moved = self.moved(segment, watched.gram.flatten(0, 1))
        keys = UniformRows.encode(moved, self.key_bits, self.key_group, segment.keys.dtype)
        return UniformSegment(keys, uniform.values, segment.layout)

    def moved(self, segment: DenseSegment, gram: Tensor) -> Tensor:
        """Return adjusted keys, float32 [total, D], whose quantisation errors compensate each other; `gram [N, D, D]`."""
        dim = segment.keys.shape[1]
        width = block_width(dim, self.channels)
        values, vectors = torch.linalg.eigh(gram.double())
        top = values.clamp_min(0)[:, -self.rank :], vectors[:, :, -self.rank :]
        matrix = torch.eye(dim, dtype=torch.float64, device=gram.device)
        matrix = matrix + self.weight * (top[1] * top[0][:, None, :]) @ top[1].mT
        keys = segment.keys.double()
        for start in range(0, dim - width, width):
            block, later = slice(start, start + width), slice(start + width, dim)
            coded = UniformRows.encode(keys[:, block].float(), self.key_bits, self.key_group, segment.keys.dtype)
            error = coded.read(slice(None)).double() - keys[:, block]
            solution = torch.linalg.solve(matrix[:, later, later], matrix[:, later, block])
            for n in range(segment.layout.streams):
                rows = segment.layout.rows(n)
                keys[rows, later] -= error[rows] @ solution[n].mT
        return keys.float()
