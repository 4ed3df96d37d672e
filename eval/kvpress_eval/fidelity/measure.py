# SPDX-License-Identifier: Apache-2.0
"""Measure how close a compressed cache stays to the full cache along a text, for any model, without labels.

Perplexity in one pass over a text cannot show this: a press compresses after the pass, so the pass reads no compressed pair
and every press scores like the full cache. Here the prompt is read in one pass and its continuation token by token, as in
generation. Every distribution then depends on the compressed cache, and tokens of the continuation are evicted or encoded
as they become old. With chunks of several tokens, each chunk is a further turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

import kvpress
from kvpress.hf.models import growing_layers
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import BatchComparison
from kvpress_eval.fidelity.continuation import config_errors
from kvpress_eval.fidelity.figures import Fidelity
from kvpress_eval.fidelity.texts import read_texts, unknown_share
from kvpress_eval.results.records import FIDELITY, FIRST_TOKENS
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.models import Engine, check_lengths, load_engine, read_settings
from kvpress_eval.run.press_rows import ContextBatch, identity_of, open_rows
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tasks.texts import read_text

_UNKNOWN = 0.5
"""Share of unknown tokens above which a warning is printed that the text is outside the vocabulary."""


def measure(
    config: RunConfig,
    tokens: int,
    text: str | None,
    console: Console,
    chunk: int = 1,
    layers: bool = False,
    *,
    folder: Path | None = None,
    press_seconds: float | None = None,
) -> dict[str, Any]:
    """Compare the presses of a configuration on contexts of its first length, each continued by `tokens` tokens.

    Return a record with the settings and one row per press. `text` is the name of a real text or a file;
    without one, texts are made from the tasks. `layers` adds figures of every layer whose cache grows.

    With a `folder`, every press and batch of texts is stored there as soon as it is measured, and not measured again. A press
    that has used more than `press_seconds` is not measured on further batches, and has no row.

    Raises:
        ConfigError: the texts are too long for the model, a press does not suit it, or `press_seconds` is no time.
        DataError: the model or the text cannot be read, or the text is too short.
        EvalError: a press breaks the model's numbers.
        OutputError: the folder belongs to another measurement.
        BusyError: another process measures into the folder.
    """
    context = config.lengths[0]
    real = None if text is None else read_text(text).shuffled(config.seed)
    model = read_settings(config)
    check_lengths(config.model_copy(update={"lengths": (context + tokens,)}), model)
    engine = load_engine(config, model)
    if layers and not growing_layers(engine.model):
        raise ConfigError(f"model {config.model!r} has no layer whose cache grows with the context: leave out --layers")
    config = in_words_of(config, engine.tokenizer) if text is None else config
    texts = read_texts(config, engine, tokens, real)
    unknown = unknown_share(texts, engine.tokenizer)
    if unknown > _UNKNOWN:
        warning = (
            f"{unknown:.0%} of the tokens of {text or 'the texts'} are single letters, or none that the tokenizer of "
            f"{config.model!r} knows: the text is outside its vocabulary, and the figures mean little. Take a text in the "
            "language of the model, or leave --text out."
        )
        console.print(Text(warning, style="red"))
    for press in config.presses:
        check_press(press, engine, context)
    identity = {
        **identity_of(config, engine),
        "batch_size": config.batch_size,
        "context": context,
        "tokens": tokens,
        "chunk": chunk,
        "layers": layers,
        "text": text,
    }
    batches = texts.split(config.batch_size)
    described = _describe(batches)
    with open_rows(folder, identity, described, config.presses, press_seconds) as rows:
        with RunProgress(console, len(rows.names)) as progress:
            for number, missing in rows.unmeasured(progress):
                batch = BatchComparison(engine, batches[number], context, chunk, layers)
                for press, figures in batch.measure(missing, progress):
                    rows.add(described[number], press, figures.row())
                    progress.advance(1)
                done = sum(item.contexts for item in described[: number + 1])
                progress.reached(f"text {done} of {len(texts)}: {context} tokens and {tokens} more")
        figures_by_press = {press: Fidelity.of_rows(press, of) for press, of in rows.complete(described).items()}
    settings = {
        "kind": FIDELITY,
        "context": context,
        "tokens": tokens,
        "first_tokens": min(FIRST_TOKENS, tokens),
        "chunk": chunk,
        "text": text,
        "text_source": real.origin if real else None,
        "texts": hash_json(texts.tolist())[:16],
        "outside_vocabulary": unknown,
        "press_seconds": press_seconds,
        "stopped": [press.row() for press in rows.stopped],
    }
    fidelities = [fidelity.row() for fidelity in figures_by_press.values()]
    return {**describe_run(config, engine), **settings, "rows": fidelities}


def _describe(batches: Sequence[Tensor]) -> list[ContextBatch]:
    """Return the batches of texts for their rows, named by their tokens: with further texts, earlier rows still count."""
    return [
        ContextBatch(f"{number}-{hash_json(batch.tolist())[:16]}", len(batch), batch.numel())
        for number, batch in enumerate(batches)
    ]


def check_press(press: str, engine: Engine, context: int) -> None:
    """Raise ConfigError if a press does not suit the model or contexts of this length."""
    with config_errors(press):
        configured = kvpress.get_press(press)
        configured.recipe().check_length(context)
        with configured(engine.model):
            pass
