# SPDX-License-Identifier: Apache-2.0
"""HumanEval (Chen et al., 2021, arXiv:2107.03374) without running code: `human_eval`.

The score is the similarity to the published solution, as LongBench measures it for code. It is not pass@1: generated code is
never executed. The figure that measures a press is the paired difference from the full cache.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

from kvpress.packages import DataPackage
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import read_packaged
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

NAME = "human_eval"
PACKAGE = DataPackage("human-eval", "1.0.3")
FILE = "human_eval/data/HumanEval.jsonl.gz"
STOP = ("\nclass ", "\ndef ", "\n#", "\nif ", "\nprint(", "\n@")
"""Text after the end of a function."""
_ROOM = 256
"""Tokens of an answer; nearly all published solutions are shorter."""


def solution_similarity(text: str, answers: Sequence[str]) -> float:
    """Return the similarity of two function bodies in [0, 1], without blank lines and trailing spaces."""
    body, right = _lines(_body(text)), _lines(answers[0])
    if body == right:
        return 1.0
    return round(100 * difflib.SequenceMatcher(None, "\n".join(body), "\n".join(right), autojunk=False).ratio()) / 100


def _body(text: str) -> str:
    """Return the text up to the end of the function."""
    return text[: min((at for stop in STOP if (at := text.find(stop)) >= 0), default=len(text))]


def _lines(code: str) -> list[str]:
    return [line.rstrip() for line in code.split("\n") if line.strip()]


def documents() -> Iterator[str]:
    """Yield every program, as texts: the signature with its docstring, and the published solution.

    Raises:
        DataError: the package or its file is missing, or has another form.
    """
    for sample in _read()[0]:
        yield f"{sample.context}\n{sample.query.answers[0]}\n"


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    samples, origin = _read(request.samples)
    identity = {**origin, "stop": STOP}
    room = request.max_new_tokens or _ROOM
    return [Source(NAME, 0, [sample.id for sample in samples], lambda _: samples, identity, room)]


def _read(most: int | None = None) -> tuple[list[Sample], dict[str, str]]:
    """Return the first `most` samples, or all, and the origin of the file."""
    table = read_packaged(PACKAGE, FILE)
    samples = [_sample(row, place) for place, row in table.rows[:most]]
    if not samples:
        raise DataError(f"{FILE} of {PACKAGE.distribution} holds no problem")
    return samples, table.origin


def _sample(row: Any, place: str) -> Sample:
    match row:
        case {"task_id": str(name), "prompt": str(prompt), "canonical_solution": str(solution)}:
            # No chat template, as a program goes on. The last line break is generated: tokenizers join it with the indent.
            query = Query("", "", (solution,), solution_similarity, separator="", chat=False, stop=STOP)
            return Sample(f"{NAME}-{name.rpartition('/')[2]}", NAME, 0, prompt.rstrip("\n"), query)
    raise DataError(f"{place}: not a row of HumanEval: needs task_id, prompt and canonical_solution")


KIND = Kind((NAME,), _expand)
