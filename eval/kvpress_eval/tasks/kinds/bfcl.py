# SPDX-License-Identifier: Apache-2.0
"""Berkeley Function Calling Leaderboard (BFCL, Patil et al., 2025) as tasks: `bfcl` and `bfcl:SUBSET`.

The descriptions of the functions are compressed, and the request follows. The answer is a JSON list of calls. Prompt and score
are ours: every name, argument, value and type must be exact, and calls of one request may come in any order.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvpress.packages import DataPackage
from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import read_packaged
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

PACKAGE = DataPackage("bfcl-eval", "2026.3.23")
_DATA = "bfcl_eval/data"
PLAIN = ("simple_python", "multiple", "parallel", "parallel_multiple")
"""Subsets with one turn and generated functions, which `bfcl` is made of."""
LIVE = ("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple")
"""Subsets with one turn and functions of users."""
ALL = "bfcl"
_BEFORE = "You can call these functions, described in JSON:\n"
_AFTER = (
    '\n\n{request}\nReply with a JSON list of the calls that this needs, each as {{"name": NAME, "arguments": {{...}}}}, and '
    "with nothing else.\n"
)
_ROOM = 384
_OPTIONAL = ""
"""Published value of an argument that may be left out."""
_MOST = 20_000
"""Maximum characters of an answer that is parsed as JSON."""


def same_calls(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first JSON value of a text is the calls of the answer, else 0.

    Text before and after the value is ignored, such as a fence. An integer may stand for a number with decimals.
    """
    calls = _parse(text)
    expected = json.loads(answers[0])
    return float(calls is not None and len(calls) == len(expected) and _pair(calls, expected))


def _parse(text: str) -> list[Any] | None:
    starts = [at for mark in "[{" if (at := text.find(mark)) >= 0]
    if not starts or len(text) > _MOST:
        return None
    try:
        value, _ = json.JSONDecoder().raw_decode(text[min(starts) :])
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, list) else [value]


def _pair(calls: list[Any], expected: list[Any]) -> bool:
    """Return whether each call matches another expected call."""
    if not calls:
        return True
    return any(
        _is_call(calls[0], right) and _pair(calls[1:], expected[:at] + expected[at + 1 :])
        for at, right in enumerate(expected)
    )


def _is_call(call: Any, expected: Mapping[str, Any]) -> bool:
    match call:
        case {"name": str(name), "arguments": dict(arguments), **others} if not others:
            return name in expected and _has_arguments(arguments, expected[name])
    return False


def _has_arguments(arguments: Mapping[str, Any], expected: Mapping[str, Any]) -> bool:
    """Return whether each argument has one of its allowed values, and every missing one is optional."""
    return arguments.keys() <= expected.keys() and all(
        any(_equal(arguments[name], value) for value in values) if name in arguments else _OPTIONAL in values
        for name, values in ((name, _values(allowed)) for name, allowed in expected.items())
    )


def _values(allowed: Any) -> list[Any]:
    """Return the allowed values of an argument; inside dictionaries, a single one is published without a list."""
    return allowed if isinstance(allowed, list) else [allowed]


def _equal(value: Any, right: Any) -> bool:
    """Return whether a value is the right one; a published dictionary has a list of allowed values for each key."""
    if isinstance(right, dict):
        return isinstance(value, dict) and _has_arguments(value, right)
    if isinstance(right, list):
        return (
            isinstance(value, list)
            and len(value) == len(right)
            and all(_equal(item, allowed) for item, allowed in zip(value, right, strict=True))
        )
    if isinstance(value, bool) or isinstance(right, bool):
        return value is right
    if isinstance(value, (int, float)) and isinstance(right, (int, float)):
        return value == right
    return type(value) is type(right) and bool(value == right)


def documents() -> Iterator[str]:
    """Yield every prompt of `bfcl` with a right answer, as texts: the first value that is allowed for each argument.

    Raises:
        DataError: the package or a file of it is missing, or has another form.
    """
    for subset in PLAIN:
        for sample in _read(subset)[0]:
            calls = [
                {"name": name, "arguments": _first_values(arguments)}
                for call in json.loads(sample.query.answers[0])
                for name, arguments in call.items()
            ]
            yield f"{sample.context}{sample.query.question}{json.dumps(calls, ensure_ascii=False)}\n"


def _first_values(expected: Mapping[str, Any]) -> dict[str, Any]:
    """Return the first allowed value of each argument that may not be left out."""
    allowed = {name: _values(values) for name, values in expected.items()}
    return {name: _plain(values[0]) for name, values in allowed.items() if _OPTIONAL not in values}


def _plain(right: Any) -> Any:
    """Return a right value without the lists of allowed values that published dictionaries have."""
    if isinstance(right, dict):
        return _first_values(right)
    return [_plain(item) for item in right] if isinstance(right, list) else right


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    return [
        _source(subset, request) for name in names for subset in (PLAIN if name == ALL else [name.partition(":")[2]])
    ]


def _source(subset: str, request: TaskSettings) -> Source:
    samples, origin = _read(subset, request.samples)
    identity = {**origin, "template": _BEFORE + "{functions}" + _AFTER}
    room = request.max_new_tokens or _ROOM
    return Source(f"bfcl:{subset}", 0, [sample.id for sample in samples], lambda _: samples, identity, room)


def _read(subset: str, most: int | None = None) -> tuple[list[Sample], dict[str, str]]:
    """Return the first `most` samples of a subset, or all, and the origin of both files."""
    questions, answers = (
        read_packaged(PACKAGE, f"{_DATA}/{folder}BFCL_v4_{subset}.json") for folder in ("", "possible_answer/")
    )
    truths = dict(_answer(row, place) for place, row in answers.rows)
    samples = [_sample(subset, row, place, truths) for place, row in questions.rows[:most]]
    if not samples:
        raise DataError(f"bfcl:{subset}: {PACKAGE.distribution} holds no question")
    return samples, {**questions.origin, "answers": answers.origin["sha256"]}


def _answer(row: Any, place: str) -> tuple[str, str]:
    match row:
        case {"id": str(name), "ground_truth": [*calls]} if calls and all(isinstance(call, dict) for call in calls):
            return name, json.dumps(calls)
    raise DataError(f"{place}: not an answer of BFCL: needs id and ground_truth, a list of calls")


def _sample(subset: str, row: Any, place: str, truths: Mapping[str, str]) -> Sample:
    match row:
        case {"id": str(name), "question": [[*messages]], "function": [*functions]} if messages and functions:
            if name not in truths:
                raise DataError(f"{place}: {name} has no answer")
            request = "\n".join(str(message["content"]) for message in messages)
            context = _BEFORE + "\n".join(json.dumps(function, ensure_ascii=False) for function in functions)
            query = Query(_AFTER.format(request=request), "", (truths[name],), same_calls, separator="")
            return Sample(f"bfcl-{name}", f"bfcl:{subset}", 0, context, query)
    raise DataError(f"{place}: not a question of BFCL with one turn: needs id, question and function")


KIND = Kind((ALL, *(f"bfcl:{subset}" for subset in (*PLAIN, *LIVE))), _expand)
