# SPDX-License-Identifier: Apache-2.0
"""Tiny models for drawn cases, random ones and a pretrained one, and the files that some methods need for a model."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

import kvpress
from kvpress.testing.models import random_model
from tests.folders import new_folder
from tests.models import ALTERNATING, full_layers, tokens
from tests.models import FAMILIES as SETTINGS
from tests.scales import write_scales

PRETRAINED = "reference"
"""The model that ships with the package, whose weights are trained."""
BIASED, LARGE = "qwen2", 70
"""Model type with large key biases, and their factor."""
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": SETTINGS["llama"],
    "qwen3": SETTINGS["qwen3"],
    "ministral": {"sliding_window": 8, "layer_types": ALTERNATING},
    "gemma3_text": SETTINGS["gemma3_text"],
    "phi3": SETTINGS["phi3"],
    "stablelm": {"partial_rotary_factor": 0.5, "head_dim": 16},
    # All experts answer every token: a router that chooses between nearly equal ones turns a rounding error into a jump.
    "gpt_oss": {**SETTINGS["gpt_oss"], "num_experts_per_tok": 4},
    # Keys have a bias, of which codecs store a large one separately.
    BIASED: {},
    PRETRAINED: {},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
EAGER_ONLY = {"gpt_oss"}


@cache
def model_of(family: str, dtype: str) -> Any:
    """Return a model in evaluation mode."""
    if family == PRETRAINED:
        return _without_end(kvpress.load_model(PRETRAINED)[0]).to(DTYPES[dtype])
    implementation = "eager" if family in EAGER_ONLY else "sdpa"
    model = random_model(family, implementation, norms=0.3, **FAMILIES[family])
    if family == BIASED:
        for name, parameter in model.named_parameters():
            if name.endswith("k_proj.bias"):
                parameter.data *= LARGE
    return model.to(DTYPES[dtype])


def _without_end(model: Any) -> Any:
    """Return the model without an end token, so that it generates as many tokens as requested."""
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model.eval()


def growing(family: str) -> int:
    """Return the number of layers with full attention, which are compressed."""
    return len(full_layers(model_of(family, "float32")))


def _calibration(method: str, **settings: Any) -> Callable[[str, Path], None]:
    def make(family: str, path: Path) -> None:
        from kvpress.calibrate import METHODS, calibrate

        calibrate(model_of(family, "float32"), tokens(4, 100, seed=50), METHODS[method](**settings), path)

    return make


def _heads(family: str) -> tuple[int, int]:
    """Return the layers of a model, and the KV heads of each."""
    config = model_of(family, "float32").config
    return config.num_hidden_layers, config.num_key_value_heads


def _table(family: str, path: Path) -> None:
    rows = torch.rand(*_heads(family), generator=torch.Generator().manual_seed(3))
    path.write_text("\n".join("\t".join(f"{value:.3f}" for value in row) for row in rows.tolist()))


def _networks(family: str, path: Path) -> None:
    layers, heads = _heads(family)
    sizes = (heads, model_of(family, "float32").config.hidden_size)
    generator = torch.Generator().manual_seed(4)
    tensors = {}
    for layer in range(layers):
        tensors[f"layers.{layer}.weight"] = torch.randn(sizes, generator=generator)
        tensors[f"layers.{layer}.bias"] = torch.zeros(sizes[0])
    save_file(tensors, path)


def _curve(family: str, path: Path) -> None:
    needs = torch.rand(*_heads(family), generator=torch.Generator().manual_seed(5))
    ratios = torch.arange(1, 100)[:, None, None] / 100
    np.save(path, (ratios ** (0.5 + needs)).float().numpy())


def _gates(family: str, path: Path) -> None:
    config = model_of(family, "float32").config
    heads, kv_heads, hidden = config.num_attention_heads, config.num_key_value_heads, config.hidden_size
    shapes = {
        "q_proj.weight": (heads * 8, hidden), "q_proj.bias": (heads * 8,), "k_proj.weight": (kv_heads * 8, hidden),
        "q_norm.weight": (8,), "k_norm.weight": (8,), "k_base": (kv_heads, 1, 4, 8), "b": (kv_heads, 1, heads // kv_heads),
    }  # fmt: skip
    generator = torch.Generator().manual_seed(6)
    layers = [
        {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
        for _ in range(config.num_hidden_layers)
    ]
    torch.save({"module": layers}, path)


FILES: dict[str, tuple[str, Callable[[str, Path], None]]] = {
    "table": ("heads.tsv", _table),
    "books": ("books.safetensors", _calibration("cq", coupled=(2, 2), bits=(4, 4), fisher=False, iterations=3)),
    "levels": ("levels.safetensors", _calibration("kvquant", iterations=3)),
    "predictors": ("predictors.safetensors", _calibration("aquakv", iterations=3)),
    "channels": ("channels.safetensors", _calibration("double_sparsity")),
    "energies": ("energies.safetensors", _calibration("block_gtq")),
    "rotations": ("rotations.safetensors", _calibration("oscar")),
    "filters": ("filters.safetensors", _calibration("qfilter")),
    "gates": ("gates.pt", _gates),
    "curve": ("curve.npy", _curve),
    "networks": ("networks.safetensors", _networks),
    "scales": ("scales.safetensors", lambda family, path: write_scales(model_of(family, "float32"), path)),
    "statistics": ("statistics.safetensors", _calibration("expected_attention")),
}
"""Name in braces of a spec -> file name, and the function that writes the file for a family."""


@cache
def path_of(name: str, family: str) -> str:
    """Make a file of `FILES` for a family, once in a process."""
    filename, make = FILES[name]
    path = new_folder() / filename
    with torch.random.fork_rng(), torch.enable_grad():
        make(family, path)
    return str(path)
