# SPDX-License-Identifier: Apache-2.0
"""Patterns calibrated for each head against the same pattern for all heads, and the loss of `zipvl` in other queries.

    PYTHONPATH=.:eval python -m benchmarks.head_patterns [--texts 8] [--length 1024] [--block 16]

Patterns are those of `kvpress calibrate minference`, calibrated on other texts than the reference model reads here.
Printed is the mean divergence of its next-token distributions from those of full attention, for patterns that read the same
share of the pairs, and for `zipvl` with and without `wide`, which reads more.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import torch
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.texts import read_texts
from kvpress_eval.run.models import load_engine
from torch import Tensor

import kvpress
from benchmarks.key_bias import DATA
from kvpress.calibrate import PatternSettings, calibrate
from kvpress.calibrate.corpus import documents, pack

DENSITIES = (0.25, 0.12)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=8)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--block", type=int, default=16)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig(lengths=(options.length,), samples=options.texts)
    engine = load_engine(config)
    model, ids = engine.model, read_texts(config, engine, 1)[:, : options.length]
    full = model(ids).logits.float().log_softmax(dim=-1)
    print(f"{options.texts} texts of {options.length} tokens, blocks of {options.block}, {date.today().isoformat()}\n")
    print("| density | pattern | KL |\n|---:|---|---:|")
    texts = pack(engine.tokenizer, documents(str(DATA)), options.length, 6)
    with tempfile.TemporaryDirectory() as folder:
        for density in DENSITIES:
            path = Path(folder) / f"patterns-{density:g}.safetensors"
            calibrate(model, texts, PatternSettings(density, block=options.block), path)
            for name, specs in (
                ("lines for every head", "vertical=1000000,slash=1000000"), ("by head", f"calibration='{path}'"),
            ):  # fmt: skip
                spec = f"minference:{specs},block={options.block},max_density={density}"
                print(f"| {density:g} | {name} | {divergence(model, ids, full, spec):.3f} |", flush=True)
    for spec in ("zipvl", "zipvl:wide=true"):
        print(f"| | `{spec}` | {divergence(model, ids, full, spec):.3f} |", flush=True)


def divergence(model: Any, ids: Tensor, full: Tensor, spec: str) -> float:
    """Return the mean divergence of a model under a press from its `full` log-probabilities."""
    with kvpress.get_press(spec)(model):
        log_probs = model(ids).logits.float().log_softmax(dim=-1)
    return float((full.exp() * (full - log_probs)).sum(dim=-1).mean())


if __name__ == "__main__":
    main()
