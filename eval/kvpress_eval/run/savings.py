# SPDX-License-Identifier: Apache-2.0
"""Time saved by reading contexts once for several presses and questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from kvpress_eval.run.generation import Context


@dataclass
class Savings:
    """Time saved by reading contexts once for several presses and questions."""

    contexts: int = 0
    """Number of contexts that were read."""
    answers: int = 0
    """Number of answers about these contexts."""
    seconds: float = 0.0
    """Time of reading and compressing."""
    saved_seconds: float = 0.0
    """Additional time if each answer had read its context."""
    stored: int = 0
    """Number of compressed contexts from the prefix store."""

    def add(self, contexts: Sequence[Context], rows: int, questions: int) -> None:
        """Count contexts that were read together: `rows` per press, with `questions` questions in total."""
        self.stored += rows * sum(context.stored for context in contexts)
        contexts = [context for context in contexts if not context.stored]
        if not contexts:
            return
        reading = contexts[0].reading_seconds * rows
        press_seconds = [context.seconds * rows - reading for context in contexts]
        self.contexts += rows
        self.answers += questions * len(contexts)
        self.seconds += reading + sum(press_seconds)
        self.saved_seconds += reading * (questions / rows * len(contexts) - 1) + sum(press_seconds) * (
            questions / rows - 1
        )

    def __add__(self, second: Savings) -> Savings:
        return Savings(*(getattr(self, item.name) + getattr(second, item.name) for item in fields(self)))

    def __bool__(self) -> bool:
        return self.answers > self.contexts or self.stored > 0

    def __str__(self) -> str:
        stored = f"; {self.stored} compressed contexts came from the prefix store" if self.stored else ""
        return (
            f"{self.contexts} contexts read for {self.answers} answers, in {self.seconds:.1f} s; "
            f"reading one for each answer would have taken {self.saved_seconds:.1f} s more{stored}"
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the figures as plain data."""
        return asdict(self)
