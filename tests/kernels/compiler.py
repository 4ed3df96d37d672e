# SPDX-License-Identifier: Apache-2.0
"""Skip marks for tests of the compiled kernels, and the levels that this machine can run or emulate."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels.cpu import build, launch
from tests.kernels import emulated

needs_compiler = pytest.mark.skipif(not launch.available(torch.empty(0)), reason="no C++ compiler on this machine")
NATIVE = build.supported_levels() if launch.level() else ()
LEVELS = (*NATIVE, *emulated.SIMULATED, *(() if emulated.missing else (emulated.LEVEL,)))
"""Instruction-set levels that are tested."""
