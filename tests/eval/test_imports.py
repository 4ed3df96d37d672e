# SPDX-License-Identifier: Apache-2.0
"""Imports within the harness point to lower steps only, and the library does not import the harness.

Imports count in functions and for type checkers too. A package whose modules are found by their files counts as imported
whole where they are looked up.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import kvpress_eval
import pytest

import kvpress

HARNESS, LIBRARY = (Path(str(package.__file__)).parent for package in (kvpress_eval, kvpress))
RANKS = (
    {"common"},
    {"tasks", "results"},
    {"config"},
    {"run"},
    {"fidelity", "lm", "report", "serve", "tuning"},
    {"recall"},
    {"commands"},
    {"console", "__init__"},
)
"""Modules of a step import only that step and the steps below."""
USED = {
    "kvpress.atomic",
    "kvpress", "kvpress.cache.attention", "kvpress.cache.files", "kvpress.cache.report", "kvpress.calibrate.corpus",
    "kvpress.cli", "kvpress.cli.outputs", "kvpress.core.effect",
    "kvpress.core.press",
    "kvpress.core.recipe", "kvpress.core.registry", "kvpress.core.spec", "kvpress.counts", "kvpress.data.reference.words",
    "kvpress.hf.cache.layer", "kvpress.hf.cache.prefix_store", "kvpress.hf.config", "kvpress.hf.generation.clock",
    "kvpress.hf.generation.greedy", "kvpress.hf.generation.steps", "kvpress.hf.model_files", "kvpress.hf.model_kwargs",
    "kvpress.hf.linear", "kvpress.hf.models",
    "kvpress.hf.positions", "kvpress.hf.session.session", "kvpress.hf.shards", "kvpress.hf.weights", "kvpress.observe.call",
    "kvpress.observe.shards",
    "kvpress.packages", "kvpress.plan", "kvpress.signals", "kvpress.sparse", "kvpress.terminal",
}  # fmt: skip
"""The modules of the library that the harness builds on."""


def name_of(path: Path, package: Path) -> str:
    parts = path.relative_to(package.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path, HARNESS): path for path in sorted(HARNESS.rglob("*.py"))}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in MODULES.items()}


def imported(tree: ast.AST) -> set[str]:
    """Return every name that a source imports, with its module."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module
            assert not node.level, "imports are absolute"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "modules_of":
            package = ast.literal_eval(node.args[0])
            names |= {name for name in MODULES if name.startswith(f"{package}.")}
    return names


def module_of(name: str) -> str | None:
    """Return the module of the harness that an imported name is, or is defined in."""
    while name not in MODULES and "." in name:
        name = name.rpartition(".")[0]
    return name if name in MODULES else None


def parents(module: str) -> set[str]:
    parts = module.split(".")
    return {".".join(parts[:length]) for length in range(1, len(parts))}


GRAPH: dict[str, set[str]] = {
    name: {
        used
        for target in map(module_of, imported(tree))
        if target
        # Python runs the packages around a module first; those around the importing one run already.
        for used in {target, *parents(target)} - parents(name) - {name}
    }
    for name, tree in TREES.items()
}


def rank(module: str) -> int:
    _, _, path = module.partition(".")
    folder = path.partition(".")[0] or "__init__"
    (step,) = [number for number, folders in enumerate(RANKS) if folder in folders]
    return step


def folder_of(module: str) -> str:
    return module.partition(".")[2].partition(".")[0]


@pytest.mark.parametrize("module", MODULES)
def test_arrows_point_down(module: str) -> None:
    for used in GRAPH[module]:
        assert folder_of(used) == folder_of(module) or rank(used) < rank(module), f"{module} imports {used}"


def test_every_folder_has_its_step_and_every_step_its_folders() -> None:
    folders = {folder_of(name) or "__init__" for name in MODULES}
    assert folders == set().union(*RANKS)


def test_no_module_needs_itself() -> None:
    TopologicalSorter(GRAPH).prepare()  # raises on a cycle


def test_packages_are_named_after_their_contents_and_hold_no_code() -> None:
    """Importing one module of a folder does not import the others; `languages` lists the modules there are."""
    for name, path in MODULES.items():
        if path.name == "__init__.py" and name not in ("kvpress_eval", "kvpress_eval.tasks.languages"):
            assert [type(node) for node in TREES[name].body] == [ast.Expr], name


def test_modules_are_looked_up_in_one_place() -> None:
    lookups = {name for name, tree in TREES.items() if "importlib.import_module" in imported(tree)}
    assert lookups == {"kvpress_eval.common.discovery"}


def test_the_harness_builds_on_these_modules_of_the_library() -> None:
    def used(name: str) -> str:
        while not LIBRARY.parent.joinpath(*name.split(".")).with_suffix(".py").exists():
            if LIBRARY.parent.joinpath(*name.split("."), "__init__.py").exists():
                break
            name = name.rpartition(".")[0]
        return name

    names = {name for tree in TREES.values() for name in imported(tree) if name.split(".")[0] == "kvpress"}
    assert {used(name) for name in names} == USED


def test_the_library_never_imports_the_harness() -> None:
    for path in LIBRARY.rglob("*.py"):
        for name in imported(ast.parse(path.read_text(encoding="utf-8"))):
            assert name.split(".")[0] != "kvpress_eval", path


@pytest.mark.parametrize(
    ("module", "heavy"),
    [
        ("kvpress_eval", ["kvpress", "torch", "transformers", "numpy", "typer"]),
        (
            "kvpress_eval.commands.eval",
            ["kvpress", "torch", "transformers", "pydantic", "matplotlib", "jinja2", "numpy"],
        ),
        ("kvpress_eval.config.schema", ["torch", "transformers", "numpy"]),
        ("kvpress_eval.report.write", ["torch", "transformers"]),
    ],
)
def test_modules_that_are_not_needed_are_not_loaded(module: str, heavy: list[str]) -> None:
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "arguments", [[], ["plan"], ["info"], ["calibrate"], ["eval"], ["tune"], ["serve"], ["report"]], ids=" ".join
)
def test_help_loads_neither_torch_nor_transformers(arguments: list[str]) -> None:
    code = f"""
import sys
from kvpress_eval.console import app
app({[*arguments, "--help"]}, standalone_mode=False)
print([name for name in ("torch", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.splitlines()[-1] == "[]"
