"""How much of the attention to sealed pairs falls on those that a selector reads, on the reference model.

    python -m benchmarks.recall [--samples 4] [--out benchmarks/results/recall.json]

Contexts of 1024 tokens and their questions; measured at the first token of the answer. For every query head of the layers
that choose: the attention weights, normalised over the sealed pairs, of what is read; of as many pairs drawn at random
(on average); and of as many with the largest weights, chosen for each query head alone.
"""

from __future__ import annotations

import argparse
import gzip
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.attention import Partial
from kvpress.context import LayerCall
from kvpress.presses.base import BasePress
from kvpress.sparse.base import Selector, Sets

PROMPTS = Path(__file__).parent / "data" / "refmodel_test.jsonl.gz"
TASKS = ("mk16", "vt2")
FRACTIONS = (0.25, 0.125, 0.0625)
SPECS = (
    "quest:budget={},page_size=4,skip_layers=0",
    "quest:budget={},skip_layers=0",
    "double_sparsity:budget={},skip_layers=0",
    "double_sparsity:budget={},skip_layers=0,label_bits=16",
    "double_sparsity:budget={},skip_layers=0,channels=32,label_bits=16",
    "tidal_decode:budget={},skip_layers=0,reselect_layer=1",
    "tidal_decode:budget={},skip_layers=0,reselect_layer=1,heads=query",
)


@dataclass(frozen=True)
class Recall:
    """Mean attention on the pairs that are read, on as many at random, and on the best for each query head."""

    read: float
    random: float
    best: float


@contextmanager
def watched(press: BasePress, model: Any) -> Iterator[list[tuple[LayerCall, Tensor, Sets]]]:
    """Install a press, and list every choice that its selectors make."""
    choices: list[tuple[LayerCall, Tensor, Sets]] = []
    with press(model) as session:
        for selector in session.selectors.values():
            selector.attend = _listing(selector, choices)  # type: ignore[method-assign]
        yield choices


def _listing(selector: Selector, choices: list[tuple[LayerCall, Tensor, Sets]]) -> Any:
    attend = selector.attend

    def attending(call: LayerCall, queries: Tensor) -> list[Partial]:
        choices.append((call, queries, selector.choose(call, queries)))
        return attend(call, queries)

    return attending


@torch.no_grad()
def recall(model: Any, prompts: Sequence[Tensor], press: BasePress) -> Recall:
    """Measure a selector on prompts `[1, n]`, at the token that follows each."""
    read, random, best = [], [], []
    for ids in prompts:
        cache = DynamicCache(config=model.config)
        with watched(press, model) as choices:
            model(ids[:, :-1], past_key_values=cache)
            model(ids[:, -1:], past_key_values=cache)
        for call, queries, sets in choices:
            (segment,) = call.store.segments
            for n in range(segment.layout.streams if sets else 0):
                span = segment.layout.rows(n)
                weights = torch.softmax(call.logits(queries[n], segment.read(span)[0]), dim=-1)
                for head, received in enumerate(weights):
                    part = (sets or [])[head * len(sets or []) // len(weights)][0]
                    chosen = part.rows[n, : part.counts[n]].long() - span.start
                    read.append(float(received[chosen].sum()))
                    best.append(float(received.topk(len(chosen)).values.sum()))
                    random.append(len(chosen) / len(received))
    return Recall(*(sum(part) / len(part) for part in (read, random, best)))


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
        found = [recall(model, prompts, kvpress.get_press(spec.format(part))) for part in FRACTIONS]
        table[spec] = {str(part): asdict(one) for part, one in zip(FRACTIONS, found, strict=True)}
        cells = " | ".join(f"{100 * one.read:.0f} ({100 * one.random:.0f}, {100 * one.best:.0f})" for one in found)
        print(f"| `{spec.format('f')}` | {cells} |", flush=True)
    if options.out:
        options.out.write_text(
            json.dumps({"samples": options.samples, "tasks": TASKS, "table": table}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
