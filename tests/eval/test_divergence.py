from __future__ import annotations

import json
import math
import re
import sys
from pathlib import Path

import pytest
import torch
import typer
from kvpress_eval.commands.divergence import divergence_command
from kvpress_eval.config import RunConfig
from kvpress_eval.divergence import Comparison, kl_divergence, read_texts
from kvpress_eval.errors import ConfigError, DataError
from kvpress_eval.models import Engine, load_engine
from torch.distributions import Categorical
from torch.distributions import kl_divergence as categorical_kl
from typer.testing import CliRunner

from benchmarks import quality

CONTEXT, TOKENS = 160, 48
CONFIG = RunConfig(lengths=(CONTEXT,), samples=3, dtype="float32")


@pytest.fixture(scope="module")
def engine() -> Engine:
    return load_engine(CONFIG)


@pytest.fixture(scope="module")
def comparison(engine: Engine) -> Comparison:
    return Comparison(engine, read_texts(CONFIG, engine, TOKENS), CONTEXT, batch_size=2)


def invoke(*arguments: str) -> tuple[int, str]:
    app = typer.Typer()
    app.command()(divergence_command)
    result = CliRunner().invoke(app, ["--samples", "2", "--context", "64", "--tokens", "8", *arguments])
    return result.exit_code, result.output


def test_kl_is_that_of_the_two_categorical_distributions() -> None:
    p, q = torch.randn(2, 3, 5, 40, generator=torch.Generator().manual_seed(0)).mul(4)
    expected = categorical_kl(Categorical(logits=p), Categorical(logits=q))
    torch.testing.assert_close(kl_divergence(p, q), expected)
    assert kl_divergence(p, p + 3).abs().max() < 1e-6


def test_the_full_cache_is_the_model_on_the_whole_text(engine: Engine, comparison: Comparison) -> None:
    with torch.inference_mode():
        whole = engine.model(comparison.ids).logits
    found = torch.cat([reading.logits for reading in comparison.full])
    torch.testing.assert_close(found, whole[:, CONTEXT:], rtol=1e-3, atol=1e-3)


def test_no_press_diverges_by_nothing(comparison: Comparison) -> None:
    found = comparison.divergence("none")
    assert found.kl.shape == found.agrees.shape == (3, TOKENS)
    assert not found.kl.any()
    assert found.agrees.all()
    assert found.prompt_bits == 32  # float32
    assert found.kept == 1


def test_fewer_bits_diverge_more(comparison: Comparison) -> None:
    found = [comparison.divergence(f"kivi:bits={b},group_size=32,residual_length=0") for b in (8, 4, 2, 1)]
    means = [float(divergence.kl.mean()) for divergence in found]
    assert means == sorted(means)
    assert 0 < means[0] < 1e-3 < means[-1]
    assert [d.prompt_bits for d in found] == sorted((d.prompt_bits for d in found), reverse=True)
    assert found[0].agrees.float().mean() > found[-1].agrees.float().mean()


def test_the_compressed_context_is_what_is_read(engine: Engine, comparison: Comparison) -> None:
    """Evicting all but the newest pairs gives the model's own distributions with the others masked."""
    kept = 32
    found = comparison.divergence(f"streaming_llm:budget={kept},n_sink=0")
    mask = torch.ones(CONTEXT + TOKENS, CONTEXT + TOKENS, dtype=torch.bool).tril()
    mask[CONTEXT:, : CONTEXT - kept] = False
    with torch.inference_mode():
        masked = engine.model(comparison.ids, attention_mask=mask.expand(3, 1, -1, -1)).logits[:, CONTEXT:]
        full = engine.model(comparison.ids).logits[:, CONTEXT:]
    torch.testing.assert_close(found.kl, kl_divergence(full, masked), rtol=1e-2, atol=1e-4)
    assert found.kept == (kept + TOKENS) / (CONTEXT + TOKENS)


