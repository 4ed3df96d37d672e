"""How close a compressed cache stays to the full one while a given text is continued, for any model, without labels.

One pass over a text, as perplexity is usually taken, shows nothing here: presses act once the prompt has been read, so
that pass never reads what they store, and any press scores like the full cache. Here the prompt is read in one pass and
its continuation one token at a time, as in generation: every distribution is read off the compressed cache, and tokens of
the continuation are themselves encoded or evicted as they become old. In chunks of several tokens, each is a further turn.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count, cycle, islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the usual name
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor
from transformers import Cache

import kvpress
from kvpress.corpus import documents, pack
from kvpress.hf import growing_layers
from kvpress_eval.cells import hash_json
from kvpress_eval.config import RunConfig
from kvpress_eval.continuation import Reading, Watcher, config_errors, continue_reading, read_prompts
from kvpress_eval.environment import describe_run
from kvpress_eval.errors import ConfigError, DataError
from kvpress_eval.languages import LANGUAGES
from kvpress_eval.layers import Meter, Recorder, by_layer
from kvpress_eval.models import Engine, check_lengths, load_engine
from kvpress_eval.progress import RunProgress
from kvpress_eval.records import FIDELITY
from kvpress_eval.summary import BASELINE
from kvpress_eval.table import number
from kvpress_eval.tasks import generate

PIECE = 128
"""Tokens, about, of each of the contexts that a generated text is made of."""


@dataclass(frozen=True)
class LayerFigures:
    """Each of the `layers` under a press against the same layer of the full cache, `[S, tokens, L]`.

    `output_error` is that of the running model, in which every layer gets what the layers before it made of their own errors;
    for `isolated_error` it gets the input that it has with the full cache.
    """

    layers: list[int]
    output_error: Tensor
    isolated_error: Tensor
    attention_recall: Tensor

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data: means over samples and tokens, of all layers and of each."""
        row: dict[str, Any] = {"layers": self.layers}
        for name in LAYER_FIGURES:
            values = getattr(self, name).mean(dim=(0, 1))
            row[name] = float(values.mean())
            row[f"{name}_by_layer"] = [round(value, 7) for value in values.tolist()]
        return row


LAYER_FIGURES = ("output_error", "isolated_error", "attention_recall")


@dataclass(frozen=True)
class Figure:
    """A column of a table: its heading, the key in a row, and the decimals of what is shown, `factor` times the value."""

    heading: str
    key: str
    digits: int
    factor: float = 1.0

    def text(self, row: Mapping[str, Any]) -> str:
        """Write the figure of a row, a dash where it was not measured."""
        value = row.get(self.key)
        return number(None if value is None else self.factor * value, self.digits)


FIGURES = (
    Figure("KL\nmean", "kl_mean", 5),
    Figure("KL\n99%", "kl_p99", 4),
    Figure("same top\ntoken %", "top1_agreement", 1, 100),
    Figure("perplexity", "perplexity", 3),
    Figure("bits/value\nprompt", "prompt_bits_per_value", 2),
    Figure("bits/value\nend", "end_bits_per_value", 2),
    Figure("kept\n%", "kept", 0, 100),
)


@dataclass(frozen=True)
class Fidelity:
    """A press against the full cache on the same tokens: `kl [S, tokens]` in nats, `agrees [S, tokens]` on the top token.

    `nll` and `full_nll [S, tokens - 1]` are the negative log-likelihoods, in nats, of the continuation but its first token,
    which the uncompressed prompt alone predicts. Bits per value count all bytes held. `shared_bits` is the part of
    `prompt_bits` in tables, such as codebooks, of which a layer holds one for all sequences of a batch.
    """

    press: str
    kl: Tensor
    agrees: Tensor
    nll: Tensor
    full_nll: Tensor
    prompt_bits: float
    shared_bits: float
    end_bits: float
    kept: float
    layers: LayerFigures | None = None

    def row(self) -> dict[str, Any]:
        """Return the figures as plain data; `kl_by_token` is the mean over samples."""
        return {
            "press": self.press,
            "kl_mean": float(self.kl.mean()),
            "kl_p99": float(self.kl.quantile(0.99)),
            "top1_agreement": float(self.agrees.float().mean()),
            "perplexity": float(self.nll.mean().exp()),
            "full_perplexity": float(self.full_nll.mean().exp()),
            "prompt_bits_per_value": self.prompt_bits,
            "shared_bits_per_value": self.shared_bits,
            "end_bits_per_value": self.end_bits,
            "kept": self.kept,
            "kl_by_token": [round(value, 7) for value in self.kl.mean(dim=0).tolist()],
            **(self.layers.row() if self.layers else {}),
        }


