"""What a result was measured with: versions, hardware, time; nothing of the process environment."""

from __future__ import annotations

import platform
import uuid
from datetime import datetime, timezone
from typing import Any

import torch
import transformers

import kvpress
from kvpress_eval.config import RunConfig
from kvpress_eval.models import Engine


def describe_run(config: RunConfig, engine: Engine) -> dict[str, Any]:
    """Return the record of one invocation; rows refer to it by its `run` id."""
    on_gpu = engine.device == "cuda"
    return {
        "run": uuid.uuid4().hex[:12],
        "date": now(),
        "kvpress": kvpress.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "device": torch.cuda.get_device_name(engine.model.device) if on_gpu else engine.device,
        "cuda": torch.version.cuda if on_gpu else None,
        "dtype": engine.dtype,
        "attention": engine.model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "weights": engine.fingerprint,
        "config": config.model_dump(mode="json"),
    }


def now() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
