# SPDX-License-Identifier: Apache-2.0
"""Tables of presses by figure from the records of `kvpress fidelity` and `kvpress lm-eval`: one for what was asked alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from kvpress_eval.common.files import hash_json
from kvpress_eval.report import fidelity_table, lm_scores, table
from kvpress_eval.report.fidelity_table import FIGURES, LAYER_FIGURES
from kvpress_eval.results.records import FIDELITY, LM_EVAL, Records

TITLES = {FIDELITY: "Fidelity to the full cache", LM_EVAL: "Tasks of lm-eval"}
_MEASURED = ("rows", "presses", "kind", "best")
"""What of a record is figures."""
_MODEL = ("model", "weights", "kvpress", "device", "dtype", "batch_size")
_ASKED = {
    FIDELITY: ("context", "tokens", "chunk", "text", "texts"),
    LM_EVAL: ("lm_eval", "tasks", "include", "limit", "num_fewshot", "chat_template", "metadata"),
}
"""What records must have in common, with the model, for their presses to stand in one table."""


@dataclass(frozen=True)
class Sheet:
    """Presses that were asked the same, in the order of the page.

    `rows` have for each of the `columns` a text and the value that it sorts by, None where there is none. `lines` are what
    files take, unrounded, and `terminal` is what the command that measured it prints.
    """

    kind: str
    conditions: Mapping[str, Any]
    columns: Sequence[str]
    rows: Sequence[tuple[str, Sequence[tuple[str, float | None]]]]
    note: str
    lines: Sequence[dict[str, Any]]
    terminal: Table
    records: Sequence[Mapping[str, Any]]

    @property
    def name(self) -> str:
        """The model, how it ran and what it was asked, in words."""
        asked = self.conditions
        model = f"{asked['model']}, {asked['dtype']} on {asked['device']}"
        if self.kind == LM_EVAL:
            return f"{model}: {', '.join(asked['tasks'])}"
        return f"{model}: contexts of {asked['context']} tokens, {asked['tokens']} more in chunks of {asked['chunk']}"

    @property
    def told(self) -> dict[str, Any]:
        """What decides the figures beside what the name says, where it is given."""
        said = ("model", "dtype", "device", "context", "tokens", "chunk", "tasks", "text")
        asked = {key: value for key, value in self.conditions.items() if key not in said and value}
        if self.kind == FIDELITY:
            asked["texts"] = f"{self.conditions['text'] or 'made from the tasks'} ({self.conditions['texts']})"
        return asked

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        rows = [[press, *(text for text, _ in cells)] for press, cells in self.rows]
        return table.markdown(["press", *self.columns], ["---", *("---:" for _ in self.columns)], rows, self.note)


def about(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a record was measured with: everything but its figures."""
    return {key: value for key, value in record.items() if key not in _MEASURED}


def make_sheets(found: Records) -> list[Sheet]:
    """Return a table for each model, setting and question; of a press that was measured twice, the newer figures count."""
    sheets = []
    for kind, make in ((FIDELITY, _fidelity_sheet), (LM_EVAL, _lm_eval_sheet)):
        groups: dict[str, list[dict[str, Any]]] = {}
        for record in found.of(kind):
            groups.setdefault(hash_json(_conditions(record)), []).append(record)
        sheets += [make(records) for records in groups.values()]
    return sheets


def _fidelity_sheet(records: Sequence[dict[str, Any]]) -> Sheet:
    newest = {row["press"]: row for record in records for row in record["rows"]}
    rows = sorted(newest.values(), key=lambda row: row["kl_mean"])
    figures = [*FIGURES, *(figure for figure in LAYER_FIGURES if any(figure.key in row for row in rows))]
    return Sheet(
        kind=FIDELITY,
        conditions=_conditions(records[0]),
        columns=[figure.heading.replace("\n", " ") for figure in figures],
        rows=[(row["press"], [(one.text(row), _finite(row.get(one.key))) for one in figures]) for row in rows],
        note=f"Perplexity of the full cache: {rows[0]['full_perplexity']:.3f}.",
        lines=[{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows],
        terminal=fidelity_table.to_table(rows),
        records=records,
    )


def _lm_eval_sheet(records: Sequence[dict[str, Any]]) -> Sheet:
    newest = {measured["press"]: measured for record in records for measured in record["presses"]}
    lines = [line for measured in newest.values() for line in _score_lines(measured)]
    metrics = dict.fromkeys((line["task"], line["metric"]) for line in lines)
    of = {(line["press"], line["task"], line["metric"]): line for line in lines}
    rows = []
    for press, measured in newest.items():
        bits = measured["held"]["bits_per_value"]
        scores = [_score(of.get((press, *metric))) for metric in metrics]
        rows.append((press, [*scores, (table.number(bits, 2), _finite(bits))]))
    return Sheet(
        kind=LM_EVAL,
        conditions=_conditions(records[0]),
        columns=[*(f"{task}: {metric}" for task, metric in metrics), "bits/value"],
        rows=rows,
        note="Values are lm-eval's, with its standard errors.",
        lines=lines,
        terminal=lm_scores.to_table({"presses": list(newest.values())}),
        records=records,
    )


def _score_lines(measured: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return one line per task and metric of a press."""
    return [
        {
            "press": measured["press"],
            "task": task,
            "metric": metric,
            "value": value,
            "standard_error": error,
            "samples": samples,
            "bits_per_value": measured["held"]["bits_per_value"],
        }
        for task, metric, value, error, samples in lm_scores.scores(measured)
    ]


def _score(line: Mapping[str, Any] | None) -> tuple[str, float | None]:
    if line is None:
        return table.MISSING, None
    error = line["standard_error"]
    return table.number(line["value"], 4) + (f" ± {error:.4f}" if error is not None else ""), _finite(line["value"])


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of a record, whichever part of it they are in."""
    given = {**record["config"], **record}
    return {key: given.get(key) for key in (*_MODEL, *_ASKED[record["kind"]])}


def _finite(value: float | None) -> float | None:
    """Return what a column can be sorted by."""
    return value if value is not None and math.isfinite(value) else None
