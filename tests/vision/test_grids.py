# SPDX-License-Identifier: Apache-2.0
"""Cells of image tokens in their pictures, as presses get them, and chunks of videos counted in frames."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.observe.pictures import PictureShape, lay_out
from kvpress.observe.spans import SPANS, SpanTracker
from tests.models import tokens
from tests.vision.models import FIRST, IMAGE, LAST, VIDEO, image_batch, tiny_vlm
from tests.vision.test_reading import ROWS, read

FRAMES = 6


def tracker_of(cache: DynamicCache) -> SpanTracker:
    """Return the cells that the first layer records for its tokens."""
    tracker: SpanTracker = next(layer.store for layer in cache.layers if hasattr(layer, "store")).observers[SPANS]
    return tracker


def of_video(kind: str, rows: list[tuple[int, int]], grids: list[tuple[int, int, int]]) -> dict[str, Any]:
    """Return inputs padded on the left: rows of text, a video with a grid of tokens, and text."""
    longest, prompts = 0, []
    for number, ((before, after), (frames, height, width)) in enumerate(zip(rows, grids, strict=True)):
        text = tokens(1, before + after, number)[0] % (IMAGE - 3) + 3
        frame = torch.full((height * width,), VIDEO)
        timed = [torch.tensor([7, FIRST]), frame, torch.tensor([LAST])] if kind == "qwen3_vl" else [frame]
        prompts.append(torch.cat([text[:before], *(timed * frames), text[before:]]))
        longest = max(longest, len(prompts[-1]))
    ids = torch.stack([torch.cat([prompt.new_zeros(longest - len(prompt)), prompt]) for prompt in prompts])
    mask = torch.stack([(torch.arange(longest) >= longest - len(prompt)).long() for prompt in prompts])
    grid = torch.tensor(grids) * torch.tensor([1, 2, 2])
    patches = torch.randn(int(grid.prod(dim=1).sum()), 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(1))
    types = 2 * (ids == VIDEO).int()
    seen = {"pixel_values_videos": patches, "video_grid_thw": grid, "mm_token_type_ids": types}
    return {"input_ids": ids, "attention_mask": mask, **seen}


def cells_by_hand(ids: Tensor, grids: list[tuple[int, int, int]], token: int) -> list[list[list[int]]]:
    """Return picture, frame, row and column of every token, counted one token at a time; one picture in every row."""
    cells = []
    for row, (frames, height, width) in zip(ids.tolist(), grids, strict=True):
        places = iter([[f, r, c] for f in range(frames) for r in range(height) for c in range(width)])
        first = row.index(token)
        cells.append([[first, *next(places)] if numbers == token else [-1] * 4 for numbers in row])
        assert next(places, None) is None
    return cells


@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"])
def test_a_video_s_tokens_have_the_frame_row_and_column_of_its_grid(kind: str) -> None:
    grids = [(3, 2, 4), (2, 3, 1)]
    inputs = of_video(kind, ROWS, grids)
    cache = read(tiny_vlm(kind), "vision(knorm:0.5)", inputs)
    assert tracker_of(cache).cells.tolist() == cells_by_hand(inputs["input_ids"], grids, VIDEO)


@pytest.mark.parametrize(("kind", "side"), [("llava", 4), ("gemma3", 2), ("qwen2_vl", 2)])
def test_an_image_has_the_grid_of_the_call_or_of_the_configuration(kind: str, side: int) -> None:
    inputs = image_batch(kind, ROWS)
    cache = read(tiny_vlm(kind), "vision(knorm:0.5)", inputs)
    assert tracker_of(cache).cells.tolist() == cells_by_hand(inputs["input_ids"], [(1, side, side)] * 2, IMAGE)


def test_adjacent_images_are_two_and_grids_go_by_row_and_kind() -> None:
    ids = torch.tensor([[0, 9, 9, 9, 9, 9, 9], [5, 9, 9, 8, 8, 5, 5]])
    cells = lay_out(
        ids,
        {9: [PictureShape(1, 2, 2), PictureShape(1, 1, 2), PictureShape(1, 2, 1)], 8: [PictureShape(2, 1, 1)]},
        before=10,
    )
    assert cells[0].tolist() == [
        [-1] * 4,
        *[[11, 0, 0, 0], [11, 0, 0, 1], [11, 0, 1, 0], [11, 0, 1, 1]],
        *[[15, 0, 0, 0], [15, 0, 0, 1]],
    ]
    assert cells[1, 1:5].tolist() == [[11, 0, 0, 0], [11, 0, 1, 0], [13, 0, 0, 0], [13, 1, 0, 0]]
    assert (cells[1, 5:] == -1).all()


@pytest.mark.parametrize(
    "grids",
    [
        [],
        [PictureShape(1, 2, 2)],
        [PictureShape(1, 2, 4), PictureShape(1, 0, 2)],
        [PictureShape(1, 1, 3), PictureShape(1, 1, 5)],
    ],
    ids=["none", "too few", "empty", "across rows"],
)
def test_grids_that_do_not_agree_with_the_tokens_are_ignored(grids: list[PictureShape]) -> None:
    assert (lay_out(torch.tensor([[9, 9, 9, 9], [9, 9, 9, 9]]), {9: grids}, 0) == -1).all()


def test_cells_follow_tokens_that_come_go_and_are_copied(tmp_path: Path) -> None:
    model, first, second = tiny_vlm("llava"), image_batch("llava", ROWS), image_batch("llava", [(1, 2), (0, 2)], seed=7)
    cache, length = DynamicCache(config=model.config), first["input_ids"].shape[1]
    with kvpress.get_press("vision(knorm:0.0)")(model), torch.no_grad():
        model(**first, past_key_values=cache)
        before = tracker_of(cache).cells.clone()
        new, mask = second.pop("input_ids"), second.pop("attention_mask")
        grown = torch.cat([first["attention_mask"], torch.ones_like(mask)], dim=1)
        model(new, attention_mask=grown, past_key_values=cache, **second)
    cells = tracker_of(cache).cells
    assert torch.equal(cells[:, :length], before)
    assert cells[0, length:, 0].tolist() == [-1, *[length + 1] * 16, -1, -1]
    assert cells[0, length + 6].tolist() == [length + 1, 0, 1, 1]
    twin = copy.deepcopy(tracker_of(cache))
    twin.crop(new.shape[1] + 4)
    assert torch.equal(twin.cells, before[:, :-4])
    twin.select_rows(torch.tensor([1, 1, 0]))
    assert torch.equal(twin.cells, before[[1, 1, 0], :-4])
    kvpress.save(cache, tmp_path / "cache", model)
    assert torch.equal(tracker_of(kvpress.load(tmp_path / "cache", model)).cells, cells)


@pytest.mark.parametrize("settings", [{}, {"num_beams": 2}, {"num_return_sequences": 2, "do_sample": True}])
def test_generate_which_reads_pictures_ahead_tells_the_same(settings: dict[str, Any]) -> None:
    model, inputs = tiny_vlm("qwen2_5_vl"), of_video("qwen2_5_vl", ROWS, [(3, 2, 4), (2, 3, 1)])
    expected = tracker_of(read(model, "vision(knorm:0.5)", inputs)).cells.repeat_interleave(2 if settings else 1, dim=0)
    settings = {**settings, "suppress_tokens": [IMAGE, VIDEO], "return_dict_in_generate": True}
    with kvpress.get_press("vision(knorm:0.5)")(model):
        cells = tracker_of(model.generate(**inputs, max_new_tokens=3, **settings).past_key_values).cells
    length = expected.shape[1]
    assert torch.equal(cells[:, :length], expected)
    assert (cells[:, length:] == -1).all()
    assert cells.shape[1] == length + 2


def chunked_by_hand(grid: tuple[int, int, int], frames: int, pool: int, dense: set[int]) -> list[int]:
    """Return the number of tokens that each remaining pair of a video stands for, where some chunks stay dense."""
    count, size = grid[0], grid[1] * grid[2]
    sizes = []
    for frame in range(count):
        dense_frame = frame // frames in dense
        sizes += [1] * size if dense_frame else [min(pool, size - at) for at in range(0, size, pool)]
    return sizes


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl"])
def test_chunks_are_whole_frames_and_windows_stay_in_one(kind: str) -> None:
    grids = [(FRAMES, 2, 4), (FRAMES - 1, 1, 5)]
    inputs = of_video(kind, ROWS, grids)
    for dense, stay in ((0.0, (set(), set())), (0.67, ({0, 2}, {0, 2}))):  # of three chunks, the first and the last
        cache = read(tiny_vlm(kind), f"video_xl2:frames=2,dense={dense},pool=3,window_size=4", inputs)
        for layer in cache.layers:
            part = layer.store.dense
            for stream in range(4):
                row, stored = stream // 2, part.layout.rows(stream)
                pads = int((1 - inputs["attention_mask"][row]).sum())
                slots = part.slots()[stored]
                video = inputs["input_ids"][row, slots] == VIDEO
                weighs = part.log_weight[stored].float().exp().round().int()
                assert weighs[video].tolist() == chunked_by_hand(grids[row], 2, 3, stay[row])
                text = (inputs["input_ids"][row] != VIDEO).sum() - pads
                assert weighs[~video].tolist() == [1] * int(text)


def test_without_a_grid_tokens_are_counted_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = tiny_vlm("llava"), image_batch("llava", ROWS)
    settings = "dense=0.5,chunk=4,pool=2,window_size=4"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = kvpress.kept_positions(read(model, f"video_xl2:{settings}", inputs))
        read(model, f"video_xl2:frames=1,{settings}", inputs)
    monkeypatch.setattr("kvpress.hf.grids.image_side", lambda config: 0)
    with pytest.warns(RuntimeWarning, match=r"frames=1 .* chunks of chunk=4 tokens") as warned:
        fallback = kvpress.kept_positions(read(model, f"video_xl2:frames=1,{settings}", inputs))
    assert len([first for first in warned if "frames" in str(first.message)]) == 1
    for layer, layer_plain in zip(fallback, plain, strict=True):
        for row, expected in zip(layer, layer_plain, strict=True):
            assert all(torch.equal(first, second) for first, second in zip(row, expected, strict=True))
