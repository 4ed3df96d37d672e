# SPDX-License-Identifier: Apache-2.0
"""Every codec stores keys with a large bias before their rotary embedding as well as the same keys without it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import DynamicCache

import kvpress
from benchmarks.key_bias import Exact, with_bias
from kvpress.cache.attention import Logits, attend
from kvpress.cache.codec import Codec, Sealing
from kvpress.cache.mixed import by_format
from kvpress.cache.rotation import Rotation
from kvpress.cache.segment import survivors
from kvpress.cache.store import KVStore
from kvpress.core.registry import entries
from kvpress.testing.oracle import decode_both
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens

ROWS, HEADS, PAIRS, DIM = 2, 2, 288, 64
KEY, BIAS, QUERY = 5.0, 50.0, 8.0
"""Lengths of keys without their bias, of the bias, and of queries."""
FITTED = {
    "aquakv": "keys are coded before their rotary embedding, by levels fitted to the model",
    "block_gtq": "pairs of channels get bits by the energies of the model, which a bias is a part of",
    "cq": "keys are coded before their rotary embedding, by books fitted to the model",
    "kvquant": "keys are coded before their rotary embedding, by levels fitted to the model",
    "leank": "channels of keys are left out, and nothing is coded",
    "think": "channels of keys are left out, and nothing is coded",
    "minicache": "layers share directions, which include the bias",
}
"""Codecs without an offset, and why."""


def registered() -> list[str]:
    """Return an example of every registered press that encodes pairs, and further settings of some."""
    specs = []
    for entry in entries():
        if entry.name in FITTED:
            continue
        recipe = kvpress.get_press(entry.example).recipe()
        if recipe.codec is not None and not recipe.offloads and recipe.codec(0).spread is not None:
            specs.append(entry.example)
    return [
        *specs,
        "rotated:bits=8",
        "saw_int4:block_size=1",
        "kivi:bits=3,rotate=true",
        "gear:bits=3,backbone=kcvt",
        "frontier:smaller=4",
    ]


@dataclass
class Embedding:
    """A rotary embedding of the leading `dim` channels, which turns halves or neighbours."""

    theta: float = 1e4
    dim: int = DIM
    neighbours: bool = False

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        frequency = self.theta ** (-torch.arange(0, self.dim, 2, dtype=torch.float64) / self.dim)
        angle = positions[..., None].double() * frequency
        angle = angle.repeat_interleave(2, dim=-1) if self.neighbours else angle.repeat(1, 1, 2)
        return angle.cos().float(), angle.sin().float()

    def rotate(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        turned, unturned = vectors[..., : self.dim], vectors[..., self.dim :]
        if self.neighbours:
            crossed = torch.stack([-turned[..., 1::2], turned[..., ::2]], dim=-1).flatten(-2)
        else:
            low, high = turned.chunk(2, dim=-1)
            crossed = torch.cat([-high, low], dim=-1)
        return torch.cat([turned * cos[:, None] + crossed * sin[:, None], unturned], dim=-1)


EMBEDDINGS = {
    "slow": Embedding(1e6),
    "fast": Embedding(100.0),
    "partial": Embedding(dim=32),
    "neighbours": Embedding(neighbours=True),
    "partial neighbours": Embedding(dim=32, neighbours=True),
}


def sealing(embedding: Embedding, mask: Tensor | None = None) -> Sealing:
    """Return the model facts that a codec reads, for a model with a rotary embedding."""
    rotation = Rotation(embedding.angles, "full", "Attention", embedding.rotate)
    return Sealing(HEADS, seen=PAIRS, mask=mask, rotation=rotation)


def encoded(codec: Codec, embedding: Embedding, bias: float, lengths: tuple[int, int] = (PAIRS, PAIRS)) -> Any:
    """Return a store of random pairs that a codec has encoded, their exact keys and queries of the newest tokens."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, ROWS, HEADS, PAIRS, DIM, generator=generator)
    shared = nn.functional.normalize(torch.randn(1, HEADS, 1, DIM, generator=generator), dim=-1)
    pads = torch.tensor([PAIRS - length for length in lengths])
    mask = None if not bool(pads.any()) else torch.arange(PAIRS) >= pads[:, None]
    cos, sin = embedding.angles((torch.arange(PAIRS) - pads[:, None]).clamp_min(0))
    keys = embedding.rotate(keys * (KEY / DIM**0.5) + bias * shared, cos, sin)
    store = KVStore(keys, values)
    store.append(keys, values)
    for name in codec.reads_side:
        store.window.side[name] = torch.rand(ROWS, HEADS, PAIRS, generator=generator)
    store.settle(codec, sealing(embedding, mask))
    queries = nn.functional.normalize(torch.randn(ROWS, HEADS, 4, DIM, generator=generator), dim=-1)
    queries = embedding.rotate(QUERY * queries, cos[:, -4:], sin[:, -4:]).flatten(0, 1)
    return store, keys.flatten(0, 1), queries


