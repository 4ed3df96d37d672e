# SPDX-License-Identifier: Apache-2.0
"""Ways of generation that cannot work on a compressed cache, and beams, which can."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from tests.bad_input.refusals import forward, generate, refused
from tests.models import padded_batch, tiny_model, tokens


def test_36_attention_weights_that_cannot_be_had() -> None:
    eager, sdpa, ids = tiny_model("llama", "eager"), tiny_model("llama"), tokens(1, 10)
    padded, mask = padded_batch([10, 7])
    for spec, model, reason in (
        ("knorm:0.5", sdpa, "set_attn_implementation('eager')"),
        ("knorm:0.5 + kivi:bits=4", eager, "of the prompt alone"),
        ("adakv(knorm:0.5)", eager, "heads keep different numbers"),
        ("quest:budget=8,page_size=4", eager, "a selector reads a part"),
        ("bounded(knorm:0.5):chunk=4", eager, "in chunks"),
        ("tri_shape", eager, "a pattern reads a part"),
    ):
        words = ["output_attentions=True", reason]
        run = lambda m=model, s=spec: generate(m, s, ids, output_attentions=True)  # noqa: E731
        refused(model, run, ValueError, *words)
    run = lambda: generate(eager, "knorm:0.5", padded, attention_mask=mask, output_attentions=True)  # noqa: E731
    refused(eager, run, ValueError, "rows are padded")
    run = lambda: forward(sdpa, "knorm:0.5", ids, output_attentions=True)  # noqa: E731
    refused(sdpa, run, ValueError, "set_attn_implementation('eager')")


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"assistant_early_exit": 1}, NotImplementedError, ["assistant_early_exit", "use assistant_model="]),
        ({"generation_config": GenerationConfig(use_mtp=True)}, NotImplementedError, ["use_mtp", "inside the model"]),
        ({"assistant_model": "llama"}, TypeError, ["assistant_model must be a model", "got str"]),
    ],
)
def test_38_assisted_decoding(settings: dict[str, Any], error: type[Exception], words: list[str]) -> None:
    model = tiny_model("llama")
    refused(model, lambda: generate(model, "knorm:0.5", tokens(1, 10), **settings), error, *words)


def test_38_assisted_decoding_of_a_batch() -> None:
    model = tiny_model("llama")
    for settings in (
        {"prompt_lookup_num_tokens": 3},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)},
        {"assistant_model": tiny_model("llama", seed=1)},
    ):
        run = lambda s=settings: generate(model, "knorm:0.5", tokens(2, 10), **s)  # noqa: E731
        refused(model, run, ValueError, "one sequence at a time", "batch of 2")


def test_38_an_assistant_of_another_vocabulary() -> None:
    model, config = tiny_model("llama"), copy.deepcopy(tiny_model("llama").config)
    config.vocab_size = 50
    assistant = type(model)(config)
    run = lambda: generate(model, "knorm:0.5", tokens(1, 10), assistant_model=assistant)  # noqa: E731
    refused(model, run, ValueError, "vocabulary of 50", "97", "same tokenizer")


def test_38_assisted_decoding_with_recurrent_layers() -> None:
    model = tiny_model("qwen3_next")
    run = lambda: generate(model, "knorm:0.5", tokens(1, 10), prompt_lookup_num_tokens=3)  # noqa: E731
    refused(model, run, NotImplementedError, "recurrent layers", "sum over all tokens")


@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "adakv(snapkv:0.5,window_size=4)"])
def test_39_beams_and_sequences_equal_the_whole_batch_repeated(spec: str) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([30, 17])
    together = generate(model, spec, ids, attention_mask=mask, num_beams=4, num_return_sequences=4, max_new_tokens=8)
    assert together.result.shape == (8, 38)
    for row, length in enumerate((30, 17)):
        prompt = ids[row : row + 1, -length:]
        alone = generate(model, spec, prompt, num_beams=4, num_return_sequences=4, max_new_tokens=8)
        assert torch.equal(together.result[4 * row : 4 * row + 4, -8:], alone.result[:, -8:])
