# SPDX-License-Identifier: Apache-2.0
"""EAGLE heads: predictions follow the published formula, heads are loaded from files, and outputs do not depend on them."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import Draft, EagleHead, PartialVerification
from kvpress.speculation.eagle import Pairs
from tests.speculation.test_accept import CRITICAL, WORDS, chi_square, sampled, small
from tests.speculation.test_speculate import NEW, PARTIAL, Recorder, model_and_prompt, plain, run


def weights_for(width: int, vocabulary: int | None = None, seed: int = 0, scale: float = 0.1) -> dict[str, Tensor]:
    """Return random weights of a head with 4 query heads and 2 KV heads, by their published names."""
    generator = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, 2 * width), "fc.bias": (width,)}
    if vocabulary is not None:
        shapes["embed_tokens.weight"] = (vocabulary, width)
    rows = {"q": (width, width), "k": (width // 2, width), "v": (width // 2, width), "o": (width, width)}
    shapes |= {f"layers.0.self_attn.{name}_proj.weight": shape for name, shape in rows.items()}
    mlp = {"gate": (80, width), "up": (80, width), "down": (width, 80)}
    shapes |= {f"layers.0.mlp.{name}_proj.weight": shape for name, shape in mlp.items()}
    weights = {name: scale * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return weights | {"layers.0.post_attention_layernorm.weight": torch.rand(width, generator=generator) + 0.5}


def head_for(width: int, **settings: Any) -> EagleHead:
    return EagleHead(weights_for(width, **settings), heads=4, kv_heads=2)


def looped_guess(head: EagleHead, embedded: Tensor, hidden: Tensor) -> Tensor:
    """Return the predictions `[n, width]` of a row without padding, one token and one head at a time."""
    w, n = head.weights, len(embedded)
    x = torch.cat([embedded, hidden], dim=1) @ w["fc.weight"].T + w["fc.bias"]
    q, k, v = (x @ w[f"layers.0.self_attn.{name}_proj.weight"].T for name in "qkv")
    size = q.shape[1] // head.heads

    def rotated(vector: Tensor, position: int) -> Tensor:
        half = size // 2
        angle = torch.tensor([position / head.rope_theta ** (2 * i / size) for i in range(half)])
        pair = torch.complex(vector[:half], vector[half:]) * torch.polar(torch.ones(half), angle)
        return torch.cat([pair.real, pair.imag])

    out = torch.zeros(n, q.shape[1])
    for h in range(head.heads):
        span = slice(h * size, (h + 1) * size)
        group = h // (head.heads // head.kv_heads)
        kv = slice(group * size, (group + 1) * size)
        for t in range(n):
            logits = torch.stack([rotated(q[t, span], t) @ rotated(k[s, kv], s) for s in range(t + 1)]) / size**0.5
            out[t, span] = torch.softmax(logits, dim=0) @ v[: t + 1, kv]
    x = x + out @ w["layers.0.self_attn.o_proj.weight"].T
    y = x / (x.pow(2).mean(dim=1, keepdim=True) + head.eps).sqrt() * w["layers.0.post_attention_layernorm.weight"]
    gate, up, down = (w[f"layers.0.mlp.{name}_proj.weight"].T for name in ("gate", "up", "down"))
    return x + (torch.nn.functional.silu(y @ gate) * (y @ up)) @ down


@pytest.mark.parametrize("passes", [[9], [4, 1, 1, 3]])
def test_predictions_follow_the_formula(passes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.speculation.eagle.QUERIES", 3)
    head, generator = head_for(32, scale=0.2), torch.Generator().manual_seed(1)
    embedded, hidden = torch.randn(2, 9, 32, generator=generator), torch.randn(2, 9, 32, generator=generator)
    real = torch.ones(2, 9, dtype=torch.bool)
    real[1, :2] = False
    positions, past, outputs, start = (real.long().cumsum(1) - 1).clamp_min(0), Pairs(), [], 0
    for count in passes:
        span = slice(start, start + count)
        start += count
        outputs.append(head.guess(embedded[:, span], hidden[:, span], past, positions[:, span], real[:, :start]))
    guessed = torch.cat(outputs, dim=1)
    torch.testing.assert_close(guessed[0], looped_guess(head, embedded[0], hidden[0]), atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(guessed[1, 2:], looped_guess(head, embedded[1, 2:], hidden[1, 2:]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "gpt_oss"])
def test_greedy_speculation_is_plain_decoding(family: str) -> None:
    model, inputs = model_and_prompt(family)
    result = run(model, inputs, Draft(head=head_for(64), tokens=3))
    assert torch.equal(result.sequences, plain(model, inputs))
    assert result.cache.get_seq_length() == result.sequences.shape[1] - 1
    assert result.draft_passes == sum(result.proposed)
    assert result.target_passes == len(result.accepted)


@pytest.mark.parametrize("press", ["snapkv:0.5", "kivi:bits=4,residual_length=32", PARTIAL])
def test_the_target_may_have_a_press(press: str) -> None:
    model, inputs = model_and_prompt()
    assert torch.equal(run(model, inputs, head_for(64), press=press).sequences, plain(model, inputs, press))


def test_a_partial_cache_with_a_budget_of_all_pairs_is_lossless() -> None:
    model, inputs = model_and_prompt()
    verify = PartialVerification(PARTIAL.replace("16", "600"), refresh=3)
    assert torch.equal(run(model, inputs, head_for(64), verify=verify).sequences, plain(model, inputs))


def test_the_head_reads_the_hidden_states_of_the_target() -> None:
    """The first proposal of every round is the head's prediction in one pass over all hidden states."""
    model, inputs = model_and_prompt(lengths=(30,))
    head, seen = head_for(64, vocabulary=97), []

    class RecordingHead(EagleHead):
        def guess(self, embedded: Tensor, hidden: Tensor, past: Pairs, positions: Tensor, real: Tensor) -> Tensor:
            guessed = super().guess(embedded, hidden, past, positions, real)
            seen.append((past.length, hidden.clone(), guessed[:, -1].clone()))
            return guessed

        def to(self, like: Tensor) -> EagleHead:
            return self

    result = run(model, inputs, Draft(head=RecordingHead(head.weights, 4, 2), tokens=3))
    with torch.no_grad():
        states = model.get_decoder()(result.sequences[:, :-1]).last_hidden_state
    embedded = head.weights["embed_tokens.weight"][result.sequences[:, 1:]]
    positions, real = torch.arange(states.shape[1])[None], torch.ones(1, states.shape[1], dtype=torch.bool)
    expected = head.guess(embedded, states, Pairs(), positions, real)
    firsts, length = [], 30
    for count, accepted in zip(result.proposed, result.accepted, strict=True):
        firsts += [length] if count else []
        length += accepted + 1
    assert len(firsts) > 3
    for position in firsts:
        hidden, guess = [tensors for end, *tensors in seen if end == position][-1]  # earlier ones are proposals
        torch.testing.assert_close(hidden, states[:, position - hidden.shape[1] : position], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(guess, expected[:, position - 1], atol=1e-3, rtol=1e-3)


def test_a_head_that_predicts_exactly_is_always_accepted() -> None:
    """The layers of this target add nothing, so that a head which returns the embedding predicts it exactly."""
    model, inputs = model_and_prompt()
    model = copy.deepcopy(model)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    weights = {name: torch.zeros_like(weight) for name, weight in weights_for(64).items()}
    weights["fc.weight"] = torch.eye(64, 128)
    result = run(model, inputs, EagleHead(weights, heads=4, kv_heads=2), eos_token_id=None)
    assert result.accepted == result.proposed
    assert result.tokens == NEW
    assert len(set(result.sequences[0, 70:].tolist())) > 1


@pytest.mark.parametrize("stage", ["propose", "verify"])
def test_an_interrupted_round_leaves_the_cache_of_accepted_tokens(stage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = model_and_prompt(lengths=(70,))
    expected, streamer, cache = plain(model, inputs), Recorder(), DynamicCache(config=model.config)
    calls = 0

    def interrupted(*args: Any) -> None:
        nonlocal calls
        calls += 1
        # Head and target read the prompt in one pass each; in a round, the head reads four times and the target once.
        if calls == (1 + 4 + 2 if stage == "propose" else 1 + 1 + 1):
            raise KeyboardInterrupt

    inner, hooks = EagleHead.guess, len(model.get_decoder()._forward_hooks)
    if stage == "propose":
        monkeypatch.setattr(EagleHead, "guess", lambda *args: interrupted() or inner(*args))
        hook = None
    else:
        hook = model.model.layers[1].register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(model, inputs, head_for(64), past_key_values=cache, streamer=streamer)
    if hook is not None:
        hook.remove()
    streamed = torch.cat(streamer.tokens)
    assert torch.equal(streamed, expected[0, : len(streamed)])
    assert cache.get_seq_length() == len(streamed) - 1 >= 71
    assert len(model.get_decoder()._forward_hooks) == hooks
    with kvpress.reading(model):
        continued = model.generate(
            streamed[None], past_key_values=cache, max_new_tokens=82 - len(streamed), do_sample=False
        )
    assert torch.equal(continued, expected)


def test_sampled_tokens_have_the_distribution_of_the_model() -> None:
    model, expected = small(seed=0)
    draft = Draft(head=head_for(32, vocabulary=WORDS, scale=0.5), tokens=2)
    assert chi_square(sampled(model, draft), expected) < CRITICAL[6]


def written(folder: Path, weights: dict[str, Tensor], **config: Any) -> Path:
    settings = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "rms_norm_eps": 1e-5}
    (folder / "config.json").write_text(json.dumps({**settings, **config}))
    save_file(weights, folder / "model.safetensors")
    return folder


def test_heads_are_loaded_from_files(tmp_path: Path) -> None:
    weights = weights_for(64)
    head = EagleHead.load(written(tmp_path, weights, rope_theta=5000.0))
    assert (head.heads, head.kv_heads, head.eps, head.rope_theta) == (4, 2, 1e-5, 5000.0)
    assert all(torch.equal(head.weights[name], weight) for name, weight in weights.items())
    (tmp_path / "model.safetensors").unlink()
    torch.save({**weights, "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, tmp_path / "pytorch_model.bin")
    assert sorted(EagleHead.load(tmp_path).weights) == sorted(weights)
    model, inputs = model_and_prompt()
    assert torch.equal(run(model, inputs, head).sequences, plain(model, inputs))


def test_unsupported_heads_and_files_are_refused(tmp_path: Path) -> None:
    weights = weights_for(64)
    with pytest.raises(FileNotFoundError, match=r"config\.json"):
        EagleHead.load(tmp_path)
    for config in ({"num_hidden_layers": 2}, {"hidden_act": "gelu"}, {"rope_scaling": {"type": "linear", "factor": 2}}):
        with pytest.raises(NotImplementedError, match="only heads of one layer"):
            EagleHead.load(written(tmp_path, weights, **config))
    with pytest.raises(NotImplementedError, match="EAGLE-3"):
        EagleHead.load(written(tmp_path, {"midlayer.x": torch.ones(1)}))
    with pytest.raises(ValueError, match=r"missing: fc\.weight, unknown: other"):
        EagleHead({**{n: w for n, w in weights.items() if n != "fc.weight"}, "other": torch.ones(1)}, 4, 2)
    with pytest.raises(ValueError, match=r"k_proj\.weight of an EAGLE head must be \(64, 64\), got \(32, 64\)"):
        EagleHead(weights, 4, 4)
    with pytest.raises(ValueError, match="multiple of kv_heads"):
        EagleHead(weights, 4, 3)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ("{", "is not JSON"),
        ("[]", "must hold a JSON object, got list"),
        ("{}", "num_attention_heads must be an integer >= 1, got None"),
        ('{"num_attention_heads": 0}', "num_attention_heads must be >= 1, got 0"),
        ('{"num_attention_heads": 4, "rope_theta": "x"}', "rope_theta must be a number > 0, got 'x'"),
        ('{"num_attention_heads": 4, "rms_norm_eps": -1}', "rms_norm_eps must be > 0, got -1"),
        ('{"num_attention_heads": 4, "rope_scaling": [1]}', "rope_parameters must be a JSON object"),
    ],
)
def test_a_damaged_configuration_is_refused(config: str, words: str, tmp_path: Path) -> None:
    written(tmp_path, weights_for(64))
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=rf"config\.json.* {words}"):
        EagleHead.load(tmp_path)


