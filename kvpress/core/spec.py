# SPDX-License-Identifier: Apache-2.0
"""Presses as text and as plain data.

    spec  := path | term ("+" term)*
    term  := name [ "(" inner (";" inner)* ")" ] [ ":" argument ("," argument)* ] | "@" path
    inner := spec | name "=" spec
    argument := value | name "=" value

A bare value fills the first argument that is not itself a press: the ratio of a scorer, the bits of a codec. Presses in
parentheses fill the arguments that are presses: `adakv(snapkv:0.5)`, `prefill_decoding(snapkv:0.5; decoding(knorm))`,
`prefill_decoding(decoding_press=h2o:0.5)`.

A path names a YAML file with the key `press` and a spec as its value, or with the data that `press_to_dict` returns; other
keys are ignored.
"""

from __future__ import annotations

import ast
import dataclasses
import hashlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from kvpress.core.press import BasePress, ComposedPress, parts_of
from kvpress.core.registry import NAME, Entry, entries, find, name_of, nearest

FILE, ENDINGS = "@", (".yaml", ".yml")
"""Prefix of a path, and file name endings of a path without the prefix."""
TENSORS = (".safetensors", ".json", ".pt", ".pth", ".tsv")
"""File name endings of the files that a press reads from a folder."""
MOST_NESTED = 32
"""Deepest nesting of parentheses in a spec; real specs need a few levels."""


