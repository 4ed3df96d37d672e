# SPDX-License-Identifier: Apache-2.0
"""Budget curves of heads: concave hulls, greedy shares against an exhaustive search, and the use of the files."""

from __future__ import annotations

from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import kvpress
from kvpress.calibrate import LUKVSettings, calibrate
from kvpress.calibrate.lukv import NEWEST, falling, gains_of, kept_counts, press_scores
from kvpress.calibrate.repeated import SINKS, read_twice
from kvpress.cli import app
from kvpress.core import calibration as calibration
from tests.caches import prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses import scoring

DATA = Path(kvpress.__file__).parent / "data" / "reference" / "calibration.jsonl"
LENGTH = 40


def hull(values: list[float]) -> list[float]:
    """Return the least concave function above the points `(k, values[k])` at every k, from all chords."""
    count = len(values)
    return [
        max(
            values[i] if i == j else values[i] + (values[j] - values[i]) * (k - i) / (j - i)
            for i in range(k + 1)
            for j in range(k, count)
        )
        for k in range(count)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_gains_are_the_slopes_of_the_hull(seed: int) -> None:
    gains = torch.rand(9, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 3
    slopes, sums = falling(gains), [0.0, *gains.cumsum(0).tolist()]
    assert [0.0, *slopes.cumsum(0).tolist()] == pytest.approx(hull(sums))
    assert bool((slopes.diff() <= 1e-12).all())


def test_kept_counts_are_the_best_of_all_with_that_sum() -> None:
    gains = torch.rand(3, 6, generator=torch.Generator().manual_seed(5), dtype=torch.float64).sort(1, descending=True)[
        0
    ]
    kept = kept_counts(gains)
    for percent in (5, 20, 50, 75, 99):
        count = round(18 * (1 - percent / 100))
        counts = kept[percent - 1].tolist()
        assert sum(counts) == count
        best = max(
            sum(float(row[:n].sum()) for row, n in zip(gains, split, strict=True))
            for split in product(range(7), repeat=3)
            if sum(split) == count
        )
        assert sum(float(row[:n].sum()) for row, n in zip(gains, counts, strict=True)) == pytest.approx(best)


def test_gains_follow_the_order_of_the_press_after_pairs_that_are_always_kept() -> None:
    scores = torch.arange(12.0).expand(2, 12).clone()
    scores[1] = scores[1].flip(0)
    worth = torch.arange(12.0).expand(2, 12) ** 2
    gains = gains_of(scores, worth)
    assert bool(gains[:, : SINKS + NEWEST].isposinf().all())
    # Head 0 takes the best pairs first; head 1 the worst first, so that its hull is a line.
    assert gains[0, 5:].tolist() == [10.0**2, 9.0**2, 8.0**2, 7.0**2, 6.0**2, 5.0**2, 4.0**2]
    assert gains[1, 5:].tolist() == pytest.approx([sum(x * x for x in range(4, 11)) / 7] * 7)


@pytest.mark.parametrize("spec", ["knorm", "expected_attention:epsilon=0.02"])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_scores_are_those_of_the_press(spec: str, family: str) -> None:
    model, ids, press = tiny_model(family), tokens(1, LENGTH), kvpress.get_press(spec)
    press.compression_ratio = 0.5  # type: ignore[attr-defined]
    actual = press_scores(model, ids[0], spec)
    assert sorted(actual) == full_layers(model)
    for layer, views in scoring.scored(model, press, ids).items():
        torch.testing.assert_close(actual[layer], torch.cat([scores[0] for _, scores in views]).cpu())


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3"])
def test_budgets_keep_more_worth_than_equal_budgets(family: str, tmp_path: Path) -> None:
    """Worth is measured in a second reading, and pairs are ordered by the press; the press keeps the counts of the curve."""
    model, ids, file = tiny_model(family), tokens(1, LENGTH), tmp_path / "curve.safetensors"
    result = calibrate(model, ids, LUKVSettings("knorm"), file)
    full = full_layers(model)
    assert sorted(result.tensors) == [f"{layer}.curve" for layer in full]
    curve = torch.cat([result.tensors[f"{layer}.curve"] for layer in full], dim=1)
    torch.testing.assert_close(
        curve.mean(1), torch.arange(1, 100) / 100, atol=0.5 / curve.shape[1] / LENGTH + 1e-6, rtol=0
    )
    assert bool((curve.diff(dim=0) >= -1e-6).all())
    worth = torch.cat([read_twice(model, ids[0], True)[layer].scores for layer in full])[:, SINKS:-NEWEST]
    order = torch.cat([press_scores(model, ids[0], "knorm")[layer] for layer in full])[:, SINKS:-NEWEST].argsort(
        1, descending=True
    )

    def worth_of(counts: list[int]) -> float:
        heads = zip(worth.gather(1, order), counts, strict=True)
        return sum(float(ordered[: max(0, count - SINKS - NEWEST)].sum()) for ordered, count in heads)

    chosen = equal = 0.0
    for percent in range(10, 91, 10):
        chosen += worth_of(((1 - curve[percent - 1]) * LENGTH).round().int().tolist())
        equal += worth_of([round((1 - percent / 100) * LENGTH)] * len(worth))
    # A budget may end within a chord of the hull, which then overestimates the gain; the sum over budgets is larger.
    assert chosen > equal
    cache = prefill(model, kvpress.LUKVPress(kvpress.KnormPress(), 0.5, curve=file), ids)
    heads = [len(head) for layer in kvpress.kept_positions(cache) if layer for head in layer[0]]
    expected = ((1 - curve[49]) * LENGTH).round().int().tolist()
    assert heads == expected if family != "gemma3_text" else sum(expected) <= sum(heads)


def test_curves_of_another_model_or_press_are_refused(tmp_path: Path) -> None:
    model, file = tiny_model("llama"), tmp_path / "curve.safetensors"
    calibrate(model, tokens(2, LENGTH), LUKVSettings("snapkv:window_size=4"), file)
    ids, mask = padded_batch([LENGTH, 25])
    fitting = f"lukv(snapkv:0.5,window_size=4):curve='{file}'"
    counts = [
        [sum(len(head) for layer in kvpress.kept_positions(cache) for head in layer[row]) for row in range(2)]
        for cache in (
            prefill(model, kvpress.get_press(spec), ids, mask) for spec in (fitting, "snapkv:0.5,window_size=4")
        )
    ]
    assert counts[0] == counts[1]
    with pytest.raises(
        ValueError, match="was made for LlamaForCausalLM, which differs from this model in architecture"
    ):
        prefill(tiny_model("qwen3"), kvpress.get_press(fitting), ids, mask)
    another_press = kvpress.get_press(f"lukv(knorm:0.5):curve='{file}'")
    with pytest.raises(ValueError, match="was measured for the scores of 'snapkv:window_size=4', not of 'knorm'"):
        prefill(model, another_press, ids, mask)


@pytest.mark.parametrize(
    ("spec", "message"),
    [("knorm:0.5", "press must be 'knorm', without ratio or budget"), ("knorm:budget=9", "got 'knorm:budget=9'"),
     ("adakv(knorm)", "would both choose the pairs to keep"), ("kivi:bits=4", "needs a press that scores pairs"),
     ("h2o", "must score all pairs at the end of a prompt"),
     ("decoding(knorm)", "must score all pairs at the end of a prompt")],
)  # fmt: skip
def test_presses_without_a_score_for_all_pairs_are_refused(spec: str, message: str, tmp_path: Path) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        calibrate(tiny_model("llama"), tokens(2, LENGTH), LUKVSettings(spec), tmp_path / "curve.safetensors")
    with pytest.raises(ValueError, match="T >= 6"):
        calibrate(tiny_model("llama"), tokens(2, 5), LUKVSettings(), tmp_path / "curve.safetensors")
    assert not list(tmp_path.iterdir())


def test_the_reference_model_has_a_curve_for_the_default_press() -> None:
    model, _ = kvpress.load_model("reference")
    ids: Tensor = tokens(1, 200)
    cache = prefill(model, kvpress.LUKVPress(compression_ratio=0.5), ids)
    curve = calibration.read(calibration.shipped("lukv")).tensors
    for layer, rows in enumerate(kvpress.kept_positions(cache)):
        for head, positions in enumerate(rows[0]):
            assert len(positions) == pytest.approx(200 * (1 - float(curve[f"{layer}.curve"][49, head])), abs=1)
    with pytest.raises(
        ValueError, match=r"was measured for the scores of 'expected_attention:epsilon=0.02', not of 'knorm'"
    ):
        prefill(model, kvpress.LUKVPress(kvpress.KnormPress(0.5)), ids)


def test_the_command_writes_a_curve(tmp_path: Path) -> None:
    out = tmp_path / "curve.safetensors"
    arguments = ["calibrate", "lukv", "--model", "reference", "--data", str(DATA), "--out", str(out)]
    result = CliRunner().invoke(app, [*arguments, "--press", "keydiff", "--tokens", "64", "--sequences", "2"])
    assert result.exit_code == 0, result.output
    model, _ = kvpress.load_model("reference")
    report = kvpress.memory_report(
        prefill(model, kvpress.LUKVPress(kvpress.KeyDiffPress(0.5), curve=out), tokens(1, 60))
    )
    assert report.kept / report.seen == pytest.approx(0.5, abs=0.05)
