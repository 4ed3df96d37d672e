# SPDX-License-Identifier: Apache-2.0
"""Model loading of all commands: the configuration is read once, and the number of threads is the configured one."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.measure import measure
from kvpress_eval.report.show import show
from kvpress_eval.run import models
from kvpress_eval.run.estimate import measure_machine
from kvpress_eval.run.models import load_engine
from kvpress_eval.run.runner import run
from rich.console import Console
from safetensors.torch import save_file
from transformers import PreTrainedConfig

TEXT = " The code for tiger is 4837." * 4


def quiet() -> Console:
    return Console(file=io.StringIO(), width=120)


COMMANDS: dict[str, Callable[[RunConfig], Any]] = {
    "eval": lambda config: run(config, quiet()),
    "fidelity": lambda config: measure(config, 2, None, quiet()),
    "show": lambda config: show(config, TEXT, None),
}


pytestmark = pytest.mark.usefixtures("really_load")


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return RunConfig(tasks=("vt",), lengths=(64,), samples=1, max_new_tokens=1, threads=2, out=tmp_path)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_configuration_of_a_model_is_read_once(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    """Without sharing, transformers would read it again for the weights and once more for the tokenizer."""
    read: list[str] = []
    get = PreTrainedConfig.get_config_dict

    def counted(source: str, **options: Any) -> Any:
        read.append(source)
        return get(source, **options)

    monkeypatch.setattr(PreTrainedConfig, "get_config_dict", counted)
    COMMANDS[command](config)
    assert len(read) == 1


@pytest.mark.parametrize("command", [*COMMANDS, "engine", "estimate", "loaded"])
def test_threads_are_the_configured_ones(config: RunConfig, command: str) -> None:
    work = {
        **COMMANDS,
        "engine": load_engine,
        "estimate": lambda config: measure_machine(config, torch.float32),
        "loaded": lambda config: run(config, quiet(), engine),
    }
    engine = load_engine(config.model_copy(update={"threads": None})) if command == "loaded" else None
    before = torch.get_num_threads()
    assert before == 1
    try:
        work[command](config)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_missing_model_is_reported_before_loading(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, command: str
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(models, "fingerprint", lambda *source: pytest.fail("the model was loaded"))
    with pytest.raises(DataError, match="cannot load model"):
        COMMANDS[command](config.model_copy(update={"model": str(tmp_path / "empty")}))


def test_weights_are_identified_by_their_content_and_not_by_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models, "_HASHED", 8)  # so that the file counts as a large one
    values = torch.zeros(2**20)
    save_file({"weight": values}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    first = models.fingerprint(str(tmp_path), None)
    save_file({"adapter": torch.ones(3)}, tmp_path / "qfilter.safetensors")
    assert models.fingerprint(str(tmp_path), None) == first
    save_file({"weight": values + 0.01}, tmp_path / "model.safetensors")  # trained on: as many bytes
    trained = models.fingerprint(str(tmp_path), None)
    assert trained != first
    (tmp_path / "chat_template.jinja").write_text("{{ messages }}")
    assert models.fingerprint(str(tmp_path), None) != trained
