# SPDX-License-Identifier: Apache-2.0
"""Record of the conditions of a measurement: versions, hardware, time; no environment variables."""

from __future__ import annotations

import platform
import shutil
import subprocess
import uuid
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
import transformers

import kvpress
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.models import Engine


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
        "triton": _version("triton"),
        "code": describe_code(),
        "machine": platform.machine(),
        "processor": _processor(),
        "device": torch.cuda.get_device_name(engine.model.device) if on_gpu else engine.device,
        "cuda": torch.version.cuda if on_gpu else None,
        "driver": _driver() if on_gpu else None,
        "dtype": engine.dtype,
        "attention": engine.model.config._attn_implementation,
        "threads": torch.get_num_threads(),
        "weights": engine.fingerprint,
        "config_sha256": hash_json(config.model_dump(mode="json"))[:16],
        "config": config.model_dump(mode="json"),
    }


def describe_code() -> str | None:
    """Return the commit that the library runs from, with `+changes` if it differs; None for an installed package."""
    folder = Path(kvpress.__file__).parent
    git = shutil.which("git")
    if git is None or not (folder.parent / ".git").exists():
        return None
    answers = []
    for arguments in (["rev-parse", "HEAD"], ["status", "--porcelain", "--untracked-files=no"]):
        done = subprocess.run([git, *arguments], cwd=folder, capture_output=True, text=True)  # noqa: S603 - fixed words
        if done.returncode:
            return None
        answers.append(done.stdout.strip())
    return answers[0] + ("+changes" if answers[1] else "")


def _processor() -> str:
    """Return the name of the processor, as far as the system provides it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _driver() -> str | None:
    """Return the version of the NVIDIA driver."""
    path = Path("/sys/module/nvidia/version")
    return path.read_text(encoding="utf-8").strip() if path.exists() else None


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def now() -> str:
    """Return the current time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
