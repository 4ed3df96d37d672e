# SPDX-License-Identifier: Apache-2.0
"""What a model's pairs are worth when it reads its text a second time, and networks that tell it from hidden states."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from kvpress.calibrate.run import Parts, Report, Settings
from kvpress.core.checks import Count, Positive, Size, check_fields
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.observe.hidden import HiddenStates
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import Pass
from kvpress.presses.criticalkv import check_outputs
from kvpress.presses.kvzip import KVzipPress, Worth

SINKS = KVzipPress.n_sink
"""Tokens at the start of each sequence that are worth keeping in any case, and have no score."""
HIDDEN = Wanted(HiddenStates, 1, True)


class Reading(NamedTuple):
    """What a layer's tokens are worth: the input of its attention `[T, hidden]` and scores `[H, T]`, infinite for sinks."""

    hidden: Tensor
    scores: Tensor


def read_twice(model: Any, ids: Tensor, plus: bool) -> dict[int, Reading]:
    """Read `ids [T]` twice and return, for every layer that grows, the `kvzip` scores of its pairs.

    The second reading follows the first without a word in between. `plus` weighs attention by the output of the value, as
    `KVzipPress(kvzip_plus_normalization=True)` does.
    """
    press = _Recording(0.5, kvzip_plus_normalization=plus, repeat_prompt="")
    with torch.no_grad(), press(model):
        model(ids[None].to(model.device))
    found: dict[int, Reading] = press.__dict__["found"]
    return found


class _Recording(KVzipPress):
    """Keeps the scores and hidden states of every layer: `found[layer]`."""

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        return replace(recipe, observers=(*recipe.observers, HIDDEN))

    def _repeat(self, asked: Any, done: Pass) -> None:
        super()._repeat(asked, done)
        found = self.__dict__.setdefault("found", {})
        for call in done.calls:
            seen = call.store.observers
            found[call.layer.index] = Reading(seen[HIDDEN].states[0], torch.stack(seen[Wanted(Worth)].values))


@dataclass(frozen=True)
class Predicted(Settings):
    """Networks, one per layer, that tell from the hidden state of a token what its pairs are worth in a second reading.

    `sample` tokens are drawn from each sequence, sinks left out; `steps` is the number of updates, `lr` the learning rate, and
    `seed` that of all that is drawn. What was drawn of all layers is held in memory meanwhile.
    """

    plus: ClassVar[bool]

    sample: Count
    steps: Count
    lr: Positive
    seed: Size = 0

    @property
    def shortest(self) -> int:
        return SINKS + 2

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        if self.plus:
            check_outputs(model)

    @abstractmethod
    def train(self, hidden: Tensor, scores: Tensor, groups: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Return the network of a layer, trained on `hidden [n, hidden]` and `scores [n, H]`, float32, by tensor name.

        `groups` is the number of query heads of a kv head.
        """

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        groups = {layer.index: layer.heads // layer.kv_heads for layer in host().facts_of(model).growing}
        layers = list(groups)
        missing = [layer for layer in layers if not parts.has(layer)]
        drawn: dict[int, list[Reading]] = {layer: [] for layer in missing}
        generator = torch.Generator().manual_seed(self.seed)
        for done, ids in enumerate(sequences if missing else ()):
            found = read_twice(model, ids, self.plus)
            at = (SINKS + torch.randperm(len(ids) - SINKS, generator=generator)[: self.sample]).to(model.device)
            for layer in missing:
                hidden, scores = found[layer]
                drawn[layer].append(Reading(hidden[at].cpu(), scores[:, at].T.cpu()))
            report("sequences", done + 1, len(sequences))
        report("layers", len(layers) - len(missing), len(layers))
        for layer in missing:
            pairs = drawn.pop(layer)
            hidden, scores = (torch.cat(side).to(model.device, torch.float32) for side in zip(*pairs, strict=True))
            generator = torch.Generator().manual_seed(self.seed)
            parts.write(layer, self.train(hidden, scores, groups[layer], generator))
            report("layers", len(layers) - len(drawn), len(layers))
        return {name: tensor for layer in layers for name, tensor in parts.read(layer).items()}
