"""How far a compressed cache moves the next-token distributions while a given text is continued.

One pass over a text, as perplexity is usually taken, shows nothing here: presses act once the prompt has been read, so
that pass never reads what they store, and any press scores like the full cache. Here the prompt is read in one pass and
its continuation one token at a time, as in generation: every distribution is read off the compressed cache, and tokens of
the continuation are themselves encoded or evicted as they become old.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.corpus import documents, pack
from kvpress_eval.config import RunConfig
from kvpress_eval.environment import describe_run
from kvpress_eval.errors import ConfigError, DataError, EvalError
from kvpress_eval.languages import LANGUAGES
from kvpress_eval.models import Engine, load_engine
from kvpress_eval.progress import RunProgress
from kvpress_eval.summary import BASELINE
from kvpress_eval.tasks import generate

PIECE = 128
"""Tokens, about, of each of the contexts that a generated text is made of."""


@dataclass(frozen=True)
class Reading:
    """Logits `[B, tokens, V]` after each token of a continuation, and what the cache held before and after it."""

    logits: Tensor
    prompt: Any
    end: Any


@dataclass(frozen=True)
class Divergence:
    """A press against the full cache on the same tokens: `kl [S, tokens]` in nats, `agrees [S, tokens]` on the top token.

    Bits per value count all bytes held. `shared_bits` is the part of `prompt_bits` in tables, such as codebooks, of which a
    layer holds one for all sequences of a batch.
    """

    press: str
    kl: Tensor
    agrees: Tensor
    prompt_bits: float
    shared_bits: float
    end_bits: float
    kept: float

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data; `kl_by_token` is the mean over samples."""
        return {
            "press": self.press,
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(self.kl.quantile(0.99)),
            "top1_agreement": float(self.agrees.float().mean()),
            "prompt_bits_per_value": self.prompt_bits,
            "shared_bits_per_value": self.shared_bits,
            "end_bits_per_value": self.end_bits,
            "kept": self.kept,
            "kl_by_token": [round(value, 7) for value in self.kl.mean(dim=0).tolist()],
        }