def logit_error(store: KVStore, keys: Tensor, queries: Tensor) -> float:
    """Return the root mean square error of the products of queries with encoded keys."""
    errors = []
    for segment in store.segments:
        read = segment.read(slice(0, segment.layout.total))[0]
        slots = segment.slots().long()
        for n in range(segment.layout.streams if segment.encoded else 0):
            rows = segment.layout.rows(n)
            errors.append((queries[n] @ (read[rows] - keys[n, slots[rows]]).T).flatten())
    return float(torch.cat(errors).square().mean().sqrt())


def without_residual(spec: str) -> Codec:
    """Return the codec of a press with no dense tail, so that all whole tiles are encoded."""
    codec = kvpress.get_press(spec).recipe().codec(0)  # type: ignore[misc]
    assert codec is not None
    codec.residual = 0
    return codec


@pytest.mark.parametrize("name", EMBEDDINGS)
@pytest.mark.parametrize("spec", registered())
def test_logits_are_as_good_as_without_a_bias(spec: str, name: str) -> None:
    codec, embedding = without_residual(spec), EMBEDDINGS[name]
    plain, biased = (encoded(codec, embedding, bias) for bias in (0.0, BIAS))
    assert logit_error(*biased) <= 2 * logit_error(*plain)
    assert all(segment.key_offset is None for segment in plain[0].segments), (
        "keys without a bias are stored as they come"
    )


@pytest.mark.parametrize("name", ["slow", "partial neighbours"])
@pytest.mark.parametrize(
    "spec", ["rotated:bits=3", "turboquant", "kivi:bits=3", "zipcache", "frontier:smaller=4", "fp8"]
)
def test_attention_reads_keys_with_their_offset(spec: str, name: str) -> None:
    """Read all pairs, listed pairs, and the pairs left by an eviction, with a row that has padding."""
    store, _, queries = encoded(without_residual(spec), EMBEDDINGS[name], BIAS, (PAIRS, PAIRS - 40))
    (segment,) = [candidate for candidate in store.segments if candidate.encoded]
    assert segment.key_offset is not None
    is_kept = torch.rand(segment.layout.total, generator=torch.Generator().manual_seed(2)) < 0.4
    remaining = survivors(segment, is_kept)
    for part in (segment, remaining):
        out, lse = part.attend(queries, Logits(0.1))
        for n in range(part.layout.streams):
            rows = part.layout.rows(n)
            keys, values = part.read(rows)
            expected, total = attend(queries[n : n + 1], keys[None], values[None], Logits(0.1))
            torch.testing.assert_close(out[n], expected[0], atol=5e-3, rtol=0)
            torch.testing.assert_close(lse[n], total[0], atol=5e-3, rtol=1e-4)


@pytest.mark.parametrize("spec", ["rotated:bits=3", "mxfp4", "kivi:bits=3"])
def test_a_row_is_decoded_as_alone(spec: str) -> None:
    """Cover a row without a bias beside one with a bias."""
    embedding, codec = EMBEDDINGS["fast"], without_residual(spec)
    both_biased, keys, _ = encoded(codec, embedding, BIAS)
    none_biased, plain, _ = encoded(codec, embedding, 0.0)
    mixed = torch.cat([keys[:HEADS], plain[HEADS:]]).view(ROWS, HEADS, PAIRS, DIM)
    store = KVStore(mixed, mixed)
    store.append(mixed, mixed)
    store.settle(codec, sealing(embedding))
    for uniform, row in ((both_biased, 0), (none_biased, 1)):
        (segment,), (expected_segment,) = store.segments, uniform.segments
        for n in range(row * HEADS, (row + 1) * HEADS):
            rows = segment.layout.rows(n)
            assert torch.equal(segment.read(rows)[0], expected_segment.read(rows)[0])


