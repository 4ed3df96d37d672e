# SPDX-License-Identifier: Apache-2.0
r"""Mathematical problems with long answers that end in \boxed{...}: `math500`, `aime24` and `aime25`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.tasks.data_files import HubFile, read_published
from kvpress_eval.tasks.judge import judge
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

_BOX = "\\boxed"
TEMPLATE = "{problem}\n\nThink step by step, and put the final answer in \\boxed{{}}.\n"


def boxed(text: str) -> str | None:
    r"""Return the content of the last \boxed{...} with balanced braces in a text; None if there is none."""
    for start in reversed([match.end() for match in re.finditer(re.escape(_BOX) + r"\s*\{", text)]):
        depth = 1
        for at in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[at], 0)
            if not depth:
                return text[start:at]
    return None


def same_integer(text: str, answers: Sequence[str]) -> float:
    r"""Return 1 if the box holds the integer of an AIME problem, 0 to 999; leading zeros make no difference.

    Spaces, dollar signs, commas between thousands, \text and a full stop around the number are ignored.
    """
    content = boxed(text)
    if content is None:
        return 0.0
    unwrapped = re.sub(r"\\text\s*\{([^{}]*)\}", r"\1", content).replace("{,}", ",")
    plain = re.sub(r"\\[,!; ]|[\s$]", "", unwrapped).strip(".")
    number = re.fullmatch(r"\d{1,3}(?:,\d{3}){0,3}|\d{1,9}", plain)
    return float(number is not None and int(plain.replace(",", "")) == int(answers[0]))


def equivalent(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the final answer is mathematically equal to the right one, by the package math-verify.

    An answer that exceeds the timeout is wrong.
    """
    return float(judge(answers[0], text))


@dataclass(frozen=True)
class MathProblems:
    """Set of problems."""

    file: HubFile
    """File with the problems."""
    score: Callable[[str, Sequence[str]], float]
    """Compares an answer with the right one."""
    max_new_tokens: int
    """Maximum tokens of an answer."""


_FORM = "rows with problem and answer"
SETS: Mapping[str, MathProblems] = {
    "math500": MathProblems(
        HubFile(
            ("math500.jsonl",), _FORM, "HuggingFaceH4/MATH-500", "6e4ed1a2a79af7d8630a6b768ec859cb5af4d3be", "test.jsonl",
            "35dc41080a3680858b27fa7e0533d2d547825316fc5dafe5d316f4ccc5a06132",
        ),
        equivalent,
        4096,
    ),
    "aime24": MathProblems(
        HubFile(
            ("aime24.jsonl", "aime24.parquet"), _FORM, "HuggingFaceH4/aime_2024",
            "2fe88a2f1091d5048c0f36abc874fb997b3dd99a", "data/train-00000-of-00001.parquet",
            "26139847601a5037c237d5928b195e7260ca8074cf4f264b794af42847f79ccf",
        ),
        same_integer,
        16384,
    ),
    "aime25": MathProblems(
        HubFile(
            ("aime25.jsonl",), _FORM, "math-ai/aime25", "563bb8404243c5f09de6ec262f2db674fe5bce9b", "test.jsonl",
            "b4e273c02d3e7fe1b74b59eae768fc8230bfb0f79539890cb56f4361caac0331",
        ),
        same_integer,
        16384,
    ),
}  # fmt: skip


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    return [_source(name, SETS[name], request) for name in names]


def _source(name: str, problems: MathProblems, request: TaskSettings) -> Source:
    if problems.score is equivalent and importlib.util.find_spec("math_verify") is None:
        raise ConfigError(f"{name} is scored by math-verify: pip install 'kvpress-toolkit[benchmarks]'")
    content = read_published(problems.file, request.data_dir)
    pairs = [_problem(row, place, problems) for place, row in content.rows()]
    if not pairs:
        raise DataError(f"{content.where} holds no problem")
    samples = [
        Sample(
            f"{name}-{index}",
            name,
            0,
            TEMPLATE.format(problem=problem),
            Query("", "", (answer,), problems.score, separator=""),
        )
        for index, (problem, answer) in enumerate(pairs[: request.samples])
    ]
    identity = {"problems": content.sha256, "template": TEMPLATE}
    room = request.max_new_tokens or problems.max_new_tokens
    return Source(name, 0, [sample.id for sample in samples], lambda _: samples, identity, room)


def _problem(row: Any, place: str, problems: MathProblems) -> tuple[str, str]:
    match row:
        case {"problem": str(problem), "answer": str() | int() as answer}:
            if problems.score is not same_integer or re.fullmatch(r"\d{1,3}", str(answer)):
                return problem, str(answer)
            raise DataError(f"{place}: the answer of an AIME problem is an integer of up to 3 digits, got {answer!r}")
    raise DataError(f"{place}: not a problem: needs problem and answer")


KIND = Kind(SETS, _expand)
