# SPDX-License-Identifier: Apache-2.0
"""A codec of every storage format, and segments that hold pairs in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kvpress.cache.attention import Logits
from kvpress.cache.codec import Codec, DenseCodec, Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.mixed import Flags, MixedSegment
from kvpress.cache.rotation import Rotation
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.tier import FileTier
from kvpress.quant.block_gtq import BlockCodec
from kvpress.quant.coupled import CoupledCodec
from kvpress.quant.floats import FloatCodec
from kvpress.quant.gear import GEARCodec
from kvpress.quant.kvarn import BalancedCodec
from kvpress.quant.minicache import MergingCodec
from kvpress.quant.oscar import OscarCodec, basis_of
from kvpress.quant.rotated import CentredCodec
from kvpress.quant.uniform import UniformCodec
from kvpress.quant.vector import Routed, RoutingCodec
from kvpress.quant.zipcache import ZipCacheCodec
from kvpress.sparse.offload import HostCodec
from tests.quant.test_codebook import embedding

HEADS, DIM = 2, 32
BOOK = torch.randn(HEADS, DIM // 4, 16, 4, generator=torch.Generator().manual_seed(7)).half()
ENERGY = torch.randn(HEADS, DIM // 2, generator=torch.Generator().manual_seed(8)).exp()
BASIS = basis_of(torch.diag(torch.arange(1.0, DIM + 1)))
MAP = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(9)).half() / 8
CODECS: dict[str, Codec] = {
    "dense": DenseCodec(4, 3),
    "host": HostCodec(4, 3),
    "uniform": UniformCodec(4, 2, (4, 1), (1, 8), 4, 3),
    "turned": UniformCodec(4, 2, (4, 1), (1, 8), 4, 3, block=16),
    "corrected": GEARCodec(2, 2, None, 3, 2, 0.2, 3, 4, 3),
    "mixed": ZipCacheCodec((4, 4), (2, 2), 0.5, 4, 3),
    "centred": CentredCodec((4, 3), 3, group=4),
    "balanced": BalancedCodec((4, 2), 4, 3, 0, 4),
    "floats": FloatCodec("fp8", 3, group=4),
    "floats in blocks": FloatCodec("nvfp4", 3, group=4),
    "coded": CoupledCodec(BOOK, BOOK, (4, 4), (4, 4), 3),
    "rotated by layer": OscarCodec(BASIS, BASIS.T.contiguous(), (2, 4), (0.96, 0.92), 16, 3, group=4),
    "without values": RoutingCodec(Routed(0.5), MAP, MAP[:, 0].contiguous(), group=4, residual=3),
    "digits": BlockCodec(ENERGY, ENERGY, DIM, (3, 4), 0, 3, group=4),
}
MERGING = {
    "merged layers": MergingCodec((0, 1), 0.6, 0.2, 16, 4, 3),
    "merged layers in codes": MergingCodec((0, 1), 0.6, 0.2, 4, 4, 3),
}
CODECS["in a file"] = UniformCodec(4, 2, (4, 1), (1, 8), 4, 3)
CODECS["in a file"].tier = FileTier()
every_codec = pytest.mark.parametrize("name", [*CODECS, "coded and rotated", "nested", *MERGING])
LENGTHS = [20, 0, 12, 28]


def sealing(name: str, seen: int = 256, pads: list[int] | None = None) -> Sealing:
    rotation = Rotation(lambda at: embedding()(at), "full", "Attention") if name == "coded and rotated" else None
    mask = None if pads is None else torch.arange(seen) >= torch.tensor(pads)[:, None]
    return Sealing(HEADS, seen=seen, mask=mask, rotation=rotation)


def segment(name: str, lengths: list[int] | None = None, seed: int = 0) -> Segment:
    """Return a segment of a format: pairs of two rows and two heads, with slots and a side array."""
    layout = Layout(lengths or LENGTHS)
    generator = torch.Generator().manual_seed(seed)
    keys, values = torch.randn(2, layout.total, DIM, generator=generator)
    dense = DenseSegment(keys, values, layout, first=[5] * 4)
    dense.side = {name: torch.rand(layout.total, generator=generator) for name in ("saliency", "probes", "mass")}
    if name == "nested":
        second = torch.rand(layout.total, generator=generator) < 0.5
        halves = []
        for inner, mine in (("mixed", ~second), ("uniform", second)):
            rows = mine.nonzero().flatten()
            counts = torch.bincount(layout.streams_of(rows), minlength=4).tolist()
            halves.append(CODECS[inner].encode(dense.take(rows, Layout(counts)), sealing(inner)))
        built: Segment = MixedSegment(halves[0], halves[1], Flags.of(second), layout)
    elif name in MERGING:
        lower = DenseSegment(*torch.randn(2, layout.total, DIM, generator=generator), layout, first=dense.first)
        built = MERGING[name].encode_together([lower, dense], [sealing(name)] * 2)[1]
    else:
        built = CODECS[name.removesuffix(" and rotated")].encode(dense, sealing(name, pads=[3, 0]))
    built.describe(dense, without=("saliency", "probes"))
    if name == "in a file":
        built.put(FileTier())
    return built


def logit_pairs(built: Segment, queries: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return logits without log-weights of the decoded pairs of a stream, and their values."""
    keys, values = built.read(built.layout.rows(n))
    return Logits(0.2, 5.0)(queries[n], keys), values
