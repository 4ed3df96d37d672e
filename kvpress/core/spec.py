# SPDX-License-Identifier: Apache-2.0
"""Presses as text and as plain data.

    spec  := path | term ("+" term)*
    term  := name [ "(" inner (";" inner)* ")" ] [ ":" argument ("," argument)* ] | "@" path
    inner := spec | name "=" spec
    argument := value | name "=" value

A bare value fills the first argument that is not itself a press: the ratio of a scorer, the bits of a codec. Presses in
parentheses fill the arguments that are presses: `adakv(snapkv:0.5)`, `prefill_decoding(snapkv:0.5; decoding(knorm))`,
`prefill_decoding(decoding_press=h2o:0.5)`.

A path is that of a YAML file that says `press: spec`, or holds what `press_to_dict` returns; its other keys are notes.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvpress.core.press import BasePress, ComposedPress
from kvpress.core.registry import Entry, entries, find, name_of, nearest

FILE, ENDINGS = "@", (".yaml", ".yml")
"""What a path begins with, and what it ends with where nothing stands before it."""
MOST_NESTED = 32
"""Parentheses of a spec inside one another; no wrapper needs more than a few."""


def get_press(spec: str | BasePress) -> BasePress:
    """Build a press from a spec such as `"adakv(expected_attention:0.6,epsilon=0.02) + kivi:bits=2 + quest:budget=1024"`.

    A press is returned as it is.
    `"best/press.yaml"` or `"@best/press.yaml"` reads it from a file, as `kvpress tune` writes it. Names ignore case, dashes and
    underscores. Unknown names are a `KeyError`, unknown or wrong arguments and files without a press a `ValueError` or
    `TypeError`; they name the nearest valid one.
    """
    if isinstance(spec, BasePress):
        return spec
    if not isinstance(spec, str):
        raise TypeError(f"a press is a press object or a spec such as 'snapkv:0.5', got {type(spec).__name__}")
    path = spec.strip().removeprefix(FILE)
    if path.endswith(ENDINGS) and not re.search(r"[@(=]", path):
        return _read_file(path)
    if (deepest := max(_depths(spec), default=0)) > MOST_NESTED:
        raise _too_deep(deepest, spec[:60])
    terms = _split(spec, "+")
    presses = [_parse_term(term.strip(), spec) for term in terms]
    return presses[0] if len(presses) == 1 else ComposedPress(presses)


def spelled_out(spec: str) -> str:
    """Return a spec with what files of presses hold in their place; as it is if it names none."""
    return to_spec(get_press(spec)) if FILE in spec or spec.strip().endswith(ENDINGS) else spec


def _read_file(path: str) -> BasePress:
    """Build the press that a file holds.

    Raises:
        ValueError: there is no such file, or it holds no press.
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read a press from {path}: {error}") from error
    held = data.get("press", data) if isinstance(data, dict) else data
    if isinstance(held, str) and FILE not in held and not held.strip().endswith(ENDINGS):
        return get_press(held)
    if isinstance(held, dict) and "name" in held:
        return press_from_dict(held)
    raise ValueError(
        f"{path} holds no press: expected a line such as `press: snapkv:0.5 + kivi:bits=4`, got {held!r:.80}"
    )


def _too_deep(depth: int, start: str) -> ValueError:
    return ValueError(
        f"presses may be nested at most {MOST_NESTED} deep, got {depth} in a spec that starts with {start!r}"
    )


def list_presses() -> list[Entry]:
    """Return all registered presses with their role and paper."""
    return entries()


def to_spec(press: BasePress) -> str:
    """Return the shortest spec that builds an equal press."""
    if isinstance(press, ComposedPress):
        return " + ".join(to_spec(part) for part in press.presses)
    inner, arguments = [], []
    skipped = False
    for item in dataclasses.fields(press):
        value = getattr(press, item.name)
        if isinstance(value, BasePress):
            inner.append(f"{item.name}={to_spec(value)}" if skipped else to_spec(value))
        elif _holds_press(item):
            skipped = True
        elif item.compare and value != _default(item):
            arguments.append(f"{item.name}={_format(value)}")
    text = name_of(type(press))
    if inner:
        text += f"({'; '.join(inner)})"
    return text + (":" + ",".join(arguments) if arguments else "")


def parts_of(press: BasePress) -> Iterator[BasePress]:
    """Yield a press and all presses inside it."""
    yield press
    for item in dataclasses.fields(press):
        value = getattr(press, item.name)
        for inner in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(inner, BasePress):
                yield from parts_of(inner)


def own_code(press: BasePress) -> str:
    """Return a digest of the modules that define parts of a press outside of this library; empty where there are none.

    Such parts have no version: a result that is kept is of the code that made it.
    """
    kinds = {type(part) for part in parts_of(press)}
    modules = sorted({kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] != "kvpress"})
    if not modules:
        return ""
    return hashlib.sha256("\0".join(map(_source_of, modules)).encode()).hexdigest()[:16]


def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # typed into a shell
        return module


def press_to_dict(press: BasePress) -> dict[str, Any]:
    """Return a press as plain data for YAML or JSON: its name, and what differs from the defaults."""
    data: dict[str, Any] = {"name": name_of(type(press))}
    for item in dataclasses.fields(press):
        value = getattr(press, item.name)
        if isinstance(value, BasePress):
            data[item.name] = press_to_dict(value)
        elif isinstance(press, ComposedPress):
            data[item.name] = [press_to_dict(part) for part in value]
        elif item.compare and value != _default(item):
            data[item.name] = list(value) if isinstance(value, tuple) else value
    return data


