# SPDX-License-Identifier: Apache-2.0
"""What tasks of lm-eval need beside the harness."""

from __future__ import annotations

import importlib.util

from kvpress_eval.common.errors import ConfigError

_PARTS = ("lm_eval", "accelerate")


def require_lm_eval() -> None:
    """Raise unless lm-eval and what its Hugging Face models need are installed."""
    for part in _PARTS:
        if importlib.util.find_spec(part) is None:
            raise ConfigError(f"{part} is not installed; tasks of lm-eval need: pip install 'kvpress-toolkit[lm-eval]'")
