# SPDX-License-Identifier: Apache-2.0
"""Bits per layer: their calibration, and the codecs that use them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner

import kvpress
from kvpress.calibrate import BitsSettings, CoupledSettings, calibrate
from kvpress.cli import app
from kvpress.core.host import AttentionInputs
from kvpress.hf.attention.attention_override import attending
from tests.models import full_layers, padded_batch, tiny_model, tokens

WIDTHS = (2, 4)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a file of bits for the tiny Llama, 3 on average."""
    path = tmp_path_factory.mktemp("bits") / "bits.safetensors"
    with torch.no_grad():
        calibrate(tiny_model("llama"), tokens(2, 80), BitsSettings(3.0, WIDTHS), path)
    return path


def rounded(side: Tensor, bits: int, by_token: bool) -> Tensor:
    """Round keys, per channel of 32 tokens, or values, per token, to uniform levels between their extremes."""
    groups = side[0] if by_token else side[0].unflatten(1, (-1, 32))
    low, high = (groups.amin(-1 if by_token else 2, keepdim=True), groups.amax(-1 if by_token else 2, keepdim=True))
    step = (high - low) / (2**bits - 1)
    return (low + ((groups - low) / step).round() * step).reshape(side.shape)


def outputs(call: AttentionInputs, keys: Tensor, values: Tensor) -> Tensor:
    groups = call.queries.shape[1] // keys.shape[1]
    keys, values = (side.repeat_interleave(groups, dim=1) for side in (keys, values))
    logits = call.queries @ keys.transpose(2, 3) * call.logits.scale
    logits = logits.masked_fill(~torch.ones_like(logits[0, 0], dtype=torch.bool).tril(), -torch.inf)
    if call.sinks is not None:
        extra = call.sinks.view(1, -1, 1, 1).expand(*logits.shape[:3], 1)
        return torch.cat([logits, extra], dim=3).softmax(dim=3)[..., :-1] @ values
    return logits.softmax(dim=3) @ values


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss", "gemma3_text"])
def test_errors_are_relative_errors_of_attention_outputs(family: str, tmp_path: Path) -> None:
    model, ids = tiny_model(family, "eager"), tokens(1, 64)
    tensors = calibrate(model, ids, BitsSettings(3.0, WIDTHS), tmp_path / "bits.safetensors").tensors
    layers = full_layers(model)
    assert set(tensors) == {f"{layer}.{name}" for layer in layers for name in ("bits", "errors")}
    seen: dict[int, AttentionInputs] = {}
    with attending(model, lambda call: seen.__setitem__(call.layer, call)):
        model(ids)
    for layer in layers:
        call = seen[layer]
        exact = outputs(call, call.keys, call.values)
        expected = []
        for side in range(2):
            for bits in WIDTHS:
                pairs = [call.keys, call.values]
                pairs[side] = rounded(pairs[side], bits, by_token=bool(side))
                expected.append(float((outputs(call, *pairs) - exact).square().sum() / exact.square().sum()))
        torch.testing.assert_close(tensors[f"{layer}.errors"].flatten(), torch.tensor(expected), rtol=0.02, atol=1e-6)


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:group_size=16,residual_length=0,bits={}",
        "rotated:residual_length=0,bits={}",
        "gear:residual_length=0,group_size=16,bits={}",
        "zipcache:residual_length=0,interval=16,bits={},low_bits=2",
    ],
)
def test_codecs_store_every_layer_in_its_number_of_bits(spec: str, table: Path) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([64, 40])
    press = kvpress.get_press(spec.format(f"'{table}'"))
    assert kvpress.get_press(kvpress.to_spec(press)) == press
    widths = press.layer_bits().pairs
    assert sum(map(sum, widths)) == 3 * 2 * len(widths)
    assert len(set(widths)) > 1 or widths[0][0] != widths[0][1]
    same = kvpress.get_press(spec.format(str(widths).replace(" ", "")))
    for variant in (press, same):
        with variant(model) as session:
            out = model.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
        report = kvpress.memory_report(session.cache)
        if variant is press:
            first, layer_bytes = out, [layer.total_bytes for layer in report.layers]
    assert torch.equal(first, out)
    assert layer_bytes == [layer.total_bytes for layer in report.layers]


