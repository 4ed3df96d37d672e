# SPDX-License-Identifier: Apache-2.0
"""Block-GTQ: separate bits for each channel pair of the rotary embedding, with a fixed mean."""

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
"""Maximum bits per channel; the minimum is one."""


@register(
    "block_gtq",
    "quantise",
    "Liang et al., 2026, arXiv:2606.24033",
    example="block_gtq:bits=3",
    needs="energies of the model: `kvpress calibrate block_gtq` (`calibration`)",
    refuses=(
        Refusal("block_gtq:bits=3", "without a file of its own, a model other than the bundled reference model"),
        Refusal("block_gtq:bits=5", "bits are 1, 2, 3, 4 or 8 on average"),
    ),
)
@dataclass
class BlockGTQPress(CalibratedPress):
    """Store keys with more bits for the channel pairs whose errors change logits most; `bits` is the mean.

        energy[i] = mean |q[i]|^2 * mean |k[i]|^2,   the next bit goes to the pair i with the largest energy[i] * 4^-bits[i]
        y = k R,   code[d] = round(y[d] / (a step[d]) + m[d]) in [0, 2**bits[d] - 1],   x' = a gain step (code - m) R^T

    i counts the channel pairs that the rotary embedding rotates together; channels without an embedding are paired, too.
    Energies come from a calibration and differ by KV head, and so do the bits, 1 to 8. R is a random orthogonal matrix drawn
    from `seed`, which mixes only pairs of equal bits. The middle code is m[d] = (2**bits[d] - 1) / 2, and step[d] is the best
    step for a Gaussian channel with the mean energy of the pairs of these bits. The scale a is fitted to every key by least
    squares and stored in 16 bits. The factor gain[d] restores the norm of a Gaussian quantised in these bits. Codes are stored
    as binary digits, each with a separate weight, which kernels read as one operand of one bit; so rows of all heads have
    equal length. Values are stored as by `turboquant`.

    `calibration` is a file made by `kvpress calibrate block_gtq`, which serves all bits; the bundled reference
    model needs none. `bits` is 1, 2, 3, 4 or 8, a pair (keys, values), a list with either for every layer, or a
    file of them. The newest `residual_length` pairs, up to 62 more (286 on a GPU), and the first `sinks` stay dense;
    `skip_layers` stay dense.

    Paper: Liang et al., RoPE-Aware Bit Allocation for KV-Cache Quantization (Block-GTQ), 2026, arXiv:2606.24033.
    Differs from the paper: levels of a channel are evenly spaced, so that digits can be read one by one, where the paper has
    the levels of least error for a Gaussian; groups of equal bits share one norm per key, and their energies relative to this
    norm, and the gain, come from the calibration; the rotation is applied to queries at run time, not folded into the
    weights of the model.
    """

    bits: Bits = 4
    calibration: str | None = None
    residual_length: Size = 128
    skip_layers: tuple[int, ...] = ()
    sinks: Size = 4
    seed: Size = 0

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
    """Return channel pairs, int64 [D / 2, 2]: halves of the leading `rotated` channels, then halves of all others."""
    parts = torch.arange(rotated).view(2, -1), torch.arange(rotated, dim).view(2, -1)
    return torch.cat(parts, dim=1).T.contiguous()


