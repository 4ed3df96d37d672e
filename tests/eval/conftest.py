# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import gc
import io
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cells import Cell
from kvpress_eval.run.models import load_engine
from kvpress_eval.run.runner import RunResult, run
from kvpress_eval.tasks.source import Source
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

import kvpress
from tests.eval.engines import LOADERS, load_once


@pytest.fixture(scope="session", autouse=True)
def _imported_objects_stay() -> Iterator[None]:
    """Keep imported objects out of the garbage collection that a run does after a failure."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def _load_the_bundled_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in LOADERS:
        monkeypatch.setattr(f"{module}.load_engine", load_once)


@pytest.fixture
def really_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load models anew, for tests of loading itself."""
    for module in LOADERS:
        monkeypatch.setattr(f"{module}.load_engine", load_engine)


@pytest.fixture(scope="session")
def reference_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(kvpress.reference_path(), padding_side="left")


@pytest.fixture(scope="session")
def byte_tokenizer() -> PreTrainedTokenizerBase:
    """Tokenizer with one token per byte and no special tokens, unlike the reference tokenizer."""
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
    """Return a function that builds configurations of runs of a second or two."""

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
    """Run once, for tests that only read the results."""
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
    """Copy the folder of a finished run, for tests that change it."""
    return Path(shutil.copytree(finished[0].out, tmp_path / "copied"))


@pytest.fixture
def cell() -> Cell:
    return Cell("none", Source("vt", 64, [], lambda _: [], {}, 64), {"press": "none"}, "0123")
