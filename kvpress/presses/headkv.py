# SPDX-License-Identifier: Apache-2.0
"""Budgets of heads by how much they retrieve."""

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
from kvpress.observe.view import View
from kvpress.presses.duo_attention import DuoAttentionPress
from kvpress.presses.head_shares import HeadShares
from kvpress.presses.head_table import read_head_table
from kvpress.presses.snapkv import SnapKVPress
from kvpress.presses.streaming_heads import TABLE

BESIDE = ("head_scores.json", DuoAttentionPress.beside)
"""Files in the folder of a model that are looked for, in this order."""


@register(
    "headkv",
    "budget",
    "Fu et al., 2024, arXiv:2410.19258",
    example="headkv",
    needs=TABLE,
    refuses=(Refusal("headkv", "nothing says how much heads retrieve"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs scores of a model's heads; its own tests run the oracle, padding and decoding"),
    ),
)
@dataclass
class HeadKVPress(SnapKVPress):
    """SnapKV with a budget for every head that follows how much it retrieves.

        budget[l, h] = w + (m - w) * (1 - 1 / beta + L * H * p[l, h] / beta),   p = s ** power, divided by its sum

    m is the mean budget, of which 1 / `beta` is shared out by the scores s of all L * H heads, and w = `window_size`; what a
    head cannot hold goes to the others. `power` above 1 favours the heads with the largest scores. `table` is the file of
    scores, or the folder that holds it: a `.json` of the authors' form, `{"layer-head": [numbers]}`, of which means count, or a
    `.tsv` with a line per layer. None is `head_scores.json` in the folder of the model, else `full_attention_heads.tsv` there,
    the table of `duo_attention`. It has a column for every kv head, or for every query head, of which those of a group are
    added. `kernel_size` is as in SnapKV.

    Paper: Fu et al., Not All Heads Matter: A Head-Level KV Cache Compression Method with Integrated Retrieval and Reasoning,
    2024, arXiv:2410.19258.
    Differs from the paper: scores are read, not measured; query heads of a group share keys, and so a budget; neighbours share
    the mean of their attention, as in SnapKV, where the authors' code takes their largest.
    """

    window_size: Count = 32
    kernel_size: Odd = 7
    beta: Positive = 1.2
    power: Positive = 1.0
    table: str | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.beta < 1:
            raise ValueError(
                f"beta must be >= 1, got {self.beta}: it is 1 / the share of the budget that scores decide on"
            )
        if self.table is not None:
            self.table = os.fspath(self.table)
            read_scores(self.table)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        scores = None if model is None else self.scores_of(model)
        allocator = ByTable(self.window_size, scores, self.beta, self.power, scope="cache")
        found = super().recipe(model)
        return replace(found, evictions=tuple(replace(step, allocator=allocator) for step in found.evictions))

    def scores_of(self, model: ModelFacts) -> Tensor:
        """Return the scores of the kv heads of a model, `[L, H]`."""
        path = self.table
        if path is None:
            beside = [Path(model.source) / name for name in BESIDE] if model.source else []
            found = next((file for file in beside if file.is_file()), None)
            if found is None:
                raise ValueError(
                    f"HeadKVPress needs to know how much the heads of {model.name} retrieve: give table=, a file of one score "
                    f"per layer and head, or put {' or '.join(BESIDE)} into the folder of the model"
                )
            path = str(found)
        scores = read_scores(path)
        for heads in ([layer.heads for layer in model.layers], kv_heads := [layer.kv_heads for layer in model.layers]):
            if heads == [scores.shape[1]] * len(scores):
                return scores.unflatten(1, (kv_heads[0], -1)).sum(dim=2)
        raise ValueError(
            f"{path} has scores of {len(scores)} layers of {scores.shape[1]} heads, but {model.name} has {len(kv_heads)} "
            f"attention layers of {model.layers[0].heads} query and {kv_heads[0]} kv heads; use the file that was made for it"
        )


def read_scores(path: str) -> Tensor:
    """Read scores of heads `[L, heads]`, float64, from a `.json` of the authors' form or a table (`read_head_table`)."""
    scores = _read_json(path) if path.endswith(".json") else read_head_table(path).values
    if not bool((scores >= 0).all() and scores.isfinite().all() and scores.sum() > 0):
        raise ValueError(f"{path} must hold finite scores >= 0, not all of them 0")
    return scores


def _read_json(path: str) -> Tensor:
    try:
        found = {
            tuple(map(int, name.split("-"))): numbers for name, numbers in json.loads(Path(path).read_text()).items()
        }
        layers, heads = (1 + max(place) for place in zip(*found, strict=True))
        rows = [[fmean(found[layer, head]) for head in range(heads)] for layer in range(layers)]
        return torch.tensor(rows, dtype=torch.float64)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f'{path} must hold scores as {{"layer-head": [numbers]}}, for every layer and head: {error}'
        ) from None


@dataclass(frozen=True)
class ByTable(HeadShares):
    """Shares out by the `scores [L, H]` of heads; see `HeadKVPress`."""

    scores: Tensor | None = field(compare=False)
    beta: float
    power: float

    def weights(self, views: Sequence[View]) -> list[Tensor]:
        if self.scores is None:
            raise ValueError("HeadKVPress looks at the whole model: use it inside `with press(model)`")
        layers = sorted({view.layer for view in views})
        raised = self.scores[layers] ** self.power
        shares = 1 - 1 / self.beta + raised * (raised.numel() / (self.beta * raised.sum()))
        rows = dict(zip(layers, shares, strict=True))
        return [rows[view.layer][view.heads] for view in views]
