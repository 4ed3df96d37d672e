# SPDX-License-Identifier: Apache-2.0
"""Evicting presses: scorers, budgets and schedules, one file each; a method is found because its file is here."""

from typing import Any

from kvpress.core.adapter import adapter
from kvpress.core.registry import class_named


def __getattr__(name: str) -> Any:
    return class_named(name, __name__)


adapter().alias_modules(__name__)
