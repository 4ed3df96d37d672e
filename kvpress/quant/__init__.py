# SPDX-License-Identifier: Apache-2.0
"""Codecs: how sealed pairs are stored in fewer bits, one file each; a method is found because its file is here."""

from typing import Any


def __getattr__(name: str) -> Any:
    from kvpress.core.registry import class_named

    return class_named(name, __name__)
