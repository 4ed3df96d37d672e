# SPDX-License-Identifier: Apache-2.0
"""The two GPU benchmarks on the CPU with tiny sizes: every row runs, and a failure costs only its own row."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import (
    gpu_a,
    gpu_b,
    gpu_end_to_end,
    gpu_generate,
    gpu_parity,
    gpu_parts,
    gpu_report,
    gpu_speed,
)
from benchmarks.gpu_parts import BROKEN, Budget, Part, Progress, Task, attempt, run_parts, serve
from benchmarks.gpu_report import Report
from kvpress.kernels.triton import device as triton
from tests.fakegpu import fake_gpu
from tests.kernels.compiler import needs_compiler
from tests.tape import TapeRecorder

Row = dict[str, Any]


def rows_of(tasks: list[Task], accepts: Callable[[Row], bool] = lambda where: True) -> list[Row]:
    with torch.no_grad():
        return [attempt(task) for task in tasks if accepts(task.where)]


# -- every row ------------------------------------------------------------------------------------------------


@needs_compiler
@pytest.mark.parametrize("check", gpu_parity.CHECKS)
def test_every_parity_case_passes_on_the_cpu(check: str) -> None:
    rows = rows_of(gpu_parity.tasks([check], gpu_parity.SMALL, "cpu"))
    assert rows
    assert all(row.get("passed") for row in rows), [row for row in rows if not row.get("passed")]


@needs_compiler
@pytest.mark.parametrize("case", ["none", "kivi4", "quest", "frontier", "adakv", "kvzip + refit", "attention eager"])
def test_presses_end_to_end(case: str) -> None:
    tasks = gpu_end_to_end.tasks(gpu_end_to_end.SMALL, "cpu", small=True)
    (row,) = rows_of(tasks, lambda where: where["case"] == case)
    assert row["passed"], row


@needs_compiler
@pytest.mark.parametrize("name", ["kivi4", "adakv"])
def test_replayed_steps_end_to_end(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.hf.host.graph_recorder", lambda model: TapeRecorder())
    problem = gpu_end_to_end.Problem(gpu_end_to_end.SMALL, "cpu")
    with torch.no_grad():
        row = gpu_end_to_end.compare_captured(problem, gpu_end_to_end.specs(small=True)[name])
    assert row["passed"]
    assert row["replayed"] >= row["steps"] - 2 * (row["sealings"] + 1)


def test_a_press_that_packs_or_evicts_nothing_is_no_pass() -> None:
    problem = gpu_end_to_end.Problem(gpu_end_to_end.SMALL, "cpu")
    with torch.no_grad():
        row = gpu_end_to_end.compare_kernels(problem, gpu_end_to_end.Spec("none", packs=True, evicts=True))
    assert not row["passed"]
    assert "no pair was packed, no pair was evicted, pairs were sealed 0 times" in row["wrong"]


@needs_compiler
def test_kernels_are_timed_beside_others() -> None:
    timer = gpu_speed.Timer("cpu", rounds=1)
    rows = rows_of(gpu_speed.tasks([gpu_speed.Shape(64, 1)], ["int2"], timer, 2**16))
    assert rows[0]["read_gb_per_s"] > 0
    assert rows[0]["copy_gb_per_s"] > 0
    by_name = {row["name"]: row for row in rows[1:]}
    assert "int2" not in by_name
    assert not [name for name in (*gpu_speed.CACHES, gpu_speed.SELECT) if name in by_name and "failed" in by_name[name]]
    assert {f"{gpu_speed.SELECT}: {step}" for step in ("label scores", "top-k", "gather")} <= set(by_name)
    assert by_name["torch sdpa"]["bandwidth_dense"] > 0
    assert "missing" in by_name["flashinfer"]


PLAN = gpu_generate.Plan((96, 112), 7, 1, 2)


@pytest.fixture(scope="module")
def bench() -> gpu_generate.Bench:
    return gpu_generate.Bench("cpu", PLAN, small=True)


def test_models_are_measured(bench: gpu_generate.Bench) -> None:
    tasks = gpu_generate.tasks(bench)
    names = {(task.where["part"], task.where["context"], task.where.get("name")) for task in tasks}
    assert {(gpu_generate.PART, 112, f"{name}, captured") for name in gpu_generate.LONG} <= names
    chosen = ("kivi 4, captured", gpu_generate.STATIC, gpu_generate.EAGER, "quest")
    rows = rows_of(tasks, lambda where: where["context"] == 96 and where.get("name", chosen[0]) in chosen)
    assert {row["part"] for row in rows} == {"compression", "model", "largest batch", "profile"}
    assert not [row for row in rows if gpu_report.why_not(row)]
    for row in rows:
        if row["part"] == "model":
            assert row["min_ms"] <= row["median_ms"] <= row["p99_ms"]
            assert row["cache_mib"] > 0
        if row["part"] == "largest batch":
            assert (row["rows"], row["failed_at"]) == (2, None)
        if row["part"] == "profile":
            assert row["kernels"]
            assert row["device_ms"] > 0


def test_a_batch_that_does_not_fit_is_named(bench: gpu_generate.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def decode(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(gpu_generate, "decode", decode)
    with torch.no_grad():
        assert gpu_generate.measure_batch(bench, 96, "none", False) == {"rows": 0, "failed_at": 1}


@pytest.mark.parametrize("start", [1, 5, 12, 300])
@pytest.mark.parametrize(("capacity", "best"), [(0, 256), (1, 256), (13, 256), (256, 256), (3, 3)])
def test_the_largest_batch_is_found_from_any_start(start: int, capacity: int, best: int) -> None:
    tried: list[int] = []

    def fits(number: int) -> bool:
        tried.append(number)
        return number <= capacity

    low, high = gpu_generate.largest(fits, start, best)
    assert low <= capacity
    assert low in tried or low == 0
    if high is None:
        assert low == best
    else:
        assert high in tried
        assert low <= capacity < high
        assert high - low <= max(1, low // 16)


def test_a_static_cache_is_compiled(bench: gpu_generate.Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Row] = []
    generate = bench.generate

    def noted(ids: Any, **options: Any) -> Any:
        calls.append({"tokens": ids.shape[1], **options})
        return generate(ids, **options)

    monkeypatch.setattr(bench, "generate", noted)
    with torch.no_grad():
        gpu_generate.measure(bench, 96, gpu_generate.no_press, static=True)
    assert [row["tokens"] for row in calls] == [96, 96]
    assert {row["cache_implementation"] for row in calls} == {"static"}
    assert all(row["compile_config"] is not None for row in calls)


# -- under the fake driver ------------------------------------------------------------------------------------


def test_rows_launch_the_kernels_of_a_gpu() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    timer = gpu_speed.Timer("cpu", rounds=1)
    tasks = gpu_speed.tasks([gpu_speed.Shape(512, 1)], [], timer, 2**16)
    with fake_gpu(90) as gpu:
        assert triton.available(torch.empty(0))
        rows = rows_of(tasks, lambda where: where.get("name") in ("int4", gpu_speed.SELECT))
    assert len(rows) == 2
    assert not [row for row in rows if "failed" in row]
    assert {"dense", "packed", "scores"} <= set(gpu.counts())
    assert not gpu.spilling()


# -- a failure costs only itself ------------------------------------------------------------------------------


def test_rows_that_fail_are_rows(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fail(error: Exception) -> Callable[[], Row]:
        def run() -> Row:
            raise error

        return run

    done = tmp_path / "done.json"
    done.write_text(json.dumps([{"name": "before"}]))
    tasks = [
        Task({"name": "before"}, fail(AssertionError())),
        Task({"name": "fails"}, fail(RuntimeError("does not compile\nbecause"))),
        Task({"name": "lacks"}, fail(ImportError("not installed"))),
        Task({"name": "works"}, lambda: {"ms": 1.0}),
    ]
    options = argparse.Namespace(seconds=60.0, done=done, device="cpu")
    serve(tasks, options)
    plan, *lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert plan == {"plan": [task.where for task in tasks]}
    assert lines == [
        {"begin": {"name": "fails"}},
        {"name": "fails", "failed": "RuntimeError: does not compile"},
        {"begin": {"name": "lacks"}},
        {"name": "lacks", "missing": "ImportError: not installed"},
        {"begin": {"name": "works"}},
        {"name": "works", "ms": 1.0},
    ]
    options.seconds = 0.0
    serve(tasks, options)
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_a_device_that_is_broken_ends_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "usable", lambda device: False)
    options = argparse.Namespace(seconds=60.0, done=None, device="cuda")
    with pytest.raises(SystemExit) as ended:
        serve([Task({"name": "one"}, dict)], options)
    assert ended.value.code == BROKEN


PROGRAM = """
import json, os, sys, time
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
done = json.load(open(options["--done"]))
names = ["a", "b", "c", "d"]
print(json.dumps({"plan": [{"name": name} for name in names]}), flush=True)
for name in names:
    if {"name": name} in done:
        continue
    print(json.dumps({"begin": {"name": name}}), flush=True)
    if name == "b":
        os.abort()
    if name == "c":
        print(json.dumps({"name": name, "failed": "illegal address"}), flush=True)
        sys.exit(3)
    print("no row", flush=True)
    print(json.dumps({"name": name, "ms": 1.0}), flush=True)
