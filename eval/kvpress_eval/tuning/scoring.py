# SPDX-License-Identifier: Apache-2.0
"""Score presses on contexts: a context is read once for all presses, and most answers are checked instead of generated.

Greedy decoding gives an answer exactly if each of its tokens is the most likely one after the tokens before it. One pass over
the answer shows this; if it does not decide the score, the answer is generated. A codec does not seal pairs during the pass, as
it would during generation, so the figures printed at the end come from generation.
"""

from __future__ import annotations

import copy
import math
import os
import traceback
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

import kvpress
from kvpress.hf.models import with_cache
from kvpress_eval.common.errors import translated_os_errors
from kvpress_eval.common.files import replace_file
from kvpress_eval.results.store import Row, encode_row, read_rows
from kvpress_eval.run import memory
from kvpress_eval.run.generation import Context, Limits, answer, ends, parts, read_contexts, seeded
from kvpress_eval.run.models import Engine
from kvpress_eval.tasks.sample import score
from kvpress_eval.tuning.items import Item
from kvpress_eval.tuning.space import NOTHING

Asked = tuple[int, Item]
"""Row of a context, and an item about the context."""
Contexts = Sequence[Sequence[Item]]
"""Items about each of several contexts."""

_ERRORS = (ValueError, TypeError, RuntimeError, NotImplementedError, FloatingPointError, OSError)
"""Errors of a press that does not suit a model or a context; the press then leaves the search."""


