# SPDX-License-Identifier: Apache-2.0
"""Calibration of `lukv`: budgets of heads that keep the most useful pairs for a second reading of the text."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.repeated import SINKS, read_twice
from kvpress.calibrate.run import CalibrationSettings, FinishedLayers, Report
from kvpress.core.checks import check_fields
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerAround, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.spec import get_press
from kvpress.observe.view import View
from kvpress.presses.criticalkv import check_outputs
from kvpress.presses.lukv import METHOD, PERCENTS, LUKVPress, scoring_of

NEWEST = 1
"""Newest tokens of each sequence that are always kept, like its sinks."""


@dataclass(frozen=True)
class LUKVSettings(CalibrationSettings):
    """Budgets per head and ratio that maximise the worth of the pairs that `press` keeps, for `lukv`.

        U[l, h](k) = sum of the worth of the k pairs that the press scores highest
        kept(r)    = argmax over counts that add up to (1 - r) n L H of the sum of hull(U[l, h])(kept[l, h])

    The worth of a pair is its `kvzip_plus_normalization` score of `kvzip` in a second reading. hull(U) is the least concave
    function above U, so that taking the largest gains first is optimal. The first 4 tokens and the newest are always kept. A
    layer gives `curve [99, H]`, float32: the share of its pairs that each head loses if 1%, ..., 99% of all pairs are lost,
    averaged over the sequences.

    Paper: LU-KV, Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction, 2026,
    arXiv:2602.08585.
    Differs from the paper: worth is measured in a second reading of the text, where the paper decodes a continuation; worth
    is relative to the size of the hidden state of the query's token.
    """

    method: ClassVar[str] = METHOD

    press: str = "expected_attention:epsilon=0.02"
    """Spec of the press that scores pairs, without ratio or budget."""

    @property
    def shortest(self) -> int:
        return SINKS + NEWEST + 1

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        check_outputs(model)
        plain = scoring_of(get_press(self.press))
        if self.press != plain:
            raise ValueError(
                f"press must be {plain!r}, without ratio or budget, because a curve holds for all ratios; got {self.press!r}"
            )
        LUKVPress(get_press(self.press)).recipe()
        steps = _Recorded(get_press(self.press)).recipe(model).evictions
        if any(step.recent or step.among or step.schedule.chunk or not step.schedule.prompt for step in steps):
            raise ValueError(f"press must score all pairs at the end of a prompt, which {self.press!r} does not")

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        del finished
        growing = host().facts_of(model).growing
        total = torch.zeros(PERCENTS, sum(layer.kv_heads for layer in growing))
        for done, ids in enumerate(sequences):
            scores, readings = press_scores(model, ids, self.press), read_twice(model, ids, plus=True)
            gains = [gains_of(scores[layer.index], readings[layer.index].scores.cpu()) for layer in growing]
            total += 1 - kept_counts(torch.cat(gains)) / len(ids)
            report("sequences", done + 1, len(sequences))
        split = (total / len(sequences)).split([layer.kv_heads for layer in growing], dim=1)
        return {f"{layer.index}.curve": curve for layer, curve in zip(growing, split, strict=True)}


def press_scores(model: Any, ids: Tensor, spec: str) -> dict[int, Tensor]:
    """Return the scores `[H, T]` of a press for the pairs of `ids [T]`, by layer."""
    recorded = _Recorded(get_press(spec))
    with torch.no_grad(), recorded(model):
        model(ids[None].to(model.device), use_cache=True)
    return {
        layer: torch.cat([heads[first] for first in sorted(heads)])
        for layer, heads in recorded.__dict__["recorded"].items()
    }


class _Recorded(WrapperPress):
    """Evicts half of the pairs, and stores all scores in `recorded[layer][first head]`, `[heads, T]`."""

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        del model
        recorded = self.__dict__.setdefault("recorded", {})
        return replace(step, scorer=_Recorder(step.scorer, recorded), amount=replace(step.amount, ratio=0.5))


@dataclass(frozen=True)
class _Recorder(ScorerAround):
    recorded: dict[int, dict[int, Tensor]]

    def scores(self, view: View) -> Tensor:
        scores = super().scores(view)
        self.recorded.setdefault(view.layer, {})[view.heads.indices(view.call.store.heads)[0]] = scores[0].float().cpu()
        return scores


def gains_of(scores: Tensor, worth: Tensor) -> Tensor:
    """Return the gain of each further pair of a head, `[H, T]`, never rising; infinite for pairs that are always kept.

    Pairs are ordered by falling `scores [H, T]`, and a pair gains its `worth [H, T]`.
    """
    length = scores.shape[1]
    order = scores[:, SINKS : length - NEWEST].argsort(dim=1, descending=True, stable=True)
    gains = torch.full((scores.shape[0], length), torch.inf, dtype=torch.float64)
    for head, ordered in enumerate(worth[:, SINKS : length - NEWEST].gather(1, order).double()):
        gains[head, SINKS + NEWEST :] = falling(ordered)
    return gains


def falling(gains: Tensor) -> Tensor:
    """Return the slopes of the least concave function above the running sum of `gains [n]`: rising neighbours are averaged."""
    blocks: list[tuple[float, int]] = []
    for gain in gains.tolist():
        total, count = gain, 1
        while blocks and blocks[-1][0] * count <= total * blocks[-1][1]:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    means = torch.tensor([total / count for total, count in blocks], dtype=torch.float64)
    return means.repeat_interleave(torch.tensor([count for _, count in blocks]))


def kept_counts(gains: Tensor) -> Tensor:
    """Return the number of pairs that each head keeps, `[99, H]`, if the smallest 1%, ..., 99% of `gains [H, T]` are lost."""
    heads, length = gains.shape
    owners = gains.flatten().argsort(descending=True, stable=True) // length
    shares = [round(gains.numel() * (1 - percent / 100)) for percent in range(1, PERCENTS + 1)]
    return torch.stack([owners[:share].bincount(minlength=heads) for share in shares])
