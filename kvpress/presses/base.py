# SPDX-License-Identifier: Apache-2.0
"""Where the base classes of presses were first; they live in `kvpress.core.press`."""

from kvpress.core.press import BasePress, BudgetPress, ScorerPress, WrapperPress

__all__ = ["BasePress", "BudgetPress", "ScorerPress", "WrapperPress"]
