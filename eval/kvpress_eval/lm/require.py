# SPDX-License-Identifier: Apache-2.0
"""Check for the optional packages that tasks of lm-eval need."""

from __future__ import annotations

import importlib.util

from kvpress_eval.common.errors import ConfigError

_PARTS = ("lm_eval", "accelerate")


def require_lm_eval() -> None:
    """Raise a ConfigError unless lm-eval and the packages of its Hugging Face models are installed."""
    for package in _PARTS:
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"{package} is not installed; tasks of lm-eval need: pip install 'kvpress-toolkit[lm-eval]'"
            )
