# SPDX-License-Identifier: Apache-2.0
"""Image tokens that are merged before the first layer: equal to a full reading with the means that hides the others."""

from __future__ import annotations

import itertools
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.caches import positions
from tests.models import fingerprint
from tests.vision.hidden import Hidden
from tests.vision.models import IMAGE, VIDEO, image_batch, tiny_vlm
from tests.vision.test_dropping import STEPS, must_drop, read
from tests.vision.test_grids import cells_by_hand, of_video
from tests.vision.test_reading import row_of

ROWS = [(5, 9), (0, 6)]
GRIDS = [(2, 3, 2), (1, 2, 4)]
KINDS = ["llava", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]


def inputs_of(kind: str) -> tuple[dict[str, Any], list[list[list[int]]]]:
    """A batch of two rows, one of them padded, and the cells of its image tokens."""
    if kind == "llava":
        inputs = image_batch(kind, ROWS)
        return inputs, cells_by_hand(inputs["input_ids"], [(1, 4, 4)] * 2, IMAGE)
    inputs = of_video(kind, ROWS, GRIDS)
    return inputs, cells_by_hand(inputs["input_ids"], GRIDS, VIDEO)


def embedded(model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a model's decoder for a prompt."""
    captured: dict[str, Any] = {}
    handle = model.get_decoder().register_forward_pre_hook(
        lambda _, args, arguments: captured.update(arguments), with_kwargs=True
    )
    with torch.no_grad():
        model(**inputs)
    handle.remove()
    return captured


def squares(cells: list[list[list[int]]], window: int) -> list[tuple[int, list[int]]]:
    """Return row and columns of the tokens of every square, one token at a time."""
    groups: dict[Any, list[int]] = defaultdict(list)
    for row, row_cells in enumerate(cells):
        for at, (picture, frame, down, right) in enumerate(row_cells):
            if picture >= 0:
                groups[row, picture, frame, down // window, right // window].append(at)
    return [(key[0], columns) for key, columns in groups.items()]


def alike(states: Tensor, row: int, columns: list[int]) -> float:
    """Return the mean cosine between different tokens of a square."""
    pairs = list(itertools.permutations(columns, 2))
    cosine = [torch.nn.functional.cosine_similarity(states[row, a], states[row, b], dim=0) for a, b in pairs]
    return float(sum(cosine)) / max(1, len(pairs))


class Merging:
    """Reference of `merge` by plain code, at a threshold that about half of the squares reach."""

    def __init__(self, kind: str, window: int) -> None:
        self.model = tiny_vlm(kind)
        self.inputs, cells = inputs_of(kind)
        states = embedded(self.model, self.inputs)["inputs_embeds"]
        several = [square for square in squares(cells, window) if len(square[1]) > 1]
        similarities = sorted(alike(states, *square) for square in several)
        at = next(
            i
            for i in range(len(similarities) // 2, len(similarities))
            if similarities[i - 1] >= 0 and similarities[i] - similarities[i - 1] > 1e-3
        )
        self.threshold = (similarities[at - 1] + similarities[at]) / 2
        self.merged = [square for square in several if alike(states, *square) > self.threshold]
        self.gone = torch.zeros(states.shape[:2], dtype=torch.bool)
        for row, columns in self.merged:
            self.gone[row, columns] = True
            self.gone[row, columns[len(columns) // 2]] = False

    def means(self, states: Tensor) -> Tensor:
        """Put means in the places of the tokens that stay."""
        states = states.clone()
        for row, columns in self.merged:
            states[row, columns[len(columns) // 2]] = states[row, columns].mean(dim=0)
        return states

    def replace(self, decoder: Any, args: Any, arguments: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Hook before the decoder: replace embeddings of a prompt by means."""
        del decoder
        if arguments["inputs_embeds"].shape[1] != self.gone.shape[1]:
            return args, arguments
        arguments = {**arguments, "inputs_embeds": self.means(arguments["inputs_embeds"])}
        if arguments.get("deepstack_visual_embeds"):
            visual, deep = arguments["visual_pos_masks"], []
            for features in arguments["deepstack_visual_embeds"]:
                spread = torch.zeros(*visual.shape, features.shape[-1])
                spread[visual] = features
                deep.append(self.means(spread)[visual])
            arguments["deepstack_visual_embeds"] = deep
        return args, arguments

    def read(self, decide: Any = None, cut: tuple[int, int] = (0, -1)) -> tuple[Tensor, Tensor, Hidden]:
        """Read a prompt and some tokens behind it with plain attention that hides merged tokens."""
        layers = len(self.model.get_decoder().layers)
        hidden = Hidden(decide, cut)
        hidden.gone = dict.fromkeys(range(layers + 1), self.gone)
        handle = self.model.get_decoder().register_forward_pre_hook(self.replace, with_kwargs=True)
        with hidden.on(self.model):
            prompt, further, _ = read(self.model, self.inputs)
        handle.remove()
        return prompt, further, hidden

    def compare(self, spec: str, expected: tuple[Tensor, Tensor, Hidden]) -> DynamicCache:
        """Compare a press with the full reading, for all tokens that are computed."""
        before = fingerprint(self.model)
        with kvpress.get_press(spec)(self.model):
            prompt, further, cache = read(self.model, self.inputs)
        text = self.inputs["attention_mask"].bool() & ~self.gone & ~expected[2].gone[len(cache.layers) - 1]
        torch.testing.assert_close(prompt[text], expected[0][text], atol=2e-4, rtol=1e-3)
        torch.testing.assert_close(further, expected[1], atol=2e-4, rtol=1e-3)
        assert fingerprint(self.model) == before
        return cache

    def holds(self, cache: DynamicCache, gone: Tensor) -> None:
        """Check that every layer holds the pairs of tokens that stay, and no others; padding may be there or not."""
        real, newest = self.inputs["attention_mask"].bool(), [*range(gone.shape[1], gone.shape[1] + STEPS)]
        for layer in positions(cache):
            for row, heads in enumerate(layer):
                expected = [*(real[row] & ~gone[row]).nonzero().flatten().tolist(), *newest]
                pads = int((~real[row]).sum())
                assert [[at for at in head if at >= pads] for head in heads] == [expected] * len(heads)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("window", [2, 3])
def test_merged_tokens_are_a_full_reading_with_their_mean_in_one_place(kind: str, window: int) -> None:
    merging = Merging(kind, window)
    assert bool(merging.gone.any())
    spec = f"must_drop:merge={merging.threshold},window={window},layers=(1,)"
    cache = merging.compare(spec, merging.read())
    merging.holds(cache, merging.gone)


@pytest.mark.parametrize("kind", KINDS)
def test_later_layers_drop_from_merged_tokens(kind: str) -> None:
    merging = Merging(kind, 2)
    seen = {"llava": IMAGE}.get(kind, VIDEO)
    free, real = merging.inputs["input_ids"] == seen, merging.inputs["attention_mask"].bool()
    decide = must_drop(free, real & ~merging.gone, (0, 2), 1.0, 0.25)

    def after(layer: int, weights: Tensor, gone: Tensor | None) -> Tensor:
        hidden: Tensor = decide(layer, weights, gone) | merging.gone
        return hidden

    expected = merging.read(after, (0, 2))
    last = expected[2].gone[3]
    assert bool((last & ~merging.gone).any())
    spec = f"must_drop:each_below=0.25,layers=(0,2),merge={merging.threshold},window=2"
    merging.holds(merging.compare(spec, expected), last)


def test_every_layer_computes_tokens_that_are_left_alone() -> None:
    merging, lengths = Merging("llava", 2), []
    layers = merging.model.get_decoder().layers
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, mlp_inputs: lengths.append(mlp_inputs[0].shape[1]))
        for layer in layers
    ]
    spec = f"must_drop:merge={merging.threshold},window=2,layers=(1,)"
    with kvpress.get_press(spec)(merging.model), torch.no_grad():
        merging.model(**merging.inputs, use_cache=True)
    for handle in handles:
        handle.remove()
    remaining = (merging.inputs["attention_mask"].bool() & ~merging.gone).sum(dim=1)
    assert lengths == [int(remaining.max())] * len(layers)


@pytest.mark.parametrize("suffix", ["", " + kivi:bits=8,group_size=4,residual_length=4", " + knorm:0.3"])
def test_a_padded_row_generates_as_that_row_alone(suffix: str) -> None:
    merging = Merging("qwen2_vl", 2)
    inputs = image_batch("qwen2_vl", ROWS)
    states = embedded(merging.model, inputs)["inputs_embeds"]
    cells = cells_by_hand(inputs["input_ids"], [(1, 2, 2)] * 2, IMAGE)
    threshold = sum(alike(states, *square) for square in squares(cells, 2)) / 2
    settings = {"max_new_tokens": 5, "do_sample": False, "return_dict_in_generate": True}
    with kvpress.get_press(f"must_drop:merge={max(0.0, threshold)},window=2,layers=(1,)" + suffix)(merging.model):
        together = merging.model.generate(**inputs, **settings)
        for row in range(2):
            alone = merging.model.generate(**row_of(inputs, row, "qwen2_vl"), **settings)
            assert torch.equal(alone.sequences[0, -5:], together.sequences[row, -5:])
    report = kvpress.memory_report(together.past_key_values)
    assert report.kept < report.seen


def test_where_nothing_is_merged_it_is_bit_for_bit_the_plain_reading() -> None:
    model, (inputs, _) = tiny_vlm("qwen3_vl"), inputs_of("qwen3_vl")
    plain = read(model, inputs)[:2]
    for spec in ("must_drop:layers=(1,)", "must_drop:merge=1.0,layers=(1,)"):
        with kvpress.get_press(spec)(model):
            outputs = read(model, inputs)[:2]
        assert torch.equal(outputs[0], plain[0]), spec


def test_later_turns_keep_their_pictures_and_key_tokens_are_not_merged() -> None:
    model, inputs = tiny_vlm("llava"), image_batch("llava", ROWS)
    cache, length = DynamicCache(config=model.config), inputs["input_ids"].shape[1]
    second = image_batch("llava", [(2, 3)] * 2, seed=4)
    second["attention_mask"] = torch.cat([inputs["attention_mask"], second["attention_mask"]], dim=1)
    with kvpress.get_press("protect(must_drop:merge=0.0,window=4,layers=(1,)):tokens=7:9")(model), torch.no_grad():
        model(**inputs, past_key_values=cache)
        model(**second, past_key_values=cache)
    for layer in positions(cache):
        for row, heads in enumerate(layer):
            pads = int((1 - inputs["attention_mask"][row]).sum())
            for head in heads:
                assert {pads + 7, pads + 8, *range(length, length + 21)} <= set(head)
                assert sum(at < length for at in head) < int(inputs["attention_mask"][row].sum())


def test_pictures_without_a_grid_stay_whole_with_a_warning() -> None:
    model, inputs = tiny_vlm("qwen2_vl"), image_batch("qwen2_vl", ROWS)
    arguments = embedded(model, inputs)
    ids = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    warns = pytest.warns(RuntimeWarning, match="layout of some image or video tokens is unknown")
    with kvpress.get_press("must_drop:merge=0.0,layers=(1,)")(model), torch.no_grad(), warns:
        cache = model(**ids, position_ids=arguments["position_ids"]).past_key_values
    report = kvpress.memory_report(cache)
    assert report.kept == report.seen


@pytest.mark.parametrize("kind", ["llava", "qwen3_vl"])
@pytest.mark.parametrize("spec", ["must_drop:each_below=1.0,layers=(0,)", "fastv:0.9,layer=0"])
def test_a_prompt_that_ends_with_a_picture_goes_on_from_its_last_token(kind: str, spec: str) -> None:
    model, inputs = tiny_vlm(kind), image_batch(kind, [(5, 0), (2, 0)])
    with kvpress.get_press(spec)(model), torch.no_grad():
        output = model(**inputs, use_cache=True)
    assert bool(output.logits[:, -1].any(dim=-1).all())
    last = inputs["input_ids"].shape[1] - 1
    assert all(last in head for layer in positions(output.past_key_values) for row in layer for head in row)