"""


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace the modules of the benchmarks by a program."""
    (tmp_path / "benchmarks").mkdir()
    monkeypatch.setattr(gpu_parts, "ROOT", tmp_path)
    return lambda text: (tmp_path / "benchmarks" / "part.py").write_text(text) and None


def test_a_part_begins_again_behind_a_row_that_crashes(program: Callable[[str], None]) -> None:
    program(PROGRAM)
    rows: list[Row] = []
    run_parts([Part("part")], 60.0, rows.append)
    assert [row["name"] for row in rows] == ["a", "b", "c", "d"]
    assert rows[1]["failed"].startswith("exit code -6")
    assert rows[2]["failed"] == "illegal address"
    assert rows[3] == {"name": "d", "ms": 1.0}


def test_rows_of_an_earlier_run_are_not_run_again(program: Callable[[str], None]) -> None:
    program(PROGRAM.replace('{"name": name} in done', 'any(row["name"] == name for row in done)'))
    rows: list[Row] = []
    run_parts([Part("part")], 60.0, rows.append, done=[{"name": "b", "ms": 2.0}, {"name": "c", "ms": 3.0}])
    assert rows == [{"name": "a", "ms": 1.0}, {"name": "d", "ms": 1.0}]


def test_a_row_that_hangs_is_ended(program: Callable[[str], None]) -> None:
    program(PROGRAM.replace("os.abort()", "time.sleep(60)"))
    rows: list[Row] = []
    run_parts([Part("part", row_seconds=1.0)], 60.0, rows.append)
    assert rows[1] == {"name": "b", "failed": "took longer than 1 s"}
    assert rows[3] == {"name": "d", "ms": 1.0}


