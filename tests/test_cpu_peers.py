# SPDX-License-Identifier: Apache-2.0
"""Comparison with other runtimes on a CPU: missing runtimes are reported, waits end, and ratios are right."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import cpu_layer, cpu_peers
from benchmarks.cpu_turns import Setting, Worker, WorkerError
from kvpress import env
from tests.kernels.compiler import needs_compiler

FORMATS = ("dense", "int8", "int4")
MISSING = ("onnxruntime", "openvino", "gguf")


@pytest.fixture
def no_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Machine without other runtimes, even where some are installed."""
    for name in MISSING:
        (tmp_path / f"{name}.py").write_text(f"raise ModuleNotFoundError(\"No module named '{name}'\")\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def setting(tmp_path: Path) -> Setting:
    return Setting(tokens=64, prompt=0, threads=1, levels=("baseline",), folder=str(tmp_path))


@needs_compiler
@pytest.mark.usefixtures("no_peers")
def test_ours_are_measured_and_peers_that_are_not_installed_are_rows_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "peers.json"
    monkeypatch.delenv("KVPRESS_CPU_LEVEL", raising=False)
    names = ["reading", "ours int4", "ONNX Runtime int4", "OpenVINO u8"]
    cpu_peers.main(["--quick", "--parts", "layer", "--only", ",".join(names), "--out", str(out)])
    rows = {row["name"]: row for row in json.loads(out.read_text())["rows"]}
    assert list(rows) == names
    for name, module in {"ONNX Runtime int4": "onnxruntime", "OpenVINO u8": "openvino"}.items():
        assert rows[name]["failed"] == f"ModuleNotFoundError: No module named '{module}'"
    int4 = rows["ours int4"]
    assert 0 < int4["min_ms"] <= int4["median_ms"]
    assert (
        int4["cache_mib"] == 512 * 2 * 8 * 128 * 5 / 8 / 2**20
    )  # 4 bits, and 2 x 16 bits of scale and zero point for 32 values
    assert int4["peak_mib"] > int4["cache_mib"]
    assert 0.05 < int4["error"] < 0.5
    assert env.cpu_level() is None
    assert f"ONNX Runtime int4 (layer, 512): {rows['ONNX Runtime int4']['failed']}." in capsys.readouterr().out


@pytest.mark.usefixtures("no_peers")
def test_a_model_file_is_not_made_without_the_library_that_reads_it(tmp_path: Path) -> None:
    worker = Worker("model", "llama.cpp f16", setting(tmp_path), seconds=60)
    with pytest.raises(WorkerError, match="No module named 'gguf'"):
        worker.send()
    worker.close()
    assert not list(tmp_path.glob("*.gguf"))


def test_a_process_that_ends_or_takes_too_long_costs_its_row_only(tmp_path: Path) -> None:
    worker = Worker("layer", "reading", setting(tmp_path), seconds=60)
    assert len(worker.send()["answers"]) == 1
    assert worker.send("turn")["milliseconds"][0] > 0
    worker.process.kill()
    with pytest.raises(WorkerError, match="the process ended with signal 9"):
        worker.send("turn")
    worker.close()
    late = Worker("layer", "reading", setting(tmp_path), seconds=0.01)
    started = time.monotonic()
    with pytest.raises(WorkerError, match=r"took more than 0 s"):
        late.send()
    late.close()
    assert time.monotonic() - started < 30


def test_fewer_bits_are_further_from_the_truth() -> None:
    problem = cpu_layer.Problem.random(256)
    exact = problem.exact()
    errors = {name: cpu_peers.relative_error(cpu_layer.ours(name, problem, 1).step(), exact) for name in FORMATS}
    assert errors["dense"] < 0.03
    assert errors["dense"] < errors["int4"] < 0.5
    assert errors["int8"] < errors["int4"]


@pytest.mark.parametrize("bits", [8, 4])
def test_codes_of_a_channel_lie_within_half_a_step(bits: int) -> None:
    side = np.random.default_rng(0).standard_normal((2, 9, 6), np.float32)
    codes, scale = cpu_layer.symmetric(side, bits)
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=-1).reshape(side.shape).astype(np.float32) - 8
    assert np.abs(codes * scale.reshape(2, 1, 6) - side).max() <= scale.max() / 2 * 1.001


