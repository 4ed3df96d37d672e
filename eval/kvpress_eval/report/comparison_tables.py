# SPDX-License-Identifier: Apache-2.0
"""Tables of presses by figure from the records of other commands than `kvpress eval`, one per set of conditions."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup
from rich.table import Table
from rich.text import Text

from kvpress_eval.common.files import hash_json
from kvpress_eval.common.terminal import MISSING, Name, number, plain_table
from kvpress_eval.report import recall_plot, recall_table
from kvpress_eval.report.table import markdown
from kvpress_eval.results.records import FIDELITY, FIRST_TOKENS, LM_EVAL, RECALL, Records

TITLES = {FIDELITY: "Fidelity to the full cache", RECALL: "Recall of facts", LM_EVAL: "Tasks of lm-eval"}
_MEASURED = ("rows", "presses", "kind", "best", "cells", "contexts", "answers", "stopped")
"""Keys of a record that hold results; all others describe the run."""
_MODEL = ("model", "weights", "kvpress", "device", "dtype", "batch_size", "model_kwargs")
_ASKED = {
    FIDELITY: ("context", "tokens", "chunk", "text", "texts"),
    RECALL: ("length", "contexts", "facts", "values", "filler", "language", "question_aware", "seed"),
    LM_EVAL: ("lm_eval", "tasks", "include", "limit", "num_fewshot", "chat_template", "metadata"),
}
"""Conditions, besides those of the model, that records in one table share."""


@dataclass(frozen=True)
class Figure:
    """Column of the tables of `kvpress fidelity`."""

    heading: str
    """Heading, with line breaks."""
    key: str
    """Key of the value in a row of a record."""
    digits: int
    """Decimals."""
    factor: float = 1.0
    """Factor that the value is multiplied by, such as 100 for per cent."""

    @property
    def name(self) -> str:
        """Heading on one line."""
        return self.heading.replace("/\n", "/").replace("\n", " ")

    def text(self, row: Mapping[str, Any]) -> str:
        """Return the figure of a row as text; a dash if it was not measured."""
        value = row.get(self.key)
        return number(None if value is None else self.factor * value, self.digits)


FIGURES = (
    Figure("KL\nmean", "kl_mean", 5),
    Figure(f"KL\nfirst\n{FIRST_TOKENS}", "kl_first", 4),
    Figure("KL\nlater", "kl_later", 4),
    Figure("KL\nworst\ntext", "kl_worst", 4),
    Figure("same\ntop\ntoken %", "top1_agreement", 1, 100),
    Figure("perplexity", "perplexity", 3),
    Figure("bits/\nvalue\nprompt", "prompt_bits_per_value", 2),
    Figure("bits/\nvalue\nend", "end_bits_per_value", 2),
    Figure("kept\n%", "kept", 0, 100),
)
LAYER_FIGURES = (
    Figure("output error", "output_error", 4),
    Figure("isolated error", "isolated_error", 4),
    Figure("attention recall %", "attention_recall", 1, 100),
)


@dataclass(frozen=True)
class Sheet:
    """Table of presses that were measured under the same conditions."""

    kind: str
    """Type of the records."""
    conditions: Mapping[str, Any]
    """Model and settings that all records share."""
    columns: Sequence[str]
    """Headings."""
    rows: Sequence[tuple[str, Sequence[tuple[str, float | None]]]]
    """Each press with a text and a sort value per column, in the order of the page; None has no sort value."""
    note: str
    """Line below the table."""
    lines: Sequence[dict[str, Any]]
    """Unrounded values for CSV and Parquet files."""
    terminal: Table
    """The table as the command prints it."""
    records: Sequence[Mapping[str, Any]]
    """Records that the table was made from."""
    plot: Markup | None = None
    """Figure for the page."""

    @property
    def name(self) -> str:
        """Title: the model, dtype and device, and the tasks or lengths."""
        fields = self.conditions
        model = f"{fields['model']}, {fields['dtype']} on {fields['device']}"
        if self.kind == LM_EVAL:
            return f"{model}: {', '.join(fields['tasks'])}"
        if self.kind == RECALL:
            questions = fields["contexts"] * fields["facts"]
            seen = "seen" if fields["question_aware"] else "unseen"
            contexts = f"{fields['contexts']} contexts of {fields['length']} tokens among {fields['filler']}"
            return f"{model}: {questions} questions in {contexts}, question {seen}"
        return (
            f"{model}: contexts of {fields['context']} tokens, {fields['tokens']} more in chunks of {fields['chunk']}"
        )

    @property
    def details(self) -> dict[str, Any]:
        """Conditions that are set and not part of the name."""
        named = (
            "model", "dtype", "device", "context", "tokens", "chunk", "tasks", "text", "length", "contexts", "facts",
            "filler", "question_aware",
        )  # fmt: skip
        details = {key: value for key, value in self.conditions.items() if key not in named and value}
        if self.kind == FIDELITY:
            details["texts"] = f"{self.conditions['text'] or 'made from the tasks'} ({self.conditions['texts']})"
        return details

    def to_markdown(self) -> str:
        """Return the table as Markdown."""
        rows = [[press, *(text for text, _ in cells)] for press, cells in self.rows]
        return markdown(["press", *self.columns], ["---", *("---:" for _ in self.columns)], rows, self.note)


def about(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of a run: its record without the results."""
    return {key: value for key, value in record.items() if key not in _MEASURED}