def test_rows_without_time_are_named(program: Callable[[str], None], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "GRACE", 0.5)
    program(PROGRAM.replace("os.abort()", "time.sleep(60)"))
    rows: list[Row] = []
    run_parts([Part("part")], 0.5, rows.append)
    assert {row["name"]: row["skipped"] for row in rows if row["name"] != "a"} == dict.fromkeys(
        "bcd", "no time was left"
    )


def test_a_part_that_cannot_begin_reports_the_reason(program: Callable[[str], None]) -> None:
    program("raise SystemExit('no such check')")
    rows: list[Row] = []
    run_parts([Part("part")], 60.0, rows.append)
    assert rows == [{"part": "part", "failed": "exit code 1: no such check"}]


def test_rows_that_were_not_begun_are_the_rest() -> None:
    progress = Progress([{"name": "a"}, {"name": "b"}], [{"name": "a"}])
    assert progress.rest() == [{"name": "b"}]


# -- reports --------------------------------------------------------------------------------------------------


def test_a_run_goes_on_with_the_measured_rows_of_the_same_machine_and_commit(tmp_path: Path) -> None:
    earlier = Report(tmp_path / "gpu.json")
    earlier.set(date="2026-01-01", **gpu_report.machine("cpu"))
    earlier.add({"name": "a", "ms": 1.0})
    earlier.add({"name": "b", "skipped": "no time was left"})
    later = Report(tmp_path / "gpu.json")
    later.resume("cpu")
    assert later.rows == [{"name": "a", "ms": 1.0}]
    earlier.set(commit="another")
    other = Report(tmp_path / "gpu.json")
    other.resume("cpu")
    assert not other.rows


def test_the_file_is_whole_after_every_row(tmp_path: Path) -> None:
    report = Report(tmp_path / "new" / "gpu.json")
    report.set(device="one")
    for number in range(3):
        report.add({"name": number})
        assert json.loads(report.out.read_text()) == {"rows": [{"name": n} for n in range(number + 1)], "device": "one"}
    assert [path.name for path in report.out.parent.iterdir()] == ["gpu.json"]


def parts_of(rows: list[Row]) -> Callable[..., None]:
    def run(parts: list[Part], seconds: float, receive: Callable[[Row], None], done: list[Row]) -> None:
        assert not done
        del seconds
        for row in rows if len(parts) > 1 or parts[0].module != "gpu_speed" else []:
            receive(row)

    return run


def case(check: str, name: str = "one", **row: Any) -> Row:
    return {"check": check, "case": name, **(row or {"error": 0.1, "limit": 0.2, "passed": True})}


