# SPDX-License-Identifier: Apache-2.0
"""Helper methods that presses of NVIDIA kvpress have: each is right when it is called, and refused when it is overridden."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import DecodingPress, KnormPress, SnapKVPress
from kvpress.compat import helpers, methods
from tests.caches import generate, pairs, positions, prefill
from tests.models import padded_batch, tiny_model, tokens
from tests.test_overrides import arguments

LENGTH = 40


class Asked(list[str]):
    """Names of the helpers that were called."""


def overriding(base: type[Any], name: str, replacement: Any = None) -> tuple[type[Any], Asked]:
    """Return a subclass that records calls of a helper, and answers by its base class or by `replacement`."""
    calls = Asked()
    static = isinstance(vars(base).get(name), staticmethod)
    theirs = getattr(base, name)

    def method(*args: Any) -> Any:
        calls.append(name)
        return theirs(*args) if replacement is None else replacement(*args)

    return type(f"Own{base.__name__}", (base,), {name: staticmethod(method) if static else method}), calls


def real(model: Any) -> tuple[Any, dict[str, Any]]:
    """Return the first attention module, and its arguments, keys and values on a prompt."""
    module, hidden, keys, values, _, caught = arguments(model, LENGTH)
    return module, {**caught, "hidden_states": hidden, "keys": keys, "values": values}


HELPERS = {
    "compute_window_attention": SnapKVPress,
    "get_layer_budget": kvpress.PyramidKVPress,
    "get_query_statistics": kvpress.ExpectedAttentionPress,
    "apply_avg_rope": kvpress.ExpectedAttentionPress,
    "compute_leverage_scores": kvpress.LeverageScorePress,
    "is_lazy": kvpress.SimLayerKVPress,
    "rerotate_keys": kvpress.KeyRerotationPress,
    "vwl1norm": kvpress.CriticalKVPress,
    "load_attention_pattern": kvpress.DuoAttentionPress,
}
SCORE_HELPERS = [name for name in HELPERS if hasattr(HELPERS[name], "score") and name != "get_layer_budget"]


def test_each_helper_can_be_called_on_its_class_and_on_classes_derived_from_it() -> None:
    for name, base in HELPERS.items():
        helper = getattr(base, name)
        assert helper is getattr(helpers, name)
        assert getattr(type("Derived", (base,), {}), name) is helper
    attached = {helper.name for group in methods.HELPERS.values() for helper in group} - {"score"}
    assert attached == set(HELPERS)
    assert kvpress.PyramidKVPress.compute_window_attention is SnapKVPress.compute_window_attention
    press = kvpress.PyramidKVPress(0.5)
    assert press.get_layer_budget.__self__ is press


@pytest.mark.parametrize("name", [name for name in HELPERS if name != "load_attention_pattern"])
def test_an_override_of_a_helper_is_refused(name: str) -> None:
    """A press never calls the helper, so that an override would have no effect."""
    base = HELPERS[name]
    fix = "'score' or 'scores' or 'compress'" if name in SCORE_HELPERS else "'compress'"
    message = rf"Own{base.__name__} overrides '{name}', which {base.__name__} has.*never calls here: override {fix}"
    with pytest.raises(TypeError, match=message):
        overriding(base, name)
    mixin = type(f"Own{base.__name__}", (), {name: lambda *args: None})
    with pytest.raises(TypeError, match=message):
        type("Mixed", (mixin, base), {})
    type(base.__name__, (kvpress.BasePress,), {name: lambda *args: None})


@pytest.mark.parametrize("name", [name for name in HELPERS if name != "load_attention_pattern"])
def test_a_class_with_its_own_score_or_compress_may_define_the_helpers_that_it_calls(name: str) -> None:
    base = HELPERS[name]
    body = {name: staticmethod(lambda: 3), "compress": lambda self, *args: getattr(self, name)()}
    kind = type("Own", (base,), body)
    assert getattr(kind, name)() == 3
    with pytest.raises(TypeError, match=rf"Own overrides '{name}'.*also not in its 'compress'"):
        kvpress.BasePress.compress(object.__new__(kind), None, None, None, None, None, {})
    type("Derived", (kind,), {})
    body = {name: staticmethod(lambda: 3), "score": lambda self, *args: getattr(self, name)()}
    if name not in SCORE_HELPERS:
        with pytest.raises(TypeError, match=rf"Own overrides '{name}'"):
            type("Own", (base,), body)
        return
    kind = type("Own", (base,), body)
    assert object.__new__(kind).score() == 3
    with pytest.raises(TypeError, match=rf"Own overrides '{name}'.*also not in its 'score'"):
        base.score(object.__new__(kind), None, None, None, None, None, {})


def test_overrides_decide() -> None:
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    kind, calls = overriding(kvpress.CriticalKVPress, "score")
    inner = SnapKVPress(0.5, window_size=4)
    assert positions(prefill(model, kind(inner), ids)) == positions(prefill(model, kvpress.CriticalKVPress(inner), ids))
    assert len(calls) == 3
    kind, calls = overriding(kvpress.CriticalKVPress, "score", lambda press, *arguments: -arguments[2].norm(dim=-1))
    assert positions(prefill(model, kind(inner), ids)) == positions(prefill(model, KnormPress(0.5), ids))


def test_a_recipe_and_a_compress_of_a_users_class_are_refused_together() -> None:
    class Compressing(KnormPress):
        def compress(
            self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any
        ) -> Any:
            return keys, values

    for base, body in ((Compressing, {}), (KnormPress, {"forward_hook": Compressing.compress})):
        with pytest.raises(TypeError, match="Both has its own `recipe`, which alone decides"):
            type("Both", (base,), {**body, "recipe": lambda self, model=None: KnormPress.recipe(self, model)})


def numbered_from_zero(module: Any, indices: Tensor, keys: Tensor) -> Tensor:
    """Rotate keys by the difference of their rank and their index, as NVIDIA kvpress does."""
    moved = torch.arange(indices.shape[2]) - indices
    chosen = keys.gather(2, indices[..., None].expand(-1, -1, -1, keys.shape[3]))
    angles = moved[..., None] * module.rotary_emb.inv_freq
    cos, sin = (torch.cat([part, part], dim=-1) for part in (angles.cos(), angles.sin()))
    half = chosen.shape[3] // 2
    return chosen * cos + torch.cat([-chosen[..., half:], chosen[..., :half]], dim=-1) * sin


def test_rerotated_keys_are_those_of_the_peer() -> None:
    model = tiny_model("llama")
    module, inputs = real(model)
    indices = inputs["keys"].norm(dim=-1).topk(20).indices.sort().values
    module.rotary_emb = model.model.rotary_emb
    try:
        rotated = kvpress.KeyRerotationPress.rerotate_keys(module, indices, inputs["keys"])
        expected = numbered_from_zero(module, indices, inputs["keys"])
    finally:
        del module.rotary_emb
    torch.testing.assert_close(rotated, expected, atol=1e-5, rtol=1e-5)


def test_rerotated_keys_are_those_of_a_prompt_of_the_kept_tokens() -> None:
    """Keys of the first layer depend on the token alone."""
    model = tiny_model("llama")
    module, call = real(model)
    at = torch.tensor([1, 5, 6, 20])
    alone = model(tokens(2, LENGTH)[:, at], past_key_values=DynamicCache()).past_key_values.layers[0].keys
    module.rotary_emb = model.model.rotary_emb
    try:
        rerotated = kvpress.KeyRerotationPress.rerotate_keys(module, at.expand(2, 2, -1), call["keys"])
    finally:
        del module.rotary_emb
    torch.testing.assert_close(rerotated, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_query_statistics_need_rotary_angles(family: str) -> None:
    module, call = real(tiny_model(family))
    with pytest.raises(ValueError, match="give the attention module with its `rotary_emb`"):
        kvpress.ExpectedAttentionPress(0.5).get_query_statistics(module, call["hidden_states"])


def test_window_attention_is_that_of_the_model() -> None:
    model = tiny_model("qwen3", "eager")
    module, call = real(model)
    weights = model(tokens(2, LENGTH), output_attentions=True).attentions[0]
    attention = SnapKVPress.compute_window_attention(
        module, call["hidden_states"], call["keys"], 4, call["position_embeddings"]
    )
    torch.testing.assert_close(attention, weights[:, :, -4:, :-4], atol=1e-5, rtol=1e-5)
    mass = weights[:, :, -1].mean(dim=(0, 1))
    for threshold, lazy in ((0.99 * float(mass[:2].sum() + mass[-8:].sum()), True), (1.0, False)):
        press = kvpress.SimLayerKVPress(threshold, n_recent=8, n_initial=2)
        assert press.is_lazy(module, call["hidden_states"], call["keys"], call["position_embeddings"]) == lazy


def test_layer_budgets_are_those_that_layers_keep() -> None:
    model, press = tiny_model("llama"), kvpress.PyramidKVPress(0.5, window_size=4, beta=4)
    kept = [len(row[0]) for (row,) in positions(prefill(model, press, tokens(1, LENGTH)))]
    assert [press.get_layer_budget(layer.self_attn, LENGTH) for layer in model.model.layers] == kept
    assert sum(kept) == 3 * 20
    assert len(set(kept)) == 3


class AsUsersDo(SnapKVPress):
    """Has the `score` of NVIDIA kvpress, which calls the helper itself."""

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        w, embeddings = self.window_size, kwargs["position_embeddings"]
        weights = self.compute_window_attention(module, hidden_states, keys, w, embeddings).mean(dim=-2)
        weights = torch.nn.functional.avg_pool1d(weights, self.kernel_size, padding=self.kernel_size // 2, stride=1)
        scores = weights.unflatten(1, (keys.shape[1], -1)).mean(dim=2)
        return torch.nn.functional.pad(scores, (0, w), value=scores.max().item() + 1)


class AsExpected(kvpress.ExpectedAttentionPress):
    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Tensor:
        mean, _ = self.get_query_statistics(module, hidden_states)
        mean = mean.unflatten(1, (keys.shape[1], -1))
        return torch.einsum("bhgd,bhnd->bhgn", mean, keys).mul(keys.shape[3] ** -0.5).softmax(dim=-1).mean(dim=2)


def test_helpers_called_by_a_users_score_are_ours() -> None:
    model, (ids, mask) = tiny_model("qwen3"), padded_batch([LENGTH, 31])
    settings = {"window_size": 4, "kernel_size": 3}
    cache = prefill(model, AsUsersDo(0.5, **settings), ids, mask)
    assert positions(cache) == positions(prefill(model, SnapKVPress(0.5, **settings), ids, mask))
    # Without position_ids, padding counts as positions, which hidden states alone do not show.
    ids, mask = tokens(2, LENGTH), None
    settings = {"use_covariance": False, "use_vnorm": False, "n_sink": 0}
    cache = prefill(model, AsExpected(0.5, **settings), ids, mask)
    assert positions(cache) == positions(prefill(model, kvpress.ExpectedAttentionPress(0.5, **settings), ids, mask))


def test_a_reset_of_a_users_class_follows_every_block() -> None:
    kind, calls = overriding(DecodingPress, "reset")
    model = tiny_model("llama")
    press = kvpress.PrefillDecodingPress(KnormPress(0.5), kind(KnormPress(), 4, 10))
    for blocks in (1, 2):
        with press(model):
            generate(model, tokens(1, 20))
            assert len(calls) == blocks - 1
    with pytest.raises(ZeroDivisionError), press(model):
        raise ZeroDivisionError
    assert len(calls) == 3


@pytest.mark.parametrize(
    ("base", "name"),
    [(kvpress.KVzipPress, "score_kvzip"), (DecodingPress, "_resolve_target_size"), (kvpress.CAMPress, "_resolve_target_size")],
)  # fmt: skip
def test_overrides_that_nothing_asks_are_refused(base: type[Any], name: str) -> None:
    with pytest.raises(TypeError, match=rf"Own overrides '{name}'.*never calls here"):
        type("Own", (base,), {name: lambda self: None})
    type("Unrelated", (KnormPress,), {name: lambda self: None})


def test_decisions_of_a_prompt_are_set_after_it() -> None:
    model, press = tiny_model("llama"), kvpress.SimLayerKVPress(0.0, n_recent=8, n_initial=2)
    assert not hasattr(press, "compression_ratio")
    with press(model):
        model(tokens(1, LENGTH), past_key_values=DynamicCache())
    assert press.compression_ratio == pytest.approx(0.75)
    with pytest.raises(AttributeError):
        press.compression_ratio = 0.5


def test_names_of_modules_there() -> None:
    from kvpress.presses.base_press import SUPPORTED_MODELS, is_prefilling

    from kvpress.utils import compute_n_kept

    assert isinstance(tiny_model("llama"), SUPPORTED_MODELS)
    assert is_prefilling(torch.arange(7), 7)
    assert not is_prefilling(torch.arange(5, 7), 2)
    assert [compute_n_kept(10, ratio) for ratio in (0.0, 0.25, 0.99, 1.0)] == [10, 7, 1, 0]


class Marking(kvpress.AdaKVPress):
    """Calls the `compress` of a head-wise press, which marks evicted pairs on the module."""

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        keys, values = super().compress(module, hidden_states, keys, values, attentions, kwargs)
        assert len(module.masked_key_indices) == 3
        return keys, values


def test_a_head_wise_compress_marks_evicted_pairs() -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([LENGTH, 31])
    cache = prefill(model, Marking(KnormPress(0.5)), ids, mask)
    assert positions(cache) == positions(prefill(model, kvpress.AdaKVPress(KnormPress(0.5)), ids, mask))
    module, *inputs = arguments(model, LENGTH)
    press = kvpress.AdaKVPress(KnormPress(0.5))
    assert press.compress(module, *inputs)[0].shape[2] == LENGTH
    assert len(module.masked_key_indices[0]) == 2 * 2 * 20
    # Marks that were set outside a session are ignored inside it.
    assert pairs(prefill(model, Whole(), ids)) == {LENGTH}
    assert not hasattr(module, "masked_key_indices")


class Whole(kvpress.BasePress):
    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return keys, values


def test_modules_that_are_stand_ins_are_enough_where_nothing_is_read_of_them() -> None:
    keys, values = torch.randn(2, 1, 2, 10, 8)
    module = type("Module", (), {"head_dim": 8})()
    assert KnormPress(0.5).compress(module, None, keys, values, None, {})[0].shape == (1, 2, 5, 8)
    assert kvpress.BlockPress(KnormPress(0.5), 4).compress(module, None, keys, values, None, {})[0].shape[2] == 5


def test_the_pipeline_logs_read_and_kept_tokens(caplog: pytest.LogCaptureFixture) -> None:
    model, tokenizer = kvpress.load_model("reference")
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    with caplog.at_level(logging.DEBUG):
        pipe("The code for tiger is 4837. " * 3, press=KnormPress(0.5), max_new_tokens=1)
    (read,) = (r.getMessage() for r in caplog.records if r.getMessage().startswith("Context Length: "))
    count = int(read.split()[-1])
    assert f"Compressed Context Length: {count // 2}" in [record.getMessage() for record in caplog.records]
    with pytest.raises(TypeError, match="Own overrides 'generate_answer'"):
        type("Own", (kvpress.KVPressTextGenerationPipeline,), {"generate_answer": lambda self: ""})
