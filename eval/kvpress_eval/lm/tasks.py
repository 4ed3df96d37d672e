# SPDX-License-Identifier: Apache-2.0
"""Presses on tasks of lm-eval: one model, every press, lm-eval's own scores and errors, and what the cache held."""

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
"""What is written of lm-eval's record of an evaluation; the rest describes the machine once more."""


@dataclass(frozen=True)
class Selection:
    """Names of tasks, groups or tags of lm-eval (or patterns of them), and the options that lm-eval takes for them."""

    tasks: tuple[str, ...]
    include: Path | None = None
    limit: int | None = None
    num_fewshot: int | None = None
    chat_template: bool = False
    metadata: Mapping[str, Any] = field(default_factory=dict)


def compare(config: RunConfig, selection: Selection, console: Console) -> dict[str, Any]:
    """Evaluate the presses of a configuration on tasks of lm-eval; return what was measured with, and each result.

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
        whole = lm.held.prompts > 0 and left_whole(lm.press, 1, lm.held.bytes, lm.held.uncompressed_bytes)
        measured.append({**scores, "compressed": not whole})
        if whole:
            console.print(Text(f"{press}: {left_whole_note(lm.press)}", style="red"))
    settings = {
        "model": config.model,
        "presses": config.presses,
        **asdict(selection),
        "include": str(selection.include) if selection.include else None,
        "batch_size": config.batch_size,
    }
    about = {**describe_run(config, engine), "kind": LM_EVAL, "config": settings, "lm_eval": version("lm_eval")}
    return {**about, "presses": measured}


def load_tasks(selection: Selection, model: str) -> list[Any]:
    """Return the tasks with their data; tasks that are generated, such as RULER's, take the tokenizer of `model`."""
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
        near = difflib.get_close_matches(task, manager.all_tasks, n=3, cutoff=0.7)
        hint = f"did you mean {' or '.join(near)}?" if near else "`lm-eval ls tasks` lists all"
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
    """Yield tasks and groups; a tag stands for several."""
    for task in tasks:
        yield from task if isinstance(task, list) else [task]
