# SPDX-License-Identifier: Apache-2.0
"""Presses whose scores come from files: their formulas, the places of the files, and refused files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import kvpress
from kvpress.calibrate import METHODS, calibrate
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.presses.scoring import one_view, scored
from tests.probes import Watching

HEADS, DIM, HIDDEN, LAYERS = 2, 32, 64, 3


def networks(path: Path, kind: str, hidden: int = HIDDEN) -> list[nn.Module]:
    """Write random networks for the tiny models as they are published, and return them."""
    torch.manual_seed(5)
    modules: list[nn.Module] = [
        nn.Linear(hidden, HEADS)
        if kind == "linear"
        else nn.Sequential(nn.Linear(hidden, 16), nn.GELU(), nn.Linear(16, HEADS))
        for _ in range(LAYERS)
    ]
    save_file(nn.ModuleDict({"layers": nn.ModuleList(modules)}).state_dict(), path / "model.safetensors")
    return modules


def filters(path: Path, shape: tuple[int, ...] = (LAYERS, HEADS, DIM)) -> Tensor:
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    save_file({"q_filters": tensor}, path / "model.safetensors")
    return tensor


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_kvzap_scores_by_its_networks(kind: Any, tmp_path: Path) -> None:
    modules, model = networks(tmp_path, kind), tiny_model("qwen3")
    seen: dict[int, Tensor] = {}
    ids, mask = padded_batch([40, 25])
    press = kvpress.KVzapPress(0.5, kind, weights=str(tmp_path))
    with torch.no_grad():
        views_by_layer = scored(model, press, ids, mask)
        with Watching(lambda call: seen.setdefault(call.layer.index, call.hidden_states))(model):
            model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True)
        for layer, views in views_by_layer.items():
            assert len(views) == 2
            for view, scores in views:
                (row,) = view.rows
                expected = modules[layer](seen[layer][row, -view.length :]).T
                torch.testing.assert_close(scores[0], expected, atol=1e-5, rtol=1e-5)


def test_kvzap_scores_of_generated_tokens_are_held(tmp_path: Path) -> None:
    networks(tmp_path, "mlp")
    model = tiny_model("llama")
    base = kvpress.KVzapPress(weights=str(tmp_path))
    kept = []
    for interval in (4, 8):
        press = kvpress.DecodingPress(base, compression_interval=interval, target_size=20, hidden_states_buffer_size=1)
        with press(model) as session:
            model.generate(tokens(2, 30), max_new_tokens=9, do_sample=False)
        kept.append(session.cache.layers[0].store.dense)
    # Scores do not change, so that the best of the best are the best.
    assert set(kept[0].slots()[:20].tolist()) <= set(range(38))
    assert all(bool((array != 0).any()) for dense in kept for array in dense.side.values())


def test_kvzap_scores_of_earlier_turns_are_held(tmp_path: Path) -> None:
    """Survivors of a turn compete in the next one with the scores of their own tokens."""
    modules, model, ids = networks(tmp_path, "linear"), tiny_model("llama"), tokens(1, 90)
    seen: dict[int, Tensor] = {}
    with torch.no_grad():
        with Watching(lambda call: seen.setdefault(call.layer.index, call.hidden_states))(model):
            model(ids[:, :60], use_cache=True)
        with kvpress.KVzapPress(0.5, "linear", weights=str(tmp_path))(model) as session:
            cache = model(ids[:, :60], use_cache=True).past_key_values
            model(ids[:, 60:], past_key_values=cache)
    for index, layer in enumerate(session.cache.layers):
        dense = layer.store.dense
        (name,) = dense.side
        expected = modules[index](seen[index][0]).T
        for head in range(HEADS):
            rows = dense.layout.rows(head)
            slots, held = dense.slots()[rows].long(), dense.side[name][rows]
            earlier = slots < 60
            assert bool(earlier.any())
            torch.testing.assert_close(held[earlier], expected[head, slots[earlier]], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_qfilter_projects_keys(family: str, tmp_path: Path) -> None:
    directions, model = filters(tmp_path), tiny_model(family)
    for layer, views in scored(model, kvpress.QFilterPress(0.5, filters=str(tmp_path)), tokens(2, 40)).items():
        for view, scores in views:
            torch.testing.assert_close(scores, -(view.keys * directions[layer][:, None]).sum(dim=-1))


def test_calibrated_filters_point_away_from_queries(tmp_path: Path) -> None:
    model, ids, file = tiny_model("llama"), tokens(3, 50), tmp_path / "filters.safetensors"
    calibrate(model, ids, METHODS["qfilter"](), file)
    seen: dict[int, list[Tensor]] = {}
    with torch.no_grad(), Watching(lambda call: seen.setdefault(call.layer.index, []).append(call.queries))(model):
        for row in ids:
            model(row[None], use_cache=True)
    calibrated = load_file(file)
    for layer, chunks in seen.items():
        queries = torch.cat(chunks, dim=2)[0]
        first = torch.linalg.svd(queries, full_matrices=False).Vh[:, 0]
        first = first * (queries @ first[..., None]).sum(dim=(1, 2)).sign()[:, None]
        expected = -first.view(HEADS, -1, DIM).mean(dim=1)
        torch.testing.assert_close(calibrated[f"{layer}.filter"], expected, atol=1e-4, rtol=1e-4)
    view, scores = one_view(model, kvpress.QFilterPress(0.5, filters=str(file)), ids[:1])
    torch.testing.assert_close(scores, -torch.einsum("bhnd,hd->bhn", view.keys, calibrated["0.filter"]))


def test_the_reference_model_has_filters_and_other_models_need_a_file() -> None:
    model, tokenizer = kvpress.load_model("reference")
    with kvpress.QFilterPress(0.5)(model) as session:
        model.generate(**tokenizer(" The code for tiger is 4837." * 9, return_tensors="pt"), max_new_tokens=1)
    report = kvpress.memory_report(session.cache)
    assert report.kept / report.seen == pytest.approx(0.5, abs=0.02)


@pytest.mark.parametrize(
    ("press", "method", "word"),
    [(kvpress.QFilterPress, "filters", "q_filters"), (kvpress.KVzapPress, "weights", "KVzap-mlp")],
)
def test_missing_and_foreign_files_are_named(press: Any, method: str, word: str, tmp_path: Path) -> None:
    del word
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="not loaded from a path"), press(0.5)(model):
        pass
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors in"), press(0.5, **{method: str(tmp_path)})(model):
        pass
    (tmp_path / "model.safetensors").write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="no plain tensors"), press(0.5, **{method: str(tmp_path)})(model):
        pass
    if method == "filters":
        filters(tmp_path, (LAYERS, HEADS + 1, DIM))
    else:
        networks(tmp_path, "mlp", hidden=HIDDEN + 1)
    with pytest.raises(ValueError, match="expected"), press(0.5, **{method: str(tmp_path)})(model):
        pass


def test_the_other_kind_of_networks_is_refused(tmp_path: Path) -> None:
    networks(tmp_path, "mlp")
    press = kvpress.KVzapPress(0.5, "linear", weights=str(tmp_path))
    with pytest.raises(ValueError, match="holds mlp networks"), press(tiny_model("llama")):
        pass


def test_the_published_repositories_are_requested_from_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    requests = []

    def download(repository: str, name: str) -> str:
        requests.append((repository, name))
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    model = tiny_model("llama")
    monkeypatch.setattr(model.config, "name_or_path", "meta-llama/Meta-Llama-3.1-8B-Instruct")
    for press in (kvpress.QFilterPress(0.5), kvpress.KVzapPress(0.5), kvpress.KVzapPress(0.5, "linear")):
        with pytest.raises(FileNotFoundError, match="offline"), press(model):
            pass
    names = [
        "nthngdy/Llama-3.1-8B-Instruct_qfilt",
        *(f"nvidia/KVzap-{kind}-Meta-Llama-3.1-8B-Instruct" for kind in ("mlp", "linear")),
    ]
    assert requests == [(name, "model.safetensors") for name in names]
