"""What tests of the compiled kernels need from the machine."""

from __future__ import annotations

import pytest

from kvpress.kernels.cpu import launch

needs_compiler = pytest.mark.skipif(launch.level() is None, reason="no C++ compiler")
