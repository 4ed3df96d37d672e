# SPDX-License-Identifier: Apache-2.0
"""The search keeps the press that is best on its worst task, and continues after a kill to the same result."""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
from kvpress_eval.run.progress import RunProgress
from kvpress_eval.run.prompts import Prompt
from kvpress_eval.tasks.sample import Query
from kvpress_eval.tuning.items import Item, SplitPart
from kvpress_eval.tuning.scoring import Examiner
from kvpress_eval.tuning.search import WAVE, Search, Standing, pick, rungs, work
from kvpress_eval.tuning.sizing import Limit
from kvpress_eval.tuning.space import Space, Template, make_space
from rich.console import Console

import kvpress
from kvpress.hf.config import load_config
from kvpress.plan import Geometry, plan

GEOMETRY = Geometry.of(load_config("reference"))
LIMIT = Limit(GEOMETRY, (256,), smaller=8.0)


class KilledError(Exception):
    """The process is gone."""


class Counted(RunProgress):
    """Progress without output that counts the expected and the finished work."""

    def __init__(self, total: int) -> None:
        super().__init__(Console(file=io.StringIO()), total)
        self.expected, self.counted = total, 0

    def advance(self, work: int) -> None:
        self.counted += work

    def skip(self, work: int) -> None:
        self.expected -= work


@dataclass
class Judge:
    """Examiner without a model: scorers have a chance of being right on each task, codecs none of their own."""

    chances: dict[str, tuple[float, float]]
    patience: int = 10**9
    excess: dict[str, float] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    examined: list[str] = field(default_factory=list)
    known_scores: set[tuple[str, str]] = field(default_factory=set)

    @property
    def count(self) -> int:
        return len(self.known_scores)

    def examine(self, presses: Sequence[str], contexts: Sequence[Sequence[Item]]) -> None:
        self.patience -= 1
        if self.patience < 0:
            raise KilledError
        self.examined += presses
        self.known_scores |= {(press, context[0].id) for press in presses for context in contexts}

    def has_scored(self, press: str, item: Item) -> bool:
        return any(name == item.id and press in (press_scored, "none") for press_scored, name in self.known_scores)

    def score_of(self, press: str, item: Item) -> float:
        matching = (chances for name, chances in self.chances.items() if name in press)
        chance = 1.0 if press == "none" else next(matching, (0.1, 0.1))[item.task == "second"]
        return float(random.Random(f"{press} {item.id}").random() < chance)  # noqa: S311  # reproducible

    def measure(self, presses: Sequence[str], context: Sequence[Item]) -> dict[str, float]:
        tokens = len(context[0].prompt.first)
        return {
            press: plan(kvpress.get_press(press), GEOMETRY, tokens).total_bytes
            * max([1.0, *(more for name, more in self.excess.items() if name in press)])
            for press in presses
        }


def parts(contexts: int = 16) -> list[SplitPart]:
    query = Query("", "", ("1",), "prefix")
    prompt = Prompt(list(range(256)), [1], "")
    return [
        SplitPart(task, 256, [[Item(f"{task}-{number}", task, 256, prompt, query, 4)] for number in range(contexts)])
        for task in ("first", "second")
    ]


@pytest.fixture(scope="module")
def space() -> Space:
    return make_space()


def search(space: Space, judge: Judge, candidates: int = 20, **more: Any) -> Search:
    console = Console(file=io.StringIO())
    examiner = cast(Examiner, judge)
    return Search(examiner, space, LIMIT, parts(), candidates, 0, RunProgress(console, 1), **more)


CHANCES = {"keydiff": (1.0, 1.0), "knorm": (1.0, 0.3), "leverage": (0.8, 0.8)}


def test_the_worst_task_decides(space: Space, tmp_path: Path) -> None:
    both = replace(space, evict=tuple(spec for spec in space.evict if spec in ("keydiff", "knorm")))
    finished = search(both, Judge({"keydiff": (0.9, 0.85), "knorm": (1.0, 0.3)}))
    finished.run(tmp_path / "journal")
    best = finished.ranked[0]
    assert "keydiff" in best.press
    assert best.contexts == 16
    assert best.worst[1] == min(best.changes.values())
    assert LIMIT.fits(kvpress.get_press(best.press))


def test_standings_order_by_worst_then_mean_then_bytes() -> None:
    def standing(name: str, first: float, second: float, size: float = 1.0, contexts: int = 8) -> Standing:
        return Standing(name, contexts, {"first": first, "second": second}, size)

    ordered = [
        standing("deep", -0.4, -0.4, contexts=16), standing("even", -0.1, -0.1), standing("mean", -0.2, 0.0),
        standing("small", -0.2, -0.2), standing("large", -0.2, -0.2, 2.0), standing("one sided", 0.0, -0.5),
    ]  # fmt: skip
    assert sorted(reversed(ordered), key=lambda entry: entry.rank) == ordered


