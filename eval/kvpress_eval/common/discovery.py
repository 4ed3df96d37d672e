# SPDX-License-Identifier: Apache-2.0
"""Import all modules of a folder, so that adding a file registers it."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from types import ModuleType


def modules_of(package: str) -> list[ModuleType]:
    """Import the modules directly in a package, sorted by name; names that start with an underscore are left out."""
    names = [module.name for module in pkgutil.iter_modules(import_module(package).__path__)]
    return [import_module(f"{package}.{name}") for name in sorted(names) if not name.startswith("_")]
