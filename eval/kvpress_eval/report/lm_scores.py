# SPDX-License-Identifier: Apache-2.0
"""Read the scores in a record of `kvpress lm-eval`, without the package lm-eval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from rich.table import Table

from kvpress_eval.common.terminal import Name, number, plain_table


def scores(measured: Mapping[str, Any]) -> Iterator[tuple[str, str, float, float | None, int | None]]:
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


def to_table(record: Mapping[str, Any]) -> Table:
    """Return a table with one row per press, task and metric."""
    table = plain_table(["press", "task", "metric"], ["value", "std. error", "samples", "bits/value"])
    for measured in record["presses"]:
        bits = number(measured["held"]["bits_per_value"], 2)
        for task, metric, value, error, samples in scores(measured):
            figures = (number(value, 4), number(error, 4), number(samples, 0), bits)
            table.add_row(Name(measured["press"]), Name(task), Name(metric), *figures)
    return table
