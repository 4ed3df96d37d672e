# SPDX-License-Identifier: Apache-2.0
"""Table of calibration methods for `kvpress calibrate`, parsed from source files: importing the methods would import torch.

Defaults and names are literals in the sources; a test compares the table with the classes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

from kvpress.core.listing import files_of

PACKAGE = "kvpress.calibrate"


@dataclass(frozen=True)
class ListedSetting:
    """Setting of a calibration method: a field of its settings class."""

    name: str
    """Name of the field."""
    default: Any
    """Default value; its type is that of the setting."""
    help: str
    """Docstring of the field, of a base class if the class itself gives none."""
    choices: tuple[str, ...] = ()
    """Allowed values of a `Literal`; empty for all other types."""


@dataclass(frozen=True)
class ListedMethod:
    """Row of the table of calibration methods."""

    name: str
    """Name of the method, the subcommand of `kvpress calibrate`."""
    summary: str
    """First line of the docstring."""
    description: str
    """Next paragraphs of the docstring, up to its first formula or its paper."""
    settings: tuple[ListedSetting, ...]
    """Settings, those of base classes first."""


@dataclass(frozen=True)
class _Source:
    """Class definition and the file that has it."""

    node: ast.ClassDef
    module: ast.Module


def listed_methods() -> dict[str, ListedMethod]:
    """Return every calibration method by its name, in alphabetical order."""
    modules = [ast.parse(path.read_text(encoding="utf-8")) for path in files_of(PACKAGE)]
    sources = {
        node.name: _Source(node, module) for module in modules for node in module.body if isinstance(node, ast.ClassDef)
    }
    named = {
        _constant(field.value, source.module): source
        for source in sources.values()
        for field in source.node.body
        if isinstance(field, ast.AnnAssign) and ast.unparse(field.target) == "method" and field.value is not None
    }
    return {name: _method(name, named[name], sources) for name in sorted(named)}


def _method(name: str, source: _Source, sources: dict[str, _Source]) -> ListedMethod:
    summary, _, body = (ast.get_docstring(source.node) or "").partition("\n")
    before_formula = takewhile(
        lambda text: not text.startswith((" ", "Paper:", "After ", "Differs from")),
        re.split(r"\n\s*\n", body.strip("\n")),
    )
    paragraphs = [" ".join(text.split()) for text in before_formula if text]
    settings: dict[str, ListedSetting] = {}
    for node in reversed(list(_lineage(source.node, sources))):
        for setting, has_default in _settings(node):
            base = settings.get(setting.name)
            default = setting.default if has_default or base is None else base.default
            about = setting.help or (base.help if base else "")
            settings[setting.name] = ListedSetting(setting.name, default, about, setting.choices)
    return ListedMethod(name, summary, "\n\n".join(paragraphs), tuple(settings.values()))


def _lineage(node: ast.ClassDef, sources: dict[str, _Source]) -> Iterator[ast.ClassDef]:
    """Yield a class and its bases in this package, nearest first; these classes have one base each."""
    yield node
    for base in node.bases:
        if (source := sources.get(ast.unparse(base))) is not None:
            yield from _lineage(source.node, sources)


def _settings(node: ast.ClassDef) -> Iterator[tuple[ListedSetting, bool]]:
    """Yield the fields that a class body declares, and whether it gives a default."""
    for field, following in zip(node.body, [*node.body[1:], None], strict=True):
        if not isinstance(field, ast.AnnAssign) or ast.unparse(field.annotation).startswith("ClassVar"):
            continue
        about = ""
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            about = " ".join(str(following.value.value).split())
        choices: tuple[str, ...] = ()
        if isinstance(field.annotation, ast.Subscript) and ast.unparse(field.annotation.value) == "Literal":
            choices = tuple(ast.literal_eval(field.annotation.slice))
        default = None if field.value is None else ast.literal_eval(field.value)
        yield ListedSetting(ast.unparse(field.target), default, about, choices), field.value is not None


def _constant(node: ast.expr, module: ast.Module) -> str:
    """Return the text of a literal, or of a constant that a module defines or imports."""
    if not isinstance(node, ast.Name):
        return str(ast.literal_eval(node))
    for statement in module.body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            assigned = dict(_assigned(statement.targets[0], statement.value))
            if node.id in assigned:
                return _constant(assigned[node.id], module)
        if isinstance(statement, ast.ImportFrom) and node.id in [alias.name for alias in statement.names]:
            package, _, stem = (statement.module or "").rpartition(".")
            return _constant(node, ast.parse(_file(package, stem).read_text(encoding="utf-8")))
    raise LookupError(f"no constant {node.id} in the module")


def _assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that an assignment sets, also in a tuple, with their values."""
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for name, item in zip(target.elts, value.elts, strict=True):
            yield ast.unparse(name), item
    else:
        yield ast.unparse(target), value


def _file(package: str, stem: str) -> Path:
    (path,) = (path for path in files_of(package) if path.stem == stem)
    return path
