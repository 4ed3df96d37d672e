# SPDX-License-Identifier: Apache-2.0
"""Reading past the positions of a model: refused before any work, or warned about once inside `generate`."""

from __future__ import annotations

import json
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig
from typer.testing import CliRunner

import kvpress
from kvpress.cli import app
from kvpress.hf import positions
from kvpress.hf.generation.ask import ask, read_text
from kvpress.hf.models import new_cache
from kvpress.hf.positions import positions_of, reach
from tests.models import padded_batch, tiny_model, tokens

LIMIT = 64
WORDS = " The old river runs near the green hill."
runner = CliRunner()


def config(kind: str, **settings: Any) -> Any:
    return AutoConfig.for_model(kind, **settings)


def rope(kind: str, **settings: Any) -> dict[str, Any]:
    return {"rope_type": kind, "rope_theta": 10000.0, **settings}


@pytest.fixture(autouse=True)
def _unwarned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(positions, "_warned", type(positions._warned)())


@cache
def short() -> Any:
    """Return a Llama of 64 positions."""
    return tiny_model("llama", max_position_embeddings=LIMIT)


@cache
def reference() -> tuple[Any, Any]:
    return kvpress.load_model("reference")


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (config("llama", max_position_embeddings=4096), 4096),
        (config("gpt2", n_positions=512), 512),
        # Llama 3.1, GPT-OSS and DeepSeek-V3: max_position_embeddings includes the scaling.
        (
            config(
                "llama",
                max_position_embeddings=131072,
                rope_parameters=rope(
                    "llama3",
                    factor=8.0,
                    original_max_position_embeddings=8192,
                    low_freq_factor=1.0,
                    high_freq_factor=4.0,
                ),
            ),
            131072,
        ),
        (config("gpt_oss"), 131072),
        (
            config(
                "llama",
                max_position_embeddings=163840,
                rope_parameters=rope("yarn", factor=40.0, original_max_position_embeddings=4096),
            ),
            163840,
        ),
        # Qwen, extended as its model card describes: max_position_embeddings is that of the training.
        (
            config(
                "qwen3",
                max_position_embeddings=40960,
                rope_parameters=rope("yarn", factor=4.0, original_max_position_embeddings=32768),
            ),
            131072,
        ),
        (
            config(
                "phi3",
                max_position_embeddings=131072,
                original_max_position_embeddings=4096,
                rope_parameters=rope("longrope", short_factor=[1.0] * 48, long_factor=[2.0] * 48),
            ),
            131072,
        ),
        (config("llama", max_position_embeddings=2048, rope_parameters=rope("dynamic", factor=4.0)), 8192),
        (config("llama", max_position_embeddings=4096, rope_parameters=rope("linear", factor=4.0)), 16384),
        # Gemma 3: its full layers were trained with their scaling factor.
        (
            config(
                "gemma3_text",
                max_position_embeddings=131072,
                rope_parameters={"sliding_attention": rope("default"), "full_attention": rope("linear", factor=8.0)},
            ),
            131072,
        ),
        (config("qwen2_vl"), 32768),
        (config("falcon", alibi=True), None),
        (config("falcon", alibi=False), 2048),
        (config("mpt"), None),
        (config("bloom"), None),
        (config("mamba"), None),
        (config("rwkv"), None),
        (config("recurrent_gemma"), None),
    ],
    ids=lambda value: getattr(value, "model_type", None) or str(value),
)
def test_the_positions_of_a_configuration(settings: Any, expected: int | None) -> None:
    assert positions_of(settings) == expected


