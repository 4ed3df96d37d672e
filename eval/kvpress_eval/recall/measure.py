# SPDX-License-Identifier: Apache-2.0
"""Measure the recall of facts behind compressed caches.

A context is read once for all presses that can share the reading and compressed before any question is seen; all its questions
are then read behind the same cache in one batch. A question-aware measurement compresses context and question together,
so every question has a reading of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import kvpress
from kvpress.core.effect import left_whole
from kvpress.core.spec import own_code
from kvpress_eval.common.errors import BusyError, OutputError
from kvpress_eval.common.files import differences, read_object
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.continuation import read_prompts
from kvpress_eval.fidelity.measure import check_press
from kvpress_eval.recall.answers import AnswerFigures, Question, figures_of, make_question, read_answers
from kvpress_eval.recall.facts import FactContext, FactSettings, describe, make_contexts
from kvpress_eval.recall.figures import Margins, RecallFigures, figures_of_press, sentences
from kvpress_eval.results.records import RECALL
from kvpress_eval.results.store import SCHEMA, CellStore, Row
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.models import Engine, check_lengths, load_engine, read_settings
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tasks.filler import Filler, read_filler
from kvpress_eval.tasks.languages import LANGUAGES


@dataclass(frozen=True)
class _Item:
    """Context with the tokens of its questions."""

    context: FactContext
    questions: list[Question]

    @property
    def readings(self) -> list[list[int]]:
        """Numbers of the questions that share a reading: all of them, or each alone if the prompts differ."""
        groups: dict[tuple[int, ...], list[int]] = {}
        for number, question in enumerate(self.questions):
            groups.setdefault(tuple(question.first), []).append(number)
        return list(groups.values())


def measure(
    config: RunConfig, facts: FactSettings, margins: Margins, console: Console, folder: Path | None = None
) -> dict[str, Any]:
    """Measure the presses of a configuration, with `samples` contexts of each length.

    Return a record with the settings, the questions, one row per length and press, and all answers.

    With a `folder`, every row is stored there as soon as it is measured, and stored rows are not measured again.

    Raises:
        ConfigError: the facts do not fit, the prompts are too long for the model, or a press does not suit it.
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
    names = [_row_name(item.context, press) for item in items for press in presses]
    with _stored_rows(folder, identity, names) as (rows, append):
        _measure_missing(engine, items, presses, rows, append, console)
    figures = {
        length: _figures([item.context for item in items if item.context.length == length], presses, rows, margins)
        for length in config.lengths
    }
    settings = {
        "kind": RECALL,
        **identity,
        "margin_points": margins.exact.size,
        "margin_nats": margins.kl.size,
        "seconds": round(time.monotonic() - started, 1),
    }
    cells = [
        {"length": length, "rows": [item.row() for item in of_length], "sentences": sentences(of_length)}
        for length, of_length in figures.items()
    ]
    answers = {"contexts": describe([item.context for item in items]), "answers": [rows[name] for name in names]}
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


def _measure_missing(
    engine: Engine,
    items: Sequence[_Item],
    presses: Sequence[str],
    rows: dict[str, Row],
    append: Callable[[Row], None],
    console: Console,
) -> None:
    """Measure the missing rows, and add them to `rows` and to the store."""
    with RunProgress(console, len(items) * len(presses)) as progress:
        for number, item in enumerate(items, start=1):
            missing = [press for press in presses if _row_name(item.context, press) not in rows]
            progress.skip(len(presses) - len(missing))
            if not missing:
                continue
            for row in _measure_context(engine, item, missing, progress):
                rows[row["sample"]] = row
                append(row)
            exact = rows[_row_name(item.context, BASELINE)]["exact"]
            done = f"context {number} of {len(items)}: {item.context.length} tokens"
            progress.reached(f"{done}, the full cache answers {sum(exact)} of {len(exact)}")


