# SPDX-License-Identifier: Apache-2.0
"""InfLLM v2: read the blocks whose mean keys get the most attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.cache import attention
from kvpress.cache.chosen import for_tokens
from kvpress.cache.codec import DenseCodec
from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment, read_keys
from kvpress.core.checks import Count, Size, check_count
from kvpress.core.registry import register
from kvpress.core.selector import RESIDUAL, Budget
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.blocks import BlockSelector, behind, pairs_of


@register(
    "infllm_v2",
    "select",
    "Zhao et al., 2025, arXiv:2509.24663",
    example="infllm_v2:budget=2048,n_recent=512",
)
@dataclass
class InfLLMv2Press(SelectorPress):
    """Read about `budget` pairs: the blocks of `block_size` whose mean keys get the most attention, the first and the newest.

        c[j]     = mean of keys j * stride ... j * stride + kernel_size - 1
        a[j]     = sum over the query heads of the group of softmax over j of scale * q . c[j]
        score[b] = max of a[j] over all c[j] that overlap block b

    The oldest `n_sink` and the newest `n_recent` sealed pairs are always read, as a part of the budget: by default one block,
    32 blocks and the 64 best others. Pairs that are not sealed yet are read besides. `kernel_size` and `block_size` are
    multiples of `stride`. A context of no more than `budget` pairs is read whole.

    Paper: Zhao et al., InfLLM-V2: Dense-Sparse Switchable Attention for Seamless Short-to-Long Adaptation, 2025,
    arXiv:2509.24663.
    Differs from the paper: models are not trained for it; the first prompt is read with full attention; the softmax is that of
    the mean keys themselves, where its kernels take the denominator from coarser means; no attention is paid to blocks of pairs
    that the model has not sealed.
    """

    budget: float = 6208
    block_size: Count = 64
    kernel_size: Count = 32
    stride: Count = 16
    n_sink: Size = field(default=64, kw_only=True)
    n_recent: Size = field(default=2048, kw_only=True)

    def validate(self) -> None:
        super().validate()
        for name in ("block_size", "kernel_size"):
            if getattr(self, name) % self.stride:
                raise ValueError(f"{name} must be a multiple of stride={self.stride}, got {getattr(self, name)}")
        check_count("n_recent", self.n_recent, least=self.kernel_size)

    def selector_at(self, layer: int) -> InfLLMv2Selector:
        del layer
        return InfLLMv2Selector(self.limits, self.block_size, self.kernel_size, self.stride)


@keep_whole
@dataclass
class MeanKeys:
    """Means of `kernel` keys, one every `stride`: `means [windows, D]`, laid out per stream as `layout`, over all its `pairs`.

    Windows are counted in the order of a stream's pairs, whatever segments they lie in, and what is full never changes.
    """

    means: Tensor
    layout: Layout
    pairs: Layout

    @classmethod
    def build(cls, segments: Sequence[Segment], kernel: int, stride: int, known: MeanKeys | None = None) -> MeanKeys:
        """Index all pairs of some segments, of which the first ones may be `known`."""
        pairs = pairs_of(segments)
        layout = Layout(max(0, (length - kernel) // stride + 1) for length in pairs.lengths)
        kept = torch.zeros(pairs.streams, dtype=torch.int64) if known is None else known.layout.lengths_tensor
        fresh = Layout((layout.lengths_tensor - kept).tolist())
        none = segments[0].read(slice(0, 0))[0]
        means = none.new_empty(fresh.total, none.shape[1])
        step = max(1, attention.BLOCK_BYTES // (4 * pairs.streams * kernel * max(1, none.shape[1])))
        for start in range(0, fresh.longest, step):
            live = (fresh.lengths_tensor > start).nonzero().flatten()
            places = start + torch.arange(min(step, fresh.longest - start))
            ranks = ((kept[live, None] + places) * stride)[..., None] + torch.arange(kernel)
            keys = read_keys(segments, live, ranks.flatten(1).minimum(pairs.lengths_tensor[live, None] - 1))
            exists = places < fresh.lengths_tensor[live, None]
            at = (fresh.starts_tensor[live, None] + places)[exists].to(means.device)
            means[at] = keys.unflatten(1, (-1, kernel)).float().mean(dim=2).to(means.dtype)[exists.to(keys.device)]
        if known is not None:
            means = torch.cat([known.means, means])[behind(known.layout, kept, fresh).to(means.device)]
        return cls(means, layout, pairs)

    def tensors(self) -> list[Tensor]:
        """Tensors held, for the memory report."""
        return [self.means]


class InfLLMv2Selector(BlockSelector):
    """Selects blocks by their mean keys; see `InfLLMv2Press`."""

    def __init__(self, budget: Budget, block: int, kernel: int, stride: int) -> None:
        self.budget, self.unit, self.kernel, self.stride = budget, block, kernel, stride
        self.sealing = DenseCodec(group=block, residual=RESIDUAL)
        self.score_bytes = 32 + 16 * block // stride * 4

    @property
    def name(self) -> str:
        return f"means {self.kernel} {self.stride}"

    def index_bytes(self, pairs: int, dim: int, dtype: torch.dtype) -> float:
        return max(0, (pairs - self.kernel) // self.stride + 1) * dim * dtype.itemsize

    def build(self, segments: Sequence[Segment], known: MeanKeys | None) -> MeanKeys:
        return MeanKeys.build(segments, self.kernel, self.stride, known)

    def worth(self, call: LayerCall, queries: Tensor, index: MeanKeys) -> tuple[Tensor, Layout]:
        blocks = Layout(-(-length // self.unit) for length in index.pairs.lengths)
        tokens, device = len(queries) // blocks.streams, queries.device
        starts, held = (part[:, None] for part in index.layout.on(device))
        place = torch.arange(index.layout.longest, device=device)
        means = index.means[(starts + place).clamp_max(max(0, index.layout.total - 1))]
        unseen = for_tokens(place >= held, tokens)[:, None]
        logits = call.logits(queries, for_tokens(means, tokens)).masked_fill(unseen, -torch.inf)
        shares = logits.softmax(dim=2).nan_to_num(0.0).sum(dim=1)
        before, width = self.kernel // self.stride - 1, self.unit // self.stride
        padded = pad(shares, (before, max(0, blocks.longest * width - shares.shape[1])))
        scores = padded.unfold(1, before + width, width)[:, : blocks.longest].amax(dim=2)
        lengths = for_tokens(blocks.lengths_tensor.to(device), tokens)[:, None]
        return scores.masked_fill(torch.arange(blocks.longest, device=device) >= lengths, -torch.inf), blocks
