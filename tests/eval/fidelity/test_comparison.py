# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import io
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.figures import LAYER_FIGURES, Fidelity, kl_divergence
from kvpress_eval.fidelity.texts import read_texts
from kvpress_eval.report.comparison_tables import fidelity_table, layer_table
from kvpress_eval.run.models import Engine, load_engine
from kvpress_eval.tasks.texts import read_text
from rich.console import Console
from torch.distributions import Categorical
from torch.distributions import kl_divergence as categorical_kl

import kvpress
from benchmarks import fidelity, quality, recall
from benchmarks.accuracy import Score
from tests.eval import commands

CONTEXT, TOKENS = 160, 32
CONFIG = RunConfig(lengths=(CONTEXT,), samples=3, dtype="float32")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(CONFIG)


@pytest.fixture(scope="module")
def comparison(engine: Engine) -> Comparison:
    return Comparison(engine, read_texts(CONFIG, engine, TOKENS), CONTEXT, batch_size=2)


def invoke(*arguments: str) -> tuple[int, str]:
    return commands.invoke("fidelity", "--samples", "2", "--context", "64", "--tokens", "8", *arguments)


def test_kl_is_that_of_the_two_categorical_distributions() -> None:
    p, q = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(0)).mul(4)
    expected = categorical_kl(Categorical(logits=p), Categorical(logits=q))
    torch.testing.assert_close(kl_divergence(p, q), expected)
    assert kl_divergence(p, p + 3).abs().max() < 1e-6


def test_the_full_cache_is_the_model_on_the_whole_text(engine: Engine, comparison: Comparison) -> None:
    with torch.inference_mode():
        plain_logits = engine.model(comparison.ids).logits
    full_logits = torch.cat([reading.logits for reading in comparison.full])
    torch.testing.assert_close(full_logits, plain_logits[:, CONTEXT:], rtol=1e-3, atol=1e-3)


def test_a_text_outside_the_vocabulary_is_reported(tmp_path: Path) -> None:
    strange, familiar = tmp_path / "strange.txt", tmp_path / "own.txt"
    strange.write_text("Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 20)
    familiar.write_text(" The code for tiger is 4837. The old river runs." * 60)
    for path, is_outside in ((strange, True), (familiar, False)):
        out = path.with_suffix(".json")
        code, output = invoke("--press", "none", "--text", str(path), "--out", str(out))
        assert code == 0, output
        assert ("outside its vocabulary" in output.replace("\n", " ")) == is_outside
        assert (json.loads(out.read_text())["outside_vocabulary"] > 0.5) == is_outside
    assert "outside its vocabulary" not in invoke("--press", "none")[1]


def test_no_press_diverges_by_nothing(comparison: Comparison) -> None:
    figures = comparison.fidelity("none")
    assert figures.kl.shape == figures.agrees.shape == (3, TOKENS)
    assert not figures.kl.any()
    assert figures.agrees.all()
    assert figures.prompt_bits == 32  # float32
    assert figures.kept == 1


def test_fewer_bits_diverge_more(comparison: Comparison) -> None:
    divergences = [comparison.fidelity(f"kivi:bits={b},group_size=32,residual_length=0") for b in (8, 4, 2, 1)]
    means = [float(divergence.kl.mean()) for divergence in divergences]
    assert means == sorted(means)
    assert 0 < means[0] < 1e-3 < means[-1]
    assert [d.prompt_bits for d in divergences] == sorted((d.prompt_bits for d in divergences), reverse=True)
    assert divergences[0].agrees.float().mean() > divergences[-1].agrees.float().mean()


def test_the_compressed_context_is_read(engine: Engine, comparison: Comparison) -> None:
    """Evicting all but the newest pairs gives the model's own distributions with the other pairs masked."""
    kept = 32
    figures = comparison.fidelity(f"streaming_llm:budget={kept},n_sink=0")
    mask = torch.ones(CONTEXT + TOKENS, CONTEXT + TOKENS, dtype=torch.bool).tril()
    mask[CONTEXT:, : CONTEXT - kept] = False
    with torch.inference_mode():
        masked = engine.model(comparison.ids, attention_mask=mask.expand(3, 1, -1, -1)).logits[:, CONTEXT:]
        full = engine.model(comparison.ids).logits[:, CONTEXT:]
    torch.testing.assert_close(figures.kl, kl_divergence(full, masked), rtol=1e-2, atol=1e-4)
    assert figures.kept == (kept + TOKENS) / (CONTEXT + TOKENS)


def test_tokens_of_the_continuation_are_encoded(comparison: Comparison) -> None:
    reading = comparison.batches[0].read("kivi:bits=2,group_size=32,residual_length=0")
    encoded = [report.components["codes"] for report in (reading.prompt, reading.end)]
    groups = [(CONTEXT + added) // 32 for added in (0, TOKENS)]
    assert encoded[1] * groups[0] == encoded[0] * groups[1] > 0


def test_the_batch_size_does_not_matter(engine: Engine, comparison: Comparison) -> None:
    press = "kivi:bits=2,group_size=32,residual_length=0"
    alone = Comparison(engine, comparison.ids, CONTEXT, batch_size=1).fidelity(press)
    together = comparison.fidelity(press)
    torch.testing.assert_close(alone.kl, together.kl, rtol=1e-2, atol=1e-4)
    assert math.isclose(alone.prompt_bits, together.prompt_bits)


@pytest.mark.parametrize("chunk", [1, 7, TOKENS])
def test_perplexity_of_the_full_cache_is_that_of_one_plain_pass(engine: Engine, chunk: int) -> None:
    ids = read_texts(CONFIG, engine, TOKENS)
    row = Comparison(engine, ids, CONTEXT, batch_size=2, chunk=chunk).fidelity("none").row()
    with torch.inference_mode():
        logits = engine.model(ids).logits[:, CONTEXT:-1]
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, CONTEXT + 1 :].flatten()).exp()
    assert math.isclose(row["perplexity"], float(expected), rel_tol=1e-4)
    assert row["full_perplexity"] == row["perplexity"]


