# SPDX-License-Identifier: Apache-2.0
"""Show the tokens of a text that presses keep, as a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import kvpress
from kvpress.cache.report import MemoryReport
from kvpress.core.effect import left_whole, left_whole_note
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report import page
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.generation import read_contexts
from kvpress_eval.run.kept import MOST_TOKENS, kept_of, tokens_of
from kvpress_eval.run.models import Engine, check_lengths, load_engine


@dataclass(frozen=True)
class Shown:
    """Result of one press on a text."""

    press: str
    """Spec of the press."""
    memory: MemoryReport
    """Memory of the compressed cache."""
    kept: dict[str, Any]
    """Kept tokens of each head, with the texts of the tokens."""
    notes: tuple[str, ...]
    """Effects of the press, in words."""


def show(config: RunConfig, text: str, tokens: int | None) -> tuple[list[Shown], dict[str, Any]]:
    """Read the first `tokens` tokens of a text, or all, with each press of a configuration.

    Return one result per press, and a record of the model and the settings.

    Raises:
        ConfigError: a press does not suit the model, or the text is too long for the model.
        DataError: the text is empty or too long for a page.
    """
    if not text.strip():
        raise DataError("the text is empty")
    engine = load_engine(config)
    ids = engine.tokenizer(text)["input_ids"][:tokens]
    if len(ids) > MOST_TOKENS:
        raise DataError(
            f"the text has {len(ids)} tokens, a page shows at most {MOST_TOKENS}; --tokens {MOST_TOKENS} takes the first"
        )
    check_lengths(config.model_copy(update={"lengths": (len(ids),)}), engine.model.config)
    pieces = tokens_of(engine.tokenizer, ids, text)
    return [_read(engine, press, ids, pieces) for press in config.presses], describe_run(config, engine)


def to_html(shown: Sequence[Shown], record: dict[str, Any], name: str) -> str:
    """Return the page for the text `name`."""
    views = [(item, page.kept_view(item.kept)) for item in shown]
    return page.render("show.html.j2", shown=views, record=record, name=name)


def read_text(path: Path, standard_input: Any) -> str:
    """Return the text of a file, or of standard input for `-`.

    Raises:
        DataError: the file cannot be read, or is not UTF-8.
    """
    try:
        data = standard_input.read() if str(path) == "-" else path.read_bytes()
        return str(data.decode("utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot read {path}: {error}") from error


def _read(engine: Engine, spec: str, ids: list[int], pieces: dict[str, Any]) -> Shown:
    press = kvpress.get_press(spec)
    with torch.random.fork_rng():
        torch.manual_seed(0)  # for presses that draw at random
        try:
            (context,) = read_contexts(engine, [press], [ids])
        except (ValueError, NotImplementedError, FloatingPointError) as error:
            raise ConfigError(f"press {spec!r}: {error}") from error
    kept = {**kept_of(context.cache, len(ids)), **pieces}
    return Shown(spec, context.report, kept, _notes(press, context.report))


def _notes(press: Any, memory: MemoryReport) -> tuple[str, ...]:
    """Describe the effects of a press, including those that a map of kept tokens cannot show."""
    notes = []
    recipe = press.recipe()
    if recipe.is_identity:
        notes.append("keeps everything")
    elif memory.kept < memory.seen:
        notes.append("evicts tokens of the prompt")
    else:
        notes.append("drops no token of this text")
    if recipe.acting("decode"):
        notes.append("evicts while tokens are generated, which is not shown")
    if recipe.codec is not None:
        notes.append("stores pairs in fewer bits")
    if recipe.selector is not None:
        notes.append("reads a part of what is kept, chosen anew for every generated token")
    if left_whole(press, memory.kept / max(1, memory.seen), memory.total_bytes, memory.uncompressed_bytes):
        notes.append(left_whole_note(press))
    return tuple(notes)
