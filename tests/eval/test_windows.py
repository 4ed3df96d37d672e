# SPDX-License-Identifier: Apache-2.0
"""Systems without the modules and calls of POSIX: a run works there too."""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import kvpress_eval
import psutil
import pytest
from kvpress_eval.common.files import read_object, write_json
from kvpress_eval.run import memory

import kvpress
from tests.eval.commands import invoke

POSIX = {"fcntl", "grp", "posix", "pty", "pwd", "resource", "syslog", "termios", "tty"}
SOURCES = [
    path for package in (kvpress, kvpress_eval) for path in sorted(Path(str(package.__file__)).parent.rglob("*.py"))
]


def unguarded(node: ast.AST) -> Iterator[str]:
    """Yield the modules that a source imports anywhere but in a `try`."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            yield (child.module or "").partition(".")[0]
        elif not isinstance(child, ast.Try):
            yield from unguarded(child)


def test_modules_of_posix_are_imported_with_a_fallback() -> None:
    for path in SOURCES:
        assert not POSIX & set(unguarded(ast.parse(path.read_text(encoding="utf-8")))), path


def test_the_peak_of_memory_without_the_module_resource(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = memory.process_peak_bytes()
    monkeypatch.setitem(sys.modules, "resource", None)
    assert 0 < memory.process_peak_bytes() <= 2 * measured
    windows = SimpleNamespace(rss=5, peak_wset=7)
    monkeypatch.setattr(psutil, "Process", lambda: SimpleNamespace(memory_info=lambda: windows))
    assert memory.process_peak_bytes() == 7


def test_files_are_replaced_where_folders_cannot_be_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = os.open

    def refuse_folders(path: str, *arguments: int) -> int:
        if Path(path).is_dir():
            raise PermissionError(13, "Permission denied", str(path))
        return opened(path, *arguments)

    monkeypatch.delattr(os, "O_DIRECTORY", raising=False)
    monkeypatch.setattr(os, "open", refuse_folders)
    write_json(tmp_path / "a.json", {"a": 1})
    assert read_object(tmp_path / "a.json") == {"a": 1}


def test_a_run_without_the_modules_of_posix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in POSIX - {"posix"}:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delattr(os, "O_DIRECTORY", raising=False)
    options = ("--tasks", "vt", "--lengths", 64, "--samples", 1, "--max-new-tokens", 2, "--threads", 1)
    code, output = invoke("eval", "--press", "none", *options, "--out", tmp_path)
    assert code == 0, output