def get_press(spec: str | BasePress) -> BasePress:
    """Build a press from a spec such as `"adakv(expected_attention:0.6,epsilon=0.02) + kivi:bits=2 + quest:budget=1024"`.

    A press is returned unchanged. `"best/press.yaml"` or `"@best/press.yaml"` reads a file such as `kvpress tune` writes. Names
    ignore case, dashes and underscores.

    Raises:
        KeyError: no press has the name; the message suggests the nearest one.
        ValueError, TypeError: an argument is unknown or not allowed, or a file holds no press.
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
    """Return a spec with the paths of files replaced by the presses in them; unchanged if it has no path."""
    return to_spec(get_press(spec)) if FILE in spec or spec.strip().endswith(ENDINGS) else spec


def _read_file(path: str) -> BasePress:
    """Build the press that a file holds.

    Raises:
        ValueError: the file cannot be read, or holds no press.
    """
    import yaml

    try:
        data = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"cannot read a press from {path}: {error}") from error
    content = data.get("press", data) if isinstance(data, dict) else data
    if isinstance(content, str) and FILE not in content and not content.strip().endswith(ENDINGS):
        return get_press(content)
    if isinstance(content, dict) and "name" in content:
        return press_from_dict(content)
    raise ValueError(
        f"{path} holds no press: expected a line such as `press: snapkv:0.5 + kivi:bits=4`, got {content!r:.80}"
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
        return " + ".join(to_spec(item) for item in press.presses)
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


def own_code(press: BasePress) -> str:
    """Return a digest of the source of all modules outside of this library that define a press or its parts; empty for none.

    User code has no version, so stored results are matched by the digest of the code that made them.
    """
    return code_of({type(item) for item in parts_of(press)})


def code_of(kinds: Iterable[type[Any]]) -> str:
    """Return a digest of the source of the modules outside of this library that define classes; empty for none."""
    modules = sorted({kind.__module__ for kind in kinds if kind.__module__.partition(".")[0] != "kvpress"})
    if not modules:
        return ""
    return hashlib.sha256("\0".join(map(_source_of, modules)).encode()).hexdigest()[:16]


def own_digest(press: BasePress) -> str:
    """Return a digest of the user's code and files that decide a press besides its spec; empty for none.

    Code and files may change under the same spec, so stored results are matched by this digest.
    """
    code, files = own_code(press), files_of(press)
    return hashlib.sha256("\0".join([code, *files]).encode()).hexdigest()[:16] if files else code


def files_of(press: BasePress) -> list[str]:
    """Return digests of the files that the settings of a press name; of a folder, those of its tensors and JSON files."""
    settings = (value for part in parts_of(press) for value in vars(part).values())
    values = [item for value in settings for item in (value if isinstance(value, (list, tuple)) else (value,))]
    return [digest for value in values if isinstance(value, str) for digest in _digests_at(value)]


def _digests_at(place: str) -> Iterator[str]:
    path = Path(place)
    try:
        if "." in place and path.is_file():
            paths = [path]
        else:
            paths = [file for file in sorted(path.glob("*.*")) if file.suffix in TENSORS] if path.is_dir() else []
    except (OSError, ValueError):  # text that is no path
        return
    for file in paths:
        with file.open("rb") as content:
            yield hashlib.file_digest(content, "sha256").hexdigest()


def _source_of(module: str) -> str:
    try:
        return inspect.getsource(sys.modules[module])
    except (KeyError, OSError, TypeError):  # code of an interactive session has no file
        return module


def press_to_dict(press: BasePress) -> dict[str, Any]:
    """Return a press as plain data for YAML or JSON: its name, and the arguments that differ from the defaults."""
    data: dict[str, Any] = {"name": name_of(type(press))}
    for item in dataclasses.fields(press):
        value = getattr(press, item.name)
        if isinstance(value, BasePress):
            data[item.name] = press_to_dict(value)
        elif isinstance(press, ComposedPress):
            data[item.name] = [press_to_dict(item) for item in value]
        elif item.compare and value != _default(item):
            data[item.name] = list(value) if isinstance(value, tuple) else value
    return data


def press_from_dict(data: dict[str, Any]) -> BasePress:
    """Build a press from data that `press_to_dict` returned.

    Raises:
        KeyError, ValueError, TypeError: as `get_press`.
    """
    depth, level = 0, [data]
    while level := [inner for outer in level for inner in _inner_dicts(outer)]:
        depth += 1
        if depth > MOST_NESTED:
            raise _too_deep(depth, str(data.get("name"))[:60])
    return _from_dict(data)


def _inner_dicts(data: Any) -> list[Any]:
    """Return the dictionaries one level inside a dictionary, those in its lists included."""
    values = data.values() if isinstance(data, dict) else ()
    return [
        item for value in values for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)
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
    match = re.match(NAME, term)
    if match is None:
        raise ValueError(f"expected the name of a press at {term!r} in {spec!r}")
    entry = find(match.group())
    tail = term[match.end() :].strip()
    positional: list[Any] = []
    named: dict[str, Any] = {}
    if tail.startswith("("):
        close = _closing(tail, spec)
        for inner in _split(tail[1:close], ";"):
            _add(positional, named, re.match(r"\s*(\w+)\s*=(.*)", inner, re.DOTALL), inner, get_press, spec)
        tail = tail[close + 1 :].strip()
    if tail:
        if not tail.startswith(":"):
            raise ValueError(f"expected ':' before the arguments of {match.group()!r}, got {tail!r} in {spec!r}")
        presses, arguments = len(named), _split(tail[1:], ",")
        for argument in arguments:
            if not argument.strip():
                raise ValueError(f"an argument of {match.group()!r} is empty in {spec!r}")
            if "=" not in argument and len(named) > presses:
                raise ValueError(f"a bare value must come before named arguments: {argument.strip()!r} in {spec!r}")
            _add(positional, named, re.match(r"([^=]*)=(.*)", argument, re.DOTALL), argument, _value, spec)
    return _build(entry, positional, named, spec)


def _add(
    positional: list[Any],
    named: dict[str, Any],
    match: re.Match[str] | None,
    text: str,
    read: Callable[[str], Any],
    spec: str,
) -> None:
    """Read `name = value` into `named`, or a bare value into `positional`."""
    if match is None:
        positional.append(read(text.strip()))
        return
    name, value = (text.strip() for text in match.groups())
    if name in named:
        raise _twice(name, spec)
    named[name] = read(value)


def _twice(name: str, spec: str) -> ValueError:
    return ValueError(f"{name} is given twice in {spec!r}")


def _build(entry: Entry, positional: list[Any], named: dict[str, Any], spec: str) -> BasePress:
    items = [item for item in dataclasses.fields(entry.press) if item.init]
    names = [item.name for item in items]
    for name in named:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise ValueError(f"{entry.name} has no argument {name!r}{nearest(name, names)}; it takes: {allowed}")
    presses = (item.name for item in items if _holds_press(item))
    plain = (item.name for item in items if not _holds_press(item) and not item.kw_only)
    free = {True: presses, False: plain}
    for value in positional:
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
    """Return the number of open parentheses after each character."""
    return list(accumulate((char == "(") - (char == ")") for char in text))
