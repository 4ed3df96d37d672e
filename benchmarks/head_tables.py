# SPDX-License-Identifier: Apache-2.0
"""Tables of heads of the reference model: training, and comparison with random tables.

python -m benchmarks.head_tables train            # minutes on one core; writes the tables that ship with the model
python -m benchmarks.head_tables compare 0.5      # correct answers, with that share of the heads streaming
"""

from __future__ import annotations

import argparse
import gzip
import json
import random
import tempfile
from pathlib import Path
from typing import Any

import torch

import kvpress
from kvpress.calibrate import DuoAttentionSettings, KVzipHeadSettings, RLKVSettings, calibrate
from kvpress.calibrate.corpus import documents, pack

DATA = Path(kvpress.__file__).parent / "data" / "reference"
TESTS = Path(__file__).parent / "data" / "refmodel_test.jsonl.gz"
TASKS = ("mk4", "mk16", "mq8", "vt1", "cwe")
SINKS, RECENT = 16, 64
TABLES = {
    "full_attention_heads.tsv": DuoAttentionSettings(SINKS, RECENT, answer=256, steps=80, lr=0.03),
    "adapter_weights.tsv": RLKVSettings(SINKS, RECENT, answer=256, steps=80, lr=0.03),
}


def train(model: Any, tokenizer: Any, folder: Path) -> None:
    """Train and write both tables, on texts that are not among the tasks."""
    ids = pack(tokenizer, documents(str(DATA / "calibration.jsonl")), 2000, 16)
    for name, settings in TABLES.items():
        head_table = calibrate(model, ids, settings, folder / name, "calibration.jsonl")
        print(name, head_table.tensors["gates"].tolist())


def accuracy(model: Any, tokenizer: Any, table: Path, ratio: float, count: int) -> float:
    """Return the share of `count` held-out tasks of 512 tokens that are answered correctly."""
    with gzip.open(TESTS, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["length"] == 512 and row["task"] in TASKS]
    random.Random(0).shuffle(rows)  # noqa: S311 - no secret
    press, right = kvpress.RLKVPress(ratio, table=str(table), sink_size=SINKS, recent_size=RECENT), 0
    for row in rows[:count]:
        ids = tokenizer(f"{row['context']}{row['question']}\n{row['answer_prefix']}", return_tensors="pt")["input_ids"]
        new = len(tokenizer(row["answer"], add_special_tokens=False)["input_ids"])
        with press(model):
            answer = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]
        right += tokenizer.decode(answer, skip_special_tokens=True).strip().startswith(row["answer"].strip())
    return right / count


def compare(model: Any, tokenizer: Any, ratio: float, tables: int = 6, count: int = 40) -> None:
    """Print the accuracy with the shipped tables, with that of `kvzip_heads`, and with random tables of the same sparsity."""
    for name in TABLES:
        print(name, accuracy(model, tokenizer, DATA / name, ratio, count))
    generator = random.Random(1)  # noqa: S311 - no secret
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "kvzip_heads.tsv"
        ids = pack(tokenizer, documents(str(DATA / "calibration.jsonl")), 2000, 4)
        calibrate(model, ids, KVzipHeadSettings(), measured, "calibration.jsonl")
        print("kvzip_heads", accuracy(model, tokenizer, measured, ratio, count))
        accuracies = []
        for number in range(tables):
            table = Path(folder) / f"{number}.tsv"
            table.write_text("\n".join("\t".join(str(generator.random()) for _ in range(2)) for _ in range(4)))
            accuracies.append(accuracy(model, tokenizer, table, ratio, count))
    print("random", sum(accuracies) / tables, accuracies)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    tasks.add_parser("train")
    tasks.add_parser("compare").add_argument("share", type=float, help="share of the heads that stream")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded, words = kvpress.load_model("reference", dtype=torch.float32)
    if options.task == "train":
        train(loaded, words, Path())
    else:
        compare(loaded, words, options.share)


if __name__ == "__main__":
    main()
