# SPDX-License-Identifier: Apache-2.0
"""Methods and attributes of users' classes beside `score`: hooks, masks, names of ours; and direct calls."""

from __future__ import annotations

import functools
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import BasePress, KnormPress, ScorerPress, SnapKVPress
from kvpress.core.registry import entries, find
from kvpress.testing.rows import check_rows_alone
from tests.caches import generate, pairs, positions, prefill
from tests.models import padded_batch, position_ids, tiny_model, tokens


def loudest(model: Any, ids: Tensor, count: int) -> list[list[list[list[int]]]]:
    """Return positions of the largest values of a prompt, by layer, row and head."""
    cache = model(ids, past_key_values=DynamicCache()).past_key_values
    best = [layer.values.norm(dim=-1).topk(count, dim=-1).indices.sort(dim=-1).values for layer in cache.layers]
    return [layer.tolist() for layer in best]


class ByValue(ScorerPress):
    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        return values.norm(dim=-1)


def by_query(module: Any, hidden_states: Tensor, keys: Tensor, kwargs: Any) -> Tensor:
    """Score pairs by the mean query, before rotation, and the mean angle of the tokens that the pass has read."""
    queries = module.q_proj(hidden_states).unflatten(2, (-1, keys.shape[3])).mean(dim=(1, 2))
    cos = kwargs["position_embeddings"][0]
    assert cos.shape[1] == hidden_states.shape[1] == len(kwargs["cache_position"])
    return torch.einsum("bhnd,bd->bhn", keys, queries + cos.mean(dim=1))


class ByQuery(ScorerPress):
    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        received = 0 if attentions is None else attentions.mean(dim=(1, 2))[:, None]
        return by_query(module, hidden_states, keys, kwargs) + received


