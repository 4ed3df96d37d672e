# SPDX-License-Identifier: Apache-2.0
"""A press without effect is refused by commands, warned about in a session, and marked in tables."""

from __future__ import annotations

import copy
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import kvpress
from kvpress.cli import app
from kvpress.core.effect import assumed_sizes, check_acts, compresses_prompts, left_whole
from kvpress.core.registry import entries
from tests.models import tiny_model, tokens

WORDS = " The old river runs near the green hill."
runner = CliRunner()


@cache
def reference() -> Any:
    return kvpress.load_model("reference")[0]


@pytest.mark.parametrize(
    ("spec", "written"),
    [
        ("snapkv", "snapkv:0.5"),
        ("snapkv:0", "snapkv:0.5"),
        ("cake:window_size=8", "cake:0.5,window_size=8"),
        ("adakv(snapkv)", "adakv(snapkv:0.5)"),
        ("bounded(knorm)", "bounded(knorm:0.5)"),
        ("snapkv + kivi:bits=4", "snapkv:0.5"),
        ("think", "think:0.5"),
        ("prefill_decoding", "prefill_decoding(snapkv:0.5; decoding(knorm):target_size=1024)"),
    ],
)
def test_a_press_without_effect_is_refused_with_the_fix(spec: str, written: str) -> None:
    with pytest.raises(ValueError, match=r"compresses nothing: write .*, or none for the full cache") as refused:
        check_acts(kvpress.get_press(spec))
    assert f"write {written}, or" in str(refused.value)
    check_acts(kvpress.get_press(written))


@pytest.mark.parametrize("example", [entry.example for entry in entries() if not entry.needs])
def test_every_example_acts(example: str) -> None:
    check_acts(kvpress.get_press(example))


@pytest.mark.parametrize("spec", ["none", "none + kivi:bits=4", "duo_attention:0.5", "decoding(knorm)", "quest"])
def test_a_press_with_effect_is_not_refused(spec: str) -> None:
    check_acts(kvpress.get_press(spec))


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("none", False), ("snapkv:0.5", True), ("kivi:bits=4", True), ("frontier", True), ("quest", False),
        ("kivi:bits=4 + quest", False), ("decoding(knorm)", False), ("minference", False),
    ],
)  # fmt: skip
def test_selectors_patterns_and_schedules_act_otherwise(spec: str, expected: bool) -> None:
    press = kvpress.get_press(spec)
    assert compresses_prompts(press) is expected
    assert left_whole(press, 1.0, 100, 100) is expected
    assert not left_whole(press, 0.5, 100, 100)
    assert not left_whole(press, 1.0, 99, 100)


@pytest.mark.parametrize(("length", "stays_dense"), [(60, True), (200, False)])
def test_a_codec_leaves_a_short_prompt_whole(length: int, stays_dense: bool) -> None:
    press = kvpress.get_press("kivi:bits=4,residual_length=128")
    with press(tiny_model("llama")) as session:
        session.model.generate(tokens(1, length), max_new_tokens=1, do_sample=False)
    report = kvpress.memory_report(session.cache)
    assert left_whole(press, report.kept / report.seen, report.total_bytes, report.uncompressed_bytes) is stays_dense


def test_a_block_warns_once_for_a_press() -> None:
    model, press = tiny_model("llama"), kvpress.SnapKVPress()
    before = copy.deepcopy(press)
    with pytest.warns(RuntimeWarning, match="snapkv compresses nothing, .*; for less, write snapkv:0.5"), press(model):
        pass
    assert press == before
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for again in (press, kvpress.SnapKVPress(0.5), kvpress.get_press("none"), kvpress.get_press("quest")):
            with again(model):
                pass
        with kvpress.reading(model, kvpress.SnapKVPress()):
            pass


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("frontier", ["frontier names no size, and takes smaller=10"]),
        ("budgeted(snapkv) + quest", ["budgeted(snapkv) names no size, and takes smaller=10"]),
        ("frontier:smaller=4", []),
        ("frontier:bytes=1MB", []),
    ],
)
def test_sizes_that_only_the_code_names(spec: str, expected: list[str]) -> None:
    assert list(assumed_sizes(kvpress.get_press(spec))) == expected


def test_compress_reports_a_press_without_effect(tmp_path: Path) -> None:
    text, out = tmp_path / "text", tmp_path / "out.kv"
    text.write_text(WORDS * 4)

    def compress(press: str) -> Any:
        return runner.invoke(
            app, ["compress", "--model", "reference", "--press", press, "--text", str(text), "--out", str(out)]
        )

    refused = compress("snapkv")
    assert refused.exit_code == 2
    assert "snapkv compresses nothing: write snapkv:0.5" in refused.output
    assert not out.exists()
    assert "warning: nothing is compressed: a codec leaves the newest pairs dense" in compress("kivi:bits=4").output
    out.unlink()
    output = compress("frontier").output
    assert "frontier names no size, and takes smaller=10" in output
    assert "warning" not in output


def test_plan_marks_presses_without_effect() -> None:
    arguments = ["plan", "--model", "reference", "--context", "64", "--press", "kivi:bits=4", "--press", "frontier"]
    output = runner.invoke(app, arguments).output
    assert "kivi:bits=4: nothing is compressed: a codec leaves the newest pairs dense" in output
    assert "frontier names no size, and takes smaller=10" in output
    assert runner.invoke(app, ["plan", "--model", "reference", "--press", "snapkv"]).exit_code == 2


def test_a_calibration_gives_no_warning(tmp_path: Path) -> None:
    from kvpress.calibrate import METHODS, calibrate

    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        calibrate(tiny_model("llama"), tokens(2, 40), METHODS["qfilter"](), tmp_path / "filters.safetensors")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("quest:budget=16,skip_layers=3", "selects pairs in none of the 3 layers"),
        ("snapkv:0.5 + loki:budget=16,skip_layers=9", "selects pairs in none of the 3 layers"),
        ("twilight(quest:budget=16,skip_layers=3)", "selects pairs in none of the 3 layers"),
        ("critiprefill:skip_layers=3", "reads a prompt by tiles in none of the 3 layers"),
    ],
)
def test_a_press_that_skips_all_layers_warns_once(spec: str, words: str) -> None:
    press, model = kvpress.get_press(spec), tiny_model("llama")
    expected = f"{words} .* layer 2, and every layer reads everything; lower skip_layers"
    with pytest.warns(RuntimeWarning, match=expected), press(model):
        model(tokens(1, 8))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with press(model), kvpress.get_press("quest:budget=16,skip_layers=2")(tiny_model("llama", "eager")):
            model(tokens(1, 8))
