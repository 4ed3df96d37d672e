# SPDX-License-Identifier: Apache-2.0
"""Adapters of the peft package: presses under them, switched between requests, in files, prefix stores and compiled models."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.hf.weights import digest_of_weights
from tests.models import padded_batch, tiny_model, tokens
from tests.presses.test_restorekv import learn

peft = pytest.importorskip("peft")

LENGTHS = [52, 40]
PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj"]
SPECS = (
    "none",
    "snapkv:0.5,window_size=4",
    "criticalkv(snapkv:0.5,window_size=4)",
    "critical_adakv(expected_attention:0.5)",
    "kvzip:0.5,repeat_prompt=,kvzip_plus_normalization=true",
    "frontier:smaller=5",
    "refit(leverage_score:0.75)",
    "think:0.5",
    "decoding(adakv(knorm)):target_size=20,compression_interval=2",
    "quest:budget=16,page_size=4,skip_layers=0",
)


def adapted() -> Any:
    """Return a tiny Llama with two random adapters, `first` and `second`; `first` is active."""
    model = None
    for seed, name in enumerate(("first", "second")):
        config = peft.LoraConfig(r=4, lora_alpha=16, target_modules=PROJECTIONS, init_lora_weights=False)
        torch.manual_seed(seed)
        if model is None:
            model = peft.get_peft_model(copy.deepcopy(tiny_model("llama")), config, adapter_name=name)
        else:
            model.add_adapter(name, config)
    assert model is not None
    model.set_adapter("first")
    return model.eval()


def merged(model: Any, name: str) -> Any:
    """Return a plain model with the weights of an adapter added."""
    twin = copy.deepcopy(model)
    twin.set_adapter(name)
    return twin.merge_and_unload().eval()


def outcome(model: Any, press: Any) -> tuple[Any, ...]:
    """Return the generated tokens, their logits and the kept positions."""
    ids, mask = padded_batch(LENGTHS)
    with press(model):
        return generated(model, ids, mask)


def generated(model: Any, ids: Tensor, mask: Tensor) -> tuple[Any, ...]:
    with torch.no_grad():
        result = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
    kept = [
        [[positions.tolist() for positions in row] for row in layer]
        for layer in kvpress.kept_positions(result.past_key_values)
    ]
    return result.sequences.tolist(), torch.stack(result.logits), kept


def check_equal(actual: tuple[Any, ...], expected: tuple[Any, ...], tolerance: float = 1e-4) -> None:
    assert actual[2] == expected[2]
    assert actual[0] == expected[0]
    torch.testing.assert_close(actual[1], expected[1], atol=tolerance, rtol=tolerance)


@pytest.fixture(scope="module")
def model() -> Any:
    return adapted()


@pytest.fixture(autouse=True)
def first(model: Any) -> None:
    model.set_adapter("first")


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.filterwarnings("ignore:.*:RuntimeWarning")
def test_presses_keep_the_pairs_of_merged_weights(spec: str, model: Any) -> None:
    press = kvpress.get_press(spec)
    tolerance = 1e-2 if "frontier" in spec else 1e-4  # a value near the border of two codes may get the other one
    check_equal(outcome(model, press), outcome(merged(model, "first"), press), tolerance)


def test_an_adapter_of_a_press_is_added_to_those_of_the_model(model: Any, tmp_path: Path) -> None:
    twin = merged(model, "first")
    press = kvpress.get_press(f"restorekv:0.5,repeat_prompt=,adapter={learn(tmp_path, twin)}")
    check_equal(outcome(model, press), outcome(twin, press))


@pytest.mark.parametrize("is_compiled", [False, True])
def test_adapters_are_switched_between_requests(is_compiled: bool) -> None:
    model, press = adapted(), kvpress.get_press("critical_adakv(snapkv:0.5,window_size=4)")
    twins = {name: merged(model, name) for name in ("first", "second")}
    expected = {name: outcome(twin, press) for name, twin in twins.items()}
    assert expected["first"][0] != expected["second"][0]
    ids, mask = padded_batch(LENGTHS)
    base = model.get_base_model()
    if is_compiled:
        base.compile(backend="eager")
    with press(model):
        for name in ("first", "second", "first"):
            model.set_adapter(name)
            check_equal(generated(model, ids, mask), expected[name])
    with model.disable_adapter():
        check_equal(outcome(model, press), outcome(tiny_model("llama"), press))
    torch._dynamo.reset()


def test_a_cache_file_belongs_to_its_adapter(model: Any, tmp_path: Path) -> None:
    with kvpress.get_press("snapkv:0.5,window_size=4")(model), torch.no_grad():
        cache = model(tokens(1, 40), use_cache=True).past_key_values
    kvpress.save(cache, tmp_path / "first.kvpress", model)
    kvpress.load(tmp_path / "first.kvpress", model)
    kvpress.load(tmp_path / "first.kvpress", adapted())
    model.set_adapter("second")
    with pytest.raises(ValueError, match="differs from this model in weights"):
        kvpress.load(tmp_path / "first.kvpress", model)
    with model.disable_adapter(), pytest.raises(ValueError, match="differs from this model in weights"):
        kvpress.load(tmp_path / "first.kvpress", model)


def test_a_prefix_store_serves_several_adapters(model: Any, tmp_path: Path) -> None:
    store, ids = kvpress.PrefixStore(tmp_path), tokens(1, 40)
    digests = set()
    for name in ("first", "second"):
        model.set_adapter(name)
        assert store.find(model, "knorm:0.5", ids) is None
        store.read(model, "knorm:0.5", ids)
        digests.add(digest_of_weights(model))
    with model.disable_adapter():
        assert store.find(model, "knorm:0.5", ids) is None
        digests.add(digest_of_weights(model))
    assert len(digests) == 3
    keys = []
    for name in ("first", "second"):
        model.set_adapter(name)
        assert store.find(model, "knorm:0.5", ids) is not None
        cache = store.read(model, "knorm:0.5", ids)
        with kvpress.get_press("knorm:0.5")(model), torch.no_grad():
            expected = model(ids, use_cache=True).past_key_values
        keys.append(cache.layers[1].store.dense.keys)
        torch.testing.assert_close(keys[-1], expected.layers[1].store.dense.keys)
    assert not torch.equal(*keys)
