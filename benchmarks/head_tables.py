# SPDX-License-Identifier: Apache-2.0
"""Tables of heads of the reference model: how they are trained, and what they are worth beside random ones.

python -m benchmarks.head_tables train            # minutes on one core; writes the tables that ship with the model
python -m benchmarks.head_tables compare 0.5      # answers that are right, with that share of the heads streaming
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
    """Write both tables, from texts that are not among the tasks."""
    ids = pack(tokenizer, documents(str(DATA / "calibration.jsonl")), 2000, 16)
    for name, settings in TABLES.items():
        found = calibrate(model, ids, settings, folder / name, "calibration.jsonl")
        print(name, found.tensors["gates"].tolist())


def accuracy(model: Any, tokenizer: Any, table: Path, ratio: float, count: int) -> float:
    """Return the share of `count` held-out tasks of 512 tokens that are answered right."""
    with gzip.open(TESTS, "rt") as lines:
        rows = [row for row in map(json.loads, lines) if row["length"] == 512 and row["task"] in TASKS]
    random.Random(0).shuffle(rows)  # noqa: S311 - no secret
    press, right = kvpress.RLKVPress(ratio, table=str(table), sink_size=SINKS, recent_size=RECENT), 0
    for row in rows[:count]:
        ids = tokenizer(f"{row['context']}{row['question']}\n{row['answer_prefix']}", return_tensors="pt")["input_ids"]
        new = len(tokenizer(row["answer"], add_special_tokens=False)["input_ids"])
        with press(model):
            said = model.generate(ids, max_new_tokens=new, do_sample=False)[0, ids.shape[1] :]
        right += tokenizer.decode(said, skip_special_tokens=True).strip().startswith(row["answer"].strip())
    return right / count


def compare(model: Any, tokenizer: Any, ratio: float, tables: int = 6, count: int = 40) -> None:
    """Print what the shipped tables, that of `kvzip_heads` and random ones of the same sparsity leave right."""
    for name in TABLES:
        print(name, accuracy(model, tokenizer, DATA / name, ratio, count))
    drawn = random.Random(1)  # noqa: S311 - no secret
    with tempfile.TemporaryDirectory() as folder:
        measured = Path(folder) / "kvzip_heads.tsv"
        ids = pack(tokenizer, documents(str(DATA / "calibration.jsonl")), 2000, 4)
        calibrate(model, ids, KVzipHeadSettings(), measured, "calibration.jsonl")
        print("kvzip_heads", accuracy(model, tokenizer, measured, ratio, count))
        found = []
        for number in range(tables):
            table = Path(folder) / f"{number}.tsv"
            table.write_text("\n".join("\t".join(str(drawn.random()) for _ in range(2)) for _ in range(4)))
            found.append(accuracy(model, tokenizer, table, ratio, count))
    print("random", sum(found) / tables, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    tasks = parser.add_subparsers(dest="task", required=True)
    tasks.add_parser("train")
    tasks.add_parser("compare").add_argument("share", type=float, help="of the heads that stream")
    options = parser.parse_args()
    torch.set_num_threads(1)
    loaded, words = kvpress.load_model("reference", dtype=torch.float32)
    if options.task == "train":
        train(loaded, words, Path())
    else:
        compare(loaded, words, options.share)


if __name__ == "__main__":
    main()