def make_sheets(measured: Records) -> list[Sheet]:
    """Return one table per set of conditions; if a press was measured twice, the newer figures count."""
    sheets = []
    for kind, make in ((FIDELITY, _fidelity_sheet), (RECALL, _recall_sheet), (LM_EVAL, _lm_eval_sheet)):
        groups: dict[str, list[dict[str, Any]]] = {}
        for record in measured.of(kind):
            for table in _by_length(record) if kind == RECALL else [record]:
                groups.setdefault(hash_json(_conditions(table)), []).append(table)
        sheets += [make(records) for records in groups.values()]
    return sheets


def fidelity_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the rows of `kvpress fidelity` as a table for the terminal."""
    table = plain_table(["press"], [figure.heading for figure in FIGURES], gap=1, caption_justify="left")
    notes: list[str] = []
    for row in rows:
        if not notes:
            notes.append(f"perplexity of the full cache: {row['full_perplexity']:.3f}")
        if not row.get("compressed", True):
            notes.append(f"{row['press']}: not compressed, the prompts are held as they are")
        table.add_row(Name(row["press"]), *(figure.text(row) for figure in FIGURES))
    table.caption = Text("\n".join(notes))
    return table


def layer_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the figures of every layer as a table for the terminal, one section per press."""
    table = plain_table(["press"], ["layer", "output error\nrunning", "output error\nisolated", "attention\nrecall %"])
    for row in rows:
        layers = [
            {figure.key: row[f"{figure.key}_by_layer"][i] for figure in LAYER_FIGURES}
            for i in range(len(row["layers"]))
        ]
        names = [row["press"], *("" for _ in layers)]
        for name, layer, figures in zip(names, [*row["layers"], "mean"], [*layers, row], strict=True):
            table.add_row(Name(name), str(layer), *(figure.text(figures) for figure in LAYER_FIGURES))
    return table


def lm_scores(measured: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float | None, int | None]]:
    """Yield task, metric, value, standard error and number of samples from the results of one press."""
    for task, metrics in {**measured["results"], **measured.get("groups", {})}.items():
        for name, value in metrics.items():
            metric, comma, chosen = name.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            error = metrics.get(f"{metric}_stderr,{chosen}")
            label = metric if chosen == "none" else f"{metric} ({chosen})"
            samples = measured["n-samples"].get(task, {}).get("effective")
            yield task, label, value, error if isinstance(error, (int, float)) else None, samples


def lm_table(record: Mapping[str, Any]) -> Table:
    """Return a record of `kvpress lm-eval` as a table for the terminal, one row per press, task and metric."""
    table = plain_table(["press", "task", "metric"], ["value", "std. error", "samples", "bits/value"])
    for measured in record["presses"]:
        bits = number(measured["held"]["bits_per_value"], 2)
        for task, metric, value, error, samples in lm_scores(measured):
            figures = (number(value, 4), number(error, 4), number(samples, 0), bits)
            table.add_row(Name(measured["press"]), Name(task), Name(metric), *figures)
    return table