class Third(BasePress):
    """Keeps two thirds of the pairs."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        count = keys.shape[2] - keys.shape[2] // 3
        kept = by_query(module, hidden_states, keys, kwargs).topk(count, dim=2).indices.sort(dim=2).values[..., None]
        return tuple(array.gather(2, kept.expand(-1, -1, -1, array.shape[3])) for array in (keys, values))


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("press", [ByQuery(0.5), Third()], ids=lambda press: type(press).__name__)
def test_a_row_with_a_padded_later_turn_gets_its_own_tokens(press: Any, implementation: str) -> None:
    model = tiny_model("llama", implementation)
    check_rows_alone(model, press, (40, 31, 34), later=(3, 12, 9), generated=(2, 2))


# -- forward_hook ------------------------------------------------------------------------------------------------


class Watching(ByValue):
    """Observes every pass and leaves eviction to the base class."""

    def __post_init__(self) -> None:
        self.seen: list[tuple[int, int, int]] = []

    def forward_hook(self, module: Any, input: Any, kwargs: Any, output: Any) -> Any:
        tokens_read = kwargs["hidden_states"].shape[1]
        assert kwargs["cache_position"].shape == (tokens_read,)
        output = super().forward_hook(module, input, kwargs, output)
        kept = kwargs["past_key_values"].layers[module.layer_idx].keys.shape[2]
        self.seen.append((module.layer_idx, tokens_read, kept))
        return output


class Replacing(BasePress):
    """Writes the cache itself, as presses that replace the whole hook do."""

    def forward_hook(self, module: Any, input: Any, kwargs: Any, output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        if kwargs["cache_position"][0] == 0:
            keys, values = layer.keys, layer.values
            layer.keys = keys[:, :, ::2]
            layer.values = values[:, :, ::2]
        return output


class Silencing(BasePress):
    def forward_hook(self, module: Any, input: Any, kwargs: Any, output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:])


def test_a_forward_hook_is_called_after_every_pass_and_evicts_through_its_base_class() -> None:
    model, press = tiny_model("llama"), Watching(0.5)
    with press(model) as session:
        generate(model, tokens(2, 20), max_new_tokens=3)
    assert press.seen == [(i, 20, 10) for i in range(3)] + [(i, 1, 11) for i in range(3)] + [
        (i, 1, 12) for i in range(3)
    ]
    assert positions(session.cache) == [
        [[[*head, 20, 21] for head in row] for row in layer] for layer in loudest(model, tokens(2, 20), 10)
    ]


def test_a_forward_hook_that_writes_the_cache() -> None:
    model = tiny_model("llama")
    cache = prefill(model, Replacing(), tokens(2, 20))
    assert positions(cache) == [[[list(range(0, 20, 2))] * 2] * 2] * 3
    assert cache.get_seq_length() == 20
    with kvpress.reading(model):
        model(tokens(2, 1), past_key_values=cache)
    assert pairs(cache) == {11}


def test_the_result_of_a_forward_hook_replaces_the_output() -> None:
    model, ids = tiny_model("llama"), tokens(1, 6)
    with Silencing()(model):
        silent = model(ids, past_key_values=DynamicCache()).logits
    assert not torch.allclose(silent, model(ids).logits)


def test_forward_hooks_in_compositions() -> None:
    model = tiny_model("llama")
    with (KnormPress(0.5) + Watching(0.5))(model) as session:
        model(tokens(1, 20), past_key_values=DynamicCache())
    assert pairs(session.cache) == {5}
    with pytest.raises(TypeError, match="Watching has its own `forward_hook`"):
        kvpress.AdaKVPress(Watching(0.5))
    with pytest.raises(RuntimeError, match="inside `with press"):
        KnormPress(0.5).forward_hook(model.model.layers[0].self_attn, (), {}, None)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_a_forward_hook_that_writes_the_cache_under_a_mask_of_ones(family: str) -> None:
    model, ids = tiny_model(family), tokens(2, 20)
    logits = []
    for mask in (None, torch.ones_like(ids)):
        cache, later = DynamicCache(config=model.config), None if mask is None else torch.ones(2, 21)
        with Replacing()(model):
            model(ids, attention_mask=mask, past_key_values=cache)
            logits.append(model(tokens(2, 1), attention_mask=later, past_key_values=cache).logits)
        cache.layers[1].keys = cache.layers[1].keys.clone()
    assert torch.equal(*logits)


def test_pairs_cannot_be_assigned_in_a_padded_batch() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([20, 11])
    with pytest.raises(NotImplementedError, match="padded rows have columns that are not tokens"), Replacing()(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=DynamicCache())


def test_assigning_pairs_outside_a_press() -> None:
    model = tiny_model("llama")
    cache = prefill(model, KnormPress(0.5), tokens(1, 20))
    layer = cache.layers[0]
    with pytest.raises(ValueError, match=r"keys must have shape \[1, 2, n, 32\]"):
        layer.keys = layer.keys[:, :1]
    layer.keys, layer.values = layer.keys[:, :, 2:], layer.values[:, :, 2:]
    assert len(positions(cache)[0][0][0]) == 8
    assert positions(cache)[0][0][0] == positions(prefill(model, KnormPress(0.5), tokens(1, 20)))[0][0][0][2:]
    layer.keys = layer.keys[:, :, 1:]
    with pytest.raises(ValueError, match="different lengths"):
        model(tokens(1, 1), past_key_values=cache)


# -- masked_key_indices ------------------------------------------------------------------------------------------


class Masking(BasePress):
    """Marks the first pairs of head 0, and more of head 1, as head-wise presses do."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        rows = torch.arange(keys.shape[0]).repeat_interleave(5)
        heads = torch.tensor([0, 0, 1, 1, 1]).repeat(keys.shape[0])
        module.masked_key_indices = (rows, heads, torch.tensor([0, 1, 2, 3, 4]).repeat(keys.shape[0]))
        return keys, values


