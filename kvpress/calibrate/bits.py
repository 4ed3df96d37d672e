# SPDX-License-Identifier: Apache-2.0
"""Calibration of bits per layer: an average is shared by the errors of attention outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate.questions import SAMPLED_QUERIES, logits_of, query_positions, written_pairs
from kvpress.calibrate.run import FinishedLayers, Observed, Report
from kvpress.core.checks import Positive, check_fields
from kvpress.core.model import ModelFacts
from kvpress.kernels import BITS
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer
from kvpress.quant.bits import METHOD, allocate
from kvpress.quant.uniform import UniformRows

GROUP = 32
"""Tokens that share the scale of a key channel, and channels that share the scale of a value."""


@dataclass(frozen=True)
class BitsSettings(Observed):
    """Bits of keys and values of each layer, chosen from `widths` so that their mean is `average`.

        e[side, width] = sum |o' - o|^2 / sum |o|^2

    o are the outputs of a layer's attention. o' are those with one side, keys or values, in uniform codes of a width: keys per
    channel over 32 tokens, values per token over 32 channels. One reading of the texts measures all errors. The chosen widths
    minimise the sum of errors over all layers and sides. A layer gives `errors [2, widths]` and `bits [2]`, float32, for
    `bits=FILE` of every codec that takes bits per layer.

    Paper: after Li et al., KVTuner: Sensitivity-Aware Layer-Wise Mixed-Precision KV Cache Quantization for Efficient and
    Nearly Lossless LLM Inference, 2025, arXiv:2502.04420.
    Differs from the paper: the choice minimises errors of attention outputs, exactly and in one reading, where the paper groups
    layers and searches by accuracy.
    """

    average: Positive = 3.0
    """Mean bits over layers, keys and values."""
    widths: tuple[int, ...] = (2, 3, 4, 8)
    """Bits to choose from for each layer and side."""

    method: ClassVar[str] = METHOD

    @property
    def shortest(self) -> int:
        return max(SAMPLED_QUERIES, 2 * GROUP)

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

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        tensors = super().fit(model, sequences, finished, report)
        names = [name.removesuffix(".errors") for name in tensors]
        chosen = allocate(
            [e.tolist() for name in names for e in tensors[f"{name}.errors"]], self.observer().widths, self.average
        )
        bits = torch.tensor(chosen, dtype=torch.float32).view(-1, 2)
        return tensors | {f"{name}.bits": bits[n] for n, name in enumerate(names)}


class WidthErrors(Observer):
    """Sums of squared errors of a layer's outputs, `errors [2, widths]`, and the sum of squared outputs, `size`."""

    def __init__(self, widths: Sequence[int]) -> None:
        self.widths = tuple(widths)
        self.errors = torch.zeros(2, len(widths), dtype=torch.float64)
        self.size = 0.0

    def observe(self, call: LayerCall) -> None:
        keys, values = written_pairs(call)
        positions = query_positions(keys.shape[2], keys.device)
        exact = self._outputs(call, keys, values, positions)
        self.size += float(exact.double().square().sum())
        for n, bits in enumerate(self.widths):
            rounded = _rounded(keys, bits, (GROUP, 1)), _rounded(values, bits, (1, GROUP))
            for side, pairs in enumerate(((rounded[0], values), (keys, rounded[1]))):
                error = self._outputs(call, *pairs, positions) - exact
                self.errors[side, n] += float(error.double().square().sum())

    def _outputs(self, call: LayerCall, keys: Tensor, values: Tensor, positions: Tensor) -> Tensor:
        """Return the outputs of the queries at `positions [n]`, float32 `[H, G * n, Dv]`."""
        weights = call.softmax(logits_of(call, keys, positions))
        return weights.flatten(1, 2) @ values[0].float()


def _rounded(side: Tensor, bits: int, group: tuple[int, int]) -> Tensor:
    """Return keys or values `[1, H, T, D]` encoded and decoded; tokens after the last full group do not change."""
    length = side.shape[2] // GROUP * GROUP
    channels = group[1] if side.shape[3] % group[1] == 0 else side.shape[3]
    rows = side[0, :, :length].flatten(0, 1)
    decoded = UniformRows.encode(rows, bits, (group[0], channels)).read(slice(None))
    return torch.cat([decoded.view(1, -1, length, side.shape[3]).to(side), side[:, :, length:]], dim=2)
