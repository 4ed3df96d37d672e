# SPDX-License-Identifier: Apache-2.0
"""Budget curves: pairs kept by heads, sums, and refused curves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import kvpress
from kvpress.presses.lukv import shares
from tests.models import padded_batch, tiny_model, tokens

LENGTH = 60


def curve(path: Path, layers: int = 3, heads: int = 2) -> str:
    """Write a curve in which later layers and first heads lose more, with the right mean."""
    ratios = np.arange(1, 100)[:, None, None] / 100
    tilt = np.linspace(-1, 1, layers * heads).reshape(layers, heads)
    np.save(path / "curve.npy", (ratios + 0.6 * tilt * ratios * (1 - ratios)).astype(np.float32))
    return str(path / "curve.npy")


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_heads_keep_the_shares_of_the_curve(family: str, tmp_path: Path) -> None:
    file, model = curve(tmp_path), tiny_model(family)
    losses = np.load(file)
    ids, mask = padded_batch([LENGTH, 40])
    with kvpress.LUKVPress(kvpress.KnormPress(), 0.5, curve=file)(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1)
    positions = kvpress.kept_positions(session.cache)
    for row, length in enumerate((LENGTH, 40)):
        first = LENGTH - length
        for layer in range(3):
            counts = [len(head) for head in positions[layer][row]]
            ideal = (1 - losses[49, layer]) * length
            assert all(abs(count - target) < 1 for count, target in zip(counts, ideal, strict=True))
            for head in positions[layer][row]:
                assert head[:4].tolist() == [first, first + 1, first + 2, first + 3]
                assert int(head[-1]) == LENGTH - 1
        ideal = (1 - losses[49]) * length
        assert sum(len(head) for layer in positions for head in layer[row]) == round(float(ideal.sum()))


def test_shares_add_up_and_lie_between_whole_percents(tmp_path: Path) -> None:
    losses = torch.from_numpy(np.load(curve(tmp_path)))[:, 0]
    assert shares(losses, 0.0, 100).tolist() == [100, 100]
    for ratio in (0.015, 0.333, 0.5, 0.995):
        counts = shares(losses, ratio, 1000)
        low, high = int(ratio * 100), int(ratio * 100) + 1
        ends = torch.cat([torch.zeros(1, 2), losses, torch.ones(1, 2)])
        assert bool((counts <= (1 - ends[low]) * 1000 + 1).all())
        assert bool((counts >= (1 - ends[high]) * 1000 - 1).all())


def test_the_minimum_of_some_heads_is_taken_from_the_others() -> None:
    steps = torch.arange(1, 100)[:, None] / 100
    curve = torch.cat([steps**0.1, steps, 2 * steps - steps**0.1], dim=1).clamp(0, 1)
    for ratio in (0.3, 0.5, 0.8):
        free, bounded = shares(curve, ratio, 100), shares(curve, ratio, 100, minimum=20)
        assert int(free[0]) < 20 == int(bounded[0])
        assert int(bounded.min()) == 20
        assert int(bounded.sum()) == max(60, int(free.sum()))
        # Pairs that the first head keeps above its share are taken from the others.
        assert int(bounded[1]) <= int(free[1])
        assert int(bounded[2]) <= int(free[2])
    assert shares(curve, 0.3, 100, minimum=1).tolist() == shares(curve, 0.3, 100).tolist()


def test_the_ratio_reaches_the_inner_press() -> None:
    press = kvpress.LUKVPress(compression_ratio=0.3)
    assert press.press == kvpress.ExpectedAttentionPress(0.3, epsilon=0.02)
    assert (press.sink, press.window) == (4, 1)
    press.compression_ratio = 0.6
    assert press.press.compression_ratio == 0.6  # type: ignore[attr-defined]
    assert kvpress.get_press(kvpress.to_spec(press)) == press


def test_curves_that_are_missing_or_foreign_are_refused(tmp_path: Path) -> None:
    model = tiny_model("llama")
    words = r"needs a budget curve .*; this is LlamaForCausalLM with expected_attention:epsilon=0.02"
    with pytest.raises(ValueError, match=words), kvpress.LUKVPress()(model):
        pass
    with pytest.raises(FileNotFoundError, match="no budget curve"):
        kvpress.LUKVPress(curve=tmp_path / "none.npy")
    foreign = kvpress.LUKVPress(compression_ratio=0.5, curve=curve(tmp_path, layers=4))
    with pytest.raises(ValueError, match="a curve of 4 layers of 2 kv heads"), foreign(model):
        pass
    np.save(tmp_path / "flat.npy", np.zeros((99, 3)))
    with pytest.raises(ValueError, match=r"got shape \[99, 3\]"):
        kvpress.LUKVPress(curve=tmp_path / "flat.npy")
    (tmp_path / "text.npy").write_text("0.5")
    with pytest.raises(ValueError, match=r"no \.npy file"):
        kvpress.LUKVPress(curve=tmp_path / "text.npy")


def test_a_press_around_it_that_chooses_too_is_refused_when_it_is_made(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="AdaKVPress and LUKVPress would both choose"):
        kvpress.AdaKVPress(kvpress.LUKVPress(kvpress.KnormPress(0.5), curve=curve(tmp_path)))


def test_a_ratio_of_all_tokens_while_they_are_generated(tmp_path: Path) -> None:
    model = tiny_model("llama")
    press = kvpress.CompressionRatioDecodingPress(kvpress.KnormPress(), 4, 256, 0.5)
    with press(model) as session:
        model.generate(tokens(2, 40), max_new_tokens=9, do_sample=False)
    assert kvpress.memory_report(session.cache).kept == 3 * 2 * 2 * 24
    press.target_size = 7
    with pytest.raises(ValueError, match="target_size=7"), press(model):
        pass
