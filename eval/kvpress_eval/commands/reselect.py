# SPDX-License-Identifier: Apache-2.0
"""`kvpress reselect`: find the layer in which TidalDecode should select again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Any

import typer
from rich.text import Text

from kvpress_eval.commands import _shared as shared
from kvpress_eval.commands.fidelity import compare
from kvpress_eval.common.errors import ConfigError, DataError


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
    model_kwargs: shared.ModelKwargs = None,
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

        presses = candidates(model, _number(budget), skip_layers, heads)
        record = compare(shared.make_config(options, presses, context), tokens, text, out, force, console)
        chosen = best(record["rows"])
        console.print(Text(f"best: {chosen}"))
        if out:
            write_json(out, {**record, "best": chosen})


def candidates(model: str, budget: float, skip_layers: int, heads: str) -> list[str]:
    """Return one press per layer that may select again: layers with a growing cache after the first that selects.

    Raises:
        ConfigError: an argument is out of range, or the model has no such layer.
        DataError: the model's configuration cannot be read.
    """
    from kvpress.core.spec import to_spec
    from kvpress.hf.config import facts_of_config, load_config
    from kvpress.sparse import TidalDecodePress

    try:
        facts = facts_of_config(load_config(model))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read the configuration of {model!r}: {error}") from error
    growing = [layer.index for layer in facts.growing]
    layers = [layer for layer in growing if layer >= skip_layers][1:]
    if len(layers) < 2:
        raise ConfigError(
            f"{model!r} has {len(growing)} layers with a growing cache, {len(layers)} of them after the first that selects "
            f"with skip_layers={skip_layers}; a comparison needs 2, so use a smaller skip_layers"
        )
    try:
        first = TidalDecodePress(budget, skip_layers=skip_layers, heads=heads)
        return [to_spec(replace(first, reselect_layer=layer)) for layer in layers]
    except (ValueError, TypeError) as error:
        raise ConfigError(str(error)) from error


def best(rows: Sequence[dict[str, Any]]) -> str:
    """Return the press whose next-token distributions stay closest to those of the full cache."""
    return str(min(rows, key=lambda row: row["kl_mean"])["press"])


def _number(text: str) -> float:
    """Read an integer or a fraction."""
    try:
        return int(text) if text.isdecimal() else float(text)
    except ValueError:
        raise ConfigError(
            f"budget must be an integer, the number of pairs, or a fraction in (0, 1), got {text!r}"
        ) from None
