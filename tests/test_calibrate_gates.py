# SPDX-License-Identifier: Apache-2.0
"""Gates of heads: the attention of a gated pass, training, and the tables that it writes."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import kvpress
from kvpress.calibrate import DuoAttentionSettings, KVzipHeadSettings, RLKVSettings, calibrate
from kvpress.calibrate.gates import Gated, frozen
from kvpress.cli import app
from kvpress.core.host import AttentionInputs, host
from kvpress.core.registry import find
from kvpress.presses.head_table import read_head_table
from tests.caches import prefill
from tests.models import full_layers, tiny_model, tokens

SINKS, RECENT, LENGTH, START = 2, 5, 30, 22


def looped_attention(gates: Tensor, growing: list[int]) -> Any:
    """Return an attention function that loops over query heads; queries from `START` on are gated, others are not."""

    def attend(call: AttentionInputs) -> Tensor:
        batch, heads, length, _ = call.queries.shape
        out = torch.zeros(batch, heads, length, call.values.shape[3])
        kv_heads = call.keys.shape[1]
        positions = torch.arange(length)
        for head in range(heads):
            kv = head // (heads // kv_heads)
            logits = call.logits(call.queries[:, head], call.keys[:, kv])
            seen = positions <= positions[:, None]
            if call.window:
                seen &= positions[:, None] - positions < call.window
            in_window = seen & ((positions < SINKS) | (positions[:, None] - positions < RECENT))
            outputs = []
            for visible in (seen, in_window):
                scores = logits.masked_fill(~visible, -torch.inf)
                if call.sinks is not None:
                    scores = torch.cat([scores, call.sinks[head].expand(batch, length, 1)], dim=-1)
                outputs.append(scores.softmax(-1)[..., :length] @ call.values[:, kv])
            gate = torch.ones(length, 1)
            if call.layer in growing:
                gate[START:] = gates[call.layer, kv]
            out[:, head] = gate * outputs[0] + (1 - gate) * outputs[1]
        return out

    return attend


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss", "phi3"])
def test_a_gated_answer_is_a_mixture_of_full_and_streaming_attention(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(1, LENGTH)[0]
    growing = full_layers(model)
    gates = torch.rand(3, 2, generator=torch.Generator().manual_seed(0))
    attention = Gated(gates, set(growing), SINKS, RECENT)
    with torch.no_grad(), host().attending(model, attention):
        attention.read(model, ids)
        gated = attention.follow(model, ids[None, START:], torch.tensor([START])).logits
        full_attention = attention.follow(model, ids[None, START:], torch.tensor([START]), gate=1.0).logits
    with torch.no_grad(), host().attending(model, looped_attention(gates, growing)):
        expected = model(ids[None], use_cache=False).logits[:, START:]
    torch.testing.assert_close(gated, expected, atol=2e-4, rtol=1e-3)
    with torch.no_grad():
        torch.testing.assert_close(
            full_attention, model(ids[None], use_cache=False).logits[:, START:], atol=2e-4, rtol=1e-3
        )


def test_rows_continue_different_lengths_of_the_prompt() -> None:
    model, ids = copy.deepcopy(tiny_model("llama")), tokens(1, LENGTH)[0]
    attention = Gated(torch.full((3, 2), 0.3), {0, 1, 2}, SINKS, RECENT)
    starts = torch.tensor([9, 21, 15])
    rows = torch.stack([ids[start : start + 4] for start in starts])
    with torch.no_grad(), host().attending(model, attention):
        attention.read(model, ids)
        together = attention.follow(model, rows, starts).logits
        for row, start in enumerate(starts):
            attention.read(model, ids[:start])
            alone = attention.follow(model, rows[row : row + 1], start[None]).logits
            torch.testing.assert_close(together[row], alone[0], atol=1e-4, rtol=1e-4)


def test_frozen_restores_the_model_after_an_error() -> None:
    model = copy.deepcopy(tiny_model("llama"))
    before = model.config._attn_implementation
    requires_grad = [p.requires_grad for p in model.parameters()]

    def fails(call: AttentionInputs) -> Tensor:
        raise KeyError(call.layer)

    with pytest.raises(KeyError), frozen(model), host().attending(model, fails):
        model(tokens(1, 5))
    assert model.config._attn_implementation == before
    assert [p.requires_grad for p in model.parameters()] == requires_grad


def test_gradients_of_gates_equal_finite_differences() -> None:
    model, ids = copy.deepcopy(tiny_model("llama")), tokens(1, LENGTH)[0]
    settings = DuoAttentionSettings(SINKS, RECENT, answer=8, price=0.05)
    gates = torch.full((3, 2), 0.6, requires_grad=True)
    attention = Gated(gates, {0, 1, 2}, SINKS, RECENT)

    def loss() -> Tensor:
        return settings.loss(model, attention, prompt, torch.Generator())

    with frozen(model), host().attending(model, attention):
        with torch.no_grad():
            prompt = settings.prompt(model, attention, ids)
        with torch.enable_grad():
            loss().backward()
        for layer, head in ((0, 1), (2, 0)):
            values = []
            for step in (1e-2, -1e-2):
                with torch.no_grad():
                    attention.gates = gates.detach().clone()
                    attention.gates[layer, head] += step
                    values.append(float(loss()))
            assert gates.grad is not None
            assert float(gates.grad[layer, head]) == pytest.approx((values[0] - values[1]) / 2e-2, rel=2e-2, abs=1e-5)


@pytest.mark.parametrize("settings", [DuoAttentionSettings, RLKVSettings], ids=["duo_attention", "rlkv"])
def test_a_high_price_closes_gates_and_presses_read_the_table(settings: Any, tmp_path: Path) -> None:
    model = copy.deepcopy(tiny_model("llama"))
    # The model generates these answers, so that it predicts them.
    ids = model.generate(tokens(2, 20), max_new_tokens=12, do_sample=False)
    common = {"sink_size": SINKS, "recent_size": RECENT, "answer": 10, "steps": 12, "lr": 0.2}
    closed = calibrate(model, ids, settings(price=100.0, **common), tmp_path / "closed.tsv").tensors["gates"]
    if settings is DuoAttentionSettings:
        assert float(closed.max()) == 0
    repeated = calibrate(model, ids, settings(price=100.0, **common), tmp_path / "again.tsv").tensors["gates"]
    assert torch.equal(closed, repeated)
    table = read_head_table(str(tmp_path / "closed.tsv"))
    torch.testing.assert_close(table.values, closed.double(), atol=1e-4, rtol=0)
    assert (tmp_path / "closed.json").is_file()
    press = kvpress.get_press(f"rlkv:0.5,table='{tmp_path / 'closed.tsv'}',sink_size=2,recent_size=5")
    report = kvpress.memory_report(prefill(model, press, ids))
    assert report.kept < report.seen


@pytest.mark.parametrize(
    "settings",
    [DuoAttentionSettings(0, 1, price=100.0), RLKVSettings(0, 1, price=100.0, target=0.0)],
    ids=lambda settings: settings.method,
)
def test_gates_of_layers_with_a_sliding_window_stay_open(settings: Any, tmp_path: Path) -> None:
    """The price would close them first, since nothing depends on them, and presses would cut no other heads."""
    model = copy.deepcopy(tiny_model("gpt_oss", "eager"))
    ids = model.generate(tokens(8, 20), max_new_tokens=24, do_sample=False)
    settings = replace(settings, answer=20, steps=12, lr=0.2)
    gates = calibrate(model, ids, settings, tmp_path / "heads.tsv").tensors["gates"]
    full = full_layers(model)
    for layer, row in enumerate(gates.tolist()):
        assert max(row) < 1 if layer in full else row == [1.0] * len(row)


def test_untrainable_settings_and_data_are_refused(tmp_path: Path) -> None:
    model, ids = copy.deepcopy(tiny_model("llama")), torch.full((2, LENGTH), 5)
    with pytest.raises(ValueError, match=r"must end in \.tsv"):
        calibrate(model, ids, DuoAttentionSettings(SINKS, RECENT, answer=8), tmp_path / "gates.safetensors")
    with pytest.raises(ValueError, match=r"T >= 449"):
        calibrate(model, ids, DuoAttentionSettings(), tmp_path / "gates.tsv")
    with pytest.raises(ValueError, match="answer must be >= 2, got 1"):
        calibrate(model, ids, RLKVSettings(SINKS, RECENT, answer=1), tmp_path / "gates.tsv")
    with pytest.raises(ValueError, match=r"length must be below answer.*got length=4 and answer=4"):
        calibrate(model, ids, RLKVSettings(SINKS, RECENT, answer=4), tmp_path / "gates.tsv")
    with pytest.raises(
        ValueError, match="needs tokens that the model predicts with full attention and not with streaming heads"
    ):
        calibrate(model, ids, RLKVSettings(SINKS, 20, answer=5, steps=2), tmp_path / "gates.tsv")
    assert not list(tmp_path.glob("*.tsv"))


@pytest.mark.parametrize("name", ["duo_attention", "rlkv"])
def test_shipped_tables_keep_the_heads_that_retrieve(name: str, tmp_path: Path) -> None:
    """The half of the heads with the largest values answers a question about a distant fact; the other half does not."""
    model, tokenizer = kvpress.load_model("reference")
    press = find(name).press
    table = read_head_table(str(Path(model.name_or_path) / press.beside))
    inverted = tmp_path / "turned.tsv"
    inverted.write_text("\n".join("\t".join(map(str, row)) for row in (1 - table.values).tolist()))
    filler = " The old river runs near the green hill." * 25
    prompt = f"{filler} The code for tiger is 4837.{filler}\nWhat is the code for tiger?\nThe code for tiger is"
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    answers = []
    for path in (None, str(inverted)):
        with press(0.5, table=path, sink_size=16, recent_size=64)(model):
            answers.append(tokenizer.decode(model.generate(ids, max_new_tokens=2, do_sample=False)[0, ids.shape[1] :]))
    assert answers[0].strip() == "4837"
    assert answers[1].strip() != "4837"


def test_the_command_trains_gates(tmp_path: Path) -> None:
    out = tmp_path / "heads.tsv"
    data = Path(kvpress.__file__).parent / "data" / "reference" / "calibration.jsonl"
    arguments = [
        "calibrate", "duo_attention", "--model", "reference", "--data", str(data), "--out", str(out), "--steps", "1",
        "--answer", "8", "--sink-size", "2", "--recent-size", "8", "--tokens", "64", "--sequences", "1",
    ]  # fmt: skip
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    assert read_head_table(str(out)).values.shape == (4, 2)


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_kvzip_values_of_heads_are_the_largest_weights_of_a_second_reading(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family), tokens(2, 24)
    values = calibrate(model, ids, KVzipHeadSettings(), tmp_path / "heads.tsv").tensors["gates"]
    eager = copy.deepcopy(model)
    eager.set_attn_implementation("eager")
    with torch.no_grad():
        weights = eager(ids.repeat(1, 2), output_attentions=True).attentions
    full = full_layers(model)
    for layer, row in enumerate(values):
        if layer not in full:
            assert row.tolist() == [1.0] * len(row)
    expected = (
        weights[full[0]][:, :, 24:, 4:24].amax(dim=(2, 3)).unflatten(1, (values.shape[1], -1)).amax(dim=2).mean(dim=0)
    )
    torch.testing.assert_close(values[full[0]], expected.float(), atol=1e-4, rtol=1e-3)
    assert torch.allclose(read_head_table(str(tmp_path / "heads.tsv")).values, values.double(), atol=1e-4)
