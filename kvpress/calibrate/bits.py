# SPDX-License-Identifier: Apache-2.0
"""Bits for every layer: as many as its attention needs, so many on average."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.asked import ASKED, logits_of, places, written
from kvpress.calibrate.run import Observed, Parts, Report
from kvpress.core.checks import Positive, check_fields
from kvpress.core.model import ModelFacts
from kvpress.kernels import BITS
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.quant.bits import METHOD, allocate
from kvpress.quant.uniform import UniformRows

GROUP = 32
"""Tokens that share the scale of a key channel, and channels that share that of a value."""


@dataclass(frozen=True)
class BitsSettings(Observed):
    """How many bits keys and values of each layer get, of some `widths`, so that they are `average` over all.

        e[side, width] = sum |o' - o|^2 / sum |o|^2

    o are outputs of a layer's attention and o' those with one side, keys or values, in uniform codes of a width: keys per
    channel over 32 tokens, values per token over 32 channels. One reading of the texts gives all of them. The widths of all
    layers and sides are those whose errors have the least sum. A layer gives `errors [2, widths]` and `bits [2]`, float32,
    for `bits=FILE` of every codec that takes bits per layer.

    Paper: after Li et al., KVTuner: Sensitivity-Aware Layer-Wise Mixed-Precision KV Cache Quantization for Efficient and
    Nearly Lossless LLM Inference, 2025, arXiv:2502.04420.
    Differs from the paper: the choice follows from errors of attention outputs alone, exactly and in one reading, where the
    paper groups layers and searches by accuracy.
    """

    average: Positive = 3.0
    widths: tuple[int, ...] = (2, 3, 4, 8)

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return max(ASKED, 2 * GROUP)

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        if len(set(self.widths)) < 2 or set(self.widths) - set(BITS):
            raise ValueError(f"widths must be two or more of {list(BITS)}, got {list(self.widths)}")
        if not min(self.widths) <= self.average <= max(self.widths):
            raise ValueError(
                f"average must be from {min(self.widths)} to {max(self.widths)} bits, got {self.average:g}"
            )

    def observer(self) -> WidthErrors:
        return WidthErrors(sorted(set(self.widths)))

    def tensors(self, observed: WidthErrors) -> dict[str, Tensor]:
        return {"errors": (observed.errors / observed.size).float()}

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        found = super().fit(model, sequences, parts, report)
        names = [name.removesuffix(".errors") for name in found]
        chosen = allocate(
            [e.tolist() for name in names for e in found[f"{name}.errors"]], self.observer().widths, self.average
        )
        bits = torch.tensor(chosen, dtype=torch.float32).view(-1, 2)
        return found | {f"{name}.bits": bits[n] for n, name in enumerate(names)}


class WidthErrors(Observer):
    """Sums of the squared errors of a layer's outputs, `errors [2, widths]`, and of the outputs themselves, `size`."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.errors = torch.zeros(2, len(widths), dtype=torch.float64)
        self.size = 0.0

    def observe(self, call: LayerCall) -> None:
        keys, values = written(call)
        at = places(keys.shape[2], keys.device)
        exact = self._outputs(call, keys, values, at)
        self.size += float(exact.double().square().sum())
        for n, bits in enumerate(self.widths):
            rounded = _rounded(keys, bits, (GROUP, 1)), _rounded(values, bits, (1, GROUP))
            for side, pairs in enumerate(((rounded[0], values), (keys, rounded[1]))):
                moved = self._outputs(call, *pairs, at) - exact
                self.errors[side, n] += float(moved.double().square().sum())

    def _outputs(self, call: LayerCall, keys: Tensor, values: Tensor, at: Tensor) -> Tensor:
        """Outputs of the queries at some places, float32 `[H, G * n, Dv]`."""
        weights = call.softmax(logits_of(call, keys, at))
        return weights.flatten(1, 2) @ values[0].float()


def _rounded(side: Tensor, bits: int, group: tuple[int, int]) -> Tensor:
    """What `[1, H, T, D]` reads as in codes; tokens behind the last whole group stay as they are."""
    whole = side.shape[2] // GROUP * GROUP
    channels = group[1] if side.shape[3] % group[1] == 0 else side.shape[3]
    rows = side[0, :, :whole].flatten(0, 1)
    read = UniformRows.encode(rows, bits, (group[0], channels)).read(slice(None))
    return torch.cat([read.view(1, -1, whole, side.shape[3]).to(side), side[:, :, whole:]], dim=2)
