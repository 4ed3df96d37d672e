# SPDX-License-Identifier: Apache-2.0
"""Models that read images, under presses for any token and under `vision(x)`, which evicts from images only."""

from __future__ import annotations

import contextlib
import copy
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.hf.models import parameters_of_config, with_cache
from kvpress.plan import Geometry, plan
from kvpress.testing.oracle import Oracle, weights_of
from tests.caches import positions
from tests.models import fingerprint, padded_batch, tiny_model
from tests.vision.models import IMAGE, KINDS, SIZE, image_batch, tiny_vlm

ROWS = [(5, 12), (4, 8)]
STEPS = 4


def read(model: Any, spec: str, inputs: dict[str, Any]) -> DynamicCache:
    """Read a prompt under a press."""
    cache = DynamicCache(config=model.config)
    with kvpress.get_press(spec)(model), torch.no_grad():
        model(**inputs, **with_cache(cache))
    return cache


def next_position(model: Any, mask: Tensor) -> Tensor:
    """Return the newest position, `[B, 1]`, or `[3, B, 1]` where an image has fewer positions than tokens."""
    at, deltas = (mask.sum(dim=1) - 1)[:, None], getattr(model.model, "rope_deltas", None)
    return at if deltas is None else (at + deltas).expand(3, -1, -1)


def decode_both(model: Any, spec: str, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, DynamicCache]:
    """Return logits of further tokens on the compressed cache and on a full one with the evicted pairs masked."""
    stock, cache = (DynamicCache(config=model.config) for _ in range(2))
    follow = torch.randint(3, IMAGE, (len(inputs["input_ids"]), STEPS), generator=torch.Generator().manual_seed(5))
    mask, length = inputs["attention_mask"], inputs["input_ids"].shape[1]
    grown = [torch.cat([mask, mask.new_ones(len(mask), step + 1)], dim=1) for step in range(STEPS)]
    outputs, expected = [], []
    with torch.no_grad():
        with kvpress.get_press(spec)(model):
            model(**inputs, **with_cache(cache))
            kept, weights = kvpress.kept_positions(cache), weights_of(cache, length)
            for step in range(STEPS):
                new, at = follow[:, step : step + 1], next_position(model, grown[step])
                outputs.append(
                    model(input_ids=new, attention_mask=grown[step], position_ids=at, past_key_values=cache).logits
                )
        model(**inputs, past_key_values=stock)
        oracle = Oracle(model, kept, length, weights)
        for step in range(STEPS):
            at = next_position(model, grown[step])
            expected.append(oracle.logits(follow[:, step : step + 1], stock, grown[step], at))
    return torch.cat(outputs, dim=1), torch.cat(expected, dim=1), cache


@pytest.mark.parametrize("kind", KINDS)
def test_a_press_that_takes_nothing_changes_nothing(kind: str) -> None:
    model, inputs = tiny_vlm(kind), image_batch(kind, ROWS)
    plain = model.generate(**inputs, max_new_tokens=STEPS, do_sample=False)
    before = fingerprint(model)
    with kvpress.get_press("snapkv:0.0,window_size=4 + kivi:bits=4,residual_length=64")(model):
        assert torch.equal(model.generate(**inputs, max_new_tokens=STEPS, do_sample=False), plain)
    assert fingerprint(model) == before


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "vision(adakv(expected_attention:0.5))"])
def test_decoding_equals_the_mask_oracle(kind: str, spec: str) -> None:
    logits, expected, cache = decode_both(tiny_vlm(kind), spec, image_batch(kind, ROWS))
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)
    report = kvpress.memory_report(cache)
    assert report.kept < report.seen


def images(inputs: dict[str, Any], row: int) -> set[int]:
    """Return the columns of a row's image or video tokens."""
    return set((inputs["input_ids"][row] >= IMAGE).nonzero().flatten().tolist())


@pytest.mark.parametrize(("kind", "video"), [("llava", False), ("qwen2_5_vl", True), ("qwen3_vl", True)])
def test_images_keep_the_requested_share_and_text_stays_whole(kind: str, video: bool) -> None:
    model, inputs = tiny_vlm(kind), image_batch(kind, ROWS, video=video)
    cache = read(model, "vision(keydiff:0.75)", inputs)
    for layer in positions(cache):
        for row, heads in enumerate(layer):
            seen = images(inputs, row)
            text = set(inputs["attention_mask"][row].nonzero().flatten().tolist()) - seen
            for head in heads:
                assert text <= set(head)
                assert len(set(head) & seen) == len(seen) // 4
    spans = "4:8 9:13" if kind == "qwen3_vl" else f"4:{4 + len(images(inputs, 1))}"
    ranges = read(model, f"vision(keydiff:0.75):tokens={spans}", row_of(inputs, 1, kind))
    pads = int((1 - inputs["attention_mask"][1]).sum())
    for layer, ranged in zip(positions(cache), positions(ranges), strict=True):
        assert [[at - pads for at in head] for head in layer[1]] == ranged[0]


