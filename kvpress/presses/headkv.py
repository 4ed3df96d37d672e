# SPDX-License-Identifier: Apache-2.0
"""Head budgets in proportion to retrieval scores."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean

import torch
from torch import Tensor

from kvpress.core.checks import Count, Odd, Positive
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.scoring import Scored
from kvpress.presses.duo_attention import DuoAttentionPress
from kvpress.presses.head_shares import HeadShares
from kvpress.presses.head_table import read_head_table
from kvpress.presses.snapkv import SnapKVPress
from kvpress.presses.streaming_heads import TABLE

BESIDE = ("head_scores.json", DuoAttentionPress.beside)
"""Names of score files in the folder of a model, in the order of preference."""


@register(
    "headkv",
    "budget",
    "Fu et al., 2024, arXiv:2410.19258",
    example="headkv",
    needs=TABLE,
    refuses=(Refusal("headkv", "it needs a file of head scores"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs scores of a model's heads; its own tests run the oracle, padding and decoding"),
    ),
)
@dataclass
class HeadKVPress(SnapKVPress):
    """Score as `SnapKVPress`, with head budgets that grow with a retrieval score per head.

        budget[l, h] = w + (m - w) * (1 - 1 / beta + L * H * p[l, h] / beta),   p = s ** power, divided by its sum

    m is the mean budget; the share 1 / `beta` of it follows the scores s of all L * H heads. `window_size` is w, the number
    of newest tokens that every head keeps. Pairs above the length of a head go to other heads. `power` above 1 favours the
    heads with the largest scores. `table` is the file of scores, or a folder with it: a `.json` of the authors' form,
    `{"layer-head": [numbers]}`, of which the means are used, or a `.tsv` with a line per layer. None is `head_scores.json`
    in the folder of the model, or else `full_attention_heads.tsv` there, the table of `duo_attention`. A table has a column
    per KV head, or per query head; the scores of the query heads of a GQA group are added. `kernel_size` is as in SnapKV.

    Paper: Fu et al., Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    2024, arXiv:2410.19258.
    Differs from the paper: scores are read from a file, not measured; the query heads of a group share a budget, as they share
    keys; attention is pooled by the mean of neighbours, as in SnapKV, where the authors' code takes the maximum.
    """

    window_size: Count = 32
    kernel_size: Odd = 7
    beta: Positive = 1.2
    power: Positive = 1.0
    table: str | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.beta < 1:
            raise ValueError(f"beta must be >= 1, got {self.beta}: the scores share out 1 / beta of the budget")
        if self.table is not None:
            self.table = os.fspath(self.table)
            read_scores(self.table)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        scores = None if model is None else self.scores_of(model)
        allocator = ByTable(self.window_size, scores, self.beta, self.power, scope="cache")
        recipe = super().recipe(model)
        return replace(recipe, evictions=tuple(replace(step, allocator=allocator) for step in recipe.evictions))

    def scores_of(self, model: ModelFacts) -> Tensor:
        """Return the scores of the KV heads of a model, `[L, H]`.

        Raises ValueError if there is no file of scores, or if it does not fit the model.
        """
        path = self.table
        if path is None:
            candidates = [Path(model.source) / name for name in BESIDE] if model.source else []
            file = next((file for file in candidates if file.is_file()), None)
            if file is None:
                raise ValueError(
                    f"HeadKVPress needs retrieval scores of the heads of {model.name}: set table=, a file with one score per "
                    f"layer and head, or put {' or '.join(BESIDE)} into the folder of the model"
                )
            path = str(file)
        scores = read_scores(path)
        for heads in ([layer.heads for layer in model.layers], kv_heads := [layer.kv_heads for layer in model.layers]):
            if heads == [scores.shape[1]] * len(scores):
                grouped: Tensor = scores.unflatten(1, (kv_heads[0], -1))
                return grouped.sum(dim=2)
        raise ValueError(
            f"{path} has scores of {len(scores)} layers of {scores.shape[1]} heads, but {model.name} has {len(kv_heads)} "
            f"attention layers of {model.layers[0].heads} query and {kv_heads[0]} KV heads; use a file for this model"
        )


def read_scores(path: str) -> Tensor:
    """Read scores of heads `[L, heads]`, float64, from a `.json` of the authors' form or a table (`read_head_table`).

    Raises ValueError unless scores are finite, not negative, and not all 0.
    """
    scores = _read_json(path) if path.endswith(".json") else read_head_table(path).values
    if not bool((scores >= 0).all() and scores.isfinite().all() and scores.sum() > 0):
        raise ValueError(f"{path} must hold finite scores >= 0, not all of them 0")
    return scores


def _read_json(path: str) -> Tensor:
    try:
        samples = {
            tuple(map(int, name.split("-"))): numbers for name, numbers in json.loads(Path(path).read_text()).items()
        }
        layers, heads = (1 + max(index) for index in zip(*samples, strict=True))
        rows = [[fmean(samples[layer, head]) for head in range(heads)] for layer in range(layers)]
        return torch.tensor(rows, dtype=torch.float64)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'{path} must hold scores as {{"layer-head": [numbers]}}, for every layer and head: {error}'
        ) from None


@dataclass(frozen=True)
class ByTable(HeadShares):
    """Allocator of head budgets by the `scores [L, H]` of heads; see `HeadKVPress` for the formula."""

    scores: Tensor | None = field(compare=False)
    beta: float
    power: float

    def weights(self, scored: Sequence[Scored]) -> list[Tensor]:
        if self.scores is None:
            raise ValueError("HeadKVPress needs the scores of all layers: use it inside `with press(model)`")
        layers = sorted({item.view.layer for item in scored})
        raised = self.scores[layers] ** self.power
        shares = 1 - 1 / self.beta + raised * (raised.numel() / (self.beta * raised.sum()))
        rows = dict(zip(layers, shares, strict=True))
        return [rows[item.view.layer][item.view.model_heads] for item in scored]
