# SPDX-License-Identifier: Apache-2.0
"""Bits per layer of `kvpress calibrate bits` against the same bits in every layer.

    PYTHONPATH=.:eval python -m benchmarks.layer_bits [--texts 16] [--tokens 128]

The table is calibrated on other texts than those that are read. It is compared with the same bits in every layer, with the two
ways to share them between keys and values where they are not an integer, and with the reversed table: the first layer gets the
bits of the last one. Printed are the mean divergence from the full cache along the tokens after a context of 1024, and the
difference to the first row of the same average with its 95% interval over texts. The table is written into
`docs/lab/codecs-layers.md`.
"""

from __future__ import annotations

import argparse
import tempfile
from datetime import date
from pathlib import Path

import torch
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.texts import read_texts
from kvpress_eval.results.stats import paired_difference
from kvpress_eval.run.models import load_engine
from torch import Tensor

import kvpress
from benchmarks.key_bias import DATA
from kvpress.calibrate import BitsSettings, calibrate
from kvpress.calibrate.corpus import documents, pack

CODECS = ("kivi:bits={},residual_length=0", "rotated:bits={},residual_length=0", "gear_l:bits={},residual_length=0")
PLAIN = {3.0: ("3",), 2.5: ("(3,2)", "(2,3)")}
"""The same bits in every layer, by their average."""


def tables(model: torch.nn.Module, tokenizer: object, average: float, folder: Path) -> dict[str, str]:
    """Return the bits of every layer as settings of a codec: from a calibrated file, and reversed."""
    path = folder / f"bits-{average:g}.safetensors"
    calibrate(model, pack(tokenizer, documents(str(DATA)), 1024, 8), BitsSettings(average), path)
    pairs = kvpress.KIVIPress(str(path)).layer_bits().pairs
    return {"by layer": f"'{path}'", "upside down": str(pairs[::-1]).replace(" ", "")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    config = RunConfig(lengths=(1024,), samples=options.texts)
    engine = load_engine(config)
    comparison = Comparison(engine, read_texts(config, engine, options.tokens), 1024, batch_size=8)
    print(f"{options.texts} texts of 1024 tokens, {options.tokens} behind each, {date.today().isoformat()}\n")
    print(
        "| average | codec | bits | measured bits | KL | against the first | 95% |\n|---:|---|---|---:|---:|---:|---|"
    )
    with tempfile.TemporaryDirectory() as folder:
        for average, plain in PLAIN.items():
            allocations = tables(engine.model, engine.tokenizer, average, Path(folder))
            for codec in CODECS:
                first: Tensor | None = None
                for name, bits in ({bits: bits for bits in plain} | allocations).items():
                    fidelity = comparison.fidelity(codec.format(bits))
                    kl = fidelity.kl.mean(dim=1)
                    first = kl if first is None else first
                    moved = paired_difference([list(zip(kl.tolist(), first.tolist(), strict=True))])
                    print(
                        f"| {average:g} | `{codec.partition(':')[0]}` | {name} | {fidelity.prompt_bits:.3f} | "
                        f"{float(kl.mean()):.4f} | {moved.mean:+.4f} | {moved.low:+.4f} to {moved.high:+.4f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