@dataclass
class Examiner:
    """Score presses on items, and store every score, so that none is computed twice; with a `path` even after a kill."""

    engine: Engine
    path: Path | None
    """File with all scores."""
    max_seconds: float | None = None
    failed: dict[str, str] = field(default_factory=dict)
    """Reasons of presses that could not be scored."""
    known: int = field(default=0, init=False)
    """Number of scores that the file already had."""
    _known: dict[str, Row] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.path is None:
            return
        rows, bad, torn = read_rows(self.path)
        if bad or torn:
            replace_file(self.path, b"".join(map(encode_row, rows)))
        self._note(rows)
        self.known = len(self._known)

    @property
    def count(self) -> int:
        """Number of stored rows."""
        return len(self._known)

    def has_scored(self, press: str, item: Item) -> bool:
        """Return whether the score of a press on an item is stored."""
        return "score" in self._known.get(_key(press, item), ())

    def score_of(self, press: str, item: Item) -> float:
        """Return the score of a press on an item that it was examined on."""
        return float(self._known[_key(press, item)]["score"])

    def missing(self, presses: Sequence[str], contexts: Contexts) -> list[str]:
        """Return the presses that lack a score on some contexts; first the full cache, the reference of the others."""
        items = [item for context in contexts for item in context]
        return [
            name
            for name in dict.fromkeys((NOTHING, *presses))
            if name not in self.failed and any(_key(name, item) not in self._known for item in items)
        ]

    def examine(self, presses: Sequence[str], contexts: Contexts) -> None:
        """Score presses on all items about some contexts, which are read together."""
        missing = self.missing(presses, contexts)
        items = [item for context in contexts for item in context]
        suffix_lengths = [len(item.prompt.second) + max(item.max_new_tokens, len(item.continued)) for item in items]
        for name, context in self._read(missing, contexts, max(suffix_lengths)):
            try:
                with seeded(items[0].id), torch.inference_mode():
                    self.remember(self._judge(name, context, contexts))
            except _ERRORS as error:
                self._fail(name, error)

    def stored_rows(self, presses: Sequence[str], contexts: Contexts) -> list[Row]:
        """Return the stored rows of the full cache and of presses on some contexts."""
        names = dict.fromkeys((NOTHING, *presses))
        keys = [*map(_failed, names), *(_key(name, item) for name in names for items in contexts for item in items)]
        return [self._known[key] for key in keys if key in self._known]

    def measure(self, presses: Sequence[str], context: Sequence[Item]) -> dict[str, float]:
        """Return the measured bytes of a real context by press; presses that fail are left out."""
        row_keys = {name: f"{_key(name, context[0])} | bytes" for name in presses}
        missing = [name for name, key in row_keys.items() if key not in self._known and name not in self.failed]
        for name, read in self._read(missing, [context], 0):
            self.remember([{"sample": row_keys[name], "press": name, "bytes": read.report.total_bytes}])
        return {name: self._known[key]["bytes"] for name, key in row_keys.items() if key in self._known}

    def _read(self, presses: Sequence[str], contexts: Contexts, generated: int) -> Iterator[tuple[str, Context]]:
        """Read contexts under presses; presses that can share a reading do so in groups that fit in memory."""
        loaded = {name: kvpress.get_press(name) for name in presses}
        sharing = [name for name in presses if loaded[name].recipe().shares_prefill]
        tokens = max(len(context[0].prompt.first) for context in contexts)
        groups = memory.fitting(self.engine.model, sharing, loaded.__getitem__, len(contexts), tokens, generated)
        for group in [*groups, *([name] for name in presses if name not in sharing)]:
            yield from self._read_group(group, contexts)

    def _read_group(self, group: Sequence[str], contexts: Contexts) -> list[tuple[str, Context]]:
        """Read contexts once for a group of presses; after a failure, retry in halves until the failing press is alone."""
        try:
            with seeded(contexts[0][0].id):
                ids = [context[0].prompt.first for context in contexts]
                read = read_contexts(self.engine, [kvpress.get_press(name) for name in group], ids)
            return list(zip(group, read, strict=True))
        except _ERRORS as error:
            traceback.clear_frames(error.__traceback__)
            failure = error
        memory.release()
        if len(group) == 1:
            self._fail(group[0], failure)
            return []
        return [pair for half in parts(group, (len(group) + 1) // 2) for pair in self._read_group(half, contexts)]

    def _fail(self, name: str, error: Exception) -> None:
        if name == NOTHING:
            raise error
        self.remember([{"sample": _failed(name), "press": name, "failed": f"{type(error).__name__}: {error}"}])

    def _judge(self, name: str, context: Context, contexts: Contexts) -> list[Row]:
        """Return a row for every item about contexts that were read under a press."""
        questions = [(row, item) for row, items in enumerate(contexts) for item in items]
        recipe = context.press.recipe()
        scores: dict[int, float] = {}
        for places in _alike([(item, item.continued) if item.continued else None for _, item in questions]):
            scores |= self._likelihoods(context, questions, places)
        if name != NOTHING and not recipe.acting("decode") and not recipe.hooks:
            targets = [None if item.continued else (item, self._target(item)) for _, item in questions]
            for places in _alike(targets):
                scores |= self._checked(context, questions, places)
        rows = {place: _row(name, questions[place][1], value) for place, value in scores.items()}
        ungenerated = [place for place in range(len(questions)) if place not in rows]
        if ungenerated:
            rows |= self._generated(name, context, questions, ungenerated)
        return [rows[place] for place in sorted(rows)]

    def _generated(
        self, name: str, context: Context, questions: Sequence[Asked], places: Sequence[int]
    ) -> dict[int, Row]:
        """Generate answers and score them; the rows of the full cache keep its tokens as targets for other presses."""
        items = [questions[place][1] for place in places]
        limits = Limits(max(item.max_new_tokens for item in items), self.max_seconds, items[0].query.stop)
        results = answer(
            self.engine, context, [(questions[place][0], questions[place][1].prompt) for place in places], limits
        )
        rows = {}
        for place, item, result in zip(places, items, results, strict=True):
            full_cache_ids = {"ids": list(result.ids)} if name == NOTHING else {}
            rows[place] = {**_row(name, item, score(item.query, result.text)), **full_cache_ids}
        return rows

    def _likelihoods(self, context: Context, questions: Sequence[Asked], places: Sequence[int]) -> dict[int, float]:
        """Return the likelihood per token of each continuation: the geometric mean of the tokens' probabilities."""
        items = [questions[place][1] for place in places]
        ids = [[*item.prompt.second, *item.continued][:-1] for item in items]
        logits = self._forced(context, [questions[place][0] for place in places], ids, len(items[0].continued))
        targets = torch.tensor([item.continued for item in items], device=logits.device)
        chances = logits.float().log_softmax(dim=-1).gather(-1, targets[..., None])[..., 0].mean(dim=-1)
        return {place: math.exp(value) for place, value in zip(places, chances.tolist(), strict=True)}

    def _target(self, item: Item) -> list[int]:
        """Return the target tokens of an answer: its only right answer, or else the answer of the full cache."""
        tokens: list[int] = self._known[_key(NOTHING, item)]["ids"]
        if not item.exact:
            return tokens
        tokenizer = self.engine.tokenizer
        for length in range(1, len(tokens) + 1):
            if tokenizer.decode(tokens[:length], skip_special_tokens=True).lstrip().startswith(item.query.answers[0]):
                return tokens[:length]
        spelt: list[int] = tokenizer(f" {item.query.answers[0]}", add_special_tokens=False)["input_ids"]
        return spelt[: item.max_new_tokens]

    def _checked(self, context: Context, questions: Sequence[Asked], places: Sequence[int]) -> dict[int, float]:
        """Return the scores that follow from one forward pass over the target tokens."""
        targets = [self._target(questions[place][1]) for place in places]
        ids = [[*questions[place][1].prompt.second, *target] for place, target in zip(places, targets, strict=True)]
        logits = self._forced(context, [questions[place][0] for place in places], ids, len(targets[0]) + 1)
        decided = {}
        for place, predicted, target in zip(places, logits.argmax(dim=-1).tolist(), targets, strict=True):
            value = self._decide(questions[place][1], predicted, target)
            if value is not None:
                decided[place] = value
        return decided

    def _decide(self, item: Item, predicted: Sequence[int], target: Sequence[int]) -> float | None:
        """Return the score of a checked answer, None if the predicted tokens do not determine it.

        `predicted[i]` is the most likely token after the first i tokens of the target.
        """
        full = self._known[_key(NOTHING, item)]
        agreed = next((at for at, token in enumerate(target) if predicted[at] != token), len(target))
        if list(target) == full["ids"] and agreed == len(target):
            return float(full["score"])
        if not item.exact:
            return None
        text = self.engine.tokenizer.decode([*target[:agreed], predicted[agreed]], skip_special_tokens=True).lstrip()
        if item.query.answers[0].startswith(text) and predicted[agreed] not in ends(self.engine.model):
            return None
        return score(item.query, text)

    def _forced(self, context: Context, rows: Sequence[int], ids: Sequence[Sequence[int]], keep: int) -> Tensor:
        """Return the logits `[n, keep, V]` at the last `keep` of `ids`, each read behind a row of a copy of the cache."""
        places = torch.tensor(rows, device=context.ids.device)
        cache = copy.deepcopy(context.cache)
        cache.batch_select_indices(places)
        new = torch.tensor(ids, device=context.ids.device)
        mask = torch.cat([context.mask[places], torch.ones_like(new)], dim=1)
        with kvpress.reading(self.engine.model, context.press):
            logits: Tensor = self.engine.model(
                input_ids=new,
                attention_mask=mask,
                position_ids=(mask.cumsum(dim=-1) - 1)[:, -new.shape[1] :],
                **with_cache(cache),
                use_cache=True,
                logits_to_keep=keep,
            ).logits
        if torch.isnan(logits).any():
            raise FloatingPointError("NaN in the logits of an answer")
        return logits

    def remember(self, rows: Sequence[Row]) -> None:
        """Store new rows, synced to disk if there is a `path`."""
        new = {row["sample"]: row for row in rows if row["sample"] not in self._known}
        if self.path is not None:
            with translated_os_errors(self.path), self.path.open("ab") as file:
                file.writelines(map(encode_row, new.values()))
                file.flush()
                os.fsync(file.fileno())
        self._note(new.values())

    def _note(self, rows: Iterable[Row]) -> None:
        self._known |= {row["sample"]: row for row in rows}
        self.failed |= {row["press"]: row["failed"] for row in rows if "failed" in row}


def _key(press: str, item: Item) -> str:
    return f"{press} | {item.id}"


def _failed(press: str) -> str:
    return f"{press} | failed"


def _row(press: str, item: Item, value: float) -> Row:
    return {"sample": _key(press, item), "press": press, "score": value}


def _alike(answers: Sequence[tuple[Item, Sequence[int]] | None]) -> list[list[int]]:
    """Return groups of indices with equal lengths of question and answer, which can be read together without padding."""
    groups: dict[tuple[int, int], list[int]] = {}
    for place, pair in enumerate(answers):
        if pair is not None:
            groups.setdefault((len(pair[0].prompt.second), len(pair[1])), []).append(place)
    return list(groups.values())