def biased(family: str) -> nn.Module:
    """Return a tiny model whose key projections have a bias."""
    model = copy.deepcopy(tiny_model(family))
    for layer in model.model.layers:
        bias = 30 * torch.randn(layer.self_attn.k_proj.out_features, generator=torch.Generator().manual_seed(1))
        layer.self_attn.k_proj.bias = nn.Parameter(bias)
    return model


@pytest.mark.parametrize("family", ["llama", "glm4", "cohere"])
@pytest.mark.parametrize(
    "spec", ["rotated:bits=8,residual_length=0", "saw_int4:bits=8", "knorm:0.3 + rotated:bits=8,residual_length=0"]
)
def test_models_generate_as_without_a_codec(family: str, spec: str) -> None:
    """Cover padding, generated tokens that are encoded, and both layouts of the rotary embedding."""
    model = biased(family)
    mask = torch.ones(2, 80, dtype=torch.long)
    mask[0, :9] = 0
    actual, expected, cache = decode_both(model, kvpress.get_press(spec), tokens(2, 80), mask, steps=40)
    offsets = [segment.key_offset for layer in cache.layers for segment in layer.store.segments if segment.encoded]
    assert all(offset is not None for offset in offsets), offsets
    assert (actual - expected).abs().mean() < 0.1 * expected.std()


@pytest.mark.parametrize(
    "spec", ["kivi:bits=8,residual_length=0", "saw_int4:bits=8", "knorm:0.3 + kivi:bits=8,residual_length=0"]
)
def test_padding_between_the_turns_of_a_row_changes_nothing(spec: str, tmp_path: Any) -> None:
    """The first tokens of the second row, which are encoded in its second turn, have more padding behind than tokens before."""
    model, press = biased("qwen2"), kvpress.get_press(spec)
    lengths, steps, mask = (20, 120), 40, torch.ones(2, 140, dtype=torch.long)
    mask[1, 20:135] = 0
    ids = tokens(2, 140 + steps)

    def logits(rows: slice, kept: Tensor) -> Tensor:
        seen, cache = grow(mask[rows], steps)[:, kept], DynamicCache(config=model.config)
        chosen, outputs = ids[rows, kept], []
        first = int(kept[: lengths[0]].sum())
        ends = [first, *range(chosen.shape[1] - steps, chosen.shape[1] + 1)]
        with press(model), torch.inference_mode():
            for begin, end in zip([0, *ends], ends, strict=False):
                now = seen[:, :end]
                at = position_ids(now, end - begin)
                outputs.append(
                    model(chosen[:, begin:end], attention_mask=now, position_ids=at, past_key_values=cache).logits[
                        :, -1
                    ]
                )
            kvpress.save(cache, tmp_path / "cache.safetensors", model, press)
            loaded = kvpress.load(tmp_path / "cache.safetensors", model)
            for copied in (loaded, copy.deepcopy(cache)):
                now = grow(seen, 1)
                output = model(
                    chosen[:, :1], attention_mask=now, position_ids=position_ids(now, 1), past_key_values=copied
                )
                outputs.append(output.logits[:, -1])
        return torch.stack(outputs, dim=1)

    together = logits(slice(0, 2), torch.ones(140 + steps, dtype=torch.bool))
    for row in (0, 1):
        alone = logits(slice(row, row + 1), grow(mask[row : row + 1], steps)[0].bool())
        assert (together[row] - alone[0]).norm() < 1e-3 * alone.norm()


