# SPDX-License-Identifier: Apache-2.0
"""LU-KV: budgets per layer and head from a curve measured for the model."""

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
from kvpress.presses.learned import fetch_web

METHOD = "lukv"
COMMAND = f"kvpress calibrate {METHOD}"
PERCENTS = 99
PUBLISHED_FOR = "expected_attention:epsilon=0.02", 4, 1
"""Inner press, sinks and window of the published curve."""
HALVINGS = 40
"""Bisection steps in the search for a ratio."""
PUBLISHED = (
    "https://raw.githubusercontent.com/baidu-baige/LU-KV/main/evaluation/curve_data/llama-3.1-8b/"
    "ea_0.02_sink4_win1_llama_avg_ratio.npy"
)
"""Curve that the authors publish for Llama-3.1-8B and the default settings."""
NEEDED = (
    f"LUKVPress needs a budget curve of the model and the inner press: give curve=, a .npy file [{PERCENTS}, layers, kv heads] "
    f"or what `{COMMAND} --model ... --data ... --out curve.safetensors` writes; the only published one is for Llama-3.1-8B "
    "with expected_attention:epsilon=0.02, sink=4 and window=1"
)


@register(
    "lukv",
    "budget",
    "LU-KV, 2026, arXiv:2602.08585",
    example="lukv(expected_attention:0.5,epsilon=0.02)",
    needs="a budget curve of the model and the inner press: a published one, or `kvpress calibrate lukv` (`curve`)",
    refuses=(
        Refusal("lukv(expected_attention:0.5,epsilon=0.02)", "no curve is published for the model, and none is given"),
        Refusal("lukv(adakv(knorm:0.5))", "both would choose the pairs to keep"),
    ),
    exempt=(
        Exemption(EVERY_SUITE, "needs a file per model; its own tests run the oracle, padding and decoding with one"),
    ),
)
@dataclass(init=False)
class LUKVPress(WrapperPress):
    """Distribute the budget over all layers and heads by a curve that was measured for the model.

        kept[l, h] = (1 - curve(ratio)[l, h]) n, rounded so that all heads together keep the total

    `press` scores the pairs; the default is expected attention with epsilon 0.02. `compression_ratio` sets its ratio. The
    first `sink` and the newest `window` tokens are always kept: where they exceed a head's share, the other heads keep
    less, as at a larger ratio. `curve` is a published .npy file `[99, L, H]`, or a file of `kvpress calibrate
    lukv`: the share of pairs that each head loses where heads lose 1%, 2%, ..., 99% on average, interpolated between whole
    percents. None is, for the default `press`, `sink` and `window`, the file that ships with the bundled reference model, or
    the authors' curve for Llama-3.1-8B, which is downloaded once.

    Paper: LU-KV, Predicting Future Utility: Global Combinatorial Optimization for Task-Agnostic KV Cache Eviction, 2026,
    arXiv:2602.08585.
    Differs from the paper: the total over all layers is exact, where NVIDIA kvpress rounds layer by layer. Without a curve
    NVIDIA kvpress uses equal budgets; here it is an error.
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
            curve = curve or self.published(model)
            self.check_curve(curve, model)
        num_protected = self.sink + self.window
        layers = () if model is None else tuple(layer.index for layer in model.growing)
        return replace(
            step,
            scorer=BeforeWindow(step.scorer, self.window, self.sink),
            amount=replace(step.amount, protected=max(step.amount.protected, num_protected)),
            allocator=step.allocator if curve is None else Along(curve, num_protected, layers),
        )

    def published(self, model: ModelFacts) -> str:
        """Return the path of a model's curve, used where `curve` is None.

        Raises:
            ValueError: no curve is published for the model, the press, and the numbers of protected tokens.
        """
        if shipped := calibration.shipped_for(model, METHOD):
            return str(shipped)
        settings = scoring_of(self.press), self.sink, self.window
        if "llama-3.1-8b" not in model.source.lower() or settings != PUBLISHED_FOR:
            raise ValueError(
                f"{NEEDED}; this is {model.name} with {settings[0]}, sink={self.sink} and window={self.window}"
            )
        return str(fetch_web(PUBLISHED, curves_of, NEEDED))

    def check_curve(self, curve: str, model: ModelFacts) -> None:
        """Refuse a curve that was measured for another model or another inner press.

        Raises:
            ValueError: the curve has other layers or heads than the model, or was measured for another press.
        """
        curves, heads = curves_of(curve), [layer.kv_heads for layer in model.layers]
        if isinstance(curves, Calibration):
            curves.check(METHOD, model, curve, lambda layer: {"curve": (PERCENTS, layer.kv_heads)})
            measured, scoring = curves.provenance["settings"]["press"], scoring_of(self.press)
            if measured != scoring:
                raise ValueError(
                    f"{curve} was measured for the scores of {measured!r}, not of {scoring!r}; measure one with "
                    f"`{COMMAND} --press '{scoring}' --model ... --data ... --out curve.safetensors`"
                )
        elif heads != [curves.shape[2]] * curves.shape[1]:
            counts = " or ".join(str(count) for count in sorted(set(heads)))
            raise ValueError(
                f"{curve} is a curve of {curves.shape[1]} layers of {curves.shape[2]} kv heads, but {model.name} has "
                f"{len(heads)} attention layers of {counts}; use the curve that was measured for this model"
            )


@dataclass(frozen=True)
class Along(Allocator):
    """Distribute pairs over the heads of all layers by the curves in a file; see `LUKVPress`."""

    curve: str
    """Path of the curves."""
    minimum: int
    """Minimum number of pairs per head."""
    layers: tuple[int, ...]
    """Indices of the growing layers, which have a budget."""

    ragged = True
    by_layer = True
    by_head = True

    def keeps_all(self, lengths: Sequence[int], mean: int) -> bool:
        return False  # some layers keep less than the mean

    def counts(self, scored: Sequence[Scored], mean: int) -> list[int | Tensor]:
        return [self._of_view(item, mean) for item in scored]

    def _of_view(self, scored: Scored, mean: int) -> Tensor:
        view = scored.view
        if view.target >= view.available:
            return torch.full(view.shape[:2], view.length, device=view.positions.device)
        fixed = view.target - mean  # pairs that are kept in any case and compete with no others
        curves = [curve_of(self.curve, layer) for layer in self.layers]
        kept = shares(torch.cat(curves, dim=1), 1 - view.target / view.available, view.available, self.minimum)
        layer_counts: Tensor = kept.split([curve.shape[1] for curve in curves])[self.layers.index(view.layer)]
        count = (layer_counts[view.model_heads] - fixed).clamp(0, view.length)
        return count.to(view.positions.device).expand(view.shape[:2])


def shares(curve: Tensor, ratio: float, tokens: int, minimum: int = 0) -> Tensor:
    """Return how many of `tokens` pairs each head keeps, `[N]`, by their `curve [99, N]`; their sum follows `ratio`.

    No head keeps fewer than `minimum`; where a curve gives less, the other heads keep fewer, as at a larger ratio.
    """
    points = torch.cat([torch.zeros(1, curve.shape[1]), curve, torch.ones(1, curve.shape[1])]).double()

    def ideal(ratio: float) -> Tensor:
        percent = min(ratio * 100, PERCENTS + 1.0)
        below = min(int(percent), PERCENTS)
        lost = points[below] + (percent - below) * (points[below + 1] - points[below])
        return (1 - lost.clamp(0, 1)) * tokens

    total = int(ideal(ratio).sum().round())
    low, high = (ratio, 1.0) if bool((ideal(ratio) < minimum).any()) else (ratio, ratio)
    for _ in range(HALVINGS if low < high else 0):
        middle = (low + high) / 2
        low, high = (middle, high) if ideal(middle).clamp_min(minimum).sum() > total else (low, middle)
    exact = ideal(high).clamp_min(min(minimum, tokens))
    kept = exact.floor()
    num_extra = max(0, total - int(kept.sum()))
    kept[(exact - kept).argsort(descending=True, stable=True)[:num_extra]] += 1
    return kept.long()


def scoring_of(press: BasePress) -> str:
    """Return the spec of a press without its ratio or budget."""
    copied = copy.deepcopy(press)
    for inner in parts_of(copied):
        if isinstance(inner, BudgetPress):
            inner.compression_ratio, inner.budget = 0.0, None
    return to_spec(copied)


def curves_of(path: str) -> Calibration | Tensor:
    """Read the curves of all layers from a file of `kvpress calibrate`, or from a published file `[99, L, H]`.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file has no curves.
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
    curves = curves_of(path)
    return curves.tensors[f"{layer}.curve"] if isinstance(curves, Calibration) else curves[:, layer]


@lru_cache(maxsize=8)
def _read(path: str, changed: int) -> Tensor:
    del changed
    try:
        curves = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise ValueError(f"{path} is no .npy file of numbers: {error}") from error
    if curves.ndim != 3 or curves.shape[0] != PERCENTS or not np.isfinite(curves).all():
        raise ValueError(
            f"{path} must hold finite numbers [{PERCENTS}, layers, kv heads], got shape {list(curves.shape)}"
        )
    return torch.from_numpy(curves.astype(np.float32))
