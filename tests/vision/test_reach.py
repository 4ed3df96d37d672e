# SPDX-License-Identifier: Apache-2.0
"""Chunks of a video that read all text and only a few chunks before them, against attention under the same mask."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

import kvpress
from tests.models import padded_batch, position_ids, tiny_model, tokens
from tests.vision.models import IMAGE, VIDEO, image_batch, tiny_vlm
from tests.vision.test_grids import of_video
from tests.vision.test_reading import ROWS

BLOCK = 4


def visible(labels: list[list[int]], columns: int, reach: int) -> Tensor:
    """Return the columns that a token reads, bool `[B, T, T]`, by tile, from the chunk of every token (-1: text)."""
    mask = torch.zeros(len(labels), columns, columns, dtype=torch.bool)
    for row, chunk_of in enumerate(labels):
        pads, count = columns - len(chunk_of), len(chunk_of)
        blocks = [range(at, min(count, at + BLOCK)) for at in range(0, count, BLOCK)]

        def reads_all(queries: range, keys: range, chunk_of: list[int] = chunk_of) -> bool:
            return any(
                chunk_of[q] < 0 or (chunk_of[k] >= 0 and chunk_of[q] - chunk_of[k] < reach)
                for q in queries
                for k in keys
            )

        for q in range(count):
            for k in range(q + 1):
                queries, keys = blocks[q // BLOCK], blocks[k // BLOCK]
                mask[row, pads + q, pads + k] = chunk_of[k] < 0 or queries == keys or reads_all(queries, keys)
    return mask


def plainly(model: Any, inputs: dict[str, Tensor], seen: Tensor) -> Tensor:
    """Return logits of a model whose attention is masked."""

    def attention(
        module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Any, scaling: float, **kwargs: Any
    ) -> tuple[Tensor, None]:
        groups = query.shape[1] // key.shape[1]
        key, value = (part.repeat_interleave(groups, dim=1) for part in (key, value))
        logits = (query @ key.mT * scaling).masked_fill(~seen[:, None], -math.inf)
        return (logits.softmax(dim=-1).nan_to_num(0.0) @ value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("test_reach", attention)
    AttentionMaskInterface.register("test_reach", lambda *args, attention_mask=None, **kwargs: attention_mask)
    config = model.get_decoder().config
    before = config._attn_implementation
    config._attn_implementation_internal = "test_reach"
    try:
        with torch.no_grad():
            return model(**inputs).logits
    finally:
        config._attn_implementation_internal = before


def under(spec: str, model: Any, inputs: dict[str, Tensor]) -> Tensor:
    """Return logits under a press."""
    with kvpress.get_press(spec)(model), torch.no_grad():
        return model(**inputs, past_key_values=DynamicCache(config=model.config)).logits


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3"])
@pytest.mark.parametrize("reach", [1, 2])
def test_a_chunk_reads_its_neighbours_and_text(family: str, reach: int) -> None:
    model, (ids, mask) = tiny_model(family), padded_batch([45, 33])
    inputs = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids(mask)}
    labels = [[(at - 3) // 6 if 3 <= at < 28 else -1 for at in range(length)] for length in (45, 33)]
    seen = visible(labels, 45, reach)
    limited = under(f"video_xl2:pool=1,chunk=6,reach={reach},block={BLOCK},tokens=3:28", model, inputs)
    real = mask.bool()
    torch.testing.assert_close(limited[real], plainly(model, inputs, seen)[real], atol=2e-4, rtol=1e-3)
    full = under("none", model, inputs)
    assert not torch.allclose(limited[real], full[real], atol=1e-2)
    unlimited = under(f"video_xl2:pool=1,chunk=6,reach=99,block={BLOCK},tokens=3:28", model, inputs)
    torch.testing.assert_close(unlimited[real], full[real], atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_frames_are_chunks_and_the_times_between_them_are_text(kind: str) -> None:
    model, inputs = tiny_vlm(kind), of_video(kind, ROWS, [(5, 2, 3), (4, 3, 2)])
    labels = []
    for ids, mask in zip(inputs["input_ids"], inputs["attention_mask"], strict=True):
        count, chunk_of = 0, []
        for token in ids[mask.bool()].tolist():
            chunk_of.append(count // 6 // 2 if token == VIDEO else -1)
            count += token == VIDEO
        labels.append(chunk_of)
    logits = under(f"video_xl2:dense=1.0,frames=2,reach=1,block={BLOCK}", model, inputs)
    expected = plainly(model, inputs, visible(labels, inputs["input_ids"].shape[1], 1))
    real = inputs["attention_mask"].bool()
    torch.testing.assert_close(logits[real], expected[real], atol=2e-4, rtol=1e-3)


def test_sparse_reading_and_pooling_go_together() -> None:
    model, inputs = tiny_vlm("qwen3_vl"), of_video("qwen3_vl", ROWS, [(6, 2, 4), (5, 1, 5)])
    with kvpress.get_press(f"video_xl2:frames=1,dense=0.4,pool=4,reach=2,block={BLOCK},window_size=4")(model):
        output = model.generate(**inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
    report = kvpress.memory_report(output.past_key_values)
    assert report.kept < 0.8 * report.seen


@pytest.mark.parametrize("spec", ["video_xl2:pool=1,chunk=2,reach=1,block=4", "minference"])
def test_images_that_see_both_ways_are_not_read_causally(spec: str) -> None:
    model, inputs = tiny_vlm("gemma3"), image_batch("gemma3", [(5, 12), (4, 8)])
    with pytest.raises(NotImplementedError, match="attend to later ones"):
        under(spec, model, inputs)
    text = {name: value[:, -8:] for name, value in inputs.items() if name not in ("pixel_values", "input_ids")}
    ids = tokens(2, 8) % IMAGE
    assert torch.isfinite(under("minference", model, {"input_ids": ids, **text})).all()


@pytest.mark.parametrize(("family", "implementation"), [("gemma3_text", "sdpa"), ("gpt_oss", "eager")])
def test_layers_that_see_all_reach_in_families_with_windows_and_sinks(family: str, implementation: str) -> None:
    model, (ids, mask) = tiny_model(family, implementation), padded_batch([45, 33])
    inputs, real = {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids(mask)}, mask.bool()
    narrow, wide, full = (
        under(spec, model, inputs)[real]
        for spec in (*(f"video_xl2:pool=1,chunk=6,reach={n},block={BLOCK},tokens=3:28" for n in (1, 99)), "none")
    )
    torch.testing.assert_close(wide, full, atol=2e-4, rtol=1e-3)
    assert not torch.allclose(narrow, full, atol=1e-2)
