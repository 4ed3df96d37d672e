from __future__ import annotations

import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.cells import Cell, TaskLength
from kvpress_eval.config import RunConfig
from kvpress_eval.runner import RunResult, run
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import kvpress


@pytest.fixture(scope="session")
def reference_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(kvpress.reference_path(), padding_side="left")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """One token per byte and no special tokens: unlike the reference tokenizer in every respect."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: index for index, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@pytest.fixture
def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


@pytest.fixture
def small(tmp_path: Path) -> Callable[..., RunConfig]:
    """Builds configurations of runs that take a second or two."""

    def build(**fields: Any) -> RunConfig:
        defaults: dict[str, Any] = {
            "presses": ("none", "random:0.5"),
            "tasks": ("niah_single",),
            "lengths": (64,),
            "samples": 3,
            "max_new_tokens": 4,
            "threads": 1,
            "out": tmp_path / "run",
        }
        return RunConfig(**{**defaults, **fields})

    return build


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunResult]:
    """A complete run that tests only read."""
    config = RunConfig(
        presses=("none", "random:0.5"),
        tasks=("niah_single", "vt"),
        lengths=(256,),
        samples=3,
        max_new_tokens=8,
        threads=1,
        out=tmp_path_factory.mktemp("finished"),
    )
    return config, run(config, Console(file=io.StringIO()))


@pytest.fixture
def copied(finished: tuple[RunConfig, RunResult], tmp_path: Path) -> Path:
    """The folder of a finished run, to be changed."""
    return Path(shutil.copytree(finished[0].out, tmp_path / "copied"))


@pytest.fixture
def cell() -> Cell:
    return Cell("none", TaskLength("vt", 64), {"press": "none"}, "0123")
