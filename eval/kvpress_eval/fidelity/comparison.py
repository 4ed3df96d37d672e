# SPDX-License-Identifier: Apache-2.0
"""Compare presses with the full cache on the same texts."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from torch import Tensor
from transformers import Cache

from kvpress.hf.generation.clock import now
from kvpress_eval.common.errors import EvalError
from kvpress_eval.fidelity.continuation import ContinuationLogits, Watcher, continue_reading, read_prompts
from kvpress_eval.fidelity.figures import (
    BatchFigures,
    Fidelity,
    LayerFigures,
    kl_divergence,
    negative_log_likelihood,
)
from kvpress_eval.fidelity.layers import LayerRecorder, Meter, by_layer
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.run.models import Engine
from kvpress_eval.run.progress import JobProgress


@dataclass(eq=False)
class BatchComparison:
    """Comparison of presses with the full cache on texts that are read together.

    The texts are read with the full cache once. Its logits `[B, tokens, V]` stay in memory, in the dtype of the model; with
    `layers` also its pairs, and the inputs, queries and outputs of its layers.
    """

    engine: Engine
    """Model and tokenizer."""
    ids: Tensor
    """Texts `[B, context + tokens]`."""
    context: int
    """Tokens of a context, which is read in one pass."""
    chunk: int = 1
    """Tokens of the continuation that one pass reads."""
    layers: bool = False
    """Measure every layer too."""
    full: ContinuationLogits | None = field(default=None, init=False, repr=False)
    """Reading with the full cache, in the same chunks, so that rounding is the same; None before the first measurement."""

    def __post_init__(self) -> None:
        # A cache may keep views of the tokens that it has read; their storage, which counts as held, must not be all texts.
        self.ids = self.ids.clone()

    @property
    def following(self) -> Tensor:
        """Continuations `[B, tokens]`."""
        return self.ids[:, self.context :]

    def measure(
        self, presses: Sequence[str], progress: JobProgress | None = None
    ) -> Iterator[tuple[str, BatchFigures]]:
        """Read the texts under each press and yield its figures; presses share the reading of the contexts where they can.

        The first call also reads the full cache.

        Raises:
            ConfigError: a press does not suit the model or the length of the context.
            EvalError: a press breaks the model's numbers.
        """
        first = () if self.full else (BASELINE,)
        contexts = self.ids[:, : self.context]
        read = read_prompts(self.engine.model, (*first, *presses), contexts, self.following.shape[1])
        for press, cache, seconds in read:
            if self.full is None:
                self.full = self._record(cache)
                continue
            if progress:
                progress.cell(press)
            started = now(self.ids.device)
            figures = self._compare(press, cache, self.full)
            yield press, replace(figures, seconds=seconds + now(self.ids.device) - started)

    def read(self, press: str) -> ContinuationLogits:
        """Read the contexts under a press in one pass, and the continuations in chunks."""
        ((_, cache, _),) = read_prompts(self.engine.model, (press,), self.ids[:, : self.context])
        return self._continue(press, cache)

    def _record(self, cache: Cache) -> ContinuationLogits:
        if not self.layers:
            return self._continue(BASELINE, cache)
        recorder = LayerRecorder()
        return replace(self._continue(BASELINE, cache, recorder.on), layers=recorder.layers)

    def _compare(self, press: str, cache: Cache, full: ContinuationLogits) -> BatchFigures:
        running = isolated = None
        if self.layers:
            running, isolated = Meter(full.layers), Meter(full.layers, isolated=True)
            self._continue(press, copy.deepcopy(cache), isolated.on)
        reading = self._continue(press, cache, running.on if running else None)
        kl = kl_divergence(full.logits, reading.logits)
        if not kl.isfinite().all():
            raise EvalError(f"press {press!r}: the divergence from the full cache is not finite")
        return BatchFigures(
            kl,
            full.logits.argmax(-1) == reading.logits.argmax(-1),
            negative_log_likelihood(reading.logits, self.following),
            negative_log_likelihood(full.logits, self.following),
            reading.prompt,
            reading.end,
            layers=_layer_figures(running, isolated) if running and isolated else None,
        )

    def _continue(self, press: str, cache: Cache, watch: Watcher | None = None) -> ContinuationLogits:
        return continue_reading(self.engine.model, press, cache, self.following, self.chunk, watch)


@dataclass(frozen=True)
class Comparison:
    """Comparison of presses with the full cache on all texts, whose full readings stay in memory."""

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

    @cached_property
    def batches(self) -> list[BatchComparison]:
        """Comparisons on the texts that are read together."""
        texts = self.ids.split(self.batch_size)
        return [BatchComparison(self.engine, ids, self.context, self.chunk, self.layers) for ids in texts]

    @property
    def full(self) -> list[ContinuationLogits]:
        """Readings with the full cache, one per batch."""
        self.fidelities(())
        return [batch.full for batch in self.batches if batch.full]

    def fidelity(self, press: str) -> Fidelity:
        """Read all texts under a press; raise the errors of `fidelities`."""
        return self.fidelities((press,))[0]

    def fidelities(self, presses: Sequence[str]) -> list[Fidelity]:
        """Read all texts under each press; presses share the reading of a context where they can.

        The first call also reads the full cache.

        Raises:
            ConfigError: a press does not suit the model or the length of the context.
            EvalError: a press breaks the model's numbers.
        """
        rows: dict[str, list[dict[str, object]]] = {press: [] for press in presses}
        for batch in self.batches:
            for press, figures in batch.measure(tuple(rows)):
                rows[press].append(figures.row())
        return [Fidelity.of_rows(press, rows[press]) for press in presses]


def _layer_figures(running: Meter, isolated: Meter) -> LayerFigures:
    return LayerFigures(
        list(running.full), by_layer(running.errors), by_layer(isolated.errors), by_layer(running.recalls)
    )
