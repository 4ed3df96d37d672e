# SPDX-License-Identifier: Apache-2.0
"""Share of the attention to sealed pairs that falls on those that a selector reads, on the reference model.

    python -m benchmarks.recall [--samples 4] [--out benchmarks/results/recall.json]

Contexts have 1024 tokens and are followed by their questions; the share is measured at the first token of the answer. For every
query head of the layers that choose, it is the sum of the attention weights, normalised over the sealed pairs, of the pairs
that are read; of as many random pairs (on average); and of as many pairs with the largest weights, chosen for each query head
alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kvpress_eval.fidelity.layers import columns_read, watching
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.cache.attention import group_queries
from kvpress.core.press import BasePress
from kvpress.hf.models import with_cache
from kvpress.observe.call import LayerCall

PROMPTS = Path(__file__).parent / "data" / "refmodel_test.jsonl.gz"
TASKS = ("mk16", "vt2")
FRACTIONS = (0.25, 0.125, 0.0625)
SPECS = (
    "quest:budget={},page_size=4,skip_layers=0",
    "quest:budget={},skip_layers=0",
    "double_sparsity:budget={},skip_layers=0",
    "double_sparsity:budget={},skip_layers=0,label_bits=16",
    "double_sparsity:budget={},skip_layers=0,channels=32,label_bits=16",
    "loki:budget={}",
    "loki:budget={},label_bits=16",
    "tidal_decode:budget={},skip_layers=0,reselect_layer=1",
    "tidal_decode:budget={},skip_layers=0,reselect_layer=1,heads=query",
)


@dataclass(frozen=True)
class Recall:
    """Mean attention on some of the sealed pairs."""

    read: float
    """On the pairs that the selector reads."""
    random: float
    """On as many random pairs."""
    best: float
    """On as many pairs with the largest weights of each query head."""


@torch.no_grad()
def recall(model: Any, prompts: Sequence[Tensor], press: BasePress) -> Recall:
    """Measure a selector on prompts `[1, n]`, at the token after each."""
    read: list[Tensor] = []
    random: list[Tensor] = []
    best: list[Tensor] = []

    def see(call: LayerCall, output: Tensor) -> None:
        del output
        marks = columns_read(call)
        if call.read is None or marks is None:
            return
        (segment,) = call.store.segments
        streams, sealed = segment.layout.streams, segment.layout.longest
        keys = segment.read(slice(None))[0].view(streams, sealed, -1)
        weights = torch.softmax(call.logits(group_queries(call.queries, call.store.heads), keys), dim=-1)
        chosen = marks[..., :sealed]
        ranked = weights.sort(dim=-1, descending=True).values
        as_many = torch.arange(sealed) < chosen.sum(dim=-1, keepdim=True)
        for sums, values in ((read, weights * chosen), (best, ranked * as_many), (random, as_many / sealed)):
            sums.append(values.sum(dim=-1).flatten())

    for ids in prompts:
        cache = DynamicCache(config=model.config)
        with press(model) as session:
            model(ids[:, :-1], **with_cache(cache))
            with watching(session, see):
                model(ids[:, -1:], **with_cache(cache))
    return Recall(*(float(torch.cat(part).mean()) for part in (read, random, best)))


def read_prompts(tokenizer: Any, samples: int) -> list[Tensor]:
    """Return prompts that end where the answer begins, `samples` of each task."""
    with gzip.open(PROMPTS, "rt") as file:
        rows = [json.loads(line) for line in file]
    chosen = [row for task in TASKS for row in [r for r in rows if (r["length"], r["task"]) == (1024, task)][:samples]]
    texts = [row["context"] + row["question"] + "\n" + row["answer_prefix"] for row in chosen]
    return [tokenizer(text, return_tensors="pt").input_ids for text in texts]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, tokenizer = kvpress.load_model("reference", dtype=torch.float32)
    prompts = read_prompts(tokenizer, options.samples)
    table = {}
    print("| selector | " + " | ".join(f"{part}: read (random, best)" for part in FRACTIONS) + " |")
    print("|---" * (1 + len(FRACTIONS)) + "|")
    for spec in SPECS:
        recalls = [recall(model, prompts, kvpress.get_press(spec.format(part))) for part in FRACTIONS]
        table[spec] = {str(part): asdict(measured) for part, measured in zip(FRACTIONS, recalls, strict=True)}
        cells = " | ".join(
            f"{100 * measured.read:.0f} ({100 * measured.random:.0f}, {100 * measured.best:.0f})"
            for measured in recalls
        )
        print(f"| `{spec.format('f')}` | {cells} |", flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"samples": options.samples, "tasks": TASKS, "table": table}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
