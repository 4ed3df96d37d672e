# SPDX-License-Identifier: Apache-2.0
"""Find a press for a memory limit: check the limit, search, measure the best on held-out samples, write the pick."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

import kvpress
from kvpress.cache.report import parse_bytes
from kvpress.core.spec import code_of
from kvpress.plan import Geometry
from kvpress.terminal import print_text
from kvpress_eval.common.errors import BusyError, ConfigError
from kvpress_eval.common.files import make_folder
from kvpress_eval.config.schema import RAY, RunConfig
from kvpress_eval.results.cells import CellResult
from kvpress_eval.results.guarantee import Guarantee, guarantees
from kvpress_eval.results.stats import better
from kvpress_eval.results.store import CODE, CellStore
from kvpress_eval.run.environment import now
from kvpress_eval.run.estimate import shape_of
from kvpress_eval.run.generation import Limits, answer, read_contexts, seeded
from kvpress_eval.run.interrupt import Interrupt
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.models import Engine, check_lengths, load_engine, read_settings, use_threads
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.run.runner import run_sources, run_sources_on_cluster
from kvpress_eval.tasks.data_files import FILE_PREFIX
from kvpress_eval.tuning import result
from kvpress_eval.tuning.items import Split, SplitPart, has_answers, split_tasks, split_texts
from kvpress_eval.tuning.ray_workers import helpers
from kvpress_eval.tuning.scoring import Examiner
from kvpress_eval.tuning.search import Search, Standing, describe, pick, rungs, work
from kvpress_eval.tuning.sizing import Limit, MemoryLimit, check_possible, make_room
from kvpress_eval.tuning.space import NOTHING, Space, make_space
from kvpress_eval.tuning.wishes import Wishes, check_can_guarantee, check_needed

FINALISTS = 3
"""Presses at the limit that are measured on held-out samples."""
_OTHER_SIZES = (0.5, 2.0)
"""Multiples of the limit at which the best composition is measured too, so that the frontier shows the effect of memory."""
_LENGTHS = 4
"""Number of context lengths for which a limit is planned."""
_TIMED_TOKENS = 8
_COVERED = 64
"""Number of points of the space that are tried to find the possible sizes."""


def tune(config: RunConfig, wishes: Wishes, console: Console, engine: Engine | None = None) -> result.Tuned:
    """Find the press that meets a limit and loses least; a stopped search is continued.

    Raises:
        ConfigError: a requirement is invalid or cannot be met, or the model retrieves nothing from the full cache.
        DataError: the model or the data cannot be read.
        OutputError: the output folder cannot be written, or belongs to another search.
        BusyError: another process tunes into the same folder.
    """
    wishes.check()
    if config.engine == RAY and engine is not None:
        raise ConfigError(
            "engine ray loads the model on each machine: give its name, not a model that is loaded already"
        )
    if config.depths:
        raise ConfigError("a search takes one depth: give depth, or neither for answers anywhere in the context")
    config, by_likelihood = _with_data(config, wishes)
    settings = engine.model.config if engine else read_settings(config)
    check_lengths(config, settings, wishes.context)
    geometry, weights = _geometry(config, settings, engine)
    space, context = make_space(statuses=wishes.statuses), wishes.context or max(config.lengths)
    memory = None if wishes.memory is None else _bytes(wishes.memory)
    room = make_room(geometry, weights, context, wishes.batch, memory)
    templates = [space.template(point) for point in space.cover(_COVERED, config.seed)]
    limit = _limit(wishes, room, geometry, (context,))
    check_possible(room, limit, templates)
    check_needed(wishes, room, limit)
    for line in room.lines(limit):
        print_text(console, line)
    make_folder(config.out)
    with CellStore(config.out).claim() as claimed:
        if not claimed:
            raise BusyError(f"another process tunes into {config.out}; use another --out")
        if engine is None:
            engine = load_engine(config, settings)
        else:
            use_threads(config)
        config = config if by_likelihood else in_words_of(config, engine.tokenizer)
        split = _split(config, wishes, engine, by_likelihood)
        check_can_guarantee(wishes, split, FINALISTS)
        if memory is None:
            limit = replace(limit, lengths=_lengths(split))
            check_possible(room, limit, templates)
            print_text(console, limit.line)
        result.belong(config.out / result.IDENTITY, _identity(config, wishes, engine, split))
        with Interrupt() as interrupt:
            return _Tuning(config, wishes, engine, split, space, limit, console, interrupt).run()


@dataclass(frozen=True)
class _Tuning:
    config: RunConfig
    wishes: Wishes
    engine: Engine
    split: Split
    space: Space
    limit: Limit
    console: Console
    interrupt: Interrupt

    def run(self) -> result.Tuned:
        """Check that the model retrieves, search, measure, and write."""
        if self.split.by_likelihood:
            self._print(
                f"{self.wishes.data} has no answers: presses are judged by the likelihood of how its texts go on"
            )
        examiner = Examiner(self.engine, self.config.out / result.SCORES, self.config.max_seconds_per_sample)
        self._check_retrieves(examiner)
        best, sized, picked = self._search(examiner)
        standings = {standing.press: standing for standing in (*best, *sized)}
        # The full cache is a candidate too, where it meets the limit.
        presses = list(dict.fromkeys((NOTHING, *standings)))
        self._print(f"measuring {len(presses)} presses on held-out samples")
        cells = self._held_out(examiner, presses)
        frontier = result.measured(cells)
        picked, guarantee = self._guaranteed(picked, best, sized, cells)
        by_press = {figures.press: figures for figures in frontier}
        if picked not in by_press or NOTHING not in by_press:
            raise ConfigError(f"{picked} could not be measured on the held-out samples: see {self.config.out}/cells")
        pick = by_press[picked]
        unit = "likelihood of a token" if self.split.by_likelihood else "accuracy"
        planned = self.limit.figures(kvpress.get_press(picked))
        summary = result.sentence(picked, frontier, unit, self.wishes.max_drop, guarantee)
        if planned.limited == "peak":
            summary += f" {planned.line}."
        path = self.config.out / result.PRESS
        kept = result.within(pick, self.wishes.max_drop) if guarantee is None else guarantee.holds
        tuned = result.Tuned(picked, frontier, summary, kept, path, guarantee, planned)
        result.write_press(path, tuned, self._tuned_on())
        searched = [{**asdict(figures), "changes": dict(figures.changes)} for figures in standings.values()]
        result.write_result(self.config.out / result.RESULT, tuned, searched)
        return tuned

    def _check_retrieves(self, examiner: Examiner) -> None:
        """Raise ConfigError if the full cache scores no better than the cache of another context."""
        first, pairs = 0, []
        num_contexts = min(len(part.contexts) for part in self.split.searched)
        looks = rungs(num_contexts)
        for contexts in looks:
            for part in self.split.searched:
                for place in range(first, contexts):
                    self._check_interrupt()
                    items = part.contexts[place]
                    swapped = [item.elsewhere(self._other(part, place)) for item in items]
                    for batch in (items, swapped):
                        examiner.examine([NOTHING], [batch])
                    pairs += [
                        (examiner.score_of(NOTHING, item), examiner.score_of(NOTHING, swapped_item))
                        for item, swapped_item in zip(items, swapped, strict=True)
                    ]
            first = contexts
            if better(pairs, len(looks), is_last=contexts == looks[-1]):
                return
            own_score, swapped_score = (100 * sum(pair[side] for pair in pairs) / len(pairs) for side in (0, 1))
            scores = (
                f"with the full cache it scores {own_score:.1f}%, and {swapped_score:.1f}% when the same is asked about other "
                f"contexts ({len(pairs)} samples), which chance explains"
            )
            self._print(
                f"whether the model retrieves is checked on up to {num_contexts} contexts of each task: {scores}"
            )
        raise ConfigError(
            f"model {self.config.model!r} retrieves nothing: {scores}. Presses cannot be ranked on that: take tasks that the "
            "model can do, or another model"
        )

    def _other(self, part: SplitPart, place: int) -> list[int]:
        """Return the tokens of another context; its own first token if there is no other."""
        others = (
            context[0].prompt.first for neighbour in (part, *self.split.searched) for context in neighbour.contexts
        )
        first_ids = part.contexts[place][0].prompt.first
        following = [part.contexts[(place + 1) % len(part.contexts)][0].prompt.first]
        return next((ids for ids in (*following, *others) if ids != first_ids), first_ids[:1])

    def _search(self, examiner: Examiner) -> tuple[list[Standing], list[Standing], str]:
        """Return the best presses at the limit, the best one at other sizes, and the picked press."""
        num_contexts = min(len(part.contexts) for part in self.split.searched)
        total = work(self.wishes.candidates, len(self.split.searched), num_contexts, len(self.space.recipes()))
        self._print(
            f"searching {self.wishes.candidates} candidates on {num_contexts} contexts of {_each(len(self.split.searched))}, "
            f"halved again and again{f', for at most {self._minutes()}' if self.wishes.minutes else ''}; then the best are "
            "measured on samples that were held out"
        )
        if examiner.known:
            self._print(f"{examiner.known:,} scores of an earlier run are reused")
        until = None if self.wishes.minutes is None else time.monotonic() + 60 * self.wishes.minutes
        with (
            RunProgress(self.console, total, until) as progress,
            helpers(self.config, self.engine, examiner, self.split, progress) as helped,
        ):
            search = Search(
                examiner,
                self.space,
                self.limit,
                self.split.searched,
                self.wishes.candidates,
                self.config.seed,
                progress,
                self.config.batch_size,
                until,
                lambda: self.interrupt.requested,
                helped,
            )
            try:
                search.run(self.config.out / result.JOURNAL)
            except KeyboardInterrupt:
                if search.ranked:
                    self._print(f"the best so far, all scores being kept: {search.describe_best()}")
                raise
            if not search.ranked:
                raise ConfigError(self._nothing_found(search))
            if search.out_of_time:
                self._print(
                    f"the search has used its {self._minutes()}; the best so far are measured on held-out samples"
                )
            self._print(f"best of the search: {search.describe_best()}")
            best = search.ranked[:FINALISTS]
            sized = self._other_sizes(search, best[0])
        picked = pick(best, self._fitting(sized), self.wishes.max_drop)
        return list(best), sized, picked.press

    def _fitting(self, standings: Sequence[Standing]) -> list[Standing]:
        """Return the standings whose presses meet the limit, which is of the peak for a limit in bytes."""
        return [standing for standing in standings if self.limit.fits(kvpress.get_press(standing.press))]

    def _minutes(self) -> str:
        return f"{self.wishes.minutes:g} minute{'' if self.wishes.minutes == 1 else 's'}"

    def _other_sizes(self, search: Search, best: Standing) -> list[Standing]:
        """Return standings of the best composition at other sizes on the same contexts; empty if time ran out early."""
        if not best.contexts:
            return []
        presses: dict[str, None] = {}
        for size in _OTHER_SIZES:
            resized = replace(search, limit=self.limit.scaled(size), until=None)
            (press,) = resized.fit([search.templates[best.press]]).values()
            presses |= {} if press in (None, NOTHING, best.press) else {press: None}
        search.progress.begin(len(presses) * best.contexts * len(self.split.searched))
        standings = []
        for press in presses:
            search.progress.cell(press)
            replace(search, until=None).examine([press], search.batches(0, best.contexts))
            if press not in search.examiner.failed:
                standings.append(search.standing(press, best.contexts))
                search.progress.reached(
                    f"the best at another size, {best.contexts} contexts of each task: {describe(standings[-1])}"
                )
        return standings

    def _nothing_found(self, search: Search) -> str:
        if search.out_of_time:
            return (
                f"{self._minutes()} of search were too few to compare any press: give more minutes, or fewer candidates; "
                "what was measured is kept, and the same command continues there"
            )
        failures = "; ".join(f"{press}: {why}" for press, why in list(search.examiner.failed.items())[:3])
        tried = f"none of {self.wishes.candidates} candidates met the limit"
        return f"{tried}{f' ({failures})' if failures else ''}: give more candidates"

    def _held_out(self, examiner: Examiner, presses: Sequence[str]) -> list[CellResult]:
        """Return the results of presses on held-out samples, measured in the same way as by `kvpress eval`."""
        if self.split.by_likelihood:
            return [self._read_texts(examiner, press) for press in presses]
        config = self.config.model_copy(update={"presses": tuple(presses)})
        sources = [part.source for part in self.split.held_out if part.source is not None]
        if config.engine == RAY:
            done = run_sources_on_cluster(config, sources, self.engine.model.config, self.console)
        else:
            done = run_sources(config, sources, self.engine, self.console)
        if done.interrupted:
            raise KeyboardInterrupt
        return list(done.cells)

    def _read_texts(self, examiner: Examiner, press: str) -> CellResult:
        """Return the likelihood of held-out texts under a press, with memory and time per token."""
        rows = []
        (part,) = self.split.held_out
        for (item,) in part.contexts:
            self._check_interrupt()
            examiner.examine([press], [[item]])
            with seeded(item.id):
                (context,) = read_contexts(self.engine, [kvpress.get_press(press)], [item.prompt.first])
                (result,) = answer(self.engine, context, [(0, item.prompt)], Limits(_TIMED_TOKENS, None))
            timed = {"prefill_seconds": result.prefill_seconds, "seconds_per_token": result.seconds_per_token}
            figures = {key: value for key, value in asdict(result).items() if key not in ("text", "ids", *timed)}
            score = examiner.score_of(press, item)
            document = item.document or item.id
            rows.append(
                {"sample": item.id, "document": document, "status": "ok", "score": score, **figures, "measured": timed}
            )
        return CellResult({"press": press, "task": part.task, "length": part.length}, len(rows), rows, None, None)

    def _guaranteed(
        self, picked: str, best: Sequence[Standing], sized: Sequence[Standing], cells: Sequence[CellResult]
    ) -> tuple[str, Guarantee | None]:
        """Return the pick and its guarantee; `picked` and None if none was required.

        The best presses at the limit share the error. With `max_drop`, the first of them is followed by the same composition in
        smaller sizes, and the pick is the smallest that passes; else it is the first that passes. If none passes, it is the
        full cache, which loses nothing, where that is among the best, or else the one with the most evidence.
        """
        wishes = self.wishes
        if wishes.confidence is None or (picked == NOTHING and wishes.max_drop is None):
            return picked, None
        holds_all = NOTHING in [standing.press for standing in best]
        best = [standing for standing in best if standing.press != NOTHING]
        if not best:
            return NOTHING, None
        sized = [] if wishes.max_drop is None else self._fitting(sized)
        smaller = [standing for standing in sized if standing.bytes < best[0].bytes]
        size = {standing.press: standing.bytes for standing in (*best, *smaller)}
        losses = result.losses_by_context(cells, self.split.held_out)
        chains = [[standing.press] for standing in best]
        chains[0] += sorted((standing.press for standing in smaller), key=lambda press: -size[press])
        tested = guarantees(
            [[(press, losses[press]) for press in chain if press in losses] for chain in chains],
            wishes.margin,
            wishes.confidence,
        )
        flat = [guarantee for chain in tested for guarantee in chain]
        for guarantee in flat:
            self._print(f"{guarantee.press}: {guarantee.phrase()}")
        passed = [guarantee for guarantee in flat if guarantee.holds]
        if not passed and holds_all:
            return NOTHING, None
        if not flat:
            return picked, None  # `run` refuses a pick without figures
        if not passed:
            found = max(flat, key=lambda guarantee: guarantee.wealth)
        else:
            found = passed[0] if wishes.max_drop is None else min(passed, key=lambda guarantee: size[guarantee.press])
        return found.press, found

    def _tuned_on(self) -> dict[str, Any]:
        split, config = self.split, self.config
        return {
            **_identity(config, self.wishes, self.engine, split),
            "limit": self.limit.name,
            "max_drop": self.wishes.max_drop,
            "confidence": self.wishes.confidence,
            "candidates": self.wishes.candidates,
            "batch_size": config.batch_size,
            "date": now(),
        }

    def _check_interrupt(self) -> None:
        if self.interrupt.requested:
            raise KeyboardInterrupt

    def _print(self, text: str) -> None:
        print_text(self.console, text)


def _with_data(config: RunConfig, wishes: Wishes) -> tuple[RunConfig, bool]:
    """Return the configuration with the user's samples as tasks, and whether these are texts without answers."""
    if wishes.data is None:
        return config, False
    if "tasks" in config.model_fields_set:
        raise ConfigError("give data or tasks, not both: data are tasks of your own, as file:PATH is")
    if not has_answers(wishes.data):
        ignored = [name for name in ("question_aware", "max_context_length", "data_dir") if getattr(config, name)]
        if ignored:
            raise ConfigError(
                f"{wishes.data} holds texts without questions, to which {', '.join(ignored)} cannot apply: leave that out; "
                "lengths cuts the texts"
            )
        return config, True
    return config.model_copy(update={"tasks": (f"{FILE_PREFIX}{wishes.data}",)}), False


