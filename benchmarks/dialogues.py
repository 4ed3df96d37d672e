# SPDX-License-Identifier: Apache-2.0
"""Published dialogues with tool calls, read from installed packages whose code is never run.

bfcl: dialogues of the subset multi_turn_base of BFCL that call the tools of one system. The initial state of the system is a
first tool output, and each request of the user is followed by the published calls. Outputs of these calls are not published.

tau2: tasks of the airline in tau2-bench, from the copy in inspect-evals. The policy comes before the tools. The request is
`reason_for_call` and `known_info` of the scenario, which address the simulated user; other fields are left out. The published
actions follow as calls. The output of an action that reads a user or a reservation is this record of the published database,
as it is before any write. Outputs of searches, calculations and writes are not published; the next call follows at once.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvpress_eval.common.errors import DataError
from kvpress_eval.tasks.data_files import read_packaged, read_packaged_file
from kvpress_eval.tasks.kinds.bfcl import PACKAGE as BFCL

from kvpress.packages import DataPackage

_BFCL_DATA = "bfcl_eval/data"
_SUBSET = "BFCL_v4_multi_turn_base.json"
SYSTEMS = {
    "TradingBot": "trading_bot",
    "VehicleControlAPI": "vehicle_control",
    "GorillaFileSystem": "gorilla_file_system",
    "TravelAPI": "travel_booking",
}
"""File of the tools of each system of BFCL whose dialogues are used."""

TAU2 = DataPackage("inspect-evals", "0.28.0")
_TAU2_ROOT = "inspect_evals/tau2"
_AIRLINE_DATA = f"{_TAU2_ROOT}/data/domains/airline"
_TOOL_FILES = ("airline/tools.py", "common/tools.py")
_TYPE_FILE = "airline/data_model.py"
_TOOL_LIST = "all_airline_tools"
LOOKUPS = {"get_user_details": ("users", "user_id"), "get_reservation_details": ("reservations", "reservation_id")}
"""Table of the database and argument with the id, for each tool of the airline whose output is a record."""
MIN_ACTIONS = 3
"""Minimum actions of a task of tau2-bench that is used."""
MIN_RECORDS = 2
"""Minimum actions of such a task whose output is a record of the database."""

INSTRUCTION = (
    "You are an agent with these tools, described in JSON:\n<tools>\n{tools}\n</tools>\n"
    'Write each call as <tool_call>\n{{"name": NAME, "arguments": {{...}}}}\n</tool_call>.'
)
_PLAIN_TYPES = {"str": "string", "int": "integer", "float": "number", "bool": "boolean"}


@dataclass(frozen=True)
class Call:
    """Tool call."""

    name: str
    """Name of the tool."""
    arguments: dict[str, Any]
    """Value of each argument."""


@dataclass(frozen=True)
class Turn:
    """Messages to the agent, and the calls that it answers with."""

    messages: tuple[str, ...]
    """Texts of the user or of tool outputs."""
    calls: tuple[Call, ...]
    """Calls in one turn of the agent."""


@dataclass(frozen=True)
class Dialogue:
    """Dialogue with tool calls."""

    name: str
    """Id in its data set."""
    system: str
    """Text of the system turn."""
    turns: tuple[Turn, ...]
    """Turns in order."""


Dialogues = tuple[list[Dialogue], dict[str, str]]
"""Dialogues, and the origin of the file that lists them."""


def bfcl(count: int) -> Dialogues:
    """Return `count` dialogues of BFCL: the first of each system, then the second of each, and so on.

    Raises:
        DataError: the package or one of its files is missing.
    """
    questions, answers = (read_packaged(BFCL, f"{_BFCL_DATA}/{folder}{_SUBSET}") for folder in ("", "possible_answer/"))
    truths = {row["id"]: row["ground_truth"] for _, row in answers.rows}
    by_system: dict[str, list[Any]] = defaultdict(list)
    for _, row in questions.rows:
        if len(row["involved_classes"]) == 1 and row["involved_classes"][0] in SYSTEMS:
            by_system[row["involved_classes"][0]].append(row)
    tools = {name: _bfcl_tools(SYSTEMS[name]) for name in by_system}
    in_turn = itertools.chain(*itertools.zip_longest(*(by_system[name] for name in SYSTEMS if name in by_system)))
    rows = itertools.islice((row for row in in_turn if row is not None), count)
    return [_bfcl_dialogue(row, truths[row["id"]], tools[row["involved_classes"][0]]) for row in rows], questions.origin


def _bfcl_tools(file: str) -> list[dict[str, Any]]:
    """Return name, description and parameters of the tools of a system."""
    rows = read_packaged(BFCL, f"{_BFCL_DATA}/multi_turn_func_doc/{file}.json").rows
    return [
        {**{key: row[key] for key in ("name", "parameters")}, "description": row["description"].rpartition(": ")[2]}
        for _, row in rows
    ]


def _bfcl_dialogue(row: dict[str, Any], truth: Sequence[Sequence[str]], tools: Sequence[dict[str, Any]]) -> Dialogue:
    """Return a dialogue of BFCL; `truth` lists the calls of each request as Python code."""
    arguments = {tool["name"]: list(tool["parameters"]["properties"]) for tool in tools}
    unread = [_tool_output(next(iter(row["initial_config"].values())))]
    turns = []
    for messages, calls in zip(row["question"], truth, strict=True):
        if messages and calls:
            request = "\n".join(message["content"] for message in messages)
            turns.append(Turn((*unread, request), tuple(_parsed(call, arguments) for call in calls)))
            unread = []
    return Dialogue(row["id"], _system(tools), tuple(turns))


def _parsed(call: str, arguments: dict[str, list[str]]) -> Call:
    """Return a call in Python code; `arguments` lists the names of each tool's arguments."""
    node: Any = ast.parse(call, mode="eval").body
    name = node.func.id
    values = {key: ast.literal_eval(value) for key, value in zip(arguments[name], node.args, strict=False)}
    return Call(name, values | {item.arg: ast.literal_eval(item.value) for item in node.keywords})


