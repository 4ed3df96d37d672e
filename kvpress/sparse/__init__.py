# SPDX-License-Identifier: Apache-2.0
"""Selectors and patterns, one file each. The registry imports every module of this package."""

from typing import Any


def __getattr__(name: str) -> Any:
    from kvpress.core.registry import class_named

    return class_named(name, __name__)
