# SPDX-License-Identifier: Apache-2.0
"""Presses fetch what authors publish for a model where nothing is given, from a local fake of the hub."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file

import kvpress
from kvpress.compat import published
from kvpress.core import calibration
from kvpress.hf.models import facts_of
from kvpress.presses import learned, lukv
from tests.caches import positions, prefill
from tests.fuzz.models import path_of
from tests.models import tiny_model, tokens

COMMIT = "0" * 40
LAYERS, HEADS, GROUP, DIM, HIDDEN = 3, 2, 2, 32, 64


@dataclass
class Hub:
    """A server of files with the addresses of the hub."""

    folder: Path
    """Its files, `owner/name/file`."""
    address: str = ""
    """Its address."""
    requests: list[str] = field(default_factory=list)
    """Method and path of each request for a file."""

    def put(self, name: str) -> Path:
        """Return the path of a new file."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        return path


class Handler(SimpleHTTPRequestHandler):
    hub: Hub

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, body: bool) -> None:
        if not self.path.startswith("/api/"):  # the client's own
            self.hub.requests.append(f"{self.command} {self.path}")
        path = self.hub.folder / self.path.lstrip("/").replace("/resolve/main/", "/").replace(
            f"/resolve/{COMMIT}/", "/"
        )
        if not path.is_file():
            self.send_response(404)
            self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        content = path.read_bytes()
        self.send_response(200)
        self.send_header("X-Repo-Commit", COMMIT)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if body:
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """Serve an empty hub, with its own folder of downloads, and let every request reach it only."""
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(Handler, "hub", hub, raising=False)
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as web:
        thread = threading.Thread(target=web.serve_forever, daemon=True)
        thread.start()
        hub.address = f"http://127.0.0.1:{web.server_port}"
        for name, value in {
            "HF_HUB_OFFLINE": False,
            "ENDPOINT": hub.address,
            "HUGGINGFACE_CO_URL_TEMPLATE": hub.address + "/{repo_id}/resolve/{revision}/{filename}",
            "HF_HUB_CACHE": str(tmp_path / "downloads"),
        }.items():
            monkeypatch.setattr(constants, name, value)
        monkeypatch.setattr(learned, "env", SimpleNamespace(cache_dirs=lambda: [tmp_path / "cache"]))
        monkeypatch.setattr(published, "PATTERNS", f"{hub.address}/patterns")
        monkeypatch.setattr(lukv, "PUBLISHED", f"{hub.address}/lukv/curve.npy")
        learned._downloaded.cache_clear()
        yield hub
        web.shutdown()
        thread.join()
    learned._downloaded.cache_clear()


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Return a function that gives a tiny model the name of a published one."""

    def named(name: str) -> Any:
        network = tiny_model("llama")
        monkeypatch.setattr(network.config, "name_or_path", name)
        return network

    return named


def statistics() -> dict[str, torch.Tensor]:
    """Return random statistics in the authors' format."""
    generator = torch.Generator().manual_seed(1)
    mean = torch.randn(LAYERS, HEADS * GROUP, DIM, generator=generator)
    factors = torch.randn(LAYERS, HEADS * GROUP, DIM, DIM, generator=generator) / DIM
    return {"query_mean": mean, "query_cov": factors @ factors.mT}


def test_expected_attention_statistics(hub: Hub, model: Any, tmp_path: Path) -> None:
    network, ids, tensors = model("meta-llama/Llama-3.1-8B-Instruct"), tokens(2, 40), statistics()
    repository = "alessiodevoto/exp_att_stats_meta-llama_Llama-3.1-8B-Instruct_kmfoda_booksum_100_1000_4"
    save_file(tensors, hub.put(f"{repository}/model.safetensors"))
    kept = positions(prefill(network, kvpress.ExpectedAttentionStatsPress(0.5), ids))
    assert sum(request.startswith("GET") for request in hub.requests) == 1
    count = len(hub.requests)
    given = kvpress.ExpectedAttentionStatsPress(0.5, stats_folder=str(hub.folder / repository))
    assert positions(prefill(network, given, ids)) == kept
    assert positions(prefill(network, kvpress.ExpectedAttentionStatsPress(0.5, stats_folder=repository), ids)) == kept
    assert len(hub.requests) == count
    assert kept != positions(prefill(network, kvpress.ExpectedAttentionPress(0.5), ids))
    # The same numbers as a calibrated file of our own keep the same pairs.
    own = load_file(path_of("statistics", "llama"))
    for layer in range(LAYERS):
        own[f"{layer}.mean"], own[f"{layer}.covariance"] = tensors["query_mean"][layer], tensors["query_cov"][layer]
    calibrated = calibration.read(path_of("statistics", "llama"))
    provenance = {**calibrated.provenance, "model": calibration.identify(facts_of(network))}
    calibration.Calibration(own, provenance).write(tmp_path / "own.safetensors")
    press = kvpress.ExpectedAttentionStatsPress(0.5, stats_folder=str(tmp_path / "own.safetensors"))
    assert positions(prefill(network, press, ids)) == kept