def test_the_pipeline_refuses_with_the_numbers() -> None:
    model, tokenizer = reference()
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    context, press = WORDS * 600, kvpress.get_press("snapkv:0.5")
    read = len(tokenizer.encode(context, add_special_tokens=False)) + bool(tokenizer.bos_token)
    with pytest.raises(ValueError, match=rf"tokens are over the 4096 positions .*{read} of the context") as refused:
        pipe(context, "\nWhat runs?", press=press, max_new_tokens=4)
    (room,) = (
        int(word.rstrip(",").partition("=")[2]) for word in str(refused.value).split() if "max_context_length=" in word
    )
    assert press.last_cache is None
    with pytest.raises(ValueError, match="over the 4096 positions"):
        pipe([WORDS, context], "\nWhat runs?", max_new_tokens=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        pipe._check_positions(
            pipe.preprocess([context], [["\nWhat runs?"]], "", room, False),
            new_cache(model),
            press,
            4,
        )


def test_a_later_turn_counts_the_tokens_of_the_cache() -> None:
    model, tokenizer = reference()
    pipe = kvpress.KVPressTextGenerationPipeline(model=model, tokenizer=tokenizer)
    cache = new_cache(model)
    pipe(WORDS, "\nWhat?", press=kvpress.get_press("knorm:0.5"), cache=cache, max_new_tokens=1)
    seen = cache.get_seq_length()
    with pytest.raises(ValueError, match=rf"over the 4096 positions .*\({seen} in the cache"):
        pipe(WORDS * 454, "\nWhat?", cache=cache, max_new_tokens=1)


def test_a_text_is_refused_before_it_is_read(tmp_path: Path) -> None:
    model, tokenizer = reference()
    with pytest.raises(ValueError, match=r"\d+ tokens are over the 4096 positions .*: give a shorter text"):
        read_text(model, tokenizer, kvpress.get_press("knorm:0.5"), WORDS * 600)
    cache, ids = read_text(model, tokenizer, kvpress.get_press("knorm:0.5"), WORDS)
    with pytest.raises(ValueError, match=rf"over the 4096 positions .*\({ids.shape[1]} in the cache, 0 of the context"):
        ask(model, tokenizer, cache, WORDS * 600, max_new_tokens=1)
    text, out = tmp_path / "text", tmp_path / "out.kv"
    text.write_text(WORDS * 600)
    arguments = ["compress", "--model", "reference", "--press", "knorm:0.5", "--text", str(text), "--out", str(out)]
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2
    assert "over the 4096 positions" in done.output
    assert not out.exists()


def test_a_block_warns_once_for_a_model() -> None:
    model, second = short(), tiny_model("llama", seed=1, max_position_embeddings=LIMIT)
    ids = tokens(1, LIMIT - 4)
    with kvpress.get_press("knorm:0.5")(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(ids, max_new_tokens=4, do_sample=False)
    with (
        kvpress.get_press("knorm:0.5")(model),
        pytest.warns(RuntimeWarning, match="65 tokens are over the 64 positions"),
    ):
        model.generate(ids, max_new_tokens=8, do_sample=False)
    with kvpress.get_press("kivi:bits=4")(model), warnings.catch_warnings():
        warnings.simplefilter("error")
        model.generate(tokens(1, 2 * LIMIT), max_new_tokens=2, do_sample=False)
    with pytest.warns(RuntimeWarning, match="128 tokens are over the 64 positions"):
        kvpress.prefill(second, [kvpress.get_press("knorm:0.5")], tokens(1, 2 * LIMIT))


def test_padding_is_no_position() -> None:
    ids, mask = padded_batch([LIMIT - 8, 10])
    ids = torch.cat([ids.new_zeros(2, 16), ids], dim=1)
    mask = torch.cat([mask.new_zeros(2, 16), mask], dim=1)
    with kvpress.get_press("knorm:0.5")(short()), warnings.catch_warnings():
        warnings.simplefilter("error")
        short().generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)


def test_a_press_that_closes_gaps_reads_on() -> None:
    """Distances stay within the kept pairs and a chunk, wherever the text ends."""
    press = kvpress.get_press("bounded(streaming_llm:budget=24,reindex=true):chunk=32")
    with press(short()), warnings.catch_warnings():
        warnings.simplefilter("error")
        short().generate(tokens(1, 4 * LIMIT), max_new_tokens=2, do_sample=False)
    plain = config("llama", max_position_embeddings=LIMIT)
    assert reach(plain, press.recipe(), 4 * LIMIT) == 24 + 32
    assert reach(plain, press.recipe(), 30) == 30
    gaps = kvpress.get_press("bounded(streaming_llm:budget=24):chunk=32").recipe()
    assert reach(plain, gaps, 4 * LIMIT) == 4 * LIMIT
    moving = config("llama", max_position_embeddings=LIMIT, rope_parameters=rope("dynamic", factor=2.0))
    assert reach(moving, press.recipe(), 4 * LIMIT) == 4 * LIMIT
    assert reach(config("gpt2"), press.recipe(), 4 * LIMIT) == 4 * LIMIT


def test_plan_offers_no_more_than_the_positions(tmp_path: Path) -> None:
    arguments = [
        "plan",
        "--model",
        "reference",
        "--memory",
        "1GB",
        "--press",
        "none",
        "--out",
        str(tmp_path / "plan.json"),
    ]
    printed = runner.invoke(app, arguments).output
    assert "1 x 4096 tokens" in printed
    assert "the longest context is limited by the 4,096 positions of LlamaForCausalLM" in printed
    figures = json.loads((tmp_path / "plan.json").read_text())
    assert (figures["context"], figures["positions"]) == (4096, 4096)
    assert [row["longest_context"] for row in figures["presses"]] == [4096]
    printed = runner.invoke(app, [*arguments, "--force", "--context", "8192", "--generated", "96"]).output
    assert "8,288 tokens exceed the 4,096 positions of LlamaForCausalLM" in printed
    assert "pass --context 4000 or less" in printed
    assert json.loads((tmp_path / "plan.json").read_text())["presses"][0]["longest_context"] == 4000
