# SPDX-License-Identifier: Apache-2.0
"""Measure the recall of facts behind compressed caches.

A context is read once for all presses that can share the reading and compressed before any question is seen; all its questions
are then read behind the same cache in one batch. A question-aware measurement compresses context and question together,
so every question has a reading of its own.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import kvpress
from kvpress.core.effect import left_whole
from kvpress.hf.generation.clock import now
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.continuation import read_prompts
from kvpress_eval.fidelity.measure import check_press
from kvpress_eval.recall.answers import AnswerFigures, Question, figures_of, make_question, read_answers
from kvpress_eval.recall.facts import FactContext, FactSettings, describe, make_contexts
from kvpress_eval.recall.figures import Margins, RecallFigures, figures_of_press, sentences
from kvpress_eval.results.records import RECALL
from kvpress_eval.results.store import Row
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.models import Engine, check_lengths, load_engine, read_settings
from kvpress_eval.run.press_rows import ContextBatch, PressRows, identity_of, open_rows
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tasks.filler import Filler, read_filler
from kvpress_eval.tasks.languages import LANGUAGES


@dataclass(frozen=True)
class _Item:
    """Context with the tokens of its questions."""

    context: FactContext
    questions: list[Question]

    @property
    def batch(self) -> ContextBatch:
        """The context for its rows."""
        return ContextBatch(self.context.id, 1, self.context.length)

    @property
    def readings(self) -> list[list[int]]:
        """Numbers of the questions that share a reading: all of them, or each alone if the prompts differ."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, question in enumerate(self.questions):
            groups.setdefault(tuple(question.first), []).append(number)
        return list(groups.values())


def measure(
    config: RunConfig,
    facts: FactSettings,
    margins: Margins,
    console: Console,
    folder: Path | None = None,
    press_seconds: float | None = None,
) -> dict[str, Any]:
    """Measure the presses of a configuration, with `samples` contexts of each length.

    Return a record with the settings, the questions, one row per length and press, and all answers.

    With a `folder`, every row is stored there as soon as it is measured, and stored rows are not measured again. A press that
    has used more than `press_seconds` is not measured on further contexts, and has no row for lengths that it has not finished.

    Raises:
        ConfigError: the facts do not fit, the prompts are too long for the model, a press does not suit it, or
            `press_seconds` is no time.
        DataError: the model or the filler cannot be read.
        OutputError: the folder belongs to another measurement.
        BusyError: another process measures into the folder.
    """
    started = time.monotonic()
    model = read_settings(config)
    check_lengths(config, model)
    filler = read_filler(config.filler)
    engine = load_engine(config, model)
    config = in_words_of(config, engine.tokenizer)
    facts.check(config.wording)
    items = [item for length in config.lengths for item in _make_items(config, facts, engine, filler, length)]
    questions = [question for item in items for question in item.questions]
    check_lengths(config.model_copy(update={"lengths": (max(question.total for question in questions),)}), model)
    presses = tuple(dict.fromkeys((BASELINE, *config.presses)))
    for press in presses:
        check_press(press, engine, min(len(question.first) for question in questions))
    identity = _identity(config, facts, engine, filler)
    with open_rows(folder, identity, [item.batch for item in items], presses, press_seconds) as rows:
        _measure_missing(engine, items, rows, console)
    figures = {
        length: _figures([item for item in items if item.context.length == length], rows, margins)
        for length in config.lengths
    }
    settings = {
        "kind": RECALL,
        **identity,
        "margin_points": margins.exact.size,
        "margin_nats": margins.kl.size,
        "press_seconds": press_seconds,
        "stopped": [press.row() for press in rows.stopped],
        "seconds": round(time.monotonic() - started, 1),
    }
    cells = [
        {"length": length, "rows": [item.row() for item in of_length], "sentences": sentences(of_length)}
        for length, of_length in figures.items()
    ]
    answers = {"contexts": describe([item.context for item in items]), "answers": rows.measured}
    return {**settings, **describe_run(config, engine), "cells": cells, **answers}