def test_other_samples_are_other_repositories_and_missing_ones_are_named(hub: Hub, model: Any) -> None:
    network = model("some/Model-8B")
    press = kvpress.ExpectedAttentionStatsPress(0.5, n_sink=2, num_samples=50, sample_seq_len=2000, dataset_name="a/b")
    with pytest.raises(FileNotFoundError, match="'alessiodevoto/exp_att_stats_some_Model-8B_a_b_50_2000_2' cannot be"):
        prefill(network, press, tokens(1, 40))
    save_file(
        {**statistics(), "query_mean": torch.zeros(LAYERS, HEADS, DIM)},
        hub.put("alessiodevoto/exp_att_stats_some_Model-8B_kmfoda_booksum_100_1000_4/model.safetensors"),
    )
    with pytest.raises(ValueError, match=r"'query_mean' has shape \[3, 2, 32\], expected \[3, 4, 32\]"):
        prefill(network, kvpress.ExpectedAttentionStatsPress(0.5), tokens(1, 40))


def test_filters(hub: Hub, model: Any) -> None:
    network, ids = model("meta-llama/Meta-Llama-3.1-8B-Instruct"), tokens(2, 40)
    file = hub.put("nthngdy/Llama-3.1-8B-Instruct_qfilt/model.safetensors")
    save_file({"q_filters": torch.randn(LAYERS, HEADS, DIM, generator=torch.Generator().manual_seed(2))}, file)
    kept = positions(prefill(network, kvpress.QFilterPress(0.5), ids))
    assert kept == positions(prefill(network, kvpress.QFilterPress(0.5, filters=str(file)), ids))
    assert len(hub.requests) == 2


@pytest.mark.parametrize("kind", ["mlp", "linear"])
def test_networks(kind: Any, hub: Hub, model: Any) -> None:
    network, ids = model("Qwen/Qwen3-8B"), tokens(2, 40)
    file = hub.put(f"nvidia/KVzap-{kind}-Qwen3-8B/model.safetensors")
    generator = torch.Generator().manual_seed(3)
    shapes = {"": (HEADS, HIDDEN)} if kind == "linear" else {".0": (8, HIDDEN), ".2": (HEADS, 8)}
    save_file(
        {
            f"layers.{layer}{name}.{part}": torch.randn(shape if part == "weight" else shape[:1], generator=generator)
            for layer in range(LAYERS)
            for name, shape in shapes.items()
            for part in ("weight", "bias")
        },
        file,
    )
    press = kvpress.KVzapPress(0.5, kind)
    with press(network) as session:
        network.generate(ids, max_new_tokens=4, do_sample=False)
    kept = positions(session.cache)
    assert len(hub.requests) == 2  # though every token is scored in every layer
    with kvpress.KVzapPress(0.5, kind, weights=str(file))(network) as session:
        network.generate(ids, max_new_tokens=4, do_sample=False)
    assert positions(session.cache) == kept


def test_gates(hub: Hub, model: Any) -> None:
    network, ids = model("Qwen/Qwen3-8B"), tokens(2, 40)
    file = path_of("gates", "llama")
    weights = torch.load(file, weights_only=True)
    torch.save(weights, hub.put(f"Jang-Hyun/Fast-KVzip/qwen3-8b/q{GROUP}_dim16_sink16.pt"))
    kept = positions(prefill(network, kvpress.FastKVzipPress(0.5), ids))
    assert kept == positions(prefill(network, kvpress.FastKVzipPress(0.5, gates=file), ids))
    assert len(hub.requests) == 2


