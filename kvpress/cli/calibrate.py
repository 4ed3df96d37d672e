# SPDX-License-Identifier: Apache-2.0
"""`kvpress calibrate`: fit the file of a calibrated method to a model."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.console import Console
from rich.progress import Progress, TaskID

from kvpress.cli.console import Device, shown
from kvpress.cli.console import tokens as token_count
from kvpress.cli.outputs import check_outputs

if TYPE_CHECKING:
    from kvpress.calibrate.run import CalibrationSettings


def calibrate_command(
    model: Annotated[str, typer.Option(help="`reference`, a folder or a hub name.")],
    data: Annotated[
        list[str], typer.Option(help="A .jsonl file with `text`, any text file, or a dataset; may be repeated.")
    ],
    out: Annotated[Path, typer.Option(help="The file to write; double_sparsity also writes the authors' .json.")],
    method: Annotated[
        Literal[
            "aquakv",
            "bits",
            "block_gtq",
            "cq",
            "double_sparsity",
            "duo_attention",
            "expected_attention",
            "fastkvzip",
            "kvquant",
            "kvzap",
            "kvzip_heads",
            "leank",
            "loki",
            "lukv",
            "minference",
            "qfilter",
            "restorekv",
            "rlkv",
            "triattention",
        ],
        typer.Option(
            help="What to fit: bits for every layer, books for coupled quantisation, levels for kvquant, predictors of "
            "values for aquakv, energies of pairs of channels for block_gtq, channels for double_sparsity, directions of keys "
            "for loki, scales of channels for leank, "
            "statistics of queries for expected_attention_stats, triattention or qfilter, networks for kvzap or fastkvzip, "
            "budgets of heads for lukv, tokens and an adapter for restorekv, patterns for minference, or tables of heads by "
            "duo_attention, rlkv or kvzip_heads (a .tsv)."
        ),
    ] = "cq",
    coupled: Annotated[str | None, typer.Option(help="cq: channels in a code, one number or keys,values (4).")] = None,
    bits: Annotated[str | None, typer.Option(help="cq: bits of a code, one number or keys,values (8).")] = None,
    fisher: Annotated[
        bool | None, typer.Option("--fisher/--no-fisher", help="cq, kvquant: weigh by squared gradients (yes).")
    ] = None,
    iterations: Annotated[
        int | None, typer.Option(help="cq, kvquant, aquakv: most rounds of k-means (100, 50, 50).")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="cq, kvquant, aquakv, networks, tables, restorekv: random seed (0).")
    ] = None,
    outliers: Annotated[
        float | None, typer.Option(help="kvquant: share of the numbers of a channel that its range leaves out (0.01).")
    ] = None,
    average: Annotated[float | None, typer.Option(help="bits: mean over layers, keys and values (3).")] = None,
    density: Annotated[
        float | None, typer.Option(help="minference: share of the pairs of a prompt that is read (0.25).")
    ] = None,
    last: Annotated[int | None, typer.Option(help="minference: newest queries that select the lines (64).")] = None,
    block: Annotated[int | None, typer.Option(help="minference: tokens of a block (64).")] = None,
    widths: Annotated[str | None, typer.Option(help="bits: widths to choose from for each layer (2,3,4,8).")] = None,
    n_sink: Annotated[
        int | None, typer.Option(help="expected_attention: tokens left out at the start of each sequence (4).")
    ] = None,
    sink_size: Annotated[int | None, typer.Option(help="Tables: first tokens that a streaming head keeps.")] = None,
    recent_size: Annotated[int | None, typer.Option(help="Tables: newest tokens that a streaming head keeps.")] = None,
    answer: Annotated[
        int | None,
        typer.Option(help="Tables, restorekv: last tokens of a sequence, which its prompt is to explain (64)."),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="Trained: updates (tables 200, restorekv 300, kvzap 2000, fastkvzip 5000).")
    ] = None,
    price: Annotated[float | None, typer.Option(help="Tables: penalty of an open gate.")] = None,
    lr: Annotated[float | None, typer.Option(help="Tables, networks, restorekv: learning rate.")] = None,
    sample: Annotated[
        int | None, typer.Option(help="kvzap, fastkvzip: tokens drawn from each sequence (500, 2000).")
    ] = None,
    kind: Annotated[str | None, typer.Option(help="kvzap: linear or mlp (mlp).")] = None,
    width: Annotated[
        int | None, typer.Option(help="kvzap: hidden units of an mlp (512); fastkvzip: channels (16).")
    ] = None,
    press: Annotated[
        str | None, typer.Option(help="lukv: the press that scores, without a ratio (expected_attention:epsilon=0.02).")
    ] = None,
    sequences: Annotated[int, typer.Option(help="Sequences to read.", min=1)] = 16,
    tokens: Annotated[int, token_count("tokens", "Tokens in each sequence.", least=16)] = 2048,
    device: Device = "auto",
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Fit the file of a calibrated method to a model. A stopped run resumes when it is started again."""
    from kvpress.cache.report import format_bytes
    from kvpress.calibrate.corpus import documents, pack
    from kvpress.calibrate.run import calibrate
    from kvpress.hf.generation.pipeline import load_model
    from kvpress.hf.models import device_named

    console = Console(stderr=True)
    with shown():
        options = {
            "coupled": None if coupled is None else _sides("coupled", coupled),
            "bits": None if bits is None else _sides("bits", bits),
            "fisher": fisher, "iterations": iterations, "seed": seed, "outliers": outliers,
            "density": density, "last": last, "block": block, "average": average,
            "widths": None if widths is None else _numbers("widths", widths), "n_sink": n_sink,
            "sink_size": sink_size, "recent_size": recent_size, "answer": answer, "steps": steps, "price": price, "lr": lr,
            "sample": sample, "kind": kind, "width": width, "press": press,
        }  # fmt: skip
        settings = _settings(method, {name: value for name, value in options.items() if value is not None})
        check_outputs(settings.outputs(out), [model, *data], force)
        place = device_named(device)
        loaded, tokenizer = load_model(model)
        ids = pack(tokenizer, (text for source in data for text in documents(source)), tokens, sequences)
        with Progress(console=console) as progress:
            rows: dict[str, TaskID] = {}

            def report(phase: str, done: int, total: int) -> None:
                if phase not in rows:
                    rows[phase] = progress.add_task(phase)
                progress.update(rows[phase], completed=done, total=total)

            calibrate(loaded.to(place), ids, settings, out, " ".join(data), report)
    typer.echo(f"wrote {out} ({format_bytes(out.stat().st_size)})")


def _settings(method: str, options: dict[str, Any]) -> CalibrationSettings:
    """Return the settings of a method. Raises ValueError for options of other methods."""
    from kvpress.calibrate import METHODS

    settings_class: type[CalibrationSettings] = METHODS[method]
    accepted = [field.name for field in fields(settings_class)]
    for name in options:
        if name not in accepted:
            allowed = ", ".join(_option(field_name) for field_name in accepted) or "no options of its own"
            raise ValueError(f"{_option(name)} does not belong to {method}, which takes {allowed}")
    return settings_class(**options)


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _sides(name: str, text: str) -> tuple[int, int]:
    """Read one number for keys and values, or one for each."""
    expected = "a number or two, keys,values"
    numbers = _numbers(name, text, expected)
    if len(numbers) > 2:
        raise ValueError(f"{name} must be {expected}; got {text!r}")
    return numbers[0], numbers[-1]


def _numbers(name: str, text: str, expected: str = "integers with commas between them") -> tuple[int, ...]:
    """Read integers with commas between them."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{name} must be {expected}; got {text!r}") from None
