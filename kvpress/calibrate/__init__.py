# SPDX-License-Identifier: Apache-2.0
"""Calibration: learn a method's tensors from a model and texts, and write them to a file. A stopped run can be resumed.

A method is a module of this package with a subclass of `run.CalibrationSettings`, whose `method` is its name in
`kvpress calibrate METHOD`.
"""

from __future__ import annotations

import importlib
import pkgutil
from inspect import isabstract
from typing import Any

_MODULES = {"calibrate": "run", "CalibrationSettings": "run"}


def methods() -> dict[str, type[Any]]:
    """Return the settings class of every method by its name."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    pending, by_name = [importlib.import_module(f"{__name__}.run").CalibrationSettings], {}
    while pending:
        pending += (kind := pending.pop()).__subclasses__()
        if not isabstract(kind) and hasattr(kind, "method"):
            by_name[kind.method] = kind
    return by_name


def __getattr__(name: str) -> Any:
    if name == "METHODS":
        return methods()
    if name in _MODULES:
        return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    settings = {kind.__name__: kind for kind in methods().values()} if name.endswith("Settings") else {}
    if name not in settings:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return settings[name]