@pytest.mark.parametrize("chunk", [8, 20, 100])
def test_chunks_read_the_pairs_that_earlier_turns_left(engine: Engine, comparison: Comparison, chunk: int) -> None:
    """With a press that keeps the newest pairs after every turn, a chunk reads those and its own past."""
    kept = 16
    figures = Comparison(engine, comparison.ids, CONTEXT, 2, chunk=chunk).fidelity(
        f"streaming_llm:budget={kept},n_sink=0"
    )
    mask = torch.ones(CONTEXT + TOKENS, CONTEXT + TOKENS, dtype=torch.bool).tril()
    for start in range(CONTEXT, CONTEXT + TOKENS, chunk):
        mask[start : start + chunk, : start - kept] = False
    with torch.inference_mode():
        logits = engine.model(comparison.ids, attention_mask=mask.expand(3, 1, -1, -1)).logits[:, CONTEXT:-1]
    targets = comparison.ids[:, CONTEXT + 1 :]
    expected = -logits.log_softmax(-1).gather(-1, targets[..., None])[..., 0]
    torch.testing.assert_close(figures.nll, expected, rtol=1e-2, atol=1e-3)
    assert figures.nll.mean() > figures.full_nll.mean()


def test_a_press_that_draws_at_random_is_repeatable(comparison: Comparison) -> None:
    first, second = (comparison.fidelity("random:0.5") for _ in range(2))
    assert torch.equal(first.kl, second.kl)
    assert first.kl.mean() > 0


def test_texts_are_seeded_and_more_samples_keep_the_first(engine: Engine) -> None:
    def made(**fields: int) -> torch.Tensor:
        return read_texts(CONFIG.model_copy(update=fields), engine, TOKENS)

    three_texts, five_texts, other_seed = made(), made(samples=5), made(seed=1)
    assert three_texts.shape == (3, CONTEXT + TOKENS)
    assert torch.equal(three_texts, five_texts[:3])
    assert not torch.equal(three_texts, other_seed)
    assert not torch.equal(three_texts[0], three_texts[1])


def test_the_continuation_asks_about_the_context(engine: Engine) -> None:
    ids = read_texts(CONFIG, engine, 128)
    for row in ids:
        context, continuation = engine.tokenizer.decode(row[:CONTEXT]), engine.tokenizer.decode(row)
        facts = re.findall(r"What is the (\w+) for (\w+)\?\nThe \1 for \2 is (\d+)\.", continuation)
        assert facts
        assert f" The {facts[0][0]} for {facts[0][1]} is {facts[0][2]}." in context


def test_a_text_file(engine: Engine, tmp_path: Path) -> None:
    path, text, length = tmp_path / "text.txt", " The old river runs near the green hill." * 80, CONTEXT + TOKENS
    path.write_text(text)
    ids = read_texts(CONFIG, engine, TOKENS, read_text(str(path)))
    assert ids.flatten().tolist() == engine.tokenizer(text)["input_ids"][: 3 * length]
    with pytest.raises(DataError, match="not 3"):
        read_texts(CONFIG, engine, 2000, read_text(str(path)))


