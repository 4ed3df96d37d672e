# SPDX-License-Identifier: Apache-2.0
"""Patterns choose the tiles of their formulas; if all tiles are allowed, they are full attention."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvpress
from kvpress.cache.attention import Logits
from kvpress.calibrate import PatternSettings, calibrate
from kvpress.calibrate.minference import candidates
from kvpress.core.host import AttentionInputs
from kvpress.core.pattern import PromptTensors
from kvpress.hf.attention.attention_override import attending
from kvpress.presses.duo_attention import OutsideMass
from kvpress.sparse.lines import newest_attention, slash_scores
from kvpress.sparse.minference import A_SHAPE, BLOCKS, LINES, HeadPatterns
from kvpress.sparse.tiling import PatternPress, covering
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens

FULL = {
    "tri_shape": "tri_shape:last=4096,block=8",
    "power_attention": "power_attention:window=4096,block=8",
    "xattention": "xattention:threshold=1.0,block=8",
    "minference": "minference:vertical=4096,slash=4096,block=8",
    "flex_prefill": "flex_prefill:gamma=1.0,block=8",
    "critiprefill": "critiprefill:budget=4096,segment=16,dense=0,skip_layers=0,block=8",
    "zipvl": "zipvl:tau=1.0,block=8",
    "loopserve": "loopserve:coverage=0.9999,max_density=1.0,budget=4096,last=4096,block=8",
}
"""Settings with which a pattern reads everything."""
PATTERNS = {entry.name: entry.cases[0] for entry in kvpress.list_presses() if issubclass(entry.press, PatternPress)}
ESTIMATED = ["xattention:threshold=1.0,block=8", "minference:block=8", "flex_prefill:gamma=1.0,min_budget=8,block=8"]


ZIPCACHE = "zipcache:bits=4,low_bits=2,interval=16,residual_length=12,probe_ratio=0.3"


def prompt(new: int = 96, total: int = 96, group: int = 2, batch: int = 2) -> PromptTensors:
    """Return a random prompt with peaked heads."""
    shape = lambda heads, n: (batch, heads, n, 16)  # noqa: E731
    return PromptTensors(
        2 * torch.randn(shape(2 * group, new)), torch.randn(shape(2, total)), torch.randn(shape(2, total)), Logits(0.25)
    )


def weights(inputs: PromptTensors) -> Tensor:
    """Return the softmax of all queries over all keys, `[b, Hq, Q, T]`."""
    logits = inputs.queries @ inputs.keys.repeat_interleave(inputs.group, dim=1).transpose(2, 3) * inputs.logits.scale
    seen = torch.ones(inputs.new, inputs.total, dtype=torch.bool).tril(inputs.total - inputs.new)
    return logits.masked_fill(~seen, -torch.inf).softmax(dim=-1)


def read(press: Any, model: Any, ids: Tensor, mask: Tensor | None = None) -> Tensor:
    """Return the logits of the first generated token."""
    masks = {} if mask is None else {"attention_mask": mask, "position_ids": position_ids(mask)}
    with press(model):
        out = model.generate(
            ids, **masks, max_new_tokens=1, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    return out.logits[0]


def test_every_pattern_is_tested() -> None:
    assert set(FULL) == set(PATTERNS)


@pytest.mark.parametrize("name", FULL)
@pytest.mark.parametrize("family", ["llama", "gpt_oss", "gemma3_text"])
def test_a_pattern_of_everything_is_full_attention(name: str, family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([90, 61])
    logits, expected = (read(kvpress.get_press(spec), model, ids, mask) for spec in (FULL[name], "none"))
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_skips_tiles_and_reads_a_padded_row_as_alone(name: str) -> None:
    model, press = tiny_model("qwen3"), kvpress.get_press(PATTERNS[name])
    ids, mask = padded_batch([200, 131])
    logits = read(press, model, ids, mask)
    torch.testing.assert_close(logits[1:], read(press, model, ids[1:, 69:]), atol=1e-4, rtol=1e-4)
    assert not torch.allclose(logits, read(kvpress.NonePress(), model, ids, mask), atol=1e-3)


@pytest.mark.parametrize("name", PATTERNS)
def test_short_prompts_are_read_in_full(name: str) -> None:
    model, ids = tiny_model("llama"), tokens(2, 16)
    logits = read(kvpress.get_press(PATTERNS[name]), model, ids)
    torch.testing.assert_close(logits, read(kvpress.NonePress(), model, ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", PATTERNS)
def test_a_pattern_composes_with_eviction_codec_and_selector(name: str) -> None:
    spec = PATTERNS[name] + " + snapkv:0.5,window_size=4 + kivi:bits=4,group_size=16,residual_length=0"
    ids, mask = padded_batch([70, 50])
    selector = "" if kvpress.get_press(spec).recipe().selector else " + quest:budget=16,page_size=4,skip_layers=0"
    for composition in (spec, spec + selector):
        press = kvpress.get_press(composition)
        with press(tiny_model("llama")) as session:
            tiny_model("llama").generate(ids, attention_mask=mask, max_new_tokens=2, do_sample=False)
        assert session.cache.layers[0].store.segments
        assert [len(row[0]) for row in kvpress.kept_positions(session.cache)[0]] == [35 + 1, 25 + 1]
    assert kvpress.get_press(kvpress.to_spec(kvpress.get_press(PATTERNS[name]))) == kvpress.get_press(PATTERNS[name])


@pytest.mark.parametrize(
    "spec", ["tri_shape + xattention", "minference + h2o:0.5", "flex_prefill + observed_attention:0.5"]
)
def test_impossible_compositions_are_refused(spec: str) -> None:
    with pytest.raises(
        ValueError, match=r"one pattern for the same pairs|cannot watch a prompt that is read by a pattern"
    ):
        kvpress.get_press(spec).recipe()


@pytest.mark.parametrize("name", PATTERNS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_probes_attend_to_all_pairs_with_any_pattern(name: str, family: str) -> None:
    """The first layer has the same queries with and without a pattern, so that its salient pairs are the same."""
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    (ids, mask), turn = padded_batch([90, 61]), tokens(2, 40, seed=3)
    longer = grow(mask, 40)
    flags = []
    for spec in (f"{PATTERNS[name]} + {ZIPCACHE}", ZIPCACHE):
        with kvpress.get_press(spec)(model) as session:
            model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=DynamicCache())
            cache = session.cache
            model(turn, attention_mask=longer, position_ids=position_ids(longer, 40), past_key_values=cache)
        segments = cache.layers[full_layers(model)[0]].store.segments
        flags.append([flag for segment in segments for flag in segment.flags.read().tolist()])
    assert 0 < sum(flags[0]) < len(flags[0])
    assert flags[0] == flags[1]


def test_a_pattern_does_not_change_the_head_scores_of_duo_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([190, 131])
    means, measured = OutsideMass.means, []

    def noted(observer: OutsideMass) -> Tensor:
        measured.append(means(observer))
        return measured[-1]

    monkeypatch.setattr(OutsideMass, "means", noted)
    duo = "duo_attention:0.5,on_the_fly_scoring=true,sink_size=4,recent_size=16"
    for spec in (f"power_attention:window=8,sinks=8,block=8 + {duo}", duo):
        read(kvpress.get_press(spec), model, ids, mask)
    layers = len(measured) // 2
    torch.testing.assert_close(measured[0], measured[layers], atol=1e-6, rtol=1e-5)
    assert float(measured[0].min()) > 0


def test_static_caches_are_refused() -> None:
    model = tiny_model("llama")
    with (
        pytest.raises((ValueError, TypeError, NotImplementedError), match="fixed size"),
        kvpress.get_press("minference")(model),
    ):
        model(tokens(1, 40), past_key_values=StaticCache(config=model.config, max_cache_len=64))


@pytest.mark.parametrize(
    "bad",
    [
        "xattention:stride=7",
        "xattention:threshold=1.5",
        "critiprefill:segment=48",
        "minference:vertical=0",
        "tri_shape:block=0",
        "flex_prefill:max_density=0.0",
        "zipvl:tau=1.01",
        "zipvl:last=0",
    ],
)
def test_errors_name_bad_arguments(bad: str) -> None:
    with pytest.raises(ValueError, match=bad.split(":")[1].split("=")[0]):
        kvpress.get_press(bad)


@pytest.mark.parametrize("spec", ESTIMATED)
@pytest.mark.parametrize("density", [0.5, 0.25, 0.1])
def test_max_density_limits_every_block_of_queries(spec: str, density: float) -> None:
    press, inputs = kvpress.get_press(f"{spec},max_density={density}"), prompt(240, 240)
    tiles = press.tiles(0, inputs)
    read = torch.arange(30) <= torch.arange(30)[:, None]
    per_block = (tiles.chosen & read).sum(dim=-1) + ~tiles.chosen.diagonal(dim1=-2, dim2=-1)
    assert bool((per_block <= (density * torch.arange(1, 31)).ceil().clamp_min(1)).all())
    pairs = tiles.pairs(240, 240).float().mean() * 240 / 120.5
    assert 0.3 * density < pairs < density + 0.12


@pytest.mark.parametrize("density", [0.5, 0.25, 0.12])
def test_tiles_get_the_room_that_single_keys_leave(density: float) -> None:
    block, total = 8, 512
    press = kvpress.MInferencePress(vertical=total, slash=total, last=8, block=block, max_density=density)
    inputs = prompt(total, total)
    read = press.tiles(0, inputs).pairs(total, total)
    assert int(press.tiles(0, inputs).columns.sum(dim=-1).max()) == int(density * total / 4)
    block_of = torch.arange(total) // block
    before = (read & (block_of < block_of[:, None]))[:, :, ::block].sum(dim=-1)
    room = ((block_of[::block] + 1) * density).ceil().long() * block - block
    late = slice(total // block // 2, None)  # single keys alone can be too many for the first blocks
    assert bool((before <= room)[..., late].all())
    assert bool((before > room - block)[..., late].all())


def test_tri_shape_reads_sinks_a_window_and_everything_for_the_last_tokens() -> None:
    press = kvpress.TriShapePress(sinks=10, local=20, last=12, block=8)
    for new, total in [(97, 97), (97, 160), (8, 97), (104, 104)]:
        pairs = press.tiles(0, prompt(new, total)).pairs(new, total)
        for query in range(new):
            position, start = total - new + query, total - new + query // 8 * 8
            end = min(start + 7, total - 1)
            everything = query // 8 >= max(0, new - 12) // 8
            expected = [
                key <= position and (everything or key < 16 or start // 8 - 2 <= key // 8 <= end // 8)
                for key in range(total)
            ]
            assert pairs[:, :, query].eq(torch.tensor(expected)).all(), (new, total, query)
    block_of = torch.arange(97) // 8
    pairs = kvpress.TriShapePress(last=0, block=8, sinks=0, local=0).tiles(0, prompt(97, 97)).pairs(97, 97)
    assert torch.equal(pairs[0, 0], (block_of == block_of[:, None]).tril())


def test_lines_sum_columns_and_diagonals() -> None:
    inputs = prompt(70, 96)
    columns, diagonals = newest_attention(inputs, 10)
    newest = weights(inputs)[:, :, -10:]
    torch.testing.assert_close(columns, newest.sum(dim=2))
    distance = torch.arange(86, 96)[:, None] - torch.arange(96)
    expected = torch.stack([(newest * (distance == o)).sum(dim=(2, 3)) for o in range(96)], dim=-1)
    torch.testing.assert_close(diagonals, expected)
    scores = slash_scores(inputs, diagonals, 8)
    i, j = 3, 4
    crossed = {p - k for p in range(26 + 8 * i, 34 + 8 * i) for k in range(8 * j, 8 * j + 8)}
    expected = sum(diagonals[..., o] for o in crossed if o >= 0)
    torch.testing.assert_close(scores[:, :, i, j], expected, atol=1e-5, rtol=1e-5)


def test_minference_reads_the_best_lines() -> None:
    press, inputs = kvpress.MInferencePress(vertical=40, slash=110, last=8, block=8), prompt(240, 240)
    newest = weights(inputs)[:, :, -8:]
    columns = newest.sum(dim=2)
    columns[..., :30] = torch.inf
    distance = torch.arange(240)[:, None] - torch.arange(240)
    diagonals = torch.stack([(newest * (distance[-8:] == o)).sum(dim=(2, 3)) for o in range(240)], dim=-1)
    diagonals[..., :100] = torch.inf
    single = torch.zeros(2, 4, 240, dtype=torch.bool).scatter(-1, columns.topk(40).indices, True)
    lines = torch.zeros(2, 4, 240, dtype=torch.bool).scatter(-1, diagonals.topk(110).indices, True)
    crossed = (lines[..., distance.clamp_min(0)] & (distance >= 0)).float()
    tiles = torch.nn.functional.max_pool2d(crossed, 8).bool().repeat_interleave(8, 2).repeat_interleave(8, 3)
    expected = (tiles | single[:, :, None]) & (distance >= 0)
    assert torch.equal(press.tiles(0, inputs).pairs(240, 240), expected)


@pytest.mark.parametrize(("new", "total"), [(64, 64), (32, 104)])
def test_xattention_sums_antidiagonals(new: int, total: int) -> None:
    inputs, block, stride = prompt(new, total), 16, 4
    press = kvpress.XAttentionPress(threshold=0.7, stride=stride, block=block)
    products = inputs.queries @ inputs.keys.repeat_interleave(2, dim=1).transpose(2, 3)
    anti = ((torch.arange(new)[:, None] + torch.arange(total)) % stride == stride - 1) * products
    anti = anti.unflatten(2, (-1, stride)).unflatten(4, (-1, stride)).sum(dim=(3, 5)) * 0.25 / stride
    tile = torch.arange(total // stride)
    last_tile = (torch.arange(new // stride) * stride + stride - 1 + total - new) // stride
    scores = anti.masked_fill(tile > last_tile[:, None], -math.inf).softmax(dim=-1)
    scores = (
        torch.nn.functional.pad(scores, (0, -len(tile) % 4)).unflatten(2, (-1, 4)).unflatten(4, (-1, 4)).sum(dim=(3, 5))
    )
    read = press.tiles(0, inputs).chosen
    for row in range(2):
        for head in range(4):
            for number in range(new // block):
                first = (number * block + total - new) // block
                last = (number * block + block - 1 + total - new) // block
                ranked = scores[row, head, number].argsort(descending=True).tolist()
                mass, expected = 0.0, {0, *range(first, last + 1)}
                for key_block in ranked:
                    if mass >= 0.7 * float(scores[row, head, number].sum()):
                        break
                    expected.add(key_block)
                    mass += float(scores[row, head, number, key_block])
                chosen = read[row, head, number].nonzero().flatten().tolist()
                assert {*chosen, *range(first, last + 1)} == {key_block for key_block in expected if key_block <= last}


def test_power_attention_reaches_all_tokens_in_logarithmic_depth() -> None:
    press = kvpress.PowerAttentionPress(sinks=0, window=0, block=8)
    chosen = press.tiles(0, prompt(256, 256)).chosen[0, 0] | torch.eye(32, dtype=torch.bool)
    assert chosen[31].nonzero().flatten().tolist() == [15, 23, 27, 29, 30, 31]
    reached = torch.matrix_power(chosen.float(), 5) > 0
    assert reached[31].all()


def test_flex_prefill_covers_gamma_by_lines_or_tiles() -> None:
    inputs, position = prompt(240, 240), torch.arange(240)
    lines = kvpress.FlexPrefillPress(gamma=0.7, tau=0.0, min_budget=1, block=8).tiles(0, inputs)
    newest = weights(inputs)[:, :, -8:]
    read = lines.pairs(240, 240)[:, :, -8:]
    assert bool(((newest * read).sum(dim=(2, 3)) >= 0.7 * 8).all())
    tiles = kvpress.FlexPrefillPress(gamma=0.7, tau=1.0, min_budget=1, block=8).tiles(0, inputs).chosen
    queries, keys = (
        vectors.unflatten(2, (30, 8)).mean(dim=3)
        for vectors in (inputs.queries, inputs.keys.repeat_interleave(2, dim=1))
    )
    logits = (queries @ keys.transpose(2, 3) * 0.25).masked_fill(position[:30] > position[:30, None], -math.inf)
    scores = logits.softmax(dim=-1)
    assert bool(((scores * tiles).sum(dim=(2, 3)) >= 0.7 * 30 - 1e-3).all())
    assert float(tiles.sum()) < 0.95 * 2 * 4 * 30 * 31 / 2


def fewest(scores: Tensor, share: float) -> set[int]:
    """Return the indexes of the largest `scores [n]` whose sum reaches a share of the total."""
    indexes, total = set(), 0.0
    for index in scores.argsort(descending=True).tolist():
        if total >= share * float(scores.sum()):
            break
        indexes.add(index)
        total += float(scores[index])
    return indexes


def flex_prefill(queries: Tensor, keys: Tensor, press: kvpress.FlexPrefillPress) -> tuple[bool, set[tuple[int, int]]]:
    """Return whether a head ranks tiles, and the tiles that it reads, for its `queries [T, D]` and `keys [T, D]`."""
    block, count = press.block, len(keys) // press.block
    attention = (queries @ keys.T * 0.25).masked_fill(torch.ones(len(keys), len(keys)).triu(1).bool(), -math.inf)
    newest = attention.softmax(dim=1)[-block:]
    means = [vectors.unflatten(0, (count, block)).mean(dim=1) for vectors in (queries, keys)]
    estimates = (
        (means[0] @ means[1].T * 0.25).masked_fill(torch.ones(count, count).triu(1).bool(), -math.inf).softmax(1)
    )
    true = newest.sum(dim=0).unflatten(0, (count, block)).sum(dim=1) / block
    middle = (true + estimates[-1]) / 2
    halves = [(p * (p / middle).log()).sum() / 2 for p in (true, estimates[-1])]
    ranks_tiles = math.sqrt(float(sum(halves))) < press.tau
    if ranks_tiles:
        chosen = {divmod(index, count) for index in fewest(estimates.flatten() / count, press.gamma)}
    else:
        columns = fewest(newest.sum(dim=0), press.gamma)
        distance = torch.arange(len(keys) - block, len(keys))[:, None] - torch.arange(len(keys))
        diagonals = fewest(torch.stack([newest[distance == offset].sum() for offset in range(len(keys))]), press.gamma)
        chosen = {(i, j) for i in range(count) for j in {column // block for column in columns}}
        for offset in diagonals:
            chosen |= {((key + offset) // block, key // block) for key in range(len(keys) - offset)}
    nearest = -(-press.min_budget // block)
    chosen |= {(i, j) for i in range(count) for j in range(count) if j == 0 or j > i - nearest}
    return ranks_tiles, {(i, j) for i, j in chosen if j <= i}


@pytest.mark.parametrize("gamma", [0.27, 0.63])
def test_flex_prefill_reads_the_tiles_of_plain_code(gamma: float) -> None:
    """Heads of small queries attend evenly, so that means estimate them well; those of large queries do not."""
    inputs = prompt(160, 160)
    inputs = replace(inputs, queries=inputs.queries * torch.tensor([0.05, 4.0, 0.3, 2.0])[:, None, None])
    press = kvpress.FlexPrefillPress(gamma=gamma, tau=0.1, min_budget=16, block=8)
    tiles = press.tiles(0, inputs).chosen
    sizes: dict[bool, list[int]] = {True: [], False: []}
    for row in range(2):
        for head in range(4):
            ranks_tiles, expected = flex_prefill(inputs.queries[row, head], inputs.keys[row, head // 2], press)
            assert {(i, j) for i, j in tiles[row, head].nonzero().tolist() if j <= i} == expected, (row, head)
            sizes[ranks_tiles].append(len(expected))
    assert all(min(of_kind) < 0.9 * 20 * 21 / 2 for of_kind in sizes.values())


def test_covering_is_the_smallest_set() -> None:
    scores = torch.tensor([[5.0, 1.0, 3.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    assert covering(scores, 0.5).tolist()[0] == [True, False, False, False]
    assert covering(scores, 0.6).tolist()[0] == [True, False, True, False]
    assert covering(scores, 1.0).all()


def test_critiprefill_takes_the_best_blocks_before_a_segment_and_mixes_layers() -> None:
    press = kvpress.CritiPrefillPress(budget=24, segment=16, dense=32, skip_layers=1, block=8)
    assert press.pattern_at(0) is None
    assert press.pattern_at(1) is not None
    shared: dict[str, Any] = {}
    prompts = [replace(prompt(123, 123), shared=shared, final=final) for final in (False, False, True)]
    mixed = None
    for layer, inputs in enumerate(prompts, start=1):
        chosen = press.tiles(layer, inputs).pairs(123, 123)
        scores = torch.zeros(2, 2, 8, 16)
        for segment in range(1, 8):
            products = []
            for head in range(4):
                queries = inputs.queries[:, head, 16 * segment : 16 * segment + 16]
                middle = (queries.amax(dim=1) + queries.amin(dim=1)) / 2
                keys = inputs.keys[:, head // 2, : 16 * segment].unflatten(1, (-1, 8))
                tops, bottoms = ((middle[:, None] * k).sum(dim=-1) for k in (keys.amax(dim=2), keys.amin(dim=2)))
                products.append(torch.maximum(tops, bottoms))
            for head in range(2):
                mean = (products[2 * head] + products[2 * head + 1]) / 2
                scores[:, head, segment, : 2 * segment] = mean.softmax(dim=-1)
        mixed = scores if mixed is None else 0.75 * scores + 0.25 * mixed
        for segment in range(8):
            best = torch.zeros(2, 2, 16, dtype=torch.bool)
            best[..., : 2 * segment] = segment in (0, 1, 7)
            if segment in range(2, 7):
                ranked = mixed[:, :, segment, : 2 * segment].topk(3, dim=-1).indices
                best.scatter_(-1, ranked, True)
            best[..., 2 * segment :] = True
            columns = best.repeat_interleave(8, dim=2).repeat_interleave(2, dim=1)[..., :123]
            for query in range(16 * segment, min(16 * segment + 16, 123)):
                assert torch.equal(chosen[:, :, query], columns & (torch.arange(123) <= query)), (layer, query)
    assert not shared


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_critiprefill_removes_its_scores_after_the_last_layer(family: str) -> None:
    model, (ids, mask) = tiny_model(family), padded_batch([90, 61])
    with kvpress.get_press(PATTERNS["critiprefill"])(model) as session:
        model.generate(ids, attention_mask=mask, max_new_tokens=1, do_sample=False)
    assert not session.cache.__dict__.get("_kvpress_shared")


@pytest.mark.parametrize(("new", "total"), [(120, 120), (50, 120)])
def test_zipvl_lets_important_tokens_attend_to_each_other(new: int, total: int) -> None:
    inputs, block = prompt(new, total), 8
    press = kvpress.ZipVLPress(tau=0.6, last=5, spread=7, block=block)
    probes = [i * (new - 5) // 7 for i in range(7)] + list(range(new - 5, new))
    seen = torch.tensor([sum(total - new + probe >= key for probe in probes) for key in range(total)])
    received = weights(inputs)[:, :, probes].sum(dim=(1, 2))
    read_by = torch.zeros(2, 4, new, total, dtype=torch.bool)
    position = torch.arange(total)
    for row in range(2):
        count, carried = 0, 0.0
        for mass in received[row].sort(descending=True).values.tolist():
            if carried >= 0.6 * float(received[row].sum()):
                break
            count, carried = count + 1, carried + mass
        best = (received[row] / seen).argsort(descending=True).tolist()
        newest = list(range(total - 5, total))
        chosen = set(newest) | set([key for key in best if key not in newest][: count - 5])
        assert set(press.important(inputs)[row].nonzero().flatten().tolist()) == chosen
        assert 5 < len(chosen) < 0.6 * total
        for query in range(new):
            start, last = total - new + query // block * block, total - new + query
            end = min(start + block, total) - 1
            is_chosen = torch.tensor([key in chosen for key in range(total)])
            same_block = (position // block >= start // block) & (position // block <= end // block)
            read_by[row, :, query] = (is_chosen if last in chosen else same_block) & (position <= last)
    out, lse = press.pattern_at(0).read(inputs)
    keys, values = (tensor.repeat_interleave(2, dim=1) for tensor in (inputs.keys, inputs.values))
    logits = (inputs.queries @ keys.transpose(2, 3) * 0.25).masked_fill(~read_by, -math.inf)
    torch.testing.assert_close(out, logits.softmax(dim=-1) @ values, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse, logits.logsumexp(dim=-1), atol=1e-5, rtol=1e-5)
    wide = replace(press, wide=True)
    pairs = wide.tiles(0, inputs).pairs(new, total)
    for row, chosen in enumerate(press.important(inputs)):
        for query in range(0, new, 7):
            first, last = total - new + query // block * block, total - new + query
            same_block = (position // block >= first // block) & (
                position // block <= (min(first + block, total) - 1) // block
            )
            assert torch.equal(pairs[row, 0, query], (chosen | same_block) & (position <= last))


def test_zipvl_counts_follow_from_the_attention() -> None:
    even = replace(prompt(200, 200), queries=torch.zeros(2, 4, 200, 16))
    press = kvpress.ZipVLPress(last=1, spread=0, block=8)
    for tau in (0.25, 0.5, 0.9):
        assert replace(press, tau=tau).important(even).sum(dim=-1).tolist() == [math.ceil(200 * tau)] * 2
    keys = torch.zeros(2, 2, 200, 16)
    keys[:, :, 17] = 40
    peaked = replace(even, queries=torch.ones(2, 4, 200, 16), keys=keys)
    assert press.important(peaked).sum(dim=-1).tolist() == [1, 1]  # the newest token alone
    counts = [int(replace(press, tau=tau, last=8).important(prompt(200, 200)).sum()) for tau in (0.1, 0.5, 0.8, 0.99)]
    assert counts == sorted(set(counts))
    few = replace(press, tau=1.0, last=8, max_density=0.25).important(prompt(200, 200))
    assert few.sum(dim=-1).tolist() == [100, 100]
    wide = replace(press, tau=1.0, last=8, max_density=0.25, wide=True).important(prompt(200, 200))
    assert wide.sum(dim=-1).tolist() == [50, 50]


def test_minference_reads_an_a_shape_lines_and_blocks_by_head() -> None:
    inputs, total, block = prompt(160, 160, batch=1), 160, 8
    press = kvpress.MInferencePress(last=8, block=block)
    kinds = HeadPatterns(*torch.tensor([[A_SHAPE, LINES, BLOCKS, BLOCKS], [12, 40, 1, 1], [20, 110, 24, 60]]))
    pairs = press.tiles_of(kinds, inputs).pairs(total, total)[0]
    position = torch.arange(total)
    distance = position[:, None] - position
    # The nearest 20 distances cross the tiles whose smallest distance is below 20.
    tile = (position // block)[:, None] - position // block
    shaped = ((position < 12) | (tile <= 0) | ((tile - 1) * block + 1 < 20)) & (distance >= 0)
    assert torch.equal(pairs[0], shaped)
    alike = press.tiles_of(HeadPatterns.alike(4, LINES, 40, 110), inputs).pairs(total, total)[0]
    assert torch.equal(pairs[1], alike[1])
    means = [vectors.unflatten(2, (20, 8)).mean(dim=3) for vectors in (inputs.queries[0:1], inputs.keys)]
    for head, count in ((2, 3), (3, 8)):
        logits = means[0][0, head] @ means[1][0, head // 2].T * 0.25
        for row in range(20):
            best = logits[row, : row + 1].topk(min(count, row + 1)).indices.tolist()
            read = pairs[head, row * block + block - 1].unflatten(0, (20, 8)).all(dim=1).nonzero().flatten().tolist()
            assert set(read) == {*best, row}


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_minference_is_calibrated_to_the_attention_of_heads(family: str, tmp_path: Path) -> None:
    model, ids, path = tiny_model(family, "eager"), tokens(2, 128), tmp_path / "patterns.safetensors"
    settings = PatternSettings(density=0.5, last=16, block=8)
    calibrated = calibrate(model, ids, settings, path).tensors
    layers, heads = full_layers(model), model.config.num_attention_heads
    shares: dict[int, list[Tensor]] = {layer: [] for layer in layers}
    press = kvpress.MInferencePress(last=16, block=8, max_density=0.5)
    queries = torch.arange(64) * 2 + 1

    def measure(attention_call: AttentionInputs) -> None:
        if attention_call.layer in shares:
            read = PromptTensors(
                attention_call.queries, attention_call.keys, attention_call.values, attention_call.logits
            )
            kept = [
                press.tiles_of(HeadPatterns.alike(heads, *pattern), read).pairs(128, 128)[0, :, queries]
                for pattern in candidates(64)
            ]
            scaled = replace(read, queries=read.queries * attention_call.logits.scale / 0.25)
            mass = weights(replace(scaled, logits=Logits(0.25)))[0, :, queries]
            shares[attention_call.layer].append(
                torch.stack([(mass * pattern).sum(dim=2).mean(dim=1) for pattern in kept])
            )

    with attending(model, measure):
        for sequence in ids:
            model(sequence[None], use_cache=False)
    for layer in layers:
        mean = torch.stack(shares[layer]).mean(dim=0)
        torch.testing.assert_close(calibrated[f"{layer}.share"], mean.amax(dim=0), atol=1e-4, rtol=1e-4)
        kinds, verticals, slashes = (calibrated[f"{layer}.{name}"].tolist() for name in ("kind", "vertical", "slash"))
        for head, (kind, vertical, slash) in enumerate(zip(kinds, verticals, slashes, strict=True)):
            index = list(candidates(64)).index((int(kind), int(vertical), int(slash)))
            assert float(mean[index, head]) > float(mean[:, head].max()) - 1e-4
    spec = f"minference:last=16,block=8,max_density=0.5,calibration='{path}'"
    ids, mask = padded_batch([100, 61])
    out = read(kvpress.get_press(spec), model, ids, mask)
    torch.testing.assert_close(out[1:], read(kvpress.get_press(spec), model, ids[1:, 39:]), atol=1e-4, rtol=1e-4)
    with pytest.raises(ValueError, match="differs from this model in"), kvpress.get_press(spec)(tiny_model("qwen3")):
        pass


def test_minference_refuses_files_that_are_no_patterns(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"make it with `kvpress calibrate minference"):
        kvpress.get_press("minference:calibration='nowhere.safetensors'")
    books = Path(kvpress.reference_path()) / "kvquant.safetensors"
    with (
        pytest.raises(ValueError, match=r"is a calibration for 'kvquant', not for 'minference'"),
        kvpress.get_press(f"minference:calibration='{books}'")(tiny_model("llama")),
    ):
        pass
    with pytest.raises(ValueError, match=r"must be \[S >= 1, T >= 512\]"):
        calibrate(tiny_model("llama"), tokens(1, 200), PatternSettings(), tmp_path / "patterns.safetensors")
    with pytest.raises(ValueError, match=r"must be \[S >= 1, T >= 64\]"):
        calibrate(tiny_model("llama"), tokens(1, 63), PatternSettings(block=4), tmp_path / "patterns.safetensors")
    with pytest.raises(ValueError, match="density"):
        calibrate(tiny_model("llama"), tokens(1, 200), PatternSettings(density=0.0), tmp_path / "patterns.safetensors")
