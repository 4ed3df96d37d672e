# SPDX-License-Identifier: Apache-2.0
"""Which heads need their context, by what their pairs are worth when the context is repeated."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.gates import TENSOR, TableSettings
from kvpress.calibrate.run import Parts, Report
from kvpress.core.host import host
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import Pass
from kvpress.presses.kvzip import KVzipPress, Worth


@dataclass(frozen=True)
class KVzipHeadSettings(TableSettings):
    """Largest `kvzip` score of the pairs of every head, as the mean over the sequences: a table for `duo_attention`.

        value[l, h] = mean over sequences of max over t of score[l, h, t]

    The score is that of `KVzipPress` without a prompt of repetition: each sequence is read twice, and its sinks do not count.
    Layers with a sliding window get 1.

    After Kim et al., KVzip, 2025, arXiv:2505.23416, whose scores of heads do not hang on a context either.
    Differs from the paper: the mean over several texts, and no words that ask for the repetition.
    """

    method: ClassVar[str] = "kvzip_heads"

    @property
    def shortest(self) -> int:
        return KVzipPress.n_sink + 2

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        del parts
        facts = host().facts_of(model)
        total = torch.zeros(len(facts.layers), facts.layers[0].kv_heads)
        for done, ids in enumerate(sequences):
            press = _Recording(0.5, repeat_prompt="")
            with torch.no_grad(), press(model):
                model(ids[None].to(model.device))
            found = press.__dict__["found"]
            for layer in facts.layers:
                total[layer.index] += found.get(layer.index, 1.0)
            report("sequences", done + 1, len(sequences))
        return {TENSOR: total / len(sequences)}


class _Recording(KVzipPress):
    """Keeps the largest score of every head by layer, `found[layer] [H]`."""

    def _repeat(self, asked: Any, done: Pass) -> None:
        super()._repeat(asked, done)
        found = self.__dict__.setdefault("found", {})
        for call in done.calls:
            values = call.store.observers[Wanted(Worth)].values
            found[call.layer] = torch.stack([each[each.isfinite()].max() for each in values]).cpu()