def test_a_press_that_does_not_suit_the_model(comparison: Comparison) -> None:
    with pytest.raises(ConfigError, match="kivi:group_size=48"):
        comparison.fidelity("kivi:group_size=48")


def test_the_command_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    code, output = invoke("--press", "none", "--press", "streaming_llm:0.5", "--out", str(out))
    assert code == 0, output
    assert "perplexity" in output
    record = json.loads(out.read_text())
    assert (record["context"], record["tokens"], record["config"]["samples"]) == (64, 8, 2)
    none, half = record["rows"]
    assert none["kl_mean"] == 0 < half["kl_mean"] <= half["kl_p99"]
    assert half["kl_mean"] < half["kl_worst"]
    assert none["perplexity_change"] == 0
    assert half["perplexity_change_low"] < half["perplexity_change"] < half["perplexity_change_high"]
    assert f"{half['kl_worst']:.4f}" in output
    assert len(half["kl_by_token"]) == 8


def test_changes_of_perplexity_are_of_pairs_with_texts_as_samples() -> None:
    full = torch.tensor([[1.0, 3.0], [2.0, 2.0], [5.0, 1.0]])
    nll = full + torch.tensor([0.1, 0.2, 0.3])[:, None]
    kl = torch.tensor([[0.1, 0.1], [0.4, 0.2], [0.0, 0.5]])

    def row(texts: slice) -> dict[str, Any]:
        figures = Fidelity("knorm:0.5", kl[texts], kl[texts] > 0, nll[texts], full[texts], 16.0, 0.0, 16.0, 1.0)
        return figures.row()

    three, alone = row(slice(None)), row(slice(1))
    assert three["kl_worst"] == pytest.approx(0.3)
    assert three["perplexity_change"] == pytest.approx(math.exp(0.2) - 1, abs=1e-5)
    assert three["perplexity_change"] == pytest.approx(three["perplexity"] / three["full_perplexity"] - 1, abs=1e-5)
    half_width = 4.303 * 0.1 / math.sqrt(3)  # Student's quantile for two degrees of freedom
    assert three["perplexity_change_low"] == pytest.approx(math.exp(0.2 - half_width) - 1, abs=1e-3)
    assert three["perplexity_change_high"] == pytest.approx(math.exp(0.2 + half_width) - 1, abs=1e-3)
    assert alone["perplexity_change"] == pytest.approx(math.exp(0.1) - 1, abs=1e-5)
    assert (alone["perplexity_change_low"], alone["perplexity_change_high"]) == (None, None)


def test_layers_are_printed_apart_and_written(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    code, output = invoke("--press", "streaming_llm:0.5", "--chunk", "4", "--layers", "--out", str(out))
    assert code == 0, output
    assert "isolated" in output
    record = json.loads(out.read_text())
    assert record["chunk"] == 4
    (row,) = record["rows"]
    assert row["layers"] == [0, 1, 2, 3]
    for name in ("output_error", "isolated_error", "attention_recall"):
        assert math.isclose(row[name], sum(row[f"{name}_by_layer"]) / 4, abs_tol=1e-6)
    assert 0 < row["attention_recall"] < 1
    assert row["perplexity"] != row["full_perplexity"] > 1
    assert f"{100 * row['attention_recall_by_layer'][3]:.1f}" in output


def test_tables_fit_a_terminal_of_100_columns() -> None:
    press = "adakv(expected_attention:0.5,epsilon=0.01) + kivi:bits=2,residual_length=32"
    layers = {name: 0.25 for name in LAYER_FIGURES} | {f"{name}_by_layer": [0.2, 0.3] for name in LAYER_FIGURES}
    ones = torch.ones(2, 4)
    row = Fidelity(press, ones, ones > 0, ones, ones, 16.0, 0.0, 16.0, 1.0).row() | layers | {"layers": [0, 1]}
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(fidelity_table([row]))
    console.print(layer_table([row]))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 100
    press_lines = [line for line in lines if line.startswith("adakv(expected_attention")]
    assert [line.split()[-9:] for line in press_lines[:1]] == [
        ["1.00000", "1.0000", "-", "1.0000", "100.0", "2.718", "16.00", "16.00", "100"]
    ]
    assert press_lines[1].split()[-4:] == ["0", "0.2000", "0.2000", "20.0"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--press", "snapkw:0.5"], 2, "snapkv"),
        (["--press", "none", "--press", "kivi:group_size=48"], 2, "press 'kivi:group_size=48': group_size must"),
        (["--press", "none", "--press", "protect(knorm:0.5):tokens=0:900"], 2, "past a prompt of 64 tokens"),
        (["--context", "4090"], 2, "over the 4096 positions"),
        (["--context", "8"], 2, "--context"),
        (["--tokens", "1"], 2, "--tokens"),
        (["--chunk", "0"], 2, "--chunk"),
        (["--samples", "0"], 2, "samples"),
        (["--press-seconds", "0"], 2, "press-seconds must be a number of"),
        (["--language", "latin"], 2, "language"),
        (["--text", "none.txt"], 3, "no such text file: place it at"),
        (["--out", "/dev/null/figures.json"], 4, "cannot write /dev/null"),
    ],
)
def test_mistakes_have_an_exit_code(arguments: list[str], code: int, message: str) -> None:
    got, output = invoke(*arguments)
    assert got == code
    assert message in output
    assert "none" not in output.split()  # no press was measured


