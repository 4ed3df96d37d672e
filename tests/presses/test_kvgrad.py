# SPDX-License-Identifier: Apache-2.0
"""KVgrad against autograd through the model's own eager attention over an unchanged cache."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress import KVgradPress
from kvpress.core.recipe import PassHook, Recipe
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.plan import Geometry, plan
from kvpress.presses import kvgrad
from kvpress.presses.criticalkv import output_weight
from kvpress.testing.oracle import decode_both
from tests.caches import prefill
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens
from tests.presses.test_kvzip import assert_kept, best, generate, positions

LENGTH = 40


def keep_output(outputs: dict[int, Tensor], place: int, module: Any, args: Any, output: Any) -> None:
    outputs[place] = output if isinstance(output, Tensor) else output[0]


def scores_of(model: Any, ids: Tensor, chunk: int, n_sink: int) -> Tensor:
    """Return the scores `[B, L, H, T]` by a pass over prompt and chunk in one sequence, whose prompt part is detached."""
    layers, modules = full_layers(model), [layer.self_attn for layer in model.model.layers]
    last = model.model.layers[-1]
    with torch.no_grad():
        cache = model(ids, use_cache=True).past_key_values
    heads, length = cache.layers[layers[0]].keys.shape[1], ids.shape[1]
    scores = torch.zeros(ids.shape[0], len(layers), heads, length)
    for start in range(0, length, chunk):
        lead = ids[:, max(0, start - 8) : start] if start else ids[:, :0]
        block = torch.cat([lead, ids[:, start : start + chunk]], dim=1)
        outputs: dict[int, Tensor] = {}
        hooks = [
            module.register_forward_hook(partial(keep_output, outputs, i)) for i, module in enumerate([*modules, last])
        ]
        with torch.enable_grad():
            result = model(block, past_key_values=copy.deepcopy(cache), output_attentions=True)
            gradients = torch.autograd.grad(outputs[len(modules)].float().square().sum(), [outputs[i] for i in layers])
        for hook in hooks:
            hook.remove()
        seen = torch.zeros(length + block.shape[1], dtype=torch.bool)
        seen[: min(n_sink, start)] = seen[start : start + chunk] = seen[length:] = True
        for depth, (i, gradient) in enumerate(zip(layers, gradients, strict=True)):
            weights = result.attentions[i].detach()
            if not seen.all():  # no model with sinks is read in several chunks
                weights = weights * seen / (weights * seen).sum(dim=-1, keepdim=True)
            weights = weights * gradient.norm(dim=-1)[:, None, :, None]
            values = cache.layers[i].values[:, :, :length]
            groups = weights.shape[1] // heads
            projection = output_weight(modules[i], heads, values).detach().unflatten(1, (heads, groups, -1))
            reach = torch.einsum("bhtd,ohgd->bhgto", values, projection).norm(dim=-1).flatten(1, 2)
            head_scores = (weights[..., :length].amax(dim=2) * reach).unflatten(1, (heads, groups)).amax(dim=2)
            scores[:, depth, :, start : start + chunk] = head_scores[..., start : start + chunk]
    scores[..., :n_sink] = torch.inf
    return scores.detach()


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, nullcontext])
@pytest.mark.parametrize(("chunk", "layerwise"), [(512, False), (512, True), (16, False)])
def test_scores_are_those_of_autograd(chunk: int, layerwise: bool, mode: Any) -> None:
    model, ids = tiny_model("llama", "eager"), tokens(2, LENGTH)
    press = KVgradPress(0.5, layerwise, n_sink=3, chunk_size=chunk, repeat_prompt="")
    with mode(), press(model) as session:
        model(ids, use_cache=True)
    scores = scores_of(model, ids, chunk, 3)
    layers = scores.shape[1]
    masks = (
        [best(scores[:, i : i + 1], LENGTH) for i in range(layers)] if layerwise else [best(scores, LENGTH * layers)]
    )
    assert_kept(session.cache, model, torch.cat(masks, dim=1))
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "phi3", "gemma2", "gpt_oss", "smollm3", "granite"])
def test_families(family: str) -> None:
    """Soft caps, sinks, sliding layers, norms of queries and layers without rotary embedding are differentiated."""
    model, ids = tiny_model(family, "eager"), tokens(1, LENGTH)
    cache = prefill(model, KVgradPress(0.5, n_sink=2, repeat_prompt=""), ids)
    scores = scores_of(model, ids, 512, 2)
    assert_kept(cache, model, best(scores, LENGTH * scores.shape[1]))


def test_the_choice_differs_from_kvzip_and_leaves_the_prompt_exact() -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    ours, other = (prefill(model, kind(0.5, repeat_prompt=""), ids) for kind in (KVgradPress, kvpress.KVzipPress))
    assert positions(ours) != positions(other)
    stock = model(ids, use_cache=True).past_key_values
    for layer, plain in zip(ours.layers, stock.layers, strict=True):
        assert layer.get_seq_length() == LENGTH
        head = kvpress.kept_positions(ours)[ours.layers.index(layer)][0][0].long()
        assert torch.equal(layer.store.dense.keys[: len(head)], plain.keys[0, 0, head])


def test_a_padded_row_equals_that_row_alone() -> None:
    model, lengths = tiny_model("llama"), [40, 26, 13]
    press = KVgradPress(0.5, chunk_size=12, repeat_prompt="")
    ids, mask = padded_batch(lengths)
    with press(model):
        together = generate(model, ids, mask)
    for row, length in enumerate(lengths):
        with press(model):
            alone = generate(model, ids[row : row + 1, -length:])
        assert torch.equal(together.sequences[row, 40:], alone.sequences[0, length:])
        for batch_layer, alone_layer in zip(
            positions(together.past_key_values), positions(alone.past_key_values), strict=True
        ):
            assert [[at - 40 + length for at in head] for head in batch_layer[row]] == alone_layer[0]


def test_mask_oracle() -> None:
    ids, mask = padded_batch([40, 26])
    actual, expected, _ = decode_both(tiny_model("llama"), KVgradPress(0.6, repeat_prompt=""), ids, mask)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


class BothReadings(kvpress.BasePress):
    """Press that reads four tokens behind every prompt with and without autograd, and stores the attention outputs."""

    def __init__(self) -> None:
        self.outputs: list[list[Tensor]] = []

    def recipe(self, model: Any = None) -> Recipe:
        return Recipe(hooks=(PassHook(self.read, ("prefill",), reads=True, first=True),))

    def read(self, done: Pass) -> None:
        for read in (done.read, done.read_differentiably):
            calls: list[LayerCall] = []
            seen = [call.store.seen for call in done.calls]
            read(tokens(2, 4, seed=9), calls.append)
            assert [call.store.seen for call in done.calls] == seen
            self.outputs.append([call.output[0].detach() for call in calls])


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize(
    "spec", ["adakv(knorm:0.5)", "adakv(knorm:0.5) + kivi:bits=4,residual_length=8", "sample(knorm:0.5)"]
)
def test_a_pass_under_autograd_reads_sealed_pairs(spec: str, family: str) -> None:
    """Heads of different lengths, codes, log-weights and padded rows give the output that they give without autograd."""
    model, (ids, mask) = tiny_model(family, "eager"), padded_batch([40, 33])
    inner, readings = kvpress.get_press(spec), BothReadings()
    both = grow(mask, 6)
    with torch.inference_mode(), (inner + readings)(model) as session:
        model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True)
        model(
            tokens(2, 6, seed=5),
            attention_mask=both,
            position_ids=position_ids(both)[:, -6:],
            past_key_values=session.cache,
        )
    assert len(readings.outputs) == 4
    for plain, graph in (readings.outputs[:2], readings.outputs[2:]):
        for expected, actual in zip(plain, graph, strict=True):
            torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-3)


def test_later_turns_share_the_budget() -> None:
    model, (first, mask) = tiny_model("llama"), padded_batch([24, 17])
    both, press = grow(mask, 16), KVgradPress(0.3, repeat_prompt="")
    with torch.no_grad(), press(model) as session:
        model(first, attention_mask=mask, position_ids=position_ids(mask), use_cache=True)
        before = positions(session.cache)
        later = {"attention_mask": both, "position_ids": position_ids(both)[:, -16:]}
        model(tokens(2, 16, seed=5), past_key_values=session.cache, **later)
    for row, length in enumerate([24, 17]):
        kept = [set(head) for layer in positions(session.cache) for head in layer[row]]
        assert sum(map(len, kept)) == 6 * int((length + 16) * 0.7)
        survivors = [set(head) for layer in before for head in layer[row]]
        assert all({at for at in new if at < 24} <= old for new, old in zip(kept, survivors, strict=True))


def test_configuration() -> None:
    press = KVgradPress(0.5, True, 3, 64)
    assert (press.compression_ratio, press.layerwise, press.n_sink, press.chunk_size) == (0.5, True, 3, 64)
    assert KVgradPress().chunk_size == 512
    assert not press.kvzip_plus_normalization
    with pytest.raises(TypeError, match="kvzip_plus_normalization"):
        KVgradPress(0.5, kvzip_plus_normalization=True)
    with pytest.raises(ValueError, match="chunk_size must be >= 1, got 0"):
        KVgradPress(0.5, chunk_size=0)


@pytest.mark.parametrize("family", ["qwen3_next", "gemma4_text"])
@pytest.mark.parametrize("spec", ["kvgrad:0.5,repeat_prompt=", "frontier:smaller=4,passes=3"])
def test_models_without_gradients_are_refused_before_anything_is_read(spec: str, family: str) -> None:
    model, press = tiny_model(family), kvpress.get_press(spec)
    with pytest.raises(NotImplementedError, match=f"{type(model).__name__} .* no gradient .* frontier with passes=2"):
        press(model).__enter__()
    with kvpress.get_press(spec.replace("kvgrad", "kvzip").replace("passes=3", "passes=2"))(model):
        model.generate(tokens(1, 60), max_new_tokens=1, do_sample=False)
    if family == "qwen3_next":  # a configuration does not have which modules share pairs
        with pytest.raises(NotImplementedError, match="no gradient"):
            plan(spec, Geometry.of(model.config), 100)


def steep_model() -> Any:
    """A model whose last hidden states are large, so that their squares have gradients above the range of float16."""
    model = copy.deepcopy(tiny_model("llama"))
    with torch.no_grad():
        model.model.layers[-1].mlp.down_proj.weight *= 10
    return model


@pytest.mark.parametrize("spec", ["kvgrad:0.5,repeat_prompt=", "frontier:smaller=4,passes=3"])
def test_gradients_that_overflow_are_refused(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = steep_model().half()
    assert model(tokens(1, 60)).logits.isfinite().all()
    monkeypatch.setattr(kvgrad, "_scale", lambda hidden: hidden.new_ones(()))
    with (
        pytest.raises(FloatingPointError, match=r"overflow in torch\.float16, .* in bfloat16"),
        kvpress.get_press(spec)(model),
    ):
        model.generate(tokens(1, 60), max_new_tokens=1, do_sample=False)


def test_gradients_stay_in_the_range_of_float16() -> None:
    """They are scaled before they are rounded, so that a float16 model keeps nearly the pairs of its float32 twin."""
    press = kvpress.get_press("kvgrad:0.6,repeat_prompt=")
    exact, half = (
        [set(map(int, head)) for layer in kvpress.kept_positions(cache) for row in layer for head in row]
        for cache in (prefill(model, press, tokens(2, 90)) for model in (steep_model(), steep_model().half()))
    )
    assert sum(len(ours & others) for ours, others in zip(exact, half, strict=True)) > 0.97 * sum(map(len, exact))


@pytest.mark.parametrize("largest", [0.0, 1e-30, 0.7, 1.0, 3e4])
def test_the_scale_of_gradients_is_a_power_of_two(largest: float) -> None:
    scale = float(kvgrad._scale(torch.tensor([[-largest, largest / 2]])))
    assert torch.frexp(torch.tensor(scale))[0] == 0.5
    assert not largest or 0.5 <= largest * scale <= 1
