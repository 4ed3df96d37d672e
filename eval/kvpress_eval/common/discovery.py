# SPDX-License-Identifier: Apache-2.0
"""Modules that are found because their file is there."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def modules_of(package: str) -> list[ModuleType]:
    """Import the modules directly in a package, sorted by name; names that start with an underscore are left out."""
    names = [found.name for found in pkgutil.iter_modules(import_module(package).__path__)]
    return [import_module(f"{package}.{name}") for name in sorted(names) if not name.startswith("_")]
