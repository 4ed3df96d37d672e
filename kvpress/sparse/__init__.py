"""Selectors: which stored pairs a query reads."""

from kvpress.sparse.base import Selector
from kvpress.sparse.quest import QuestPress

__all__ = ["QuestPress", "Selector"]
