# SPDX-License-Identifier: Apache-2.0
"""`plan` predicts the bytes of a prefill, and the commands print the prediction."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from typer.testing import CliRunner

import kvpress
from benchmarks import tiny
from kvpress.cache.report import parse_bytes
from kvpress.calibrate import (
    ChannelSettings,
    CoupledSettings,
    EnergySettings,
    LevelSettings,
    PredictorSettings,
    RotationSettings,
    calibrate,
)
from kvpress.cli import PLANNED, app
from kvpress.plan import LONGEST, Geometry, longest_context, plan
from kvpress.testing.memory import held_bytes
from tests.models import tiny_model, tokens
from tests.scales import write_scales

LENGTH, BATCH = 1024, 2


@cache
def reference() -> Any:
    return kvpress.load_model("reference")[0]


@cache
def prompt() -> torch.Tensor:
    vocabulary = reference().config.vocab_size
    return torch.randint(3, vocabulary, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))


SPECS = [
    "none",
    "knorm:0.5",
    "snapkv:0.9",
    "knorm:budget=100",
    "pyramidkv:0.75",
    "streaming_llm:0.5,reindex=true",
    "adakv(expected_attention:0.5)",
    "prefill_decoding(snapkv:0.5; decoding(knorm))",
    "decoding(knorm)",
    "kivi:bits=2",
    "kivi:bits=4,residual_length=64",
    "kivi:bits=(8,4),group_size=16,residual_length=0",
    "quest:budget=256",
    "quest:budget=256,skip_layers=0,page_size=32",
    "snapkv:0.5 + kivi:bits=4",
    "adakv(snapkv:0.5) + kivi:bits=2",
    "snapkv:0.5 + quest:budget=128",
    "adaquant",
    "gear",
    "gear_l:backbone=kcvt",
    "eoptshrinkq:rank=2",
    "zipcache",
    "cq:coupled=8",
    "vector(snapkv:0.5)",
    "vector(adakv(snapkv:0.75)):share=0.5",
    "kivi:bits=2,sinks=4",
    "kivi:bits=2 + quest:budget=128,skip_layers=0",
    "snapkv:0.5 + kivi:bits=2 + quest:budget=128",
]


@pytest.mark.parametrize("spec", SPECS)
def test_the_plan_equals_the_measured_bytes(spec: str) -> None:
    model, press = reference(), kvpress.get_press(spec)
    cache_ = DynamicCache(config=model.config)
    with press(model):
        model(prompt(), past_key_values=cache_, logits_to_keep=1)
    report = kvpress.memory_report(cache_)
    planned = plan(press, Geometry.of(model.config), LENGTH, BATCH)
    assert planned.uncompressed_bytes == report.uncompressed_bytes
    assert planned.total_bytes == pytest.approx(report.total_bytes, rel=0.02)
    heads = report.seen / LENGTH
    assert planned.pairs_per_head == pytest.approx(report.kept / heads, rel=0.01)
    assert planned.factor == planned.uncompressed_bytes / planned.total_bytes


SEALING = {
    "kivi": "kivi:bits=2,group_size=16,residual_length=16",
    "adaquant": "adaquant:group_size=16,residual_length=16",
    "gear": "gear:group_size=16,buffer_length=16",
    "gear_l": "gear_l:backbone=kcvt,buffer_length=16",
    "minicache": "minicache:group_size=16,residual_length=16",
    "zipcache": "zipcache:interval=16",
    "turboquant": "turboquant:residual_length=16",
    "eoptshrinkq": "eoptshrinkq:residual_length=16,buffer_length=16,rank=2",
    "rotated": "rotated:residual_length=16",
    "saw_int4": "saw_int4",
    "fp8": "fp8",
    "kvarn": "kvarn:tile_size=16,sinks=16",
    "squat": "squat:bits=2,group_size=16,residual_length=16",
    "nvfp4": "nvfp4",
    "mxfp4": "mxfp4",
    "kvquant": "kvquant:bits=3,calibration='{levels}'",
    "aquakv": "aquakv:bits=3,calibration='{predictors}'",
    "block_gtq": "block_gtq:calibration='{energies}',residual_length=16",
    "cq": "cq:bits=4,calibration='{books}',residual_length=16",
    "oscar": "oscar:calibration='{rotations}',residual_length=16,sinks=4",
    "think": "think:0.5,window_size=16",
    "leank": "leank:0.5,calibration='{scales}',sink_size=4,recent_size=16,interval=16",
    "quest": "quest:budget=32,page_size=8,skip_layers=0",
    "sparq": "sparq:budget=32",
    "pqcache": "pqcache:budget=32,bits=4",
    "infllm_v2": "infllm_v2:budget=48,block_size=8,kernel_size=8,stride=4,n_sink=8,n_recent=16",
    "loki": "loki:budget=32",
    "loopserve": "loopserve:budget=32,last=8,every=4",
    "twilight": "twilight(quest:budget=32,page_size=8,skip_layers=0)",
    "vattention": "vattention(quest:budget=32,page_size=8,skip_layers=0)",
    "offload": "offload(quest:budget=32,page_size=8,skip_layers=0)",
    "tidal_decode": "tidal_decode:budget=32,skip_layers=0",
    "double_sparsity": "double_sparsity:budget=32,skip_layers=0,calibration='{channels}'",
}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("calibrated")
    names = ("books", "channels", "levels", "predictors", "energies", "rotations")
    paths = {name: folder / f"{name}.safetensors" for name in names}
    settings = (
        CoupledSettings((4, 4), (4, 4), fisher=False, iterations=2),
        ChannelSettings(),
        LevelSettings(fisher=False),
        PredictorSettings(iterations=5),
        EnergySettings(),
        RotationSettings(),
    )
    for path, chosen in zip(paths.values(), settings, strict=True):
        calibrate(tiny_model("llama"), tokens(2, 60), chosen, path)
    return paths | {"scales": write_scales(tiny_model("llama"), folder / "scales.safetensors")}


def measured(press: Any, context: int, generated: int) -> tuple[int, int]:
    """Return the bytes reachable from a cache after a prompt and generated tokens, and the reported bytes."""
    model = tiny_model("llama")
    with press(model) as session:
        model.generate(tokens(2, context), max_new_tokens=generated + 1, do_sample=False)
    return held_bytes(session.cache), kvpress.memory_report(session.cache).total_bytes


def test_every_codec_and_selector_is_planned_for() -> None:
    assert set(SEALING) == {entry.name for entry in kvpress.list_presses() if entry.role in ("quantise", "select")}


@pytest.mark.parametrize("evicting", ["", "snapkv:0.5 + "], ids=["whole", "evicted"])
@pytest.mark.parametrize("name", SEALING)
def test_the_plan_holds_after_generation(name: str, evicting: str, files: dict[str, Path]) -> None:
    if evicting and name == "minicache":
        pytest.skip("merged layers hold the same pairs, so presses that evict are refused")
    press = kvpress.get_press(evicting + SEALING[name].format(**files))
    walked, reported = measured(press, 240, 40)
    assert reported == walked
    planned = plan(press, Geometry.of(tiny_model("llama").config), 240, 2, 40)
    assert planned.total_bytes == pytest.approx(walked, rel=0.02)


def test_dropped_values_are_planned_after_generation(files: dict[str, Path]) -> None:
    press = kvpress.get_press(f"vector(snapkv:0.5):calibration='{files['predictors']}'")
    walked, reported = measured(press, 240, 40)
    assert reported == walked
    planned = plan(press, Geometry.of(tiny_model("llama").config), 240, 2, 40)
    assert planned.total_bytes == pytest.approx(walked, rel=0.02)


@pytest.mark.parametrize(
    "spec",
    ["none", "snapkv:0.5", "h2o:0.5", "h2o:budget=64", "decoding(knorm):compression_interval=16,target_size=64",
     "prefill_decoding(snapkv:0.8; decoding(knorm):compression_interval=32,target_size=100)",
     "kvzip:0.5,repeat_prompt= + sparq:budget=32",
     "tidal_decode:budget=32,skip_layers=0 + kivi:bits=4,group_size=16,residual_length=16"],
)  # fmt: skip
def test_generated_tokens_are_planned(spec: str) -> None:
    press = kvpress.get_press(spec)
    walked, reported = measured(press, 400, 50)
    assert reported == walked
    planned = plan(press, Geometry.of(tiny_model("llama").config), 400, 2, 50)
    assert planned.total_bytes == pytest.approx(walked, rel=0.02)


@pytest.mark.parametrize(
    "spec",
    ["none", "snapkv:0.5", "decoding(knorm):compression_interval=16,target_size=64",
     "prefill_decoding(snapkv:0.8; decoding(knorm):compression_interval=20,target_size=100)"],
)  # fmt: skip
@pytest.mark.parametrize("generated", [20, 32])
def test_the_peak_between_evictions_is_planned(spec: str, generated: int) -> None:
    """Presses that evict at intervals hold most just before an eviction, not after the last token."""
    press, model = kvpress.get_press(spec), Geometry.of(tiny_model("llama").config)
    sizes = [measured(press, 400, count)[1] for count in (0, 15, 16, 19, 20, 31, 32) if count <= generated]
    planned = plan(press, model, 400, 2, generated)
    assert planned.total_bytes == pytest.approx(sizes[-1], rel=0.02)
    assert planned.decode_peak_bytes == pytest.approx(max(sizes), rel=0.02)
    assert planned.needed_bytes >= planned.decode_peak_bytes >= planned.total_bytes


def test_a_plan_prints_the_peak_between_evictions() -> None:
    spec = "decoding(knorm):compression_interval=512,target_size=256"
    arguments = ["plan", "--model", "reference", "--context", "300", "--generated", "512", "--memory", "15MB"]
    result = runner.invoke(app, [*arguments, "--press", spec])
    assert result.exit_code == 0, result.output
    assert "the cache grows to 1.6 MiB between evictions while tokens are generated" in " ".join(result.output.split())


TILED = (
    *("kivi:bits=3,residual_length=0", "kivi:bits=2", "adaquant", "gear:bits=2", "gear_l:bits=2", "squat:bits=2"),
    *("turboquant:bits=3", "kvarn:bits=(4,4)", "zipcache", "rotated:bits=3", "nvfp4", "saw_int4", "think:0.5"),
)


@pytest.mark.parametrize("codec", TILED)
def test_one_pair_less_may_hold_more_bytes(codec: str) -> None:
    """447 pairs leave a tail of up to 31 dense pairs where 448 are whole tiles; the tail costs that much or more."""
    model = Geometry.of(reference().config)
    for tiles in (192, 448, 896):
        few, tiled, more = (
            plan(kvpress.get_press(f"keydiff:budget={kept} + {codec}"), model, 1024)
            for kept in (tiles - 1, tiles, tiles + 1)
        )
        assert few.total_bytes - few.tail_bytes <= 1.02 * (tiled.total_bytes - tiled.tail_bytes)
        assert more.total_bytes - more.tail_bytes <= 1.02 * (tiled.total_bytes - tiled.tail_bytes)


def test_a_plan_prints_the_cost_of_a_tail() -> None:
    """The cost is the bytes of 447 pairs beyond 447/448 of the bytes of 448, and is printed where it is large."""
    spec = "keydiff:budget={} + kivi:bits=3,residual_length=0"
    arguments = ["plan", "--model", "reference", "--context", "1024"]
    arguments += [part for budget in (447, 448) for part in ("--press", spec.format(budget))]
    printed = " ".join(runner.invoke(app, arguments).output.split())
    few, tiled = (
        plan(kvpress.get_press(spec.format(kept)), Geometry.of(reference().config), 1024) for kept in (447, 448)
    )
    share = 1 - tiled.total_bytes * 447 / 448 / few.total_bytes
    assert f"{spec.format(447)}: {share:.0%} of the cache is pairs that stay dense" in printed
    assert f"{spec.format(448)}: " not in printed
    assert tiled.tail_bytes == 0


def test_bytes_grow_with_the_batch_and_fall_with_the_ratio() -> None:
    geometry = Geometry.of(reference().config)
    single, four = (plan(kvpress.KnormPress(0.5), geometry, 4096, batch) for batch in (1, 4))
    assert four.total_bytes == 4 * single.total_bytes
    sizes = [plan(kvpress.KnormPress(ratio), geometry, 4096).total_bytes for ratio in (0.0, 0.3, 0.6, 0.9)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("context", "batch", "word"), [(0, 1, "context"), (5, 0, "batch")])
def test_sizes_that_make_no_sense(context: int, batch: int, word: str) -> None:
    with pytest.raises(ValueError, match=f"{word} must be >= 1, got 0"):
        plan(kvpress.KnormPress(0.5), Geometry.of(reference().config), context, batch)


def test_geometry_of_a_mixed_model_counts_windows_as_windows() -> None:
    config = CONFIG_MAPPING["gemma3_text"](
        num_hidden_layers=6, num_key_value_heads=2, head_dim=64, sliding_window=512, dtype="bfloat16",
        layer_types=["sliding_attention"] * 5 + ["full_attention"],
    )  # fmt: skip
    geometry = Geometry.of(config)
    assert (len(geometry.full), len(geometry.sliding), geometry.window) == (1, 5, 512)
    assert geometry.pair_bytes(geometry.full[0]) == 2 * 64 * 2
    planned = plan(kvpress.NonePress(), geometry, 10_000, 3)
    assert planned.total_bytes == planned.uncompressed_bytes == 3 * 2 * 256 * (10_000 + 5 * 512)
    assert planned.window_bytes == 3 * 2 * 256 * 5 * 512
    assert planned.shrinking == 10_000 / (10_000 + 5 * 512)


def test_the_plan_of_a_mixed_model_names_the_share_that_can_shrink(tmp_path: Path) -> None:
    tiny_model("gemma3_text").config.save_pretrained(tmp_path)
    result = runner.invoke(app, ["plan", "--model", str(tmp_path), "--context", "40", "--press", "frontier:smaller=10"])
    assert "91% of the cache can shrink, so it gets at most 11.0 times smaller" in result.output, result.output


def test_latents_are_planned_as_they_are_cached() -> None:
    model = tiny.tiny("deepseek_v3")
    ids = tokens(2, 64)
    for spec in ("none", "knorm:0.75"):
        with kvpress.get_press(spec)(model) as session, torch.no_grad():
            model(ids, use_cache=True)
        planned, reported = (
            plan(kvpress.get_press(spec), Geometry.of(model.config), 64, 2),
            kvpress.memory_report(session.cache),
        )
        assert planned.uncompressed_bytes == reported.uncompressed_bytes
        assert planned.total_bytes == reported.total_bytes
    with pytest.raises(NotImplementedError, match="caches pairs of 32 and 8 numbers"):
        plan(kvpress.get_press("kivi:bits=4,group_size=4"), Geometry.of(model.config), 64)


# -- commands ------------------------------------------------------------------------------------------------

runner = CliRunner()


def test_list_shows_every_press_with_role_and_paper() -> None:
    result = runner.invoke(app, ["list"])
    assert result.exit_code == 0
    for entry in kvpress.list_presses():
        line = next(line for line in result.output.splitlines() if f" {entry.name} " in line)
        assert f" {entry.role} " in line
        assert entry.paper.split(",")[0] in line
        assert f" {entry.status} " in line
    assert "…" not in result.output


def test_list_shows_the_presses_of_one_status() -> None:
    result = runner.invoke(app, ["list", "--status", "recommended"])
    assert result.exit_code == 0
    shown = {entry.name for entry in kvpress.list_presses() if f" {entry.name} " in result.output}
    assert shown == {entry.name for entry in kvpress.list_presses() if entry.status == "recommended"}
    refused = runner.invoke(app, ["list", "--status", "good"])
    assert refused.exit_code == 2
    assert "status must be one of recommended" in " ".join(refused.output.split())


def test_list_is_filtered_and_written_as_json() -> None:
    entries = json.loads(runner.invoke(app, ["list", "--json"]).output)
    assert [entry["name"] for entry in entries] == [entry.name for entry in kvpress.list_presses()]
    assert set(entries[0]) == {"name", "role", "status", "summary", "paper"}
    shown = json.loads(runner.invoke(app, ["list", "--json", "--role", "quantise", "rotate", "HADAMARD"]).output)
    assert {entry["role"] for entry in shown} == {"quantise"}
    assert "rotated" in {entry["name"] for entry in shown}
    assert len(shown) < 10
    for arguments, message in (
        (["--role", "good"], "role must be one of baseline, evict"),
        (["nonsense"], "no press matches"),
    ):
        refused = runner.invoke(app, ["list", *arguments])
        assert refused.exit_code == 2
        assert message in " ".join(refused.output.replace("│", " ").split())


def test_version_and_short_help() -> None:
    assert runner.invoke(app, ["--version"]).output == f"kvpress {kvpress.__version__}\n"
    for arguments in (["-h"], ["list", "-h"]):
        assert "Usage" in runner.invoke(app, arguments).output


def test_plan_prints_a_selection_for_the_reference_model() -> None:
    result = runner.invoke(app, ["plan", "--model", "reference", "--context", "2048", "--batch", "3"])
    assert result.exit_code == 0, result.output
    assert "3 x 2048 tokens" in result.output
    for spec in PLANNED:
        assert spec in result.output


def test_plan_of_given_presses_from_a_configuration_file(tmp_path: Path) -> None:
    from kvpress.cache.report import format_bytes

    path = tmp_path / "config.json"
    settings = {
        "model_type": "llama", "num_hidden_layers": 4, "num_key_value_heads": 2, "num_attention_heads": 8,
        "hidden_size": 512, "torch_dtype": "bfloat16",
    }  # fmt: skip
    path.write_text(json.dumps(settings))
    arguments = ["plan", "--model", str(path), "--context", "4096", "--press", "knorm:0.75", "--press", "kivi:bits=4"]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 0, result.output
    dense_bytes = 4 * 2 * 4096 * 2 * 64 * 2
    evicted = dense_bytes // 4 + 4 * 2 * 1024 * 2
    assert format_bytes(evicted) in result.output
    assert f"{dense_bytes / evicted:.2f}" in result.output
    assert "1,024" in result.output
    assert "snapkv" not in result.output
    assert runner.invoke(app, ["plan", "--model", str(tmp_path), "--press", "knorm:0.75"]).exit_code == 0


def test_sizes_are_read() -> None:
    assert [parse_bytes(text) for text in ("4GB", "1.5 MiB", "2kb", "300")] == [4 * 10**9, 3 * 2**19, 2000, 300]
    for wrong in ("", "4 G", "-1GB", "much"):
        with pytest.raises(ValueError, match="memory must be a size such as 4GB"):
            parse_bytes(wrong, "memory")


@pytest.mark.parametrize("spec", ["none", "knorm:0.75", "kivi:bits=4", "bounded(knorm:0.5)", "frontier:smaller=10"])
@pytest.mark.parametrize("batch", [1, 3])
def test_the_longest_context_fits_and_a_longer_one_does_not(spec: str, batch: int) -> None:
    model, press, room = Geometry.of(reference().config), kvpress.get_press(spec), 10_000_000
    longest = longest_context(press, model, room, batch)
    longer = longest + longest // 100  # a few tokens more may round to the same pairs
    assert plan(press, model, longest, batch).needed_bytes <= room < plan(press, model, longer, batch).needed_bytes
    assert longest_context(press, model, 0, batch) == 0


def test_contexts_without_the_protected_tokens_do_not_fit() -> None:
    """The search for the longest context tries lengths that the press cannot read."""
    model, press = Geometry.of(reference().config), kvpress.get_press("protect(knorm:0.5):tokens=0:50")
    longest = longest_context(press, model, 10_000_000)
    assert plan(press, model, longest).needed_bytes <= 10_000_000
    assert longest_context(press, model, plan(press, model, 50).needed_bytes) == 50
    assert longest_context(press, model, plan(press, model, 50).needed_bytes - 1) == 0


def test_a_plan_replaces_no_file_by_mistake(tmp_path: Path) -> None:
    config, out = tmp_path / "config.json", tmp_path / "plan.json"
    tiny_model("llama").config.to_json_file(config)
    arguments = ["plan", "--model", str(config), "--context", "64", "--press", "none", "--out"]
    assert runner.invoke(app, [*arguments, str(out)]).exit_code == 0
    result = runner.invoke(app, [*arguments, str(out)])
    assert result.exit_code == 4
    assert "plan.json exists: name another --out, or replace it with --force" in " ".join(result.output.split())
    assert runner.invoke(app, [*arguments, str(out), "--force"]).exit_code == 0
    before = config.read_text()
    assert runner.invoke(app, [*arguments, str(config), "--force"]).exit_code == 4
    assert config.read_text() == before
    assert runner.invoke(app, [*arguments, str(tmp_path / "none" / "plan.json")]).exit_code == 4


def test_a_plan_prints_the_presses_of_files(tmp_path: Path) -> None:
    (tmp_path / "press.yaml").write_text("press: knorm:0.5 + kivi:bits=4\n")
    (tmp_path / "inner.yaml").write_text("press: snapkv:0.5\n")
    arguments = ["--press", f"@{tmp_path}/press.yaml", "--press", f"adakv(@{tmp_path}/inner.yaml)"]
    shown = runner.invoke(app, ["plan", "--model", "reference", "--context", "1024", *arguments]).output
    assert "knorm:compression_ratio=0.5 + kivi:bits=4" in shown
    assert "adakv(snapkv:compression_ratio=0.5)" in shown
    assert ".yaml" not in shown


def test_a_cache_of_constant_size_has_no_longest_context() -> None:
    model = Geometry.of(reference().config)
    assert longest_context(kvpress.get_press("bounded(knorm:budget=100)"), model, 10_000_000) == LONGEST


@pytest.mark.parametrize(
    ("memory", "printed"),
    [
        ("1GB", "131,072 tokens fit without a press."),
        ("200MB", "131,072 tokens do not fit without a press, which takes 256.0 MiB; they fit with snapkv:0.5"),
        ("6MB", "None of these fits 131,072 tokens; "),
        ("5MB", "memory 5MB does not hold the weights of the model, 5."),
        ("much", "memory must be a size such as 4GB"),
    ],
)
def test_plan_prints_the_longest_context_of_a_memory(memory: str, printed: str) -> None:
    arguments = ["plan", "--model", "reference", "--memory", memory, "--press", "none", "--press", "snapkv:0.5"]
    arguments += ["--context", "131072"]
    assert printed in runner.invoke(app, arguments).output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--press", "snapkw:0.5"], ["unknown press 'snapkw'", "did you mean snapkv?"]),
        (["--press", "snapkv:0.5,windw=3"], ["no argument 'windw'"]),
        (["--press", "snapkv:1.5"], ["must be in [0, 1), got 1.5"]),
        (["--press", "snapkv:half"], ["compression_ratio", "half"]),
        (["--press", "kivi:2 + kivi:4"], ["one codec"]),
        (["--press", "protect(knorm:0.5):tokens=0:9", "--context", "5"], ["ends past a prompt of 5 tokens"]),
        (["--context", "0"], ["--context", "at least 1, got 0"]),
        (["--model", "/no/such/folder"], ["/no/such/folder"]),
    ],
    ids=str,
)
def test_mistakes_leave_with_a_status_and_a_reason(arguments: list[str], words: list[str]) -> None:
    command = arguments if "--model" in arguments else ["--model", "reference", *arguments]
    result = runner.invoke(app, ["plan", *command])
    assert result.exit_code == (3 if "--model" in arguments else 2)
    text = " ".join(result.output.split())
    for word in words:
        assert word in text
    assert "Traceback" not in text


@pytest.mark.parametrize("name", ["[red]x[/red]", "[/]", "a[0]", "[bold]y"])
def test_brackets_of_errors_and_names_are_printed_as_they_are(name: str, tmp_path: Path) -> None:
    refused = runner.invoke(app, ["plan", "--model", "reference", "--press", f"knorm:{name}"])
    assert refused.exit_code == 2
    assert name in refused.output
    folder = tmp_path / name.replace("/", "")
    folder.mkdir()
    (folder / "config.json").write_text(tiny_model("llama").config.to_json_string())
    command = ["plan", "--model", str(folder), "--context", "300", "--press", "none"]
    printed = runner.invoke(app, command)
    assert printed.exit_code == 0, printed.output
    assert folder.name in "".join(printed.output.split())  # a long path is broken, and its lines are centred
