# SPDX-License-Identifier: Apache-2.0
"""A press and the full cache, read along the same texts."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import Cache

import kvpress
from kvpress.core.effect import left_whole
from kvpress_eval.fidelity.continuation import Reading, Watcher, continue_reading, read_prompts
from kvpress_eval.fidelity.figures import Fidelity, LayerFigures, kl_divergence, negative_log_likelihood
from kvpress_eval.fidelity.layers import Meter, Recorder, by_layer
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.run.models import Engine
from kvpress_eval.run.progress import RunProgress


@dataclass
class _Measured:
    """What was measured of one press, batch by batch; the meters of layers where they were asked for.

    `figures` are the divergence, the agreement, and the likelihoods under the press and with the full cache.
    """

    figures: list[tuple[Tensor, ...]] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    running: list[Meter] = field(default_factory=list)
    isolated: list[Meter] = field(default_factory=list)

    def add(self, full: Reading, reading: Reading, tokens: Tensor) -> None:
        """Compare a batch with the full cache: both were read along `tokens [B, n]`."""
        agrees = full.logits.argmax(-1) == reading.logits.argmax(-1)
        likelihoods = (negative_log_likelihood(logits, tokens) for logits in (reading.logits, full.logits))
        self.figures.append((kl_divergence(full.logits, reading.logits), agrees, *likelihoods))
        self.prompts.append(reading.prompt)
        self.ends.append(reading.end)

    def fidelity(self, press: str) -> Fidelity:
        """Join all batches."""
        kl, agrees, nll, full_nll = (torch.cat(batches).cpu() for batches in zip(*self.figures, strict=True))
        return Fidelity(
            press,
            kl,
            agrees,
            nll,
            full_nll,
            prompt_bits=_bits(self.prompts, sum(report.total_bytes for report in self.prompts)),
            shared_bits=_bits(self.prompts, sum(report.components.get("tables", 0) for report in self.prompts)),
            end_bits=_bits(self.ends, sum(report.total_bytes for report in self.ends)),
            kept=sum(report.kept for report in self.ends) / sum(report.seen for report in self.ends),
            compressed=not left_whole(
                kvpress.get_press(press),
                sum(report.kept for report in self.prompts) / sum(report.seen for report in self.prompts),
                sum(report.total_bytes for report in self.prompts),
                sum(report.uncompressed_bytes for report in self.prompts),
            ),
            layers=_layer_figures(self.running, self.isolated) if self.running else None,
        )


@dataclass(frozen=True)
class Comparison:
    """Texts `ids [S, context + tokens]` that presses are compared with the full cache on.

    Continuations are read in chunks of `chunk` tokens. The full cache is read once. Its logits `[S, tokens, V]` are kept, in
    the dtype of the model; with `layers` also its pairs, and what passed through its layers.
    """

    engine: Engine
    ids: Tensor
    context: int
    batch_size: int
    chunk: int = 1
    layers: bool = False
    _full: dict[int, Reading] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def full(self) -> list[Reading]:
        """The batches read with the full cache, in the same chunks, so that rounding is the same."""
        self.fidelities(())
        return list(self._full.values())

    @property
    def batches(self) -> Sequence[Tensor]:
        """The texts that are read together."""
        return self.ids.split(self.batch_size)

    def fidelity(self, press: str) -> Fidelity:
        """Read all texts under a press; raises what `fidelities` does."""
        return self.fidelities((press,))[0]

    def fidelities(self, presses: Sequence[str], progress: RunProgress | None = None) -> list[Fidelity]:
        """Read all texts under presses, which share the reading of contexts as far as they can.

        The first time, the full cache is read with them. `progress` counts the batches that each press has continued.

        Raises:
            ConfigError: a press does not suit the model or the length of the context.
            EvalError: a press breaks the model's numbers.
        """
        measured = {press: _Measured() for press in presses}
        for index, batch in enumerate(self.batches):
            context, following = batch[:, : self.context], batch[:, self.context :]
            first = () if index in self._full else (BASELINE,)
            for press, cache in read_prompts(self.engine.model, (*first, *measured), context, following.shape[1]):
                if index not in self._full:
                    self._full[index] = self._record(cache, following)
                    continue
                if progress:
                    progress.cell(press)
                self._measure(measured[press], press, cache, following, self._full[index])
                if progress:
                    progress.advance(1)
        return [measured[press].fidelity(press) for press in presses]

    def read(self, press: str, batch: Tensor) -> Reading:
        """Read the contexts of `batch [B, context + tokens]` in one pass, and what follows in chunks."""
        ((_, cache),) = read_prompts(self.engine.model, (press,), batch[:, : self.context])
        return self._continue(press, cache, batch[:, self.context :])

    def _record(self, cache: Cache, tokens: Tensor) -> Reading:
        if not self.layers:
            return self._continue(BASELINE, cache, tokens)
        recorder = Recorder()
        return replace(self._continue(BASELINE, cache, tokens, recorder.on), layers=recorder.layers)

    def _measure(self, measured: _Measured, press: str, cache: Cache, tokens: Tensor, full: Reading) -> None:
        if self.layers:
            measured.running.append(Meter(full.layers))
            measured.isolated.append(Meter(full.layers, isolated=True))
            self._continue(press, copy.deepcopy(cache), tokens, measured.isolated[-1].on)
        watch = measured.running[-1].on if self.layers else None
        measured.add(full, self._continue(press, cache, tokens, watch), tokens)

    def _continue(self, press: str, cache: Cache, tokens: Tensor, watch: Watcher | None = None) -> Reading:
        return continue_reading(self.engine.model, press, cache, tokens, self.chunk, watch)


def _layer_figures(running: Sequence[Meter], isolated: Sequence[Meter]) -> LayerFigures:
    """Join what was measured of each batch."""
    return LayerFigures(
        list(running[0].full),
        torch.cat([by_layer(meter.errors) for meter in running]),
        torch.cat([by_layer(meter.errors) for meter in isolated]),
        torch.cat([by_layer(meter.recalls) for meter in running]),
    )


def _bits(reports: Sequence[Any], size: int) -> float:
    """Spread bytes over the values of the uncompressed caches."""
    return 8 * size / sum(report.uncompressed_bytes / report.value_bytes for report in reports)
