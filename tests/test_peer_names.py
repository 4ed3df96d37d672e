# SPDX-License-Identifier: Apache-2.0
"""Objects that programs written for NVIDIA kvpress import besides its presses: networks, downloads, cache functions."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from kvpress.presses.duo_attention_press import PATTERNS_DICT, DuoAttentionPress
from kvpress.presses.fastkvzip_press import FastKVzipGate, FastKVzipPress
from kvpress.presses.kvzap_press import KVzapConfig, KVzapModel, KVzapPress
from kvpress.presses.lukv_press import LUKVPress, load_budget_curve
from torch import Tensor, nn
from transformers import DynamicCache
from transformers.cache_utils import QuantizedLayer

import kvpress
from kvpress import SUPPORTED_MODELS, patch_attention_functions
from kvpress.attention_patch import search_hyperplane
from kvpress.compat import published
from kvpress.utils import dequantize_layer, extract_keys_and_values
from tests.caches import positions, prefill
from tests.fuzz.models import path_of
from tests.models import tiny_model, tokens

LAYERS, HEADS, HIDDEN = 3, 2, 64


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Serve the temporary folder, with downloads allowed."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(tmp_path))) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}"
        web.shutdown()
        thread.join()


def gates() -> list[nn.Module]:
    """Return modules with the weights of the published file of the tests."""
    weights = torch.load(path_of("gates", "llama"), weights_only=True)["module"]
    modules: list[nn.Module] = []
    for layer, of_layer in enumerate(weights):
        heads, _, sink, size = of_layer["k_base"].shape
        module = FastKVzipGate(layer, HIDDEN, heads, 2, torch.float32, size, sink)
        module.load_state_dict(of_layer)
        modules.append(module)
    return modules


def test_gates_set_as_modules_keep_the_pairs_of_their_file() -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    expected = prefill(model, FastKVzipPress(0.5, gates=path_of("gates", "llama")), ids)

    class Loading(FastKVzipPress):
        def post_init_from_model(self, model: Any) -> None:
            self.gates = gates()

    press = Loading(0.5)
    for _ in range(2):
        assert positions(prefill(model, press, ids)) == positions(expected)
    assert isinstance(press.gates[0], FastKVzipGate)
    wide = [FastKVzipGate(layer, HIDDEN, HEADS, 4, torch.float32, 8) for layer in range(LAYERS)]
    with pytest.raises(ValueError, match=r"tensor 'q_proj.weight' has shape \[64, 64\], expected \[32, 64\]"):
        prefill(model, FastKVzipPress(0.5, gates=wide), ids)


def test_a_gate_returns_a_share_for_each_head_and_token() -> None:
    module, hidden = gates()[1], torch.randn(2, 5, HIDDEN)
    scores = module(hidden)
    assert scores.shape == (2, HEADS, 5)
    assert bool(((scores > 0) & (scores < 1)).all())
    torch.testing.assert_close(module(hidden[1:, 3:4])[0, :, 0], scores[1, :, 3])
    with pytest.raises(ValueError, match="ngroup must be at least 1, got 0"):
        FastKVzipGate(0, HIDDEN, HEADS, 0, torch.float32)


@pytest.mark.parametrize("width", [None, 16])
def test_kvzap_models_serve_in_memory_and_as_a_folder(width: int | None, tmp_path: Path) -> None:
    torch.manual_seed(3)
    networks = KVzapModel(KVzapConfig(input_dim=HIDDEN, output_dim=HEADS, n_modules=LAYERS, hidden_dim=width))
    networks.save_pretrained(tmp_path)
    hidden = torch.randn(4, LAYERS, HIDDEN)
    again = KVzapModel.from_pretrained(tmp_path)
    torch.testing.assert_close(again(hidden), networks(hidden))
    assert networks(hidden).shape == (4, LAYERS, HEADS)
    model, ids = tiny_model("llama"), tokens(2, 40)
    press = KVzapPress(0.5)
    press.kvzap_model = networks
    file = prefill(model, KVzapPress(0.5, "linear" if width is None else "mlp", weights=str(tmp_path)), ids)
    cache = prefill(model, press, ids)
    assert positions(cache) == positions(file) == positions(copy.deepcopy(cache))
    press.weights = str(tmp_path)
    with pytest.raises(ValueError, match="set either weights or kvzap_model"):
        prefill(model, press, ids)


def test_budget_curves_are_downloaded(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    curve = np.random.default_rng(0).random((99, LAYERS, HEADS))
    np.save(tmp_path / "curve.npy", curve)
    assert np.array_equal(load_budget_curve(f"{server}/curve.npy"), curve)
    assert LUKVPress(kvpress.KnormPress(0.5), curve=tmp_path / "curve.npy").curve
    (tmp_path / "text.npy").write_text("no array")
    with pytest.raises(ValueError, match=r"text\.npy is no \.npy file of numbers"):
        load_budget_curve(f"{server}/text.npy")
    with pytest.raises(OSError, match=r"cannot download .*404"):
        load_budget_curve(f"{server}/missing.npy")
    with pytest.raises(ValueError, match="must begin with http"):
        load_budget_curve("file:///curve.npy")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OSError, match="HF_HUB_OFFLINE is set"):
        load_budget_curve(f"{server}/curve.npy")


def test_the_authors_patterns_are_downloaded(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, name = copy.copy(tiny_model("llama")), "mistralai/Mistral-7B-Instruct-v0.3"
    model.config = copy.copy(model.config)
    model.config.name_or_path = name
    for layer in model.model.layers:
        monkeypatch.setattr(layer.self_attn, "config", model.config)
    monkeypatch.setattr(published, "PATTERNS", server)
    monkeypatch.setitem(PATTERNS_DICT, name, "pattern")
    press = DuoAttentionPress(0.5)
    with pytest.raises(ValueError, match=r"which heads of \w+ stream \(cannot download"):
        prefill(model, press, tokens(1, 40))
    folder = tmp_path / "pattern"
    folder.mkdir()
    (folder / "config.json").write_text('{"sink_size": 2, "recent_size": 6}')
    (folder / "full_attention_heads.tsv").write_text("0.9\t0.1\n0.2\t0.8\n0.3\t0.4\n")
    kept = [[len(head) for head in layer[0]] for layer in positions(prefill(model, press, tokens(1, 40)))]
    assert kept == [[40, 8], [8, 40], [8, 40]]


def test_an_override_that_loads_a_pattern_chooses_the_heads() -> None:
    class OwnPattern(DuoAttentionPress):
        @staticmethod
        def load_attention_pattern(model: Any) -> tuple[int, int, np.ndarray]:
            assert model.config.num_hidden_layers == LAYERS
            return 3, 5, np.array([[0.1, 0.9], [0.8, 0.7], [0.6, 0.2]])

    cache = prefill(tiny_model("llama"), OwnPattern(0.5), tokens(1, 40))
    assert [[len(head) for head in layer[0]] for layer in positions(cache)] == [[8, 40], [40, 40], [8, 8]]


class Halved(QuantizedLayer):
    """Quantised layer of transformers whose codes are halves of the numbers."""

    def _quantize(self, tensor: Tensor, axis: int) -> Tensor:
        return tensor / 2

    def _dequantize(self, codes: Tensor) -> Tensor:
        return codes * 2


def test_quantised_layers_are_decoded() -> None:
    layer, keys, values = Halved(), torch.randn(1, 2, 5, 8), torch.randn(1, 2, 5, 8)
    layer.update(keys, values)
    for decoded, expected in zip(dequantize_layer(layer), (keys, values), strict=True):
        torch.testing.assert_close(decoded, expected)
    cache = DynamicCache()
    with kvpress.KIVIPress(8, residual_length=0)(tiny_model("llama")):
        tiny_model("llama")(tokens(1, 64), past_key_values=cache)
    keys, values = extract_keys_and_values(cache, 1)
    assert keys.shape == values.shape == (1, 2, 64, 32)


def test_names_of_the_package() -> None:
    assert patch_attention_functions is kvpress.attention_patch.patch_attention_functions
    assert type(tiny_model("llama")) in SUPPORTED_MODELS
    assert "SUPPORTED_MODELS" not in kvpress.__all__


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_hyperplanes_are_finite_keys_of_the_queries_type(dtype: torch.dtype) -> None:
    queries = (torch.randn(3, 7, 32, generator=torch.Generator().manual_seed(1)) * 1e-3 + 2e-3).to(dtype)
    keys = search_hyperplane(queries)
    assert keys.dtype == dtype
    assert bool(keys.isfinite().all())
    assert bool((torch.einsum("bnd,bd->bn", queries.double(), keys.double()) < 0).all())
