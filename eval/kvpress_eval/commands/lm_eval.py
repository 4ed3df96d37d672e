# SPDX-License-Identifier: Apache-2.0
"""`kvpress lm-eval`: presses on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpress_eval.commands import _shared as shared
from kvpress_eval.common.errors import ConfigError


def command(
    tasks: Annotated[str, typer.Option(help="Tasks, groups or tags of lm-eval, separated by commas.")],
    model: shared.Model = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as snapkv:0.5; may be repeated.")] = None,
    include: Annotated[Path | None, typer.Option(help="Folder with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples per task; default all.", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt; default the task's.", min=0)] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Use the tokenizer's chat template.")] = False,
    metadata: Annotated[str, typer.Option(help='JSON for tasks that take it: {"max_seq_lengths": [4096]}')] = "{}",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts that are read together.")] = 1,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    force: shared.Force = False,
) -> None:
    """Score presses on tasks of lm-eval (lm-evaluation-harness).

    Every prompt is compressed as a whole. lm-eval's own command line, with the model `kvpress`, is
    `python -m kvpress_eval.lm`.
    """
    options = locals()
    with shared.exit_codes() as console:
        from kvpress_eval.common.files import check_replaced, make_room, write_json
        from kvpress_eval.lm.require import require_lm_eval
        from kvpress_eval.report.comparison_tables import lm_table

        require_lm_eval()
        from kvpress_eval.lm.tasks import Selection, compare

        # lm-eval itself cuts prompts to the longest input of the model, so that any length will do.
        config = shared.make_config(options, press, 16)
        chosen = Selection(
            tuple(shared.split(tasks)), include, limit, num_fewshot, chat_template, _json_object(metadata)
        )
        if out:
            make_room(out, "scores.json")
            check_replaced([out], [model, *([include] if include else [])], force)
        record = compare(config, chosen, console)
        console.print(lm_table(record))
        if out:
            write_json(out, record)


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"metadata must be JSON, got {text!r}: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"metadata must be a JSON object, got {text!r}")
    return value
