# SPDX-License-Identifier: Apache-2.0
"""`kvpress reselect`: find the layer in which TidalDecode should select again."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.text import Text

from kvpress_eval.commands import _shared as shared
from kvpress_eval.commands.fidelity import compare
from kvpress_eval.common.errors import ConfigError


def command(
    model: shared.Model = "reference",
    budget: Annotated[
        str, typer.Option(help="Pairs that are read, or a fraction of them; small budgets separate the layers best.")
    ] = "64",
    skip_layers: Annotated[int, typer.Option(help="The layer that selects first.", min=0)] = 2,
    heads: Annotated[str, typer.Option(help="mean, max or query.")] = "mean",
    context: Annotated[int, shared.token_count("context", "Tokens that are read in one pass.", least=16)] = 1024,
    tokens: Annotated[int, shared.token_count("tokens", "Tokens that follow, one at a time.", least=2)] = 128,
    samples: shared.Samples = 8,
    text: shared.RealText = None,
    out: shared.FigureFile = None,
    seed: shared.Seed = 0,
    batch_size: shared.BatchSize = 4,
    dtype: shared.Dtype = "auto",
    device: shared.Device = "auto",
    threads: shared.Threads = None,
    force: shared.Force = False,
) -> None:
    """Find the layer in which TidalDecode should select again, by measuring every layer of a model.

    Every layer after the first that selects is measured on the same texts. The best one keeps the next-token distributions
    closest to those of the full cache.
    """
    options = locals()
    with shared.exit_codes() as console:
        from kvpress_eval.common.files import write_json
        from kvpress_eval.fidelity.reselect import best, candidates

        presses = candidates(model, _number(budget), skip_layers, heads)
        record = compare(shared.make_config(options, presses, context), tokens, text, out, force, console)
        chosen = best(record["rows"])
        console.print(Text(f"best: {chosen}"))
        if out:
            write_json(out, {**record, "best": chosen})


def _number(text: str) -> float:
    """Read an integer or a fraction."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise ConfigError(
            f"budget must be an integer, the number of pairs, or a fraction in (0, 1), got {text!r}"
        ) from None