def _measure_context(engine: Engine, item: _Item, presses: Sequence[str], progress: RunProgress) -> Iterator[Row]:
    """Yield the row of each press on a context. The full cache is read in any case, as the reference."""
    readings = item.readings
    figures: dict[str, dict[int, AnswerFigures]] = {press: {} for press in presses}
    reports: dict[str, list[kvpress.MemoryReport]] = {press: [] for press in presses}
    for numbers in readings:
        full: list[Tensor] = []
        questions = [item.questions[number] for number in numbers]
        ids = torch.tensor([questions[0].first], device=engine.model.device)
        following = sum(question.total - len(question.first) for question in questions)
        for press, cache in read_prompts(engine.model, tuple(dict.fromkeys((BASELINE, *presses))), ids, following):
            progress.cell(press)
            report = kvpress.memory_report(cache)
            logits = read_answers(engine, press, cache, questions, item.context.id)
            full = full or logits
            if press not in figures:
                continue
            reports[press].append(report)
            for number, exact, approximate in zip(numbers, full, logits, strict=True):
                figures[press][number] = figures_of(item.questions[number], exact, approximate)
            if len(reports[press]) == len(readings):
                yield _row(
                    item.context, press, [figures[press][number] for number in sorted(figures[press])], reports[press]
                )
                progress.advance(1)


def _row(
    context: FactContext, press: str, answers: Sequence[AnswerFigures], reports: Sequence[kvpress.MemoryReport]
) -> Row:
    """Return the figures of a press on a context; sizes are means over its caches."""
    size, uncompressed = (
        fmean(report.total_bytes for report in reports),
        fmean(report.uncompressed_bytes for report in reports),
    )
    kept = sum(report.kept for report in reports) / sum(report.seen for report in reports)
    return {
        "sample": _row_name(context, press),
        "press": press,
        "context": context.id,
        "exact": [answer.exact for answer in answers],
        "kl": [answer.kl for answer in answers],
        "nll": [answer.nll for answer in answers],
        "bytes": size,
        "uncompressed_bytes": uncompressed,
        "kept": kept,
        "compressed": not left_whole(kvpress.get_press(press), kept, size, uncompressed),
    }


def _row_name(context: FactContext, press: str) -> str:
    """Return the identifier of a row; that of a user's press has the digest of its code."""
    return " ".join(filter(None, (context.id, press, own_code(kvpress.get_press(press)))))


def _figures(
    contexts: Sequence[FactContext], presses: Sequence[str], rows: Mapping[str, Row], margins: Margins
) -> list[RecallFigures]:
    by_press = {press: [rows[_row_name(context, press)] for context in contexts] for press in presses}
    return [
        figures_of_press(press, contexts, press_rows, by_press[BASELINE], margins)
        for press, press_rows in by_press.items()
    ]


def _identity(config: RunConfig, facts: FactSettings, engine: Engine, filler: Filler) -> dict[str, Any]:
    """Return all settings but the presses that a row depends on."""
    return {
        "schema": SCHEMA,
        "kvpress": kvpress.__version__,
        "model": config.model,
        "weights": engine.fingerprint,
        "device": engine.device,
        "dtype": engine.dtype,
        "seed": config.seed,
        "language": config.wording,
        "filler": filler.name,
        "question_aware": config.question_aware,
        "facts": facts.count,
        "values": list(facts.values),
        **({"model_kwargs": config.model_kwargs} if config.model_kwargs else {}),
    }


@contextmanager
def _stored_rows(
    folder: Path | None, identity: Mapping[str, Any], names: Sequence[str]
) -> Iterator[tuple[dict[str, Row], Callable[[Row], None]]]:
    """Lock a folder and yield its rows by name, with a function that adds one; without a folder nothing is stored."""
    if folder is None:
        yield {}, lambda row: None
        return
    store = CellStore(folder)
    with store.claim() as claimed:
        if not claimed:
            raise BusyError(f"another process measures into {folder}; use another --out")
        earlier = read_object(folder / "cell.json") or identity
        if listed := differences(earlier, identity):
            raise OutputError(
                f"{folder} holds rows of another measurement ({listed}): use another --out, or remove that folder"
            )
        stored = store.open(identity, names)
        rows = {name: {key: row[key] for key in row if key != "sha256"} for name, row in stored.items()}
        yield rows, store.append
        store.finish(len(rows))
