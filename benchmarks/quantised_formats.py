# SPDX-License-Identifier: Apache-2.0
"""Models whose linear layers are stored by a quantisation package, quantised on the spot from a folder of dense weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

GROUP = 32
"""Input channels that share a scale, where a format leaves the choice."""


@dataclass(frozen=True)
class Format:
    """A storage format of weights."""

    package: str
    """Package with the layers."""
    load: Callable[[str, ExitStack], Any]
    """Return the model of a folder with quantised layers; the stack is closed after its last pass."""
    about: str
    """Name in the table."""
    dtype: torch.dtype = torch.float32
    """Type of hidden states."""


def plain(path: str, dtype: torch.dtype = torch.float32, **settings: Any) -> Any:
    """Load the model of a folder."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **settings)
    return model.eval()


def quanto(bits: int, path: str, stack: ExitStack) -> Any:
    """Quantise with optimum-quanto."""
    from optimum.quanto import freeze, qint4, qint8, quantize

    model = plain(path)
    quantize(model, weights={4: qint4, 8: qint8}[bits], exclude="lm_head")
    freeze(model)
    return model


def torchao(name: str, path: str, stack: ExitStack) -> Any:
    """Quantise with torchao."""
    from torchao import quantization

    configs = {
        "int8": quantization.Int8WeightOnlyConfig,
        "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
        "float8": quantization.Float8WeightOnlyConfig,
    }
    model = plain(path)
    quantization.quantize_(model, configs[name]())
    return model


def bitsandbytes(bits: int, path: str, stack: ExitStack) -> Any:
    """Quantise with bitsandbytes."""
    return plain(path, quantization_config=transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True}))


def hqq(path: str, stack: ExitStack) -> Any:
    """Replace each linear layer by one of hqq: transformers 5.24 does not load them."""
    from hqq.core.quantize import BaseQuantizeConfig, HQQLinear

    model = plain(path)
    settings = BaseQuantizeConfig(nbits=4, group_size=GROUP)
    for name, layer in linear_layers(model):
        model.set_submodule(name, HQQLinear(layer, settings, compute_dtype=torch.float32, device="cpu"))
    return model


