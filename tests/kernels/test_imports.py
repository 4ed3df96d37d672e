# SPDX-License-Identifier: Apache-2.0
"""Arrows between the modules of the kernels point one way, wherever in a file an import stands."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import kvpress.kernels

ROOT = Path(kvpress.kernels.__file__).parent
PREFIX = "kvpress.kernels"


def modules() -> dict[str, Path]:
    names = {}
    for path in ROOT.rglob("*.py"):
        parts = path.relative_to(ROOT).with_suffix("").parts
        names[".".join([PREFIX, *(part for part in parts if part != "__init__")])] = path
    return names


def imports(path: Path, known: dict[str, Path]) -> set[str]:
    """Modules that a file imports anywhere: in functions and for type checkers too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in known else node.module for name in names}
    return {name for name in found if name in known}


def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: imports(path, known) for name, path in known.items()}


def test_there_is_no_cycle() -> None:
    assert len(list(TopologicalSorter(graph()).static_order())) == len(modules())  # raises CycleError


def test_no_module_imports_the_package_itself() -> None:
    for name, used in graph().items():
        assert PREFIX not in used, f"{name} imports {PREFIX}, which imports everything"


def test_contracts_formats_and_references_know_no_back_end() -> None:
    for name, used in graph().items():
        if name.endswith((".contract", ".reference")) or ".formats" in name:
            backends = [u for u in used if ".cpu" in u or ".triton" in u]
            assert not backends, f"{name} imports {backends}"


def test_only_the_dispatcher_chooses_back_ends() -> None:
    for name, used in graph().items():
        if name not in (PREFIX, f"{PREFIX}.dispatch"):
            assert f"{PREFIX}.dispatch" not in used, name