def test_half_of_a_wave_goes_on(space: Space, tmp_path: Path) -> None:
    judge = Judge(CHANCES)
    finished = search(space, judge)
    finished.run(tmp_path / "journal")
    counts = [sum(entry.contexts >= contexts for entry in finished.standings.values()) for contexts in rungs(16)]
    assert rungs(16) == [2, 4, 8, 16]
    assert all(following == -(-previous // 2) for previous, following in pairwise(counts))
    # Each press was examined once on each context of two tasks.
    assert len(judge.examined) == 2 * sum(entry.contexts for entry in finished.standings.values())


def test_a_killed_search_ends_as_one_run_would(space: Space, tmp_path: Path) -> None:
    candidates = WAVE + 2
    undisturbed = search(space, Judge(CHANCES), candidates)
    undisturbed.run(tmp_path / "whole")
    with pytest.raises(KilledError):
        search(space, Judge(CHANCES, patience=40), candidates).run(tmp_path / "killed")
    with (tmp_path / "killed").open("ab") as file:
        file.write(b'{"op_code": 4, "wor')  # the line that was being written
    resumed = search(space, Judge(CHANCES), candidates)
    resumed.run(tmp_path / "killed")
    assert resumed.ranked == undisturbed.ranked


def test_a_search_goes_on_when_a_press_has_joined(space: Space, tmp_path: Path) -> None:
    search(space, Judge(CHANCES), 4).run(tmp_path / "journal")
    wider = replace(space, evict=(*space.evict, "snapkv:window_size=8"))
    again = search(wider, Judge(CHANCES), len(wider.axes["evict"]))
    again.run(tmp_path / "journal")
    assert any("window_size=8" in press for press in again.standings)


def test_another_seed_searches_elsewhere(space: Space, tmp_path: Path) -> None:
    presses = []
    for seed in (0, 1):
        finished = search(space, Judge(CHANCES), 6)
        finished.seed = seed
        finished.run(tmp_path / f"journal-{seed}")
        presses.append(set(finished.standings))
    assert presses[0] != presses[1]


def test_presses_above_their_planned_size_are_made_smaller(space: Space) -> None:
    over_plan = search(space, Judge(CHANCES, excess={"keydiff": 1.3}))
    evicting, unaffected = Template("keydiff", codec="kivi:bits=3"), Template("snapkv", "adakv")
    (plain, same) = search(space, Judge(CHANCES)).fit([evicting, unaffected]).values()
    (smaller, untouched) = over_plan.fit([evicting, unaffected]).values()
    assert untouched == same
    assert smaller is not None
    assert smaller != plain
    assert 0.9 * LIMIT.allowed < 1.3 * LIMIT.planned(kvpress.get_press(smaller)) <= 1.01 * LIMIT.allowed


def test_a_search_ends_when_its_time_is_over(space: Space, tmp_path: Path) -> None:
    finished = search(space, Judge(CHANCES), until=0.0)
    finished.run(tmp_path / "journal")
    assert finished.out_of_time
    assert not finished.ranked


@pytest.mark.parametrize("batches", [1, 3, 9])
def test_time_that_runs_out_before_a_comparison_leaves_the_best_so_far(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, batches: int
) -> None:
    few = replace(space, evict=("keydiff", "knorm", "leverage_score", "cap", "lagkv", "tova"))
    unlimited = search(few, judge := Judge(CHANCES))
    clock = iter([*[0.0] * (batches + 1), *[2.0] * 99])
    monkeypatch.setattr("kvpress_eval.tuning.search.time.monotonic", lambda: next(clock))
    replaced = replace(unlimited, until=1.0)
    replaced.run(tmp_path / "journal")
    assert replaced.out_of_time
    assert len(replaced.ranked) == len(set(judge.examined))
    best = replaced.ranked[0]
    assert best.contexts == (0 if batches < 4 else 2 if batches < 8 else 4)
    assert any(name in best.press for name in CHANCES)
    text = replaced.describe_best()
    assert best.press in text
    assert re.search(r"worst task \w+ [+-]\d+\.\d points \(95% -\d+ to \+\d+, \d samples?\)", text), text
    assert f"{len(replaced.ranked)} presses were compared" in text


def test_an_interrupt_leaves_the_best_so_far(space: Space, tmp_path: Path) -> None:
    judge = Judge(CHANCES)
    interrupted = search(space, judge, stopped=lambda: len(judge.known_scores) > 0)
    with pytest.raises(KeyboardInterrupt):
        interrupted.run(tmp_path / "journal")
    assert [entry.samples for entry in interrupted.ranked] == [1] * len(interrupted.ranked)
    assert interrupted.ranked


def test_tasks_take_turns(space: Space) -> None:
    two_a_batch = search(space, Judge(CHANCES), batch_size=2)
    tasks = [[context[0].task for context in batch] for batch in two_a_batch.batches(0, 3)]
    assert tasks == [["first"] * 2, ["second"] * 2, ["first"], ["second"]]


def test_work_counts_all_examinations_of_a_search(space: Space, tmp_path: Path) -> None:
    judge = Judge(CHANCES)
    finished = search(space, judge)
    finished.progress = progress = Counted(work(20, 2, 16, len(space.recipes())))
    finished.run(tmp_path / "journal")
    assert progress.counted == len(judge.examined)
    assert progress.expected == progress.counted  # points that no press was made of are taken off


def test_known_scores_do_not_count_for_the_pace(space: Space, tmp_path: Path) -> None:
    judge = Judge(CHANCES)
    search(space, judge).run(tmp_path / "first")
    second = search(space, judge)  # every score is known from the first search
    second.progress = progress = Counted(work(20, 2, 16, len(space.recipes())))
    second.run(tmp_path / "second")
    assert (progress.counted, progress.expected) == (0, 0)


def test_the_pick_is_the_best_or_the_smallest_within_the_allowed_loss() -> None:
    best = [Standing("best", 8, {"first": 0.0}, 10.0), Standing("next", 8, {"first": -0.02}, 9.0)]
    smaller = [Standing("half", 8, {"first": -0.05}, 5.0)]
    assert pick(best, smaller, None).press == "best"
    assert pick(best, smaller, 1.0).press == "best"
    assert pick(best, smaller, 3.0).press == "next"
    assert pick(best, smaller, 5.0).press == "half"
    assert pick([Standing("only", 8, {"first": -0.5}, 10.0)], [], 1.0).press == "only"
