# SPDX-License-Identifier: Apache-2.0
"""Networks that predict scores from hidden states: their targets, their training, and their files."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import gelu
from typer.testing import CliRunner

import kvpress
from kvpress.calibrate import FastKVzipSettings, KVzapSettings, calibrate
from kvpress.calibrate.kvzap import ridge
from kvpress.calibrate.repeated import SINKS, read_twice
from kvpress.cli import app
from kvpress.core import calibration as calibration
from kvpress.presses.criticalkv import output_weight
from kvpress.presses.fastkvzip import gates_of
from tests.caches import prefill
from tests.models import full_layers, padded_batch, tiny_model, tokens
from tests.probes import Watching

LENGTH = 24
DATA = Path(kvpress.__file__).parent / "data" / "reference" / "calibration.jsonl"


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("plus", [False, True])
def test_scores_are_the_largest_weights_of_a_second_reading(family: str, plus: bool) -> None:
    """Scores are compared with eager attention over the repeated text, query head by query head."""
    model, ids = copy.deepcopy(tiny_model(family, "eager")), tokens(1, LENGTH)[0]
    readings = read_twice(model, ids, plus)
    seen: dict[int, Any] = {}
    with torch.no_grad():
        weights = model(ids.repeat(2)[None], output_attentions=True).attentions
        with Watching(lambda call: seen.setdefault(call.layer.index, call))(model):
            model(ids.repeat(2)[None], use_cache=True)
    assert sorted(readings) == full_layers(model)
    # Sliding windows change the inputs of deeper layers, so that only the first full layer agrees in both passes.
    layer = full_layers(model)[0]
    call = seen[layer]
    torch.testing.assert_close(readings[layer].hidden, call.hidden_states[0, :LENGTH], atol=1e-4, rtol=1e-4)
    values = call.store.window.filled_values[0]
    heads, groups = values.shape[0], call.queries.shape[1] // values.shape[0]
    projection = output_weight(call.layer.module, heads, values)
    for head in range(heads):
        best = torch.zeros(LENGTH)
        for query in range(head * groups, (head + 1) * groups):
            paid = weights[layer][0, query, LENGTH:, :LENGTH].float()
            if plus:
                size = values.shape[2]
                out = values[head, :LENGTH].float() @ projection[:, query * size : (query + 1) * size].float().T
                paid = paid * out.norm(dim=1) / call.hidden_states[0, LENGTH:, None].float().norm(dim=-1)
            best = torch.maximum(best, paid.amax(dim=0))
        torch.testing.assert_close(readings[layer].scores[head, SINKS:], best[SINKS:], atol=1e-5, rtol=2e-3)
        assert bool(readings[layer].scores[head, :SINKS].isposinf().all())


def predicted(tensors: dict[str, Tensor], hidden: Tensor) -> Tensor:
    if "weight" in tensors:
        return hidden @ tensors["weight"].T + tensors["bias"]
    return gelu(hidden @ tensors["0.weight"].T + tensors["0.bias"]) @ tensors["2.weight"].T + tensors["2.bias"]


@pytest.mark.parametrize("kind", ["linear", "mlp"])
def test_networks_learn_log_scores_of_any_scale(kind: Any) -> None:
    generator = torch.Generator().manual_seed(2)
    plain = torch.randn(400, 12, generator=generator)
    hidden, log_scores = plain * torch.logspace(-1, 2, 12) + 3, plain @ torch.randn(12, 2, generator=generator) * 3 - 20
    settings = KVzapSettings(kind=kind, width=32, steps=300)
    network = settings.train(hidden[:300], log_scores[:300].exp(), 2, torch.Generator().manual_seed(0))
    error = (predicted(network, hidden[300:]) - log_scores[300:]).square().mean() / log_scores[300:].var()
    assert float(error) < 0.02


def test_zero_scores_and_a_constant_channel_give_finite_networks() -> None:
    hidden = torch.randn(50, 6, generator=torch.Generator().manual_seed(1))
    hidden[:, 2] = 4.0
    scores = torch.zeros(50, 2)
    scores[:25, 0] = 1.0
    for settings in (KVzapSettings(kind="linear"), KVzapSettings(width=4, steps=5)):
        network = settings.train(hidden, scores, 2, torch.Generator().manual_seed(0))
        assert all(bool(tensor.isfinite().all()) for tensor in network.values())


def test_the_linear_network_is_a_ridge_regression() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, targets = torch.randn(30, 5, generator=generator) + 1, torch.randn(30, 2, generator=generator)
    network = ridge(inputs, targets, price=2.0)
    # Least squares with an extra row for each weight, and a column of ones for the bias, which has no price.
    rows = torch.cat(
        [torch.cat([inputs, torch.ones(30, 1)], 1), torch.cat([2**0.5 * torch.eye(5), torch.zeros(5, 1)], 1)]
    )
    expected = torch.linalg.lstsq(rows.double(), torch.cat([targets, torch.zeros(5, 2)]).double()).solution.float()
    torch.testing.assert_close(network["weight"], expected[:5].T)
    torch.testing.assert_close(network["bias"], expected[5])


def test_gates_learn_scores_from_hidden_states() -> None:
    """One channel marks the tokens with a score of 0.9; their gates open, and the gates of other tokens close."""
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(600, 12, generator=generator)
    marked = hidden[:, 3] > 0.5
    scores = torch.where(marked[:, None], torch.tensor([0.9, 0.2]), torch.tensor([0.1, 0.2]))
    settings = FastKVzipSettings(width=4, bases=3, steps=120, lr=0.4)
    network = settings.train(hidden[:400], scores[:400], 3, torch.Generator().manual_seed(0))
    assert network["q_proj.weight"].shape == (2 * 3 * 4, 12)
    gates, marked = gates_of(network, hidden[None, 400:])[0], marked[400:]
    assert float(gates[marked, 0].mean()) > 0.75
    assert float(gates[~marked, 0].mean()) < 0.2
    assert float((gates[:, 1] - 0.2).abs().mean()) < 0.05
    # Learned keys differ; equal keys would have equal gradients and stay equal.
    assert float(network["k_base"].std(dim=2).min()) > 1e-3


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [FastKVzipSettings(steps=400).rate(step) for step in range(400)]
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert (set(rates[3:200]), set(rates[200:300]), set(rates[300:])) == ({1.0}, {0.5}, {0.25})
    assert FastKVzipSettings(steps=1).rate(0) == 1.0


FAST: dict[str, tuple[Any, str]] = {
    "mlp": (KVzapSettings(width=8, steps=20, sample=20), "kvzap:0.5,weights='{}'"),
    "linear": (KVzapSettings(kind="linear"), "kvzap:0.5,model_type=linear,weights='{}'"),
    "gates": (FastKVzipSettings(width=4, bases=2, steps=5), "fastkvzip:0.5,gates='{}'"),
}


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("family", ["gemma3_text", "phi3"])
def test_files_work_with_their_model_alone(name: str, family: str, tmp_path: Path) -> None:
    (settings, spec), file, model = FAST[name], tmp_path / "made.safetensors", tiny_model(family)
    result = calibrate(model, tokens(3, 40), settings, file)
    assert {int(tensor.partition(".")[0]) for tensor in result.tensors} == set(full_layers(model))
    ids, mask = padded_batch([40, 25])
    report = kvpress.memory_report(prefill(model, kvpress.get_press(spec.format(file)), ids, mask))
    assert report.kept < report.seen
    repeated = calibrate(model, tokens(3, 40), settings, tmp_path / "again.safetensors")
    assert all(torch.equal(repeated.tensors[tensor], value) for tensor, value in result.tensors.items())
    another_model = tiny_model("qwen3")
    with pytest.raises(ValueError, match=r"was made for .*ForCausalLM, which differs from this model in"):
        prefill(another_model, kvpress.get_press(spec.format(file)), ids, mask)


def test_another_kind_of_networks_is_refused(tmp_path: Path) -> None:
    model, file = tiny_model("llama"), tmp_path / "made.safetensors"
    calibrate(model, tokens(2, 30), FAST["linear"][0], file)
    with pytest.raises(ValueError, match="holds linear networks, not mlp ones: use model_type='linear'"):
        prefill(model, kvpress.KVzapPress(0.5, weights=str(file)), tokens(1, 30))


def test_finished_layers_of_a_stopped_run_are_not_trained_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ids, out = tiny_model("llama"), tokens(2, 30), tmp_path / "made.safetensors"
    settings = FAST["linear"][0]
    expected = calibrate(model, ids, settings, tmp_path / "whole.safetensors")
    train, trained = KVzapSettings.train, []

    def stop_after_one(self: Any, *data: Any) -> Any:
        if trained:
            raise KeyboardInterrupt
        trained.append(1)
        return train(self, *data)

    monkeypatch.setattr(KVzapSettings, "train", stop_after_one)
    with pytest.raises(KeyboardInterrupt):
        calibrate(model, ids, settings, out)
    assert not out.exists()
    monkeypatch.setattr(KVzapSettings, "train", lambda self, *data: trained.append(1) or train(self, *data))
    resumed = calibrate(model, ids, settings, out)
    assert len(trained) == len(full_layers(model))
    assert all(torch.equal(resumed.tensors[name], tensor) for name, tensor in expected.tensors.items())


@pytest.mark.parametrize(
    ("settings", "message"),
    [(KVzapSettings(width=0), "width must be"), (KVzapSettings(kind="deep"), "kind must be"),  # type: ignore[arg-type]
     (KVzapSettings(sample=0), "sample must be"), (KVzapSettings(lr=0.0), "lr must be")],
)  # fmt: skip
def test_bad_settings_are_refused_before_any_work(settings: Any, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        calibrate(tiny_model("llama"), tokens(2, 30), settings, tmp_path / "made.safetensors")
    with pytest.raises(ValueError, match="T >= 6"):
        calibrate(tiny_model("llama"), tokens(2, 5), KVzapSettings(), tmp_path / "made.safetensors")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["kvzap-linear", "kvzap-mlp", "fastkvzip"])
def test_shipped_networks_predict_scores_of_a_new_text(name: str) -> None:
    model, tokenizer = kvpress.load_model("reference")
    filler = " The old river runs near the green hill. A king and a queen waits here."
    facts = "".join(
        f" The {kind} for {key} is {number}.{filler}"
        for kind, key, number in zip(
            ["code", "price", "score", "number"] * 2,
            ["tiger", "plum", "boat", "lamp", "clock", "goat", "tea", "ship"],
            range(2210, 9999, 937),
            strict=False,
        )
    )
    ids = tokenizer(facts, return_tensors="pt")["input_ids"]
    gates = name == "fastkvzip"
    tensors = calibration.read(calibration.shipped(name)).tensors
    agreement = []
    for layer, reading in read_twice(model, ids[0], plus=not gates).items():
        names = {key.partition(".")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{layer}.")}
        hidden, log_scores = reading.hidden[SINKS:].float(), reading.scores[:, SINKS:].log()
        predictions = gates_of(names, hidden[None])[0].log() if gates else predicted(names, hidden)
        agreement += [
            float(torch.corrcoef(torch.stack(pair))[0, 1]) for pair in zip(predictions.T, log_scores, strict=True)
        ]
    assert sum(agreement) / len(agreement) > 0.35
    with kvpress.get_press("fastkvzip:0.5" if gates else f"kvzap:0.5,model_type={name[6:]}")(model) as session:
        model.generate(ids, max_new_tokens=1)
    report = kvpress.memory_report(session.cache)
    assert report.kept / report.seen == pytest.approx(0.5, abs=0.02)


def test_the_command_trains_networks(tmp_path: Path) -> None:
    out = tmp_path / "networks.safetensors"
    arguments = ["calibrate", "kvzap", "--model", "reference", "--data", str(DATA), "--out", str(out)]
    sizes = ["--tokens", "64", "--sequences", "2", "--width", "4", "--steps", "3", "--sample", "50", "--lr", "0.01"]
    result = CliRunner().invoke(app, [*arguments, *sizes])
    assert result.exit_code == 0, result.output
    model, _ = kvpress.load_model("reference")
    report = kvpress.memory_report(prefill(model, kvpress.KVzapPress(0.5, weights=str(out)), tokens(1, 60)))
    assert report.kept < report.seen
    refused = CliRunner().invoke(app, [*arguments, *sizes, "--kind", "deep", "--force"])
    assert refused.exit_code == 2
    assert "'deep' is not one of 'linear', 'mlp'" in " ".join(refused.output.replace("│", " ").split())
