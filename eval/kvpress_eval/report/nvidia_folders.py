# SPDX-License-Identifier: Apache-2.0
"""Folders of results in the form of NVIDIA kvpress's `evaluate.py` (version 0.5.5), which its leaderboard reads.

    <dataset>__<data_dir>__<model>__<press>__<ratio>[__max_context<tokens>][__query_aware]/
        config.yaml       the fields of its `EvaluationConfig`
        metrics.json      in the form of the dataset
        predictions.csv   one line per sample

Differs from its folders: scores are those of this harness, and predictions lack the text of question and context, which
results do not store. A press without a ratio of its own gets the share of bytes that it removed.
"""

from __future__ import annotations

import copy
import csv
import io
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from kvpress.core.press import BasePress
from kvpress.core.spec import get_press, to_spec
from kvpress_eval.common.errors import DataError
from kvpress_eval.common.files import differences
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.summary import BASELINE

RULER = re.compile(r"niah_(single|multikey)_[123]|niah_multi(value|query)|vt|cwe|fwe|qa_[12]")
"""Names of RULER's thirteen tasks."""
OTHERS = "kvpress-toolkit"
"""Dataset of generated tasks that NVIDIA's harness does not have."""
PRESSES = {
    "adakv_snapkv": "adakv(snapkv)",
    "block_keydiff": "block(keydiff):block_size=128",
    "chunkkv": "chunkkv(snapkv):chunk_length=20",
    "critical_adakv_snapkv": "critical_adakv(snapkv)",
    "critical_snapkv": "criticalkv(snapkv)",
    "expected_attention": "adakv(expected_attention:epsilon=0.01)",
    "adakv_compactor": "adakv(compactor)",
    "kvzip_plus": "kvzip:kvzip_plus_normalization=true",
    "decoding_knorm": "decoding(knorm)",
    "decoding_streaming_llm": "decoding(streaming_llm)",
    "decoding_tova": "decoding(tova)",
    "decoding_keydiff": "decoding(keydiff)",
    **{
        name: name
        for name in (
            "cur", "duo_attention", "finch", "keydiff", "kvzip", "lagkv", "knorm", "observed_attention", "pyramidkv", "qfilter",
            "random", "snapkv", "streaming_llm", "think", "tova", "compactor", "fastkvzip",
        )
    },
}  # fmt: skip
"""Names of presses in the registry of NVIDIA's `evaluate.py` that are the same presses here, as specs without a ratio."""
RATIOS = ("compression_ratio", "head_compression_ratio", "key_channel_compression_ratio", "threshold")
"""Settings of a press that `evaluate.py` has options for."""
CONDITIONS = (
    "kvpress", "weights", "device", "dtype", "batch_size", "max_seconds_per_sample", "seed", "language", "filler", "code",
    "model_kwargs",
)  # fmt: skip
"""Parts of a cell's spec that all cells of a folder must share."""


@dataclass(frozen=True)
class NamedPress:
    """A press as NVIDIA's harness would name it."""

    name: str
    """Name of its registry, or else one made from the spec."""
    settings: Mapping[str, float] = field(default_factory=dict)
    """Its own settings among `RATIOS`; empty if it has none."""


def named_press(spec: str) -> NamedPress:
    """Return the name and the ratios of a press."""
    if spec == BASELINE:
        return NamedPress("no_press", {"compression_ratio": 0.0})
    press = copy.deepcopy(get_press(spec))
    settings = {}
    for name in RATIOS:
        value = getattr(press, name, None)
        if isinstance(value, (int, float)) and value and _resets(press, name):
            settings[name] = float(value)
    bare = to_spec(press)
    if bare in _known():
        return NamedPress(_known()[bare], settings)
    name = re.sub(r"_*[^\w.+=]+_*", "-", bare if settings else to_spec(get_press(spec))).strip("-").replace("-+-", "+")
    return NamedPress(f"{name}-press" if name in PRESSES or "__" in name else name, settings)


def _resets(press: BasePress, name: str) -> bool:
    """Set a ratio of a press to the default of its class; returns False if it cannot be set."""
    default = 0.0 if name == "compression_ratio" else getattr(type(press), name, None)
    try:
        setattr(press, name, default)
    except (AttributeError, TypeError, ValueError):
        return False
    return True


@cache
def _known() -> dict[str, str]:
    """Return the names of NVIDIA's registry by the spec of the press without its ratio."""
    return {to_spec(get_press(spec)): name for name, spec in PRESSES.items()}


def to_folders(cells: Sequence[CellResult]) -> tuple[dict[Path, bytes], list[str]]:
    """Return the files of all folders by relative path, and a message for each cell that is left out.

    Raises:
        DataError: cells that were measured under different conditions would share a folder.
    """
    groups: dict[str, list[CellResult]] = {}
    problems = []
    for cell in cells:
        if cell.problem:
            problems.append(f"left out {cell.press} on {cell.label}: {cell.problem}")
        else:
            groups.setdefault(_folder(cell), []).append(cell)
    files: dict[Path, bytes] = {}
    for folder, members in sorted(groups.items()):
        _check_conditions(folder, members)
        files[Path(folder, "config.yaml")] = yaml.safe_dump(_config(members), sort_keys=False).encode()
        files[Path(folder, "metrics.json")] = json.dumps(_metrics(members), indent=4).encode()
        files[Path(folder, "predictions.csv")] = _predictions(members).encode(errors="replace")
    return files, problems


