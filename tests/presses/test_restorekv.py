# SPDX-License-Identifier: Apache-2.0
"""RestoreKV against a model whose weights were adapted by hand; its pairs leave all other ones unchanged."""

from __future__ import annotations

import copy
import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import RestoreKVPress
from kvpress.calibrate import METHODS, calibrate
from kvpress.calibrate.restorekv import distance, untrained
from kvpress.hf.models import facts_of
from kvpress.presses.lora import read_adapter
from kvpress.testing.oracle import Oracle
from tests.caches import generate, positions, prefill
from tests.models import full_layers, padded_batch, position_ids, tiny_model, tokens

COUNT, RANK, ALPHA = 6, 3, 7.0
FAMILIES = ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss"]


def linears(model: Any) -> dict[str, Any]:
    """The linear layers of a decoder by name, attention and MLP."""
    modules = {name: m for name, m in model.named_modules() if isinstance(m, torch.nn.Linear) and ".layers." in name}
    return {name: m for name, m in modules.items() if "router" not in name}


def learn(folder: Path, model: Any, seed: int = 3, **config: Any) -> str:
    """Write random embeddings and a random adapter of all linear layers as peft does."""
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.3

    hidden = model.get_input_embeddings().weight.shape[1]
    save_file({"restore_embeddings": random(COUNT, hidden)}, folder / "restore_embeddings.safetensors")
    weights = {}
    for name, layer in linears(model).items():
        weights[f"base_model.model.{name}.lora_A.weight"] = random(RANK, layer.in_features)
        weights[f"base_model.model.{name}.lora_B.weight"] = random(layer.out_features, RANK)
    save_file(weights, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return str(folder)


def press_of(folder: str, ratio: float = 0.5, **settings: Any) -> RestoreKVPress:
    return RestoreKVPress(ratio, repeat_prompt="", adapter=folder, **settings)


def adapted(model: Any, folder: str) -> Any:
    """A copy of a model with the adapter added to its weights."""
    twin, weights = copy.deepcopy(model), load_file(Path(folder) / "adapter_model.safetensors")
    for name, layer in linears(twin).items():
        a, b = (weights[f"base_model.model.{name}.lora_{side}.weight"] for side in "AB")
        layer.weight.data += ALPHA / RANK * b @ a
    return twin


def unpadded(kept: list[int], pads: int) -> list[int]:
    return [at - pads if at >= 0 else at for at in kept]


def pairs_of_no_token(cache: Any, layer: int, row: int, head: int) -> tuple[Tensor, Tensor]:
    store = cache.layers[layer].store
    stream = row * store.heads + head
    assert not store.segments
    rows = store.dense.layout.rows(stream)
    at = store.dense.slots()[rows] < 0
    keys, values = store.dense.read(rows)
    return keys[at], values[at]


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_pairs_are_those_of_the_adapted_model_behind_the_prompt(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, **({"implementation": "eager"} if family == "gpt_oss" else {}))
    folder = learn(tmp_path, model)
    ids, mask = padded_batch([40, 29])
    cache = DynamicCache(config=model.config)
    with press_of(folder)(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=cache)
    twin, embeddings = (
        adapted(model, folder),
        load_file(tmp_path / "restore_embeddings.safetensors")["restore_embeddings"],
    )
    for row, length in enumerate([40, 29]):
        # Attention depends on distances only, so the same reading `COUNT` positions earlier gives the expected keys.
        stock, at = DynamicCache(config=model.config), torch.arange(length + COUNT)[None] - COUNT
        model(ids[row : row + 1, -length:], past_key_values=stock, position_ids=at[:, :length])
        twin.model(inputs_embeds=embeddings[None], past_key_values=stock, position_ids=at[:, length:])
        for layer in full_layers(model):
            expected = stock.layers[layer]
            for head in range(expected.keys.shape[1]):
                keys, values = pairs_of_no_token(cache, layer, row, head)
                torch.testing.assert_close(keys, expected.keys[0, head, -COUNT:], atol=1e-4, rtol=1e-4)
                torch.testing.assert_close(values, expected.values[0, head, -COUNT:], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("layerwise", [False, True])
@torch.no_grad()
def test_the_budget_is_that_of_kvzip_and_pays_for_the_learned_pairs(layerwise: bool, tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    folder = learn(tmp_path, model)
    kept = positions(prefill(model, press_of(folder, 0.4, layerwise=layerwise), ids))
    base = kvpress.KVzipPress(1 - (24 - COUNT) / 40, layerwise, repeat_prompt="")
    expected = positions(prefill(model, base, ids))
    assert kept == [[[[-1] * COUNT + head for head in row] for row in layer] for layer in expected]
    for row in range(2):
        assert sum(len(head) for layer in kept for head in layer[row]) == 24 * sum(len(layer[row]) for layer in kept)


@pytest.mark.parametrize("spec", ["{}", "{} + kivi:bits=4,group_size=4,residual_length=4", "protect({}):tokens=9:12"])
@torch.no_grad()
def test_rows_of_a_padded_batch_are_those_rows_alone(spec: str, tmp_path: Path) -> None:
    model = tiny_model("qwen3")
    press = kvpress.get_press(spec.format(f"restorekv:0.5,repeat_prompt=,adapter={learn(tmp_path, model)}"))
    ids, mask = padded_batch([41, 28])
    with press(model) as session:
        together = generate(model, ids, mask, output_logits=True)
        kept = positions(session.cache)
    for row, length in enumerate([41, 28]):
        with press(model) as session:
            alone = generate(model, ids[row : row + 1, -length:], output_logits=True)
            pads = 41 - length
            assert [[unpadded(head, pads) for head in layer[row]] for layer in kept] == [
                layer[0] for layer in positions(session.cache)
            ]
        torch.testing.assert_close(
            torch.stack(together.logits)[:, row], torch.stack(alone.logits)[:, 0], atol=1e-4, rtol=1e-4
        )


@torch.no_grad()
def test_later_turns_add_their_own_and_files_keep_them(tmp_path: Path) -> None:
    model = tiny_model("llama")
    press, cache = press_of(learn(tmp_path, model)), DynamicCache(config=model.config)
    with press(model):
        for turn in range(3):
            model(tokens(1, 30, seed=turn), past_key_values=cache)
    for layer in positions(cache):
        assert all(head[: 3 * COUNT] == [-1] * 3 * COUNT and min(head[3 * COUNT :]) >= 0 for head in layer[0])
    mean_counts = [sum(len(head) for head in layer[0]) / len(layer[0]) for layer in positions(cache)]
    assert sum(mean_counts) / len(mean_counts) == 45
    kvpress.save(cache, tmp_path / "cache.kv", model, press)
    loaded = kvpress.load(tmp_path / "cache.kv", model)
    with kvpress.reading(model):
        logits = [model(tokens(1, 5, seed=9), past_key_values=stored_cache).logits for stored_cache in (cache, loaded)]
    torch.testing.assert_close(*logits)


@torch.no_grad()
def test_rows_without_eviction_get_no_learned_pairs(tmp_path: Path) -> None:
    model = tiny_model("llama")
    folder = learn(tmp_path, model)
    ids, mask = padded_batch([40, 4])
    with press_of(folder)(model) as session:
        generate(model, ids, mask, max_new_tokens=1)
    for layer in positions(session.cache):
        assert all(-1 not in head and len(head) == 4 for head in layer[1])
        assert all(head.count(-1) == COUNT for head in layer[0])
    kept = positions(prefill(model, press_of(folder, 0.0), tokens(1, 20)))
    assert kept == [[[list(range(20))] * 2]] * 3


@torch.no_grad()
def test_the_adapter_is_seen_by_its_own_thread_alone_and_taken_off(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(1, 12)
    folder = learn(tmp_path, model)
    adapter, plain = read_adapter(folder, ""), model(ids).logits
    twin, logits = adapted(model, folder), []
    with adapter.added(model):
        thread = threading.Thread(target=lambda: logits.append(torch.no_grad()(model)(ids).logits))
        thread.start()
        thread.join()
        torch.testing.assert_close(model(ids).logits, twin(ids).logits, atol=1e-4, rtol=1e-4)
    assert torch.equal(logits[0], plain)
    assert torch.equal(model(ids).logits, plain)


def refused(model: Any, press: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message), press(model):
        generate(model, tokens(1, 40), max_new_tokens=1)


def test_missing_and_foreign_files_are_named(tmp_path: Path) -> None:
    model = tiny_model("llama")
    refused(model, RestoreKVPress(0.5, repeat_prompt=""), ValueError, "not loaded from a path")
    refused(model, press_of(str(tmp_path)), FileNotFoundError, r"no restore_embeddings\.safetensors in")
    folder = learn(tmp_path / "own", model)
    refused(model, press_of(folder, 0.85), ValueError, "keep at least 7")
    refused(model, kvpress.KeyRerotationPress(press_of(folder)), TypeError, "take restorekv out of key_rerotation")
    refused(tiny_model("phi3"), press_of(folder), ValueError, "no such layer")
    refused(
        tiny_model("gemma4_text", vocab_size_per_layer_input=99),
        press_of(folder),
        NotImplementedError,
        "learned tokens have none",
    )
    refused(model, press_of(learn(tmp_path / "dora", model, use_dora=True)), ValueError, "use_dora=True")
    weights = load_file(tmp_path / "own" / "adapter_model.safetensors")
    first = next(name for name in weights if "lora_A" in name)
    save_file({**weights, first: torch.zeros(RANK + 1, 8)}, tmp_path / "own" / "adapter_model.safetensors")
    refused(model, press_of(folder), ValueError, "must be")
    save_file({**weights, first: torch.zeros(RANK, 8)}, tmp_path / "own" / "adapter_model.safetensors")
    refused(model, press_of(folder), ValueError, "a linear layer from 8 to")
    save_file({"restore_embeddings": torch.zeros(COUNT, 8)}, tmp_path / "own" / "restore_embeddings.safetensors")
    refused(model, press_of(folder), ValueError, "expected")
    (tmp_path / "own" / "adapter_config.json").write_text("{}")
    refused(model, press_of(folder), ValueError, "no configuration of a LoRA adapter")


def test_the_published_repositories_are_requested_from_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = []

    def download(repository: str, name: str) -> str:
        requests.append((repository, name))
        raise OSError("no such repository")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    model = tiny_model("llama")
    model.config._name_or_path = "some/Model-8B"
    try:
        for plus in (False, True):
            press = RestoreKVPress(0.5, kvzip_plus_normalization=plus, repeat_prompt="")
            refused(model, press, FileNotFoundError, "higokri/RestoreKV-Model-8B")
    finally:
        model.config._name_or_path = ""
    assert set(requests) == {
        (f"higokri/RestoreKV-Model-8B{end}", "restore_embeddings.safetensors") for end in ("", "_plus")
    }


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@torch.no_grad()
def test_later_tokens_read_the_learned_pairs_and_the_kept_ones(family: str, tmp_path: Path) -> None:
    model = tiny_model(family, **({"implementation": "eager"} if family == "gpt_oss" else {}))
    press, ids, follow = press_of(learn(tmp_path, model)), tokens(2, 40), tokens(2, 5, seed=7)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
    kept = [[[head[head >= 0] for head in row] for row in layer] for layer in kvpress.kept_positions(cache)]
    oracle = Beside(model, kept, copy.deepcopy(cache))
    with kvpress.reading(model):
        logits = model(follow, past_key_values=cache).logits
    model(ids, past_key_values=stock)
    torch.testing.assert_close(logits, oracle.logits(follow, stock, None, None), atol=2e-4, rtol=2e-4)


class Beside(Oracle):
    """Oracle whose attention also reads the learned pairs of a compressed cache, before the columns of the full one."""

    def __init__(self, model: Any, kept: Any, cache: Any) -> None:
        super().__init__(model, [[[shown(head) for head in row] for row in layer] for layer in kept], 40 + COUNT)
        self.cache = cache

    def attention(self, module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in full_layers(self.model):
            batch, heads = key.shape[:2]
            learned_pairs = [
                [pairs_of_no_token(self.cache, module.layer_idx, row, head) for head in range(heads)]
                for row in range(batch)
            ]
            for side, columns in enumerate((key, value)):
                extra = torch.stack([torch.stack([pair[side] for pair in row]) for row in learned_pairs])
                key, value = (
                    (torch.cat([extra, columns], dim=2), value) if side == 0 else (key, torch.cat([extra, columns], 2))
                )
        return super().attention(module, query, key, value, *args, **kwargs)


def shown(kept: Tensor) -> Tensor:
    return torch.cat([torch.arange(COUNT), kept + COUNT])


@pytest.mark.parametrize("family", ["llama", "gemma3_text", "gpt_oss"])
def test_training_reads_the_same_pairs_as_the_press(family: str, tmp_path: Path) -> None:
    model, ids, file = tiny_model(family, "eager"), tokens(2, 100), tmp_path / "restore.safetensors"
    settings = METHODS["restorekv"](answer=12, steps=3, lr=0.05)
    calibrate(model, ids, settings, file)
    growing = full_layers(model)
    press = RestoreKVPress(0.6, repeat_prompt="", adapter=str(file))
    learned = press.learned(facts_of(model))
    with torch.no_grad():
        prompt = settings.read(model, ids[0], set(growing))
        torch.testing.assert_close(prompt.answers(model, learned, None), prompt.target, atol=1e-4, rtol=1e-4)
        expected = prompt.answers(model, learned, 0.6)
        cache = DynamicCache(config=model.config)
        with press(model):
            model(ids[:1, :88], past_key_values=cache)
        with kvpress.reading(model):
            actual = model(ids[:1, 88:], past_key_values=cache).logits[0].log_softmax(dim=-1)
    assert float((expected - prompt.target).abs().max()) > 0.05
    torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


def test_training_brings_a_cut_cache_nearer_to_the_full_one(tmp_path: Path) -> None:
    model, ids, file = tiny_model("llama", "eager"), tokens(1, 100), tmp_path / "restore.safetensors"
    before = model.state_dict()
    before = {name: weight.clone() for name, weight in before.items()}
    settings = METHODS["restorekv"](answer=12, steps=30, lr=0.02)
    calibrate(model, ids, settings, file)
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        prompt = settings.read(model, ids[0], set(full_layers(model)))
        learned = RestoreKVPress(0.6, adapter=str(file)).learned(facts_of(model))
        initial = untrained(model, torch.Generator().manual_seed(0))
        initial_distance, learned_distance = (
            float(distance(prompt.answers(model, pairs, 0.8), prompt.target)) for pairs in (initial, learned)
        )
    assert learned_distance < 0.5 * initial_distance
    refused(tiny_model("llama", seed=1), RestoreKVPress(0.5, adapter=str(file)), ValueError, "differs from this model")


def test_the_reference_model_has_an_adapter_for_plain_scores_alone() -> None:
    model, _ = kvpress.load_model("reference")
    cache = prefill(model, RestoreKVPress(0.75), tokens(1, 400))
    for rows in kvpress.kept_positions(cache):
        assert all((head == -1).sum() == 8 for head in rows[0])
    report = kvpress.memory_report(cache)
    assert report.kept / report.seen == pytest.approx(0.25, abs=0.01)
    refused(model, RestoreKVPress(0.75, kvzip_plus_normalization=True), FileNotFoundError, "higokri/RestoreKV-")


@pytest.mark.parametrize("codec", ["cq:bits=8,coupled=8", "kvquant:bits=3", "aquakv:bits=3"])
def test_its_pairs_are_encoded_before_the_rotary_embedding(codec: str) -> None:
    """Its pairs have no token, and so no position."""
    model, _ = kvpress.load_model("reference", dtype=torch.float32)
    ids, mask = padded_batch([150, 120])
    press = kvpress.get_press(f"restorekv:0.5 + {codec},residual_length=0,sinks=0")
    alone, together = prefill(model, press, ids[1:, -120:]), DynamicCache(config=model.config)
    with press(model), torch.no_grad():
        model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=together)
    for cache in (together, alone):
        assert any(int(part.slots().min()) == -1 for layer in cache.layers for part in layer.store.segments)
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    with press(model), torch.no_grad():
        at = position_ids(mask, 1)
        actual = model(ids[:, -1:], attention_mask=mask, position_ids=at, past_key_values=together).logits
        expected = model(ids[1:, -1:], past_key_values=alone).logits
    torch.testing.assert_close(actual[1:], expected, atol=1e-3, rtol=1e-3)
