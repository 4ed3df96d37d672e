# SPDX-License-Identifier: Apache-2.0
"""Calibration: deterministic, resumable, with its provenance in the file."""

from __future__ import annotations

import dataclasses
import errno
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from typer.testing import CliRunner

import kvpress
from kvpress.calibrate import CoupledSettings, LevelSettings, calibrate, coupled, methods
from kvpress.calibrate.corpus import documents, pack
from kvpress.calibrate.listing import listed_methods
from kvpress.calibrate.pairs import PairRecorder, balance
from kvpress.calibrate.run import collect
from kvpress.cli import app
from kvpress.core import calibration as calibration
from kvpress.hf.models import facts_of
from tests.models import tiny_model, tokens

SETTINGS = CoupledSettings((4, 4), (2, 2), iterations=3)


def test_the_command_lists_every_method_with_its_settings() -> None:
    """The table is parsed from the sources, without an import of torch."""
    table, classes = listed_methods(), methods()
    assert set(table) == set(classes)
    for name, method in table.items():
        settings = classes[name]()
        assert {item.name: item.default for item in method.settings} == {
            field.name: getattr(settings, field.name) for field in dataclasses.fields(settings)
        }
        assert method.summary == str(classes[name].__doc__).partition("\n")[0]
        assert all(item.help for item in method.settings), f"a setting of {name} has no docstring"


def observed(model: Any, ids: torch.Tensor, layers: list[int], settings: CoupledSettings) -> dict[int, PairRecorder]:
    return collect(model, ids, layers, settings, lambda unit, done, total: None)  # type: ignore[return-value]


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text"])
def test_recorded_keys_are_unrotated_and_weights_are_squared_gradients(family: str) -> None:
    model, ids = tiny_model(family), tokens(1, 30)
    layers = [1, 2]
    records = observed(model, ids, layers, CoupledSettings())
    outputs: dict[int, torch.Tensor] = {}
    hooks = []
    for layer in layers:
        attention = model.get_decoder().layers[layer].self_attn
        projection = attention.v_proj if hasattr(attention, "v_proj") else attention.qkv_proj

        def keep(_: Any, __: Any, out: torch.Tensor, layer: int = layer) -> None:
            out.retain_grad()
            outputs[layer] = out

        hooks.append(projection.register_forward_hook(keep))
    with torch.enable_grad():
        model(ids, labels=ids).loss.backward()
    model.zero_grad()
    for hook in hooks:
        hook.remove()
    for layer, out in outputs.items():
        size = 2 * records[layer].values[0].shape[-1]
        expected = out[0, 4:, -size:].unflatten(-1, (2, -1))
        gradient = out.grad[0, 4:, -size:].unflatten(-1, (2, -1))
        torch.testing.assert_close(records[layer].values[0], expected.detach())
        torch.testing.assert_close(records[layer].value_weights[0], gradient.square(), rtol=1e-3, atol=1e-12)
        # In the first layer, the unrotated key of a token does not depend on its position.
    first = observed(model, torch.full((1, 20), 7), model_layers(model)[:1], CoupledSettings(fisher=False))
    keys = next(iter(first.values())).keys
    if family != "gemma3_text":
        torch.testing.assert_close(keys[0][3], keys[0][12], atol=1e-4, rtol=1e-4)
    assert all(parameter.requires_grad for parameter in model.parameters())


def model_layers(model: Any) -> list[int]:
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * model.config.num_hidden_layers
    return [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]


