# SPDX-License-Identifier: Apache-2.0
"""Further arguments for loading a model: their text, names that are refused, and their effect."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlavaConfig
from typer.testing import CliRunner

import kvpress
from kvpress.cli import app
from kvpress.hf.model_kwargs import OWNED, apply_model_kwargs, configured, parse_model_kwargs


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (None, {}),
        ({"variant": "fp16"}, {"variant": "fp16"}),
        ("attn_implementation=eager", {"attn_implementation": "eager"}),
        ("use_safetensors=true, rms_norm_eps=1e-5", {"use_safetensors": True, "rms_norm_eps": 1e-5}),
        (
            ' {"rope_parameters": {"rope_type": "yarn", "factor": 4}}',
            {"rope_parameters": {"rope_type": "yarn", "factor": 4}},
        ),
    ],
)
def test_arguments_are_json_or_pairs(text: Any, arguments: dict[str, Any]) -> None:
    assert parse_model_kwargs(text) == arguments


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("eager", "JSON object, or name=value .* got 'eager'"),
        ("a=", "name=value"),
        ("=eager", "name=value"),
        ("a b=1", "name=value"),
        ("{'a': 1}", "JSON object.* got"),
        ("variant=a,variant=b", "'variant' twice"),
        ({"quantization_config": object()}, "must be JSON.* as a dictionary"),
        ({"rms_norm_eps": float("nan")}, "must be JSON"),
        *((f"{name}=1", f"must not have {name!r}: {OWNED[name][:20]}") for name in OWNED),
    ],
)
def test_wrong_arguments_are_named(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_model_kwargs(value)


def test_arguments_are_divided_between_loading_and_the_configuration() -> None:
    settings = LlamaConfig(max_position_embeddings=512)
    arguments = {"max_position_embeddings": 4096, "max_memory": {"0": "8GB", "cpu": "9GB"}, "variant": "fp16"}
    assert apply_model_kwargs(settings, arguments) == {"max_memory": {0: "8GB", "cpu": "9GB"}, "variant": "fp16"}
    assert settings.max_position_embeddings == 4096


def test_the_decoder_of_a_nested_configuration_gets_the_attribute() -> None:
    settings = LlavaConfig(text_config={"model_type": "llama", "max_position_embeddings": 512})
    assert apply_model_kwargs(settings, {"max_position_embeddings": 4096}) == {}
    assert settings.get_text_config(decoder=True).max_position_embeddings == 4096


@pytest.mark.parametrize("name", ["atn_implementation", "get_text_config", "_name_or_path"])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}' is neither one of attn_implementation.*attribute of LlamaConfig"):
        apply_model_kwargs(LlamaConfig(), {name: "eager"})


def test_a_loaded_model_has_the_arguments() -> None:
    further = configured("reference", {"attn_implementation": "eager", "max_position_embeddings": 77})
    model, _ = kvpress.load_model("reference", **further)
    assert (model.config._attn_implementation, model.config.max_position_embeddings) == ("eager", 77)
    assert configured("reference", {}) == {}


def test_commands_pass_the_arguments_on(tmp_path: Path) -> None:
    text, cache = tmp_path / "text.txt", tmp_path / "text.kv"
    text.write_text(" The code for tiger is 4837." * 4)
    command = ["--model", "reference", "--text", str(text), "--press", "knorm:0.5", "--out", str(cache)]
    wrong = CliRunner().invoke(app, ["compress", *command, "--model-kwargs", "dtype=float32"])
    assert (wrong.exit_code, "use the option dtype" in wrong.output) == (2, True)
    assert not cache.exists()
    made = CliRunner().invoke(app, ["compress", *command, "--model-kwargs", "max_position_embeddings=4096"])
    assert made.exit_code == 0, made.output
    ask = ["ask", "What is the code for tiger?", "--model", "reference", "--cache", str(cache), "--max-new-tokens", "2"]
    assert CliRunner().invoke(app, [*ask, "--model-kwargs", "max_position_embeddings=4096"]).exit_code == 0
