# SPDX-License-Identifier: Apache-2.0
"""Full context for retrieval heads, sinks and a recent window for streaming heads."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.cache import attention
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import PassHook
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted, hashed
from kvpress.observe.passes import Pass
from kvpress.observe.view import View
from kvpress.presses.head_table import HeadTable, lowest
from kvpress.presses.streaming_heads import NO_COMMON_BUDGET, TABLE, StreamingHeadsPress

SHARE = 1 / 8
"""Share of the queries whose attention is measured, at positions below `SPARSE_FROM`."""
SPARSE_FROM = 512
"""Position from which the share falls as 1 / position."""


@register(
    "duo_attention",
    "budget",
    "Xiao et al., 2024, arXiv:2410.10819",
    example="duo_attention:0.5,on_the_fly_scoring=true",
    needs=f"{TABLE}, or `on_the_fly_scoring=True`",
    refuses=(Refusal("duo_attention:0.5", "it needs a table, or `on_the_fly_scoring`"),),
    exempt=(Exemption(EVERY_SUITE, NO_COMMON_BUDGET),),
)
@dataclass
class DuoAttentionPress(StreamingHeadsPress):
    """Keep only sinks and a recent window in the heads that retrieve least.

    A `table` has the retrieval score of each head; `kvpress calibrate duo_attention` learns one, and the table of the
    bundled reference model ships with it; None also downloads the authors' table of a model that they have one for, or calls
    an override of `load_attention_pattern`. `on_the_fly_scoring` measures the scores on the prompt instead, by a sample of the
    queries i after the first sink_size + recent_size tokens, which is sparser at later positions:

        score[b, h] = mean over i and the group of the sum of softmax(q_i . k)[t] over sink_size <= t <= i - recent_size

    The first prompt sets the streaming heads for later turns and generated tokens. Otherwise as `StreamingHeadsPress`.

    Paper: Xiao et al., DuoAttention: Efficient Long-Context LLM Inference with Retrieval and Streaming Heads, 2024,
    arXiv:2410.10819.
    Differs from the paper: prompts are read with full attention and cut afterwards; the values of `on_the_fly_scoring` are
    not learned. NVIDIA kvpress measures them on a book corpus instead of on the prompt.
    """

    sizes: ClassVar[tuple[int, int]] = (128, 256)
    beside: ClassVar[str] = "full_attention_heads.tsv"

    on_the_fly_scoring: bool = False

    def validate(self) -> None:
        super().validate()
        if self.on_the_fly_scoring and self.table is not None:
            raise ValueError(f"set either table or on_the_fly_scoring, got both: table={self.table!r}")

    @property
    def measures(self) -> bool:
        return self.on_the_fly_scoring

    @property
    def remedy(self) -> str:
        return (
            "give table=, the folder of full_attention_heads.tsv that the authors publish for the model, put that file into "
            "the folder of the model, or set on_the_fly_scoring=True"
        )

    @property
    def measured(self) -> tuple[Wanted, ...]:
        return (Wanted(OutsideMass, *self.window(None)),) if self.on_the_fly_scoring else ()

    @property
    def decision(self) -> PassHook | None:
        return PassHook(self._decide, ("prefill",)) if self.on_the_fly_scoring else None

    def published(self, model: ModelFacts) -> HeadTable:
        """Return the table of `load_attention_pattern`: a file in the folder of the model, or else the authors' download."""
        module = model.layers[0].module
        if module is None:
            return super().published(model)
        config: Any = copy.copy(module.config)
        config.name_or_path = model.source
        load: Any = getattr(self, "load_attention_pattern")  # noqa: B009 - a helper, attached when the class is adapted
        sink_size, recent_size, values = load(SimpleNamespace(config=config))
        source = f"load_attention_pattern of {model.source or model.name}"
        return HeadTable(source, torch.as_tensor(values).double().clamp(0, 1), sink_size, recent_size)

    def streaming(self, table: HeadTable | None, view: View) -> Tensor | None:
        if not self.on_the_fly_scoring:
            return super().streaming(table, view)
        (observer,) = self.measured
        return getattr(view.call.store.observers.get(observer), "streaming", None)

    def _decide(self, prefill: Pass) -> None:
        (key,) = self.measured
        observers = [obs for call in prefill.calls if (obs := call.store.observers[key]).streaming is None]
        if observers:
            shards = prefill.calls[0].layer.shards
            scores = torch.stack([observer.means() for observer in observers], dim=1)
            scores = torch.cat(shards.gather(scores), dim=2)
            masks = torch.stack([lowest(row, self.head_compression_ratio) for row in scores], dim=1)
            for observer, streaming in zip(observers, masks, strict=True):
                observer.decide(shards.part(streaming, 1))


