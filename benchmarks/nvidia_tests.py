# SPDX-License-Identifier: Apache-2.0
"""Public tests of NVIDIA kvpress on this library, with each failure classified; `docs/nvidia.md` has the counts.

    python benchmarks/nvidia_tests.py [--version 0.5.5] [--out benchmarks/results/nvidia_tests.json] [--folder FOLDER]

Needs a connection to PyPI for the source distribution, which is unpacked and never installed. The tests read a small model
from the hub; in its place stand a random model of the same shape and a tokenizer trained on the tests' own text, so no other
connection is needed. Tests of published files, of a GPU and of datasets count as not run. Takes about a minute.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.machine import cpu_model

MODELS = ("MaxJeblick/llama2-0b-unit-test", "maxjeblick/llama2-0b-unit-test")
VOCABULARY = 4096
SIZES = {
    "hidden_size": 24, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 6, "max_position_embeddings": 2048,
}  # fmt: skip
SKIPPED = ("tests/integration", "tests/test_evaluation_utils.py")
"""Tests of datasets of the hub, and of scripts that the source distribution does not contain."""

SEEDED = """import pytest, torch


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)
"""
"""Plugin of pytest that seeds every test: they draw tokens and weights at random, so that counts would vary."""

NOT_RUN, MEANT, MISSING, OURS = "not run", "meant", "lacks a name", "ours"

RULES = (
    (NOT_RUN, "needs files of the hub", r"hub's collection|outgoing traffic|connect to 'https|offline|HF_HUB_OFFLINE"),
    (NOT_RUN, "needs statistics published for the model", r"means the bundled file|ExpectedAttentionStats' from"),
    (NOT_RUN, "calls transformers with an argument it no longer has", r"RotaryEmbedding.*'device'"),
    (NOT_RUN, "replaces `forward`, whose signature `generate` reads", r"\[1, \d+, 1\]"),
    (MEANT, "evicted pairs are freed, not masked", r"masked_key_indices'|heads hold different numbers of pairs"),
    (MEANT, "the cache counts the tokens it has seen", r"(where|and) +\d+ = get_seq_length|context_length=22 tokens"),
    (MEANT, "two methods would choose the pairs", r"would both choose|keeps equally many pairs in every head"),
    (MEANT, "every layer's budget is rounded down", r"== \d+\.\d+ ± "),
    (MEANT, "an attribute would hide a method", r"'scores' of StoreKnormPress is a method"),
    (MEANT, "the pipeline prepares batches", r"preprocess\(\) missing 1 required"),
    (MISSING, "internal attribute or method", r"has no attribute '(_\w+|score_val)'"),
    (OURS, "calls `compress` with a stand-in of a module", r"needs rotary angles|scores from observers|no dense output proj"),
    (MISSING, "`restore_embeddings` set by hand", r"has no attribute 'restore_embeddings'"),
)  # fmt: skip
"""Category, reason and pattern of an error message; the first pattern that fits counts."""


def main() -> None:
    """Run the tests and print the counts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", default="0.5.5")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    parser.add_argument("--folder", type=Path, help="folder to work in; a temporary one by default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        unpack_tests(options.version, folder)
        make_models(folder)
        record = {
            "version": options.version,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "machine": cpu_model(),
            **run(folder),
        }
    if options.out is not None:
        options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{record['passed']} of {record['passed'] + len(record['failures'])} pass")
    for (category, reason), count in counted(record["failures"]).items():
        print(f"{count:4} {category}: {reason}")


def unpack_tests(version: str, folder: Path) -> None:
    """Download the source distribution of a version and unpack its tests into a folder."""
    target = f"kvpress=={version}"
    arguments = ["download", target, "--no-deps", "--no-binary", ":all:", "--quiet", "--dest", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)  # noqa: S603 - fixed arguments
    with tarfile.open(folder / f"kvpress-{version}.tar.gz") as archive:
        for member in archive.getmembers():
            _, _, member.name = member.name.partition("/")
            if member.name.startswith("tests/"):
                archive.extract(member, folder, filter="data")


def make_models(folder: Path) -> None:
    """Save a random model of the shape that the tests expect, with a tokenizer that reads their text."""
    tokenizer = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    tokenizer.train_from_iterator([file.read_text() for file in sorted(folder.rglob("tests/**/*.py"))], trainer)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    names = dict(zip(("unk_token", "bos_token", "eos_token"), special, strict=True))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=VOCABULARY, **SIZES))
    for name in MODELS:
        wrapped.save_pretrained(folder / name)
        model.save_pretrained(folder / name)


def run(folder: Path) -> dict[str, object]:
    """Run the tests in a folder; return the number that passed and the failures, `[test, category, reason, message]`."""
    report = folder / "report.xml"
    skipped = [f"--ignore={name}" for name in SKIPPED]
    (folder / "seeded.py").write_text(SEEDED)
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "seeded",
        "--continue-on-collection-errors",
        f"--junitxml={report}",
        *skipped,
    ]
    paths = [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "pytest", *options, "tests"]
    subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)  # noqa: S603 - as above
    passed, failures = 0, []
    for case in ElementTree.parse(report).getroot().iter("testcase"):  # noqa: S314 - written by pytest above
        faults = [child for child in case if child.tag in ("failure", "error")]
        passed += not len(case)
        for fault in faults[:1]:
            name = f"{case.get('classname')}::{case.get('name')}"
            message = f"{fault.get('message')}\n{fault.text}"
            failures.append([name, *classified(message), str(fault.get("message"))[:200]])
    return {"passed": passed, "failures": failures}


def classified(message: str) -> tuple[str, str]:
    """Return the category and the reason of an error message."""
    return next(((kind, why) for kind, why, pattern in RULES if re.search(pattern, message)), (OURS, "not classified"))


def counted(failures: list[list[str]]) -> dict[tuple[str, str], int]:
    """Return the number of failures for each category and reason, in the order of `RULES`."""
    counts = Counter((kind, why) for _, kind, why, _ in failures)
    order = [*((kind, why) for kind, why, _ in RULES), (OURS, "not classified")]
    return {key: counts[key] for key in order if counts[key]}


if __name__ == "__main__":
    main()
