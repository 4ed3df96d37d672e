"""`kvpress lm-eval`: presses on the tasks of lm-evaluation-harness."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from kvpress_eval.commands.terminal import exit_codes, make_folder, split
from kvpress_eval.errors import ConfigError
from kvpress_eval.lm_eval import require_lm_eval
from kvpress_eval.lm_scores import to_table
from kvpress_eval.models import check_lengths
from kvpress_eval.store import write_json
from kvpress_eval.yaml_config import load_config


def lm_eval_command(
    tasks: Annotated[str, typer.Option(help="Tasks, groups or tags of lm-eval, separated by commas.")],
    model: Annotated[str, typer.Option(help="`reference`, a local folder or a hub name.")] = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as snapkv:0.5; may be repeated.")] = None,
    include: Annotated[Path | None, typer.Option(help="Folder with task files of your own.")] = None,
    limit: Annotated[int | None, typer.Option(help="Samples per task; default all.", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="Examples in the prompt; default the task's.", min=0)] = None,
    chat_template: Annotated[bool, typer.Option("--chat-template", help="Use the tokenizer's chat template.")] = False,
    metadata: Annotated[str, typer.Option(help='JSON for tasks that take it: {"max_seq_lengths": [4096]}')] = "{}",
    out: Annotated[Path | None, typer.Option(help="JSON file for the results.")] = None,
    batch_size: Annotated[int, typer.Option(help="Prompts that are read together.")] = 1,
    dtype: Annotated[str, typer.Option(help="auto, bfloat16, float16 or float32.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1.")] = "auto",
    threads: Annotated[int | None, typer.Option(help="CPU threads of torch.")] = None,
) -> None:
    """Score presses on tasks of lm-eval (lm-evaluation-harness).

    Every prompt is compressed as a whole. lm-eval's own command line, with the model `kvpress`, is
    `python -m kvpress_eval.lm_eval`.
    """
    with exit_codes() as console:
        require_lm_eval()
        from kvpress_eval.lm_tasks import Selection, compare

        options: dict[str, Any] = {
            "model": model,
            "presses": tuple(press or ("none",)),
            "lengths": (16,),  # lm-eval itself cuts prompts to what the model takes
            "batch_size": batch_size,
            "dtype": dtype,
            "device": device,
            "threads": threads,
        }
        names = tuple(split(tasks) or ())
        selection = Selection(names, include, limit, num_fewshot, chat_template, _json_object(metadata))
        config = load_config(None, options)
        make_folder(out)
        check_lengths(config)
        record = compare(config, selection, console)
        console.print(to_table(record))
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
