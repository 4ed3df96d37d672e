# SPDX-License-Identifier: Apache-2.0
"""Imports between the modules of the kernels go one way, also those inside functions."""

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


def imports(path: Path, paths: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports anywhere: also in functions and for type checkers."""
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported |= {name if name in paths else node.module for name in names}
    return {name for name in imported if name in paths}


def graph() -> dict[str, set[str]]:
    paths = modules()
    return {name: imports(path, paths) for name, path in paths.items()}


def test_there_is_no_cycle() -> None:
    assert len(list(TopologicalSorter(graph()).static_order())) == len(modules())  # a cycle raises CycleError


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
