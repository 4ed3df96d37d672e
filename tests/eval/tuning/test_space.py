# SPDX-License-Identifier: Apache-2.0
"""The space lists the registered presses, and points cover it."""

from __future__ import annotations

import re
from dataclasses import dataclass

import pytest
from kvpress_eval.tuning.space import BUDGET, NOTHING, RATIO, SMALLER, Space, Template, make_space

import kvpress
from kvpress.core import registry
from kvpress.core.press import BasePress, WrapperPress
from kvpress.core.recipe import Eviction
from kvpress.core.registry import Entry, find


@pytest.fixture(scope="module")
def space() -> Space:
    return make_space()


@pytest.mark.parametrize("entry", kvpress.list_presses(), ids=lambda entry: entry.name)
def test_every_press_is_where_it_belongs(space: Space, entry: Entry) -> None:
    axes = {"evict": space.evict, "wrapper": space.wrapper, "codec": space.codec, "whole": space.whole}
    offering_axes = {axis for axis, specs in axes.items() for spec in specs if re.split(r"[:(]", spec)[0] == entry.name}
    if entry.needs or entry.role in ("baseline", "schedule", "select", "prefill"):
        assert not offering_axes
    else:
        press = kvpress.get_press(entry.example)
        if hasattr(press, SMALLER):
            assert offering_axes == {"whole"}
        elif isinstance(press, WrapperPress):
            assert offering_axes == {"wrapper"}
        elif entry.role == "quantise":
            assert offering_axes == {"codec"}
        elif isinstance(press, kvpress.BudgetPress) and entry.name != "shotkv":  # it needs the separator of its shots
            assert offering_axes == {"evict"}


def test_presses_that_keep_to_no_ratio_are_left_out(space: Space) -> None:
    names = {spec.partition(":")[0] for specs in space.axes.values() for spec in specs}
    assert not names & {"per_layer_compression", "simlayerkv", "duo_attention", "quest", "decoding", "cq", "composed"}


def test_codecs_that_encode_nothing_are_left_out(space: Space) -> None:
    assert "think" not in space.codec
    assert any(spec.startswith("think:") for spec in space.codec)


def test_settings_in_which_a_press_cannot_act_are_left_out(space: Space) -> None:
    assert [spec for spec in space.evict if spec.startswith("finch")] == ["finch:window_size=64"]


@pytest.fixture
def open_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """A registry whose additions are gone after the test."""
    kvpress.list_presses()
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))


@pytest.mark.usefixtures("open_registry")
def test_a_press_joins_by_its_registration() -> None:
    @kvpress.register("tuned_by_size", "evict", example="tuned_by_size:smaller=20,sinks=2")
    @dataclass
    class BySize(BasePress):
        """Press with a size setting."""

        smaller: float = 4.0
        sinks: int = 4

    @kvpress.register("half_of", "budget", example="half_of(knorm:0.5):share=0.25")
    @dataclass
    class HalfOf(WrapperPress):
        """Wrapper with a setting."""

        share: float = 0.5

        def wrap(self, step: Eviction, model: object) -> Eviction:
            return step

    @kvpress.register("coded", "quantise", example="coded:bits=2,sinks=1")
    @dataclass
    class Coded(BasePress):
        """Codec with settings."""

        bits: int = 4
        sinks: int = 0

    space = make_space()
    assert [spec for spec in space.codec if "coded" in spec] == ["coded", "coded:sinks=1"]
    point = {"evict": "knorm", "wrapper": "none", "codec": "coded:sinks=1", "bits": "3", "residual": "32"}
    assert space.template(point).codec == "coded:sinks=1,bits=3"
    assert space.template({**point, "codec": "coded", "bits": "default"}).codec == "coded"
    assert space.template({**point, "codec": "kivi"}).codec == "kivi:bits=3,residual_length=32"
    assert [spec for spec in space.whole if "tuned_by_size" in spec] == ["tuned_by_size", "tuned_by_size:sinks=2"]
    assert [spec for spec in space.wrapper if "half_of" in spec] == ["half_of", "half_of:share=0.25"]
    (plain, example) = (recipe for recipe in space.recipes() if "tuned_by_size" in recipe.evict)
    assert plain.build(SMALLER, 8.0) == BySize(8.0)
    assert example.build(SMALLER, 8.0) == BySize(8.0, sinks=2)
    wrapped = Template("snapkv", "half_of:share=0.25").build(RATIO, 0.75)
    assert wrapped == HalfOf(kvpress.SnapKVPress(0.75), 0.25)


def test_a_template_makes_a_press_of_any_size() -> None:
    template = Template("snapkv:window_size=8", "adakv", "kivi:bits=3")
    assert template.label == "adakv(snapkv:window_size=8) + kivi:bits=3"
    assert template.build(RATIO, 0.5) == kvpress.get_press("adakv(snapkv:0.5,window_size=8) + kivi:bits=3")
    assert template.build(BUDGET, 64) == kvpress.get_press("adakv(snapkv:budget=64,window_size=8) + kivi:bits=3")
    assert template.build(RATIO, 0) == kvpress.get_press("kivi:bits=3")
    assert Template(NOTHING).build(RATIO, 0) == kvpress.get_press("none")


def test_points_cover_the_space(space: Space) -> None:
    count = 3 * len(space.evict)
    points = space.cover(count, seed=3)
    assert points == space.cover(count, seed=3)
    assert points != space.cover(count, seed=4)
    assert len({tuple(point.values()) for point in points}) == len(points)
    for name, values in space.axes.items():
        assert {point[name] for point in points} == set(values)
    assert {point["evict"] for point in points if point["wrapper"] == NOTHING} >= set(space.evict)


def test_a_status_narrows_the_space() -> None:
    recommended = make_space(statuses=("recommended",))
    specs = [*recommended.evict, *recommended.wrapper, *recommended.codec, *recommended.whole]
    assert {find(spec.partition(":")[0].partition("(")[0]).status for spec in specs} == {"recommended"}
    assert {"kvzip", "snapkv"} <= set(recommended.evict)
    assert "frontier" in recommended.whole
    assert len(recommended.evict) < len(make_space().evict)