def test_tokens_of_the_continuation_are_encoded(comparison: Comparison) -> None:
    found = comparison.read("kivi:bits=2,group_size=32,residual_length=0", comparison.ids)
    encoded = [report.components["codes"] for report in (found.prompt, found.end)]
    groups = [(CONTEXT + added) // 32 for added in (0, TOKENS)]
    assert encoded[1] * groups[0] == encoded[0] * groups[1] > 0


def test_the_batch_size_does_not_matter(engine: Engine, comparison: Comparison) -> None:
    press = "kivi:bits=2,group_size=32,residual_length=0"
    alone = Comparison(engine, comparison.ids, CONTEXT, batch_size=1).divergence(press)
    together = comparison.divergence(press)
    torch.testing.assert_close(alone.kl, together.kl, rtol=1e-2, atol=1e-4)
    assert math.isclose(alone.prompt_bits, together.prompt_bits)


def test_a_press_that_draws_at_random_is_repeatable(comparison: Comparison) -> None:
    first, second = (comparison.divergence("random:0.5") for _ in range(2))
    assert torch.equal(first.kl, second.kl)
    assert first.kl.mean() > 0


def test_texts_are_seeded_and_more_samples_keep_the_first(engine: Engine) -> None:
    def made(**fields: int) -> torch.Tensor:
        return read_texts(CONFIG.model_copy(update=fields), engine, TOKENS)

    few, more, other = made(), made(samples=5), made(seed=1)
    assert few.shape == (3, CONTEXT + TOKENS)
    assert torch.equal(few, more[:3])
    assert not torch.equal(few, other)
    assert not torch.equal(few[0], few[1])


def test_the_continuation_asks_about_the_context(engine: Engine) -> None:
    ids = read_texts(CONFIG, engine, 128)
    for row in ids:
        context, continuation = engine.tokenizer.decode(row[:CONTEXT]), engine.tokenizer.decode(row)
        asked = re.findall(r"What is the (\w+) for (\w+)\?\nThe \1 for \2 is (\d+)\.", continuation)
        assert asked
        assert f" The {asked[0][0]} for {asked[0][1]} is {asked[0][2]}." in context


def test_a_text_file(engine: Engine, tmp_path: Path) -> None:
    path, text, length = tmp_path / "text.txt", " The old river runs near the green hill." * 80, CONTEXT + TOKENS
    path.write_text(text)
    ids = read_texts(CONFIG, engine, TOKENS, path)
    assert ids.flatten().tolist() == engine.tokenizer(text)["input_ids"][: 3 * length]
    with pytest.raises(DataError, match="not 3"):
        read_texts(CONFIG, engine, 2000, path)


def test_a_press_that_does_not_suit_the_model(comparison: Comparison) -> None:
    with pytest.raises(ConfigError, match="kivi:group_size=48"):
        comparison.divergence("kivi:group_size=48")


def test_the_command_prints_a_table_and_writes_its_figures(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figures.json"
    code, output = invoke("--press", "none", "--press", "streaming_llm:0.5", "--out", str(out))
    assert code == 0, output
    assert "bits/value" in output
    record = json.loads(out.read_text())
    assert (record["context"], record["tokens"], record["config"]["samples"]) == (64, 8, 2)
    none, half = record["rows"]
    assert none["kl_mean"] == 0 < half["kl_mean"] <= half["kl_p99"]
    assert len(half["kl_by_token"]) == 8


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--press", "snapkw:0.5"], 2, "snapkv"),
        (["--context", "4090"], 2, "over the 4096 positions"),
        (["--context", "8"], 2, "--context"),
        (["--samples", "0"], 2, "samples"),
        (["--language", "latin"], 2, "language"),
        (["--text", "none.txt"], 3, "no text file 'none.txt'"),
        (["--out", "/dev/null/figures.json"], 4, "cannot write /dev/null"),
    ],
)
def test_mistakes_have_an_exit_code(arguments: list[str], code: int, message: str) -> None:
    got, output = invoke(*arguments)
    assert got == code
    assert message in output


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