def in_sample(positions: Tensor) -> Tensor:
    """Return a mask of the positions whose queries are measured: a few hundred per prompt, the same in all prompts."""
    return hashed(positions) < SHARE * (SPARSE_FROM / positions.clamp_min(SPARSE_FROM))


class OutsideMass(Observer):
    """Observer that sums the attention of sampled queries outside sinks and recent window, `total [B, H]`, float32.

    `count [B]` is the number of sampled queries; a query's position alone decides if it is sampled. Recording stops once
    `streaming [B, H]` is set.
    """

    state_names = ("total", "count", "streaming")

    def __init__(self, sink_size: int, recent_size: int) -> None:
        self.sink_size, self.recent_size = sink_size, recent_size
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.streaming: Tensor | None = None

    def means(self) -> Tensor:
        """Return the mean `[B, H]` on the host; 0 for rows without a sampled query."""
        assert self.total is not None  # noqa: S101 - a prompt has been read
        assert self.count is not None  # noqa: S101
        return (self.total / self.count.clamp_min(1)[:, None]).cpu()

    def decide(self, streaming: Tensor) -> None:
        """Store the mask `[B, H]` of streaming heads and drop the sums."""
        self.total, self.count, self.streaming = None, None, streaming.clone()

    def observe(self, call: LayerCall) -> None:
        if self.streaming is not None or call.phase == "decode":
            return
        store, new = call.store, call.queries.shape[2]
        device = call.queries.device
        if self.total is None or self.count is None:
            self.total = torch.zeros(store.batch, store.heads, device=device)
            self.count = torch.zeros(store.batch, device=device)
        self.total, self.count = self.total.clone(), self.count.clone()
        if call.tokens.mask is None:
            groups = [slice(0, store.batch)]
            real = torch.ones(1, store.seen, dtype=torch.bool, device=device)
        else:
            groups = [slice(row, row + 1) for row in range(store.batch)]
            real = call.tokens.mask.to(device)
        positions = real.cumsum(dim=1) - 1
        for row, rows in enumerate(groups):
            queries = positions[row, -new:]
            sampled = real[row, -new:] & (queries >= self.sink_size + self.recent_size) & in_sample(queries)
            if bool(sampled.any()):
                self._add(call, rows, sampled.nonzero().flatten(), positions[row], real[row])

    def _add(self, call: LayerCall, rows: slice, sample: Tensor, positions: Tensor, real: Tensor) -> None:
        """Add the attention of the queries `sample` of this pass; `positions [seen]` and mask `real [seen]` are the rows'."""
        window, new = call.store.window, call.queries.shape[2]
        keys = window.filled_keys[rows]
        batch, heads, length, _ = keys.shape
        key_positions, real = positions[window.first :], real[window.first :]
        block = max(1, attention.BLOCK_BYTES // (4 * batch * call.queries.shape[1] * max(1, length)))
        for index in sample.split(block):
            queries = call.queries[rows][:, :, index].reshape(batch, heads, -1, call.queries.shape[3])
            scores = call.logits(queries, keys).view(batch, heads, -1, len(index), length)
            query_positions = positions[index - new][:, None]
            scores = scores.masked_fill(~(real & (key_positions <= query_positions)), -torch.inf)
            lse = call.lse_of(rows, index, scores)
            outside = (key_positions >= self.sink_size) & (key_positions <= query_positions - self.recent_size)
            weights = torch.exp(scores - lse[..., None]) * outside
            self.total[rows] += weights.sum(dim=(3, 4)).mean(dim=2)  # type: ignore[index]
        self.count[rows] += len(sample)  # type: ignore[index]

    def to(self, device: torch.device | str) -> None:
        """Move the sums to a device; `streaming` stays on the host."""
        self.total, self.count = (None if tensor is None else tensor.to(device) for tensor in (self.total, self.count))
