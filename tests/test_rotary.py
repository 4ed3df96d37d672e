# SPDX-License-Identifier: Apache-2.0
"""Keys are unrotated by the rotary embedding that rotated them, of any kind, and models are unchanged."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForImageTextToText, DynamicCache, LlamaForCausalLM

import kvpress
from benchmarks import tiny
from kvpress.observe.view import View
from kvpress.presses.knorm import KnormPress
from kvpress.presses.leverage_score import LeverageScorePress
from tests.models import padded_batch, tokens

tiny_model = cache(tiny.tiny)

TURNING = [
    "llama",
    "gpt_neox",
    "glm",
    "stablelm",
    "phi",
    "persimmon",
    "olmo3",
    "llama4_text",
    "lfm2_moe",
    "cohere_compass_text",
]
NOT_TURNING = ["cohere2", "exaone4", "afmoe", "gpt2", "jamba"]
SCALED: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.0] * 8,
        "long_factor": [float(2 + n) for n in range(8)],
        "original_max_position_embeddings": 20,
        "factor": 4.0,
    },
}


@dataclass
class Seeing(LeverageScorePress):
    """Keeps the unrotated keys of every layer that it scores."""

    seen: list[Tensor] = field(default_factory=list)

    def scores(self, view: View) -> Tensor:
        self.seen.append(view.unrotated_keys())
        return super().scores(view)


@dataclass
class SeeingUnwatched(KnormPress):
    """The same press without an observer of the rotary embedding."""

    def scores(self, view: View) -> Tensor:
        view.unrotated_keys()
        return super().scores(view)


def first_keys(model: Any, ids: Tensor, positions: Tensor) -> Tensor:
    """Return the unrotated keys of the first growing layer; those of layer 0 depend on the tokens only."""
    press = Seeing(0.5)
    with press(model), torch.no_grad():
        model(ids, position_ids=positions, use_cache=True)
    return press.seen[0]


def scaled(kind: str) -> Any:
    """Return a Llama whose rotary frequencies depend on the length; its original length is 20 tokens."""
    config = tiny.config_of("llama", rope_parameters=SCALED[kind], max_position_embeddings=20)
    torch.manual_seed(0)
    return LlamaForCausalLM(config).eval()


@pytest.mark.parametrize("kind", TURNING)
def test_keys_are_unrotated_by_the_positions_of_the_caller(kind: str) -> None:
    model, ids = tiny_model(kind), tokens(2, 24)
    expected = first_keys(model, ids, torch.arange(24)[None])
    torch.testing.assert_close(first_keys(model, ids, torch.arange(24)[None] + 11), expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", NOT_TURNING)
def test_layers_without_rotary_embedding_are_left_as_they_are(kind: str) -> None:
    model, ids = tiny_model(kind), tokens(1, 24)
    press = Seeing(0.5)
    with press(model) as session, torch.no_grad():
        model(ids, use_cache=True)
    place = kvpress.hf.facts_of(model).growing[0].cache_index if hasattr(kvpress.hf, "facts_of") else None
    kept = kvpress.kept_positions(session.cache)
    layer = next(
        n for n, rows in enumerate(kept) if rows and place in (None, n) and hasattr(session.cache.layers[n], "store")
    )
    stored = session.cache.layers[layer].keys
    seen = torch.stack([press.seen[0][0, head][at] for head, at in enumerate(kept[layer][0])])
    torch.testing.assert_close(seen, stored[0], atol=1e-6, rtol=0)


@pytest.mark.parametrize("kind", SCALED)
@pytest.mark.parametrize("spec", ["expected_attention:0.5", "key_rerotation(knorm:0.5)", "leverage_score:0.5"])
def test_the_model_is_left_as_it_was(kind: str, spec: str) -> None:
    model, ids = scaled(kind), tokens(1, 30)
    with torch.no_grad():
        model(ids)
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        expected = model(ids).logits
        with kvpress.get_press(spec)(model):
            assert torch.equal(model(ids, use_cache=True).logits, expected)
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, before[name]), name
        assert torch.equal(model(ids).logits, expected)


@pytest.mark.parametrize("kind", SCALED)
def test_frequencies_of_another_length(kind: str) -> None:
    """A prompt longer than the original length of the model gets the same unrotated keys."""
    model, ids = scaled(kind), tokens(1, 30)
    projected = {}
    attention = model.model.layers[0].self_attn
    handle = attention.k_proj.register_forward_hook(lambda module, args, out: projected.update(keys=out))
    keys = first_keys(model, ids, torch.arange(30)[None])
    handle.remove()
    expected = projected["keys"].unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
    torch.testing.assert_close(keys, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("spec", ["key_rerotation(knorm:0.5)", "streaming_llm:0.5,n_sink=2,reindex=true"])
def test_gaps_are_closed_at_the_positions_of_the_caller(spec: str) -> None:
    """Rotary attention depends on distances only, so that a shift of all positions changes nothing."""
    model, ids, more = tiny_model("llama"), tokens(2, 24), tokens(2, 1, seed=3)
    logits = []
    for start in (0, 13):
        with kvpress.get_press(spec)(model), torch.no_grad():
            read = model(ids, position_ids=torch.arange(24)[None] + start, use_cache=True).past_key_values
            at = torch.tensor([[24 + start]])
            logits.append(model(more, position_ids=at, past_key_values=read).logits)
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-3)


def test_expected_attention_looks_ahead_from_the_position_of_the_caller() -> None:
    model, ids = tiny_model("llama"), tokens(2, 24)
    kept = []
    for start in (0, 13):
        with kvpress.get_press("expected_attention:0.5,n_future_positions=16")(model) as session, torch.no_grad():
            model(ids, position_ids=torch.arange(24)[None] + start, use_cache=True)
        kept.append(kvpress.kept_positions(session.cache))
    for first, second in zip(*kept, strict=True):
        for row, later in zip(first, second, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(row, later, strict=True))


@cache
def grids(kind: str) -> Any:
    """Return a model that counts positions in three axes (M-RoPE): time, height and width of images."""
    config = tiny.config_of(kind)
    text = config.get_text_config()
    text.rope_parameters = {**text.rope_parameters, "mrope_section": [2, 3, 3]}
    torch.manual_seed(0)
    return AutoModelForImageTextToText.from_config(config).eval()


IMAGE = torch.stack([torch.full((16,), 4), 4 + torch.arange(16) // 4, 4 + torch.arange(16) % 4])
TEXT = torch.arange(4).expand(3, -1)
AXES = torch.cat([TEXT, IMAGE, TEXT + 8], dim=1)[:, None].expand(3, 2, -1)
"""Positions `[3, 2, 24]` of 4 tokens of text, an image of 4 x 4 tokens and 4 more tokens of text."""


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_vl"])
def test_positions_in_three_axes(kind: str) -> None:
    """Positions in three axes differ from columns; only the positions of the call determine the rotation."""
    model, ids, more = grids(kind), tokens(2, 24), tokens(2, 1, seed=3)
    plain = torch.arange(24).expand(3, 2, -1)
    expected = first_keys(model, ids, plain)
    torch.testing.assert_close(first_keys(model, ids, AXES), expected, atol=2e-4, rtol=1e-3)
    with SeeingUnwatched(0.5)(model), torch.no_grad(), pytest.raises(NotImplementedError, match="position_ids"):
        model(ids, position_ids=AXES, use_cache=True)
    for spec in ("key_rerotation(snapkv:0.5,window_size=4)", "expected_attention:0.5,n_future_positions=16"):
        logits = []
        for positions in (AXES, AXES + 13, torch.cat([plain[:1], AXES])):  # the first of four axes counts tokens
            with kvpress.get_press(spec)(model), torch.no_grad():
                read = model(ids, position_ids=positions, use_cache=True).past_key_values
                at = positions[-3:, :, -1:] + 1
                logits.append(model(more, position_ids=at, past_key_values=read).logits)
        for shifted in logits[1:]:
            torch.testing.assert_close(shifted, logits[0], atol=1e-4, rtol=1e-3)


def test_unknown_rotations_are_refused() -> None:
    model, ids = tiny_model("llama"), tokens(1, 24)
    shifted = torch.arange(24)[None] + 13
    with SeeingUnwatched(0.5)(model), torch.no_grad(), pytest.raises(NotImplementedError, match="position_ids"):
        model(ids, position_ids=shifted, use_cache=True)
    with torch.no_grad():
        prefix = model(ids[:, :12], position_ids=shifted[:, :12], use_cache=True).past_key_values
    with Seeing(0.5)(model), torch.no_grad(), pytest.raises(NotImplementedError, match="position_ids"):
        model(ids[:, 12:], position_ids=shifted[:, 12:], past_key_values=prefix)


def test_a_padded_row_is_turned_back_as_that_row_alone() -> None:
    model, ids = tiny_model("llama"), tokens(1, 20)
    mask = torch.ones(1, 24, dtype=torch.long)
    mask[:, :4] = 0
    padded = torch.cat([torch.zeros(1, 4, dtype=torch.long), ids], dim=1)
    press = Seeing(0.5)
    with press(model), torch.no_grad():
        model(padded, attention_mask=mask, position_ids=(mask.cumsum(1) - 1).clamp_min(0), use_cache=True)
    torch.testing.assert_close(press.seen[0], first_keys(model, ids, torch.arange(20)[None]), atol=1e-5, rtol=1e-4)


def test_padding_of_a_later_turn_may_have_any_position() -> None:
    """`generate` gives the padding between two turns position 0."""
    model, press = tiny_model("llama"), kvpress.get_press("key_rerotation(snapkv:0.5,window_size=4)")
    turns = [padded_batch(lengths) for lengths in ([30, 21], [3, 8])]

    def answer(rows: slice) -> Tensor:
        ids, mask = (torch.cat([turn[which][rows] for turn in turns], dim=1) for which in (0, 1))
        if len(ids) == 1:
            ids, mask = ids[mask.bool()][None], mask[mask.bool()][None]
        first, cache = mask.shape[1] - int(turns[1][1][rows].sum(dim=1).max()), DynamicCache(config=model.config)
        options = {"max_new_tokens": 4, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
        with press(model), torch.no_grad():
            at = (mask[:, :first].cumsum(1) - 1).clamp_min(0)
            model(ids[:, :first], attention_mask=mask[:, :first], position_ids=at, past_key_values=cache)
            logits = model.generate(ids, attention_mask=mask, past_key_values=cache, **options).logits
        return torch.stack(logits, dim=1)

    together = answer(slice(0, 2))
    for row in range(2):
        torch.testing.assert_close(together[row], answer(slice(row, row + 1))[0], atol=1e-4, rtol=1e-4)


def test_tokens_that_were_read_without_the_press_leave_no_gap() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("decoding(key_rerotation(knorm)):compression_interval=3,target_size=12")
    keys = []
    for between in (kvpress.reading(model, press), kvpress.reading(model)):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(tokens(1, 20), past_key_values=cache)
        with between:
            model(tokens(1, 2, seed=1), past_key_values=cache)
        with press(model):
            for seed in range(2, 8):
                model(tokens(1, 1, seed=seed), past_key_values=cache)
        keys.append(torch.cat([part.read(slice(None))[0] for part in cache.layers[1].store.sealed]))
    torch.testing.assert_close(*keys)
