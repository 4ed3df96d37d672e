# SPDX-License-Identifier: Apache-2.0
"""Retrieval heads keep everything, streaming heads sinks and a recent window."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvpress.cache import attention
from kvpress.core.helpers import helper, override_of
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import PassHook
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted, hashed
from kvpress.observe.passes import Pass
from kvpress.observe.view import View
from kvpress.presses.head_table import HeadTable, lowest, read_head_table
from kvpress.presses.streaming_heads import NO_COMMON_BUDGET, TABLE, StreamingHeadsPress

SHARE = 1 / 8
"""Of the first `SPARSE_FROM` queries of a prompt, those whose attention is measured; later ones grow rarer as 1 / position."""
SPARSE_FROM = 512


@register(
    "duo_attention",
    "budget",
    "Xiao et al., 2024, arXiv:2410.10819",
    example="duo_attention:0.5,on_the_fly_scoring=true",
    needs=f"{TABLE}, or `on_the_fly_scoring=True`",
    refuses=(Refusal("duo_attention:0.5", "nothing says which heads stream"),),
    exempt=(Exemption(EVERY_SUITE, NO_COMMON_BUDGET),),
)
@dataclass
class DuoAttentionPress(StreamingHeadsPress):
    """Let the heads that retrieve least keep a window only.

    How much a head retrieves is read from a `table`, which `kvpress calibrate --method duo_attention` learns; that of the
    bundled reference model ships with it. `on_the_fly_scoring` measures it on the prompt instead, while that is
    read, by a sample of the queries i that see more than sinks and window, rarer the further they are:

        score[b, h] = mean over i and the group of the sum of softmax(q_i . k)[t] over sink_size <= t <= i - recent_size

    The first prompt decides; later turns and generated tokens keep to it. Otherwise as `StreamingHeadsPress`.

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
            raise ValueError(f"give either table or on_the_fly_scoring, got both: table={self.table!r}")

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

    def post_init_from_model(self, model: nn.Module) -> None:
        ask = None if self.on_the_fly_scoring else override_of(self, "load_attention_pattern")
        if ask is not None:
            sink_size, recent_size, values = ask(model)
            self.__dict__["_pattern"] = HeadTable(
                "load_attention_pattern", torch.as_tensor(values, dtype=torch.float64), sink_size, recent_size
            )

    def source(self, model: ModelFacts | None) -> HeadTable | None:
        return self.__dict__.get("_pattern") or super().source(model)

    @staticmethod
    @helper
    def load_attention_pattern(model: Any) -> tuple[int | None, int | None, Tensor]:
        """Return sinks, recent tokens, None where they are not known, and values `[L, H]` of the table in a model's folder."""
        table = read_head_table(str(Path(model.config.name_or_path) / DuoAttentionPress.beside))
        return table.sink_size, table.recent_size, table.values

    def streaming(self, table: HeadTable | None, view: View) -> Tensor | None:
        if not self.on_the_fly_scoring:
            return super().streaming(table, view)
        (wanted,) = self.measured
        return getattr(view.call.store.observers.get(wanted), "streaming", None)

    def _decide(self, done: Pass) -> None:
        (wanted,) = self.measured
        undecided = [each for call in done.calls if (each := call.store.observers[wanted]).streaming is None]
        if undecided:
            scores = torch.stack([each.means() for each in undecided], dim=1)
            chosen = torch.stack([lowest(row, self.head_compression_ratio) for row in scores], dim=1)
            for each, streaming in zip(undecided, chosen, strict=True):
                each.decide(streaming)


def in_sample(positions: Tensor) -> Tensor:
    """Which queries are measured: a few hundred of any prompt, and of two prompts the same as far as both reach."""
    return hashed(positions) < SHARE * (SPARSE_FROM / positions.clamp_min(SPARSE_FROM))


class OutsideMass(Observer):
    """Attention of a sample of queries beyond sinks and a recent window: `total [B, H]` of `count [B]`, float32.

    Which queries are in the sample depends on their positions only. Once `streaming [B, H]` is decided nothing more is
    measured.
    """

    held = ("total", "count", "streaming")

    def __init__(self, sink_size: int, recent_size: int) -> None:
        self.sink_size, self.recent_size = sink_size, recent_size
        self.total: Tensor | None = None
        self.count: Tensor | None = None
        self.streaming: Tensor | None = None

    def means(self) -> Tensor:
        """Return the mean `[B, H]` on the host; 0 where no query reached far enough."""
        assert self.total is not None  # noqa: S101 - a prompt has been read
        assert self.count is not None  # noqa: S101
        return (self.total / self.count.clamp_min(1)[:, None]).cpu()

    def decide(self, streaming: Tensor) -> None:
        """Settle which heads stream, `[B, H]`."""
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
        at = real.cumsum(dim=1) - 1
        for row, rows in enumerate(groups):
            queries = at[row, -new:]
            sampled = real[row, -new:] & (queries >= self.sink_size + self.recent_size) & in_sample(queries)
            if bool(sampled.any()):
                self._add(call, rows, sampled.nonzero().flatten(), at[row], real[row])

    def _add(self, call: LayerCall, rows: slice, sample: Tensor, at: Tensor, real: Tensor) -> None:
        """Measure the queries `sample` of this pass, in rows whose tokens lie at the positions `at [seen]`."""
        window, new = call.store.window, call.queries.shape[2]
        keys = window.filled_keys[rows]
        batch, heads, length, _ = keys.shape
        of_key, real = at[window.first :], real[window.first :]
        block = max(1, attention.BLOCK_BYTES // (4 * batch * call.queries.shape[1] * max(1, length)))
        for part in sample.split(block):
            queries = call.queries[rows][:, :, part].reshape(batch, heads, -1, call.queries.shape[3])
            scores = call.logits(queries, keys).view(batch, heads, -1, len(part), length)
            of_query = at[part - new][:, None]
            scores = scores.masked_fill(~(real & (of_key <= of_query)), -torch.inf)
            lse = call.lse_of(rows, part, scores)
            outside = (of_key >= self.sink_size) & (of_key <= of_query - self.recent_size)
            weights = torch.exp(scores - lse[..., None]) * outside
            self.total[rows] += weights.sum(dim=(3, 4)).mean(dim=2)  # type: ignore[index]
        self.count[rows] += len(sample)  # type: ignore[index]

    def to(self, device: torch.device | str) -> None:
        """What was decided stays on the host."""
        self.total, self.count = (None if tensor is None else tensor.to(device) for tensor in (self.total, self.count))
