"""What a run measures: one frozen, validated object, the same from Python, the command line or a file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

import kvpress
from kvpress_eval.errors import unknown_name
from kvpress_eval.tasks import TASKS
from kvpress_eval.tasks.files import PREFIX

REFERENCE = "reference"

Length = Annotated[int, Field(ge=16)]


class RunConfig(BaseModel):
    """A grid of presses, tasks and lengths on one model.

    The context is compressed before the question is seen, unless `question_aware`. `depth` hides the answer
    at that fraction of the context (None: anywhere). `language` "auto" is the reference model's own language
    for the model `reference`, English for every other.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = REFERENCE
    presses: tuple[str, ...] = Field(default=("none",), min_length=1)
    tasks: tuple[str, ...] = Field(default=tuple(TASKS), min_length=1)
    lengths: tuple[Length, ...] = Field(default=(512, 1024), min_length=1)
    samples: int = Field(default=50, ge=1)
    seed: int = 0
    language: Literal["auto", "reference", "english"] = "auto"
    question_aware: bool = False
    depth: float | None = Field(default=None, ge=0, le=1)
    out: Path = Path("runs/eval")
    batch_size: int = Field(default=1, ge=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    threads: int | None = Field(default=None, ge=1)
    max_new_tokens: int = Field(default=32, ge=1)
    max_seconds_per_sample: float | None = Field(default=None, gt=0)

    @field_validator("presses")
    @classmethod
    def _presses_exist(cls, presses: tuple[str, ...]) -> tuple[str, ...]:
        for spec in presses:
            try:
                kvpress.get_press(spec)
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"press {spec!r}: {error.args[0] if error.args else error}") from error
        return tuple(dict.fromkeys(" ".join(spec.split()) for spec in presses))

    @field_validator("tasks")
    @classmethod
    def _tasks_exist(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for task in tasks:
            if task not in TASKS and not task.startswith(PREFIX):
                raise ValueError(unknown_name("task", task, TASKS))
        return tuple(dict.fromkeys(tasks))

    @field_validator("lengths")
    @classmethod
    def _lengths_once(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(lengths))

    @property
    def wording(self) -> str:
        """The language that "auto" stands for."""
        if self.language != "auto":
            return self.language
        return "reference" if self.model == REFERENCE else "english"
