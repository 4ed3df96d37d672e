# SPDX-License-Identifier: Apache-2.0
"""Presses on a model whose weights a quantisation package stores, against a plain twin with the same dense weights.

    python -m benchmarks.quantised_weights --format torchao-int8 --format fp8 --out benchmarks/results/quantised_weights.json
    python -m benchmarks.quantised_weights --table benchmarks/results/quantised_weights.json

The twin has the products of the quantised layers with unit vectors as its weights, so both models differ only by rounding. For
every press it prints the share of kept pairs that both models keep, the share of generated tokens on which they agree when the
twin's tokens are read, and the bytes of the cache after the prompt with those that were planned. For `none`, it also compares
with the quantised model without a press.
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
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import transformers
from torch import Tensor, nn

import kvpress
from benchmarks.machine import cpu_model
from benchmarks.quantised_formats import FORMATS, plain, quantised
from kvpress.core.linear import dense_weight, plain_weight
from kvpress.hf.model_files import folder_of
from kvpress.hf.models import with_cache
from kvpress.plan import Geometry, plan
from kvpress.testing.models import random_model, tokens

RANDOM = "random"
SIZES = {"hidden_size": 128, "intermediate_size": 256, "norms": 0.3}
"""Settings of the random model."""
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
    "budgeted(snapkv):smaller=2",
    "frontier:smaller=4",
    "criticalkv(snapkv:0.5)",
    "expected_attention:0.5",
)
"""Recommended presses in sizes for a prompt of some hundred tokens, and presses that read the output projection."""
STEPS = 6
TEXT = Path(__file__).parents[1] / "README.md"


def twin_of(model: Any, path: str, dtype: torch.dtype) -> Any:
    """Return a plain model with the dense weights of the quantised layers."""
    twin = plain(path, dtype)
    for name, layer in twin.named_modules():
        packed = model.get_submodule(name) if name else model
        if isinstance(layer, nn.Linear) and not same(packed, layer):
            weight = dense_weight(packed, layer.in_features, torch.empty(0, dtype=dtype))
            layer.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
    return twin


def same(packed: nn.Module, layer: nn.Linear) -> bool:
    """Whether a layer has the weight of a plain one."""
    weight = plain_weight(packed)
    return weight is not None and torch.equal(weight, layer.weight)


def read(model: Any, spec: str | None, ids: Tensor, forced: Tensor | None) -> tuple[Tensor, list[Any], int]:
    """Return the most likely token after the prompt and after each of STEPS tokens, the kept positions, and the bytes.

    Positions and bytes are those after the prompt; without a press (None) there are none.
    """
    chosen, kept, size = [], [], 0
    with nullcontext() if spec is None else kvpress.get_press(spec)(model), torch.no_grad():
        output = model(ids, use_cache=True)
        cache = output.past_key_values
        if spec is not None:
            kept, size = copy.deepcopy(kvpress.kept_positions(cache)), kvpress.memory_report(cache).total_bytes
        for step in range(STEPS):
            chosen.append(output.logits[0, -1].argmax())
            token = chosen[-1] if forced is None else forced[step]
            output = model(token[None, None], use_cache=True, **with_cache(cache))
    return torch.stack(chosen), kept, size


def shared(first: list[Any], second: list[Any]) -> float:
    """Return the share of kept positions that both models keep."""
    both = total = 0
    for one, other in zip(first, second, strict=True):
        for mine, others in zip(one[0], other[0], strict=True):
            both += len(set(mine.tolist()) & set(others.tolist()))
            total += max(len(mine), len(others))
    return both / max(total, 1)


def agreement(first: Tensor, second: Tensor) -> float:
    """Return the share of equal tokens."""
    return float((first == second).float().mean())


def measure(name: str, path: str, ids: Tensor, specs: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Run every press on both models; yield the run after each of them."""
    form = FORMATS[name]
    with quantised(name, path) as model:
        with torch.no_grad():
            model(ids[:, :8])  # compressed-tensors unpacks at the first pass
        run: dict[str, Any] = {
            "format": name,
            "package": f"{form.package} {importlib.metadata.version(form.package)}",
            "layer": layer_of(model),
            "dtype": str(form.dtype).removeprefix("torch."),
            "rows": [],
        }
        twin = twin_of(model, path, form.dtype)
        for spec in specs:
            run["rows"].append(row_of(model, twin, spec, ids))
            yield run


