# SPDX-License-Identifier: Apache-2.0
"""Items of the search and held-out items: each document belongs to one of the two sets."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from kvpress.calibrate.corpus import documents
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.prompts import Prompt, make_prompt
from kvpress_eval.tasks.catalogue import expand_tasks
from kvpress_eval.tasks.data_files import reading
from kvpress_eval.tasks.kinds.files import read_rows
from kvpress_eval.tasks.kinds.generated import TASKS
from kvpress_eval.tasks.sample import Query, Sample
from kvpress_eval.tasks.source import Source

CONTINUED = 64
"""Last tokens of a text without questions; a press is scored by their likelihood."""
TEXT = "text"
_QUESTIONS = 20
"""Rows of a file that are read per requested context, because several rows may have the same context."""
_NO_QUESTION = Query("", "", (), "any")
_FEWEST = 2
"""Smallest number of contexts of a task, for the search and for the held-out set each."""


@dataclass(frozen=True)
class Item:
    """A question about a context, or the likelihood of its `continued` tokens."""

    id: str
    task: str
    length: int
    prompt: Prompt
    query: Query
    max_new_tokens: int
    continued: tuple[int, ...] = ()
    document: str = ""
    """Identifier of the document of the context; empty if no other context is from it."""

    @property
    def exact(self) -> bool:
        """Whether there is exactly one right answer."""
        return self.query.match == "prefix" and len(self.query.answers) == 1

    def elsewhere(self, context: list[int]) -> Item:
        """Return the same item with another context."""
        return replace(self, id=f"{self.id} elsewhere", prompt=replace(self.prompt, first=context))


@dataclass(frozen=True)
class SplitPart:
    """Items of one task and length, one list per context; `source` makes the same samples for a run."""

    task: str
    length: int
    contexts: Sequence[Sequence[Item]]
    source: Source | None = None

    @property
    def items(self) -> list[Item]:
        """All items in order."""
        return [item for context in self.contexts for item in context]

    @property
    def documents(self) -> list[str]:
        """The document of each context; a number if no other context is from it."""
        return [context[0].document or str(number) for number, context in enumerate(self.contexts)]


@dataclass(frozen=True)
class Split:
    """Items of the search, and held-out items."""

    searched: Sequence[SplitPart]
    held_out: Sequence[SplitPart]
    identity: str
    """Hash of everything that decides the items."""
    by_likelihood: bool = False
    """Whether presses are scored by the likelihood of texts instead of answers."""


def split_tasks(config: RunConfig, tokenizer: PreTrainedTokenizerBase, samples: int, held_out: int) -> Split:
    """Divide the contexts of each task: up to `samples` for the search, and up to `held_out` others.

    Contexts from one document are not independent: they go to the same side, and one of each document is taken first. A
    document has several contexts if questions are part of them, or if it is cut to leave room for each question.

    Raises:
        ConfigError, DataError: a task has too few contexts to divide, or its data cannot be read.
    """
    contexts = samples + held_out
    sources = [
        source
        for task in config.tasks
        for source in expand_tasks(
            config.model_copy(update={"tasks": (task,), "samples": contexts * (1 if task in TASKS else _QUESTIONS)})
        )
    ]
    parts = []
    for source in sources:
        samples_made = source.make(tokenizer)
        items = [_item(sample, source, tokenizer, config) for sample in samples_made]
        documents = _by_document(items)
        divided = _divide(source.task, documents[:contexts], samples, held_out, config.seed)
        by_id = {sample.id: sample for sample in samples_made}
        parts.append([SplitPart(source.task, source.length, part, _part_of(source, by_id, part)) for part in divided])
    identity = hash_json(
        [
            [source.task, source.length, list(source.ids), dict(source.identity), source.max_new_tokens]
            for source in sources
        ]
    )
    return Split([part for part, _ in parts], [part for _, part in parts], identity[:16])


def split_texts(
    path: Path, config: RunConfig, tokenizer: PreTrainedTokenizerBase, samples: int, held_out: int
) -> Split:
    """Divide the texts of a file. The last `CONTINUED` tokens of a text are scored, the tokens before them are its context.

    Pieces of one text go to the same side, unless the file has too few texts to divide.

    Raises:
        DataError: there are too few texts, or they are too short.
    """
    longest = max(config.lengths) + CONTINUED
    texts: dict[str, list[list[Item]]] = {}
    count = 0
    for document, ids in _pieces(path, tokenizer, longest):
        if document not in texts and len(texts) == samples + held_out:
            break
        first, second, continued = ids[:-CONTINUED], ids[-CONTINUED : -CONTINUED + 1], ids[-CONTINUED + 1 :]
        prompt = Prompt(first, second, tokenizer.decode(first))
        item = Item(f"{TEXT}-{count}", TEXT, 0, prompt, _NO_QUESTION, 1, tuple(continued), document)
        texts.setdefault(document, []).append([item])
        count += 1
        if len(texts) == 1 and ".jsonl" not in path.suffixes and count == samples + held_out:
            break
    if count < 2 * _FEWEST:
        raise DataError(
            f"{path} has {count} texts of at least {2 * CONTINUED} tokens; at least {2 * _FEWEST} are needed, half of "
            "them held out"
        )
    units = list(texts.values())
    if len(units) < 2 * _FEWEST:  # the pieces of a book are all there is
        pieces = [[replace(item, document="") for item in context] for unit in units for context in unit]
        units = [[piece] for piece in pieces[: samples + held_out]]
    searched, kept = _divide(TEXT, units, samples, held_out, config.seed)
    items = [item for unit in units for (item,) in unit]
    identity = hash_json([[item.prompt.first, list(item.continued)] for item in items])
    return Split([SplitPart(TEXT, 0, searched)], [SplitPart(TEXT, 0, kept)], identity[:16], by_likelihood=True)


def has_answers(path: Path) -> bool:
    """Whether the rows of a file are questions with answers; otherwise it holds texts.

    Raises:
        DataError: some rows have answers and others none, or the file cannot be read.
    """
    if ".jsonl" not in path.suffixes:
        with reading(path, "data file"):
            path.read_bytes()
        return False
    answered = ["answer" in row for row in read_rows(path)]
    if any(answered) and not all(answered):
        raise DataError(f"{path}:{answered.index(False) + 1}: a row without `answer`, where others have one")
    return any(answered)


def _pieces(path: Path, tokenizer: PreTrainedTokenizerBase, longest: int) -> Iterator[tuple[str, list[int]]]:
    """Yield the number and the tokens of the texts of a file, long ones in pieces, without those too short for a context."""
    try:
        for number, text in enumerate(documents(str(path))):
            ids = tokenizer(text)["input_ids"]
            for start in range(0, len(ids), longest):
                if len(piece := ids[start : start + longest]) >= 2 * CONTINUED:
                    yield str(number), piece
    except (OSError, ValueError) as error:
        raise DataError(str(error)) from error


def _by_document(items: Sequence[Item]) -> list[list[list[Item]]]:
    """Return the items by document and context, in the order of the first ones."""
    documents: dict[str, dict[tuple[int, ...], list[Item]]] = {}
    for item in items:
        documents.setdefault(item.document, {}).setdefault(tuple(item.prompt.first), []).append(item)
    return [list(contexts.values()) for contexts in documents.values()]


def _divide(
    task: str, documents: list[list[list[Item]]], samples: int, held_out: int, seed: int
) -> tuple[list[list[Item]], list[list[Item]]]:
    """Divide the contexts of documents at random; fewer documents than requested are divided in the same proportion."""
    if len(documents) < 2 * _FEWEST:
        raise ConfigError(
            f"{task} has {len(documents)} contexts; at least {2 * _FEWEST} are needed, as those that a press is searched on "
            "cannot say how good it is: give more samples"
        )
    order = random.Random(f"tune-{seed}-{task}").sample(documents, len(documents))  # noqa: S311  # reproducible
    kept = round(len(order) * held_out / (samples + held_out))
    kept = min(max(kept, _FEWEST), len(order) - _FEWEST)
    return _in_turn(order[kept:])[:samples], _in_turn(order[:kept])[:held_out]


def _in_turn(documents: Sequence[Sequence[list[Item]]]) -> list[list[Item]]:
    """Return the first context of each document, then the second ones, and so on."""
    return [context for turn in zip_longest(*documents) for context in turn if context is not None]


def _part_of(source: Source, samples: dict[str, Sample], contexts: Sequence[Sequence[Item]]) -> Source:
    chosen = [samples[item.id] for context in contexts for item in context]
    return replace(source, ids=[sample.id for sample in chosen], make=lambda _: chosen)


def _item(sample: Sample, source: Source, tokenizer: PreTrainedTokenizerBase, config: RunConfig) -> Item:
    """Return the item of a sample, or raise a ConfigError if its prompt cannot be cut to the limit of the configuration."""
    aware, longest = config.question_aware, config.max_context_length
    try:
        prompt = make_prompt(tokenizer, sample, question_aware=aware, longest=longest)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    document = sample.document or hash_json(sample.context)
    return Item(sample.id, source.task, source.length, prompt, sample.query, source.max_new_tokens, document=document)
