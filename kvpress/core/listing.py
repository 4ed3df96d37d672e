# SPDX-License-Identifier: Apache-2.0
"""Table of presses for `kvpress list`, parsed from source files: importing the presses would import torch, which is slow.

The arguments of `register` and the docstring below it are literals; a test compares the table with the registry.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from kvpress.core.registry import GROUP, ORDER, PACKAGES, default_status, entries, registered


@dataclass(frozen=True)
class ListedPress:
    """Row of the table of presses."""

    name: str
    """Public name."""
    role: str
    """Role, one of `ORDER`."""
    paper: str
    """Paper that the press implements."""
    summary: str
    """First line of the docstring."""
    status: str
    """Evidence for the press, one of `kvpress.core.registry.STATUSES`."""


def listed() -> list[ListedPress]:
    """Return all presses by role and name, in the order of `kvpress.list_presses`.

    Imports all presses if other packages add some, or if any module with presses was imported before.
    """
    if registered() or entry_points(group=GROUP):
        return [ListedPress(entry.name, entry.role, entry.paper, entry.summary, entry.status) for entry in entries()]
    rows = [line for package in PACKAGES for path in files_of(package) for line in _read(path)]
    return sorted(rows, key=lambda line: (ORDER.index(line.role), line.name))


def files_of(package: str) -> list[Path]:
    """Return the files of the modules directly in a package, without importing it."""
    root, *rooms = package.split(".")
    spec = importlib.util.find_spec(root)
    folders = [] if spec is None else spec.submodule_search_locations or []
    return [path for folder in folders for path in sorted(Path(folder, *rooms).glob("*.py"))]


def _read(path: Path) -> Iterator[ListedPress]:
    """Yield the presses that a file registers: classes decorated with `@register(...)`, and names in `register(...)(name)`."""
    text = path.read_text(encoding="utf-8")
    if "register(" not in text:
        return
    body = ast.parse(text).body
    for node in body:
        if isinstance(node, ast.ClassDef):
            for call in filter(_is_register, node.decorator_list):
                yield _line(call, node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) and _is_register(node.value.func):
            yield _line(node.value.func, _imported(ast.unparse(node.value.args[0]), body))


def _is_register(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "register"


def _imported(name: str, body: list[ast.stmt]) -> ast.ClassDef:
    """Return the definition of a class that a file imports."""
    module = next(
        node.module or ""
        for node in body
        if isinstance(node, ast.ImportFrom) and name in [alias.name for alias in node.names]
    )
    package, _, stem = module.rpartition(".")
    (path,) = (path for path in files_of(package) if path.stem == stem)
    classes = (node for node in ast.parse(path.read_text(encoding="utf-8")).body if isinstance(node, ast.ClassDef))
    return next(node for node in classes if node.name == name)


def _line(call: ast.expr, press: ast.ClassDef) -> ListedPress:
    """Return the row of a press, from the call that registers it and its class."""
    assert isinstance(call, ast.Call)  # noqa: S101 - for type checkers
    arguments = dict(zip(("name", "role", "paper"), call.args, strict=False)) | {
        word.arg: word.value for word in call.keywords
    }
    name, role, paper, status = (
        ast.literal_eval(arguments[key]) if key in arguments else "" for key in ("name", "role", "paper", "status")
    )
    summary = (ast.get_docstring(press) or "").partition("\n")[0]
    return ListedPress(name, role, paper, summary, status or default_status(paper))