def test_a_copy_a_file_and_beams_keep_the_offset(tmp_path: Any) -> None:
    model = biased("llama")
    press = kvpress.get_press("rotated:bits=3,residual_length=0")
    with torch.inference_mode(), press(model):
        cache = model(tokens(2, 70), use_cache=True).past_key_values
        twin = copy.deepcopy(cache)
        kvpress.save(cache, tmp_path / "cache.safetensors", model, press)
        loaded = kvpress.load(tmp_path / "cache.safetensors", model)
        twin.batch_repeat_interleave(2)
        expected = model(tokens(2, 1), past_key_values=cache).logits
        for copied, step in ((loaded, 1), (twin, 2)):
            actual = model(tokens(2, 1).repeat_interleave(step, dim=0), past_key_values=copied).logits[::step]
            torch.testing.assert_close(actual, expected, atol=1e-3, rtol=1e-3)


@pytest.fixture(scope="module")
def loud() -> Exact:
    model, tokenizer = kvpress.load_model("reference")
    return Exact.of(with_bias(model), tokenizer)


@pytest.mark.parametrize(
    "spec",
    [
        "kivi:bits=3,residual_length=0",
        "rotated:bits=3,residual_length=0",
        "kvarn:bits=3,tile_size=32,sinks=0",
        "squat:bits=3,residual_length=0",
        "turboquant:bits=3,residual_length=0",
        "saw_int4:bits=3",
        "saw_int4:bits=3,block_size=1",
        "mxfp4",
    ],
)
def test_the_reference_model_answers_as_with_its_full_cache(spec: str, loud: Exact) -> None:
    assert loud.divergence(spec) < 0.02


def test_biases_stay_with_pairs_of_several_widths() -> None:
    """In the third turn, pairs of all turns of two rows, which have different widths, are joined."""
    model, (ids, mask) = biased("qwen2"), padded_batch([86, 5])
    turns = [ids, *(tokens(2, new, seed=new) for new in (5, 5, 12, 1))]

    def logits(row: slice, padding: int = 0) -> torch.Tensor:
        cache, seen = DynamicCache(config=model.config), mask[row, padding:]
        with kvpress.get_press("budgeted(knorm):bytes=30000")(model):
            for turn, new in enumerate(turns):
                new, seen = (new[row], grow(seen, new.shape[1])) if turn else (new[row, padding:], seen)
                at = position_ids(seen)[:, -new.shape[1] :]
                output = model(new, attention_mask=seen, position_ids=at, past_key_values=cache)
        return output.logits[:, 0]

    batch, alone = logits(slice(0, 2)), [logits(slice(0, 1)), logits(slice(1, 2), padding=81)]
    for row in (0, 1):
        assert (batch[row] - alone[row][0]).norm() < 0.01 * batch[row].norm()  # some codes lie at the edge of rounding


def test_joined_widths_keep_positions_before_and_after_padding() -> None:
    """The second row has padding between its turns, which are encoded in different widths."""
    embedding, generator = EMBEDDINGS["fast"], torch.Generator().manual_seed(0)
    mask = torch.ones(ROWS, PAIRS, dtype=torch.bool)
    mask[1, 100:180] = False
    keys, values = torch.randn(2, ROWS, HEADS, PAIRS, DIM, generator=generator)
    cos, sin = embedding.angles((mask.cumsum(dim=1) - 1).clamp_min(0))
    keys = embedding.rotate(keys * (KEY / DIM**0.5) + BIAS / DIM**0.5, cos, sin)
    store = KVStore(keys, values)
    for begin, end, spec in ((0, 100, "rotated:bits=8"), (100, PAIRS, "rotated:bits=4")):
        store.append(keys[:, :, begin:end], values[:, :, begin:end])
        facts = replace(sealing(embedding, mask[:, :end]), seen=end)
        store.settle(without_residual(spec), facts, turn=True)
    joined = by_format(store.segments)
    read, apart = joined.read(slice(None))[0], [segment.read(slice(None))[0] for segment in store.segments]
    for n in range(ROWS * HEADS):
        expected = torch.cat([pairs[part.layout.rows(n)] for pairs, part in zip(apart, store.segments, strict=True)])
        torch.testing.assert_close(read[joined.layout.rows(n)], expected, atol=1e-4, rtol=0)
    assert joined.key_offset is not None
    assert len(store.segments) == 2