def row_of(inputs: dict[str, Any], row: int, kind: str) -> dict[str, Any]:
    """Return one row of a batch, without its padding."""
    real = inputs["attention_mask"][row].bool()
    cut = {}
    for name, value in inputs.items():
        if "grid" in name or (name.startswith("pixel") and not kind.startswith("qwen")):
            cut[name] = value[row : row + 1]
        elif name.startswith("pixel"):
            cut[name] = value.chunk(len(inputs["input_ids"]))[row]
        else:
            cut[name] = value[row : row + 1][:, real]
    return cut


def test_the_image_of_a_later_turn_is_cut_when_it_has_been_read() -> None:
    model, first, second = tiny_vlm("llava"), image_batch("llava", ROWS), image_batch("llava", [(3, 4), (3, 4)], seed=7)
    cache, length = DynamicCache(config=model.config), first["input_ids"].shape[1]
    with kvpress.get_press("vision(knorm:0.5)")(model), torch.no_grad():
        model(**first, past_key_values=cache)
        before = copy.deepcopy(positions(cache))
        second["attention_mask"] = torch.cat([first["attention_mask"], second["attention_mask"]], dim=1)
        model(**second, past_key_values=cache)
    new = {length + at for at in images(second, 0)}
    for layer, earlier in zip(positions(cache), before, strict=True):
        for heads, old in zip(layer, earlier, strict=True):
            for head, kept in zip(heads, old, strict=True):
                assert {at for at in head if at < length} == set(kept)
                assert len(new & set(head)) == SIZE["llava"] // 2


@pytest.mark.parametrize(("spec", "error"), [("none", 1e-4), ("kivi:bits=8,residual_length=8,group_size=16", 0.05)])
def test_an_image_of_a_later_turn_is_read_as_the_model_does(spec: str, error: float) -> None:
    """Gemma 3 builds window masks differently where there are images; the first turn is longer than a window."""
    model, inputs = tiny_vlm("gemma3"), image_batch("gemma3", ROWS)
    first = torch.randint(3, IMAGE, (2, 70), generator=torch.Generator().manual_seed(0))
    real = torch.ones_like(first)
    later = {**inputs, "attention_mask": torch.cat([real, inputs["attention_mask"]], dim=1)}
    logits = []
    for press in (None, kvpress.get_press(spec)):
        cache = DynamicCache(config=model.config)
        with contextlib.nullcontext() if press is None else press(model):
            model(input_ids=first, attention_mask=real, past_key_values=cache)
            logits.append(model(**later, past_key_values=cache).logits[inputs["attention_mask"].bool()])
    torch.testing.assert_close(logits[1], logits[0], atol=error, rtol=0)


def test_a_press_without_an_image_warns() -> None:
    model = tiny_vlm("qwen2_vl")
    ids, mask = padded_batch([20, 12])
    inputs = {"input_ids": ids % IMAGE, "attention_mask": mask}
    with pytest.warns(RuntimeWarning, match="no image or video tokens"):
        cache = read(model, "vision(knorm:0.5)", inputs)
    assert kvpress.memory_report(cache).kept == kvpress.memory_report(cache).seen
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read(model, "vision(knorm:0.5)", image_batch("qwen2_vl", ROWS))


@pytest.mark.parametrize(("kind", "model"), [("both", tiny_model("llama")), ("video", tiny_vlm("llava"))])
def test_models_without_such_tokens_are_refused(kind: str, model: Any) -> None:
    with pytest.raises(ValueError, match="names none"), kvpress.get_press(f"vision(knorm:0.5):kind={kind}")(model):
        pass


def test_unsupported_inputs_are_refused_with_the_reason() -> None:
    model, inputs = tiny_vlm("llava"), image_batch("llava", ROWS)
    with (
        kvpress.get_press("bounded(knorm:0.5):chunk=8")(model),
        pytest.raises(NotImplementedError, match=r"images .* in one pass"),
    ):
        model.generate(**inputs, max_new_tokens=2)
    embedded = model.get_input_embeddings()(inputs["input_ids"])
    with (
        kvpress.get_press("vision(knorm:0.5)")(model),
        pytest.raises(NotImplementedError, match="pass input_ids"),
    ):
        model(inputs_embeds=embedded, attention_mask=inputs["attention_mask"])


@pytest.mark.parametrize("kind", KINDS)
def test_the_plan_covers_the_language_part_s_cache_and_all_weights(kind: str) -> None:
    model, inputs = tiny_vlm(kind), image_batch(kind, ROWS)
    rows, context = inputs["input_ids"].shape
    planned = plan(kvpress.get_press("none"), Geometry.of(model.config), context, rows)
    cache = read(model, "none", {**inputs, "attention_mask": torch.ones(rows, context, dtype=torch.long)})
    if kind != "gemma3":  # its sliding layers hold a whole prompt until a token follows
        assert planned.total_bytes == kvpress.memory_report(cache).total_bytes
    assert parameters_of_config(model.config) == sum(parameter.numel() for parameter in model.parameters())
