"""Where the base classes of presses were first; they live in `kvpress.core.press`."""

from kvpress.core.press import BasePress, BudgetPress, ScorerPress, WrapperPress
from kvpress.observe.view import view_of

__all__ = ["BasePress", "BudgetPress", "ScorerPress", "WrapperPress", "view_of"]
