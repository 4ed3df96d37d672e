# SPDX-License-Identifier: Apache-2.0
"""KVzip scores of a text that is read twice, and training of networks that predict them from hidden states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpress.calibrate.run import CalibrationSettings, FinishedLayers, Report
from kvpress.core.checks import Count, Positive, Size, check_fields
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.observe.hidden import HiddenStates
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import Pass
from kvpress.presses.criticalkv import check_outputs
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.repetition import Worth

SINKS = KVzipPress.n_sink
"""Tokens at the start of each sequence that are always kept and have no score."""
HIDDEN = Wanted(HiddenStates, 1, True)


class LayerSample(NamedTuple):
    """Hidden states and scores of a layer's tokens."""

    hidden: Tensor
    """Input of the attention layer, `[T, hidden]`."""
    scores: Tensor
    """KVzip scores `[H, T]`, infinite for sinks."""


def read_twice(model: Any, ids: Tensor, plus: bool) -> dict[int, LayerSample]:
    """Read `ids [T]` twice and return the `kvzip` scores of every layer whose cache grows.

    The second reading follows the first directly. With `plus`, attention is weighted by the output of the value, as in
    `KVzipPress(kvzip_plus_normalization=True)`.
    """
    press = _Recording(0.5, kvzip_plus_normalization=plus, repeat_prompt="")
    with torch.no_grad(), press(model):
        model(ids[None].to(model.device))
    readings: dict[int, LayerSample] = press.__dict__["readings"]
    return readings


class _Recording(KVzipPress):
    """KVzip press that stores the scores and hidden states of every layer in `readings`."""

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, observers=(*recipe.observers, HIDDEN))

    def _repeat(self, questions: Any, finished: Pass) -> None:
        super()._repeat(questions, finished)
        readings = self.__dict__.setdefault("readings", {})
        for call in finished.calls:
            seen = call.store.observers
            readings[call.layer.index] = LayerSample(seen[HIDDEN].states[0], torch.stack(seen[Wanted(Worth)].values))


@dataclass(frozen=True)
class Predicted(CalibrationSettings):
    """Settings of networks, one per layer, that predict the KVzip scores of a token from its hidden state.

    Samples of all layers are in memory until they are trained on.
    """

    plus: ClassVar[bool]
    """Whether scores are weighted by the output of the value."""

    sample: Count
    """Tokens drawn from each sequence, without sinks."""
    steps: Count
    """Number of updates."""
    lr: Positive
    """Learning rate."""
    seed: Size = 0
    """Random seed."""

    @property
    def shortest(self) -> int:
        return SINKS + 2

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        if self.plus:
            check_outputs(model)

    @abstractmethod
    def train(self, hidden: Tensor, scores: Tensor, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the tensors of a layer's network by name, trained on `hidden [n, hidden]` and `scores [n, H]`, float32.

        `groups` is the number of query heads of a KV head.
        """

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        groups = {layer.index: layer.heads // layer.kv_heads for layer in host().facts_of(model).growing}
        layers = list(groups)
        missing = [layer for layer in layers if not finished.has(layer)]
        samples: dict[int, list[LayerSample]] = {layer: [] for layer in missing}
        generator = torch.Generator().manual_seed(self.seed)
        for done, ids in enumerate(sequences if missing else ()):
            readings = read_twice(model, ids, self.plus)
            positions = (SINKS + torch.randperm(len(ids) - SINKS, generator=generator)[: self.sample]).to(model.device)
            for layer in missing:
                hidden, scores = readings[layer]
                samples[layer].append(LayerSample(hidden[positions].cpu(), scores[:, positions].T.cpu()))
            report("sequences", done + 1, len(sequences))
        report("layers", len(layers) - len(missing), len(layers))
        for layer in missing:
            pairs = samples.pop(layer)
            hidden, scores = (torch.cat(side).to(model.device, torch.float32) for side in zip(*pairs, strict=True))
            generator = torch.Generator().manual_seed(self.seed)
            finished.write(layer, self.train(hidden, scores, groups[layer], generator))
            report("layers", len(layers) - len(samples), len(layers))
        return {name: tensor for layer in layers for name, tensor in finished.read(layer).items()}
