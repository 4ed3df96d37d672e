# SPDX-License-Identifier: Apache-2.0
"""Whole passes: presses are notified after them, and tokens are read behind a cache without a change of it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import PassHook, Recipe
from kvpress.hf.session.session import session
from kvpress.observe.call import Phase
from kvpress.observe.passes import TOKENS, Pass
from kvpress.testing.oracle import Oracle
from tests.kernels.compiler import needs_compiler
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens
from tests.tape import TapeRecorder

HYBRID = ["gemma3_text", "gpt_oss", "qwen3_next"]
FAMILIES = ["llama", "qwen3", "phi3", *HYBRID]


def model_of(family: str) -> Any:
    return tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")


@dataclass
class Recording(kvpress.BasePress):
    """Records its notifications, and may act on them."""

    act: Any = None
    passes: list[Any] = field(default_factory=list)

    phases: ClassVar[tuple[Phase, ...]] = ("prefill", "decode")

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(hooks=(PassHook(self._record, self.phases),))

    def _record(self, done: Pass) -> None:
        self.passes.append((done.phase, None if done.ids is None else done.ids.clone(), done.seen, len(done.calls)))
        if self.act is not None:
            self.act(done)


@dataclass
class RecordingPrompts(Recording):
    phases: ClassVar[tuple[Phase, ...]] = ("prefill",)


def forward(model: Any, ids: Tensor, cache: Any, mask: Tensor | None = None) -> Any:
    at = position_ids(mask, ids.shape[1])
    return model(ids, attention_mask=mask, position_ids=at, past_key_values=cache)


def state(cache: Any) -> list[Tensor]:
    """Return all state of a cache that depends on its tokens."""
    tensors = []
    for layer in cache.layers:
        if hasattr(layer, "store"):
            store = layer.store
            tensors += [
                store.window.filled_keys,
                store.window.filled_values,
                torch.tensor([store.seen, store.window.length]),
            ]
            tensors += [tensor for segment in store.sealed for group in segment.storage().values() for tensor in group]
            tensors += [store.window.side[name] for name in sorted(store.window.side)]
        else:
            values = [
                v for value in vars(layer).values() for v in (value.values() if isinstance(value, dict) else [value])
            ]
            tensors += [
                v if isinstance(v, Tensor) else torch.tensor(float(v)) for v in values if isinstance(v, (Tensor, int))
            ]
    return [tensor.clone() for tensor in tensors]


def same(first: list[Tensor], second: list[Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


# -- notifications ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 7])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_press_is_notified_once_after_a_prompt_and_after_every_token(family: str, chunk: int | None) -> None:
    model, press = model_of(family), Recording()
    ids = tokens(2, 20)
    with press(model):
        output = model.generate(ids, max_new_tokens=4, do_sample=False, prefill_chunk_size=chunk)
    layers = 3 if family == "llama" else 2
    assert [(phase, seen, calls) for phase, _, seen, calls in press.passes] == [
        ("prefill", 20, layers), ("decode", 21, layers), ("decode", 22, layers), ("decode", 23, layers),
    ]  # fmt: skip
    assert torch.equal(press.passes[0][1], ids)
    for n, (_, newest, _, _) in enumerate(press.passes[1:], start=1):
        assert torch.equal(newest, output[:, 20 : 20 + n])


def test_ids_of_a_later_turn_reach_back_to_the_prompt_before() -> None:
    model, press = tiny_model("llama"), RecordingPrompts()
    cache = DynamicCache(config=model.config)
    with press(model):
        sequence = model.generate(tokens(2, 12), past_key_values=cache, max_new_tokens=3, do_sample=False)
        sequence = torch.cat([sequence, tokens(2, 5, seed=1)], dim=1)
        model.generate(sequence, past_key_values=cache, max_new_tokens=2, do_sample=False)
    assert [phase for phase, *_ in press.passes] == ["prefill", "prefill"]
    assert torch.equal(press.passes[1][1], sequence[:, 12:])


def test_tokens_read_elsewhere_count_as_unknown() -> None:
    model, press = tiny_model("llama"), RecordingPrompts()
    cache = DynamicCache(config=model.config)
    new = tokens(2, 5, seed=3)
    with press(model):
        model(tokens(2, 12), past_key_values=cache)
    with kvpress.reading(model):
        model(tokens(2, 4, seed=1), past_key_values=cache)
    with press(model):
        model(inputs_embeds=model.get_input_embeddings()(new), past_key_values=cache)
        model(new, past_key_values=cache)
    assert press.passes[1][1] is None
    assert torch.equal(press.passes[2][1], new)


def test_ids_follow_the_rows_of_a_beam_search() -> None:
    model, press = tiny_model("llama"), Recording()
    with press(model):
        output = model.generate(tokens(2, 9), max_new_tokens=6, num_beams=3, do_sample=False, num_return_sequences=3)
    generated = {tuple(row[9:-1].tolist()) for row in output}
    assert generated <= {tuple(row.tolist()) for row in press.passes[-1][1]}


def test_composed_presses_are_notified_in_their_phases() -> None:
    model = tiny_model("llama")
    always, prompts, inside = Recording(), RecordingPrompts(), RecordingPrompts()
    press = always + prompts + kvpress.PrefillDecodingPress(inside)
    with press(model):
        model.generate(tokens(1, 9), max_new_tokens=3, do_sample=False)
    assert [phase for phase, *_ in always.passes] == ["prefill", "decode", "decode"]
    assert [phase for phase, *_ in prompts.passes] == [phase for phase, *_ in inside.passes] == ["prefill"]


def test_reading_tells_nothing_of_prompts() -> None:
    model, press = tiny_model("llama"), Recording()
    with kvpress.reading(model, press):
        model.generate(tokens(1, 9), max_new_tokens=2, do_sample=False)
    assert [phase for phase, *_ in press.passes] == ["decode"]


def test_a_press_that_does_not_follow_leaves_no_trace() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    hooks = len(model.model._forward_hooks)
    with press(model) as session:
        assert len(model.model._forward_hooks) == hooks
        model.generate(tokens(1, 9), max_new_tokens=2, do_sample=False)
    assert all(TOKENS not in layer.store.observers for layer in session.cache.layers)


def test_calls_of_a_pass_hold_no_tensors_of_its_tokens() -> None:
    model = tiny_model("llama")
    sizes: list[int] = []

    def measure(done: Pass) -> None:
        for call in done.calls:
            tensors = [call.queries, call.hidden_states, call.lse, call.attentions, *call.kwargs.values()]
            sizes.extend(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, Tensor))
            cos, _ = call.angles(torch.tensor([[3]]))
            assert torch.isfinite(cos).all()

    with Recording(measure)(model):
        model(tokens(2, 200))
    assert sizes
    assert max(sizes) <= 64


def test_codecs_encode_after_the_whole_pass() -> None:
    model = tiny_model("llama")
    sealed: list[int] = []
    press = RecordingPrompts(lambda done: sealed.extend(len(call.store.sealed) for call in done.calls))
    with kvpress.ComposedPress([press, kvpress.KIVIPress(4, group_size=4, residual_length=4)])(model) as session:
        model(tokens(1, 40))
    assert sealed == [0, 0, 0]
    assert all(layer.store.segments for layer in session.cache.layers)


# -- reading behind a cache ----------------------------------------------------------------------------------


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reading_behind_a_cache_equals_reading_on(family: str, padded: bool) -> None:
    model = model_of(family)
    ids, mask = padded_batch([30, 19]) if padded else (tokens(2, 30), None)
    new = tokens(2, 6, seed=4)
    seen: dict[int, Tensor] = {}
    states: list[list[Tensor]] = []

    def act(done: Pass) -> None:
        states.append(state(done.cache))
        done.read(new, lambda call: seen.setdefault(call.layer.index, call.queries.clone()))
        states.append(state(done.cache))

    cache = DynamicCache(config=model.config)
    with RecordingPrompts(act)(model):
        forward(model, ids, cache, mask)
        grown = grow(mask, 2)
        after = forward(model, tokens(2, 2, seed=9), cache, grown).logits
    assert same(*states[:2])
    assert same(*states[2:])
    assert len(seen) == sum(hasattr(layer, "store") for layer in cache.layers)

    expected: dict[int, Tensor] = {}
    plain = DynamicCache(config=model.config)
    with RecordingPrompts()(model) as session:
        forward(model, ids, plain, mask)
        session.observe = lambda call: expected.__setitem__(call.layer.index, call.queries.clone())
        grown = grow(mask, 6)
        forward(model, new, copy.deepcopy(plain), grown)
        session.observe = lambda call: None
        grown = grow(mask, 2)
        assert torch.equal(after, forward(model, tokens(2, 2, seed=9), plain, grown).logits)
    for layer, queries in expected.items():
        torch.testing.assert_close(seen[layer], queries, atol=1e-5, rtol=1e-5)


def test_padding_on_the_right_changes_nothing_before_it() -> None:
    model, new = tiny_model("llama"), tokens(2, 6, seed=4)
    seen: list[Tensor] = []

    def act(done: Pass) -> None:
        for fill in (0, 50):
            ids = new.clone()
            ids[1, 4:] = fill
            done.read(ids, lambda call: seen.append(call.queries[1, :, :4].clone()))

    with RecordingPrompts(act)(model):
        model(tokens(2, 20))
    assert same(seen[:3], seen[3:])


def test_reading_behind_a_compressed_cache_neither_observes_nor_encodes() -> None:
    model = tiny_model("llama")
    inner = kvpress.get_press("h2o:0.5,interval=1000 + kivi:bits=4,group_size=4,residual_length=4")
    states: list[list[Tensor]] = []

    def act(done: Pass) -> None:
        states.append(state(done.cache))
        done.read(tokens(2, 30, seed=4))
        states.append(state(done.cache))

    with kvpress.ComposedPress([inner, Recording(act)])(model):
        model.generate(tokens(2, 40), max_new_tokens=3, do_sample=False)
    assert len(states) == 6
    assert all(same(before, after) for before, after in zip(states[::2], states[1::2], strict=True))


def test_an_error_while_reading_leaves_the_cache_as_it_was() -> None:
    model = tiny_model("llama")
    states: list[list[Tensor]] = []

    def stop(call: Any) -> None:
        if call.layer.index == 1:
            raise ValueError("stop")

    def act(done: Pass) -> None:
        states.append(state(done.cache))
        with pytest.raises(ValueError, match="stop"):
            done.read(tokens(2, 5), stop)
        states.append(state(done.cache))

    press = RecordingPrompts(act)
    with press(model) as session:
        model(tokens(2, 20))
        assert session.watch is None
    assert same(*states)


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_reading_once_more_with_everything_visible(padded: bool) -> None:
    """Tokens that were generated over selected pages get the keys and values of full attention."""
    model = tiny_model("llama")
    quest = kvpress.get_press("quest:budget=4,page_size=4,skip_layers=0")
    ids, mask = padded_batch([60, 41]) if padded else (tokens(2, 60), None)
    follow = tokens(2, 5, seed=2)

    def decode(press: Any) -> Any:
        cache, grown = DynamicCache(config=model.config), mask
        with press(model):
            forward(model, ids, cache, grown)
            for step in range(5):
                grown = grow(grown, 1)
                forward(model, follow[:, step : step + 1], cache, grown)
        return cache

    newest = [layer.store.window.filled_values[:, :, -5:] for layer in decode(kvpress.NonePress()).layers]
    sparse = [layer.store.window.filled_values[:, :, -5:] for layer in decode(quest).layers]
    assert not torch.allclose(newest[-1], sparse[-1], atol=1e-3)
    act = Recording(lambda done: done.reread(5) if done.phase == "decode" and done.ids.shape[1] == 5 else None)
    corrected = decode(kvpress.ComposedPress([quest, act]))
    for layer, expected in zip(corrected.layers, newest, strict=True):
        # Tolerance of the mask oracle: a pass of several tokens sums in another order than single tokens.
        torch.testing.assert_close(layer.store.window.filled_values[:, :, -5:], expected, atol=2e-4, rtol=1e-4)
        assert layer.store.seen == 65


def test_only_known_tokens_of_the_window_can_be_read_once_more() -> None:
    model = tiny_model("llama")
    for count in (0, 4):
        press = Recording(lambda done, n=count: done.reread(n) if done.seen == 23 else None)
        with press(model), pytest.raises(ValueError, match="1 to 3 of the newest tokens"):
            model.generate(tokens(1, 20), max_new_tokens=5, do_sample=False)
    press = Recording(lambda done: done.reread(1))
    hybrid = model_of("gemma3_text")
    with press(hybrid), pytest.raises(NotImplementedError, match="cannot take back"):
        hybrid(tokens(1, 20))


def test_a_hidden_pair_stays_hidden_when_read_behind() -> None:
    """Behind an evicted cache, queries see exactly the stored pairs: the output equals the mask oracle's."""
    model = tiny_model("llama")
    ids, new = tokens(2, 40), tokens(2, 6, seed=3)
    lse: list[Tensor] = []
    press = kvpress.ComposedPress(
        [
            kvpress.SnapKVPress(0.5, window_size=4),
            RecordingPrompts(lambda done: done.read(new, lambda c: lse.append(c.lse))),
        ]
    )
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
    model(ids, past_key_values=stock)
    oracle = Oracle(model, kvpress.kept_positions(cache), 40)
    expected = oracle.logits(new, stock, None, None)
    with kvpress.reading(model):
        logits = model(new, past_key_values=cache).logits
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
    assert all(weights.shape == (4, 2 * 6) for weights in lse)
    assert len(lse) == 3


# -- replayed steps ------------------------------------------------------------------------------------------


def test_presses_that_act_on_generated_passes_are_not_replayed() -> None:
    with (
        pytest.raises(ValueError, match=r"Recording acts on whole passes.*capture=False"),
        session(Recording(), tiny_model("llama"), recorder=TapeRecorder()),
    ):
        pass


@needs_compiler
def test_ids_of_replayed_steps_are_remembered() -> None:
    sequences = []
    for recorder in (None, TapeRecorder()):
        model, press = tiny_model("llama"), RecordingPrompts()
        cache = DynamicCache(config=model.config)
        with session(press, model, recorder=recorder) as opened:
            sequence = model.generate(tokens(2, 12), past_key_values=cache, max_new_tokens=6, do_sample=False)
            assert recorder is None or opened.captured is not None
            sequence = torch.cat([sequence, tokens(2, 5, seed=1)], dim=1)
            model.generate(sequence, past_key_values=cache, max_new_tokens=2, do_sample=False)
        assert torch.equal(press.passes[1][1], sequence[:, 12:])
        sequences.append(sequence)
    assert torch.equal(*sequences)
