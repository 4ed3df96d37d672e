# SPDX-License-Identifier: Apache-2.0
"""How close a compressed cache stays to the full one while a given text is continued, for any model, without labels.

One pass over a text, as perplexity is usually taken, shows nothing here: presses act once the prompt has been read, so
that pass never reads what they store, and any press scores like the full cache. Here the prompt is read in one pass and
its continuation one token at a time, as in generation: every distribution is read off the compressed cache, and tokens of
the continuation are themselves encoded or evicted as they become old. In chunks of several tokens, each is a further turn.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console
from rich.text import Text

import kvpress
from kvpress.hf.models import growing_layers
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.continuation import config_errors
from kvpress_eval.fidelity.texts import read_texts, unknown_share
from kvpress_eval.results.records import FIDELITY
from kvpress_eval.run.environment import describe_run
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.models import Engine, check_lengths, load_engine, read_settings
from kvpress_eval.run.progress import RunProgress

_UNKNOWN = 0.5
"""The share of a text from which on it is said that the vocabulary has no words for it."""


def measure(
    config: RunConfig, tokens: int, text: Path | None, console: Console, chunk: int = 1, layers: bool = False
) -> dict[str, Any]:
    """Compare the presses of a configuration on contexts of its first length, each continued by `tokens` tokens.

    Returns what was measured with, and one row per press. The text is a file or made from the tasks. `layers` adds figures of
    every layer whose cache grows.

    Raises:
        ConfigError: the texts are too long for the model, or a press does not suit it.
        DataError: the model or the text cannot be read, or the text is too short.
    """
    context = config.lengths[0]
    model = read_settings(config)
    check_lengths(config.model_copy(update={"lengths": (context + tokens,)}), model)
    engine = load_engine(config, model)
    if layers and not growing_layers(engine.model):
        raise ConfigError(f"model {config.model!r} has no layer whose cache grows with the context: leave out --layers")
    config = in_words_of(config, engine.tokenizer) if text is None else config
    texts = read_texts(config, engine, tokens, text)
    unknown = unknown_share(texts, engine.tokenizer)
    if unknown > _UNKNOWN:
        said = (
            f"{unknown:.0%} of the tokens of {text or 'the texts'} are single letters, or none that the tokenizer of "
            f"{config.model!r} knows: the text is outside its vocabulary, and the figures say little. Take a text in the "
            "language of the model, or leave --text out."
        )
        console.print(Text(said, style="red"))
    comparison = Comparison(engine, texts, context, config.batch_size, chunk, layers)
    for press in config.presses:
        check_press(press, engine, context)
    with RunProgress(console, len(config.presses) * len(comparison.batches)) as progress:
        found = comparison.fidelities(config.presses, progress)
    settings = {
        "kind": FIDELITY,
        "context": context,
        "tokens": tokens,
        "chunk": chunk,
        "text": str(text) if text else None,
        "texts": hash_json(texts.tolist())[:16],
        "outside_vocabulary": unknown,
    }
    return {**describe_run(config, engine), **settings, "rows": [one.row() for one in found]}


def check_press(press: str, engine: Engine, context: int) -> None:
    """Raise ConfigError if a press does not suit the model or contexts of this length."""
    with config_errors(press):
        found = kvpress.get_press(press)
        found.recipe().check_length(context)
        with found(engine.model):
            pass