@dataclass
class _Measured:
    """What was measured of one press, batch by batch; the meters of layers where they were asked for."""

    kl: list[Tensor] = field(default_factory=list)
    agrees: list[Tensor] = field(default_factory=list)
    nll: list[Tensor] = field(default_factory=list)
    full_nll: list[Tensor] = field(default_factory=list)
    prompts: list[Any] = field(default_factory=list)
    ends: list[Any] = field(default_factory=list)
    running: list[Meter] = field(default_factory=list)
    isolated: list[Meter] = field(default_factory=list)

    def add(self, full: Reading, reading: Reading, tokens: Tensor) -> None:
        """Compare a batch with the full cache: both were read along `tokens [B, n]`."""
        self.kl.append(kl_divergence(full.logits, reading.logits))
        self.agrees.append(full.logits.argmax(-1) == reading.logits.argmax(-1))
        self.nll.append(negative_log_likelihood(reading.logits, tokens))
        self.full_nll.append(negative_log_likelihood(full.logits, tokens))
        self.prompts.append(reading.prompt)
        self.ends.append(reading.end)

    def fidelity(self, press: str) -> Fidelity:
        """Join all batches."""
        return Fidelity(
            press,
            torch.cat(self.kl).cpu(),
            torch.cat(self.agrees).cpu(),
            torch.cat(self.nll).cpu(),
            torch.cat(self.full_nll).cpu(),
            prompt_bits=_bits(self.prompts, sum(report.total_bytes for report in self.prompts)),
            shared_bits=_bits(self.prompts, sum(report.components.get("tables", 0) for report in self.prompts)),
            end_bits=_bits(self.ends, sum(report.total_bytes for report in self.ends)),
            kept=sum(report.kept for report in self.ends) / sum(report.seen for report in self.ends),
            layers=_layer_figures(self.running, self.isolated) if self.running else None,
        )


@dataclass(frozen=True)
class Comparison:
    """Texts `ids [S, context + tokens]` that presses are compared with the full cache on.

    Continuations are read in chunks of `chunk` tokens. Of the full cache the logits, `[S, tokens, V]` in the dtype of the
    model, are computed once and held; with `layers` also its pairs, and what went through its layers.
    """

    engine: Engine
    ids: Tensor
    context: int
    batch_size: int
    chunk: int = 1
    layers: bool = False
    _full: dict[int, Reading] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def full(self) -> list[Reading]:
        """The batches read with the full cache, in the same chunks, so that rounding is the same."""
        self.fidelities(())
        return list(self._full.values())

    @property
    def batches(self) -> Sequence[Tensor]:
        """The texts that are read together."""
        return self.ids.split(self.batch_size)

    def fidelity(self, press: str) -> Fidelity:
        """Read all texts under a press; raises what `fidelities` does."""
        return self.fidelities((press,))[0]

    def fidelities(self, presses: Sequence[str], progress: RunProgress | None = None) -> list[Fidelity]:
        """Read all texts under presses, which share the reading of contexts as far as they can.

        The first time, the full cache is read with them. `progress` counts the batches that each press has continued.

        Raises:
            ConfigError: a press does not suit the model or the length of the context.
            EvalError: a press breaks the model's numbers.
        """
        measured = {press: _Measured() for press in presses}
        for index, batch in enumerate(self.batches):
            context, following = batch[:, : self.context], batch[:, self.context :]
            first = () if index in self._full else (BASELINE,)
            for press, cache in read_prompts(self.engine.model, (*first, *measured), context):
                if index not in self._full:
                    self._full[index] = self._record(cache, following)
                    continue
                if progress:
                    progress.cell(press)
                self._measure(measured[press], press, cache, following, self._full[index])
                if progress:
                    progress.advance(1)
        return [measured[press].fidelity(press) for press in presses]

    def read(self, press: str, batch: Tensor) -> Reading:
        """Read the contexts of `batch [B, context + tokens]` in one pass, and what follows in chunks."""
        ((_, cache),) = read_prompts(self.engine.model, (press,), batch[:, : self.context])
        return self._continue(press, cache, batch[:, self.context :])

    def _record(self, cache: Cache, tokens: Tensor) -> Reading:
        if not self.layers:
            return self._continue(BASELINE, cache, tokens)
        recorder = Recorder()
        return replace(self._continue(BASELINE, cache, tokens, recorder.on), layers=recorder.layers)

    def _measure(self, measured: _Measured, press: str, cache: Cache, tokens: Tensor, full: Reading) -> None:
        if self.layers:
            measured.running.append(Meter(full.layers))
            measured.isolated.append(Meter(full.layers, isolated=True))
            self._continue(press, copy.deepcopy(cache), tokens, measured.isolated[-1].on)
        watch = measured.running[-1].on if self.layers else None
        measured.add(full, self._continue(press, cache, tokens, watch), tokens)

    def _continue(self, press: str, cache: Cache, tokens: Tensor, watch: Watcher | None = None) -> Reading:
        return continue_reading(self.engine.model, press, cache, tokens, self.chunk, watch)