def assert_same_books(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Compare up to the last digit of float16: a matrix product may round differently from run to run."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=2e-3, atol=1e-4)


def test_a_run_is_reproducible_and_records_its_provenance(tmp_path: Path) -> None:
    model, ids = tiny_model("llama"), tokens(2, 40)
    first, second = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    for path in (first, second):
        calibrate(model, ids, SETTINGS, path, source="random")
    a, b = calibration.read(first), calibration.read(second)
    assert a.provenance == b.provenance
    assert_same_books(a.tensors, b.tensors)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.safetensors", "b.safetensors"]
    result = calibration.read(first)
    assert result.provenance["data"]["source"] == "random"
    assert result.provenance["settings"]["coupled"] == [4, 4]
    assert result.provenance["model"]["architecture"] == "LlamaForCausalLM"
    assert result.tensors["2.keys"].shape == (2, 8, 4, 4)
    with safe_open(first, framework="pt") as file:
        json.loads(file.metadata()["provenance"])


def test_a_stopped_run_continues_with_the_missing_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids, out = tiny_model("llama"), tokens(2, 40), tmp_path / "books.safetensors"
    expected = calibrate(model, ids, SETTINGS, tmp_path / "whole.safetensors")
    fit, fitted = coupled.fit_books, []

    def stop_after_one(record: Any, settings: Any) -> Any:
        if fitted:
            raise KeyboardInterrupt
        fitted.append(1)
        return fit(record, settings)

    monkeypatch.setattr(coupled, "fit_books", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, ids, SETTINGS, out)
    assert not out.exists()
    fitted_later: list[int] = []
    monkeypatch.setattr(coupled, "fit_books", lambda record, settings: fitted_later.append(1) or fit(record, settings))
    with pytest.raises(ValueError, match="holds layers of a run with another model, data or settings"):
        calibrate(model, tokens(2, 40, seed=9), SETTINGS, out)
    resumed = calibrate(model, ids, SETTINGS, out)
    assert len(fitted_later) == 2
    assert_same_books(resumed.tensors, expected.tensors)


@pytest.mark.parametrize(
    "sequences",
    [tokens(2, 40)[0], tokens(2, 40).float(), tokens(2, 40).tolist()],
    ids=["one row", "float32", "list"],
)
def test_sequences_must_be_token_ids(sequences: Any, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"sequences must be token ids, a tensor \[S, T\] of integers, got"):
        calibrate(tiny_model("llama"), sequences, SETTINGS, tmp_path / "books")
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="is a folder: pass the name of a file as out"):
        calibrate(tiny_model("llama"), tokens(2, 40), SETTINGS, tmp_path)
    monkeypatch.setattr(
        "kvpress.hf.generation.pipeline.load_model", lambda *args, **kwargs: pytest.fail("it was loaded")
    )
    given = ["calibrate", "cq", "--model", "reference", "--data", "x", "--force", "--out"]
    refused = CliRunner().invoke(app, [*given, str(tmp_path)])
    assert refused.exit_code == 4
    assert f"{tmp_path} is a folder: pass the name of a file" in refused.output.replace("\n", "")
    assert not list(tmp_path.iterdir())
    file = tmp_path / "file"
    file.touch()
    refused = CliRunner().invoke(app, [*given, str(file / "books")])
    assert refused.exit_code == 4
    assert f"cannot write {file}/books: {file} is a file; name another --out" in refused.output.replace("\n", "")


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(number: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("kvpress.atomic.os.fsync", full)
    text = tmp_path / "text.txt"
    text.write_text("The old river runs. " * 20)
    options = ["--model", "reference", "--data", str(text), "--sequences", "1", "--tokens", "16"]
    out = tmp_path / "filters.safetensors"
    done = CliRunner().invoke(app, ["calibrate", "qfilter", *options, "--out", str(out)])
    assert done.exit_code == 7
    assert f"no space left for {out}: No space left on device; free some" in done.output.replace("\n", "")
    assert not list(tmp_path.rglob("*.part"))


def test_the_command_refuses_sequences_that_are_too_short_before_it_loads_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "kvpress.hf.generation.pipeline.load_model", lambda *args, **kwargs: pytest.fail("it was loaded")
    )
    given = [
        "calibrate",
        "leank",
        "--model",
        "reference",
        "--data",
        "x",
        "--out",
        str(tmp_path / "x"),
        "--tokens",
        "1k",
    ]
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 2
    message = "leank needs sequences of 1217 tokens or more with these settings, got 1024: pass --tokens 1217"
    assert message in " ".join(refused.output.split())


def test_weights_are_clipped_and_scaled() -> None:
    balanced = balance(torch.cat([torch.ones(1999), torch.tensor([1e9])]))
    torch.testing.assert_close(balanced, torch.ones(2000))
    torch.testing.assert_close(balance(torch.zeros(1, 5)), torch.ones(1, 5))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (CoupledSettings(4), "coupled must be two integers, for keys and for values, such as .4, 4., got 4"),
        (CoupledSettings((4, 4), bits=(8,)), "bits must be two integers"),
        (CoupledSettings((4, 4.0)), "coupled must be two integers"),
        (CoupledSettings(seed=-1), "seed must be >= 0"),
    ],
)
def test_pairs_of_settings_are_checked_before_the_model_reads(
    settings: CoupledSettings, message: str, tmp_path: Path
) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        calibrate(tiny_model("llama"), tokens(2, 60), settings, tmp_path / "books.safetensors")


