# SPDX-License-Identifier: Apache-2.0
"""InfLLM v2: read the blocks whose mean keys get the most attention."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvpress.cache import attention
from kvpress.cache.codec import DenseCodec
from kvpress.cache.files import keep_whole
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment, read_keys
from kvpress.cache.selection import for_tokens
from kvpress.core.checks import Count, Size, check_count
from kvpress.core.registry import register
from kvpress.core.selector import RESIDUAL, Budget
from kvpress.observe.call import LayerCall
from kvpress.sparse.base import SelectorPress
from kvpress.sparse.blocks import BlockSelector, merged_order, pairs_of


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
    32 blocks and the 64 best others. Pairs that are not sealed yet are read in addition. `kernel_size` and `block_size` are
    multiples of `stride`. A context of at most `budget` pairs is read in full.

    Paper: Zhao et al., InfLLM-V2: Dense-Sparse Switchable Attention for Seamless Short-to-Long Adaptation, 2025,
    arXiv:2509.24663.
    Differs from the paper: models are not trained for it; the first prompt is read with full attention; the softmax is over
    the mean keys themselves, where its kernels take the denominator from coarser means; pairs that are not sealed yet belong to
    no block.
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
    """Means of runs of `kernel` keys that start every `stride` pairs.

    Runs count the pairs of a stream across its segments. Only full runs have a mean, which never changes.
    """

    means: Tensor
    """Mean keys, `[runs, D]`."""
    layout: Layout
    """Runs of each stream."""
    pairs: Layout
    """Indexed pairs of each stream."""

    @classmethod
    def build(cls, segments: Sequence[Segment], kernel: int, stride: int, previous: MeanKeys | None = None) -> MeanKeys:
        """Return the index of all pairs of the segments; the means of the `previous` index are copied."""
        pairs = pairs_of(segments)
        layout = Layout(max(0, (length - kernel) // stride + 1) for length in pairs.lengths)
        kept = torch.zeros(pairs.streams, dtype=torch.int64) if previous is None else previous.layout.lengths_tensor
        added = Layout((layout.lengths_tensor - kept).tolist())
        empty = segments[0].read(slice(0, 0))[0]
        means = empty.new_empty(added.total, empty.shape[1])
        step = max(1, attention.BLOCK_BYTES // (4 * pairs.streams * kernel * max(1, empty.shape[1])))
        for start in range(0, added.longest, step):
            streams = (added.lengths_tensor > start).nonzero().flatten()
            numbers = start + torch.arange(min(step, added.longest - start))
            ranks = ((kept[streams, None] + numbers) * stride)[..., None] + torch.arange(kernel)
            keys = read_keys(segments, streams, ranks.flatten(1).minimum(pairs.lengths_tensor[streams, None] - 1))
            exists = numbers < added.lengths_tensor[streams, None]
            rows = (added.starts_tensor[streams, None] + numbers)[exists].to(means.device)
            means[rows] = keys.unflatten(1, (-1, kernel)).float().mean(dim=2).to(means.dtype)[exists.to(keys.device)]
        if previous is not None:
            means = torch.cat([previous.means, means])[merged_order(previous.layout, kept, added).to(means.device)]
        return cls(means, layout, pairs)

    def tensors(self) -> list[Tensor]:
        """Return the stored tensors, for the memory report."""
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

    def build(self, segments: Sequence[Segment], previous: MeanKeys | None) -> MeanKeys:
        return MeanKeys.build(segments, self.kernel, self.stride, previous)

    def worth(self, call: LayerCall, queries: Tensor, index: MeanKeys) -> tuple[Tensor, Layout]:
        blocks = Layout(-(-length // self.unit) for length in index.pairs.lengths)
        tokens, device = len(queries) // blocks.streams, queries.device
        starts, counts = (bounds[:, None] for bounds in index.layout.on(device))
        number = torch.arange(index.layout.longest, device=device)
        means = index.means[(starts + number).clamp_max(max(0, index.layout.total - 1))]
        missing = for_tokens(number >= counts, tokens)[:, None]
        logits = call.logits(queries, for_tokens(means, tokens)).masked_fill(missing, -torch.inf)
        shares = logits.softmax(dim=2).nan_to_num(0.0).sum(dim=1)
        before, width = self.kernel // self.stride - 1, self.unit // self.stride
        padded = pad(shares, (before, max(0, blocks.longest * width - shares.shape[1])))
        scores = padded.unfold(1, before + width, width)[:, : blocks.longest].amax(dim=2)
        lengths = for_tokens(blocks.lengths_tensor.to(device), tokens)[:, None]
        return scores.masked_fill(torch.arange(blocks.longest, device=device) >= lengths, -torch.inf), blocks
