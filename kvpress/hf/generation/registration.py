# SPDX-License-Identifier: Apache-2.0
"""Register the pipeline's task in transformers without importing the pipeline."""

from __future__ import annotations

import importlib
from typing import Any

TASK = "kv-press-text-generation"


class LazyTask(dict[str, Any]):
    """Entry of the registry whose class, `impl`, is imported when `transformers.pipeline` first looks it up."""

    def __missing__(self, name: str) -> Any:
        if name != "impl":
            raise KeyError(name)
        return importlib.import_module("kvpress.hf.generation.pipeline").KVPressTextGenerationPipeline


def register(pipelines: Any) -> None:
    """Register the task in `transformers.pipelines`, unless a task of that name exists."""
    pipelines.PIPELINE_REGISTRY.supported_tasks.setdefault(TASK, LazyTask(pt=(pipelines.AutoModelForCausalLM,)))