@pytest.mark.parametrize("study", ["bits", "composition"])
def test_the_quality_benchmark(study: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "quality.json"
    out.write_text('{"other": 1}')
    few = ("kivi", "zipcache")
    monkeypatch.setattr(
        quality, "METHODS", {name: specs if name in few else [] for name, specs in quality.METHODS.items()}
    )
    folders = ["--out", str(out), "--figures", str(tmp_path), "--runs", str(tmp_path / "runs")]
    chosen = ["--composition"] if study == "composition" else []
    monkeypatch.setattr(sys, "argv", ["quality.py", "--quick", *chosen, *folders])
    quality.main()
    record = json.loads(out.read_text())
    assert record["other"] == 1
    assert (tmp_path / f"quantisation_{study}.png").stat().st_size > 10_000
    rows = record[study]["rows"]
    if study == "composition":
        assert all(9.5 < row["smaller_by"] < 10.5 for row in rows)
        assert [row["kept"] for row in rows[:2]] == sorted(row["kept"] for row in rows[:2])
    else:
        assert {row["method"] for row in rows} == set(few)
        assert all(row["kl_mean"] > 0 for row in rows)


def test_the_fidelity_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "fidelity.json"
    presses = ["random:0.9", "streaming_llm:0.5", "kivi:bits=2,group_size=32,residual_length=0"]
    sizes = ["--samples", "1", "--texts", "1", "--length", "64", "--tokens", "4", "--runs", str(tmp_path / "runs")]
    monkeypatch.setattr(sys, "argv", ["fidelity.py", "--presses", *presses, *sizes, "--out", str(out)])
    fidelity.main()
    record = json.loads(out.read_text())
    assert list(record["rows"]) == presses
    assert {group: correlations["presses"] for group, correlations in record["correlations"].items()} == {
        "all": 3,
        "evicting": 2,
    }
    assert set(record["seconds"]) == {"fidelity", "fidelity with layers", "tasks"}
    assert all(row["tasks"]["contexts"] == 6 for row in record["rows"].values())


def test_rank_correlations_are_positive_where_the_closer_press_scores_better() -> None:
    close_row, far_row = dict.fromkeys(fidelity.FIGURES, 0.1), dict.fromkeys(fidelity.FIGURES, 0.9)
    rows = {"snapkv:0.1": close_row, "snapkv:0.9": far_row, "kivi": far_row}
    scores = {press: Score(mean, 0.0, 1) for press, mean in zip(rows, (80, 40, 60), strict=True)}
    correlations = fidelity.correlations(rows, scores)
    assert correlations["evicting"]["presses"] == 2
    for figure in fidelity.FIGURES:
        sign = 1 if figure in fidelity.LESS_IS_CLOSER else -1
        assert correlations["evicting"][figure] == pytest.approx({"spearman": sign, "kendall": sign})
        assert sign * correlations["all"][figure]["spearman"] == pytest.approx(0.866, abs=1e-3)  # two presses tie


def test_the_recall_benchmark(engine: Engine) -> None:
    prompts = [ids[None] for ids in read_texts(CONFIG, engine, TOKENS)]
    figures = recall.recall(engine.model, prompts, kvpress.get_press("quest:budget=0.25,page_size=4,skip_layers=0"))
    assert figures.random == pytest.approx(0.25, abs=0.01)
    assert figures.random < figures.read < figures.best < 1
    assert (
        recall.recall(engine.model, prompts, kvpress.get_press("double_sparsity:budget=0.75,skip_layers=0")).read > 0.9
    )
