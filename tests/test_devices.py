# SPDX-License-Identifier: Apache-2.0
"""Devices by name, and shell completion: what every command has."""

from __future__ import annotations

import pytest
import torch
from typer.testing import CliRunner

from kvpress.cli import app
from kvpress.hf.models import device_named


def test_auto_is_a_gpu_if_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_named("auto") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert device_named("auto") == torch.device("cuda")


@pytest.mark.parametrize(
    ("name", "message"),
    [("gpu", "device must be auto, cpu, cuda or cuda:1, got 'gpu'"), ("cuda:1", "'cuda:1': torch finds 1 GPUs")],
)
def test_unknown_devices_are_refused(name: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(ValueError, match=message):
        device_named(name)


def test_a_wrong_device_is_wrong_input_of_a_command() -> None:
    done = CliRunner().invoke(
        app, ["ask", "--model", "reference", "--cache", "absent.kv", "--device", "gpu", "What is it?"]
    )
    assert done.exit_code == 3  # the missing file comes first
    done = CliRunner().invoke(
        app, ["calibrate", "cq", "--model", "reference", "--data", "a.txt", "--out", "b", "--device", "gpu"]
    )
    assert done.exit_code == 2


def test_the_shell_completes_names_of_commands() -> None:
    environment = {"_KVPRESS_COMPLETE": "complete_bash", "COMP_WORDS": "kvpress do", "COMP_CWORD": "1"}
    done = CliRunner().invoke(app, [], env=environment, prog_name="kvpress")
    assert done.output.split() == ["doctor"]