def _fidelity_sheet(records: Sequence[dict[str, Any]]) -> Sheet:
    newest = {row["press"]: row for record in records for row in record["rows"]}
    rows = sorted(newest.values(), key=lambda row: row["kl_mean"])
    figures = [*FIGURES, *(figure for figure in LAYER_FIGURES if any(figure.key in row for row in rows))]
    return Sheet(
        kind=FIDELITY,
        conditions=_conditions(records[0]),
        columns=[figure.name for figure in figures],
        rows=[(row["press"], [(column.text(row), _finite(row.get(column.key))) for column in figures]) for row in rows],
        note=" ".join([f"Perplexity of the full cache: {rows[0]['full_perplexity']:.3f}.", *_stopped(records, newest)]),
        lines=[{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows],
        terminal=fidelity_table(rows),
        records=records,
    )


def _by_length(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a record of `kvpress recall` as one for each length; `contexts` is the number of contexts of the length."""
    alone = {key: value for key, value in record.items() if key not in ("cells", "answers")}
    return [
        {
            **alone,
            **cell,
            "contexts": sum(item["context"].startswith(f"{cell['length']}-") for item in record["contexts"]),
        }
        for cell in record["cells"]
    ]


def _recall_sheet(records: Sequence[dict[str, Any]]) -> Sheet:
    newest = {row["press"]: row for record in records for row in record["rows"]}
    rows = sorted(newest.values(), key=lambda row: (row["kl_mean"], row["bytes"]))
    # The sentences of a record compare its own presses, so they do not hold for the presses of several records.
    sentences = records[0]["sentences"] if len(records) == 1 else []
    conditions = _conditions(records[0])
    return Sheet(
        kind=RECALL,
        conditions=conditions,
        columns=[heading.replace("\n", " ") for heading in recall_table.HEADINGS],
        rows=[(row["press"], recall_table.cells(row)) for row in rows],
        note=" ".join([*sentences, *(f"{note}." for note in recall_table.notes(rows)), *_stopped(records, newest)]),
        lines=[{key: value for key, value in row.items() if not isinstance(value, dict)} for row in rows],
        terminal=recall_table.to_table(rows),
        records=records,
        plot=recall_plot.sizes_svg(rows, f"KL against size, {conditions['length']} tokens"),
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
        rows.append((press, [*scores, (number(bits, 2), _finite(bits))]))
    return Sheet(
        kind=LM_EVAL,
        conditions=_conditions(records[0]),
        columns=[*(f"{task}: {metric}" for task, metric in metrics), "bits/value"],
        rows=rows,
        note="Values are lm-eval's, with its standard errors.",
        lines=lines,
        terminal=lm_table({"presses": list(newest.values())}),
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
        for task, metric, value, error, samples in lm_scores(measured)
    ]


def _score(line: Mapping[str, Any] | None) -> tuple[str, float | None]:
    if line is None:
        return MISSING, None
    error = line["standard_error"]
    return number(line["value"], 4) + (f" ± {error:.4f}" if error is not None else ""), _finite(line["value"])


def _conditions(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return the conditions of a record, from its top level or its configuration."""
    fields = {**record["config"], **record}
    return {key: fields.get(key) for key in (*_MODEL, *_ASKED[record["kind"]])}


def _stopped(records: Iterable[Mapping[str, Any]], measured: Container[str]) -> list[str]:
    """Return a sentence for each press that a limit on its time stopped, unless another record has its figures."""
    sentences = {stopped["press"]: stopped["sentence"] for record in records for stopped in record.get("stopped", ())}
    return [f"{sentence}." for press, sentence in sentences.items() if press not in measured]


def _finite(value: float | None) -> float | None:
    """Return the sort value of a number; None if it is missing or not finite."""
    return value if value is not None and math.isfinite(value) else None