def row(name: str, ms: float, bits: float | None = 4, level: str | None = None, **more: Any) -> dict[str, Any]:
    record = {
        "part": "layer",
        "tokens": 64,
        "name": name,
        "bits": bits,
        "level": level,
        "cache_mib": 2.0,
        "peak_mib": 9.0,
    }
    return record | {"min_ms": ms, "median_ms": ms} | more


def test_the_fastest_of_ours_is_compared_with_the_fastest_peer_of_as_many_bits() -> None:
    rows = [
        row("reading", 1.0, None, cache_mib=4.0), row("ours int4", 3.0, level="baseline"),
        row("ours int4", 2.0, level="avx2", error=0.1), row("peer one", 1.0), row("peer two", 5.0), row("peer eight", 0.1, 8),
        {"part": "layer", "tokens": 64, "name": "peer three", "bits": 4, "failed": "ImportError: no"},
    ]  # fmt: skip
    (verdict,) = cpu_peers.verdicts(rows)
    assert (verdict["level"], verdict["peer"], verdict["ratio"]) == ("avx2", "peer one", 2.0)
    assert cpu_peers.sentence(verdict).endswith("2.00 of the 1.00 ms of peer one: the goal of 1.00 is missed")
    assert cpu_peers.bandwidth(rows[2], rows) == 0.25
    record = {
        "command": "run", "machine": "one", "threads": 1, "date": "today", "rounds": {"layer": 3, "model": 1},
        "versions": {"torch": "2", "onnx": None}, "rows": rows, "verdicts": [verdict],
    }  # fmt: skip
    lines = cpu_peers.to_markdown(record).splitlines()
    assert lines[0] == "`run`, one, 1 thread, today, best of 3 (layer) and 1 (model) turns; torch 2."
    assert "| ours int4 | avx2 | 4 | 2.00 | 1.0e-01 | 0.25 | 2 | 9 |" in lines
    assert "| peer three |  | 4 | failed |  |  |  |  |" in lines
    assert "- peer three (layer, 64): ImportError: no." in lines


def test_time_of_a_token_is_split_from_its_time_behind_an_empty_cache() -> None:
    rows = [
        row("ours empty", 4.0, None, part="model"), row("transformers empty", 3.0, None, part="model"),
        row("ours int4", 6.0, part="model", level="avx2"), row("quanto 4 bits", 5.0, part="model"),
    ]  # fmt: skip
    (verdict,) = cpu_peers.verdicts(rows)
    assert verdict["empty_ms"] == [4.0, 3.0]
    assert "1.20 of the 5.00 ms of quanto 4 bits (4.00 and 3.00 ms of them behind an empty" in cpu_peers.sentence(
        verdict
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "100"], "--tokens must be multiples of 32, from 32, got 100"),
        (["--tokens", "many"], "--tokens must be multiples of 32, from 32, got many"),
        (["--parts", "layer,head"], "--parts must be some of layer, model, got head"),
        (["--only", "ours int4,ours int5"], "no contender 'ours int5'; there are ONNX Runtime float16, "),
        (["--rounds", "0"], "--rounds must be at least 1, got 0"),
        (["--prompt", "-1"], "--prompt must be at least 0, got -1"),
        (["--show", "no-such-file.json"], "--show: no file no-such-file.json"),
    ],
)
def test_unmeasurable_settings_are_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cpu_peers.main(arguments)
    assert message in capsys.readouterr().err


@needs_compiler
def test_a_level_that_the_processor_lacks_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cpu_peers.main(["--levels", "sse9"])
    assert "--levels: no level 'sse9' on this processor; use all, or some of baseline" in capsys.readouterr().err
