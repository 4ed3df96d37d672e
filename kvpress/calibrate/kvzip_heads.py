# SPDX-License-Identifier: Apache-2.0
"""Calibration of `duo_attention` by KVzip: the largest score of each head when the context is read again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.gates import TENSOR, TableSettings
from kvpress.calibrate.repeated import SINKS, read_twice
from kvpress.calibrate.run import FinishedLayers, Report
from kvpress.core.host import host


@dataclass(frozen=True)
class KVzipHeadSettings(TableSettings):
    """Largest `kvzip` score of the pairs of every head, as the mean over the sequences: a table for `duo_attention`.

        value[l, h] = mean over sequences of max over t of score[l, h, t]

    The score is that of `KVzipPress` without a prompt of repetition: each sequence is read twice, and its sinks are ignored.
    Layers with a sliding window get 1.

    After Kim et al., KVzip, 2025, arXiv:2505.23416, whose scores of heads do not depend on a context either.
    Differs from the paper: the mean is over several texts, and no words request the repetition.
    """

    method: ClassVar[str] = "kvzip_heads"

    @property
    def shortest(self) -> int:
        return SINKS + 2

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        del finished
        facts = host().facts_of(model)
        total = torch.zeros(len(facts.layers), facts.layers[0].kv_heads)
        windows = [layer.index for layer in facts.layers if layer not in facts.growing]
        for done, ids in enumerate(sequences):
            total[windows] += 1
            for layer, reading in read_twice(model, ids, plus=False).items():
                total[layer] += reading.scores[:, SINKS:].amax(dim=1).cpu()
            report("sequences", done + 1, len(sequences))
        return {TENSOR: total / len(sequences)}