@pytest.mark.parametrize(
    ("settings", "message"),
    [(CoupledSettings((3, 4)), "coupled must divide the head dim 32"), (CoupledSettings(bits=(8, 7)), "bits must be one of"),
     (CoupledSettings(iterations=0), "iterations"), (LevelSettings(outliers=1.0), r"outliers must be in \[0, 1\), got 1.0")],
)  # fmt: skip
def test_bad_settings_are_refused_before_any_work(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(tiny_model("llama"), tokens(2, 40), settings, tmp_path / "books")
    assert not list(tmp_path.iterdir())


def test_texts_are_cut_and_joined_into_sequences(tmp_path: Path) -> None:
    def words(text: str) -> dict[str, list[int]]:
        return {"input_ids": [int(word) for word in text.split()]}

    texts = ["1 2", "3 4 5 6 7 8 9", "10 11", "12"]
    assert pack(words, texts, 3, 3).tolist() == [[3, 4, 5], [6, 7, 8], [1, 2, 10]]
    with pytest.raises(ValueError, match="the data give 3 sequences of 3 tokens, not 4"):
        pack(words, texts, 3, 4)
    lines = tmp_path / "a.jsonl"
    lines.write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(documents(str(lines))) == ["one", "two"]
    for wrong in ('{"txt": "two"}', '{"text": null}', "[]"):
        lines.write_text('{"text": "one"}\n' + wrong)
        with pytest.raises(ValueError, match="line 2: expected a JSON object with a `text`"):
            list(documents(str(lines)))
    for file in (lines, tmp_path / "a.txt"):
        file.write_bytes(b"one \xff")
        with pytest.raises(ValueError, match=rf"{file.name} is not a text in UTF-8: invalid start byte at byte 4"):
            list(documents(str(file)))


def test_a_dataset_needs_a_text_column(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
    assert list(documents(str(tmp_path))) == ["one", "two"]
    assert list(documents(f"{tmp_path}::train")) == ["one", "two"]
    (tmp_path / "train.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(ValueError, match=r"no column `text`, only \['body'\]"):
        list(documents(str(tmp_path)))


def test_the_command_writes_a_file_that_a_press_reads(tmp_path: Path) -> None:
    out = tmp_path / "books.safetensors"
    data = str(Path(kvpress.reference_path()) / "calibration.jsonl")
    arguments = ["calibrate", "cq", "--model", "reference", "--data", data, "--out", str(out), "--sequences", "1",
                 "--tokens", "64", "--coupled", "8,4", "--bits", "4", "--iterations", "2"]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    model, _ = kvpress.load_model("reference")
    with kvpress.get_press(f"cq:bits=4,coupled=(8,4),calibration='{out}'")(model):
        assert model.generate(torch.tensor([[1, *range(20, 60)]]), max_new_tokens=2).shape == (1, 43)
    arguments.append("--force")
    changes = {
        "--tokens": ("9000", "9000 tokens are over the 4096 positions"),
        "--coupled": ("x", "coupled must be a number"),
    }
    for option, (value, message) in changes.items():
        refused = CliRunner().invoke(app, [*arguments, option, value])
        assert refused.exit_code == 2
        assert message in refused.output


def test_a_model_whose_caches_do_not_grow_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        NotImplementedError, match=r"MistralForCausalLM has no layer whose cache grows.*sliding_attention"
    ):
        calibrate(tiny_model("mistral"), tokens(1, 100), SETTINGS, tmp_path / "books.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("expected_attention", "--bits", "4"), "No such option: --bits"),
        (("cq", "--n-sink", "4"), "No such option: --n-sink"),
        (("cqq",), "unknown method 'cqq': did you mean cq?; `kvpress calibrate -h` lists all"),
        (("--method", "cq"), "the method comes before its options, got --method"),
    ],
)
def test_options_of_another_method_and_unknown_methods_are_refused(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    given = ["calibrate", *arguments, "--model", "reference", "--data", "x", "--out", str(tmp_path / "x")]
    refused = CliRunner().invoke(app, given)
    assert refused.exit_code == 2
    assert message in " ".join(refused.output.replace("│", " ").split())
    assert not list(tmp_path.iterdir())


def test_layers_are_recorded_together_as_far_as_their_pairs_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model, ids = tiny_model("llama"), tokens(4, 64)
    facts, layer = facts_of(model), facts_of(model).growing[0]
    layer_bytes = ids.numel() * layer.kv_heads * layer.pair_dim * (4 + 4)  # a number and its gradient
    settings = CoupledSettings(iterations=2, bits=(2, 2))
    whole = calibrate(model, ids, settings, tmp_path / "whole")
    assert settings.layers_at_once(facts, ids.numel()) >= 3
    monkeypatch.setattr("kvpress.calibrate.run.RECORDED", 2 * layer_bytes)
    assert settings.layers_at_once(facts, ids.numel()) == 2
    pieces = calibrate(model, ids, settings, tmp_path / "pieces")
    assert whole.tensors.keys() == pieces.tensors.keys()
    assert all(torch.equal(tensor, pieces.tensors[name]) for name, tensor in whole.tensors.items())
