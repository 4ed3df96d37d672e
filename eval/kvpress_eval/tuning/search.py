# SPDX-License-Identifier: Apache-2.0
"""Search by successive halving: waves of candidates, halved on twice as many contexts each time, ranked by the worst task.

Optuna proposes the candidates (TPE over the axes of the space). Draws depend only on the seed and the number of a candidate,
and every score is stored, so that a killed search continues to the same result as an uninterrupted one.
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
from kvpress_eval.results.stats import paired_difference
from kvpress_eval.run.generation import parts
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.tuning.items import Item, SplitPart
from kvpress_eval.tuning.scoring import Contexts, Examiner
from kvpress_eval.tuning.sizing import Limit, solve
from kvpress_eval.tuning.space import NOTHING, Parameters, Space, Template

WAVE = 32
"""Candidates per wave; Optuna proposes the next wave from the results of earlier ones."""
FIRST = 2
"""Contexts of every task on which all candidates of a wave are scored."""
_MISFIT = -1.0
"""Value of a point with incompatible parts, or one that is too large at any ratio."""
_EXCESS = 1.01
"""Tolerated size on a real context, relative to the limit."""
_FITTINGS = 3
_HALF = 0.5

Examined = Callable[[Sequence[str], Iterable[Contexts]], Iterator[Contexts]]
"""Function that examines presses on batches of contexts, and yields each batch when it is scored."""


@dataclass(frozen=True)
class Standing:
    """Intermediate result of a press in the search."""

    press: str
    contexts: int
    """Contexts of every task so far; 0 if time ran out before the first contexts of every task were scored."""
    changes: Mapping[str, float]
    """Change of accuracy from the full cache, by task."""
    bytes: float
    """Planned held bytes of a context, on average."""
    samples: int = 0
    """Number of samples that the changes are computed from."""
    peak_bytes: float = 0.0
    """Planned peak bytes of a context while it is read, on average."""

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
        """Sort key of standings, best first: number of contexts, worst task, mean, bytes."""
        return -self.contexts, -self.worst[1], -self.mean, self.bytes, self.press


class TimeUpError(Exception):
    """The time limit of the search is reached."""


class _Claimed(JournalFileOpenLock):
    """Lock that does nothing, because this process has claimed the output folder."""

    def acquire(self) -> bool:
        return True

    def release(self) -> None:
        return None


@dataclass
class Search:
    """Search for presses that meet a limit and lose as little as possible on the worst task."""

    examiner: Examiner
    space: Space
    limit: Limit
    searched: Sequence[SplitPart]
    candidates: int
    seed: int
    progress: RunProgress
    batch_size: int = 1
    until: float | None = None
    """Monotonic time after which no further context is read."""
    stopped: Callable[[], bool] = lambda: False
    helped: Examined | None = None
    """Examines presses on the workers of a cluster; None: in this process."""
    standings: dict[str, Standing] = field(default_factory=dict)
    templates: dict[str, Template] = field(default_factory=dict)
    out_of_time: bool = False

    @property
    def most(self) -> int:
        """Smallest number of contexts among the tasks."""
        return min(len(part.contexts) for part in self.searched)

    @property
    def rungs(self) -> list[int]:
        """Numbers of contexts per task at which the better half is kept."""
        return rungs(self.most)

    @property
    def ranked(self) -> list[Standing]:
        """All presses that were compared, the best first."""
        return sorted(self.standings.values(), key=lambda standing: standing.rank)

    def run(self, journal: Path) -> None:
        """Search until all candidates have been tried or the time limit is reached."""
        # A new limit or newly registered presses make a new study, which reuses the stored scores.
        axes = {name: list(values) for name, values in self.space.axes.items()}
        decided = hash_json([axes, self.limit.smaller, self.limit.bytes, self.limit.lengths])
        study = open_study(journal, f"{self.limit.name} {decided[:8]}", self.space, self.candidates, self.seed)
        waves = -(-self.candidates // WAVE)
        for wave, numbers in enumerate(parts(range(self.candidates), WAVE)):
            points = self._points(study, numbers)
            recipes = self.space.recipes() if wave == 0 else []
            self.progress.cell(f"wave {wave + 1} of {waves}: sizes that meet the limit")
            try:
                fitted = self.fit([*map(self.space.template, points), *recipes])
                presses = sorted({press for press in fitted.values() if press})
                wished = wave_work(len(numbers) + len(recipes), len(self.searched), self.most)
                self.progress.skip(wished - wave_work(len(presses), len(self.searched), self.most))
                self._halve(f"wave {wave + 1} of {waves}", presses)
            except TimeUpError:
                self.out_of_time = True
                return
            for number, point in zip(numbers, points, strict=True):
                if study.trials[number].state is TrialState.RUNNING:
                    study.tell(number, self._value(fitted.get(self.space.template(point))))

    def _points(self, study: optuna.Study, numbers: Sequence[int]) -> list[Parameters]:
        """Return the points of some candidates: those in the study of a killed search, then new ones."""
        axes: dict[str, optuna.distributions.BaseDistribution] = {
            name: optuna.distributions.CategoricalDistribution(values) for name, values in self.space.axes.items()
        }
        for number in numbers:
            if number >= len(study.trials) or study.trials[number].state is TrialState.WAITING:
                study.sampler = optuna.samplers.TPESampler(seed=self.seed + number, n_startup_trials=1)
                study.ask(axes)
        return [study.trials[number].params for number in numbers]

    def fit(self, templates: Sequence[Template]) -> dict[Template, str | None]:
        """Return the spec of each composition at the size that meets the limit on a real context; None for misfits."""
        limits = dict.fromkeys(templates, self.limit)
        fitted: dict[Template, str | None] = {template: self._solve(template, self.limit) for template in limits}
        context = max((part.contexts[0] for part in self.searched), key=lambda items: len(items[0].prompt.first))
        for _ in range(_FITTINGS):
            self._check_time()
            sizes = self.examiner.measure([press for press in fitted.values() if press], context)
            over = {
                template: excess
                for template, press in fitted.items()
                if press in sizes and (excess := self._excess(press, sizes[press], context)) > _EXCESS
            }
            for template, excess in over.items():
                limits[template] = limits[template].scaled(1 / excess)
                fitted[template] = self._solve(template, limits[template])
            if not over:
                break
        else:
            fitted |= dict.fromkeys(over)
        specs = {template: None if press in self.examiner.failed else press for template, press in fitted.items()}
        for template, press in specs.items():
            if press:
                self.templates.setdefault(press, template)
        return specs

    def _excess(self, press: str, size: float, context: Sequence[Item]) -> float:
        """Return the size relative to the limit, with the plan corrected by the measured size of one context."""
        loaded = kvpress.get_press(press)
        planned = plan(loaded, self.limit.geometry, len(context[0].prompt.first)).total_bytes
        return size / planned * self.limit.needed(loaded) / self.limit.allowed

    def _solve(self, template: Template, limit: Limit) -> str | None:
        try:
            return solve(template, limit)
        except (ValueError, TypeError, NotImplementedError):  # parts that do not go together, or not with this model
            return None

    def _halve(self, wave: str, presses: Sequence[str]) -> None:
        """Score presses on more contexts at each rung, and continue with the better half."""
        alive, done = list(presses), 0
        for contexts in self.rungs:
            place = f"{wave}, {contexts} contexts of each task"
            self.progress.cell(place)
            try:
                self.examine(alive, self.batches(done, contexts))
            except (TimeUpError, KeyboardInterrupt):
                if not done:
                    self._stand_so_far(alive, contexts)
                raise
            alive = [press for press in alive if press not in self.examiner.failed]
            now = sorted((self.standing(press, contexts) for press in alive), key=lambda standing: standing.rank)
            self.standings |= {standing.press: standing for standing in now}
            if now:
                self.progress.reached(f"{place}: {len(now)} presses, best {describe(now[0])}")
            alive, done = [standing.press for standing in now[: -(-len(now) // 2)]], contexts

    def _stand_so_far(self, presses: Sequence[str], contexts: int) -> None:
        """Record the standings of presses that were interrupted on their first contexts, with `contexts` 0."""
        for press in presses:
            if press not in self.examiner.failed and any(self._pairs(press, contexts).values()):
                self.standings[press] = replace(self.standing(press, contexts), contexts=0)

    def examine(self, presses: Sequence[str], batches: Iterable[Contexts]) -> None:
        """Examine presses on batches of contexts, and count the work; stored scores of an earlier run count as skipped."""
        num_scores = self.examiner.count
        for batch in self.examined(presses, batches):
            count = self.progress.advance if self.examiner.count > num_scores else self.progress.skip
            count(len(presses) * len(batch))
            num_scores = self.examiner.count

    def examined(self, presses: Sequence[str], batches: Iterable[Contexts]) -> Iterator[Contexts]:
        """Examine presses on batches of contexts; yield each batch with complete scores, until the time limit."""
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
        """Return the standing of a press on the first contexts of every task."""
        pairs = {task: task_pairs for task, task_pairs in self._pairs(press, contexts).items() if task_pairs}
        changes = {task: fmean(ours - theirs for ours, theirs in task_pairs) for task, task_pairs in pairs.items()}
        loaded = kvpress.get_press(press)
        planned, peak = self.limit.planned(loaded), self.limit.peak(loaded)
        return Standing(press, contexts, changes, planned, sum(map(len, pairs.values())), peak)

    def _pairs(self, press: str, contexts: int) -> dict[str, list[tuple[float, float]]]:
        """Return the existing scores of a press and of the full cache on the first contexts of every task."""
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
        sure = paired_difference([pairs])
        return (
            f"{best.press}: worst task {task} {100 * change:+.1f} points (95% {100 * sure.low:+.0f} to "
            f"{100 * sure.high:+.0f}, {len(pairs)} samples), mean {100 * best.mean:+.1f}; {len(self.standings)} presses were "
            "compared"
        )

    def batches(self, done: int, contexts: int) -> Iterator[Contexts]:
        """Yield batches of the contexts from `done` on, alternating between the tasks."""
        by_task = [parts(part.contexts[done:contexts], self.batch_size) for part in self.searched]
        for turn in zip_longest(*by_task):
            yield from (batch for batch in turn if batch)

    def _value(self, press: str | None) -> float:
        """Return the objective for Optuna: the number of halvings survived, plus a fraction for the scores."""
        standing = self.standings.get(press or "")
        if standing is None:
            return _MISFIT
        return self.rungs.index(standing.contexts) + _HALF * (standing.worst[1] + standing.mean / 1000)

    def _check_time(self) -> None:
        if self.stopped():
            raise KeyboardInterrupt
        if self.until is not None and time.monotonic() > self.until:
            raise TimeUpError


def rungs(num_contexts: int) -> list[int]:
    """Return the numbers of contexts at which a wave is halved: doubling, up to all."""
    counts = [min(FIRST, num_contexts)]
    while counts[-1] < num_contexts:
        counts.append(min(num_contexts, 2 * counts[-1]))
    return counts


def work(candidates: int, tasks: int, num_contexts: int, recipes: int) -> int:
    """Return the number of (press, context) evaluations of a search; its first wave also has the `recipes`."""
    waves = parts(range(candidates), WAVE)
    return sum(
        wave_work(len(numbers) + (0 if wave else recipes), tasks, num_contexts) for wave, numbers in enumerate(waves)
    )


def wave_work(presses: int, tasks: int, num_contexts: int) -> int:
    """Return the number of (press, context) evaluations of a wave."""
    total, done = 0, 0
    for contexts in rungs(num_contexts):
        total += presses * tasks * (contexts - done)
        presses, done = -(-presses // 2), contexts
    return total


def describe(standing: Standing) -> str:
    """Return a press with the change of its worst task and of the mean, in points."""
    task, change = standing.worst
    return f"{standing.press} (worst {task} {100 * change:+.1f}, mean {100 * standing.mean:+.1f})"


def pick(best: Sequence[Standing], smaller: Sequence[Standing], max_drop: float | None) -> Standing:
    """Return the first of the `best` presses at the limit.

    With `max_drop`, return the smallest press of both lists whose worst task loses at most `max_drop` points, if any.
    """
    candidates = () if max_drop is None else (*best, *smaller)
    within = [standing for standing in candidates if -100 * standing.worst[1] <= (max_drop or 0.0)]
    return min(within, key=lambda standing: (standing.bytes, standing.rank)) if within else best[0]


def open_study(journal: Path, name: str, space: Space, candidates: int, seed: int) -> optuna.Study:
    """Open the study of a search; a new one starts with points that cover every axis."""
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
    """Remove an incomplete last line, left by a killed process."""
    if journal.exists():
        content = journal.read_bytes()
        complete = content[: content.rfind(b"\n") + 1]
        if complete != content:
            replace_file(journal, complete)