def allocate(energy: list[float], total: int) -> list[int]:
    """Share out `total` bits, 1 to 8 for each pair, so that the sum of energy * 4^-bits is least.

    Raises:
        ValueError: `total` is below one bit or above 8 bits per pair.
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
    """Tables that decode the binary digits of keys, by head."""

    rotation: Annotated[Tensor, per_layer("tables")]
    """Orthogonal matrix from channels to coded channels, float16 [H, D, D]."""
    channel: Annotated[Tensor, per_layer("tables")]
    """Channel of each of S digits, int16 [H, S], ascending; lower digits come first."""
    weight: Annotated[Tensor, per_layer("tables")]
    """Half of the amount that a digit adds to its channel, float32 [H, S]."""

    @classmethod
    def of(
        cls, energy: Tensor, bits: Tensor, pairs: Tensor, rotated: int, seed: int, device: torch.device
    ) -> KeyDigits:
        """Build the tables of `pairs [P, 2]` from `energy` and `bits [H, P]`; `rotated` channels have a rotary embedding."""
        heads, dim = len(bits), pairs.numel()
        matrices, unit = torch.zeros(heads, dim, dim), torch.zeros(heads, dim)
        widths = bits.repeat_interleave(2, dim=1)
        has_embedding = torch.arange(len(pairs)) < rotated // 2
        for h in range(heads):
            for b in bits[h].unique().tolist():
                for subset in (has_embedding, ~has_embedding):
                    group = (bits[h] == b) & subset
                    if group.any():
                        channels = group.repeat_interleave(2).nonzero().flatten()
                        block = rotation(len(channels), seed, torch.device("cpu"))
                        matrices[h, pairs[group].flatten()[:, None], channels] = block
                        unit[h, channels] = gaussian_step(b) * float(energy[h, group].mean() / 2) ** 0.5
        unit = unit.clamp_min(1e-4 * float(unit.amax()) + 1e-30)
        channel = torch.stack([torch.arange(dim).repeat_interleave(width) for width in widths])
        digit = torch.stack([torch.cat([torch.arange(n) for n in width.tolist()]) for width in widths])
        weight = (unit * gains(widths)).gather(1, channel) * 2.0 ** (digit - 1)
        return cls(matrices.half().to(device), channel.to(torch.int16).to(device), weight.to(device))

    def encode(self, vectors: Tensor, head: Tensor) -> CodedRows:
        """Encode keys `[R, D]` of the heads `[R]`, in blocks that keep float32 copies small."""
        heads, dim = self.rotation.shape[:2]
        index = self.channel.long()
        widths = torch.zeros(heads, dim, device=index.device).scatter_add_(1, index, torch.ones_like(self.weight))
        first = (widths.cumsum(1) - widths).long()
        digit = torch.arange(index.shape[1], device=index.device) - first.gather(1, index)
        unit, top_code = 2 * self.weight.gather(1, first) / gains(widths), 2**widths - 1
        spread = unit / steps(widths)
        codes = torch.empty(len(vectors), index.shape[1] // 8, dtype=torch.uint8, device=vectors.device)
        scale = torch.empty(len(vectors), device=vectors.device)
        for h in head.unique().tolist():
            for rows in (head == h).nonzero().flatten().split(BLOCK_ROWS):
                y = vectors[rows].detach().float() @ self.rotation[h].float()
                factor = (y / spread[h]).square().mean(dim=1, keepdim=True).sqrt().clamp_min(1e-30)
                for _ in range(ROUNDS):
                    code = (y / (factor * unit[h]) + top_code[h] / 2).round_().clamp_(min=0).minimum(top_code[h])
                    z = (code - top_code[h] / 2) * unit[h]
                    factor = ((y * z).sum(1, keepdim=True) / z.square().sum(1, keepdim=True)).clamp_min(1e-30)
                codes[rows] = pack((code[:, index[h]].int() >> digit[h] & 1).to(torch.uint8), 1)
                scale[rows] = factor[:, 0]
        dtype = torch.float16 if vectors.dtype == torch.float16 else torch.bfloat16
        return CodedRows(codes, signs(vectors.device), 1, scale.to(dtype))

    def operand(self) -> kernels.Digits:
        """Return the kernel operand."""
        return kernels.Digits(rotation=self.rotation, channel=self.channel, weight=self.weight)


def steps(bits: Tensor) -> Tensor:
    """Return the best steps for a unit Gaussian in `bits` bits, float32, same shape."""
    return torch.tensor([gaussian_step(b) for b in range(1, MOST + 1)], device=bits.device)[bits.long() - 1]


def gains(bits: Tensor) -> Tensor:
    """Return the factors that restore the norm of a Gaussian quantised in `bits` bits, float32; optimal levels shrink it."""
    factors = [(1 - gaussian_error(b)) ** -0.5 for b in range(1, MOST + 1)]
    return torch.tensor(factors, device=bits.device)[bits.long() - 1]


@cache
@torch.inference_mode(False)
def signs(device: torch.device) -> Tensor:
    """Return the codebook of a digit, -1 and 1, float32 [1, 1, 2, 1]."""
    return levels(1, device).sign()


@dataclass(eq=False, repr=False)
class DigitSegment(CodedSegment):
    """Coded pairs, with keys as binary digits of codes; see `BlockGTQPress`."""

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
    """Codec that gives each channel pair of keys separate bits; see `BlockGTQPress`."""

    queries: Tensor
    """Mean squared norm of each channel pair of queries, `[H, D / 2]`."""
    keys: Tensor
    """Mean squared norm of each channel pair of keys, `[H, D / 2]`."""
    rotated: int
    """Leading channels that have a rotary embedding."""
    bits: tuple[int, int]
    seed: int
    """Seed of the rotations of keys; the rotation of values uses `seed + 1`."""
    residual: int
    sinks: int = 0
    group: int = 32

    def allocation(self) -> Tensor:
        """Bits of every pair of a head, int64 [H, D / 2]."""
        energy = (self.queries.double() * self.keys.double()).tolist()
        return torch.tensor([allocate(row, self.bits[0] * len(row)) for row in energy])

    def encode(self, segment: DenseSegment, sealing: Sealing) -> Segment:
        device, dim = segment.device, segment.keys.shape[1]
        digits = next((previous.digits for previous in sealing.earlier if isinstance(previous, DigitSegment)), None)
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
        return len(self.keys) * (2 * dim**2 + 6 * dim * keys) + 8 + 4 * dim**2 + 4 * (1 << values)
