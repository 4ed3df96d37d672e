# SPDX-License-Identifier: Apache-2.0
"""Results of every registered spec, to compare two states of the code bit for bit on one machine.

    python -m tests.goldens --write FILE     record the results of this state
    python -m tests.goldens --compare FILE   list the specs whose results differ; exit status 1 if there are any

For each example and case of the registry: two left-padded rows on the reference model and on a tiny Gemma 3, a prompt, eight
decode steps, a later turn of several tokens and eight more. A record holds the digest of all logits, the kept positions and the
bytes by component, or the error. Bits differ between processors, so that records are not committed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.hf.models import with_cache
from tests.models import grow, padded_batch, tiny_model

STEPS = 8
TURN = 12


def specs() -> list[str]:
    """Return every spec of the registry once."""
    entries = kvpress.list_presses()
    return sorted({spec for entry in entries for spec in (entry.example, *entry.cases)} | set(COMPOSITIONS))


COMPOSITIONS = (
    "snapkv:0.5,window_size=4 + kivi:bits=4,group_size=4,residual_length=4 + quest:budget=16,page_size=4,skip_layers=0",
    "adakv(knorm:0.5) + rotated:bits=3",
    "refit(kvzip:0.5) + kivi:bits=4,residual_length=0,group_size=32",
    "prefill_decoding(knorm:0.5; decoding(knorm):target_size=24,compression_interval=4) + turboquant:bits=4",
)
"""Compositions that reach code which single presses do not."""


def models() -> dict[str, Any]:
    """Return the models by name."""
    reference = kvpress.load_model("reference")[0]
    return {"reference": reference, "gemma3": tiny_model("gemma3_text")}


def passes(model: Any, press: Any, ids: Tensor, mask: Tensor) -> Iterator[Any]:
    """Yield the logits of each pass, then the cache: prompt, decode steps, a later turn, decode steps."""
    cache = DynamicCache(config=model.config)
    turn = ids[:, :TURN].flip(1)

    def read(new: Tensor) -> Tensor:
        positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -new.shape[1] :]
        settings = {"attention_mask": mask, "position_ids": positions, **with_cache(cache)}
        return model(new, **settings).logits[:, -1]

    with press(model):
        for new in (ids, turn):
            logits = read(new)
            yield logits
            for _ in range(STEPS):
                mask = grow(mask, 1)
                logits = read(logits.argmax(-1, keepdim=True))
                yield logits
            mask = grow(mask, TURN)
    yield cache


def record(model: Any, spec: str, ids: Tensor, mask: Tensor) -> dict[str, Any]:
    """Return the record of one spec."""
    torch.manual_seed(0)
    digest = hashlib.sha256()
    try:
        *logits, cache = passes(model, kvpress.get_press(spec), ids, mask)
    except (ValueError, TypeError, NotImplementedError, RuntimeError, FileNotFoundError) as error:
        return {"error": type(error).__name__}
    for tensor in logits:
        digest.update(tensor.float().numpy().tobytes())
    kept = [[[head.tolist() for head in row] for row in layer] for layer in kvpress.kept_positions(cache)]
    report = kvpress.memory_report(cache)
    return {
        "logits": digest.hexdigest(),
        "positions": hashlib.sha256(json.dumps(kept).encode()).hexdigest(),
        "bytes": dict(report.components),
    }


@torch.no_grad()
def records() -> dict[str, dict[str, Any]]:
    """Return the records of all specs on all models."""
    warnings.simplefilter("ignore")
    table = {}
    for name, model in models().items():
        ids, mask = padded_batch([180, 150])
        for spec in specs():
            table[f"{name}: {spec}"] = record(model, spec, ids, mask)
    return table


def main() -> int:
    """Write or compare records."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--write", type=Path, metavar="FILE")
    action.add_argument("--compare", type=Path, metavar="FILE")
    options = parser.parse_args()
    table = records()
    if options.write:
        options.write.write_text(json.dumps(table, indent=1), encoding="utf-8")
        errors = sum("error" in entry for entry in table.values())
        print(f"{len(table)} records, {errors} of them errors")
        return 0
    earlier = json.loads(options.compare.read_text(encoding="utf-8"))
    different = sorted(key for key in table.keys() | earlier.keys() if table.get(key) != earlier.get(key))
    for key in different:
        print(f"{key}\n  before {earlier.get(key)}\n  after  {table.get(key)}")
    print(f"{len(different)} of {len(table)} records differ")
    return int(bool(different))


if __name__ == "__main__":
    sys.exit(main())
