# SPDX-License-Identifier: Apache-2.0
"""What tests of the compiled kernels need from the machine, and the levels that it can run or emulate."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels.cpu import build, launch
from tests.kernels import emulated

needs_compiler = pytest.mark.skipif(not launch.available(torch.empty(0)), reason="no C++ compiler on this machine")
NATIVE = build.supported_levels() if launch.level() else ()
LEVELS = (*NATIVE, *emulated.SIMULATED, *(() if emulated.missing else (emulated.LEVEL,)))
"""Instruction-set levels that kernels are tested at."""
