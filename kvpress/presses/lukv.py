# SPDX-License-Identifier: Apache-2.0
"""Budgets per layer and head from a curve that was measured for the model."""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.checks import Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress, BudgetPress, WrapperPress, parts_of
from kvpress.core.recipe import Allocator, Eviction
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.scoring import Scored
from kvpress.core.spec import to_spec
from kvpress.presses.dms import BeforeWindow
from kvpress.presses.expected_attention import ExpectedAttentionPress

METHOD = "lukv"
COMMAND = f"kvpress calibrate --method {METHOD}"
PERCENTS = 99
HALVINGS = 40
"""Steps in which a ratio is looked for."""
PUBLISHED = (
    "https://github.com/baidu-baige/LU-KV, evaluation/curve_data/llama-3.1-8b/ea_0.02_sink4_win1_llama_avg_ratio.npy, for "
    "Llama-3.1-8B with ExpectedAttentionPress(epsilon=0.02)"
)


@register(
    "lukv",
    "budget",
    "LU-KV, 2026, arXiv:2602.08585",
    example="lukv(expected_attention:0.5,epsilon=0.02)",
    needs="a budget curve of the model and the inner press: a published one, or `kvpress calibrate --method lukv` (`curve`)",
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

        kept[l, h] = (1 - curve(ratio)[l, h]) n, rounded so that all heads together keep the sum

    `press` scores the pairs, expected attention with epsilon 0.02 unless another is given. `compression_ratio` sets its ratio.
    The first `sink` and the newest `window` tokens always stay: what a head keeps above its part for them, the others give, as
    they would at a larger ratio. `curve` is a published .npy file `[99, L, H]`, or what `kvpress calibrate --method lukv`
    writes: which part each head loses where 1%, 2%, ..., 99% are lost on average. Between whole percents it is interpolated.
    None is the file that ships with the bundled reference model, for the default `press`.

    Paper: LU-KV, Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction, 2026,
    arXiv:2602.08585.
    Differs from the paper: the sum is kept over all layers, where NVIDIA kvpress rounds layer by layer. Without a curve NVIDIA
    kvpress goes on with equal budgets; here it is refused.
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
            curves_of(self.curve)

    def wrap(self, step: Eviction, model: ModelFacts | None) -> Eviction:
        self.check_choice(step)
        curve = self.curve
        if model is not None:
            curve = curve or str(calibration.shipped_for(model, METHOD) or "") or None
            if curve is None:
                raise ValueError(
                    f"LUKVPress needs a budget curve of {model.name}: give curve=, a .npy file [{PERCENTS}, layers, kv heads] "
                    f"or what `{COMMAND} --model ... --data ... --out curve.safetensors` writes; published is {PUBLISHED}"
                )
            self.check_curve(curve, model)
        always = self.sink + self.window
        layers = () if model is None else tuple(layer.index for layer in model.growing)
        return replace(
            step,
            scorer=BeforeWindow(step.scorer, self.window, self.sink),
            amount=replace(step.amount, protected=max(step.amount.protected, always)),
            allocator=step.allocator if curve is None else Along(curve, always, layers),
        )

    def check_curve(self, curve: str, model: ModelFacts) -> None:
        """Refuse a curve that was measured for another model or another inner press."""
        found, heads = curves_of(curve), [layer.kv_heads for layer in model.layers]
        if isinstance(found, Calibration):
            found.check(METHOD, model, curve, lambda layer: {"curve": (PERCENTS, layer.kv_heads)})
            measured, here = found.provenance["settings"]["press"], scoring_of(self.press)
            if measured != here:
                raise ValueError(
                    f"{curve} was measured for the scores of {measured!r}, not of {here!r}; measure one with "
                    f"`{COMMAND} --press '{here}' --model ... --data ... --out curve.safetensors`"
                )
        elif heads != [found.shape[2]] * found.shape[1]:
            counts = " or ".join(str(count) for count in sorted(set(heads)))
            raise ValueError(
                f"{curve} is a curve of {found.shape[1]} layers of {found.shape[2]} kv heads, but {model.name} has "
                f"{len(heads)} attention layers of {counts}; use the curve that was measured for this model"
            )


@dataclass(frozen=True)
class Along(Allocator):
    """Gives heads what the curves of `layers` in a file leave them, `least` pairs at least."""

    curve: str
    least: int
    layers: tuple[int, ...]

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
        curves = [curve_of(self.curve, layer) for layer in self.layers]
        kept = shares(torch.cat(curves, dim=1), 1 - view.target / view.available, view.available, self.least)
        own = kept.split([curve.shape[1] for curve in curves])[self.layers.index(view.layer)]
        count = (own[view.heads] - settled).clamp(0, view.length)
        return count.to(view.positions.device).expand(view.shape[:2])


def shares(curve: Tensor, ratio: float, tokens: int, least: int = 0) -> Tensor:
    """Return how many of `tokens` pairs each head keeps, `[N]`, by their `curve [99, N]`; they add up to the sum.

    No head keeps fewer than `least`; where the curve says so, all others keep what it leaves them at a larger ratio.
    """
    ends = torch.cat([torch.zeros(1, curve.shape[1]), curve, torch.ones(1, curve.shape[1])]).double()

    def ideal(ratio: float) -> Tensor:
        at = min(ratio * 100, PERCENTS + 1.0)
        below = min(int(at), PERCENTS)
        lost = ends[below] + (at - below) * (ends[below + 1] - ends[below])
        return (1 - lost.clamp(0, 1)) * tokens

    wanted = int(ideal(ratio).sum().round())
    low, high = (ratio, 1.0) if bool((ideal(ratio) < least).any()) else (ratio, ratio)
    for _ in range(HALVINGS if low < high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if ideal(middle).clamp_min(least).sum() > wanted else (low, middle)
    whole = ideal(high).clamp_min(min(least, tokens))
    kept = whole.floor()
    left = max(0, wanted - int(kept.sum()))
    kept[(whole - kept).argsort(descending=True, stable=True)[:left]] += 1
    return kept.long()


def scoring_of(press: BasePress) -> str:
    """Return the spec of a press without its ratio or budget."""
    bare = copy.deepcopy(press)
    for part in parts_of(bare):
        if isinstance(part, BudgetPress):
            part.compression_ratio, part.budget = 0.0, None
    return to_spec(bare)


def curves_of(path: str) -> Calibration | Tensor:
    """Read the curves of all layers: what `kvpress calibrate` wrote, or a published file `[99, L, H]`.

    Raises:
        FileNotFoundError, ValueError: there is no such file, or it holds no curves.
    """
    file = Path(path)
    if not file.is_file():
        raise FileNotFoundError(
            f"no budget curve {path!r}: curve must be a .npy file or what `{COMMAND}` writes; published is {PUBLISHED}"
        )
    if calibration.is_calibration(file):
        return calibration.read(file, METHOD)
    return _read(path, file.stat().st_mtime_ns)


def curve_of(path: str, layer: int) -> Tensor:
    """Return the curve of a layer, `[99, H]`."""
    found = curves_of(path)
    return found.tensors[f"{layer}.curve"] if isinstance(found, Calibration) else found[:, layer]


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