def test_learned_tokens(hub: Hub, model: Any) -> None:
    network, ids = model("some/Model-8B"), tokens(2, 40)
    folder, generator = hub.folder / "higokri/RestoreKV-Model-8B", torch.Generator().manual_seed(4)
    hub.put("higokri/RestoreKV-Model-8B/adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]})
    )
    save_file(
        {"restore_embeddings": torch.randn(3, HIDDEN, generator=generator)}, folder / "restore_embeddings.safetensors"
    )
    lora = {
        f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_{side}.weight": torch.randn(
            shape, generator=generator
        )
        for layer in range(LAYERS)
        for side, shape in (("A", (2, HIDDEN)), ("B", (HEADS * GROUP * DIM, 2)))
    }
    save_file(lora, folder / "adapter_model.safetensors")
    kept = positions(prefill(network, kvpress.RestoreKVPress(0.5, repeat_prompt=""), ids))
    given = kvpress.RestoreKVPress(0.5, repeat_prompt="", adapter=str(folder))
    assert kept == positions(prefill(network, given, ids))
    assert sum(request.startswith("GET") for request in hub.requests) == 3


def test_retrieval_scores(hub: Hub, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "mistralai/Mistral-7B-Instruct-v0.3"
    monkeypatch.setitem(published.PATTERNS_DICT, name, "mistral")
    hub.put("patterns/mistral/config.json").write_text('{"sink_size": 2, "recent_size": 6}')
    hub.put("patterns/mistral/full_attention_heads.tsv").write_text("0.9\t0.1\n0.2\t0.8\n0.3\t0.4\n")
    cache = prefill(model(name), kvpress.DuoAttentionPress(0.5), tokens(1, 40))
    assert [[len(head) for head in layer[0]] for layer in positions(cache)] == [[40, 8], [8, 40], [8, 40]]


def test_budget_curves(hub: Hub, model: Any, tmp_path: Path) -> None:
    network, ids = model("meta-llama/Llama-3.1-8B-Instruct"), tokens(2, 60)
    ratios = np.arange(1, 100)[:, None, None] / 100
    tilt = np.linspace(-1, 1, LAYERS * HEADS).reshape(LAYERS, HEADS)
    file = hub.put("lukv/curve.npy")
    file.write_text("not found")
    with pytest.raises(ValueError, match=r"is no \.npy file of numbers"):
        prefill(network, kvpress.LUKVPress(compression_ratio=0.5), ids)
    np.save(file, ratios + 0.6 * tilt * ratios * (1 - ratios))
    kept = positions(prefill(network, kvpress.LUKVPress(compression_ratio=0.5), ids))
    assert kept == positions(prefill(network, kvpress.LUKVPress(compression_ratio=0.5, curve=file), ids))
    assert len({len(head) for layer in kept for head in layer[0]}) > 1
    requests = len(hub.requests)
    file.unlink()
    assert positions(prefill(network, kvpress.LUKVPress(compression_ratio=0.5), ids)) == kept
    assert len(hub.requests) == requests
    assert [path.parent.name for path in (tmp_path / "cache").rglob("*.npy")] == ["published"]


@pytest.mark.parametrize(
    ("press", "words"),
    [
        (kvpress.LUKVPress(kvpress.KnormPress(), 0.5), "with knorm, sink=4 and window=1"),
        (kvpress.LUKVPress(compression_ratio=0.5, sink=8), "sink=8 and window=1"),
    ],
)
def test_a_curve_of_other_settings_is_not_taken(press: Any, words: str, hub: Hub, model: Any) -> None:
    with pytest.raises(ValueError, match=f"the only published one is for Llama-3.1-8B .*{words}"):
        prefill(model("meta-llama/Llama-3.1-8B"), press, tokens(1, 40))
    assert not hub.requests


def test_without_the_network_the_error_names_the_file_and_the_way(
    hub: Hub, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = model("meta-llama/Llama-3.1-8B")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(FileNotFoundError, match=r"HF_HUB_OFFLINE is set, so .*curve\.npy is not downloaded"):
        prefill(network, kvpress.LUKVPress(compression_ratio=0.5), tokens(1, 40))
