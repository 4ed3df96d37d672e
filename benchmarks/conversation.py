# SPDX-License-Identifier: Apache-2.0
"""Bytes that a cache holds after every turn of a long conversation, under presses that bound it and presses that do not.

    python benchmarks/conversation.py [--turns 100] [--out benchmarks/results/conversation.json]

A random Llama (2 layers, 2 kv heads, D = 64, float32). A turn has 32 to 96 tokens and an answer of 24. `held` counts every byte
of every tensor of the cache, by the memory report. No times are measured. Held bytes vary with the length of a turn and with
the groups of a codec, so growth is the largest number of the second half of the conversation over the largest of the first
half.
"""

from __future__ import annotations

import argparse
import json
import re
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvpress
from kvpress.hf.models import with_cache

SPECS = (
    "none",
    "snapkv:budget=256",
    "conversation(snapkv):budget=256,interval=16",
    "protect(conversation(snapkv):budget=256,interval=16):tokens=0:16",
    "conversation(adakv(h2o)):budget=256,interval=16",
    "conversation(snapkv):budget=256,interval=16 + kivi:bits=4,residual_length=32",
    "conversation(snapkv):budget=256,interval=16 + quest:budget=64,skip_layers=0",
)
SAID, ANSWER = (32, 96), 24
"""Fewest and most tokens of a turn, and tokens of its answer."""


def model() -> Any:
    """Return the random model."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1 << 15,
        eos_token_id=None,
    )
    network = LlamaForCausalLM(config).eval()
    network.generation_config.pad_token_id = 0
    return network


def talk(
    model: Any, spec: str, turns: int, turn_tokens: tuple[int, int] = SAID, answer: int = ANSWER
) -> list[dict[str, int]]:
    """Return the state of the cache after every turn: tokens seen, pairs kept and bytes."""
    cache, records = DynamicCache(config=model.config), []
    generator = torch.Generator().manual_seed(1)
    ids = torch.zeros(1, 0, dtype=torch.long)
    with torch.no_grad(), kvpress.get_press(spec)(model):
        for _ in range(turns):
            length = int(torch.randint(turn_tokens[0], turn_tokens[1] + 1, (1,), generator=generator))
            new = torch.randint(3, model.config.vocab_size, (1, length), generator=generator)
            ids = torch.cat([ids, new], dim=1)
            ids = model.generate(ids, **with_cache(cache), max_new_tokens=answer, do_sample=False)
            report = kvpress.memory_report(cache)
            records.append({"seen": cache.get_seq_length(), "kept": report.kept, "held": report.total_bytes})
    return records


def growth(records: list[dict[str, int]]) -> float:
    """Return the largest number of bytes held in the second half of a conversation, over that of its first half."""
    sizes = [record["held"] for record in records]
    half = len(sizes) // 2
    return max(sizes[half:]) / max(sizes[:half])


def run(turns: int) -> dict[str, Any]:
    """Return the figures of all presses."""
    network, runs = model(), {}
    for spec in SPECS:
        records = talk(network, spec, turns)
        columns = {name: [record[name] for record in records] for name in records[0]}
        runs[spec] = {"growth": round(growth(records), 3), **columns}
    return {
        "date": date.today().isoformat(),
        "torch": torch.__version__.partition("+")[0],
        "transformers": transformers.__version__,
        "answer": ANSWER,
        "presses": runs,
    }


def to_text(record: dict[str, Any]) -> str:
    """Return the figures as JSON, a line for each list of numbers."""
    listed = re.compile(r"\[[\d,\s]+\]")
    return listed.sub(lambda match: " ".join(match[0].split()), json.dumps(record, indent=1)) + "\n"


def main() -> None:
    """Measure, print a table and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/conversation.json"))
    options = parser.parse_args()
    record = run(options.turns)
    marks = [turn for turn in (1, 10, 25, 50, 100) if turn <= options.turns]
    print("| press | " + " | ".join(f"turn {turn}: KiB" for turn in marks) + " | second half over first |")
    print("|---|" + "---:|" * (len(marks) + 1))
    for spec, result in record["presses"].items():
        cells = " | ".join(f"{result['held'][turn - 1] / 1024:.0f}" for turn in marks)
        print(f"| `{spec}` | {cells} | {result['growth']:.2f} |")
    options.out.write_text(to_text(record))


if __name__ == "__main__":
    main()