def tau2(count: int) -> Dialogues:
    """Return `count` dialogues of the airline in tau2-bench: the first tasks, in the order of their file, that qualify.

    A task has at least three actions, and at least two of them read a record of the database.

    Raises:
        DataError: the package or one of its files is missing or has an unknown form.
    """
    tasks = read_packaged(TAU2, f"{_AIRLINE_DATA}/tasks.json")
    tables = read_packaged_file(TAU2, f"{_AIRLINE_DATA}/db.json.gz").content.value()
    policy = read_packaged_file(TAU2, f"{_AIRLINE_DATA}/policy.txt").content.raw.decode()
    system = f"{policy.strip()}\n\n{_system(_airline_tools())}"
    suitable = (_tau2_dialogue(task, system, tables) for _, task in tasks.rows if _is_suitable(task, tables))
    return list(itertools.islice(suitable, count)), tasks.origin


def _is_suitable(task: dict[str, Any], tables: Mapping[str, Any]) -> bool:
    actions = task["evaluation_criteria"]["actions"]
    records = sum(_record(action, tables) is not None for action in actions)
    return len(actions) >= MIN_ACTIONS and records >= MIN_RECORDS


def _tau2_dialogue(task: dict[str, Any], system: str, tables: Mapping[str, Any]) -> Dialogue:
    """Return a dialogue of tau2-bench; every action whose output is a record of the database ends a turn."""
    scenario = task["user_scenario"]["instructions"]
    messages = ["\n".join(filter(None, (scenario["reason_for_call"].strip(), scenario["known_info"])))]
    turns, calls = [], []
    for action in task["evaluation_criteria"]["actions"]:
        calls.append(Call(action["name"], action["arguments"]))
        record = _record(action, tables)
        if record is not None:
            turns.append(Turn(tuple(messages), tuple(calls)))
            messages, calls = [_tool_output(record)], []
    if calls:
        turns.append(Turn(tuple(messages), tuple(calls)))
    return Dialogue(task["id"], system, tuple(turns))