@dataclass(frozen=True)
class Comparison:
    """Texts `ids [S, context + tokens]` that presses are compared with the full cache on.

    The logits of the full cache, `[S, tokens, V]` in the dtype of the model, are computed once and held.
    """

    engine: Engine
    ids: Tensor
    context: int
    batch_size: int

    @cached_property
    def full(self) -> list[Reading]:
        """The batches read with the full cache, one token at a time as well, so that rounding is the same."""
        return [self.read(BASELINE, batch) for batch in self._batches]

    @property
    def _batches(self) -> Sequence[Tensor]:
        return self.ids.split(self.batch_size)

    def divergence(self, press: str) -> Divergence:
        """Read all texts under a press.

        Raises:
            ConfigError: the press does not suit the model or the length of the context.
            EvalError: the press breaks the model's numbers.
        """
        kl, agrees, prompts, ends = [], [], [], []
        for batch, full in zip(self._batches, self.full, strict=True):
            reading = self.read(press, batch)
            kl.append(kl_divergence(full.logits, reading.logits))
            agrees.append(full.logits.argmax(-1) == reading.logits.argmax(-1))
            prompts.append(reading.prompt)
            ends.append(reading.end)
        return Divergence(
            press,
            torch.cat(kl).cpu(),
            torch.cat(agrees).cpu(),
            prompt_bits=_bits(prompts, sum(report.total_bytes for report in prompts)),
            shared_bits=_bits(prompts, sum(report.components.get("tables", 0) for report in prompts)),
            end_bits=_bits(ends, sum(report.total_bytes for report in ends)),
            kept=sum(report.kept for report in ends) / sum(report.seen for report in ends),
        )

    @torch.inference_mode()
    def read(self, press: str, batch: Tensor) -> Reading:
        """Read the contexts of `batch [B, context + tokens]` in one pass, and every token after them alone."""
        model = self.engine.model
        cache = DynamicCache(config=model.config)
        logits = []
        with torch.random.fork_rng():
            torch.manual_seed(0)  # for presses that draw at random
            try:
                with kvpress.get_press(press)(model):
                    model(batch[:, : self.context], past_key_values=cache, logits_to_keep=1)
                    prompt = kvpress.memory_report(cache)
                    for token in batch[:, self.context :].split(1, dim=1):
                        logits.append(model(token, past_key_values=cache).logits[:, -1])
            except (ValueError, NotImplementedError) as error:
                raise ConfigError(f"press {press!r}: {error}") from error
        joined = torch.stack(logits, dim=1)
        if joined.isnan().any():
            raise EvalError(f"press {press!r}: NaN in the logits")
        return Reading(joined, prompt, kvpress.memory_report(cache))


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """Return KL(full || other) in nats of logits `[B, n, V]`, float32 `[B, n]`; token by token, to bound its memory."""
    columns = []
    for p, q in zip(full.unbind(1), other.unbind(1), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        columns.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.stack(columns, dim=1)


def measure(config: RunConfig, tokens: int, text: Path | None, console: Console) -> dict[str, Any]:
    """Compare the presses of a configuration on contexts of its first length, each continued by `tokens` tokens.

    Returns what was measured with, and one row per press. The text is a file or made from the tasks.

    Raises:
        ConfigError: the texts are too long for the model, or a press does not suit it.
        DataError: the model or the text cannot be read, or the text is too short.
    """
    context = config.lengths[0]
    if config.threads:
        torch.set_num_threads(config.threads)
    engine = load_engine(config.model_copy(update={"lengths": (context + tokens,)}))
    comparison = Comparison(engine, read_texts(config, engine, tokens, text), context, config.batch_size)
    rows = []
    with RunProgress(console, len(config.presses)) as progress:
        for press in config.presses:
            progress.cell(press)
            rows.append(comparison.divergence(press).row())
            progress.advance(1)
    settings = {"context": context, "tokens": tokens, "text": str(text) if text else None}
    return {**describe_run(config, engine), **settings, "rows": rows}


def read_texts(config: RunConfig, engine: Engine, tokens: int, text: Path | None = None) -> Tensor:
    """Return ids `[samples, context + tokens]` of a file, or of texts made from the tasks of the configuration."""
    length = config.lengths[0] + tokens
    if text is not None and not text.is_file():
        raise DataError(f"no text file {str(text)!r}")
    source = documents(str(text)) if text else (write_text(config, engine, length, number) for number in count())
    try:
        return pack(engine.tokenizer, source, length, config.samples).to(engine.model.device)
    except (OSError, ValueError) as error:
        raise DataError(f"no {config.samples} texts of {length} tokens from {text or 'the tasks'}: {error}") from error


def write_text(config: RunConfig, engine: Engine, tokens: int, number: int) -> str:
    """Return text `number`, at least `tokens` tokens: contexts of all tasks in turn, then their questions and answers.

    The contexts fill that of the run, so that its continuation opens with questions about them; then more follow.
    """
    rng = random.Random(f"{config.seed}-{number}")  # noqa: S311  # reproducible, not secret
    language, context = LANGUAGES[config.wording], config.lengths[0]
    pieces = max(1, context // PIECE)
    tasks, text = cycle(config.tasks), ""
    while len(engine.tokenizer(text)["input_ids"]) < tokens:
        samples = [
            generate(task, engine.tokenizer, context // pieces, 1, language=language, seed=rng.getrandbits(32))[0]
            for task in islice(tasks, pieces)
        ]
        text += "".join(sample.context for sample in samples)
        for query in (sample.query for sample in samples):
            text += f"{query.question}\n{query.answer_prefix} {', '.join(query.answers)}."
    return text


def to_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the rows as a table for the terminal."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("press", overflow="fold")
    for heading in ("KL\nmean", "KL\n99%", "same top\ntoken %", "bits/value\nprompt", "bits/value\nend", "kept\n%"):
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(
            row["press"],
            f"{row['kl_mean']:.5f}",
            f"{row['kl_p99']:.4f}",
            f"{100 * row['top1_agreement']:.1f}",
            f"{row['prompt_bits_per_value']:.2f}",
            f"{row['end_bits_per_value']:.2f}",
            f"{100 * row['kept']:.0f}",
        )
    return table


def _bits(reports: Sequence[Any], size: int) -> float:
    """Spread bytes over the values of the uncompressed caches."""
    return 8 * size / sum(report.uncompressed_bytes / report.value_bytes for report in reports)
