# SPDX-License-Identifier: Apache-2.0
"""Models whose layers accelerate has placed, as `device_map` does: it moves all inputs of a layer, and loads its weights."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.hf.attention.masks import PressMask, mask
from tests.models import padded_batch, tiny_model

accelerate = pytest.importorskip("accelerate")

SPECS = [
    "none",
    "snapkv:0.5",
    "adakv(snapkv:0.5)",
    "kivi:bits=4,residual_length=0",
    "quest:budget=16,page_size=4",
    "bounded(keydiff:0.5):chunk=16",
    "criticalkv(snapkv:0.5)",
    "kvgrad:0.5,repeat_prompt=",
    "frontier:smaller=4",
]


@pytest.fixture(scope="module")
def placed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A model whose first layer is in memory and whose other layers are in files."""
    model = copy.deepcopy(tiny_model("llama"))
    layers = {f"model.layers.{n}": "disk" if n else "cpu" for n in range(model.config.num_hidden_layers)}
    others = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"), "cpu")
    folder = tmp_path_factory.mktemp("layers")
    model = accelerate.dispatch_model(
        model, {**others, **layers}, main_device="cpu", offload_dir=folder, force_hooks=True
    )
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"}
    return model


def generate(model: Any, spec: str) -> tuple[Tensor, int]:
    """Return the tokens of two padded rows, and the bytes of their cache."""
    ids, mask = padded_batch([90, 61])
    press = kvpress.get_press(spec)
    with press(model):
        tokens = model.generate(ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
    return tokens, kvpress.memory_report(press.last_cache).total_bytes


@pytest.mark.parametrize("spec", SPECS)
def test_placed_layers_give_the_tokens_and_the_cache_of_the_model(placed: Any, spec: str) -> None:
    expected, held = generate(tiny_model("llama"), spec)
    tokens, placed_bytes = generate(placed, spec)
    assert torch.equal(tokens, expected)
    assert placed_bytes == held


def test_a_file_of_the_model_is_one_of_its_placed_layers(placed: Any, tmp_path: Path) -> None:
    ids, press = padded_batch([61])[0], kvpress.get_press("snapkv:0.5")
    model = tiny_model("llama")
    with press(model):
        model.generate(ids, max_new_tokens=2, do_sample=False)
    kvpress.save(press.last_cache, tmp_path / "cache.kv", model)
    assert kvpress.load(tmp_path / "cache.kv", placed).get_seq_length() == ids.shape[1] + 1


def press_mask(padded: bool) -> PressMask:
    ids, real = padded_batch([9, 5])
    config = copy.deepcopy(tiny_model("llama").config)
    config._attn_implementation = "eager"
    settings = {
        "mask_function": lambda row, head, query, key: key <= query + 1,
        "dtype": torch.float32,
        "device": "cpu",
    }
    return mask(
        2, ids.shape[1], ids.shape[1], attention_mask=real.bool() if padded else None, config=config, **settings
    )


@pytest.mark.parametrize("padded", [False, True])
def test_layers_of_a_device_share_a_mask_on_it(padded: bool) -> None:
    """The device `meta` stands for another one."""
    here = press_mask(padded)
    there = here.to("meta", non_blocking=True)
    assert here.to("cpu") is here
    assert here.to(torch.device("meta")) is there
    assert there.to("meta") is there
    assert here.native(9).device.type == "cpu"
    assert there.native(9).device.type == "meta"
    assert there.native(9).shape == here.native(9).shape
    assert there.sees_later()
    assert (there.mask is None) == (not padded)
    if there.mask is not None:
        assert there.mask.device.type == "meta"
