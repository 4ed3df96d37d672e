# SPDX-License-Identifier: Apache-2.0
"""Bytes of weights as a plan counts them: those of the type, of the files, or of the bits in the configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from typer.testing import CliRunner

from kvpress.cli import app
from kvpress.hf.models import load_config
from kvpress.hf.stored_weights import bytes_of_weights
from tests.models import tiny_model

HIDDEN, MLP, LAYERS, WORDS = 256, 512, 2, 1000
SETTINGS = {
    "hidden_size": HIDDEN, "intermediate_size": MLP, "num_hidden_layers": LAYERS, "vocab_size": WORDS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False, "dtype": "float16",
}  # fmt: skip
LINEAR = LAYERS * (3 * HIDDEN * HIDDEN + 3 * HIDDEN * MLP)  # q, o, and k with v; the MLP
DENSE = 2 * WORDS * HIDDEN + (2 * LAYERS + 1) * HIDDEN
"""Embeddings, output head and norms."""
QUANTISED: list[tuple[dict[str, Any], float]] = [
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
    ({"quant_method": "gptq", "bits": 8, "group_size": -1}, 8),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
    ({"quant_method": "quanto", "weights": "int4"}, 4.25),
    ({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True}, 4 + 20 / 128),
    ({"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}}, 4.5),
    ({"quant_method": "torchao", "quant_type": {"default": {"_type": "Int8WeightOnlyConfig"}}}, 8),
    (
        {
            "quant_method": "torchao",
            "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 64}}},
        },
        4.5,
    ),
]


def write(folder: Path, **settings: Any) -> str:
    """Write a configuration and return its folder."""
    plain = LlamaConfig(**SETTINGS).to_dict()
    (folder / "config.json").write_text(json.dumps({**plain, "model_type": "llama", **settings}))
    return str(folder)


def size_of(folder: str) -> int:
    return bytes_of_weights(folder, load_config(folder), torch.float16)


def test_plain_weights_have_the_bytes_of_their_type(tmp_path: Path) -> None:
    assert size_of(write(tmp_path)) == 2 * (LINEAR + DENSE)


@pytest.mark.parametrize(("quantised", "bits"), QUANTISED)
def test_linear_layers_have_the_bits_of_the_configuration(
    quantised: dict[str, Any], bits: float, tmp_path: Path
) -> None:
    size = size_of(write(tmp_path, quantization_config=quantised))
    assert size == pytest.approx(LINEAR * bits / 8 + 2 * DENSE, rel=1e-5)


def test_modules_that_are_not_converted_stay_dense(tmp_path: Path) -> None:
    quantised = {"quant_method": "fp8", "modules_to_not_convert": ["self_attn", "lm_head"]}
    mlp = LAYERS * 3 * HIDDEN * MLP
    expected = mlp * (8 + 32 / 128**2) / 8 + 2 * (LINEAR - mlp + DENSE)
    assert size_of(write(tmp_path, quantization_config=quantised)) == pytest.approx(expected, rel=1e-5)


def test_files_of_a_quantised_model_are_counted(tmp_path: Path) -> None:
    folder = write(tmp_path, quantization_config={"quant_method": "new"})
    for part, size in enumerate((3000, 500)):
        (tmp_path / f"model-{part}.safetensors").write_bytes(bytes(size))
    assert size_of(folder) == 3500


def test_weights_that_are_unpacked_at_the_first_pass_have_the_bytes_of_their_type(tmp_path: Path) -> None:
    folder = write(tmp_path, quantization_config={"quant_method": "compressed-tensors", "format": "pack-quantized"})
    (tmp_path / "model.safetensors").write_bytes(bytes(3000))
    assert size_of(folder) == 2 * (LINEAR + DENSE)


@pytest.mark.parametrize(
    "quantised",
    [
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "NewConfig"}}},
        {"quant_method": "torchao", "quant_type": "int8"},
        {"quant_method": "hqq", "quant_config": {"self_attn.q_proj": {"weight_quant_params": {"nbits": 4}}}},
    ],
)
def test_settings_without_a_known_size_are_refused(quantised: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"quant_method='{quantised['quant_method']}', whose settings"):
        size_of(write(tmp_path, quantization_config=quantised))


def test_a_size_that_nothing_states_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path, quantization_config={"quant_method": "new"})
    with pytest.raises(ValueError, match="quant_method='new', not one of auto-round, awq, bitsandbytes"):
        size_of(folder)
    result = CliRunner().invoke(app, ["plan", "--model", folder, "--memory", "4GB", "--press", "none"])
    assert result.exit_code
    assert "give --model a folder with its safetensors files" in " ".join(result.output.split())


def test_a_plan_leaves_the_room_beside_the_stored_weights(tmp_path: Path) -> None:
    folder = write(tmp_path, quantization_config={"quant_method": "awq", "bits": 4, "group_size": 128})
    result = CliRunner().invoke(app, ["plan", "--model", folder, "--memory", "64MiB", "--press", "none"])
    size = size_of(folder)
    assert f"weights {size / 2**20:.1f} MiB" in " ".join(result.output.split())


def test_stored_bytes_are_those_of_a_saved_model(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path)
    stored = sum(parameter.nbytes for parameter in model.parameters())
    assert bytes_of_weights(str(tmp_path), load_config(str(tmp_path)), torch.float32) == stored
