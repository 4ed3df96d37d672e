# SPDX-License-Identifier: Apache-2.0
"""Checks of calibration files: errors name damage, missing tensors, wrong shapes and NaN."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

import kvpress
from kvpress.calibrate import (
    ChannelSettings,
    CoupledSettings,
    EnergySettings,
    FastKVzipSettings,
    FilterSettings,
    KeyDirectionSettings,
    KVzapSettings,
    LevelSettings,
    LUKVSettings,
    PredictorSettings,
    QuerySettings,
    RotationSettings,
    calibrate,
)
from kvpress.calibrate.run import FinishedLayers
from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration, digest_of
from kvpress.plan import Geometry, plan
from tests.models import tiny_model, tokens

SETTINGS = {
    "aquakv": PredictorSettings(iterations=2),
    "block_gtq": EnergySettings(),
    "cq": CoupledSettings((4, 4), (2, 2), fisher=False, iterations=2),
    "double_sparsity": ChannelSettings(),
    "expected_attention": QuerySettings(),
    "fastkvzip": FastKVzipSettings(steps=2, width=3, bases=2),
    "kvquant": LevelSettings(fisher=False, iterations=2),
    "kvzap": KVzapSettings(steps=2, width=3),
    "loki": KeyDirectionSettings(),
    "lukv": LUKVSettings("knorm"),
    "oscar": RotationSettings(),
    "qfilter": FilterSettings(),
}
SPECS = {
    "aquakv": "aquakv:bits=2,calibration='{}'",
    "block_gtq": "block_gtq:bits=2,calibration='{}'",
    "cq": "cq:coupled=4,bits=2,calibration='{}'",
    "double_sparsity": "double_sparsity:calibration='{}'",
    "expected_attention": "expected_attention_stats:0.5,stats_folder='{}'",
    "fastkvzip": "fastkvzip:0.5,gates='{}'",
    "kvquant": "kvquant:bits=2,calibration='{}'",
    "kvzap": "kvzap:0.5,weights='{}'",
    "loki": "loki:calibration='{}'",
    "lukv": "lukv(knorm:0.5):curve='{}'",
    "oscar": "oscar:bits=2,calibration='{}'",
    "qfilter": "qfilter:0.5,filters='{}'",
}
TENSOR = {
    "aquakv": "2.weight.2",
    "block_gtq": "2.queries",
    "cq": "2.keys",
    "double_sparsity": "2.qk",
    "expected_attention": "2.covariance",
    "fastkvzip": "2.k_base",
    "kvquant": "2.values.2",
    "kvzap": "2.2.weight",
    "loki": "2.rotated",
    "lukv": "2.curve",
    "oscar": "2.keys",
    "qfilter": "2.filter",
}
each_method = pytest.mark.parametrize("method", SETTINGS)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    paths = {method: tmp_path_factory.mktemp(method) / "made.safetensors" for method in SETTINGS}
    for method, path in paths.items():
        calibrate(tiny_model("llama"), tokens(2, 40), SETTINGS[method], path)
    return paths


def refused(method: str, path: Path, *words: str) -> None:
    """Assert that a press raises an error before the model runs, with the file, the `words` and the command."""
    with (
        pytest.raises(ValueError, match=re.escape(str(path))) as raised,
        kvpress.get_press(SPECS[method].format(path))(tiny_model("llama")),
    ):
        pytest.fail("the press was installed")
    for word in (*words, f"kvpress calibrate {method} --model ... --data ... --out {path}"):
        assert word in str(raised.value)


def write(path: Path, tensors: dict[str, torch.Tensor], provenance: Any) -> Path:
    """Write a file with a correct digest of any contents."""
    text = json.dumps(provenance)
    path.write_bytes(
        save(tensors, {"format": str(calibration.FORMAT), "provenance": text, "sha256": digest_of(tensors, text)})
    )
    return path


@each_method
def test_an_undamaged_file_works(method: str, files: dict[str, Path]) -> None:
    with kvpress.get_press(SPECS[method].format(files[method]))(tiny_model("llama")) as session:
        session.model.generate(tokens(1, 60), max_new_tokens=2)


@each_method
@pytest.mark.parametrize("at", [0.0, 0.5, 0.9, 0.999])
def test_one_flipped_bit_of_the_tensors_is_detected(
    method: str, at: float, files: dict[str, Path], tmp_path: Path
) -> None:
    content = bytearray(files[method].read_bytes())
    data = 8 + int.from_bytes(content[:8], "little")
    content[data + int(at * (len(content) - data))] ^= 1
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes(content)
    refused(method, damaged, "is damaged: its contents have the SHA-256")


def test_a_damaged_header_is_detected_or_harmless(files: dict[str, Path], tmp_path: Path) -> None:
    original, damaged = files["double_sparsity"].read_bytes(), tmp_path / "damaged.safetensors"
    header = json.loads(original[8 : 8 + int.from_bytes(original[:8], "little")])
    expected = calibration.read(files["double_sparsity"])
    for i in range(0, 8 + len(json.dumps(header, separators=(",", ":"))), 7):
        content = bytearray(original)
        content[i] ^= 1
        damaged.write_bytes(content)
        calibration._read.cache_clear()
        with contextlib.suppress(ValueError):
            # A change of white space does not change the contents.
            loaded = calibration.read(damaged)
            assert loaded.provenance == expected.provenance
            assert all(torch.equal(loaded.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.parametrize("content", [b"", b"x", b"\0" * 8, b"\xff" * 64], ids=["empty", "one byte", "zeros", "ones"])
def test_files_that_are_not_safetensors_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "books.safetensors"
    path.write_bytes(content)
    refused("cq", path, "is not a readable safetensors file")


def without(tensors: dict[str, torch.Tensor], name: str) -> None:
    del tensors[name]


def shorter(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name][:-1].contiguous()


def integers(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name] = tensors[name].long()


@each_method
@pytest.mark.parametrize(
    ("change", "message"),
    [(without, "is missing"), (shorter, "is float"), (integers, "is int64")],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_errors_name_missing_and_misshapen_tensors(
    method: str, change: Callable[..., None], message: str, files: dict[str, Path], tmp_path: Path
) -> None:
    original = calibration.read(files[method])
    tensors, name = dict(original.tensors), TENSOR[method]
    change(tensors, name)
    path = write(tmp_path / "made.safetensors", tensors, original.provenance)
    refused(
        method, path, f"tensor '{name}' {message}", f"expected numbers of shape {list(original.tensors[name].shape)}"
    )


@each_method
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_numbers_that_are_not_finite_are_refused(
    method: str, value: float, files: dict[str, Path], tmp_path: Path
) -> None:
    original = calibration.read(files[method])
    tensors, name = dict(original.tensors), TENSOR[method]
    tensors[name] = tensors[name].clone()
    tensors[name].flatten()[-1] = value
    path = write(tmp_path / "made.safetensors", tensors, original.provenance)
    refused(method, path, f"holds NaN or infinite numbers in tensor {name!r}")
    with pytest.raises(FloatingPointError, match=f"tensor '{name}' holds NaN or infinite numbers"):
        Calibration(tensors, original.provenance).write(tmp_path / "again.safetensors")
    assert not (tmp_path / "again.safetensors").exists()


@each_method
def test_the_error_for_another_methods_file_names_both_methods(method: str, files: dict[str, Path]) -> None:
    another = next(name for name in SETTINGS if name != method)
    refused(method, files[another], f"is a calibration for {another!r}, not for {method!r}")


def test_a_file_without_provenance_is_refused(files: dict[str, Path], tmp_path: Path) -> None:
    original = calibration.read(files["cq"])
    for missing in ("method", "settings", "model"):
        provenance = {name: value for name, value in original.provenance.items() if name != missing}
        refused(
            "cq",
            write(tmp_path / f"{missing}.safetensors", original.tensors, provenance),
            f"has no {missing} in its provenance",
        )
    path = tmp_path / "plain.safetensors"
    path.write_bytes(save(original.tensors))
    refused("cq", path, "is not a calibration of this version: format None")


def test_a_file_that_changes_is_read_again(files: dict[str, Path], tmp_path: Path) -> None:
    original, path = calibration.read(files["cq"]), tmp_path / "made.safetensors"
    for scale in (1.0, 2.0):
        Calibration({name: scale * tensor for name, tensor in original.tensors.items()}, original.provenance).write(
            path
        )
        assert torch.equal(calibration.read(path).tensors["0.keys"], scale * original.tensors["0.keys"])


def test_a_damaged_layer_of_a_stopped_run_is_fitted_again(tmp_path: Path) -> None:
    provenance = {"method": "x", "settings": {}, "model": {}}
    finished = FinishedLayers(tmp_path / "parts", provenance)
    for layer in (0, 1):
        finished.write(layer, {"mean": torch.ones(3)})
    (tmp_path / "parts" / "000.safetensors").write_bytes(b"torn")
    reopened = FinishedLayers(tmp_path / "parts", provenance)
    assert [reopened.has(layer) for layer in (0, 1)] == [False, True]


@pytest.mark.parametrize(
    "name",
    sorted(file.stem for file in calibration.shipped("any").parent.glob("*.safetensors") if file.stem != "model"),
)
def test_shipped_files_are_undamaged(name: str) -> None:
    assert calibration.read(calibration.shipped(name)).provenance["model"]["name"] == "reference"


def test_a_plan_refuses_codebooks_of_another_model(files: dict[str, Path]) -> None:
    press = kvpress.get_press(SPECS["cq"].format(files["cq"]))
    assert plan(press, Geometry.of(tiny_model("llama").config), 400).factor > 2
    config, _ = kvpress.load_model("reference")
    with pytest.raises(ValueError, match=r"differs from this model in layers 3 \(here 4\)"):
        plan(press, Geometry.of(config.config), 400)
