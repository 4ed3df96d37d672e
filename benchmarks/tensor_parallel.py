# SPDX-License-Identifier: Apache-2.0
"""Tokens, bytes and time of presses with the heads of a model divided among processes (tensor parallel), against one process.

    python benchmarks/tensor_parallel.py --model smollm2 --out one.json
    torchrun --nproc-per-node 5 benchmarks/tensor_parallel.py --model smollm2 --against one.json

Every process has one thread, computes in float32 and exchanges numbers by gloo.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoTokenizer

import kvpress
from kvpress.hf.model_files import folder_of

PRESSES = ("none", "snapkv:0.5", "adakv(snapkv:0.5)", "kivi:bits=4", "kvzip:0.5,repeat_prompt=", "frontier:smaller=10")
TEXT = " The code for tiger is 4837. The old river runs past the mill. The code for heron is 2290."


def measure(model: Any, ids: torch.Tensor, spec: str, new: int) -> dict[str, Any]:
    """Return the new tokens, the bytes of this process's cache, the pairs kept, and milliseconds a token."""
    with kvpress.get_press(spec)(model), torch.no_grad():
        first = model.generate(ids, max_new_tokens=1, do_sample=False, return_dict_in_generate=True)
        start = time.perf_counter()
        longer = first.sequences
        mask = torch.ones_like(longer)
        output = model.generate(
            longer, attention_mask=mask, past_key_values=first.past_key_values, max_new_tokens=new - 1,
            do_sample=False, return_dict_in_generate=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start
    report = kvpress.memory_report(output.past_key_values)
    total = report.over_ranks() if dist.is_initialized() else report
    return {
        "tokens": output.sequences[0, ids.shape[1] :].tolist(),
        "bytes": report.total_bytes,
        "bytes_of_all": total.total_bytes,
        "kept": total.kept,
        "ms_per_token": 1000 * seconds / (new - 1),
    }


def main() -> None:
    """Run all presses and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="reference", help="name of a bundled or packaged model, or a folder")
    parser.add_argument("--length", type=int, default=256, help="tokens of the prompt")
    parser.add_argument("--new", type=int, default=16, help="generated tokens")
    parser.add_argument("--out", type=Path, help="file for the results of one process")
    parser.add_argument("--against", type=Path, help="results of one process, to compare with")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    folder = folder_of(arguments.model)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    plan = {} if ranks == 1 else {"tp_plan": "auto"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **plan).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    ids = tokenizer(TEXT * (1 + arguments.length // 16), return_tensors="pt")["input_ids"][:, : arguments.length]
    single = {} if arguments.against is None else json.loads(arguments.against.read_text())
    results = {spec: measure(model, ids, spec, arguments.new) for spec in PRESSES}
    if ranks == 1 or dist.get_rank() == 0:
        for spec, result in results.items():
            line = f"{spec:28s} {result['bytes']:>10d} bytes a rank {result['ms_per_token']:8.1f} ms a token"
            if one := single.get(spec):
                equal = "equal" if (one["tokens"], one["kept"]) == (result["tokens"], result["kept"]) else "DIFFERENT"
                line += f"  tokens and pairs {equal}, {result['bytes'] / one['bytes']:.3f} of the bytes of one process"
            print(line)
        if arguments.out is not None:
            arguments.out.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