def _check_conditions(folder: str, cells: Sequence[CellResult]) -> None:
    first, *others = ({name: cell.spec.get(name) for name in CONDITIONS} for cell in cells)
    for other in others:
        if other != first:
            raise DataError(
                f"cells of {folder} were measured under different conditions ({differences(first, other)}): export their "
                "runs to folders of their own"
            )
    places = [(cell.task, cell.length, cell.depth) for cell in cells]
    for cell in cells:
        if places.count((cell.task, cell.length, cell.depth)) > 1:
            raise DataError(f"{folder} would have {cell.label} more than once: export the runs to folders of their own")


def _dataset(cell: CellResult) -> tuple[str, str, int | None]:
    """Return the dataset of a task, its `data_dir`, and the most tokens of a prompt where NVIDIA's harness sets them."""
    group, _, subset = cell.task.partition(":")
    limits = (cell.length, cell.spec.get("max_context_length"))
    limit = min(filter(None, limits), default=None)
    if group == "file":
        return OTHERS, re.sub(r"\W+", "-", Path(subset).stem), limit
    if subset:
        return group, re.sub(r"[^\w.]+", "-", subset), limit
    if group in ("aime25", "math500"):
        return group, "", limit
    return "ruler" if RULER.fullmatch(group) else OTHERS, str(cell.length or ""), limits[1]


def _folder(cell: CellResult) -> str:
    dataset, data_dir, limit = _dataset(cell)
    config = _ratios(named_press(cell.press), [cell])
    ratio = next(
        config[name] for name in ("threshold", "head_compression_ratio", "compression_ratio") if name in config
    )
    parts = [dataset, data_dir, cell.spec["model"].replace("/", "--"), named_press(cell.press).name, f"{ratio:.2f}"]
    parts += [f"max_context{limit}"] if limit else []
    parts += ["query_aware"] if cell.spec.get("question_aware") else []
    channels = config.get("key_channel_compression_ratio")
    parts += [] if channels is None else [f"key_channel_cr{channels:.2f}"]
    return "__".join(filter(None, parts))


def _ratios(press: NamedPress, cells: Sequence[CellResult]) -> dict[str, float]:
    """Return the ratios of a press; the share of bytes that it removed stands for one that it lacks."""
    settings = dict(press.settings)
    if not {"threshold", "head_compression_ratio", "compression_ratio"} & set(settings):
        rows = [row for cell in cells for row in cell.rows]
        held, full = (sum(row[name] for row in rows) for name in ("bytes", "uncompressed_bytes"))
        settings["compression_ratio"] = round(max(0.0, 1 - held / full), 4) if full else 0.0
    return settings


def _config(cells: Sequence[CellResult]) -> dict[str, Any]:
    """Return the fields of `EvaluationConfig` that describe the cells of a folder."""
    cell = cells[0]
    dataset, data_dir, limit = _dataset(cell)
    new_tokens = {cell.spec["max_new_tokens"] for cell in cells}
    press = named_press(cell.press)
    ratios = _ratios(press, cells)
    return {
        "dataset": dataset,
        "data_dir": data_dir or None,
        "model": cell.spec["model"],
        "device": cell.spec["device"],
        "press_name": press.name,
        **{name: ratios[name] for name in RATIOS if name in ratios},
        "fraction": 1.0,
        "max_new_tokens": new_tokens.pop() if len(new_tokens) == 1 else None,
        "max_context_length": limit,
        "query_aware": bool(cell.spec.get("question_aware")),
        "model_kwargs": {"dtype": cell.spec["dtype"], **cell.spec.get("model_kwargs", {})},
        "press_init_command": f"kvpress.get_press({cell.press!r})",
        "seed": cell.spec.get("seed", 0),
    }


def _metrics(cells: Sequence[CellResult]) -> Any:
    """Return the scores of a folder in the form of its dataset's `calculate_metrics`."""
    scores: dict[str, list[float]] = {}
    for cell in cells:
        scores.setdefault(cell.task.partition(":")[2] or cell.task, []).extend(cell.scores.values())
    return _FORMS.get(_dataset(cells[0])[0], _by_task)(scores)


def _by_task(scores: Mapping[str, Sequence[float]], metric: str = "score") -> dict[str, dict[str, float]]:
    return {task: {metric: round(100 * fmean(values), 2)} for task, values in sorted(scores.items())}


def _mean(scores: Mapping[str, Sequence[float]]) -> float:
    return fmean(value for values in scores.values() for value in values)


def _counted(scores: Mapping[str, Sequence[float]]) -> dict[str, float]:
    values = [value for task in scores.values() for value in task]
    return {"correct": round(sum(values)), "accuracy": fmean(values), "total": len(values)}


def _loogle(scores: Mapping[str, Sequence[float]]) -> dict[str, dict[str, float]]:
    return {
        task: {"exact_match" if task == "shortdep_cloze" else "rouge-l": fmean(values)}
        for task, values in scores.items()
    }


_FORMS: dict[str, Callable[[Mapping[str, Sequence[float]]], Any]] = {
    "ruler": lambda scores: _by_task(scores, "string_match"),
    "longbench": lambda scores: round(100 * _mean(scores), 2),
    "longbench-v2": lambda scores: {"average": _mean(scores)},
    "infinitebench": _mean,
    "loogle": _loogle,
    "aime25": _counted,
    "math500": _counted,
}
"""Form of `metrics.json` by dataset."""


def _predictions(cells: Sequence[CellResult]) -> str:
    ratio = _ratios(named_press(cells[0].press), cells).get("compression_ratio", "")
    table = io.StringIO()
    writer = csv.writer(table)
    writer.writerow(("task", "sample", "answer", "predicted_answer", "score", "max_new_tokens", "compression_ratio"))
    for cell in cells:
        task, room = cell.task.partition(":")[2] or cell.task, cell.spec["max_new_tokens"]
        for row in cell.rows:
            writer.writerow((task, row["sample"], row["expected"], row["prediction"], row["score"], room, ratio))
    return table.getvalue()
