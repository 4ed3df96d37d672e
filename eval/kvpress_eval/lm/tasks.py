# SPDX-License-Identifier: Apache-2.0
"""Evaluate presses on tasks of lm-eval: its scores and standard errors, and the memory of the cache."""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable
from rich.console import Console
from rich.text import Text

from kvpress.core.effect import left_whole, left_whole_note
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.lm.model import KVPressLM
from kvpress_eval.results.records import LM_EVAL
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.models import load_engine, read_settings, source_of

_KEPT = ("results", "groups", "configs", "versions", "n-shot", "n-samples", "higher_is_better", "config")
"""Keys that are stored of lm-eval's record; its other keys describe the machine, as our own record does."""


@dataclass(frozen=True)
class Selection:
    """Tasks of lm-eval and their options."""

    tasks: tuple[str, ...]
    """Names of tasks, groups or tags, or patterns of names."""
    include: Path | None = None
    """Folder with task files."""
    limit: int | None = None
    """First samples of each task; None for all."""
    num_fewshot: int | None = None
    """Examples in a prompt; None for the number of the task."""
    chat_template: bool = False
    """Put prompts into the chat template of the model."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Settings for tasks that are generated, such as lengths."""


def compare(config: RunConfig, selection: Selection, console: Console) -> dict[str, Any]:
    """Evaluate the presses of a configuration on tasks of lm-eval; return a record of the settings and all results.

    Raises:
        ConfigError: there is no such task, or a press does not suit the model.
        DataError: the model or the data of a task cannot be read.
    """
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    model = read_settings(config)
    tasks = load_tasks(selection, source_of(config))
    engine = load_engine(config, model)
    measured = []
    for press in config.presses:
        console.print(Text(press))
        lm = KVPressLM(engine.model, press, tokenizer=engine.tokenizer, batch_size=config.batch_size)
        scores = _evaluate(lm, press, tasks, selection)
        uncompressed = lm.held.prompts > 0 and left_whole(lm.press, 1, lm.held.bytes, lm.held.uncompressed_bytes)
        measured.append({**scores, "compressed": not uncompressed})
        if uncompressed:
            console.print(Text(f"{press}: {left_whole_note(lm.press)}", style="red"))
    settings = {
        "model": config.model,
        "presses": config.presses,
        **asdict(selection),
        "include": str(selection.include) if selection.include else None,
        "batch_size": config.batch_size,
        **({"model_kwargs": config.model_kwargs} if config.model_kwargs else {}),
    }
    about = {**describe_run(config, engine), "kind": LM_EVAL, "config": settings, "lm_eval": version("lm_eval")}
    return {**about, "presses": measured}


def load_tasks(selection: Selection, model: str) -> list[Any]:
    """Return the tasks with their data; generated tasks, such as RULER's, use the tokenizer of `model`.

    Raises:
        ConfigError: no task is named, there is no such task, or no folder `include`.
        DataError: the data of a task cannot be read.
    """
    if not selection.tasks:
        raise ConfigError("name at least one task of lm-eval")
    if selection.include and not selection.include.is_dir():
        raise ConfigError(f"no folder {str(selection.include)!r} with task files of lm-eval")
    metadata = {"pretrained": model, **selection.metadata}
    manager = TaskManager(include_path=selection.include, metadata=metadata)
    names = list(dict.fromkeys(name for task in selection.tasks for name in _matching(task, manager)))
    return [_load(name, manager) for name in names]


def _matching(task: str, manager: Any) -> list[str]:
    names: list[str] = manager.match_tasks([task])
    if not names:
        similar = difflib.get_close_matches(task, manager.all_tasks, n=3, cutoff=0.7)
        hint = f"did you mean {' or '.join(similar)}?" if similar else "`lm-eval ls tasks` lists all"
        raise ConfigError(f"lm-eval has no task {task!r}: {hint}")
    return names


def _load(name: str, manager: Any) -> Any:
    try:
        loaded = manager.load([name])
    except ImportError as error:
        raise DataError(f"task {name!r} of lm-eval needs another package: {error}") from error
    except (OSError, ValueError, KeyError) as error:
        raise DataError(
            f"cannot load task {name!r} of lm-eval: {error}; its data comes from the Hugging Face hub, or from files that "
            "the `dataset_kwargs: {data_files: ...}` of a task file in --include name"
        ) from error
    groups = loaded["groups"]
    return groups[name] if name in groups else list(loaded["tasks"].values())


def _evaluate(lm: KVPressLM, press: str, tasks: Sequence[Any], selection: Selection) -> dict[str, Any]:
    try:
        record = simple_evaluate(
            lm,
            tasks=list(_flat(tasks)),
            limit=selection.limit,
            num_fewshot=selection.num_fewshot,
            apply_chat_template=selection.chat_template,
            batch_size=lm.batch_size,
            device=str(lm.device),
            log_samples=False,
        )
    except (ValueError, NotImplementedError) as error:
        raise ConfigError(f"press {press!r}: {error}") from error
    plain = json.loads(
        json.dumps({key: record[key] for key in _KEPT if key in record}, default=handle_non_serializable)
    )
    return {"press": press, "held": lm.held.summary(), **plain}


def _flat(tasks: Iterable[Any]) -> Iterator[Any]:
    """Yield tasks and groups; a tag is a list of several."""
    for task in tasks:
        yield from task if isinstance(task, list) else [task]
