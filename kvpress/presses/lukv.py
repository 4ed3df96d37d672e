# SPDX-License-Identifier: Apache-2.0
"""Budgets per layer and head from a curve that was measured for the model."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvpress.core.checks import Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Allocator, Eviction
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.scoring import Scored
from kvpress.presses.dms import BeforeWindow
from kvpress.presses.expected_attention import ExpectedAttentionPress

PERCENTS = 99
PUBLISHED = (
    "https://github.com/baidu-baige/LU-KV, evaluation/curve_data/llama-3.1-8b/ea_0.02_sink4_win1_llama_avg_ratio.npy, for "
    "Llama-3.1-8B with ExpectedAttentionPress(epsilon=0.02)"
)


@register(
    "lukv",
    "budget",
    "LU-KV, 2026, arXiv:2602.08585",
    example="lukv(expected_attention:0.5,epsilon=0.02)",
    needs="a budget curve that was measured for the model and the inner press (`curve`)",
    refuses=(
        Refusal("lukv(expected_attention:0.5,epsilon=0.02)", "no curve is given"),
        Refusal("lukv(adakv(knorm:0.5))", "both would choose the pairs to keep"),
    ),
    exempt=(
        Exemption(EVERY_SUITE, "needs a file per model; its own tests run the oracle, padding and decoding with one"),
    ),
)
@dataclass(init=False)
class LUKVPress(WrapperPress):
    """Give every layer and head the part of the budget that a curve, measured beforehand, says it needs.

        kept[l, h] = (1 - curve(ratio)[l, h]) n, rounded so that the layer keeps the sum

    `press` scores the pairs, expected attention with epsilon 0.02 unless another is given. `compression_ratio` sets its ratio.
    The first `sink` and the newest `window` tokens always stay. `curve` is a .npy file `[99, L, H]`: which part each head
    loses where 1%, 2%, ..., 99% are lost on average. Between whole percents it is interpolated.

    Paper: LU-KV, Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction, 2026,
    arXiv:2602.08585.
    Differs from the paper: nothing in the budgets; curves are read, not measured. Without one NVIDIA kvpress goes on with equal
    budgets; here it is refused.
    """

    press: BasePress
    sink: Size = 4
    window: Size = 1
    curve: str | None = field(default=None, kw_only=True)

    def __init__(
        self,
        press: BasePress | None = None,
        compression_ratio: float = 0.0,
        sink: int = 4,
        window: int = 1,
        *,
        curve: str | os.PathLike[str] | None = None,
    ) -> None:
        self.press = ExpectedAttentionPress(epsilon=0.02) if press is None else press
        self.sink, self.window, self.curve = sink, window, None if curve is None else os.fspath(curve)
        if compression_ratio:
            self.compression_ratio = compression_ratio
        self.__post_init__()

    def validate(self) -> None:
        super().validate()
        if self.curve is not None:
            read_curve(self.curve)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        if model is not None and self.curve is None:
            raise ValueError(
                f"LUKVPress needs a budget curve of {model.name}: give curve=, a .npy file [{PERCENTS}, layers, kv heads]; "
                f"published is {PUBLISHED}"
            )
        if self.curve is not None and model is not None:
            shape, heads = read_curve(self.curve).shape, [layer.kv_heads for layer in model.layers]
            if heads != [shape[2]] * shape[1]:
                counts = " or ".join(str(count) for count in sorted(set(heads)))
                raise ValueError(
                    f"{self.curve} is a curve of {shape[1]} layers of {shape[2]} kv heads, but {model.name} has {len(heads)} "
                    f"attention layers of {counts}; use the curve that was measured for this model"
                )
        always = self.sink + self.window
        return replace(
            step,
            scorer=BeforeWindow(step.scorer, self.window, self.sink),
            amount=replace(step.amount, protected=max(step.amount.protected, always)),
            allocator=step.allocator if self.curve is None else Along(self.curve, always),
        )


@dataclass(frozen=True)
class Along(Allocator):
    """Gives the heads of a layer what the curve in a file leaves them, `least` pairs at least."""

    curve: str
    least: int

    ragged = True
    by_layer = True

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        return False  # some layers keep less than the mean

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        return [self._of_view(each, mean) for each in scored]

    def _of_view(self, scored: Scored, mean: int) -> Tensor:
        view = scored.view
        if view.target >= view.available:
            return torch.full(view.shape[:2], view.length, device=view.positions.device)
        settled = view.target - mean  # pairs that stay in any case, beside those that there is a choice of
        kept = shares(read_curve(self.curve)[:, view.layer], 1 - view.target / view.available, view.available)
        count = (kept[view.heads].clamp_min(self.least) - settled).clamp(0, view.length)
        return count.to(view.positions.device).expand(view.shape[:2])


def shares(curve: Tensor, ratio: float, tokens: int) -> Tensor:
    """Return how many of `tokens` pairs each head keeps, `[H]`, by the `curve [99, H]` of its layer; they add up to the sum."""
    ends = torch.cat([torch.zeros(1, curve.shape[1]), curve, torch.ones(1, curve.shape[1])])
    at = min(ratio * 100, PERCENTS + 1.0)
    below = min(int(at), PERCENTS)
    lost = ends[below] + (at - below) * (ends[below + 1] - ends[below])
    ideal = (1 - lost.clamp(0, 1)).double() * tokens
    kept = ideal.floor()
    left = int(ideal.sum().round() - kept.sum())
    kept[(ideal - kept).argsort(descending=True, stable=True)[:left]] += 1
    return kept.long()


def read_curve(path: str) -> Tensor:
    """Read a curve `[99, L, H]`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no curve.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no budget curve {path!r}: curve must be a .npy file; published is {PUBLISHED}")
    return _read(path, file.stat().st_mtime_ns)


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Tensor:
    del changed
    try:
        found = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from error
    if found.ndim != 3 or found.shape[0] != PERCENTS or not np.isfinite(found).all():
        raise ValueError(
            f"{path} must hold finite numbers [{PERCENTS}, layers, kv heads], got shape {list(found.shape)}"
        )
    return torch.from_numpy(found.astype(np.float32))
