# SPDX-License-Identifier: Apache-2.0
"""Bytes of a model's weights as they are stored, from its files or from its configuration."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.configuration_utils import PreTrainedConfig

from kvpress.hf.model_files import folder_of
from kvpress.hf.models import auto_class, parameters_of_config

HALF = 16
"""Bits of a scale."""
UNPACKED = ("compressed-tensors",)
"""Quantisations whose weights transformers unpacks at the first pass, whatever their files hold."""


def bytes_of_weights(name: str, config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Return the bytes of a model's weights in memory: those of its type, or less if its layers compute with quantised ones.

    Quantised weights have the size of the safetensors files in the folder `name`; without such files, linear layers have the
    bits of the configuration, and embeddings, norms and the output head have `dtype`. A model of compressed-tensors has the
    bytes of its type, since its weights are unpacked at the first pass.

    Raises:
        ValueError: the quantisation has an unknown size, and there are no files.
    """
    quantised = _quantisation(config)
    if quantised is None or _method(quantised) in UNPACKED:
        return parameters_of_config(config) * dtype.itemsize
    folder = Path(folder_of(name))
    if files := sorted(folder.glob("*.safetensors")) if folder.is_dir() else []:
        return sum(file.stat().st_size for file in files)
    with torch.device("meta"):
        return _estimate(auto_class(config).from_config(config), quantised, dtype)


def _quantisation(config: PreTrainedConfig) -> dict[str, Any] | None:
    """Return the quantisation of a configuration as a dictionary; None without one."""
    for settings in (config, config.get_text_config(decoder=True)):
        quantised = getattr(settings, "quantization_config", None)
        if quantised is not None:
            return dict(quantised) if isinstance(quantised, dict) else dict(quantised.to_dict())
    return None


def _method(quantised: dict[str, Any]) -> str:
    """Return the name of a quantisation."""
    method = quantised.get("quant_method")
    return str(getattr(method, "value", method))


def _estimate(model: nn.Module, quantised: dict[str, Any], dtype: torch.dtype) -> int:
    """Return the bytes of a model whose linear layers are quantised, except for the output head and unconverted modules."""
    method = _method(quantised)
    bits = BITS[method](quantised) if method in BITS else None
    if bits is None:
        reason = "whose settings have no known size" if method in BITS else f"not one of {', '.join(sorted(BITS))}"
        raise ValueError(
            f"quantization_config has quant_method={method!r}, {reason}; give --model a folder with its safetensors files, or "
            "leave --memory out"
        )
    kept = tuple(quantised.get("modules_to_not_convert") or quantised.get("llm_int8_skip_modules") or ())
    head = model.get_output_embeddings()  # type: ignore[operator]
    packed = {
        id(parameter)
        for name, module in model.named_modules()
        if module is not head and not any(part in name for part in kept)
        for parameter in module.parameters(recurse=False)
        if (isinstance(module, nn.Linear) and parameter.dim() == 2) or parameter.dim() == 3  # layers, stacked experts
    }
    sizes = [(parameter.numel(), id(parameter) in packed) for parameter in model.parameters()]
    return sum(int(count * bits / 8) if is_packed else count * dtype.itemsize for count, is_packed in sizes)


def _grouped(quantised: dict[str, Any]) -> float:
    """Return the bits of a weight in groups with a scale and a zero point."""
    bits, group = int(quantised["bits"]), int(quantised.get("group_size") or quantised.get("q_group_size") or 128)
    return bits + (HALF + bits) / group if group > 0 else float(bits)


def _bitsandbytes(quantised: dict[str, Any]) -> float:
    """Return the bits of a weight: 8, or 4 in blocks of 64 with a scale of 32 bits, or of 8 if scales are quantised."""
    if quantised.get("load_in_8bit", quantised.get("_load_in_8bit")):
        return 8.0
    return 4 + (8.125 if quantised.get("bnb_4bit_use_double_quant") else 32) / 64


def _hqq(quantised: dict[str, Any]) -> float | None:
    """Return the bits of a weight of HQQ, in groups with a scale and a zero point of 16 bits."""
    weights = (quantised.get("quant_config") or {}).get("weight_quant_params")
    if not weights:  # each kind of layer has settings of its own
        return None
    group = int(weights.get("group_size") or 0)
    return int(weights["nbits"]) + (2 * HALF / group if group > 0 else 0)


def _torchao(quantised: dict[str, Any]) -> float | None:
    """Return the bits of a weight of torchao by its settings for all layers; 4-bit groups have a scale and a zero point."""
    settings = quantised.get("quant_type")
    settings = settings.get("default") if isinstance(settings, dict) else None
    if not isinstance(settings, dict):
        return None
    kind, data = str(settings.get("_type")), settings.get("_data") or {}
    if kind.startswith("Int4"):
        return 4 + 2 * HALF / int(data.get("group_size") or 128)
    return 8.0 if kind.startswith(("Int8", "Float8")) else None


BITS: dict[str, Callable[[dict[str, Any]], float | None]] = {
    "awq": _grouped,
    "gptq": _grouped,
    "auto-round": _grouped,
    "bitsandbytes": _bitsandbytes,
    "fp8": lambda quantised: 8 + 32 / 128**2,
    "fbgemm_fp8": lambda quantised: 8.0,
    "hqq": _hqq,
    "mxfp4": lambda quantised: 4.25,
    "quanto": lambda quantised: {"int8": 8.0, "float8": 8.0, "int4": 4.25, "int2": 2.25}.get(
        quantised.get("weights", "")
    ),
    "torchao": _torchao,
}
"""Bits of a quantised weight, scales included, by quant_method."""
