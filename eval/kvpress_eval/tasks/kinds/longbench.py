# SPDX-License-Identifier: Apache-2.0
"""LongBench as tasks: `longbench:SUBSET`, `longbench:SUBSET_e[:RANGE]` and `longbench-v2[:PART]`."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.common.files import hash_json
from kvpress_eval.tasks.documents import cut_middle, require_lengths
from kvpress_eval.tasks.longbench import metrics
from kvpress_eval.tasks.longbench.data import (
    VERSION_2,
    Classified,
    PublishedRows,
    QuestionRow,
    Row,
    read_rows,
    version_1,
)
from kvpress_eval.tasks.longbench.subsets import CHOICE, EVEN, EVEN_RANGES, FORMS, PARTS, PromptForm
from kvpress_eval.tasks.longbench.wording import published_wording
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Subset:
    """Rows of a published file as a task."""

    name: str
    """Name of the task."""
    published: PublishedRows
    """The file."""
    form_name: str
    """Name of the subset in the published templates."""
    form: PromptForm
    """Prompt and score."""
    takes: Callable[[Any], bool]
    """Returns whether a row belongs to the task."""


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    """Return one source per subset and length."""
    require_lengths(names[0], request)
    return [source for name in names for subset in NAMES[name] for source in _sources(subset, request)]


def _sources(subset: Subset, request: TaskSettings) -> list[Source]:
    if subset.form.needs_jieba and importlib.util.find_spec("jieba") is None:
        raise ConfigError(f"{subset.name} is scored by words that jieba separates: pip install jieba")
    table = read_rows(subset.published, request.data_dir)
    rows = [row for row in table.rows if subset.takes(row)]
    if not rows:
        raise DataError(f"no rows for {subset.name} in {subset.published.file.origin}")
    form = published_wording(subset.form, subset.form_name, request.data_dir)
    return [
        Source(
            subset.name,
            length,
            [f"{subset.name}-{length}-{row.id}" for row in rows[: request.samples]],
            partial(_make, subset.name, length, form, rows[: request.samples]),
            {"longbench": table.sha256, "wording": form.wording, "template": form.template},
            request.max_new_tokens or form.max_new_tokens,
        )
        for length in request.lengths
    ]


def _make(
    name: str, length: int, form: PromptForm, rows: Sequence[Row], tokenizer: PreTrainedTokenizerBase
) -> list[Sample]:
    """Return a sample for each row; prompts of more than `length` tokens are cut in the middle."""
    samples = []
    for row in rows:
        question = form.after.format(**row.question_fields)
        context = cut_middle(form.before + row.text, question, length, tokenizer)
        score = partial(metrics.best, metric=row.adapt(form.metric), first_line=form.first_line)
        query = Query(question, "", row.right, score, separator="", chat=form.chat)
        name_of_sample = f"{name}-{length}-{row.id}"
        samples.append(Sample(name_of_sample, name, length, context, query, document=hash_json(row.text)))
    return samples


def _names() -> dict[str, list[Subset]]:
    """Return every valid name with its subsets."""
    plain = [_subset(name, name) for name in FORMS]
    even = [_subset(f"{name}_e", name) for name in EVEN]
    ranges = [
        replace(subset, name=f"{subset.name}:{label}", takes=partial(_is, "length", words))
        for subset in even
        for label, words in EVEN_RANGES.items()
    ]
    version_2 = Subset("longbench-v2", VERSION_2, "longbench-v2", CHOICE, _any)
    parts = [
        replace(version_2, name=f"{version_2.name}:{_slug(value)}", takes=partial(_is, field, (value,)))
        for field, values in PARTS.items()
        for value in values
    ]
    names = {subset.name: [subset] for subset in (*plain, *even, *ranges, *parts, version_2)}
    return {**names, "longbench:all": plain, "longbench:all_e": even}


def _subset(name: str, form_name: str) -> Subset:
    form = FORMS[form_name]
    schema = Classified if form.metric is metrics.classification else QuestionRow
    return Subset(f"longbench:{name}", version_1(name, schema), form_name, form, _any)


def _any(row: Row) -> bool:
    return True


def _is(field: str, values: Any, row: Row) -> bool:
    return getattr(row, field) in values


def _slug(text: str) -> str:
    return re.sub(r"[^a-z]+", "-", text.lower())


NAMES = _names()
KIND = Kind(NAMES, _expand)
