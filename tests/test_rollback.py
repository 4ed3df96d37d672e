# SPDX-License-Identifier: Apache-2.0
"""Tokens that are taken back leave no trace in a cache, with any events in between."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.testing.memory import reachable
from tests.caches import STORAGES
from tests.fuzz import specs
from tests.fuzz.models import model_of
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens
from tests.states import differences, state_of

AGAIN_AND_AGAIN = "snapkv"


def specs_by_name() -> dict[str, str]:
    """Return a spec of every registered method, with settings that make it act within a few tokens.

    Scorers are drawn in a schedule that evicts while tokens are generated, and alone where they evict then.
    """
    drawn_specs: dict[str, str | None] = {"none": "none"}
    for name, method in specs.methods().items():
        rng = specs.seeded(1)
        if method.place == "scorer":
            alone = specs.draw(name, None, None, "ratio", None, None, rng)
            acts = alone is not None and kvpress.press_from_dict(specs.tree_of(alone)).recipe().acting("decode")
            if acts or name == AGAIN_AND_AGAIN:
                drawn_specs[name] = alone
            drawn_specs[f"decoding {name}"] = specs.draw(name, None, None, "decoding", None, None, rng)
        elif method.place == "wrapper":
            drawn_specs[name] = specs.draw(AGAIN_AND_AGAIN, name, None, "ratio", None, None, rng)
        elif method.place in ("codec", "selector"):
            chosen = (name, None) if method.place == "codec" else (None, name)
            drawn_specs[name] = specs.draw(None, None, None, "ratio", *chosen, rng)
            drawn_specs[f"evicted {name}"] = specs.draw("expected_attention", "adakv", None, "ratio", *chosen, rng)
        elif name in specs.schedules():
            drawn_specs[name] = specs.draw(AGAIN_AND_AGAIN, None, None, name, None, None, rng)
    drawn_specs["corrected"] = "tidal_decode:budget=12,skip_layers=0,correction=3"
    drawn_specs["h2o at every token"] = "h2o:0.5"
    drawn_specs["all"] = (
        "adakv(snapkv:0.5,window_size=4) + zipcache:interval=4 + quest:budget=12,page_size=4,skip_layers=0"
    )
    return {name: spec for name, spec in drawn_specs.items() if spec is not None}


SPECS = specs_by_name()
ACTING = [
    *(name for name, method in specs.methods().items() if method.place in ("codec", "selector")),
    "none", "snapkv", "bounded", "cam", "prefill_decoding", "decoding tova", "decoding h2o", "h2o", "corrected", "all",
]  # fmt: skip
"""Methods that act while tokens are generated, by choices that rounding does not change."""


class Conversation:
    """Cache that is read into token by token under a press; copies are independent."""

    def __init__(self, spec: str, family: str = "llama", lengths: tuple[int, ...] = (40, 26)) -> None:
        self.model, self.spec = model_of(family, "float32"), spec
        self.press = kvpress.press_from_dict(specs.tree_of(spec, family))
        self.cache = DynamicCache(config=self.model.config)
        ids, self.mask = padded_batch(list(lengths))
        self.logits = self.read(ids, prompt=True)

    def read(self, ids: Tensor, prompt: bool = False) -> Tensor:
        """Read tokens in one pass; return their logits."""
        with self.press(self.model):
            return self._pass(ids, prompt)

    def steps(self, ids: Tensor) -> Tensor:
        """Read tokens one by one."""
        with self.press(self.model):
            return torch.cat([self._pass(ids[:, i : i + 1]) for i in range(ids.shape[1])], dim=1)

    def _pass(self, ids: Tensor, prompt: bool = False) -> Tensor:
        if not prompt:
            self.mask = grow(self.mask, ids.shape[1])
        at = position_ids(self.mask, ids.shape[1])
        with torch.no_grad():
            return self.model(ids, attention_mask=self.mask, past_key_values=self.cache, position_ids=at).logits

    def copy(self) -> Conversation:
        """Return a conversation that goes on from here."""
        twin = copy.copy(self)
        twin.cache = copy.deepcopy(self.cache)
        return twin

    def take_back(self, count: int) -> None:
        """Take back the newest tokens."""
        self.cache.crop(-count)
        self.mask = self.mask[:, : self.mask.shape[1] - count]


def same(first: Conversation, second: Conversation) -> None:
    unequal = differences(state_of(first.cache), state_of(second.cache))
    assert not unequal, unequal[:5]


def batch(conversation: Conversation, count: int, seed: int) -> Tensor:
    return tokens(conversation.mask.shape[0], count, seed)


@pytest.mark.parametrize("name", SPECS)
def test_taken_back_is_as_if_it_had_never_come(name: str) -> None:
    talk = Conversation(SPECS[name])
    talk.steps(batch(talk, 3, seed=1))
    talk.cache.activate_past_recording()
    never = talk.copy()
    wrong = batch(talk, 11, seed=2)
    talk.steps(wrong)
    never.steps(wrong[:, :4])
    talk.take_back(7)
    same(talk, never)
    then = batch(talk, 5, seed=3)
    assert torch.equal(talk.steps(then), never.steps(then))
    same(talk, never)


@pytest.mark.parametrize("name", ACTING)
def test_candidates_of_one_pass_are_read_as_if_one_by_one(name: str) -> None:
    talk = Conversation(SPECS[name])
    talk.cache.activate_past_recording()
    alone = talk.copy()
    for seed in (1, 2):
        new = batch(talk, 9, seed)
        together, accepted = talk.read(new), 3 + seed
        torch.testing.assert_close(together[:, :accepted], alone.steps(new[:, :accepted]), atol=1e-2, rtol=1e-2)
        talk.take_back(9 - accepted)
        unequal = differences(state_of(talk.cache, decoded=True), state_of(alone.cache, decoded=True), 5e-3, share=0.2)
        assert not unequal, unequal[:5]
        alone.cache.crop(0)


@pytest.mark.parametrize("family", ["qwen3", "phi3", "gemma3_text", "gpt_oss"])
def test_other_models(family: str) -> None:
    talk = Conversation(SPECS["all"], family)
    talk.cache.activate_past_recording()
    never = talk.copy()
    talk.steps(batch(talk, 9, seed=2))
    talk.take_back(9)
    same(talk, never)
    new = batch(talk, 7, seed=3)
    torch.testing.assert_close(talk.read(new), never.steps(new), atol=2e-3, rtol=2e-3)
    talk.take_back(4)
    never.take_back(4)
    then = batch(talk, 3, seed=4)
    torch.testing.assert_close(talk.steps(then), never.steps(then), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["none", "snapkv", "kivi", "quest", "decoding knorm"])
def test_an_answer_that_is_generated_again_needs_no_copy(name: str) -> None:
    talk = Conversation(SPECS[name], lengths=(40,))
    talk.cache.activate_past_recording()
    seen = talk.cache.get_seq_length()
    ids = torch.cat([tokens(1, seen), batch(talk, 6, seed=5)], dim=1)
    before = copy.deepcopy(talk.cache)

    def answer(cache: Any) -> Tensor:
        with kvpress.reading(talk.model, talk.press):
            return talk.model.generate(ids, past_key_values=cache, max_new_tokens=12, do_sample=False)

    expected = answer(copy.deepcopy(before))
    for _ in range(2):
        assert torch.equal(answer(talk.cache), expected)
        talk.cache.crop(seen - talk.cache.get_seq_length())
        unequal = differences(state_of(talk.cache), state_of(before))
        assert not unequal, unequal[:5]


def test_memory_of_savepoints_is_reported_and_freed() -> None:
    talk = Conversation(SPECS["kivi"])
    talk.cache.activate_past_recording()
    talk.steps(batch(talk, 12, seed=1))
    before = kvpress.memory_report(talk.cache)
    assert all(report.components["rollback"] > 0 for report in before.layers)
    talk.cache.crop(0)
    let_go = kvpress.memory_report(talk.cache)
    assert not any("rollback" in report.components for report in let_go.layers)
    assert let_go.total_bytes < before.total_bytes
    walked = {tensor.untyped_storage().data_ptr() for tensor in reachable([layer.store for layer in talk.cache.layers])}
    plain = Conversation(SPECS["kivi"])
    plain.steps(batch(plain, 12, seed=1))
    expected = {
        tensor.untyped_storage().data_ptr() for tensor in reachable([layer.store for layer in plain.cache.layers])
    }
    assert len(walked) == len(expected)


def test_without_recording_tokens_are_open_until_something_happens() -> None:
    talk = Conversation("kivi:bits=4,group_size=4,residual_length=4", lengths=(40,))
    never = talk.copy()
    talk.steps(batch(talk, 3, seed=1))
    talk.take_back(3)
    same(talk, never)
    talk.steps(batch(talk, 5, seed=1))
    before = copy.deepcopy(talk.cache)
    with pytest.raises(ValueError, match=r"cannot take back 3 tokens, only the newest 1.*activate_past_recording"):
        talk.cache.crop(-3)
    assert not differences(state_of(talk.cache), state_of(before))
    with pytest.raises(ValueError, match="the cache has seen 45"):
        talk.cache.crop(-46)
    talk.take_back(1)


def test_the_first_prompt_is_not_kept() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("snapkv:0.5,window_size=4")(model):
        model(tokens(1, 20), past_key_values=cache)
        cache.activate_past_recording()
        model(tokens(1, 3), past_key_values=cache)
        with pytest.raises(ValueError, match="only the newest 3"):
            cache.crop(-4)
        cache.crop(-3)
    assert cache.get_seq_length() == 20


def test_a_turn_under_a_press_is_taken_back_as_a_whole() -> None:
    model = tiny_model("llama")
    press, ids = kvpress.get_press("snapkv:0.5,window_size=4"), tokens(1, 40)
    with press(model) as session:
        model.generate(ids[:, :20], max_new_tokens=2, do_sample=False)
        cache = session.cache
        cache.activate_past_recording()
        before, seen = copy.deepcopy(cache), cache.get_seq_length()
        model.generate(ids, past_key_values=cache, max_new_tokens=4, do_sample=False)
        assert cache.get_seq_length() == 43
        with pytest.raises(
            ValueError, match=f"from {seen} to 40 were observed as one turn; take back 3 or {43 - seen}"
        ):
            cache.crop(-10)
        cache.crop(seen - 43)
    assert not differences(state_of(cache), state_of(before))


def test_recurrent_layers_say_why_not() -> None:
    model = tiny_model("qwen3_next")
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("snapkv:0.5,window_size=4")(model):
        model(tokens(1, 20), past_key_values=cache)
        with pytest.raises(
            NotImplementedError, match=r"layer 0 of this cache.*recurrent state is a sum over all tokens"
        ):
            cache.activate_past_recording()
        assert not any(getattr(layer, "record_past", False) for layer in cache.layers)


def test_a_sliding_layer_behind_is_refused_before_any_change() -> None:
    model = tiny_model("smollm3")
    config = copy.deepcopy(model.config)
    config.layer_types, config.sliding_window = ["full_attention", "sliding_attention", "full_attention"], 8
    mixed = type(model)(config).eval()
    cache = DynamicCache(config=config)
    with kvpress.get_press("none")(mixed), torch.no_grad():
        mixed(tokens(1, 20), past_key_values=cache)
        mixed(tokens(1, 1), past_key_values=cache)
        with pytest.raises(
            NotImplementedError, match="layer 1 of this cache, because it keeps only the newest 7 pairs"
        ):
            cache.crop(-1)
        assert [layer.get_seq_length() for layer in cache.layers] == [21] * 3
        cache.activate_past_recording()
        mixed(tokens(1, 3), past_key_values=cache)
        cache.crop(-3)
    assert [layer.get_seq_length() for layer in cache.layers] == [21] * 3


def test_not_during_a_pass_and_not_forwards() -> None:
    model = tiny_model("llama")
    cache, caught = DynamicCache(config=model.config), []

    def crop(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="a forward pass is reading"):
            cache.crop(-1)
        caught.append(1)

    with kvpress.get_press("none")(model):
        model(tokens(1, 20), past_key_values=cache)
        handle = model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(crop)
        model(tokens(1, 1), past_key_values=cache)
        handle.remove()
    assert caught
    with pytest.raises(ValueError, match="got 2"):
        cache.crop(2)
    assert cache.get_seq_length() == 21


@pytest.mark.parametrize("storage", STORAGES)
def test_rows_that_are_chosen_go_on(storage: str) -> None:
    talk = Conversation(STORAGES[storage])
    talk.cache.activate_past_recording()
    talk.steps(batch(talk, 9, seed=1))
    talk.cache.batch_select_indices(torch.tensor([1]))
    talk.mask = talk.mask[1:]
    never = talk.copy()
    talk.steps(tokens(1, 9, seed=2))
    talk.take_back(9)
    same(talk, never)


def test_a_crop_that_only_some_layers_could_follow_is_not_read_on() -> None:
    talk = Conversation("kivi:bits=4,group_size=2,residual_length=2", "gemma3_text", lengths=(4,))
    talk.steps(tokens(1, 2))
    with pytest.raises(ValueError, match=r"cannot take back 3 tokens.*so this cache is unusable"):
        talk.cache.crop(-3)  # the sliding layer, which comes first, is not full yet
    with talk.press(talk.model), pytest.raises(RuntimeError, match="or a crop that some layers refused"):
        talk.model(tokens(1, 1), past_key_values=talk.cache)


def test_a_turn_of_embeddings_on_a_cache_that_records_is_a_turn() -> None:
    model = tiny_model("llama")
    press, ids, runs = kvpress.get_press("knorm:0.5"), tokens(1, 60), []
    embeds = model.get_input_embeddings()(ids).detach()
    for recording in (False, True):
        with press(model) as session:
            model.generate(inputs_embeds=embeds[:, :40], max_new_tokens=1, do_sample=False)
            if recording:
                session.cache.activate_past_recording()
            out = model.generate(inputs_embeds=embeds, past_key_values=session.cache, max_new_tokens=4, do_sample=False)
        session.cache.crop(0)
        runs.append((out, state_of(session.cache)))
    assert torch.equal(runs[0][0], runs[1][0])
    assert not differences(runs[0][1], runs[1][1])


@pytest.mark.parametrize("name", ["kivi", "decoding h2o", "all"])
def test_a_copy_of_a_cache_that_records_can_be_taken_back_too(name: str) -> None:
    talk = Conversation(SPECS[name])
    talk.cache.activate_past_recording()
    never = talk.copy()
    talk.steps(batch(talk, 9, seed=2))
    for layer in talk.cache.layers:
        layer.offload()
        layer.prefetch()
    twin = talk.copy()
    for conversation in (twin, talk):
        conversation.take_back(9)
        same(conversation, never)
    then = batch(talk, 4, seed=3)
    expected = never.steps(then)
    assert torch.equal(twin.steps(then), expected)
    assert torch.equal(talk.steps(then), expected)
