# SPDX-License-Identifier: Apache-2.0
"""The search: waves of candidates, each halved again and again on twice as many contexts; the worst task decides.

What is asked next, Optuna says (TPE over the axes of the space). Draws depend on the seed and the number of a candidate alone,
and every score is remembered, so that a search that was killed goes on to what one run would have found.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend, JournalFileOpenLock
from optuna.trial import TrialState

import kvpress
from kvpress.plan import plan
from kvpress_eval.common.files import hash_json, replace_file
from kvpress_eval.results.stats import paired_difference_bounds
from kvpress_eval.run.generation import parts
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tuning.items import Item, Part
from kvpress_eval.tuning.scoring import Contexts, Examiner
from kvpress_eval.tuning.sizing import Limit, solve
from kvpress_eval.tuning.space import NOTHING, Parameters, Space, Template

WAVE = 32
"""Candidates that are compared with each other from the start; the next wave learns from them."""
FIRST = 2
"""Contexts of every task that all candidates of a wave are asked about."""
_MISFIT = -1.0
"""The value of a point whose parts do not go together, or that is too large whatever its ratio."""
_EXCESS = 1.01
"""Times as much as allowed that a press may need, as a real context shows."""
_FITTINGS = 3
_HALF = 0.5

Examined = Callable[[Sequence[str], Iterable[Contexts]], Iterator[Contexts]]
"""Examines presses on batches of contexts, and yields each batch when its scores are known."""


@dataclass(frozen=True)
class Standing:
    """Where a press stands after `contexts` contexts of every task: the change of accuracy from the full cache, by task.

    `samples` are those that the changes are of. `contexts` is 0 where time ran out before every task had its first ones.
    """

    press: str
    contexts: int
    changes: Mapping[str, float]
    bytes: float
    samples: int = 0

    @property
    def worst(self) -> tuple[str, float]:
        """The task that loses most, and its change."""
        return min(self.changes.items(), key=lambda item: item[1])

    @property
    def mean(self) -> float:
        """The mean change of all tasks."""
        return fmean(self.changes.values())

    @property
    def rank(self) -> tuple[Any, ...]:
        """What standings are sorted by, the best first: how far it came, its worst task, the mean, what it holds."""
        return -self.contexts, -self.worst[1], -self.mean, self.bytes, self.press


class TimeUpError(Exception):
    """The minutes of the search are over."""


class _Claimed(JournalFileOpenLock):
    """No lock: the output folder is claimed by this process as a whole."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