def compressed_tensors(bits: int, path: str, stack: ExitStack) -> Any:
    """Write a checkpoint of compressed-tensors, in groups of integers or with one FP8 scale a row, and load it."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )
    from compressed_tensors.quantization.utils import calculate_qparams

    args = {
        4: QuantizationArgs(num_bits=4, type="int", strategy="group", group_size=GROUP, symmetric=True),
        8: QuantizationArgs(num_bits=8, type="float", strategy="channel", symmetric=True),
    }[bits]
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    model = plain(path)
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for layer in model.modules():
        if hasattr(layer, "weight_scale"):
            groups = layer.weight.detach().unflatten(1, (-1, GROUP if bits == 4 else layer.in_features))
            scale, _ = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
            layer.weight_scale.data = scale.to(layer.weight_scale)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    folder = stack.enter_context(TemporaryDirectory())
    model.save_pretrained(folder)
    compressor.update_config(folder)
    return plain(folder)


def gptqmodel(method: str, path: str, stack: ExitStack) -> Any:
    """Write a checkpoint of GPTQ or AWQ, with codes that GPTQModel packs without calibration, and load it.

    Of the layers of GPTQModel, those in torch are used: its kernels for CPUs are compiled for minutes at the first pass. For
    GPTQ, transformers also needs the package optimum.
    """
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.nn_modules.qlinear.torch_awq import AwqTorchLinear

    stack.enter_context(mock.patch.object(torch._dynamo.config, "disable", True))  # layers of GPTQ compile themselves
    kind = {"gptq": TorchLinear, "awq": AwqTorchLinear}[method]
    files: dict[str, dict[str, Any]] = {
        "gptq": {"checkpoint_format": "gptq_v2", "backend": "gptq_torch"},
        "awq": {"zero_point": True, "version": "gemm", "backend": "torch_awq"},
    }
    settings = {
        "quant_method": method,
        "bits": 4,
        "group_size": GROUP,
        "desc_act": False,
        "sym": False,
        **files[method],
    }
    dtype = torch.float32 if method == "gptq" else torch.bfloat16
    model = plain(path, dtype)
    for name, layer in linear_layers(model):
        packed = kind(
            bits=4,
            group_size=GROUP,
            sym=False,
            desc_act=False,
            in_features=layer.in_features,
            out_features=layer.out_features,
            bias=layer.bias is not None,
        )
        groups = layer.weight.detach().float().unflatten(1, (-1, GROUP))
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = ((high - low) / 14).half().float()  # 14 of 15 steps, because the zero point is rounded up
        dense = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None)
        dense.load_state_dict(layer.state_dict())
        pack = packed.pack_original if method == "gptq" else packed.pack
        pack(dense, scales, (-low / scales).ceil(), torch.arange(layer.in_features, dtype=torch.int32) // GROUP)
        model.set_submodule(name, packed)
    folder = stack.enter_context(TemporaryDirectory())
    model.config.quantization_config = settings
    model.save_pretrained(folder)
    return plain(folder, dtype)


def fp8(path: str, stack: ExitStack) -> Any:
    """Replace each linear layer by the FP8 layer of transformers, with a plain product in place of its GPU kernel."""
    from transformers.integrations import finegrained_fp8

    def product(
        inputs: Tensor, weight: Tensor, scales: Tensor, block: Any, bias: Tensor | None, *args: Any, **kwargs: Any
    ) -> Tensor:
        dense = finegrained_fp8._dequantize_fp8_weight(weight, scales, block, inputs.dtype)
        return nn.functional.linear(inputs, dense, bias)

    stack.enter_context(mock.patch.object(finegrained_fp8, "fp8_linear", product))
    model = plain(path)
    for name, layer in linear_layers(model):
        packed = finegrained_fp8.FP8Linear(
            layer.in_features, layer.out_features, (GROUP, GROUP), has_bias=layer.bias is not None
        )
        tiles = layer.weight.detach().unflatten(0, (-1, GROUP)).unflatten(2, (-1, GROUP))
        scales = tiles.abs().amax(dim=(1, 3)) / torch.finfo(torch.float8_e4m3fn).max
        packed.weight.data = (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        packed.weight_scale_inv.data = scales
        if layer.bias is not None:
            packed.bias.data = layer.bias.data
        model.set_submodule(name, packed)
    return model.eval()


def gguf(path: str, stack: ExitStack) -> Any:
    """Replace each linear layer by one of packed GGUF blocks, with a plain product in place of the kernel from the hub.

    Transformers 5.24 itself keeps the blocks of few architectures and decodes the files of others.
    """
    from gguf import GGMLQuantizationType, quants
    from transformers.integrations.gguf import kernels, utils

    def product(weight: Tensor, inputs: Tensor, kind: int, outputs: int) -> Tensor:
        return inputs @ kernels.dequantize_blocks(weight, kind, outputs, inputs.shape[1], inputs.dtype).T

    stack.enter_context(mock.patch.object(kernels, "_gguf_kernel", False))  # none is looked for
    stack.enter_context(mock.patch.object(utils, "mul_mat_vec", product))
    model, kind = plain(path), GGMLQuantizationType.Q4_1
    for name, layer in linear_layers(model):
        packed = utils.GgufLinear(layer.in_features, layer.out_features, int(kind), layer.bias is not None)
        packed.weight.data = torch.from_numpy(quants.quantize(layer.weight.detach().numpy(), kind))
        if layer.bias is not None:
            packed.bias.data = layer.bias.data
        model.set_submodule(name, packed)
    return model.eval()


def linear_layers(model: Any) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a model with their names, without the output head."""
    head = model.get_output_embeddings()
    yield from [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) and m is not head]


FORMATS: dict[str, Format] = {
    "awq-4": Format("gptqmodel", partial(gptqmodel, "awq"), "AWQ, 4 bits", dtype=torch.bfloat16),
    "bitsandbytes-4": Format("bitsandbytes", partial(bitsandbytes, 4), "bitsandbytes, 4 bits"),
    "bitsandbytes-8": Format("bitsandbytes", partial(bitsandbytes, 8), "bitsandbytes, 8 bits"),
    "compressed-4": Format("compressed-tensors", partial(compressed_tensors, 4), "compressed-tensors, 4 bits"),
    "compressed-fp8": Format("compressed-tensors", partial(compressed_tensors, 8), "compressed-tensors, FP8"),
    "fp8": Format("transformers", fp8, "FP8 of transformers"),
    "gguf": Format("gguf", gguf, "GGUF, packed (`GgufConfig`), Q4_1"),
    "gptq-4": Format("gptqmodel", partial(gptqmodel, "gptq"), "GPTQ, 4 bits"),
    "hqq-4": Format("hqq", hqq, "HQQ, 4 bits"),
    "quanto-int4": Format("optimum-quanto", partial(quanto, 4), "quanto, int4"),
    "quanto-int8": Format("optimum-quanto", partial(quanto, 8), "quanto, int8"),
    "torchao-float8": Format("torchao", partial(torchao, "float8"), "torchao, FP8 weights"),
    "torchao-int8": Format("torchao", partial(torchao, "int8"), "torchao, int8 weights"),
    "torchao-int8-dynamic": Format(
        "torchao", partial(torchao, "int8-dynamic"), "torchao, int8 with dynamic activations"
    ),
}
"""Formats by name."""


@contextmanager
def quantised(name: str, path: str) -> Iterator[Any]:
    """Yield the model of a folder, or of a GGUF file, in a format."""
    with ExitStack() as stack:
        yield FORMATS[name].load(path, stack)