def row_of(model: Any, twin: Any, spec: str, ids: Tensor) -> dict[str, Any]:
    """Run one press on both models."""
    start, geometry = time.perf_counter(), Geometry.of(model.config)
    row: dict[str, Any] = {"press": spec}
    try:
        expected, kept_by_twin, bytes_of_twin = read(twin, spec, ids, None)
        chosen, kept, size = read(model, spec, ids, expected)
        planned = plan(spec, geometry, ids.shape[1]).total_bytes
        row |= {"kept": shared(kept, kept_by_twin), "tokens": agreement(chosen, expected)}
        row |= {"bytes": size, "bytes of the twin": bytes_of_twin, "planned bytes": planned}
        if spec == "none":
            row["tokens of the model alone"] = agreement(chosen, read(model, None, ids, expected)[0])
    except Exception as error:
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"
    row["seconds"] = round(time.perf_counter() - start, 1)
    print(row, flush=True)
    return row


def layer_of(model: Any) -> str:
    """Return the class of a quantised query projection and of its weight."""
    layer = model.get_decoder().layers[0].self_attn.q_proj
    return f"{type(layer).__name__} with {type(getattr(layer, 'weight', None)).__name__}"


def prompt_of(model: str, length: int) -> Tensor:
    """Return the first tokens of the README, or random ones for the random model."""
    if model == RANDOM:
        return tokens(1, length)
    ids: Tensor = kvpress.load_model(model)[1](TEXT.read_text(encoding="utf-8"), return_tensors="pt").input_ids
    return ids[:, :length]


def store(path: Path, run: dict[str, Any]) -> None:
    """Write a run into a file, in place of the one of the same format and model."""
    key = "format", "model"
    runs = json.loads(path.read_text(encoding="utf-8"))["runs"] if path.is_file() else []
    others = [other for other in runs if [other[name] for name in key] != [run[name] for name in key]]
    runs = sorted([*others, run], key=lambda run: [run[name] for name in key])
    path.write_text(json.dumps({"runs": runs}, indent=1) + "\n", encoding="utf-8")


def table(runs: Sequence[dict[str, Any]]) -> str:
    """Return a Markdown table with a line for each run."""
    lines = [
        "| format | package | model | presses | kept | tokens | bytes beside the plan |",
        "|---|---|---|---:|---:|---:|---:|",
    ]
    for run in runs:
        done = [row for row in run["rows"] if "error" not in row]
        kept, agreed = (min((row[name] for row in done), default=0.0) for name in ("kept", "tokens"))
        beside = max((abs(row["bytes"] / row["planned bytes"] - 1) for row in done), default=0.0)
        lines.append(
            f"| {FORMATS[run['format']].about} | {run['package']} | {run['model']} | {len(done)} of {len(run['rows'])} | "
            f"{kept:.0%} | {agreed:.0%} | {beside:.1%} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=FORMATS, action="append", help="may be repeated")
    parser.add_argument("--model", default=RANDOM, help="random, or a model that kvpress.load_model knows")
    parser.add_argument("--press", action="append", help="spec; may be repeated; all of the table by default")
    parser.add_argument("--length", type=int, default=192)
    parser.add_argument("--out", type=Path, help="JSON file; runs of the same format and model are replaced")
    parser.add_argument("--table", type=Path, help="print the table of this JSON file, and run nothing")
    options = parser.parse_args()
    if options.table is not None:
        print(table(json.loads(options.table.read_text(encoding="utf-8"))["runs"]), end="")
        return
    if not options.format:
        parser.error(f"give --format, one of {', '.join(FORMATS)}, or --table")
    transformers.logging.set_verbosity_error()
    about = {"model": options.model, "length": options.length, "date": date.today().isoformat(), "machine": cpu_model()}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    about["command"] = shlex.join(["python", "-m", "benchmarks.quantised_weights", *sys.argv[1:]])
    ids = prompt_of(options.model, options.length)
    with TemporaryDirectory() as folder:
        path = folder
        if options.model == RANDOM:
            random_model("llama", **SIZES).save_pretrained(folder)
        else:
            path = folder_of(options.model)
        for name in options.format:
            for run in measure(name, path, ids, options.press or SPECS):
                if options.out is not None:
                    store(options.out, about | run)


if __name__ == "__main__":
    main()
