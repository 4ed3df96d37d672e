# SPDX-License-Identifier: Apache-2.0
"""Run the numerical tests of the Triton kernels in a process of their own: triton decides at import whether it interprets."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from kvpress.kernels.triton.device import available

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_kernels_match_their_references_under_the_interpreter() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    tests = Path(__file__).parent / "interpreted"
    command = [sys.executable, "-m", "pytest", str(tests), "-q", "-p", "no:cacheprovider", "--tb=short"]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)  # noqa: S603
    assert done.returncode == 0, done.stdout + done.stderr


def test_operators_import_without_triton() -> None:
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import kvpress, kvpress.kernels, kvpress.kernels.triton\n"
        "kvpress.kernels.decode, kvpress.kernels.column_mass\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)  # noqa: S603


def test_tensors_on_the_cpu_are_not_served() -> None:
    assert not available(torch.zeros(1))
