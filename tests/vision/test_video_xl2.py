# SPDX-License-Identifier: Apache-2.0
"""Chunks of a video: those most relevant to the end of the prompt stay, the others are pooled with their weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AutoModelForCausalLM, DynamicCache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from tests.caches import generate, positions
from tests.models import COMMON, tiny_model, tokens
from tests.vision.models import image_batch, tiny_vlm
from tests.vision.test_reading import ROWS, images, read


def test_equal_pairs_that_are_pooled_are_read_as_before() -> None:
    settings = {**COMMON, "num_hidden_layers": 1, "no_rope_layers": [0]}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["smollm3"](**settings), dtype=torch.float32).eval()
    ids = torch.cat([tokens(2, 5), torch.full((2, 17), 50), tokens(2, 6, seed=1)], dim=1)
    new = tokens(2, 3, seed=2)
    runs = []
    for spec in (
        "none",
        "video_xl2:dense=0,chunk=8,pool=3,tokens=5:22",
        "video_xl2:dense=0.7,chunk=6,pool=6,tokens=5:22",
    ):
        cache = DynamicCache(config=model.config)
        with kvpress.get_press(spec)(model), torch.no_grad():
            model(ids, past_key_values=cache)
            runs.append((model(new, past_key_values=cache).logits, kvpress.memory_report(cache).kept))
    torch.testing.assert_close(runs[1][0], runs[0][0], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(runs[2][0], runs[0][0], atol=1e-5, rtol=1e-5)
    assert runs[1][1] < runs[2][1] < runs[0][1]


def attention_inputs(model: Any, ids: Tensor) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Return queries, keys and values of every layer, as the model's attention gets them."""
    calls = []

    def spy(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append((query, key, value))
        return sdpa_attention_forward(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("sdpa_spied", spy)
    before = model.config._attn_implementation
    model.config._attn_implementation_internal = "sdpa_spied"
    try:
        with torch.no_grad():
            model(ids)
    finally:
        model.config._attn_implementation_internal = before
    return calls


def pooled_plainly(
    queries: Tensor, keys: Tensor, values: Tensor, spans: list[tuple[int, int]], dense: float, chunk: int, pool: int
) -> list[tuple[int, Tensor, Tensor, float]]:
    """Return position, key, value and log-weight of every pair of a head that stays, one window at a time."""
    chunks = [list(range(at, min(at + chunk, end))) for first, end in spans for at in range(first, end, chunk)]
    windows = [[columns[at : at + pool] for at in range(0, len(columns), pool)] for columns in chunks]
    flat = [window for columns in windows for window in columns]
    weights = torch.zeros(len(flat))
    for query in queries:
        logits = [float(query @ keys[w].mean(dim=0)) / math.sqrt(len(query)) + math.log(len(w)) for w in flat]
        weights += torch.softmax(torch.tensor(logits), dim=0)
    paid = iter(weights.tolist())
    score = [sum(next(paid) for _ in columns) for columns in windows]
    score[0] = score[-1] = math.inf
    order = sorted(range(len(chunks)), key=lambda c: (score[c], c), reverse=True)
    stays = set(order[: round(dense * len(chunks))])
    pairs = [(at, keys[at], values[at], 0.0) for at in range(len(keys)) if not any(a <= at < b for a, b in spans)]
    for number, columns in enumerate(chunks):
        if number in stays:
            pairs += [(at, keys[at], values[at], 0.0) for at in columns]
        else:
            pairs += [(w[-1], keys[w].mean(dim=0), values[w].mean(dim=0), math.log(len(w))) for w in windows[number]]
    return sorted(pairs, key=lambda pair: pair[0])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize(("dense", "chunk", "pool"), [(0.0, 5, 2), (0.5, 4, 3), (0.75, 3, 3)])
def test_the_kept_pairs_equal_plain_pooling(family: str, dense: float, chunk: int, pool: int) -> None:
    model, ids, spans = tiny_model(family), tokens(2, 40), [(2, 19), (23, 31)]
    cache = DynamicCache(config=model.config)
    press = kvpress.get_press(f"video_xl2:dense={dense},chunk={chunk},pool={pool},window_size=5,tokens=2:19 23:31")
    with press(model), torch.no_grad():
        model(ids, past_key_values=cache)
    for layer, (queries, keys, values) in zip(cache.layers, attention_inputs(model, ids), strict=True):
        part, groups = layer.store.dense, queries.shape[1] // keys.shape[1]
        for stream in range(4):
            row, head = divmod(stream, 2)
            newest = queries[row, head * groups : (head + 1) * groups, -5:].flatten(0, 1)
            plain = pooled_plainly(newest, keys[row, head], values[row, head], spans, dense, chunk, pool)
            at, key, value, weight = zip(*plain, strict=True)
            stored = part.layout.rows(stream)
            assert part.slots()[stored].tolist() == list(at)
            torch.testing.assert_close(part.keys[stored], torch.stack(key), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(part.values[stored], torch.stack(value), atol=1e-5, rtol=1e-4)
            torch.testing.assert_close(part.log_weight[stored].float(), torch.tensor(weight), atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("setting", ["dense=1.0", "pool=1"])
def test_all_chunks_and_windows_of_one_change_nothing(setting: str) -> None:
    model, inputs = tiny_vlm("qwen2_5_vl"), image_batch("qwen2_5_vl", ROWS, video=True)
    plain = model.generate(
        **inputs, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
    )
    with kvpress.get_press(f"video_xl2:{setting}")(model):
        output = model.generate(
            **inputs, max_new_tokens=4, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    assert torch.equal(output.logits[0], plain.logits[0])
    assert torch.equal(output.sequences, plain.sequences)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_pairs_and_bytes_of_a_video_follow_the_formula(kind: str) -> None:
    model, inputs = tiny_vlm(kind), image_batch(kind, ROWS, video=True)
    cache = read(model, "video_xl2:dense=0.5,chunk=4,pool=3,window_size=4", inputs)
    for layer in positions(cache):
        for row, heads in enumerate(layer):
            video = images(inputs, row)
            for head in heads:  # of two chunks of four, the last stays and the other leaves two windows
                assert len(video & set(head)) == 4 + 2
                assert len(set(head) - video) == int(inputs["attention_mask"][row].sum()) - len(video)
    report = kvpress.memory_report(cache)
    text = sum(map(sum, ROWS)) + len(ROWS) * (kind == "qwen3_vl")
    assert report.kept == 4 * 2 * (text + len(ROWS) * 6)
    total = sum(layer.components["dense"] for layer in report.layers)
    assert total == report.kept * 2 * 16 * 4


def test_beside_a_codec_and_a_selector_in_generate() -> None:
    model, ids = tiny_model("llama"), tokens(2, 60)
    spec = "video_xl2:dense=0.25,chunk=8,pool=4,window_size=4,tokens=4:44 + kivi:bits=8,group_size=4,residual_length=4"
    with kvpress.get_press(f"{spec} + quest:budget=16,page_size=4,skip_layers=0")(model):
        cache = generate(model, ids).past_key_values
    report = kvpress.memory_report(cache)
    assert report.kept < 0.7 * report.seen
