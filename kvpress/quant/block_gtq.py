# SPDX-License-Identifier: Apache-2.0
"""Block-GTQ: each pair of channels that a rotary embedding turns has bits of its own, so many on average."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.layout import row_numbers
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.segment_attention import BLOCK_ROWS
from kvpress.cache.storage import Held, part, per_layer
from kvpress.core.checks import Size
from kvpress.core.model import LayerFacts
from kvpress.core.registry import Refusal, register
from kvpress.kernels import pack
from kvpress.quant.bits import Bits
from kvpress.quant.calibrated import CalibratedPress
from kvpress.quant.codebook import CodedRows, CodedSegment
from kvpress.quant.rotated import ROUNDS, gaussian_error, gaussian_step
from kvpress.quant.turboquant import encode, levels, rotation

METHOD = "block_gtq"
MOST = 8
"""Bits of a channel, at most; at least one."""


@register(
    "block_gtq",
    "quantise",
    "Liang et al., 2026, arXiv:2606.24033",
    example="block_gtq:bits=3",
    needs="energies of the model: `kvpress calibrate --method block_gtq` (`calibration`)",
    refuses=(
        Refusal("block_gtq:bits=3", "without a file of its own, a model other than the bundled reference model"),
        Refusal("block_gtq:bits=5", "bits are 1, 2, 3, 4 or 8 on average"),
    ),
)
@dataclass
class BlockGTQPress(CalibratedPress):
    """Store keys with more bits for those pairs of channels whose errors move logits most; `bits` is the mean.

        energy[i] = mean |q[i]|^2 * mean |k[i]|^2,   the next bit goes to the pair i of most energy[i] * 4^-bits[i]
        y = k R,   code[d] = round(y[d] / (a step[d]) + m[d]) in [0, 2**bits[d] - 1],   x' = a gain step (code - m) R^T

    i counts the pairs of channels that the rotary embedding turns together; those that it leaves alone are paired, too.
    Energies are of every kv head of a layer, from a calibration, and so are bits, 1 to 8. R is orthogonal and random, drawn
    from `seed`, within the pairs of equal bits and nowhere else; m[d] = (2**bits[d] - 1) / 2; step[d] is the best one for a
    Gaussian channel of the energy that pairs of those bits have on average; a is fitted to every key by least squares, and
    stored in 16 bits; gain[d] gives a Gaussian in so many bits its norm back. Codes are written as their binary digits, which
    kernels read as one operand of one bit, each with a weight of its own, so rows of all heads are equally long. Values are
    stored as `turboquant` stores them.

    `calibration` is a file made by `kvpress calibrate --method block_gtq`, which serves all bits; the bundled reference
    model's is found without it. `bits` is 1, 2, 3, 4 or 8, a pair (keys, values), a list with either for every layer, or a
    file of them. The newest `residual_length` pairs, up to 31 more (255 on a GPU), and the first `sinks` stay dense;
    `skip_layers` are left dense.

    Paper: Liang et al., RoPE-Aware Bit Allocation for KV-Cache Quantization (Block-GTQ), 2026, arXiv:2606.24033.
    Differs from the paper: steps of a channel are even, so that digits can be read one by one, where its levels are those of
    least error for a Gaussian; groups of equal bits share one norm for each key, and their energies relative to it, and the
    norm that they get back, are those of the calibration; the rotation is applied to queries as they come, not folded into
    the weights of the model.
    """

    bits: Bits = 4
    calibration: str | None = None
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 4
    seed: int = 0

    method: ClassVar[str] = METHOD
    tables: ClassVar[str] = "energies"

    def held(self, layer: LayerFacts) -> dict[str, tuple[int, ...]]:
        sides: dict[str, tuple[int, ...]] = {
            side: (layer.kv_heads, layer.head_dim // 2) for side in ("queries", "keys")
        }
        return sides | {"rotated": (1,)}

    def layer_codec(self, layer: int) -> BlockCodec:
        tensors = self.found().tensors
        queries, keys, rotated = (tensors[f"{layer}.{name}"] for name in ("queries", "keys", "rotated"))
        seed = 1000 * self.seed + 2 * layer
        return BlockCodec(
            queries, keys, int(rotated), self.layer_bits().at(layer), seed, self.residual_length, self.sinks
        )


def pairs_of(dim: int, rotated: int) -> Tensor:
    """Channels that belong together, int64 [D / 2, 2]: halves of the leading `rotated` ones, then halves of the others."""
    parts = torch.arange(rotated).view(2, -1), torch.arange(rotated, dim).view(2, -1)
    return torch.cat(parts, dim=1).T.contiguous()


def allocate(energy: list[float], total: int) -> list[int]:
    """Share out `total` bits, 1 to 8 for each pair, so that the sum of energy * 4^-bits is least.

    Raises:
        ValueError: there are fewer bits than pairs, or more than all can have.
    """
    if not len(energy) <= total <= MOST * len(energy):
        raise ValueError(
            f"bits must be {len(energy)} to {MOST * len(energy)} in all for {len(energy)} pairs, got {total}"
        )
    bits = [1] * len(energy)
    errors = [(-e / 4, pair) for pair, e in enumerate(energy)]
    heapq.heapify(errors)
    for _ in range(total - len(energy)):
        error, pair = heapq.heappop(errors)  # each bit lowers an error to a quarter, so the largest error falls most
        bits[pair] += 1
        if bits[pair] < MOST:
            heapq.heappush(errors, (error / 4, pair))
    return bits


@dataclass(eq=False)
class KeyDigits(Held):
    """What the binary digits of keys stand for, by head.

    Attributes:
        rotation: orthogonal, float16 [H, D, D], to the channels that have codes.
        channel: the channel of each of S digits, int16 [H, S], ascending; lower digits come first.
        weight: half of what a digit adds to its channel, float32 [H, S].
    """

    rotation: Annotated[Tensor, per_layer("tables")]
    channel: Annotated[Tensor, per_layer("tables")]
    weight: Annotated[Tensor, per_layer("tables")]

    @classmethod
    def of(
        cls, energy: Tensor, bits: Tensor, pairs: Tensor, rotated: int, seed: int, device: torch.device
    ) -> KeyDigits:
        """Make those of pairs `[P, 2]` with `energy` and `bits [H, P]`, of which `rotated` channels have an embedding."""
        heads, dim = len(bits), pairs.numel()
        turned, unit = torch.zeros(heads, dim, dim), torch.zeros(heads, dim)
        widths = bits.repeat_interleave(2, dim=1)
        own = torch.arange(len(pairs)) < rotated // 2
        for h in range(heads):
            for b in bits[h].unique().tolist():
                for part_of in (own, ~own):
                    group = (bits[h] == b) & part_of
                    if group.any():
                        channels = group.repeat_interleave(2).nonzero().flatten()
                        among = rotation(len(channels), seed, torch.device("cpu"))
                        turned[h, pairs[group].flatten()[:, None], channels] = among
                        unit[h, channels] = gaussian_step(b) * float(energy[h, group].mean() / 2) ** 0.5
        unit = unit.clamp_min(1e-4 * float(unit.amax()) + 1e-30)
        channel = torch.stack([torch.arange(dim).repeat_interleave(width) for width in widths])
        place = torch.stack([torch.cat([torch.arange(n) for n in width.tolist()]) for width in widths])
        weight = (unit * gains(widths)).gather(1, channel) * 2.0 ** (place - 1)
        return cls(turned.half().to(device), channel.to(torch.int16).to(device), weight.to(device))

    def encode(self, vectors: Tensor, head: Tensor) -> CodedRows:
        """Code keys `[R, D]` of the heads `[R]`, in blocks whose float32 copies are small."""
        heads, dim = self.rotation.shape[:2]
        index = self.channel.long()
        widths = torch.zeros(heads, dim, device=index.device).scatter_add_(1, index, torch.ones_like(self.weight))
        first = (widths.cumsum(1) - widths).long()
        place = torch.arange(index.shape[1], device=index.device) - first.gather(1, index)
        unit, most = 2 * self.weight.gather(1, first) / gains(widths), 2**widths - 1
        spread = unit / steps(widths)
        codes = torch.empty(len(vectors), index.shape[1] // 8, dtype=torch.uint8, device=vectors.device)
        scale = torch.empty(len(vectors), device=vectors.device)
        for h in head.unique().tolist():
            for rows in (head == h).nonzero().flatten().split(BLOCK_ROWS):
                y = vectors[rows].detach().float() @ self.rotation[h].float()
                factor = (y / spread[h]).square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-30)
                for _ in range(ROUNDS):
                    code = (y / (factor * unit[h]) + most[h] / 2).round_().clamp_(min=0).minimum(most[h])
                    z = (code - most[h] / 2) * unit[h]
                    factor = ((y * z).sum(1, keepdim=True) / z.square().sum(1, keepdim=True)).clamp_min(1e-30)
                codes[rows] = pack((code[:, index[h]].int() >> place[h] & 1).to(torch.uint8), 1)
                scale[rows] = factor[:, 0]
        dtype = torch.float16 if vectors.dtype == torch.float16 else torch.bfloat16
        return CodedRows(codes, signs(vectors.device), 1, scale.to(dtype))

    def operand(self) -> kernels.Digits:
        """As the operators take it."""
        return kernels.Digits(rotation=self.rotation, channel=self.channel, weight=self.weight)


def steps(bits: Tensor) -> Tensor:
    """Return the best steps for a unit Gaussian in so many bits, of the same shape, float32."""
    return torch.tensor([gaussian_step(b) for b in range(1, MOST + 1)], device=bits.device)[bits.long() - 1]


def gains(bits: Tensor) -> Tensor:
    """Return what gives a Gaussian in so many bits its norm back, float32: the levels of least error have less."""
    found = [(1 - gaussian_error(b)) ** -0.5 for b in range(1, MOST + 1)]
    return torch.tensor(found, device=bits.device)[bits.long() - 1]


@cache
@torch.inference_mode(False)
def signs(device: torch.device) -> Tensor:
    """Return what a digit stands for, float32 [1, 1, 2, 1]; the levels of one bit, without their size."""
    return levels(1, device).sign()


@dataclass(eq=False, repr=False)
class DigitSegment(CodedSegment):
    """Pairs as codes, keys as binary `digits` of codes; see `BlockGTQPress`."""

    digits: Annotated[KeyDigits, part()] = field(kw_only=True)

    def decode(self, rows: Tensor | slice) -> tuple[Tensor, Tensor]:
        rows = row_numbers(rows, self.layout.total, self.device)
        basis, coded = self.digits.operand(), self.keys.operand()
        keys = torch.empty(len(rows), self.digits.rotation.shape[1], device=self.device)
        head = self.layout.streams_of(rows) % len(basis.rotation)
        for h in head.unique().tolist():
            of_head = (head == h).nonzero().flatten()
            keys[of_head] = basis.leave(coded.read(rows[of_head])[None], head.new_tensor([h]))[0]
        values = self.values.operand().read(rows) @ self.value_basis.T  # type: ignore[union-attr]
        return keys.to(self.dtype), values.to(self.dtype)

    def operand(self) -> kernels.Rows:
        return replace(super().operand(), key_basis=self.digits.operand())


@dataclass
class BlockCodec(Codec):
    """Codes keys by the energies of their pairs, `queries` and `keys [H, D / 2]`; see `BlockGTQPress`.

    The embedding turns the first `rotated` channels. Values are rotated by the matrix of `seed`.
    """

    queries: Tensor
    keys: Tensor
    rotated: int
    bits: tuple[int, int]
    seed: int
    residual: int
    sinks: int = 0
    group: int = 32

    def allocation(self) -> Tensor:
        """Bits of every pair of a head, int64 [H, D / 2]."""
        energy = (self.queries.double() * self.keys.double()).tolist()
        return torch.tensor([allocate(row, self.bits[0] * len(row)) for row in energy])

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        device, dim = segment.device, segment.keys.shape[1]
        digits = next((other.digits for other in sealing.earlier if isinstance(other, DigitSegment)), None)
        if digits is None:
            pairs = pairs_of(dim, self.rotated)
            digits = KeyDigits.of(self.keys, self.allocation(), pairs, self.rotated, self.seed, device)
        basis = rotation(dim, self.seed + 1, device)
        head = segment.layout.stream_of_row.to(device) % len(self.keys)
        keys = digits.encode(segment.keys, head)
        values = encode(segment.values, basis, self.bits[1])
        return DigitSegment(keys, values, segment.layout, segment.keys.dtype, None, None, basis, digits=digits)

    def pair_bytes(self, dim: int, dtype: torch.dtype) -> float:
        return dim * sum(self.bits) / 8 + 4

    def table_bytes(self, dim: int) -> int:
        keys, values = self.bits
        return len(self.keys) * (2 * dim**2 + 6 * dim * keys) + 8 + 4 * dim**2 + 4 * 2**values