def test_damaged_weights_are_refused(tmp_path: Path) -> None:
    weights = weights_for(64)
    written(tmp_path, weights)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged, or no file of weights .* download"):
        EagleHead.load(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "pytorch_model.bin").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin is damaged, or no file of weights .* download"):
        EagleHead.load(tmp_path)
    torch.save([1], tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match="must hold weights by name, got list"):
        EagleHead.load(tmp_path)
    for wrong in (3, torch.ones(()), torch.ones(64, 128, dtype=torch.int64)):
        with pytest.raises(
            ValueError, match=r"fc\.weight of an EAGLE head must be a floating-point tensor of 2 dims, got"
        ):
            EagleHead({**weights, "fc.weight": wrong}, 4, 2)  # type: ignore[dict-item]


def test_unsuitable_heads_are_refused_before_any_work() -> None:
    model, inputs = model_and_prompt()
    with pytest.raises(ValueError, match="32 channels"):
        run(model, inputs, head_for(32))
    with pytest.raises(ValueError, match=r"embed_tokens\.weight of the head is \(50, 64\)"):
        run(model, inputs, head_for(64, vocabulary=50))
    with pytest.raises(NotImplementedError, match="reads it in another way"):
        run(model, inputs, head_for(64), press="bounded(keydiff:0.5)")
    with pytest.raises(ValueError, match="a head replaces press, model and retrieve"):
        Draft("snapkv:0.5", head=head_for(64))
    with pytest.raises(TypeError, match=r"EagleHead\.load\(folder\)"):
        Draft(head="folder")  # type: ignore[arg-type]