def test_files_of_another_model_or_method_and_unsupported_widths_are_refused(table: Path, tmp_path: Path) -> None:
    press = kvpress.KIVIPress(str(table), group_size=16)
    with (
        pytest.raises(ValueError, match=r"was made for LlamaForCausalLM, which differs from this model"),
        press(tiny_model("qwen3")),
    ):
        pass
    low = kvpress.ZipCachePress(low_bits=str(table))
    with pytest.raises(ValueError, match="differs from this model"), low(tiny_model("qwen3")):
        pass
    with pytest.raises(
        FileNotFoundError, match=r"no calibration file 'nowhere.safetensors'; make it with .*calibrate bits"
    ):
        kvpress.get_press("kivi:bits='nowhere.safetensors'")
    books = tmp_path / "books.safetensors"
    calibrate(tiny_model("llama"), tokens(2, 80), CoupledSettings((4, 4), (2, 2), iterations=1, fisher=False), books)
    with pytest.raises(ValueError, match=r"books.safetensors is a calibration for 'cq', not for 'bits'"):
        kvpress.KIVIPress(str(books))
    wide = tmp_path / "wide.safetensors"
    calibrate(tiny_model("llama"), tokens(2, 80), BitsSettings(8.0, (4, 8)), wide)
    with pytest.raises(
        ValueError, match=r"gives layer 0 \(8, 8\) bits, but this codec has \[2, 3, 4\].*--widths 2,3,4"
    ):
        kvpress.KVQuantPress(str(wide))
    with pytest.raises(ValueError, match="one number or a pair"):
        kvpress.CoupledQuantPress(bits=str(wide))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"average": 1.0}, "average must be from 2 to 8 bits, got 1"),
        ({"average": 9.0}, "average must be from 2 to 8"),
        ({"widths": (2,)}, "widths must be two or more of"),
        ({"widths": (2, 5)}, r"widths must be two or more of \[1, 2, 3, 4, 8\], got \[2, 5\]"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=words):
        calibrate(tiny_model("llama"), tokens(2, 80), BitsSettings(**settings), tmp_path / "bits.safetensors")


def test_the_command_writes_bits_that_are_better_than_the_reverse_order(tmp_path: Path) -> None:
    data = tmp_path / "text.txt"
    data.write_text(" The code for tiger is 4837. The old river runs. The price of corn is 5071." * 60)
    out = tmp_path / "bits.safetensors"
    arguments = ["calibrate", "bits", "--model", "reference", "--data", str(data), "--out", str(out)]
    refused = CliRunner().invoke(app, [*arguments, "--widths", "2,x"])
    assert refused.exit_code
    assert "widths must be integers with commas" in refused.output
    assert not out.exists()
    result = CliRunner().invoke(app, [*arguments, "--widths", "2,4", "--sequences", "2", "--tokens", "256"])
    assert result.exit_code == 0, result.output
    model, tokenizer = kvpress.load_model("reference")
    ids = tokenizer(data.read_text(), return_tensors="pt").input_ids[:, :600]
    pairs = kvpress.KIVIPress(str(out)).layer_bits().pairs
    with torch.no_grad():
        exact = model(ids).logits[:, 500:].float().log_softmax(-1)
    divergences = []
    for bits in (str(out), pairs[::-1]):
        with torch.no_grad(), kvpress.KIVIPress(bits, residual_length=0)(model):
            cache = model(ids[:, :500]).past_key_values
            logits = model(ids[:, 500:], past_key_values=cache).logits.float().log_softmax(-1)
        divergences.append(float((exact.exp() * (exact - logits)).sum(-1).mean()))
    assert divergences[0] < 0.7 * divergences[1]
