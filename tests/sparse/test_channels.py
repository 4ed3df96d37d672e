# SPDX-License-Identifier: Apache-2.0
"""Channels in order of importance: calibration from all tokens, two file formats, and checks against the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvpress
from kvpress.calibrate import ChannelSettings, calibrate
from kvpress.cli import app
from kvpress.core import calibration as calibration
from kvpress.hf.models import facts_of
from kvpress.sparse.channels import ChannelTable, read_official
from tests.models import full_layers, tiny_model, tokens
from tests.projections import HEADS, KV_HEADS, projected

FAMILIES = ["llama", "qwen3", "phi3", "gemma3_text"]


@pytest.mark.parametrize("family", FAMILIES)
def test_statistics_are_means_over_all_tokens_of_all_sequences(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), tokens(3, 21)
    calibrated = calibrate(model, ids, ChannelSettings(), tmp_path / "channels.safetensors")
    assert sorted({int(name.split(".")[0]) for name in calibrated.tensors}) == full_layers(model)
    for layer in full_layers(model):
        seen = projected(model, ids, layer)
        product = seen["turned_q"] * seen["turned_k"].repeat_interleave(HEADS // KV_HEADS, dim=1)
        for name, vectors in {"q": seen["q"], "k": seen["k"], "qk": product}.items():
            assert calibrated.tensors[f"{layer}.{name}"].dtype == torch.float32
            torch.testing.assert_close(
                calibrated.tensors[f"{layer}.{name}"], vectors.abs().mean(dim=(0, 2)), atol=1e-5, rtol=1e-4
            )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Return files of one calibration of the llama model in both formats."""
    folder = tmp_path_factory.mktemp("channels")
    paths = folder / "a.safetensors", folder / "a.json"
    for path in paths:
        calibrate(tiny_model("llama"), tokens(2, 40), ChannelSettings(), path)
    return paths


def test_both_formats_have_the_same_order(files: tuple[Path, Path]) -> None:
    model = tiny_model("llama")
    statistics = calibration.read(files[0]).tensors
    content = json.loads(files[1].read_text())
    names = {f"model.layers.{i}.self_attn.{key}_proj" for i in range(3) for key in ("q", "k", "qk")}
    assert set(content) == names
    for key, heads in {"q": HEADS, "k": KV_HEADS, "qk": HEADS}.items():
        for layer, order in read_official(files[1], facts_of(model), key).items():
            assert order.dtype == torch.int64
            assert order.shape == (heads, 32)
            ranked = statistics[f"{layer}.{key}"].gather(1, order)
            assert (ranked[:, :-1] >= ranked[:, 1:]).all()
    # Keys have no group to aggregate over.
    for layer in range(3):
        channels = [ChannelTable.load(path, facts_of(model), key="k").of(layer, 32) for path in files]
        assert torch.equal(*channels)


def test_query_heads_of_a_group_share_channels(files: tuple[Path, Path], tmp_path: Path) -> None:
    model = tiny_model("llama")
    statistics = calibration.read(files[0]).tensors
    from_statistics = ChannelTable.load(files[0], facts_of(model))
    from_orders = ChannelTable.load(files[1], facts_of(model))
    content = json.loads(files[1].read_text())
    for layer in range(3):
        for head in range(KV_HEADS):
            group = range(head * 2, head * 2 + 2)
            total = sum(statistics[f"{layer}.qk"][g] for g in group)
            assert torch.equal(from_statistics.of(layer, 5)[head], total.topk(5).indices)
            orders = [content[f"model.layers.{layer}.self_attn.qk_proj"][g] for g in group]
            mean_rank = {channel: sum(order.index(channel) for order in orders) / 2 for channel in range(32)}
            best = sorted(range(32), key=lambda channel: (mean_rank[channel], channel))
            assert from_orders.of(layer, 5)[head].tolist() == best[:5]


def test_a_file_of_all_decoder_layers_serves_a_model_with_sliding_layers(tmp_path: Path) -> None:
    model, path = tiny_model("gemma3_text"), tmp_path / "all.json"
    order = torch.randperm(32).tolist()
    path.write_text(json.dumps({f"model.layers.{i}.self_attn.k_proj": [order, order] for i in range(3)}))
    channels = ChannelTable.load(path, facts_of(model), key="k")
    assert sorted(channels.orderings) == full_layers(model)
    assert channels.of(1, 4).tolist() == [order[:4]] * 2


def test_unsuitable_files_are_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    model, path = tiny_model("llama"), tmp_path / "bad.json"
    name = "model.layers.1.self_attn.qk_proj"

    def refused(change: Any, message: str) -> None:
        content = json.loads(files[1].read_text())
        change(content)
        path.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=message):
            ChannelTable.load(path, facts_of(model))

    refused(lambda content: content.pop(name), "'model.layers.1.self_attn.qk_proj' is in only one of the two")
    refused(lambda content: content.update({name.replace("1", "3"): content[name]}), "layers.3.* is for another model")
    refused(lambda content: content[name].pop(), r"expected 4 heads of 32 channels, got shape \[3, 32\]")
    refused(lambda content: content[name][2].pop(), "expected a list of 4 lists of 32 channels")
    refused(lambda content: content[name][2].__setitem__(0, content[name][2][1]), "head 2: channels must be 0 to 31")
    refused(lambda content: content[name][2].__setitem__(0, 0.5), "head 0: channels must be 0 to 31")
    path.write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        ChannelTable.load(path, facts_of(model))
    path.write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        ChannelTable.load(path, facts_of(model))
    for missing in ("no.json", "no.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"kvpress calibrate double_sparsity .*--out .*{missing}"):
            ChannelTable.load(tmp_path / missing, facts_of(model))
    with pytest.raises(ValueError, match="differs from this model in weights"):
        ChannelTable.load(files[0], facts_of(tiny_model("llama", seed=1)))
    with pytest.raises(ValueError, match="is a calibration for 'cq', not for 'double_sparsity'"):
        ChannelTable.load(calibration.shipped("cq-4c8b"), facts_of(model))
    with pytest.raises(ValueError, match="key must be one of"):
        ChannelTable.load(files[0], facts_of(model), key="v")
    channels = ChannelTable.load(files[0], facts_of(model))
    with pytest.raises(ValueError, match="r must be at most the head dim 32, got 33"):
        channels.of(0, 33)
    with pytest.raises(ValueError, match=r"layer 3 has no channels; layers with channels are 0, 1, 2"):
        channels.of(3, 1)


def test_the_command_writes_the_authors_format_and_the_reference_model_has_a_file(tmp_path: Path) -> None:
    out = tmp_path / "x.json"
    data = str(Path(kvpress.reference_path()) / "calibration.jsonl")
    arguments = ["calibrate", "double_sparsity", "--model", "reference", "--data", data, "--out", str(out),
                 "--sequences", "2", "--tokens", "64"]  # fmt: skip
    assert CliRunner().invoke(app, arguments).exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    model, _ = kvpress.load_model("reference")
    shipped = ChannelTable.load(calibration.shipped("double-sparsity"), facts_of(model))
    written = ChannelTable.load(out, facts_of(model))
    for layer in range(4):
        assert shipped.of(layer, 16).shape == written.of(layer, 16).shape == (2, 16)
    refused = CliRunner().invoke(app, [*arguments, "--no-fisher"])
    assert refused.exit_code == 2
    assert "No such option: --no-fisher" in " ".join(refused.output.split())