def _bytes(text: str) -> int:
    try:
        return parse_bytes(text, "memory")
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _geometry(config: RunConfig, settings: Any, engine: Engine | None) -> tuple[Geometry, int]:
    """Return the geometry of the model's cache, and the bytes of its weights."""
    try:
        if engine is not None:
            geometry = Geometry.of(engine.model)
            return geometry, sum(weight.numel() * weight.element_size() for weight in engine.model.parameters())
        shape = shape_of(config, settings)
    except NotImplementedError as error:
        raise ConfigError(f"model {config.model!r}: {error}; without a plan no press can be held to a size") from error
    return shape.geometry, shape.weight_bytes


def _limit(wishes: Wishes, room: MemoryLimit, geometry: Geometry, lengths: tuple[int, ...]) -> Limit:
    if wishes.smaller is not None:
        return Limit(geometry, lengths, smaller=float(wishes.smaller))
    assert room.memory is not None  # noqa: S101 - one of the two was given
    return Limit(geometry, lengths, bytes=max(1, (room.memory - room.weights) // room.batch))


def _split(config: RunConfig, wishes: Wishes, engine: Engine, by_likelihood: bool) -> Split:
    tokenizer, counts = engine.tokenizer, (config.samples, wishes.held_out)
    if by_likelihood and wishes.data is not None:
        return split_texts(wishes.data, config, tokenizer, *counts)
    return split_tasks(config, tokenizer, *counts)


def _lengths(split: Split) -> tuple[int, ...]:
    """Return a few of the contexts' lengths in tokens, from the shortest to the longest."""
    lengths = sorted({len(context[0].prompt.first) for part in split.searched for context in part.contexts})
    step = max(1, len(lengths) // (_LENGTHS - 1))
    return tuple(dict.fromkeys([*lengths[::step], lengths[-1]]))


def _identity(config: RunConfig, wishes: Wishes, engine: Engine, split: Split) -> dict[str, Any]:
    """Return all settings that the scores of a search depend on."""
    code = code_of(entry.press for entry in kvpress.list_presses())
    return {
        "kvpress": kvpress.__version__,
        "model": config.model,
        "weights": engine.fingerprint,
        "dtype": engine.dtype,
        "device": engine.device,
        "tasks": sorted({part.task for part in split.searched}),
        "lengths": sorted({part.length for part in split.searched if part.length}),
        "samples": config.samples,
        "held_out": wishes.held_out,
        "language": config.wording,
        "question_aware": config.question_aware,
        "seed": config.seed,
        "data": split.identity,
        **({"max_context_length": config.max_context_length} if config.max_context_length else {}),
        **({"model_kwargs": config.model_kwargs} if config.model_kwargs else {}),
        # A press of the user may change under the same name.
        **({CODE: code} if code else {}),
    }


def _each(tasks: int) -> str:
    return "the task" if tasks == 1 else f"each of {tasks} tasks"
