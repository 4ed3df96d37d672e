# SPDX-License-Identifier: Apache-2.0
"""Codecs that store sealed pairs in fewer bits, one method per file; the registry finds a method by its file."""

from typing import Any


def __getattr__(name: str) -> Any:
    from kvpress.core.registry import class_named

    return class_named(name, __name__)
