# SPDX-License-Identifier: Apache-2.0
"""Gates of Fast KVzip: their formula token by token, kept pairs, and refused settings."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from tests.fuzz.models import path_of
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.presses.scoring import scored
from tests.probes import Watching


def normed(vector: Tensor, weight: Tensor) -> Tensor:
    return vector / (vector.square().mean() + 1e-6).sqrt() * weight


def gate(weights: dict[str, Tensor], x: Tensor, head: int, groups: int = 2, size: int = 8) -> float:
    """The gate of one head for the hidden state of one token."""
    rows = slice(head * size, (head + 1) * size)
    key = normed(weights["k_proj.weight"][rows] @ x, weights["k_norm.weight"])
    shares = []
    for g in range(groups):
        rows = slice((head * groups + g) * size, (head * groups + g + 1) * size)
        query = normed(weights["q_proj.weight"][rows] @ x + weights["q_proj.bias"][rows], weights["q_norm.weight"])
        logit = float(key @ query) / math.sqrt(size) + float(weights["b"][head, 0, g])
        base_logits = [float(base @ query) / math.sqrt(size) for base in weights["k_base"][head, 0]]
        shares.append(math.exp(logit) / (math.exp(logit) + sum(map(math.exp, base_logits))))
    return sum(shares) / groups


@pytest.mark.parametrize("block", [4096, 7])
def test_scores_are_gates_of_hidden_states(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.presses.fastkvzip.BLOCK", block)
    file, model = path_of("gates", "llama"), tiny_model("llama")
    weights = torch.load(file, weights_only=True)["module"]
    ids, mask = padded_batch([30, 18])
    seen: dict[int, Tensor] = {}
    with torch.no_grad():
        views_by_layer = scored(model, kvpress.FastKVzipPress(0.5, n_sink=2, window_ratio=0.1, gates=file), ids, mask)
        with Watching(lambda call: seen.setdefault(call.layer.index, call.hidden_states))(model):
            model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True)
    for layer, views in views_by_layer.items():
        for view, scores in views:
            (row,), window = view.rows, int(view.seen * 0.1)
            for head in range(2):
                for t in (2, 5, view.length - window - 1):
                    expected = gate(weights[layer], seen[layer][row, t - view.length], head)
                    assert float(scores[0, head, t]) == pytest.approx(expected, abs=1e-5)
                assert bool(scores[0, head, :2].isposinf().all())
                assert int(scores[0, head].isposinf().sum()) == 2 + window


@pytest.mark.parametrize("layerwise", [False, True])
def test_heads_and_layers_compete(layerwise: bool) -> None:
    press = kvpress.FastKVzipPress(0.5, layerwise, gates=path_of("gates", "llama"))
    with press(tiny_model("llama")) as session:
        tiny_model("llama").generate(tokens(2, 60), max_new_tokens=1)
    for row in range(2):
        sizes = [[len(head) for head in layer[row]] for layer in kvpress.kept_positions(session.cache)]
        assert sum(map(sum, sizes)) == 3 * 2 * 30
        assert (len({sum(layer) for layer in sizes}) == 1) == layerwise
        assert any(len(set(layer)) > 1 for layer in sizes)


def test_missing_and_foreign_gates_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = tiny_model("llama")
    with pytest.raises(ValueError, match="not loaded from a path"), kvpress.FastKVzipPress(0.5)(model):
        pass
    weights = torch.load(path_of("gates", "llama"), weights_only=True)["module"]
    weights[1]["b"] = torch.zeros(2, 1, 3)
    torch.save({"module": weights}, tmp_path / "gates.pt")
    press = kvpress.FastKVzipPress(0.5, gates=str(tmp_path / "gates.pt"))
    with pytest.raises(ValueError, match=r"tensor 'b' has shape \[2, 1, 3\].*gates of layer 1"), press(model):
        pass
    torch.save({"module": Path}, tmp_path / "gates.pt")
    with pytest.raises(ValueError, match="no plain tensors"), press(model):
        pass
    requests = []

    def download(repository: str, name: str) -> str:
        requests.append((repository, name))
        raise OSError("offline")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    monkeypatch.setattr(model.config, "name_or_path", "Qwen/Qwen3-8B")
    with pytest.raises(FileNotFoundError, match="offline"), kvpress.FastKVzipPress(0.5)(model):
        pass
    assert requests == [("Jang-Hyun/Fast-KVzip", "qwen3-8b/q2_dim16_sink16.pt")]
