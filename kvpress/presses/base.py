# SPDX-License-Identifier: Apache-2.0
"""Base classes of presses, re-exported from `kvpress.core.press`."""

from kvpress.core.press import BasePress, BudgetPress, ScorerPress, WrapperPress

__all__ = ["BasePress", "BudgetPress", "ScorerPress", "WrapperPress"]
