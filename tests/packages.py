# SPDX-License-Identifier: Apache-2.0
"""Tiny installed packages with data files, for tests of their readers."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    monkeypatch: pytest.MonkeyPatch, folder: Path, name: str, version: str, files: Mapping[str, str | bytes]
) -> Path:
    """Write a distribution with files into a folder on the import path; its modules fail when they are imported."""
    module = folder / name.replace("-", "_")
    info = folder / f"{module.name}-{version}.dist-info"
    for path in (module, info):
        path.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", encoding="utf-8")
    (module / "__init__.py").write_text("raise AssertionError('the package was imported')\n", encoding="utf-8")
    for file, content in files.items():
        path = folder / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content.encode() if isinstance(content, str) else content)
    monkeypatch.setattr(sys, "path", [str(folder), *sys.path])
    return folder
