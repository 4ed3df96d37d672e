# SPDX-License-Identifier: Apache-2.0
"""`kvpress doctor` reports facts that other modules agree with, and every problem with its fix."""

from __future__ import annotations

import json
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import kvpress
from kvpress import doctor
from kvpress.cli import app
from kvpress.kernels.cpu import build, launch, libraries
from tests.test_import import python


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["doctor", *arguments])


def test_the_facts_are_those_of_the_running_packages() -> None:
    done = run("--json")
    found = json.loads(done.output)
    assert done.exit_code == bool(found["problems"])
    assert found["kvpress"].startswith(kvpress.__version__)
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["transformers"] == version("transformers")
    assert found["kernels"]["level"] == launch.level()
    assert len(found["gpus"]) == torch.cuda.device_count()


def test_the_screen_fits_80_columns_and_has_all_facts() -> None:
    lines = run().output.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) <= 24
    labels = {line[:10].strip() for line in lines}
    assert labels >= {"kvpress", "Python", "packages", "processor", "kernels", "compiler", "GPU", "memory", "folder"}


def test_transformers_is_not_imported() -> None:
    code = "import sys, kvpress.doctor as d; d.diagnose(); print('transformers' in sys.modules, 'torch' in sys.modules)"
    assert python(code) == "False True"


def test_a_second_owner_is_a_problem_with_both_commands(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    other = SimpleNamespace(version="0.5.5", locate_file=lambda _: tmp_path)
    monkeypatch.setattr(doctor, "distributions", lambda name: [other] if name == "kvpress" else [])
    done = run()
    assert done.exit_code == 1
    text = " ".join(done.output.split())
    assert "PROBLEM the distribution kvpress 0.5.5 in" in text
    assert "pip uninstall -y kvpress kvpress-toolkit; pip install kvpress-toolkit" in text


def test_missing_and_untested_versions_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_distribution", object)
    monkeypatch.setattr(
        doctor, "requires", lambda _: ["torch>=2.7", "transformers<5", "absent>=1", "ray; extra == 'ray'"]
    )
    problems = list(doctor._versions_out_of_range())
    assert len(problems) == 2
    assert (
        problems[0] == f"transformers {version('transformers')} is not a tested version: pip install 'transformers<5'"
    )
    assert problems[1] == "absent is not installed: pip install 'absent>=1'"


def test_kernels_turned_off_are_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    problems: list[str] = []
    kernels = doctor._kernels(problems)
    assert (kernels.level, kernels.origin, problems) == (None, "KVPRESS_CPU_KERNELS=0", [])


def test_an_unknown_level_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_LEVEL", "avx1024")
    problems: list[str] = []
    assert doctor._kernels(problems).level is None
    assert "KVPRESS_CPU_LEVEL=avx1024: there is no such level" in problems[0]


def test_kernels_that_nothing_can_compile_are_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> str:
        raise libraries.BuildError("no C++ compiler found")

    monkeypatch.setattr(libraries, "compiler", fail)
    monkeypatch.setattr(build, "find_origin", lambda _: None)
    problems: list[str] = []
    assert doctor._kernels(problems).level is None
    assert "there is no C++ compiler: install one" in problems[0]


def test_gpus_are_named_with_their_kernels_and_whether_they_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    facts = [SimpleNamespace(name=name, total_memory=80 * 2**30) for name in ("NVIDIA H100 80GB HBM3", "Tesla T4")]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_properties", facts.__getitem__)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: ((9, 0), (7, 5))[device.index])
    done = run()
    text = " ".join(done.output.split())
    assert "NVIDIA H100 80GB HBM3, 80.0 GiB, " in text
    assert "Tesla T4, 80.0 GiB, plain torch: older than compute capability 8.0" in text
    assert "unmeasured Tesla T4: no figures of ours unmeasured several GPUs" in text


def test_a_driver_that_raises_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> bool:
        raise RuntimeError("no driver")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    problems: list[str] = []
    assert doctor._gpus(problems) == ()
    assert problems == ["torch cannot list the GPUs: RuntimeError: no driver"]


def test_sizes_of_folders_leave_out_links(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    inside = tmp_path / "kvpress" / "avx2"
    inside.mkdir(parents=True)
    (inside / "decode.so").write_bytes(b"x" * 1000)
    (inside / "link.so").symlink_to(inside / "decode.so")
    first = next(doctor._folders())
    assert (first.purpose, first.size) == ("kernels, models", 1000)
