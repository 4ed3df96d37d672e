# SPDX-License-Identifier: Apache-2.0
"""Compositions meet a size, and impossible limits are refused with the smallest possible one."""

from __future__ import annotations

import pytest
import torch
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.tuning.sizing import Limit, check_possible, make_room, solve
from kvpress_eval.tuning.space import NOTHING, Template, make_space

import kvpress
from kvpress.hf.config import load_config
from kvpress.plan import Geometry, plan
from tests.eval.engines import bundled_model

GEOMETRY = Geometry.of(load_config("reference"))
TEMPLATES = (
    Template("knorm"),
    Template("keydiff", codec="kivi:bits=3,residual_length=0"),
    Template("snapkv", "adakv"),
    Template("knorm", "chunkkv", "turboquant:bits=2,residual_length=0"),
)


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.label)
@pytest.mark.parametrize("smaller", [10.0, 30.0])
def test_a_ratio_meets_a_factor(template: Template, smaller: float) -> None:
    limit = Limit(GEOMETRY, (1020, 2048), smaller=smaller)
    spec = solve(template, limit)
    assert spec is not None
    assert "compression_ratio" in spec
    factor = limit.uncompressed / limit.planned(kvpress.get_press(spec))
    assert smaller <= factor
    if template.codec == NOTHING:
        assert factor < 1.05 * smaller


@pytest.mark.parametrize("template", TEMPLATES, ids=lambda template: template.label)
def test_real_contexts_take_the_solved_size(template: Template) -> None:
    limit = Limit(GEOMETRY, (500,), smaller=8.0)
    spec = solve(template, limit)
    assert spec is not None
    engine = bundled_model()
    ids = torch.randint(3, 900, (1, 500), generator=torch.Generator().manual_seed(0))
    (cache,) = kvpress.prefill(engine.model, [kvpress.get_press(spec)], ids).caches
    assert kvpress.memory_report(cache).total_bytes <= 1.01 * limit.allowed


def test_memory_is_met_by_a_budget_at_any_time() -> None:
    full_bytes = plan(kvpress.get_press("none"), GEOMETRY, 4096).total_bytes
    limit = Limit(GEOMETRY, (4096,), bytes=int(0.4 * full_bytes))
    spec = solve(Template("knorm"), limit)
    assert spec is not None
    assert "budget" in spec
    planned = plan(kvpress.get_press(spec), GEOMETRY, 4096)
    assert 0.35 * full_bytes < planned.peak_bytes <= 0.4 * full_bytes
    assert planned.total_bytes < planned.peak_bytes


def test_the_planned_sizes_of_a_press_name_the_size_that_is_limited() -> None:
    press = kvpress.get_press("frontier:smaller=10")
    peak = plan(press, GEOMETRY, 4096).peak_bytes
    in_bytes = Limit(GEOMETRY, (4096,), bytes=peak // 2)
    assert in_bytes.figures(press).limited == "peak"
    assert (in_bytes.figures(press).peak_bytes, in_bytes.figures(press).tokens) == (peak, 4096)
    assert in_bytes.planned(press) < in_bytes.allowed < in_bytes.peak(press)
    assert not in_bytes.fits(press)
    by_factor = Limit(GEOMETRY, (4096,), smaller=9.0)
    assert by_factor.figures(press).limited == "held"
    assert by_factor.fits(press)


@pytest.mark.parametrize(
    ("lengths", "line"),
    [
        ((512,), "the cache may hold 102.4 KiB of a context of 512 tokens: 10x smaller"),
        ((128, 896), "the cache may hold 102.4 KiB of a context of 128 to 896 tokens, on average: 10x smaller"),
    ],
)
def test_the_line_about_a_factor(lengths: tuple[int, ...], line: str) -> None:
    assert Limit(GEOMETRY, lengths, smaller=10.0).line == line


def test_a_cache_that_fits_is_not_compressed() -> None:
    limit = Limit(GEOMETRY, (1024,), smaller=3.0)
    assert solve(Template("knorm", codec="kivi:bits=4,residual_length=0"), limit) == "kivi:bits=4,residual_length=0"
    assert solve(Template(NOTHING, codec="kivi:bits=8,residual_length=0"), limit) is None


def test_impossible_limits_say_the_smallest() -> None:
    space = make_space()
    templates = [space.template(point) for point in space.cover(20, 0)]
    limit = Limit(GEOMETRY, (1024,), smaller=1e5)
    with pytest.raises(
        ConfigError, match=r"smaller 100000 is more than any press reaches: at most \d{3,4}, as .* one pair"
    ):
        check_possible(make_room(GEOMETRY, 10**6, 1024, 1, None), limit, templates)
    room = make_room(GEOMETRY, 5_000_000, 1024, 1, 5_100_000)
    limit = Limit(GEOMETRY, (1024,), bytes=100_000)
    with pytest.raises(
        ConfigError,
        match=r"memory 4\.9 MiB \(5100000 bytes\) is not enough: at least .* \(\d+ bytes\), of which the weights are 4\.8 MiB",
    ):
        check_possible(room, limit, templates)
    with pytest.raises(
        ConfigError, match=r"4\.8 MiB \(4999999 bytes\) does not hold the weights of the model, 4\.8 MiB \(5000000"
    ):
        check_possible(make_room(GEOMETRY, 5_000_000, 1024, 1, 4_999_999), limit, templates)