def _make_items(config: RunConfig, facts: FactSettings, engine: Engine, filler: Filler, length: int) -> list[_Item]:
    contexts = make_contexts(
        engine.tokenizer,
        length,
        config.samples,
        facts,
        language=LANGUAGES[config.wording],
        filler=filler,
        seed=config.seed,
    )
    aware = config.question_aware
    return [
        _Item(context, [make_question(engine.tokenizer, sample, question_aware=aware) for sample in context.samples])
        for context in contexts
    ]


def _measure_missing(engine: Engine, items: Sequence[_Item], rows: PressRows, console: Console) -> None:
    """Measure the missing rows."""
    with RunProgress(console, len(rows.names)) as progress:
        for number, missing in rows.unmeasured(progress):
            item = items[number]
            for press, row in _measure_context(engine, item, missing, progress):
                rows.add(item.batch, press, row)
                progress.advance(1)
            exact = rows.row(item.batch, BASELINE)["exact"]
            done = f"context {number + 1} of {len(items)}: {item.context.length} tokens"
            progress.reached(f"{done}, the full cache answers {sum(exact)} of {len(exact)}")


def _measure_context(
    engine: Engine, item: _Item, presses: Sequence[str], progress: RunProgress
) -> Iterator[tuple[str, Row]]:
    """Yield each press with its figures on a context. The full cache is read in any case, as the reference."""
    readings, device = item.readings, engine.model.device
    figures: dict[str, dict[int, AnswerFigures]] = {press: {} for press in presses}
    reports: dict[str, list[kvpress.MemoryReport]] = {press: [] for press in presses}
    times = dict.fromkeys(presses, 0.0)
    for numbers in readings:
        full: list[Tensor] = []
        questions = [item.questions[number] for number in numbers]
        ids = torch.tensor([questions[0].first], device=device)
        following = sum(question.total - len(question.first) for question in questions)
        together = tuple(dict.fromkeys((BASELINE, *presses)))
        for press, cache, seconds in read_prompts(engine.model, together, ids, following):
            progress.cell(press)
            started = now(device)
            report = kvpress.memory_report(cache)
            logits = read_answers(engine, press, cache, questions, item.context.id)
            full = full or logits
            if press not in figures:
                continue
            reports[press].append(report)
            for number, exact, approximate in zip(numbers, full, logits, strict=True):
                figures[press][number] = figures_of(item.questions[number], exact, approximate)
            times[press] += seconds + now(device) - started
            if len(reports[press]) == len(readings):
                answers = [figures[press][number] for number in sorted(figures[press])]
                yield press, _row(item.context, press, answers, reports[press], times[press])


def _row(
    context: FactContext,
    press: str,
    answers: Sequence[AnswerFigures],
    reports: Sequence[kvpress.MemoryReport],
    seconds: float,
) -> Row:
    """Return the figures of a press on a context; sizes are means over its caches."""
    size, uncompressed = (
        fmean(report.total_bytes for report in reports),
        fmean(report.uncompressed_bytes for report in reports),
    )
    kept = sum(report.kept for report in reports) / sum(report.seen for report in reports)
    return {
        "context": context.id,
        "exact": [answer.exact for answer in answers],
        "kl": [answer.kl for answer in answers],
        "nll": [answer.nll for answer in answers],
        "bytes": size,
        "uncompressed_bytes": uncompressed,
        "kept": kept,
        "compressed": not left_whole(kvpress.get_press(press), kept, size, uncompressed),
        "seconds": round(seconds, 3),
    }


def _figures(items: Sequence[_Item], rows: PressRows, margins: Margins) -> list[RecallFigures]:
    """Return the figures of each press that has answered all questions of these contexts."""
    by_press = rows.complete([item.batch for item in items])
    contexts = [item.context for item in items]
    return [
        figures_of_press(press, contexts, press_rows, by_press[BASELINE], margins)
        for press, press_rows in by_press.items()
    ]


def _identity(config: RunConfig, facts: FactSettings, engine: Engine, filler: Filler) -> dict[str, Any]:
    """Return all settings but the presses that a row depends on."""
    return {
        **identity_of(config, engine),
        "filler": filler.name,
        "question_aware": config.question_aware,
        "facts": facts.count,
        "values": list(facts.values),
    }
