"""LongBench as tasks: `longbench:SUBSET`, `longbench:SUBSET_e[:RANGE]` and `longbench-v2[:PART]`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from kvpress_eval.errors import ConfigError, DataError, unknown_name
from kvpress_eval.longbench import metrics
from kvpress_eval.longbench.data import VERSION_2, Classified, Published, Question, Row, read_rows, version_1
from kvpress_eval.longbench.subsets import CHOICE, EVEN, EVEN_RANGES, FORMS, PARTS, Form
from kvpress_eval.longbench.wording import published_wording
from kvpress_eval.tasks.sample import Query, Sample

if TYPE_CHECKING:
    from kvpress_eval.config import RunConfig

PREFIXES = ("longbench", "longbench-v2")


@dataclass(frozen=True)
class Subset:
    """A name that a run may ask for: a published file, the form of its prompts, and which of its rows.

    `asked_as` is the name that the published templates have for it.
    """

    name: str
    published: Published
    asked_as: str
    form: Form
    takes: Callable[[Any], bool]


@dataclass(frozen=True, eq=False)
class LongBenchTask:
    """Rows of a subset, cut to a length."""

    task: str
    length: int
    form: Form
    rows: Sequence[Row]
    sha256: str

    def sample_ids(self, config: RunConfig) -> list[str]:
        """Return the names of the samples, without making them."""
        return [self._name(row) for row in self.rows[: config.samples]]

    def samples(self, config: RunConfig, tokenizer: PreTrainedTokenizerBase) -> list[Sample]:
        """Return the samples that the run asks for; prompts of more tokens than `length` lose their middle."""
        return [self._sample(row, tokenizer) for row in self.rows[: config.samples]]

    def identity(self, config: RunConfig) -> dict[str, Any]:
        """Return what decides the samples: the data and how it is asked."""
        return {"longbench": self.sha256, "wording": self.form.wording, "template": self.form.template}

    def max_new_tokens(self, config: RunConfig) -> int:
        """Return the length of the longest answer, the benchmark's unless the run has its own."""
        return config.max_new_tokens or self.form.max_new_tokens

    def _name(self, row: Row) -> str:
        return f"{self.task}-{self.length}-{row.id}"

    def _sample(self, row: Row, tokenizer: PreTrainedTokenizerBase) -> Sample:
        question = self.form.after.format(**row.asked)
        context = cut_middle(self.form.before + row.text, question, self.length, tokenizer)
        score = partial(metrics.best, metric=row.adapt(self.form.metric), first_line=self.form.first_line)
        query = Query(question, "", row.right, score, separator="", chat=self.form.chat)
        return Sample(self._name(row), self.task, self.length, context, query)


def is_longbench(name: str) -> bool:
    """Whether a task is one of these, right or misspelt."""
    return name.partition(":")[0] in PREFIXES


def check_name(name: str) -> None:
    """Raise a ValueError with the nearest names for a task that does not exist."""
    prefix, _, rest = name.partition(":")
    names = _names()
    if name not in names:
        near = [known.partition(":")[2] for known in names if known.startswith(f"{prefix}:")]
        raise ValueError(unknown_name(f"subset of {prefix}", rest, near))


def expand(name: str, config: RunConfig) -> list[LongBenchTask]:
    """Return the tasks behind a name, one per subset and length; data is read, so that a missing file is known early."""
    if "lengths" not in config.model_fields_set:
        raise ConfigError(
            f"{name} needs lengths: the most tokens of a prompt, for example the model's limit less "
            "1024 for the template and the answer; longer prompts lose their middle"
        )
    tasks = []
    for subset in _names()[name]:
        if subset.form.needs_jieba and importlib.util.find_spec("jieba") is None:
            raise ConfigError(f"{subset.name} is scored by words that jieba separates: pip install jieba")
        table = read_rows(subset.published, config.data_dir)
        rows = [row for row in table.rows if subset.takes(row)]
        if not rows:
            raise DataError(f"no rows for {subset.name} in {subset.published.file.origin}")
        form = published_wording(subset.form, subset.asked_as, config.data_dir)
        tasks += [LongBenchTask(subset.name, length, form, rows, table.sha256) for length in config.lengths]
    return tasks


def cut_middle(context: str, question: str, longest: int, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the context without the middle of a prompt that has more than `longest` tokens.

    As in the benchmark, context and question together keep as many tokens at their start as at their end.
    """
    prompt = context + question
    if not tokenizer.is_fast:
        raise ValueError("LongBench needs a fast tokenizer, which says where in a text each token is")
    places = tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
    if len(places) <= longest:
        return context
    half = longest // 2
    start, stop = places[half - 1][1], places[len(places) - half][0]
    if stop > len(context):
        raise ValueError(
            f"length {longest} is too short: half of it must hold the question ({len(question)} characters)"
        )
    return context[:start] + context[stop:]


def _names() -> dict[str, list[Subset]]:
    """Return every name that a run may ask for, and what it stands for."""
    plain = [_subset(name, name) for name in FORMS]
    even = [_subset(f"{name}_e", name) for name in EVEN]
    ranges = [
        replace(subset, name=f"{subset.name}:{label}", takes=partial(_is, "length", words))
        for subset in even
        for label, words in EVEN_RANGES.items()
    ]
    whole = Subset("longbench-v2", VERSION_2, "longbench-v2", CHOICE, _any)
    parts = [
        replace(whole, name=f"{whole.name}:{_slug(value)}", takes=partial(_is, field, (value,)))
        for field, values in PARTS.items()
        for value in values
    ]
    names = {subset.name: [subset] for subset in (*plain, *even, *ranges, *parts, whole)}
    return {**names, "longbench:all": plain, "longbench:all_e": even}


def _subset(name: str, asked_as: str) -> Subset:
    form = FORMS[asked_as]
    schema = Classified if form.metric is metrics.classification else Question
    return Subset(f"longbench:{name}", version_1(name, schema), asked_as, form, _any)


def _any(row: Row) -> bool:
    return True


def _is(field: str, values: Any, row: Row) -> bool:
    return getattr(row, field) in values


def _slug(text: str) -> str:
    return re.sub(r"[^a-z]+", "-", text.lower())
