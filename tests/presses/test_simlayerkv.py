# SPDX-License-Identifier: Apache-2.0
"""Lazy layers, found again from the model's own attention weights."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress import SimLayerKVPress
from tests.caches import generate, positions, prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.presses.test_scores import FAMILIES, weights

LENGTH, SINKS, WINDOW = 48, 3, 10
CUT = [*range(SINKS), *range(LENGTH - WINDOW, LENGTH)]


def press(threshold: float, n_last: int = 1) -> SimLayerKVPress:
    return SimLayerKVPress(threshold, n_last, n_recent=WINDOW, n_initial=SINKS)


def paid(model: Any, ids: torch.Tensor, n_last: int) -> torch.Tensor:
    """Mean attention of the last queries on sinks and window, `[L, B]`, of layers that grow."""
    weights_by_layer = [weights(model, ids)[layer].double()[:, :, -n_last:] for layer in full_layers(model)]
    return torch.stack([layer[..., CUT].sum(dim=-1).mean(dim=(1, 2)) for layer in weights_by_layer])


@pytest.mark.parametrize("n_last", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_layers_are_lazy_row_by_row(family: str, n_last: int) -> None:
    model, ids = tiny_model(family, "eager"), tokens(3, LENGTH)
    expected = paid(model, ids, n_last)
    threshold = float(expected.median()) - 1e-4
    kept = positions(prefill(model, press(threshold, n_last), ids))
    lazy = expected > threshold
    assert lazy.any()
    assert not lazy.all()
    assert (lazy.any(dim=1) & ~lazy.all(dim=1)).any(), "in some layer, rows of the batch differ"
    for layer, rows in zip(full_layers(model), lazy.tolist(), strict=True):
        for row, cut in enumerate(rows):
            assert kept[layer][row] == [CUT if cut else list(range(LENGTH))] * 2


def test_a_threshold_between_two_rows_cuts_one_of_them() -> None:
    model, ids = tiny_model("llama", "eager"), tokens(2, LENGTH)
    low, high = paid(model, ids, 1)[0].sort().values.tolist()
    for threshold, lazy in ((low - 1e-4, 2), ((low + high) / 2, 1), (high + 1e-4, 0)):
        first = positions(prefill(model, press(threshold), ids))[0]
        assert sum(row == [CUT, CUT] for row in first) == lazy


@pytest.mark.parametrize(
    "behind",
    ["knorm:0.5", "decoding(knorm):compression_interval=4,target_size=20"],
    ids=["ratio of the pairs left", "interval"],
)
def test_a_press_behind_it_treats_rows_as_if_they_were_alone(behind: str) -> None:
    """Rows of equal length, of which one is cut: it decides how many pairs a ratio applies to, and when an interval begins."""
    model, ids = tiny_model("llama", "eager"), tokens(2, LENGTH)
    low, high = paid(model, ids, 1)[0].sort().values.tolist()
    both = press((low + high) / 2) + kvpress.get_press(behind)

    def kept(rows: slice) -> list[Any]:
        cache, new = DynamicCache(), tokens(2, 13, seed=3)[rows]
        with both(model):
            for part in (ids[rows], *new[:, :3].split(1, dim=1), new[:, 3:9], *new[:, 9:].split(1, dim=1)):
                model(part, past_key_values=cache)
                steps.append(positions(cache))
        return [layer for step in steps for layer in step]

    steps: list[Any] = []
    together = kept(slice(None))
    for row in range(2):
        steps = []
        assert [layer[row] for layer in together] == [layer[0] for layer in kept(slice(row, row + 1))]


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_a_threshold_of_one_is_no_press(family: str) -> None:
    model = tiny_model(family, "eager")
    for ids, mask in ((tokens(2, LENGTH), None), padded_batch([LENGTH, 20, 9])):
        expected = generate(model, ids, mask)
        with press(1.0)(model):
            output = generate(model, ids, mask)
        assert torch.equal(output.sequences, expected.sequences)
        report = kvpress.memory_report(output.past_key_values)
        assert report.kept == report.seen


def test_a_threshold_of_zero_cuts_every_layer_and_later_turns_again() -> None:
    model, cache = tiny_model("llama"), DynamicCache(config=tiny_model("llama").config)
    for turn, seen in ((tokens(2, LENGTH), LENGTH), (tokens(2, 20, seed=1), LENGTH + 20)):
        with press(0.0)(model):
            model(turn, past_key_values=cache)
        window = [*range(SINKS), *range(seen - WINDOW, seen)]
        assert positions(cache) == [[[window] * 2] * 2] * 3
    assert press(0.0).recipe().kept(LENGTH) == LENGTH  # the plan is for the worst case


def test_prompts_that_fit_into_the_window_stay_whole() -> None:
    kept = positions(prefill(tiny_model("llama"), press(0.0), *padded_batch([20, SINKS + WINDOW, 5])))
    assert [[len(head) for head in row] for row in kept[0]] == [[13, 13], [13, 13], [5, 5]]


@pytest.mark.parametrize("before", ["knorm:0.3", "adakv(knorm:0.3)"])
def test_pairs_left_by_an_earlier_press_are_cut(before: str) -> None:
    """A head-wise press leaves heads of different lengths; they are lazy together."""
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    uncut = positions(prefill(model, kvpress.get_press(before), ids))
    cut_again = positions(prefill(model, kvpress.get_press(before) + press(0.4), ids))
    cuts = []
    for layer, layers in zip(uncut, cut_again, strict=True):
        for heads, kept in zip(layer, layers, strict=True):
            cut = [[t for t in head if t in CUT] for head in heads]
            assert kept in (cut, heads)
            cuts.append(kept == cut)
    assert len(set(cuts)) == 2


def test_before_a_codec_and_a_selector() -> None:
    model, ids = tiny_model("llama"), tokens(2, LENGTH)
    alone = positions(prefill(model, press(0.4), ids))
    for spec in ("kivi:bits=4,group_size=4,residual_length=4", "kivi:bits=4,residual_length=32",
                 "quest:budget=16,page_size=4,skip_layers=0"):  # fmt: skip
        with (press(0.4) + kvpress.get_press(spec))(model):
            out = generate(model, ids)
        kept = positions(out.past_key_values)
        assert [[[head[:-7] for head in row] for row in layer] for layer in kept] == alone


@pytest.mark.parametrize("wrapper", ["adakv", "criticalkv", "chunkkv", "block", "decoding", "key_rerotation"])
def test_it_cannot_be_wrapped(wrapper: str) -> None:
    with pytest.raises(TypeError, match="needs a press that scores pairs, such as SnapKVPress, got SimLayerKVPress"):
        kvpress.get_press(f"{wrapper}(simlayerkv:0.9)")


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"lazy_threshold": 1.1}, r"lazy_threshold must be in \[0, 1\], got 1.1"), ({"lazy_threshold": -0.1}, "got -0.1"),
     ({"n_last": 0}, "n_last must be >= 1"), ({"n_recent": 0}, "n_recent must be >= 1"),
     ({"n_initial": -1}, "n_initial must be >= 0")],
)  # fmt: skip
def test_bad_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SimLayerKVPress(**settings)
