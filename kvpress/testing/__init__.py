# SPDX-License-Identifier: Apache-2.0
"""Run a press of your own through the common checks: `kvpress.testing.check_press(press)`; needs no pytest."""

from __future__ import annotations

from kvpress.testing.checks import check_press
from kvpress.testing.comparison import Fault

__all__ = ["Fault", "check_press"]
