# SPDX-License-Identifier: Apache-2.0
"""Configuration of a run: one frozen, validated object, the same from Python, the command line or a file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

import kvpress
from kvpress.counts import parse_count
from kvpress.hf.model_kwargs import parse_model_kwargs
from kvpress_eval.tasks.catalogue import kind_of
from kvpress_eval.tasks.filler import KINDS
from kvpress_eval.tasks.kinds.generated import TASKS, TRAINED, worded
from kvpress_eval.tasks.texts import SUFFIXES, TEXTS, is_text

REFERENCE = "reference"
RAY = "ray"
"""Engine that runs cells on several machines."""
_FILES = re.compile(r"(^|\+)\s*@|\.ya?ml\s*$")
"""Matches a spec that reads a press, or a part of it, from a file."""


def _without_unit(value: Any) -> Any:
    """Parse a number of tokens given as text, such as 8k; other values are left to the type of the field."""
    return parse_count(value, "a number of tokens", least=0) if isinstance(value, str) else value


Length = Annotated[int, Field(ge=16), BeforeValidator(_without_unit)]
NewTokens = Annotated[int, Field(ge=1), BeforeValidator(_without_unit)]
Depth = Annotated[float, Field(ge=0, le=1)]
ModelKwargs = Annotated[dict[str, Any], BeforeValidator(parse_model_kwargs)]


class RunConfig(BaseModel):
    """Grid of presses, tasks and lengths on one model."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = REFERENCE
    presses: tuple[str, ...] = Field(default=("none",), min_length=1)
    tasks: tuple[str, ...] = Field(default=tuple(TRAINED), min_length=1)
    lengths: tuple[Length, ...] = Field(default=(512, 1024), min_length=1)
    samples: int = Field(default=50, ge=1)
    seed: int = 0
    filler: str = "noise"
    """Text around the answer: "noise", "repeat", "essays", "stdlib", "bfcl", "human_eval" or a file."""
    language: Literal["auto", "reference", "english"] = Field(default="auto", validate_default=True)
    """Words of the tasks; "auto": the reference model's language for `reference`, else one that the tokenizer can spell."""
    question_aware: bool = False
    """Whether the question is read before the context is compressed."""
    depth: Depth | None = None
    """Position of the answer as a fraction of the context; None: anywhere."""
    depths: tuple[Depth, ...] = ()
    """Several values of `depth`, each in cells of its own."""
    data_dir: Path | None = None
    """Folder with the files of published benchmarks, used instead of the hub."""
    max_context_length: Length | None = None
    """Limit of the tokens of a context, chat template included; longer ones lose their middle. None: no limit."""
    prefix_store: Path | None = None
    """Folder of compressed contexts that runs share: stored contexts are not read again, new ones are added."""
    out: Path = Path("runs/eval")
    batch_size: int = Field(default=1, ge=1)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    device: str = "auto"
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = None
    """Strategy of accelerate that spreads the layers of the model over all devices."""
    model_kwargs: ModelKwargs = Field(default={})
    """Further arguments of `from_pretrained`, and attributes of the model's configuration, by name."""
    threads: int | None = Field(default=None, ge=1)
    max_new_tokens: NewTokens | None = None
    """Limit of generated tokens; None: as many as the answers of a task may need."""
    max_seconds_per_sample: float | None = Field(default=None, gt=0)
    engine: Literal["local", "ray"] = "local"
    ray_address: str | None = None
    tp: int = Field(default=1, ge=1)
    """Ranks of a tensor-parallel model: processes of a worker, each with a GPU or `threads` cores (engine ray)."""

    @field_validator("presses")
    @classmethod
    def _presses_exist(cls, presses: tuple[str, ...]) -> tuple[str, ...]:
        from kvpress.core.effect import check_acts  # loads torch, which --help does not need

        specs = []
        for spec in presses:
            try:
                press = kvpress.get_press(spec)
                check_acts(press)
            except (KeyError, ValueError, TypeError) as error:
                raise ValueError(f"press {spec!r}: {error.args[0] if error.args else error}") from error
            # A file may change later, so the cell is named by the spec that the file contains now.
            specs.append(kvpress.to_spec(press) if _FILES.search(spec) else " ".join(spec.split()))
        return tuple(dict.fromkeys(specs))

    @field_validator("tasks")
    @classmethod
    def _tasks_exist(cls, tasks: tuple[str, ...]) -> tuple[str, ...]:
        for task in tasks:
            kind_of(task)
        return tuple(dict.fromkeys(tasks))

    @field_validator("lengths")
    @classmethod
    def _lengths_once(cls, lengths: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(dict.fromkeys(lengths))

    @field_validator("filler")
    @classmethod
    def _filler_exists(cls, filler: str) -> str:
        if filler not in KINDS and not is_text(filler):
            raise ValueError(
                f"must be {', '.join((*KINDS, *TEXTS))}, file:PATH, or a file in {', '.join(SUFFIXES)}, got {filler!r}"
            )
        return filler

    @field_validator("filler")
    @classmethod
    def _filler_is_used(cls, filler: str, info: ValidationInfo) -> str:
        tasks = info.data.get("tasks", ())
        if filler != KINDS[0] and tasks and not any(task in TASKS for task in tasks):
            raise ValueError(
                f"the contexts of {', '.join(tasks)} are published or your own, so that they take no filler: omit it, or add "
                "a generated task such as niah_single"
            )
        return filler

    @field_validator("language")
    @classmethod
    def _words_exist(cls, language: str, info: ValidationInfo) -> str:
        wording = _wording(language, info.data.get("model", ""))
        for task in info.data.get("tasks", ()):
            if task in TASKS and task not in worded(wording):
                raise ValueError(
                    f"the reference model was not trained on {task!r}: language {wording!r} has words for "
                    f"{', '.join(worded(wording))}; for other tasks take another model, or language english"
                )
        if wording == REFERENCE and is_text(info.data.get("filler", "")):
            raise ValueError(
                f"the reference model reads no other text: with language {wording!r} filler must be "
                f"{' or '.join(KINDS)}"
            )
        return language

    @field_validator("depths")
    @classmethod
    def _one_way_to_say_depth(cls, depths: tuple[float, ...], info: ValidationInfo) -> tuple[float, ...]:
        if depths and info.data.get("depth") is not None:
            raise ValueError("give depth or depths, not both")
        return tuple(dict.fromkeys(depths))

    @field_validator("depth", "depths")
    @classmethod
    def _depth_is_used(cls, value: Any, info: ValidationInfo) -> Any:
        tasks = info.data.get("tasks", ())
        if value not in (None, ()) and tasks and not any(task in TASKS and TASKS[task].placed for task in tasks):
            raise ValueError(
                f"none of the tasks {', '.join(tasks)} has an answer at one place: omit it, or add a task such as niah_single"
            )
        return value

    @field_validator("device_map")
    @classmethod
    def _one_way_to_say_device(cls, device_map: str | None, info: ValidationInfo) -> str | None:
        if device_map and info.data.get("device", "auto") != "auto":
            raise ValueError("give device or device_map, not both: a map places the layers itself")
        return device_map

    @field_validator("engine")
    @classmethod
    def _workers_place_the_model(cls, engine: str, info: ValidationInfo) -> str:
        if engine == RAY and info.data.get("device_map"):
            raise ValueError(
                "engine ray gives each worker one GPU, over which device_map has nothing to spread: omit it"
            )
        device = info.data.get("device", "auto")
        if engine == RAY and device not in ("auto", "cpu", "cuda"):
            raise ValueError(
                f"engine ray chooses the GPU of each worker: device must be auto, cpu or cuda, got {device!r}"
            )
        return engine

    @field_validator("ray_address")
    @classmethod
    def _address_is_used(cls, address: str | None, info: ValidationInfo) -> str | None:
        if address is not None and info.data.get("engine") != RAY:
            raise ValueError("an address of Ray needs engine ray")
        return address

    @field_validator("tp")
    @classmethod
    def _ranks_run_in_workers(cls, tp: int, info: ValidationInfo) -> int:
        if tp > 1 and info.data.get("engine") != RAY:
            raise ValueError(
                f"{tp} ranks need engine ray, which starts their processes; for a model in this process, 1"
            )
        if tp > 1 and info.data.get("max_seconds_per_sample") is not None:
            raise ValueError(
                f"{tp} ranks cannot stop an answer after max_seconds_per_sample, because their clocks differ: omit it"
            )
        return tp

    @property
    def wording(self) -> str:
        """Language after resolving "auto" without the tokenizer; `run/language.py` resolves it with one."""
        return _wording(self.language, self.model)


def _wording(language: str, model: str) -> str:
    if language != "auto":
        return language
    return "reference" if model == REFERENCE else "english"