def test_the_first_part_reports_the_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    rows = [case(name) for name in (*gpu_parity.CHECKS, gpu_end_to_end.CHECK) if name != "pages"]
    rows += [case("int4", "two", error=0.3, limit=0.2, passed=False), case("lookup", "two", skipped="no time was left")]
    rows += [
        case("quantise", "two", failed="RuntimeError: no"),
        case(gpu_end_to_end.CHECK, "flash", missing="no wheel"),
    ]
    monkeypatch.setattr(gpu_report, "run_parts", parts_of(rows))
    report = Report(tmp_path / gpu_a.FILE)
    assert not gpu_a.run(report, 60.0, dry=True)
    checks = gpu_b.earlier_checks(tmp_path)
    assert [name for name, check in checks.items() if not check["passed"]] == ["int4", "pages", "quantise"]
    assert checks["int4"]["others"] == {"two": "failed: error 3.0e-01, limit 2.0e-01"}
    assert checks[gpu_end_to_end.CHECK]["others"] == {"flash": "missing: no wheel"}
    assert gpu_b.untimed(checks) == ["int4", gpu_speed.SELECT]
    gpu_a.print_summary(checks)
    printed = capsys.readouterr().out
    assert "quantise     FAILED" in printed
    assert "two: skipped: no time was left" in printed


def test_a_check_of_every_format_decides_whether_it_is_timed() -> None:
    assert {*gpu_speed.CACHES, gpu_speed.SELECT} == set(gpu_b.NEEDS)
    assert {name for needed in gpu_b.NEEDS.values() for name in needed} <= set(gpu_parity.CHECKS)


def test_ratios_compare_minima_at_one_shape_and_means_of_models() -> None:
    def row(name: str, ms: float, context: int = 8, **more: float) -> Row:
        return {"part": "kernels", "context": context, "batch": 1, "name": name, "min_ms": ms, **more}

    def model(name: str, ms: float, context: int = 8) -> Row:
        return {"part": "model", "context": context, "batch": 1, "name": name, "mean_ms": ms}

    rows = [
        row("dense", 2.0, bandwidth=0.5), row("int4", 1.0), row("torch sdpa", 3.0), row("flash-attn", 1.5),
        row("kivi 4 bit", 0.1), row("int4", 1.0, context=16),
        {"part": "kernels", "context": 8, "batch": 1, "name": "int2", "failed": "no memory"},
        {"part": "compression", "context": 8, "prefill_ms": 100.0, "score_ms": 1.0, "quantise_ms": 2.0},
        {"part": "compression", "context": 9, "failed": "no memory"},
        {"part": "kernels", "bandwidth": "read and copy", "read_gb_per_s": 1.0},
        model(gpu_generate.STATIC, 8.0), model("kivi 4, captured", 4.0), model("kivi 4, captured", 4.0, context=9),
        model("quest", 2.0),
    ]  # fmt: skip
    assert list(gpu_b.ratios(rows)) == [
        ("dense: share of read bandwidth", "8 x 1", 0.5),
        ("dense vs best full-precision peer", "8 x 1", 0.75),
        ("int4 vs dense", "8 x 1", 2.0),
        ("score and quantise, share of prefill", "8 x 1", 0.03),
        ("kivi 4, captured vs static cache", "8 x 1", 2.0),
    ]


