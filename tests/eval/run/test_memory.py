# SPDX-License-Identifier: Apache-2.0
"""As many caches are held together as memory allows."""

from __future__ import annotations

import psutil
import pytest
import torch
from kvpress_eval.fidelity import continuation
from kvpress_eval.run import memory
from kvpress_eval.run.runner import run
from rich.console import Console

import kvpress
from kvpress.plan import Geometry, plan
from tests.eval.content import content
from tests.eval.engines import bundled_model
from tests.eval.faults.runs import Small
from tests.eval.run.test_job import SHARING, count_readings
from tests.models import tiny_model, tokens

BATCH, TOKENS = 2, 1024
PRESSES = ["none", "quest:budget=64", "knorm:0.5", "knorm:0.9", "random:0.5", "snapkv:0.75"]


def sizes(model: object) -> list[int]:
    geometry = Geometry.of(model.config)  # type: ignore[attr-defined]
    return [plan(kvpress.get_press(press), geometry, TOKENS, BATCH).total_bytes for press in PRESSES]


def divided(model: object, free: int, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(free / memory.SHARE))
    return memory.fitting(model, PRESSES, kvpress.get_press, BATCH, TOKENS)


def test_groups_are_as_large_as_memory_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    bytes_held = sizes(model)
    assert divided(model, sum(bytes_held), monkeypatch) == [PRESSES]
    assert divided(model, sum(bytes_held) - 1, monkeypatch) == [PRESSES[:-1], PRESSES[-1:]]
    assert divided(model, sum(bytes_held[:2]), monkeypatch) == [PRESSES[:2], PRESSES[2:]]
    assert divided(model, 0, monkeypatch) == [[press] for press in PRESSES]


def test_one_cache_of_a_group_has_room_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches are freed once their questions are answered; a cache that is cut while it grows needs room until the cut."""
    model, new = tiny_model("llama"), 200
    geometry, bytes_held = Geometry.of(model.config), sum(sizes(model))
    presses = [kvpress.get_press(press) for press in PRESSES]
    growth = [plan(p, geometry, TOKENS, BATCH, new).total_bytes - n for p, n in zip(presses, sizes(model), strict=True)]

    def groups(free: int, names: list[str]) -> list[list[str]]:
        monkeypatch.setattr(memory, "available_bytes", lambda device: int(free / memory.SHARE))
        return memory.fitting(model, names, kvpress.get_press, BATCH, TOKENS, new)

    assert min(growth) > 0
    assert groups(bytes_held + max(growth), PRESSES) == [PRESSES]
    assert groups(bytes_held + max(growth) - 1, PRESSES) == [PRESSES[:-1], PRESSES[-1:]]
    cut = ["decoding(knorm):compression_interval=8,target_size=64"] * 2
    before_cut = plan(kvpress.get_press(cut[0]), geometry, TOKENS, BATCH, 7).total_bytes - sizes(model)[0]
    assert 0 < before_cut < max(growth)
    assert groups(2 * sizes(model)[0] + before_cut, cut) == [cut]
    assert groups(2 * sizes(model)[0] + before_cut - 1, cut) == [cut[:1], cut[1:]]


def test_a_press_that_refuses_the_contexts_counts_as_a_full_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """The press is refused by name when the contexts are read."""
    model = tiny_model("llama")
    full = sizes(model)[0]
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(1.5 * full / memory.SHARE))
    refused = "protect(knorm:0.5):tokens=0:9000"
    with pytest.raises(ValueError, match=f"past a prompt of {TOKENS} tokens"):
        plan(kvpress.get_press(refused), Geometry.of(model.config), TOKENS, BATCH)
    assert memory.fitting(model, ["knorm:0.75", refused, "knorm:0.75"], kvpress.get_press, BATCH, TOKENS) == [
        ["knorm:0.75", refused],
        ["knorm:0.75"],
    ]


def test_free_memory_is_that_of_the_system() -> None:
    free = memory.available_bytes(torch.device("cpu"))
    assert 0 < free <= psutil.virtual_memory().total


def test_a_run_without_memory_for_all_caches_reads_more_often_and_finds_the_same(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch, tmp_path: object
) -> None:
    together = small(presses=SHARING, samples=2)
    run(together, quiet)
    readings = count_readings(monkeypatch)
    monkeypatch.setattr(memory, "available_bytes", lambda device: 0)
    one_by_one = together.model_copy(update={"out": together.out.parent / "apart"})
    result = run(one_by_one, quiet)
    assert readings == [(1, 1)] * len(SHARING) * 2
    assert result.savings.saved_seconds == 0
    assert content(one_by_one) == content(together)


def test_fidelity_holds_as_many_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same holds for `kvpress reselect`, which tries one press for each layer of a model."""
    model = tiny_model("llama")
    presses = [f"quest:budget={16 + n},page_size=4,skip_layers=0" for n in range(7)]
    cache_bytes = plan(kvpress.get_press(presses[0]), Geometry.of(model.config), 96, 1).total_bytes
    monkeypatch.setattr(memory, "available_bytes", lambda device: int(3.5 * cache_bytes / memory.SHARE))
    groups = []
    prefill = kvpress.prefill

    def counted(model: object, presses: list[object], ids: torch.Tensor) -> kvpress.Prefill:
        groups.append(len(presses))
        return prefill(model, presses, ids)

    monkeypatch.setattr(continuation.kvpress, "prefill", counted)
    assert [press for press, *_ in continuation.read_prompts(model, presses, tokens(1, 96))] == presses
    assert groups == [3, 3]


def test_the_bundled_model_has_room() -> None:
    assert memory.fitting(bundled_model().model, PRESSES, kvpress.get_press, BATCH, TOKENS) == [PRESSES]
