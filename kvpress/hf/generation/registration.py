# SPDX-License-Identifier: Apache-2.0
"""The task of the pipeline in the registry of transformers, entered without importing the pipeline."""

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
    """Enter the task into the registry of a module, `transformers.pipelines`; one of that name stays."""
    pipelines.PIPELINE_REGISTRY.supported_tasks.setdefault(TASK, LazyTask(pt=(pipelines.AutoModelForCausalLM,)))