def test_the_second_part_prints_tables(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    at = {"context": 8, "batch": 1}
    times = {"median_ms": 1.0, "min_ms": 0.5, "launch_us": 9.0}
    rows = [
        {"part": "kernels", **at, "name": "dense", **times, "bandwidth": 0.5},
        {"part": "kernels", **at, "name": "flash-attn", "missing": "not installed"},
        {"part": "model", **at, "name": "none, captured", "prefill_s": 2.0, "mean_ms": 9.0, "median_ms": 8.0, "p99_ms": 20.0,
         "cache_mib": 4.0, "decode_peak_gib": 17.0},
        {"part": "model", **at, "name": "quest", "skipped": "no time was left"},
        {"part": "largest batch", **at, "name": "none, captured", "rows": 0, "failed_at": 1},
        {"part": "profile", **at, "name": "none, captured", "wall_ms": 1.5, "device_ms": 1.25, "kernels": []},
    ]  # fmt: skip

    def run(parts: list[Part], seconds: float, receive: Callable[[Row], None], done: list[Row]) -> None:
        assert not done
        assert parts[0].arguments[:3] == ["--device", "cpu", "--small"]
        for row in rows if parts[0].module == "gpu_generate" else []:
            receive(row)

    monkeypatch.setattr(gpu_report, "run_parts", run)
    report = Report(tmp_path / gpu_b.FILE)
    gpu_b.run(report, 60.0, dry=True, skip=["int4"])
    assert report.record["untimed"] == ["int4"]
    gpu_b.print_tables(report)
    printed = capsys.readouterr().out
    for text in (
        "missing: not installed",
        "skipped: no time was left",
        "20.00",
        "17.0",
        "1.25",
        "dense: share of read",
    ):
        assert text in printed


def test_scripts_refuse_to_begin_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for script in (gpu_a, gpu_b):
        monkeypatch.setattr(sys, "argv", ["script"])
        with pytest.raises(SystemExit, match="no GPU here; --dry-run exercises everything but the GPU"):
            script.main()


def test_scripts_write_to_their_output_option(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_report, "run_parts", lambda parts, seconds, receive, done: receive(case("dense")))
    monkeypatch.setattr(sys, "argv", ["script", "--dry-run", "--out", str(tmp_path), "--seconds", "9"])
    with pytest.raises(SystemExit, match="parity failed"):
        gpu_a.main()
    gpu_b.main()
    assert {path.name for path in tmp_path.iterdir()} == {gpu_a.FILE, gpu_b.FILE}
    record = json.loads((tmp_path / gpu_b.FILE).read_text())
    assert record["versions"]["torch"] == torch.__version__
    assert record["untimed"] == ["int4", "int2", "rotated 2 bit", "cq 8c8b", "cq 8c8b before rotary", gpu_speed.SELECT]


@pytest.mark.parametrize(
    ("actual", "expected", "error"),
    [
        ([1.0, 2.0], [1.0, 4.0], 0.5),
        ([1.0, -torch.inf], [1.0, -torch.inf], 0.0),
        ([1.0, 0.0], [1.0, -torch.inf], torch.inf),
        ([1.0], [1.0, 2.0], torch.inf),
        ([torch.nan, 1.0], [1.0, 1.0], None),
        ([], [], 0.0),
    ],
)
def test_error(actual: list[float], expected: list[float], error: float | None) -> None:
    got = gpu_parity.error(torch.tensor(actual), torch.tensor(expected))
    assert got == error if error is not None else got != got


def test_the_worst_error_is_nan_where_one_is() -> None:
    ones, nans = torch.ones(1), torch.full((1,), torch.nan)
    assert gpu_parity.worst_error([ones, ones], [ones, ones]) == 0
    worst = gpu_parity.worst_error([nans, ones], [ones, 2 * ones])
    assert worst != worst


def test_the_first_case_of_every_kind_comes_first() -> None:
    def cases() -> Iterator[gpu_parity.Case]:
        for name in ("a1", "a2", "a3", "b1", "b2"):
            yield gpu_parity.Case(name[0], name, 0.0, lambda: (list, list))

    assert [ordered.name for ordered in gpu_parity.in_turn(cases())] == ["a1", "b1", "a2", "b2", "a3"]


def test_shapes_and_contexts_are_parsed() -> None:
    assert gpu_speed.shapes_of("8x1,16x2") == [gpu_speed.Shape(8, 1), gpu_speed.Shape(16, 2)]
    assert gpu_speed.shapes_of("") == []
    assert gpu_generate.contexts_of("8,16") == (8, 16)
    for parse, text in ((gpu_speed.shapes_of, "8x1x2"), (gpu_generate.contexts_of, "8x1")):
        with pytest.raises(argparse.ArgumentTypeError, match=f"got {text}"):
            parse(text)


def test_a_budget_is_never_below_zero() -> None:
    assert Budget(-1.0).left == 0


# -- operations of a prefill ------------------------------------------------------------------------------------


def test_frontier_launches_few_operations_per_layer(tmp_path: Path) -> None:
    """In a process of its own, since the counting device stays registered with torch."""
    out = tmp_path / "operations.json"
    module = [sys.executable, "-m", "benchmarks.prefill_operations", "--tokens", "512", "--layers", "1", "--out", out]
    presses = [f"--press=frontier:smaller=10{form}" for form in ("", ",passes=1")]
    subprocess.run([*module, *presses], check=True, capture_output=True)  # noqa: S603 - our own
    counts = {(row["press"], row["phase"]): row for row in json.loads(out.read_text())["rows"]}
    for form, launches, waits in (("", 2800, 75), (",passes=1", 3400, 85)):
        total = counts[f"frontier:smaller=10{form}", "all"]
        assert total["launches"] <= launches, counts
        assert total["waits"] <= waits, counts
    of_phase = {phase: row["launches"] for (spec, phase), row in counts.items() if spec == "frontier:smaller=10"}
    assert of_phase["rounding"] <= 1200  # 4 for each channel and round, and a product for each block
    assert of_phase["refit"] <= 8 * 80  # for each KV head