def _record(action: dict[str, Any], tables: Mapping[str, Any]) -> Any:
    """Return the record of the database that an action reads, or None."""
    if action["name"] not in LOOKUPS:
        return None
    table, argument = LOOKUPS[action["name"]]
    return tables[table].get(action["arguments"][argument])


def _airline_tools() -> list[dict[str, Any]]:
    """Return name, description and parameters of the airline's tools, from the source of their functions."""
    airline, common, types = (_parse_source(f"{_TAU2_ROOT}/{file}") for file in (*_TOOL_FILES, _TYPE_FILE))
    functions = {node.name: node for node in (*common.body, *airline.body) if isinstance(node, ast.FunctionDef)}
    definitions = {name: node for node in types.body for name in _defined_names(node)}
    names = [item.id for node in airline.body if _TOOL_LIST in _defined_names(node) for item in node.value.elts]
    return [_tool(functions[name], definitions) for name in names]


def _parse_source(file: str) -> Any:
    return ast.parse(read_packaged_file(TAU2, file).content.raw)


def _defined_names(node: Any) -> list[str]:
    """Return the names that a statement of a module defines."""
    targets = node.targets if isinstance(node, ast.Assign) else ()
    names = [target.id for target in targets if isinstance(target, ast.Name)]
    return [*names, node.name] if isinstance(node, ast.ClassDef) else names


def _tool(function: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool: a function that returns an inner one with arguments, types and a docstring."""
    inner = next(node for node in function.body if isinstance(node, ast.AsyncFunctionDef))
    description, *sections = re.split(r"\n\n(?=(?:Args|Returns|Raises):\n)", ast.get_docstring(inner) or "")
    arguments = next((section for section in sections if section.startswith("Args:")), "")
    items = re.split(r"^ {4}(?=\w+: )", arguments, flags=re.MULTILINE)[1:]
    descriptions = {name: " ".join(text.split()) for name, _, text in (item.partition(": ") for item in items)}
    properties = {
        item.arg: {**_schema(item.annotation, definitions), "description": descriptions[item.arg]}
        for item in inner.args.args
    }
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"name": function.name, "description": description, "parameters": parameters}


def _schema(node: Any, definitions: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of an annotation, with the first type of a union."""
    match node:
        case ast.BinOp(left=first):
            return _schema(first, definitions)
        case ast.Name(id=name) if name in _PLAIN_TYPES:
            return {"type": _PLAIN_TYPES[name]}
        case ast.Name(id=name) if name in definitions:
            return _schema(definitions[name], definitions)
        case ast.Assign(value=value):
            return _schema(value, definitions)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=values)):
            return {"type": "string", "enum": [ast.literal_eval(value) for value in values]}
        case ast.Subscript(value=ast.Name(id="list"), slice=item):
            return {"type": "array", "items": _schema(item, definitions)}
        case ast.ClassDef(body=body):
            fields = [field for field in body if isinstance(field, ast.AnnAssign)]
            names = {ast.unparse(field.target): _schema(field.annotation, definitions) for field in fields}
            return {"type": "object", "properties": names}
    raise DataError(f"{TAU2.distribution}: no JSON schema for the type {ast.unparse(node)}: {TAU2.command}")


def _system(tools: Sequence[dict[str, Any]]) -> str:
    return INSTRUCTION.format(tools="\n".join(map(json.dumps, tools)))


def _tool_output(value: Any) -> str:
    return f"<tool_response>\n{json.dumps(value)}\n</tool_response>"


LOADERS: dict[str, Callable[[int], Dialogues]] = {"bfcl": bfcl, "tau2": tau2}
"""Loader of each data set."""