class MaskingInHook(Masking):
    def forward_hook(self, module: Any, input: Any, kwargs: Any, output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        if kwargs["cache_position"][0] == 0:
            self.compress(module, None, layer.keys, layer.values, None, kwargs)
        return output


@pytest.mark.parametrize("press", [Masking(), MaskingInHook()])
def test_masked_key_indices_are_evicted(press: BasePress) -> None:
    model = tiny_model("llama")
    cache = prefill(model, press, tokens(2, 12))
    assert positions(cache) == [[[list(range(2, 12)), [0, 1, *range(5, 12)]]] * 2] * 3
    assert not any(hasattr(module, "masked_key_indices") for module in model.modules())


def test_masked_key_indices_count_from_the_first_real_token() -> None:
    ids, mask = padded_batch([12, 8])
    cache = prefill(tiny_model("llama"), Masking(), ids, mask)
    assert positions(cache)[0][1] == [list(range(6, 12)), [4, 5, *range(9, 12)]]


def test_bad_masked_key_indices() -> None:
    class Wild(BasePress):
        def compress(
            self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> Any:
            module.masked_key_indices = (torch.tensor([0]), torch.tensor([0]), torch.tensor([99]))
            return keys, values

    with pytest.raises(ValueError, match=r"masked_key_indices must be three index tensors"):
        prefill(tiny_model("llama"), Wild(), tokens(1, 12))


# -- attributes --------------------------------------------------------------------------------------------------

RESERVED = ("scores", "protected", "wants", "amount", "allocator", "schedule", "last_cache", "recipe")
"""Properties and methods by which presses are run."""


class Collecting(KnormPress):
    """Stores data under names that this library does not use."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("keep", "kept", "moved", "ranks", "collected"):
            setattr(self, name, [])

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        scores = super().score(module, hidden_states, keys, values, attentions, kwargs)
        self.collected.append(scores)
        return scores


@dataclass
class Fields(ByValue):
    budget: int = 512
    window: int = 15
    kept: int = 3


class Halves(ByValue):
    """Has an attribute `budget` that is not a field."""

    budget = 3


def test_attributes_may_have_other_names() -> None:
    model, ids = tiny_model("llama"), tokens(2, 20)
    press = Collecting(0.5)
    assert positions(prefill(model, press, ids)) == positions(prefill(model, KnormPress(0.5), ids))
    assert len(press.collected) == 3
    fields = Fields(0.5, 100, 16)
    assert (fields.budget, fields.window) == (100, 16)
    assert positions(prefill(model, fields, ids)) == loudest(model, ids, 10)
    assert positions(prefill(model, Halves(0.5), ids)) == loudest(model, ids, 10)


@pytest.mark.parametrize("name", RESERVED)
def test_attributes_with_names_of_ours_are_refused_when_they_are_set(name: str) -> None:
    class Assigning(KnormPress):
        def __post_init__(self) -> None:
            setattr(self, name, [])

    kind = "method" if name in ("scores", "recipe") else "read-only property"
    message = rf"'{name}' of Assigning is a {kind} of \w+: give the attribute another name, or override the "
    with pytest.raises(AttributeError, match=message):
        Assigning(0.5)


@pytest.mark.parametrize("name", RESERVED)
def test_fields_and_class_attributes_with_names_of_ours_are_refused_with_the_class(name: str) -> None:
    message = rf"'{name}' of Fielded is a .* of \w+: give the attribute another name"
    for body in ({"__annotations__": {name: "list"}}, {"__annotations__": {name: "int"}, name: 15}, {name: "cosine"}):
        with pytest.raises(TypeError, match=message):
            type("Fielded", (ByValue,), body)
    wrong_kind = property(lambda press: None) if name in ("scores", "recipe") else (lambda press: None)
    with pytest.raises(TypeError, match=message):
        type("Fielded", (ByValue,), {name: wrong_kind})


def test_a_method_may_be_overridden_by_any_kind_of_method() -> None:
    class Plain(ByValue):
        recipe = functools.partialmethod(ScorerPress.recipe)

        @classmethod
        def validate(cls) -> None:
            pass

        @staticmethod
        def after_block() -> None:
            pass

    assert pairs(prefill(tiny_model("llama"), Plain(0.5), tokens(1, 20))) == {10}


def test_a_budget_of_ours_still_counts_in_a_users_class() -> None:
    assert pairs(prefill(tiny_model("llama"), ByValue(budget=7), tokens(1, 20))) == {7}


def test_properties_of_ours_may_be_overridden() -> None:
    class Short(ByValue):
        @property
        def protected(self) -> int:
            return 30

    assert pairs(prefill(tiny_model("llama"), Short(0.5), tokens(1, 20))) == {20}


# -- compress and score of wrappers ------------------------------------------------------------------------------


class OwnAdaKV(kvpress.AdaKVPress):
    """Overrides the `compress` of a wrapper."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return keys[:, :, :7], values[:, :, :7]


class Halving(KnormPress):
    """Adds an attribute to those of its base class."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        keys, values = super().compress(module, hidden_states, keys, values, attentions, kwargs)
        return keys[:, :, ::2], values[:, :, ::2]


class Scaling(SnapKVPress):
    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return super().compress(module, hidden_states, keys * 2, values, attentions, kwargs)


def test_the_compress_of_a_users_class_counts_with_any_base_class() -> None:
    model = tiny_model("llama")
    assert pairs(prefill(model, OwnAdaKV(KnormPress(0.5)), tokens(1, 20))) == {7}
    assert pairs(prefill(model, Halving(0.5), tokens(1, 20))) == {5}
    ids, mask = padded_batch([20, 12])
    cache = prefill(model, Scaling(0.5, window_size=4), ids, mask)
    assert [len(row[0]) for row in positions(cache)[0]] == [10, 6]


def arguments(model: Any, length: int = 40) -> tuple[Any, ...]:
    """Return arguments of a direct call of `compress`: inputs of the first attention layer and its stored pairs."""
    caught: dict[str, Any] = {}
    module = model.model.layers[0].self_attn
    handle = module.register_forward_pre_hook(lambda _, args, kwargs: caught.update(kwargs), with_kwargs=True)
    cache = model(tokens(2, length), past_key_values=DynamicCache()).past_key_values
    handle.remove()
    layer = cache.layers[0]
    return module, caught["hidden_states"], layer.keys, layer.values, None, caught


BY_HAND = [
    "knorm:0.5",
    "snapkv:0.5,window_size=4",
    "tova:0.5",
    "expected_attention:0.5",
    "keydiff:0.5",
    "observed_attention:0.5",
    "leverage_score:0.5",
    "compactor:0.5,sink_size_start=2,sink_size_end=2,chunk_size=8",
    "chunkkv(snapkv:0.5,window_size=4):chunk_length=5",
    "chunk(knorm:0.5):chunk_length=8",
    "block(keydiff:0.5):block_size=3",
    "criticalkv(snapkv:0.5,window_size=4)",
    "knorm:0.5 + snapkv:0.5,window_size=4",
    "pyramidkv:0.5,window_size=4",
]


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("spec", BY_HAND)
def test_compress_called_directly_keeps_the_pairs_of_the_press(spec: str, family: str) -> None:
    model, press = tiny_model(family), kvpress.get_press(spec)
    module, *inputs = arguments(model)
    module.rotary_emb = model.model.rotary_emb
    try:
        keys, values = press.compress(module, *inputs)
    finally:
        del module.rotary_emb
    layer = prefill(model, press, tokens(2, 40)).layers[0]
    torch.testing.assert_close(keys, layer.keys)
    torch.testing.assert_close(values, layer.values)


@pytest.mark.parametrize("family", ["llama", "glm4"])
def test_rerotated_keys_of_a_direct_call_are_numbered_from_0(family: str) -> None:
    """The keys have the positions of a prompt of as many tokens as pairs are kept."""
    model = tiny_model(family)
    module, hidden, keys, *inputs = arguments(model)
    rotate = sys.modules[type(module).__module__].apply_rotary_pos_emb
    plain = torch.randn_like(keys)
    keys = rotate(plain, plain, *model.model.rotary_emb(plain, torch.arange(keys.shape[2])[None]))[0]
    kept = keys.norm(dim=-1).topk(20, largest=False).indices.sort().values[..., None].expand(-1, -1, -1, keys.shape[3])
    expected = plain.gather(2, kept)
    expected = rotate(expected, expected, *model.model.rotary_emb(plain, torch.arange(20)[None]))[0]
    module.rotary_emb = model.model.rotary_emb
    try:
        rerotated, _ = kvpress.KeyRerotationPress(KnormPress(0.5)).compress(module, hidden, keys, *inputs)
    finally:
        del module.rotary_emb
    torch.testing.assert_close(rerotated, expected)


NEEDS_MORE = {
    "agentkv", "attention_matching", "criticalkv", "expected_attention_stats", "fastkvzip", "finch", "kvzap", "qfilter",
}  # fmt: skip
"""Presses that need the whole model, an inner press, a file, token ids, or a question in the prompt."""


@pytest.mark.parametrize(
    "name", [entry.name for entry in entries() if issubclass(entry.press, ScorerPress) and entry.name not in NEEDS_MORE]
)
def test_scores_of_a_direct_call_do_not_depend_on_the_ratio(name: str) -> None:
    model = tiny_model("llama")
    kind, (module, *inputs) = find(name).press, arguments(model)
    module.rotary_emb, scores = model.model.rotary_emb, []
    try:
        for ratio in (0.0, 0.5):
            torch.manual_seed(0)
            scores.append(kind(ratio).score(module, *inputs))
    finally:
        del module.rotary_emb
    assert torch.equal(*scores)


@pytest.mark.parametrize("spec", ["decoding(knorm):target_size=9", "decoding(snapkv:window_size=4):target_size=9"])
def test_compress_by_hand_of_a_schedule_cuts_to_its_target(spec: str) -> None:
    keys, values = kvpress.get_press(spec).compress(*arguments(tiny_model("llama")))
    assert keys.shape == values.shape == (2, 2, 9, 32)


def test_direct_calls_that_need_more_are_refused() -> None:
    inputs = (None, None, torch.randn(1, 2, 30, 8), torch.randn(1, 2, 30, 8), None, None)
    assert kvpress.ChunkKVPress(KnormPress(0.5)).compress(*inputs)[0].shape == (1, 2, 15, 8)
    for spec, why in (
        ("adakv(knorm:0.5)", "different numbers of pairs"),
        ("snapkv:0.5,window_size=4", r"inside `with press\(model\)`"),
        ("leverage_score:0.5", r"rotary angles.*inside `with press\(model\)`"),
        ("kvzip:0.5,repeat_prompt=", r"whole model.*inside `with press\(model\)`"),
    ):
        with pytest.raises(ValueError, match=why):
            kvpress.get_press(spec).compress(*inputs)


def test_scores_by_hand_need_no_kwargs() -> None:
    keys, values = torch.randn(2, 1, 2, 30, 8).unbind()
    assert torch.equal(KnormPress(0.5).score(None, None, keys, values, None, None), -keys.norm(dim=-1))
    with pytest.raises(ValueError, match=r"inside `with press\(model\)`"):
        SnapKVPress(0.5, window_size=4).score(None, None, keys, values, None, None)


# -- hidden states inside wrappers -------------------------------------------------------------------------------


class ByHiddenState(ScorerPress):
    """Scores a token by its own hidden state, differently for every head."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        assert hidden_states.shape[1] == keys.shape[2] == kwargs["position_embeddings"][0].shape[1]
        assert torch.equal(kwargs["hidden_states"], hidden_states)
        heads = hidden_states.view(*hidden_states.shape[:2], keys.shape[1], -1)
        return heads.norm(dim=-1).transpose(1, 2)


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize(
    "wrapper",
    [lambda press: kvpress.ChunkPress(press, 6), lambda press: kvpress.BlockPress(press, 4)],
    ids=["chunk", "block"],
)
def test_scorers_of_hidden_states_get_those_of_the_pairs(wrapper: Any, padded: bool) -> None:
    """Scores that do not depend on other tokens choose the same pairs in blocks; in chunks, the best of each chunk."""
    model = tiny_model("llama")
    ids, mask = padded_batch([24, 17]) if padded else (tokens(2, 24), None)
    kept = positions(prefill(model, wrapper(ByHiddenState(0.5)), ids, mask))
    if isinstance(wrapper(KnormPress()), kvpress.BlockPress):
        assert kept == positions(prefill(model, ByHiddenState(0.5), ids, mask))
    else:
        hidden = {}
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(
                lambda module, _, kwargs: hidden.update({module.layer_idx: kwargs["hidden_states"]}), with_kwargs=True
            )
        model(ids, attention_mask=mask, past_key_values=DynamicCache())
        for layer in model.model.layers:
            layer.self_attn._forward_pre_hooks.clear()
            layer.self_attn._forward_pre_hooks_with_kwargs.clear()
        for layer, rows in enumerate(kept):
            worth = hidden[layer][0].view(24, 2, -1).norm(dim=-1).T
            for head, at in enumerate(rows[0]):
                best = worth[head].view(4, 6).topk(3).indices + torch.arange(0, 24, 6)[:, None]
                assert at == best.flatten().sort().values.tolist()


class Means(BasePress):
    """Replaces every two neighbours by their means, which belong to no token."""

    def compress(
        self, module: Any, hidden_states: Any, keys: Tensor, values: Tensor, attentions: Any, kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        return keys.unflatten(2, (-1, 2)).mean(dim=3), values.unflatten(2, (-1, 2)).mean(dim=3)


@pytest.mark.parametrize(
    "inner", ["knorm", "random:seed=3", "chunkkv(keydiff):chunk_length=4", "streaming_llm:reindex=true"]
)
def test_pairs_of_no_token_are_evicted_later(inner: str) -> None:
    model, press = tiny_model("llama"), Means() + kvpress.get_press(f"decoding({inner}):3,target_size=12")
    lengths = [40, 30]
    ids, mask = padded_batch(lengths)

    def generated(ids: Tensor, mask: Tensor) -> Tensor:
        with press(model) as session:
            tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False, eos_token_id=None)
        assert [layer.store.stored() for layer in session.cache.layers] == [[13] * len(tokens) * 2] * 3
        return tokens[:, -8:]

    together = generated(ids, mask)
    for row, length in enumerate(lengths):
        alone = ids[row : row + 1, -length:]
        assert torch.equal(generated(alone, torch.ones_like(alone)), together[row : row + 1])