def press_from_dict(data: dict[str, Any]) -> BasePress:
    """Build a press from what `press_to_dict` returned."""
    depth, level = 0, [data]
    while level := [part for held in level for part in _parts(held)]:
        depth += 1
        if depth > MOST_NESTED:
            raise _too_deep(depth, str(data.get("name"))[:60])
    return _from_dict(data)


def _parts(data: Any) -> list[Any]:
    """Return the dictionaries right inside another one or its lists."""
    values = data.values() if isinstance(data, dict) else ()
    return [
        part for value in values for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict)
    ]


def _from_dict(data: Any) -> BasePress:
    if not isinstance(data, dict) or not isinstance(data.get("name"), str):
        raise ValueError(f"a press is written as {{'name': name, argument: value}}, got {data!r}")
    entry = find(data["name"])
    arguments = {}
    for name, value in data.items():
        if name == "name":
            continue
        if isinstance(value, dict):
            value = _from_dict(value)
        elif isinstance(value, list):
            value = [_from_dict(v) for v in value] if value and isinstance(value[0], dict) else tuple(value)
        arguments[name] = value
    return _build(entry, [], arguments, str(data))


def _parse_term(term: str, spec: str) -> BasePress:
    if term.startswith(FILE):
        return _read_file(term.removeprefix(FILE).strip())
    match = re.match(r"[A-Za-z][\w-]*", term)
    if match is None:
        raise ValueError(f"expected the name of a press at {term!r} in {spec!r}")
    entry = find(match.group())
    rest = term[match.end() :].strip()
    given: list[Any] = []
    named: dict[str, Any] = {}
    if rest.startswith("("):
        close = _closing(rest, spec)
        for part in _split(rest[1:close], ";"):
            _add(given, named, re.match(r"\s*(\w+)\s*=(.*)", part, re.DOTALL), part, get_press, spec)
        rest = rest[close + 1 :].strip()
    if rest:
        if not rest.startswith(":"):
            raise ValueError(f"expected ':' before the arguments of {match.group()!r}, got {rest!r} in {spec!r}")
        presses, arguments = len(named), _split(rest[1:], ",")
        for argument in arguments:
            if not argument.strip():
                raise ValueError(f"an argument of {match.group()!r} is empty in {spec!r}")
            if "=" not in argument and len(named) > presses:
                raise ValueError(f"a bare value must come before named arguments: {argument.strip()!r} in {spec!r}")
            _add(given, named, re.match(r"([^=]*)=(.*)", argument, re.DOTALL), argument, _value, spec)
    return _build(entry, given, named, spec)


def _add(
    given: list[Any],
    named: dict[str, Any],
    match: re.Match[str] | None,
    text: str,
    read: Callable[[str], Any],
    spec: str,
) -> None:
    """Read `name = value` into `named`, or a bare value into `given`."""
    if match is None:
        given.append(read(text.strip()))
        return
    name, value = (part.strip() for part in match.groups())
    if name in named:
        raise _twice(name, spec)
    named[name] = read(value)


def _twice(name: str, spec: str) -> ValueError:
    return ValueError(f"{name} is given twice in {spec!r}")


def _build(entry: Entry, given: list[Any], named: dict[str, Any], spec: str) -> BasePress:
    items = [item for item in dataclasses.fields(entry.press) if item.init]
    known = [item.name for item in items]
    for name in named:
        if name not in known:
            allowed = ", ".join(known) or "none"
            raise ValueError(f"{entry.name} has no argument {name!r}{nearest(name, known)}; it takes: {allowed}")
    presses = (item.name for item in items if _holds_press(item))
    plain = (item.name for item in items if not _holds_press(item) and not item.kw_only)
    free = {True: presses, False: plain}
    for value in given:
        name = next(free[isinstance(value, BasePress)], "")
        if not name:
            raise ValueError(f"{entry.name} takes no further argument, got {value!r} in {spec!r}")
        if name in named:
            raise _twice(name, spec)
        named[name] = value
    missing = [item.name for item in items if item.name not in named and _required(item)]
    if missing:
        raise ValueError(f"{entry.name} needs {missing[0]}: write {entry.name}(snapkv:0.5), for example; got {spec!r}")
    press: BasePress = entry.press(**named)
    return press


def _holds_press(item: dataclasses.Field[Any]) -> bool:
    return "Press" in str(item.type) and "list" not in str(item.type)


def _required(item: dataclasses.Field[Any]) -> bool:
    return item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING


def _default(item: dataclasses.Field[Any]) -> Any:
    return item.default_factory() if item.default_factory is not dataclasses.MISSING else item.default


def _value(text: str) -> Any:
    """Read a value: a number, true, false, none, a tuple in parentheses, or text."""
    constants = {"true": True, "false": False, "none": None}
    if text.lower() in constants:
        return constants[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        return text


def _format(value: Any) -> str:
    if isinstance(value, tuple):
        return "(" + ",".join(_format(item) for item in value) + ("," if len(value) == 1 else "") + ")"
    return str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _split(text: str, separator: str) -> list[str]:
    """Split at a separator outside parentheses."""
    parts, start = [], 0
    for i, (char, depth) in enumerate(zip(text, _depths(text), strict=True)):
        exponent = char == "+" and re.search(r"\de$", text[:i]) is not None
        if char == separator and depth == 0 and not exponent:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]]


def _closing(text: str, spec: str) -> int:
    depths = _depths(text)
    if 0 not in depths:
        raise ValueError(f"a parenthesis is not closed in {spec!r}")
    return depths.index(0)


def _depths(text: str) -> list[int]:
    """How many parentheses are open after each character."""
    return list(accumulate((char == "(") - (char == ")") for char in text))
