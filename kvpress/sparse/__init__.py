"""Selectors: which stored pairs a query reads."""

from kvpress.sparse.base import Selector
from kvpress.sparse.double_sparsity import DoubleSparsityPress
from kvpress.sparse.quest import QuestPress
from kvpress.sparse.tidal_decode import TidalDecodePress

__all__ = ["DoubleSparsityPress", "QuestPress", "Selector", "TidalDecodePress"]
