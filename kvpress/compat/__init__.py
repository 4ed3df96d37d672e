# SPDX-License-Identifier: Apache-2.0
"""Support for programs written for NVIDIA kvpress: module names, subclasses of presses, helpers, and direct calls.

The core calls the functions below through `kvpress.core.adapter`; each is imported at its first use, because press classes
are adapted before the modules exist that helpers and direct calls need.
"""

from __future__ import annotations

import importlib
from typing import Any

_MODULES = {
    "adapt": "kvpress.compat.overrides",
    "alias_modules": "kvpress.compat.aliases",
    "compress": "kvpress.compat.standalone",
    "score": "kvpress.compat.standalone",
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