@dataclass
class Search:
    """Finds presses that meet a limit and loses as little as possible on the worst of the tasks.

    `candidates` is the number of points of the space that are tried, `until` the time at which no further context is read.
    Where workers help, `helped` stands for them.
    """

    examiner: Examiner
    space: Space
    limit: Limit
    searched: Sequence[Part]
    candidates: int
    seed: int
    progress: RunProgress
    batch_size: int = 1
    until: float | None = None
    stopped: Callable[[], bool] = lambda: False
    helped: Examined | None = None
    standings: dict[str, Standing] = field(default_factory=dict)
    templates: dict[str, Template] = field(default_factory=dict)
    out_of_time: bool = False

    @property
    def most(self) -> int:
        """The contexts of the task that has fewest."""
        return min(len(part.contexts) for part in self.searched)

    @property
    def rungs(self) -> list[int]:
        """How many contexts of every task presses have been asked about, each time that the better half is kept."""
        return rungs(self.most)

    @property
    def ranked(self) -> list[Standing]:
        """All presses that were compared, the best first."""
        return sorted(self.standings.values(), key=lambda standing: standing.rank)

    def run(self, journal: Path) -> None:
        """Search until all candidates have been tried or the time is over."""
        # Another limit, or presses that were registered since, make another study; what was scored is known all the same.
        axes = {name: list(values) for name, values in self.space.axes.items()}
        decided = hash_json([axes, self.limit.smaller, self.limit.bytes, self.limit.lengths])
        study = open_study(journal, f"{self.limit.name} {decided[:8]}", self.space, self.candidates, self.seed)
        waves = -(-self.candidates // WAVE)
        for wave, numbers in enumerate(parts(range(self.candidates), WAVE)):
            points = self._points(study, numbers)
            whole = self.space.recipes() if wave == 0 else []
            self.progress.cell(f"wave {wave + 1} of {waves}: sizes that meet the limit")
            try:
                fitted = self.fit([*map(self.space.template, points), *whole])
                presses = sorted({press for press in fitted.values() if press})
                wished = wave_work(len(numbers) + len(whole), len(self.searched), self.most)
                self.progress.skip(wished - wave_work(len(presses), len(self.searched), self.most))
                self._halve(f"wave {wave + 1} of {waves}", presses)
            except TimeUpError:
                self.out_of_time = True
                return
            for number, point in zip(numbers, points, strict=True):
                if study.trials[number].state is TrialState.RUNNING:
                    study.tell(number, self._value(fitted.get(self.space.template(point))))

    def _points(self, study: optuna.Study, numbers: Sequence[int]) -> list[Parameters]:
        """Return the points of some candidates: those that a killed search had asked for already, then new ones."""
        axes: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in self.space.axes.items()
        }
        for number in numbers:
            if number >= len(study.trials) or study.trials[number].state is TrialState.WAITING:
                study.sampler = optuna.samplers.TPESampler(seed=self.seed + number, n_startup_trials=1)
                study.ask(axes)
        return [study.trials[number].params for number in numbers]

    def fit(self, templates: Sequence[Template]) -> dict[Template, str | None]:
        """Return compositions at the size that meets the limit, as plans say and a real context shows; None for misfits."""
        limits = dict.fromkeys(templates, self.limit)
        fitted: dict[Template, str | None] = {template: self._solve(template, self.limit) for template in limits}
        context = max((part.contexts[0] for part in self.searched), key=lambda one: len(one[0].prompt.first))
        for _ in range(_FITTINGS):
            self._check_time()
            held = self.examiner.measure([press for press in fitted.values() if press], context)
            over = {
                template: excess
                for template, press in fitted.items()
                if press in held and (excess := self._excess(press, held[press], context)) > _EXCESS
            }
            for template, excess in over.items():
                limits[template] = limits[template].scaled(1 / excess)
                fitted[template] = self._solve(template, limits[template])
            if not over:
                break
        else:
            fitted |= dict.fromkeys(over)
        found = {template: None if press in self.examiner.failed else press for template, press in fitted.items()}
        for template, press in found.items():
            if press:
                self.templates.setdefault(press, template)
        return found

    def _excess(self, press: str, held: float, context: Sequence[Item]) -> float:
        """Return how many times more than allowed a press needs, if contexts hold more than planned by as much as this one."""
        loaded = kvpress.get_press(press)
        planned = plan(loaded, self.limit.geometry, len(context[0].prompt.first)).total_bytes
        return held / planned * self.limit.needed(loaded) / self.limit.allowed

    def _solve(self, template: Template, limit: Limit) -> str | None:
        try:
            return solve(template, limit)
        except (ValueError, TypeError, NotImplementedError):  # parts that do not go together, or not with this model
            return None

    def _halve(self, wave: str, presses: Sequence[str]) -> None:
        """Ask presses about more and more contexts, and go on with the better half."""
        alive, done = list(presses), 0
        for contexts in self.rungs:
            place = f"{wave}, {contexts} contexts of each task"
            self.progress.cell(place)
            try:
                self.ask(alive, self.batches(done, contexts))
            except (TimeUpError, KeyboardInterrupt):
                if not done:
                    self._stand_so_far(alive, contexts)
                raise
            alive = [press for press in alive if press not in self.examiner.failed]
            now = sorted((self.standing(press, contexts) for press in alive), key=lambda one: one.rank)
            self.standings |= {one.press: one for one in now}
            if now:
                self.progress.reached(f"{place}: {len(now)} presses, best {describe(now[0])}")
            alive, done = [one.press for one in now[: -(-len(now) // 2)]], contexts

    def _stand_so_far(self, presses: Sequence[str], contexts: int) -> None:
        """Record where presses stand that were interrupted on their first contexts, by the samples that all have scores of."""
        for press in presses:
            if press not in self.examiner.failed and any(self._pairs(press, contexts).values()):
                self.standings[press] = replace(self.standing(press, contexts), contexts=0)

    def ask(self, presses: Sequence[str], batches: Iterable[Contexts]) -> None:
        """Examine presses on batches of contexts, and count the work; what was known of an earlier run took no time."""
        known = self.examiner.count
        for batch in self.examined(presses, batches):
            count = self.progress.advance if self.examiner.count > known else self.progress.skip
            count(len(presses) * len(batch))
            known = self.examiner.count

    def examined(self, presses: Sequence[str], batches: Iterable[Contexts]) -> Iterator[Contexts]:
        """Examine presses on batches of contexts, and yield each when its scores are known, until the time is over."""
        if self.helped is not None:
            for batch in self.helped(presses, batches):
                self._check_time()
                yield batch
            return
        for batch in batches:
            self._check_time()
            self.examiner.examine(presses, batch)
            yield batch

    def standing(self, press: str, contexts: int) -> Standing:
        """Return where a press stands on the first contexts of every task."""
        pairs = {task: known for task, known in self._pairs(press, contexts).items() if known}
        changes = {task: fmean(ours - theirs for ours, theirs in known) for task, known in pairs.items()}
        planned = self.limit.planned(kvpress.get_press(press))
        return Standing(press, contexts, changes, planned, sum(map(len, pairs.values())))

    def _pairs(self, press: str, contexts: int) -> dict[str, list[tuple[float, float]]]:
        """Return the scores of a press and of the full cache on the first contexts of every task, as far as they are known."""
        pairs: dict[str, list[tuple[float, float]]] = {part.task: [] for part in self.searched}
        for part in self.searched:
            for item in (item for context in part.contexts[:contexts] for item in context):
                if self.examiner.has_scored(press, item) and self.examiner.has_scored(NOTHING, item):
                    pairs[part.task].append(
                        (self.examiner.score_of(press, item), self.examiner.score_of(NOTHING, item))
                    )
        return pairs

    def describe_best(self) -> str:
        """Return the best press so far with the change of its worst task, its 95% interval, and the samples behind it."""
        best = self.ranked[0]
        task, change = best.worst
        pairs = self._pairs(best.press, best.contexts or self.rungs[0])[task]
        sure = paired_difference_bounds(pairs)
        return (
            f"{best.press}: worst task {task} {100 * change:+.1f} points (95% {100 * sure.low:+.0f} to "
            f"{100 * sure.high:+.0f}, {len(pairs)} samples), mean {100 * best.mean:+.1f}; {len(self.standings)} presses were "
            "compared"
        )

    def batches(self, done: int, contexts: int) -> Iterator[Contexts]:
        """Yield the contexts from `done` on, as many of a task at a time as are read together; the tasks take turns."""
        by_task = [parts(part.contexts[done:contexts], self.batch_size) for part in self.searched]
        for turn in zip_longest(*by_task):
            yield from (batch for batch in turn if batch)

    def _value(self, press: str | None) -> float:
        """Return what Optuna is told: how many halvings a press survived, and within these how it did."""
        standing = self.standings.get(press or "")
        if standing is None:
            return _MISFIT
        return self.rungs.index(standing.contexts) + _HALF * (standing.worst[1] + standing.mean / 1000)

    def _check_time(self) -> None:
        if self.stopped():
            raise KeyboardInterrupt
        if self.until is not None and time.monotonic() > self.until:
            raise TimeUpError


def rungs(most: int) -> list[int]:
    """Return the numbers of contexts at which a wave is halved: doubling, up to all."""
    found = [min(FIRST, most)]
    while found[-1] < most:
        found.append(min(most, 2 * found[-1]))
    return found


def work(candidates: int, tasks: int, most: int, recipes: int) -> int:
    """Return how often a press meets a context in a search, whose first wave has the `recipes` beside its candidates."""
    waves = parts(range(candidates), WAVE)
    return sum(wave_work(len(numbers) + (0 if wave else recipes), tasks, most) for wave, numbers in enumerate(waves))


def wave_work(presses: int, tasks: int, most: int) -> int:
    """Return how often a press meets a context in a wave of so many."""
    total, done = 0, 0
    for contexts in rungs(most):
        total += presses * tasks * (contexts - done)
        presses, done = -(-presses // 2), contexts
    return total


def describe(standing: Standing) -> str:
    """Return a press with the change of its worst task and of the mean, in points."""
    task, change = standing.worst
    return f"{standing.press} (worst {task} {100 * change:+.1f}, mean {100 * standing.mean:+.1f})"


def pick(best: Sequence[Standing], smaller: Sequence[Standing], max_drop: float | None) -> Standing:
    """Return the first of the `best` presses at the limit.

    With `max_drop`, it is the smallest press, of the `smaller` ones too, whose worst task loses at most so many points, if any.
    """
    candidates = () if max_drop is None else (*best, *smaller)
    within = [one for one in candidates if -100 * one.worst[1] <= (max_drop or 0.0)]
    return min(within, key=lambda one: (one.bytes, one.rank)) if within else best[0]


def open_study(journal: Path, name: str, space: Space, candidates: int, seed: int) -> optuna.Study:
    """Open the record of a search, or begin it with points that cover every axis."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    _cut_unfinished(journal)
    storage = JournalStorage(JournalFileBackend(str(journal), _Claimed(str(journal))))
    study = optuna.create_study(storage=storage, study_name=name, direction="maximize", load_if_exists=True)
    cover = space.cover(min(WAVE, candidates), seed)
    if len(study.trials) < len(cover):
        for point in cover[len(study.trials) :]:
            study.enqueue_trial(point)
    return study


def _cut_unfinished(journal: Path) -> None:
    """Take off a last line that a kill left unfinished."""
    if journal.exists():
        content = journal.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if whole != content:
            replace_file(journal, whole)
