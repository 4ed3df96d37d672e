# SPDX-License-Identifier: Apache-2.0
"""Compare presses with the full cache on the same texts."""

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
from kvpress_eval.fidelity.continuation import ContinuationLogits, Watcher, continue_reading, read_prompts
from kvpress_eval.fidelity.figures import Fidelity, LayerFigures, kl_divergence, negative_log_likelihood
from kvpress_eval.fidelity.layers import LayerRecorder, Meter, by_layer
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.run.models import Engine
from kvpress_eval.run.progress import RunProgress


@dataclass
class _Measured:
    """Measurements of one press; every list has one entry per batch."""

    figures: list[tuple[Tensor, ...]] = field(default_factory=list)
    """KL, top-1 agreement, and the negative log-likelihoods under the press and with the full cache."""
    prompts: list[Any] = field(default_factory=list)
    """Memory reports after the prompt."""
    ends: list[Any] = field(default_factory=list)
    """Memory reports after the continuation."""
    running: list[Meter] = field(default_factory=list)
    """Meters of the running model; empty without `layers`."""
    isolated: list[Meter] = field(default_factory=list)
    """Meters of layers that get the inputs of the full cache; empty without `layers`."""

    def add(self, full: ContinuationLogits, reading: ContinuationLogits, tokens: Tensor) -> None:
        """Add the figures of a batch: `full` and `reading` continue with the same `tokens [B, n]`."""
        agrees = full.logits.argmax(-1) == reading.logits.argmax(-1)
        likelihoods = (negative_log_likelihood(logits, tokens) for logits in (reading.logits, full.logits))
        self.figures.append((kl_divergence(full.logits, reading.logits), agrees, *likelihoods))
        self.prompts.append(reading.prompt)
        self.ends.append(reading.end)

    def fidelity(self, press: str) -> Fidelity:
        """Return the figures of all batches."""
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
    """Comparison of presses with the full cache on fixed texts.

    The texts are read with the full cache once. Its logits `[S, tokens, V]` stay in memory, in the dtype of the model; with
    `layers` also its pairs, and the inputs, queries and outputs of its layers.
    """

    engine: Engine
    """Model and tokenizer."""
    ids: Tensor
    """Texts `[S, context + tokens]`."""
    context: int
    """Tokens of a context, which is read in one pass."""
    batch_size: int
    """Texts that are read together."""
    chunk: int = 1
    """Tokens of the continuation that one pass reads."""
    layers: bool = False
    """Measure every layer too."""
    _full: dict[int, ContinuationLogits] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def full(self) -> list[ContinuationLogits]:
        """Readings with the full cache, one per batch, in the same chunks, so that rounding is the same."""
        self.fidelities(())
        return list(self._full.values())

    @property
    def batches(self) -> Sequence[Tensor]:
        """Texts `[B, context + tokens]`, batch by batch."""
        return self.ids.split(self.batch_size)

    def fidelity(self, press: str) -> Fidelity:
        """Read all texts under a press; raise the errors of `fidelities`."""
        return self.fidelities((press,))[0]

    def fidelities(self, presses: Sequence[str], progress: RunProgress | None = None) -> list[Fidelity]:
        """Read all texts under each press; presses share the reading of a context where they can.

        The first call also reads the full cache. `progress` advances by one for each press and batch.

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

    def read(self, press: str, batch: Tensor) -> ContinuationLogits:
        """Read the contexts of `batch [B, context + tokens]` in one pass, and the continuations in chunks."""
        ((_, cache),) = read_prompts(self.engine.model, (press,), batch[:, : self.context])
        return self._continue(press, cache, batch[:, self.context :])

    def _record(self, cache: Cache, tokens: Tensor) -> ContinuationLogits:
        if not self.layers:
            return self._continue(BASELINE, cache, tokens)
        recorder = LayerRecorder()
        return replace(self._continue(BASELINE, cache, tokens, recorder.on), layers=recorder.layers)

    def _measure(self, measured: _Measured, press: str, cache: Cache, tokens: Tensor, full: ContinuationLogits) -> None:
        if self.layers:
            measured.running.append(Meter(full.layers))
            measured.isolated.append(Meter(full.layers, isolated=True))
            self._continue(press, copy.deepcopy(cache), tokens, measured.isolated[-1].on)
        watch = measured.running[-1].on if self.layers else None
        measured.add(full, self._continue(press, cache, tokens, watch), tokens)

    def _continue(self, press: str, cache: Cache, tokens: Tensor, watch: Watcher | None = None) -> ContinuationLogits:
        return continue_reading(self.engine.model, press, cache, tokens, self.chunk, watch)


def _layer_figures(running: Sequence[Meter], isolated: Sequence[Meter]) -> LayerFigures:
    """Concatenate the figures of all batches."""
    return LayerFigures(
        list(running[0].full),
        torch.cat([by_layer(meter.errors) for meter in running]),
        torch.cat([by_layer(meter.errors) for meter in isolated]),
        torch.cat([by_layer(meter.recalls) for meter in running]),
    )


def _bits(reports: Sequence[Any], size: int) -> float:
    """Return bits per value: `size` bytes over the number of values of the uncompressed caches."""
    return 8 * size / sum(report.uncompressed_bytes / report.value_bytes for report in reports)
