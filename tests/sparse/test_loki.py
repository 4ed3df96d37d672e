# SPDX-License-Identifier: Apache-2.0
"""Loki: directions of the keys, the pairs that they choose, and their lifetime."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.calibrate import KeyDirectionSettings, calibrate
from kvpress.core import calibration as calibration
from kvpress.sparse.stream_tables import StreamTables
from tests.models import padded_batch, tiny_model, tokens
from tests.sparse.selecting import build, read_at_a_step

SPEC = "loki:budget=20,channels=8,label_bits=16"


def directions(keys: Tensor, channels: int) -> Tensor:
    """Return the right singular vectors `[D, r]` of the centred keys `[n, D]`."""
    return torch.linalg.svd(keys.double() - keys.double().mean(dim=0)).Vh[:channels].T


def stored(layer: Any, n: int) -> Tensor:
    return torch.cat([segment.read(segment.layout.rows(n))[0] for segment in layer.store.segments])


@pytest.mark.parametrize("storage", ["dense", "ragged", "packed"])
def test_the_pairs_with_the_largest_products_along_the_directions_are_read(storage: str) -> None:
    press = build(SPEC, 20, storage)
    for keys, queries, ranks in read_at_a_step(press):
        basis = directions(keys, 8)
        scores = ((queries.double() @ basis) @ (keys.double() @ basis).T).amax(dim=0)
        assert ranks == scores.topk(20).indices.sort().values.tolist()


def test_directions_are_fitted_to_the_first_sealed_pairs_of_a_row() -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([150, 70])  # the second row seals its first pairs while tokens are generated
    cache = DynamicCache(config=model.config)
    press = kvpress.get_press(SPEC)
    with press(model):
        model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=4, do_sample=False)
        store = cache.layers[1].store
        early: StreamTables = store.codec_state["loki 8"]
        assert early.fitted_pairs == (128, 128, 0, 0)
        before, sealed = early.tables.clone(), stored(cache.layers[1], 1)
    grown = torch.cat([mask, torch.ones(2, 3, dtype=mask.dtype)], dim=1)
    with press(model):
        more = torch.cat([grown, torch.ones(2, 60, dtype=mask.dtype)], dim=1)
        model(tokens(2, 60, seed=5), attention_mask=more, past_key_values=cache)
    late: StreamTables = copy.deepcopy(store.codec_state["loki 8"])
    assert late.fitted_pairs[:2] == early.fitted_pairs[:2]
    assert min(late.fitted_pairs) > 0
    assert torch.equal(late.tables[:2], before[:2])
    for n, keys in {1: sealed, 3: stored(cache.layers[1], 3)[:64]}.items():
        overlap = directions(keys, 8).T @ late.tables[n].double()
        torch.testing.assert_close(overlap.abs(), torch.eye(8, dtype=torch.float64), atol=1e-4, rtol=0)
    cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(store.codec_state["loki 8"].tables, late.tables[[2, 3, 0, 1]])


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_model_families_work(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([150, 120])
    expected = model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    with kvpress.get_press("loki:budget=512")(model):
        assert torch.equal(model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False), expected)
    with kvpress.get_press("loki:budget=0.25")(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=10, do_sample=False)
    assert "indexes" in kvpress.memory_report(session.cache).components


def test_a_calibration_has_the_directions_of_the_models_keys(tmp_path: Path) -> None:
    model, ids, path = tiny_model("qwen3"), tokens(3, 40), tmp_path / "loki.safetensors"
    calibrate(model, ids, KeyDirectionSettings(), path)
    seen: dict[str, list[Tensor]] = {"rotated": [], "unrotated": []}
    layer = model.model.layers[1].self_attn
    hook = layer.k_norm.register_forward_hook(lambda module, args, out: seen["unrotated"].append(out))
    with torch.no_grad():
        for row in ids:
            cache = model(row[None]).past_key_values
            seen["rotated"].append(cache.layers[1].keys[0])
    hook.remove()
    unrotated = torch.cat([keys[0].transpose(0, 1) for keys in seen["unrotated"]], dim=1)
    calibrated = calibration.read(path).tensors
    for name, keys in {"rotated": torch.cat(seen["rotated"], dim=1), "unrotated": unrotated}.items():
        for head in range(2):
            overlap = directions(keys[head], 8).T @ calibrated[f"1.{name}"][head, :, :8].double()
            torch.testing.assert_close(overlap.abs(), torch.eye(8, dtype=torch.float64), atol=1e-3, rtol=0)
    reads = []
    for keys in ("rotated", "unrotated"):
        press = kvpress.get_press(f"loki:budget=16,calibration={path},keys={keys}")
        with press(model) as session:
            model.generate(tokens(2, 150), max_new_tokens=4, do_sample=False)
        assert "codec state" not in kvpress.memory_report(session.cache).components
        reads.append(session.cache.layers[1].store.segments[0].index["loki"].rows)
    assert not torch.equal(reads[0].codes, reads[1].codes)


def test_bad_arguments_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="keys='unrotated' needs a calibration"):
        kvpress.LokiPress(keys="unrotated")
    with pytest.raises(ValueError, match="label_bits must be 4, 8 or 16, got 2"):
        kvpress.LokiPress(label_bits=2)  # type: ignore[arg-type]
    for words, press in {
        "channels must be a multiple of 2 .* head dim 32, got 40": kvpress.LokiPress(channels=40),
        "no calibration file 'missing.safetensors'.*calibrate loki": kvpress.LokiPress(
            calibration="missing.safetensors"
        ),
    }.items():
        with pytest.raises((ValueError, FileNotFoundError), match=words), press(tiny_model("llama")):
            pass
