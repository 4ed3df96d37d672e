# SPDX-License-Identifier: Apache-2.0
"""`kvpress demo`: what each kind of press saves and loses, on a small pretrained model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from kvpress_eval.commands import _shared as shared
from kvpress_eval.commands.recall import measure_and_write

if TYPE_CHECKING:
    from kvpress_eval.config.schema import RunConfig

PRETRAINED, REFERENCE = "smollm2", "reference"
PRESSES = (
    "none",
    "kivi:bits=4",
    "frontier:smaller=10",
    "budgeted(compactor):smaller=10",
    "snapkv:0.5",
    "quest:budget=256,page_size=4",
)
"""Full cache, codec, two caches of one size (the second reads the prompt once), common eviction, selector."""
CONTEXTS, FACTS = 9, 10


def command(
    out: Annotated[Path, typer.Option(help="Folder for the figures.")] = Path("runs/demo"),
    model: Annotated[
        str | None, typer.Option(help="smollm2, reference, or a model as in recall; default: smollm2 if installed.")
    ] = None,
) -> None:
    """Show how much smaller each kind of press makes the cache, and how many facts of a context the model still recalls.

    The model is SmolLM2-135M-Instruct. Where its package is missing, the tiny reference model takes its place, and a line names
    the reason. A stopped demo continues with the same command.
    """
    with shared.exit_codes() as console:
        from kvpress_eval.common.files import check_replaced, make_room
        from kvpress_eval.recall.facts import FactSettings
        from kvpress_eval.recall.figures import Margins
        from kvpress_eval.results.store import rows_folder
        from kvpress_eval.results.verdict import nats, points

        reason = None
        if model is None:
            model, reason = choose_model()
        figures = out / f"{Path(model).stem}.json"
        make_room(figures, figures.name)
        check_replaced([figures], [model], force=rows_folder(figures).is_dir())
        if reason:
            console.print(Text(reason, style="bold red"), soft_wrap=True)
        margins = Margins(points(3.0), nats(0.05))
        measure_and_write(demo_config(model), FactSettings(FACTS), margins, figures, console)
        if reason:
            console.print(Text(reason, style="bold red"), soft_wrap=True)
        console.print(Text(f"wrote {figures}"), soft_wrap=True)


def choose_model() -> tuple[str, str | None]:
    """Return the pretrained model, or the reference model and one sentence with the reason."""
    from kvpress.hf.model_files import folder_of

    try:
        folder_of(PRETRAINED)
    except (ImportError, OSError, ValueError) as error:
        return REFERENCE, (
            f"THESE ARE FIGURES OF THE TINY REFERENCE MODEL, NOT OF A LANGUAGE MODEL, as SmolLM2 cannot be loaded: {error}"
        )
    return PRETRAINED, None


def demo_config(model: str) -> RunConfig:
    """Return the settings of the demo: about 3 minutes on two idle CPU cores."""
    from kvpress_eval.config.schema import RunConfig

    return RunConfig(model=model, presses=PRESSES, lengths=(1024,), samples=CONTEXTS, threads=2)
