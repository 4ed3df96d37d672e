# SPDX-License-Identifier: Apache-2.0
"""Fitting what a method needs to know about a model: run it over data, resumable, and write one file.

A method is a module of this package with a subclass of `run.Settings`; its name in `kvpress calibrate --method` is `method`.
"""

from __future__ import annotations

import importlib
import pkgutil
from inspect import isabstract
from typing import Any

_PARTS = {"calibrate": "run", "Settings": "run"}


def methods() -> dict[str, type[Any]]:
    """Return the settings class of every method by its name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found, known = [importlib.import_module(f"{__name__}.run").Settings], {}
    while found:
        found += (kind := found.pop()).__subclasses__()
        if not isabstract(kind) and hasattr(kind, "method"):
            known[kind.method] = kind
    return known


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        return methods()
    if name in _PARTS:
        return getattr(importlib.import_module(f"{__name__}.{_PARTS[name]}"), name)
    found = {kind.__name__: kind for kind in methods().values()} if name.endswith("Settings") else {}
    if name not in found:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found[name]
