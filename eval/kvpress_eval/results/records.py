# SPDX-License-Identifier: Apache-2.0
"""Records of `kvpress fidelity`, `kvpress recall` and `kvpress lm-eval`, read back and checked before they are compared."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvpress_eval.common.errors import DataError

FIDELITY, RECALL, LM_EVAL = "fidelity", "recall", "lm-eval"
"""Record types: values of `kind` in a record."""
FIRST_TOKENS = 16
"""Tokens behind a context whose divergence is shown apart: they read the compressed context and little else."""


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow")


class _Settings(_Part):
    model: str
    batch_size: int


class _Stopped(_Part):
    press: str
    sentence: str


class _Record(_Part):
    run: str
    date: str
    kvpress: str
    weights: str
    device: str
    dtype: str
    config: _Settings
    stopped: list[_Stopped] = Field(default_factory=list)


class _FidelityRow(_Part):
    press: str
    kl_mean: float
    kl_first: float | None = None
    kl_later: float | None = None
    kl_p99: float
    kl_worst: float | None = None
    top1_agreement: float
    perplexity: float
    full_perplexity: float
    perplexity_change: float | None = None
    perplexity_change_low: float | None = None
    perplexity_change_high: float | None = None
    prompt_bits_per_value: float
    end_bits_per_value: float
    kept: float
    output_error: float | None = None
    isolated_error: float | None = None
    attention_recall: float | None = None


class _FidelityRecord(_Record):
    context: int
    tokens: int
    chunk: int
    text: str | None
    texts: str
    rows: list[_FidelityRow] = Field(min_length=1)


class _RecallRow(_Part):
    press: str
    factor: float
    bytes: float
    exact: float
    change: float | None
    change_low: float | None
    change_high: float | None
    kl_mean: float
    kl_worst_context: float
    nll: float
    exact_by_kind: dict[str, float]
    compressed: bool


class _RecallCell(_Part):
    length: int
    rows: list[_RecallRow] = Field(min_length=1)
    sentences: list[str]


class _RecallContext(_Part):
    context: str


class _RecallRecord(_Record):
    seed: int
    language: str
    filler: str
    question_aware: bool
    facts: int
    values: list[str]
    cells: list[_RecallCell] = Field(min_length=1)
    contexts: list[_RecallContext] = Field(min_length=1)


class _Held(_Part):
    bits_per_value: float | None


class _LMEvalPress(_Part):
    press: str
    held: _Held
    results: dict[str, dict[str, Any]]
    groups: dict[str, dict[str, Any]] = Field(default_factory=dict)
    samples: dict[str, dict[str, int | None]] = Field(alias="n-samples")


class _LMEvalSettings(_Settings):
    tasks: list[str]


class _LMEvalRecord(_Record):
    config: _LMEvalSettings
    lm_eval: str
    presses: list[_LMEvalPress] = Field(min_length=1)


_SHAPES: dict[str, type[_Record]] = {FIDELITY: _FidelityRecord, RECALL: _RecallRecord, LM_EVAL: _LMEvalRecord}


@dataclass(frozen=True)
class Records:
    """Valid records, oldest first, and messages about invalid ones."""

    records: Sequence[dict[str, Any]]
    problems: Sequence[str] = ()

    def of(self, kind: str) -> list[dict[str, Any]]:
        """Return the records of one kind."""
        return [record for record in self.records if record["kind"] == kind]


def find_records(path: Path) -> dict[Path, dict[str, Any] | None]:
    """Return the records in a file, or directly in a folder, by file; None for a JSON file that is damaged.

    Raises:
        DataError: a file cannot be read.
    """
    files = sorted(path.glob("*.json")) if path.is_dir() else [path] if path.suffix == ".json" else []
    by_file: dict[Path, dict[str, Any] | None] = {}
    for file in files:
        try:
            value = json.loads(file.read_bytes())
        except (ValueError, RecursionError):
            by_file[file] = None
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from error
        else:
            if isinstance(value, dict) and value.get("kind") in _SHAPES:
                by_file[file] = value
    return by_file


def check_records(by_file: Mapping[Path, dict[str, Any] | None]) -> Records:
    """Return the valid records, each once, with a message for each invalid one."""
    records, problems = {}, []
    for file, value in by_file.items():
        fault = _fault(value)
        if fault:
            problems.append(f"{file}: {fault}; measure it again, or take the file away")
        elif value:
            records[value["run"]] = value
    return Records(sorted(records.values(), key=lambda record: str(record["date"])), problems)


def _fault(record: dict[str, Any] | None) -> str | None:
    """Return the fault of a record, or None if it is valid."""
    if record is None:
        return "not readable as JSON"
    try:
        json.dumps(record, ensure_ascii=False).encode()
        _SHAPES[record["kind"]].model_validate(record)
    except UnicodeEncodeError:
        return "text that no file can hold"
    except ValidationError as error:
        first, *further = error.errors()
        more = f", and {len(further)} more" if further else ""
        return f"{'.'.join(map(str, first['loc']))}: {first['msg']}{more}"
    return None