def check_press(press: str, engine: Engine, context: int) -> None:
    """Raise ConfigError if a press does not suit the model or contexts of this length."""
    with config_errors(press):
        found = kvpress.get_press(press)
        found.check_length(context)
        with found(engine.model):
            pass


def kl_divergence(full: Tensor, other: Tensor) -> Tensor:
    """Return KL(full || other) in nats of logits `[B, n, V]`, float32 `[B, n]`; token by token, to bound its memory."""
    columns = []
    for p, q in zip(full.unbind(1), other.unbind(1), strict=True):
        log_p, log_q = p.float().log_softmax(-1), q.float().log_softmax(-1)
        columns.append((log_p.exp() * (log_p - log_q)).sum(-1))
    return torch.stack(columns, dim=1)


def negative_log_likelihood(logits: Tensor, tokens: Tensor) -> Tensor:
    """Return that of `tokens [B, n]` but the first, in nats, `[B, n - 1]`; `logits [B, n, V]` follow each token."""
    followed = zip(logits.unbind(1)[:-1], tokens.unbind(1)[1:], strict=True)
    return torch.stack([F.cross_entropy(part.float(), target, reduction="none") for part, target in followed], dim=1)


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
    check_lengths(config.model_copy(update={"lengths": (context + tokens,)}))
    engine = load_engine(config)
    if layers and not growing_layers(engine.model):
        raise ConfigError(f"model {config.model!r} has no layer whose cache grows with the context: leave out --layers")
    texts = read_texts(config, engine, tokens, text)
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
    }
    return {**describe_run(config, engine), **settings, "rows": [one.row() for one in found]}


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
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0), caption_justify="left")
    table.add_column("press", overflow="fold")
    for figure in FIGURES:
        table.add_column(figure.heading, justify="right")
    for row in rows:
        table.caption = f"perplexity of the full cache: {row['full_perplexity']:.3f}"
        table.add_row(Text(row["press"]), *(figure.text(row) for figure in FIGURES))
    return table


def to_layer_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Return the figures of every layer as a table for the terminal, one section per press."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("press", overflow="fold")
    for heading in ("layer", "output error\nrunning", "output error\nisolated", "attention\nrecall %"):
        table.add_column(heading, justify="right")
    for row in rows:
        by_layer = zip(row["layers"], *(row[f"{name}_by_layer"] for name in LAYER_FIGURES), strict=True)
        press = row["press"]
        for layer, *figures in [*by_layer, ("mean", *(row[name] for name in LAYER_FIGURES))]:
            error, isolated, recall = figures
            table.add_row(Text(press), str(layer), f"{error:.4f}", f"{isolated:.4f}", f"{100 * recall:.1f}")
            press = ""
    return table


def _layer_figures(running: Sequence[Meter], isolated: Sequence[Meter]) -> LayerFigures:
    """Join what was measured of each batch."""
    return LayerFigures(
        list(running[0].full),
        torch.cat([by_layer(meter.errors) for meter in running]),
        torch.cat([by_layer(meter.errors) for meter in isolated]),
        torch.cat([by_layer(meter.recalls) for meter in running]),
    )


def _bits(reports: Sequence[Any], size: int) -> float:
    """Spread bytes over the values of the uncompressed caches."""
    return 8 * size / sum(report.uncompressed_bytes / report.value_bytes for report in reports)
