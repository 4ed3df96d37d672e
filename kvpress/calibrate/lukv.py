# SPDX-License-Identifier: Apache-2.0
"""Budgets of heads for `lukv`: where a press's own order keeps most of what a second reading of the text needs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.repeated import SINKS, read_twice
from kvpress.calibrate.run import Parts, Report, Settings
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
"""Newest tokens of each sequence that are kept in any case, like its sinks."""


@dataclass(frozen=True)
class LUKVSettings(Settings):
    """Budgets per head and ratio at which the pairs that `press` keeps are worth most in a second reading, for `lukv`.

        U[l, h](k) = sum of the worth of the k pairs that the press scores highest
        kept(r)    = argmax over counts that add up to (1 - r) n L H of the sum of hull(U[l, h])(kept[l, h])

    The worth of a pair is its `kvzip_plus_normalization` score of `kvzip`, hull(U) the least concave function above U, so that
    taking the largest gains first is optimal. `press` is a spec without ratio or budget. The first 4 tokens and the newest are
    kept in any case. A layer gives `curve [99, H]`, float32: which part each head loses where 1%, ..., 99% are lost
    altogether, as the mean over the sequences.

    Paper: LU-KV, Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction, 2026,
    arXiv:2602.08585.
    Differs from the paper: the future that pairs are worth something for is a second reading of the text, where the paper
    decodes one; worth is relative to the size of the reader's hidden state.
    """

    method: ClassVar[str] = METHOD

    press: str = "expected_attention:epsilon=0.02"

    @property
    def shortest(self) -> int:
        return SINKS + NEWEST + 1

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        check_outputs(model)
        plain = scoring_of(get_press(self.press))
        if self.press != plain:
            raise ValueError(
                f"press must be {plain!r}, without ratio or budget, since a curve is for all of them; got {self.press!r}"
            )
        LUKVPress(get_press(self.press)).recipe()
        steps = _Recorded(get_press(self.press)).recipe(model).evictions
        if any(step.recent or step.among or step.schedule.chunk or not step.schedule.prompt for step in steps):
            raise ValueError(f"press must score all pairs of a prompt once it is read, which {self.press!r} does not")

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        del parts
        growing = host().facts_of(model).growing
        total = torch.zeros(PERCENTS, sum(layer.kv_heads for layer in growing))
        for done, ids in enumerate(sequences):
            scores, readings = scored(model, ids, self.press), read_twice(model, ids, plus=True)
            gains = [gains_of(scores[layer.index], readings[layer.index].scores.cpu()) for layer in growing]
            total += 1 - kept(torch.cat(gains)) / len(ids)
            report("sequences", done + 1, len(sequences))
        split = (total / len(sequences)).split([layer.kv_heads for layer in growing], dim=1)
        return {f"{layer.index}.curve": curve for layer, curve in zip(growing, split, strict=True)}


def scored(model: Any, ids: Tensor, spec: str) -> dict[int, Tensor]:
    """Return the scores `[H, T]` that a press gives the pairs of `ids [T]`, by layer."""
    recorded = _Recorded(get_press(spec))
    with torch.no_grad(), recorded(model):
        model(ids[None].to(model.device), use_cache=True)
    return {
        layer: torch.cat([heads[at] for at in sorted(heads)]) for layer, heads in recorded.__dict__["found"].items()
    }


class _Recorded(WrapperPress):
    """Evicts half of the pairs, and keeps the scores of all: `found[layer][first head]`, `[heads, T]`."""

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        del model
        found = self.__dict__.setdefault("found", {})
        return replace(step, scorer=_Recorder(step.scorer, found), amount=replace(step.amount, ratio=0.5))


@dataclass(frozen=True)
class _Recorder(ScorerAround):
    found: dict[int, dict[int, Tensor]]

    def scores(self, view: View) -> Tensor:
        scores = super().scores(view)
        self.found.setdefault(view.layer, {})[view.heads.indices(view.call.store.heads)[0]] = scores[0].float().cpu()
        return scores


def gains_of(scores: Tensor, worth: Tensor) -> Tensor:
    """Return what each further pair of a head gains, `[H, T]`, never rising; infinite for those that stay in any case.

    Pairs are taken in the order of their `scores [H, T]`, and gain their `worth [H, T]`.
    """
    length = scores.shape[1]
    order = scores[:, SINKS : length - NEWEST].argsort(dim=1, descending=True, stable=True)
    gains = torch.full((scores.shape[0], length), torch.inf, dtype=torch.float64)
    for head, own in enumerate(worth[:, SINKS : length - NEWEST].gather(1, order).double()):
        gains[head, SINKS + NEWEST :] = falling(own)
    return gains


def falling(gains: Tensor) -> Tensor:
    """Return the slopes of the least concave function above the running sum of `gains [n]`: neighbours that rise share."""
    blocks: list[tuple[float, int]] = []
    for gain in gains.tolist():
        total, count = gain, 1
        while blocks and blocks[-1][0] * count <= total * blocks[-1][1]:
            before = blocks.pop()
            total, count = total + before[0], count + before[1]
        blocks.append((total, count))
    means = torch.tensor([total / count for total, count in blocks], dtype=torch.float64)
    return means.repeat_interleave(torch.tensor([count for _, count in blocks]))


def kept(gains: Tensor) -> Tensor:
    """Return how many pairs each head keeps, `[99, H]`, where 1%, ..., 99% of `gains [H, T]`, the smallest, are lost."""
    heads, length = gains.shape
    owners = gains.flatten().argsort(descending=True, stable=True) // length
    shares = [round(gains.numel() * (1 - percent / 100)) for percent in range(1, PERCENTS + 1)]
    return torch.stack([owners[:share].bincount(minlength=heads) for share in shares])
