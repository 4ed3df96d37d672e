# SPDX-License-Identifier: Apache-2.0
"""Presses on a model whose weights a quantisation package stores, against a plain twin with the same dense weights.

    python -m benchmarks.quantised_weights --format torchao-int8 [--out rows.json]

The twin has the products of the quantised layers with unit vectors as its weights, so both models differ only by rounding. For
every press it prints the share of kept pairs that both models keep, and the share of the generated tokens
on which they agree when the twin's tokens are read.
"""

from __future__ import annotations

import argparse
import copy
import importlib.metadata
import json
import shlex
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import kvpress
from benchmarks.machine import cpu_model
from kvpress.core.linear import dense_weight, plain_weight
from kvpress.hf.models import with_cache
from kvpress.hf.weights import digest_of_weights

SPECS = (
    "none",
    "snapkv:0.5",
    "kvzip:0.5,repeat_prompt=",
    "kvzip:0.5,repeat_prompt=,kvzip_plus_normalization=true",
    "refit(leverage_score:0.75)",
    "protect(snapkv:0.5):tokens=0:16",
    "bounded(keydiff:0.5):chunk=64",
    "conversation(snapkv):budget=96",
    "prefill_decoding(snapkv:0.5; decoding(knorm):target_size=96,compression_interval=4)",
    "kivi:bits=2",
    "quest:budget=64,skip_layers=0",
    "budgeted(snapkv):smaller=4",
    "frontier:smaller=4",
    "criticalkv(snapkv:0.5)",
    "expected_attention:0.5",
)
"""Recommended presses in sizes for a prompt of some hundred tokens, and presses that read the output projection."""
STEPS = 6
TEXT = Path(__file__).parents[1] / "README.md"


def quanto(bits: int) -> Callable[[str], Any]:
    def load(path: str) -> Any:
        from optimum.quanto import freeze, qint4, qint8, quantize

        model = kvpress.load_model(path, dtype=torch.float32)[0]
        quantize(model, weights={4: qint4, 8: qint8}[bits], exclude="lm_head")
        freeze(model)
        return model

    return load


def torchao(name: str) -> Callable[[str], Any]:
    def load(path: str) -> Any:
        from torchao import quantization

        configs = {
            "int8": quantization.Int8WeightOnlyConfig,
            "int8-dynamic": quantization.Int8DynamicActivationInt8WeightConfig,
            "float8": quantization.Float8WeightOnlyConfig,
        }
        model = kvpress.load_model(path, dtype=torch.float32)[0]
        quantization.quantize_(model, configs[name]())
        return model

    return load


def bitsandbytes(bits: int) -> Callable[[str], Any]:
    def load(path: str) -> Any:
        config = transformers.BitsAndBytesConfig(**{f"load_in_{bits}bit": True})
        return kvpress.load_model(path, dtype=torch.float32, quantization_config=config)[0]

    return load


FORMATS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "quanto-int8": ("optimum-quanto", quanto(8)),
    "quanto-int4": ("optimum-quanto", quanto(4)),
    "torchao-int8": ("torchao", torchao("int8")),
    "torchao-int8-dynamic": ("torchao", torchao("int8-dynamic")),
    "torchao-float8": ("torchao", torchao("float8")),
    "bitsandbytes-8": ("bitsandbytes", bitsandbytes(8)),
    "bitsandbytes-4": ("bitsandbytes", bitsandbytes(4)),
}
"""Package and loader by format."""


def twin_of(model: Any, path: str) -> Any:
    """Return a plain float32 model with the dense weights of the quantised layers."""
    twin = kvpress.load_model(path, dtype=torch.float32)[0]
    for name, layer in twin.named_modules():
        packed = model.get_submodule(name) if name else model
        if isinstance(layer, nn.Linear) and plain_weight(packed) is None:
            weight = dense_weight(packed, layer.in_features, torch.empty(0))
            layer.weight = nn.Parameter(weight.float().contiguous(), requires_grad=False)
    return twin


def read(model: Any, spec: str, ids: Tensor, forced: Tensor | None) -> tuple[Tensor, list[Any]]:
    """Return the most likely token after the prompt and after each of STEPS tokens, and the positions kept of the prompt."""
    chosen = []
    with kvpress.get_press(spec)(model), torch.no_grad():
        output = model(ids, use_cache=True)
        cache = output.past_key_values
        kept = copy.deepcopy(kvpress.kept_positions(cache))
        for step in range(STEPS):
            chosen.append(output.logits[0, -1].argmax())
            token = chosen[-1] if forced is None else forced[step]
            output = model(token[None, None], use_cache=True, **with_cache(cache))
    return torch.stack(chosen), kept


def shared(first: list[Any], second: list[Any]) -> float:
    """Return the share of kept positions that both models keep."""
    both = total = 0
    for one, other in zip(first, second, strict=True):
        for mine, others in zip(one[0], other[0], strict=True):
            both += len(set(mine.tolist()) & set(others.tolist()))
            total += max(len(mine), len(others))
    return both / max(total, 1)


def measure(name: str, path: str, length: int, specs: Sequence[str]) -> list[dict[str, Any]]:
    """Run every press on both models."""
    package, load = FORMATS[name]
    model = load(path).eval()
    about = {"format": name, "package": f"{package} {importlib.metadata.version(package)}", "layer": layer_of(model)}
    twin = twin_of(model, path)
    tokenizer = kvpress.load_model(path, dtype=torch.float32)[1]
    ids = tokenizer(TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids[:, :length]
    rows = [about | {"digest": digest_of_weights(model)}]
    for spec in specs:
        start = time.perf_counter()
        try:
            expected, kept_by_twin = read(twin, spec, ids, None)
            tokens, kept = read(model, spec, ids, expected)
            row = {"kept": shared(kept, kept_by_twin), "tokens": float((tokens == expected).float().mean())}
        except Exception as error:
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"}
        rows.append({"press": spec, **row, "seconds": round(time.perf_counter() - start, 1)})
        print(rows[-1], flush=True)
    return rows


def layer_of(model: Any) -> str:
    """Return the class of a quantised query projection and of its weight."""
    layer = model.get_decoder().layers[0].self_attn.q_proj
    return f"{type(layer).__name__} with {type(getattr(layer, 'weight', None)).__name__}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--press", action="append", help="spec; may be repeated; all of the table by default")
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    rows = measure(options.format, options.model, options.length, options.press or SPECS)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__}
    record = {"date": date.today().isoformat(), "machine": cpu_model(), "command": shlex.join(["python", *sys.argv])}
    if options.out is not None:
        options.out.write_text(json.dumps({**record, **versions, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
