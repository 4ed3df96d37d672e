# SPDX-License-Identifier: Apache-2.0
"""The bundled model, loaded once for all tests."""

from __future__ import annotations

from functools import cache
from typing import Any

from kvpress_eval.config.schema import REFERENCE, RunConfig
from kvpress_eval.run.models import Engine, load_engine, use_threads

LOADERS = (
    "kvpress_eval.run.runner", "kvpress_eval.fidelity.measure", "kvpress_eval.recall.measure", "kvpress_eval.report.show",
    "kvpress_eval.tuning.find",
)  # fmt: skip
"""The modules that load models."""


@cache
def bundled_model(dtype: str = "auto") -> Engine:
    return load_engine(RunConfig(dtype=dtype))


def load_once(config: RunConfig, settings: Any = None) -> Engine:
    """Load as the harness does, but the bundled model only the first time."""
    if config.model != REFERENCE or config.device_map or config.model_kwargs:
        return load_engine(config, settings)
    use_threads(config)
    return bundled_model(config.dtype)
