# SPDX-License-Identifier: Apache-2.0
"""KVzip against the model's own attention while it reads its prompt twice."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress import KVzipPress, kernels
from kvpress.cache.streams import StreamPairs
from kvpress.hf.session.rereading import DecoderReader
from kvpress.kernels import Rows
from kvpress.presses import kvzip
from kvpress.testing.models import random_model
from kvpress.testing.oracle import decode_both
from tests import models
from tests.caches import generate, positions, prefill
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens

FAMILIES = ["llama", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text", "gpt_oss", "smollm3", "granite"]
LENGTH = 40


class Words:
    """A tokenizer of one token per character, with or without a chat template."""

    def __init__(self, chat: bool = False) -> None:
        self.chat_template = "chat" if chat else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        assert not add_special_tokens
        return [3 + ord(char) % 90 for char in text]

    def apply_chat_template(self, messages: list[dict[str, str]], **settings: Any) -> str:
        assert settings["add_generation_prompt"]
        return f"<user>{messages[0]['content']}</user><model>"


def attentions(model: Any, ids: Tensor, block: Tensor) -> list[Tensor]:
    """Attention weights of the queries of `block`, read after the prompt: `[B, Hq, m, T + m]` per full layer."""
    layers = model(torch.cat([ids, block], dim=1), output_attentions=True).attentions
    return [layers[layer][:, :, ids.shape[1] :] for layer in full_layers(model)]


def best(scores: Tensor, count: int) -> Tensor:
    """Mask of the `count` largest scores of each row of `[B, L, H, T]`."""
    flat = scores.flatten(1)
    return torch.zeros_like(flat, dtype=torch.bool).scatter_(1, flat.topk(count).indices, True).view(scores.shape)


def assert_kept(cache: Any, model: Any, mask: Tensor) -> None:
    kept_heads = kvpress.kept_positions(cache)
    for i, layer in enumerate(full_layers(model)):
        for row, heads in enumerate(
            kept_heads[layer] if len(kept_heads) == model.config.num_hidden_layers else kept_heads[i]
        ):
            for head, at in enumerate(heads):
                assert at.tolist() == mask[row, i, head].nonzero().flatten().tolist()


def same(one: Any, other: Any) -> bool:
    """Whether two caches keep the pairs of the same positions in every head."""
    pairs = zip(kvpress.kept_positions(one), kvpress.kept_positions(other), strict=True)
    heads = [zip(a, b, strict=True) for layers in pairs for a, b in zip(*layers, strict=True)]
    return all(torch.equal(a, b) for head in heads for a, b in head)


@pytest.mark.parametrize("layerwise", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_scores_are_the_largest_weights_of_a_second_reading(family: str, layerwise: bool) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    cache = prefill(model, KVzipPress(0.5, layerwise, n_sink=3, repeat_prompt=""), ids)
    weights = torch.stack(attentions(model, ids, ids), dim=1)[..., :LENGTH].amax(dim=3)
    scores = weights.unflatten(2, (2, -1)).amax(dim=3)
    scores[..., :3] = 2.0
    layers = scores.shape[1]
    if layerwise:
        mask = torch.cat([best(scores[:, i : i + 1], LENGTH) for i in range(layers)], dim=1)
    else:
        mask = best(scores, LENGTH * layers)
    assert_kept(cache, model, mask)
    assert layerwise or len({len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]}) > 1


def test_later_chunks_use_the_prompts_of_the_authors() -> None:
    prompts = []
    words = Words(False)
    words.encode = lambda text, add_special_tokens: prompts.append(text) or []
    KVzipPress(0.5, tokenizer=words).recipe().evictions[0].prepare.check()
    assert prompts[:2] == [
        "\n\nRepeat the previous context exactly.",
        "\n\nRepeat the part of the previous context exactly, starting with",
    ]


@pytest.mark.parametrize("chat", [False, True])
def test_later_chunks_compete_with_the_sinks_and_are_led_in(chat: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvzip, "LEAD", 4)
    model, ids, words = tiny_model("llama", "eager"), tokens(1, LENGTH), Words(chat)
    cache = prefill(model, KVzipPress(0.5, n_sink=3, chunk_size=16, repeat_prompt="Again.", tokenizer=words), ids)
    suffix = "</user><model>" if chat else "\n"
    scores = torch.zeros(1, 3, 2, LENGTH)
    for start in (0, 16, 32):
        text = "Again." + suffix if start == 0 else "Again, starting with"
        block = [*words.encode(text, False), *ids[0, max(0, start - 4) : start].tolist()]
        block += [] if start == 0 else words.encode(suffix, False)
        block += ids[0, start : start + 16].tolist()
        weights = torch.stack(attentions(model, ids, torch.tensor([block])), dim=1)
        seen = torch.zeros(weights.shape[-1], dtype=torch.bool)
        seen[:3] = seen[start : start + 16] = seen[LENGTH:] = True
        weights = weights * seen / (weights * seen).sum(dim=-1, keepdim=True)
        block_scores = weights[..., start : min(start + 16, LENGTH)].amax(dim=3).unflatten(2, (2, 2)).amax(dim=3)
        scores[..., start : start + 16] = block_scores
    scores[..., :3] = 2.0
    assert_kept(cache, model, best(scores, LENGTH * 3))


@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_chunk_of_a_whole_prompt_reads_that_prompt(family: str, plus: bool) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    press = KVzipPress(0.5, kvzip_plus_normalization=plus, repeat_prompt="", n_sink=3)
    expected = prefill(model, press, ids)
    assert same(expected, prefill(model, dataclasses.replace(press, reads="chunk"), ids))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "granite"])
def test_a_pass_that_reads_its_chunk_attends_to_sinks_chunk_and_itself(family: str) -> None:
    model, ids = tiny_model(family, "eager"), tokens(2, LENGTH)
    layers = len(full_layers(model))
    press = KVzipPress(0.5, n_sink=3, chunk_size=16, repeat_prompt="", reads="chunk")
    cache = prefill(model, press, ids)
    assert not same(cache, prefill(model, dataclasses.replace(press, reads="prompt"), ids))
    scores = torch.zeros(2, layers, 2, LENGTH)
    for start in (0, 16, 32):
        chunk = ids[:, start : start + 16]
        chunk = torch.cat([ids[:, max(0, start - 8) : start], chunk], dim=1)  # led in, as every later chunk
        sequence, seen = torch.cat([ids, chunk], dim=1), torch.ones(LENGTH + chunk.shape[1], dtype=torch.bool)
        seen[3:start] = seen[start + 16 : LENGTH] = False
        visible = torch.ones(len(seen), len(seen), dtype=torch.bool).tril()
        visible[LENGTH:] &= seen
        mask = torch.where(visible, 0.0, torch.finfo(torch.float32).min)[None, None].expand(2, 1, -1, -1)
        weights = model(sequence, attention_mask=mask, output_attentions=True).attentions
        largest = torch.stack(weights, dim=1)[..., LENGTH:, start : min(start + 16, LENGTH)].amax(dim=3)
        scores[..., start : start + 16] = largest.unflatten(2, (2, -1)).amax(dim=3)
    scores[..., :3] = 2.0
    assert_kept(cache, model, best(scores, LENGTH * layers))


def test_the_cost_of_reading_chunks_is_that_of_their_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also in later turns, whose earlier pairs are encoded."""
    model, read = tiny_model("llama"), []
    attend = StreamPairs.attend

    def recording(pairs: StreamPairs, *rest: Any) -> Any:
        read.append(set(pairs.where.lengths.tolist()))
        return attend(pairs, *rest)

    monkeypatch.setattr(StreamPairs, "attend", recording)
    press = "kvzip:0.5,n_sink=3,chunk_size=16,repeat_prompt=,reads=chunk + kivi:bits=8,group_size=4,residual_length=0"
    cache = DynamicCache(config=model.config)
    with kvpress.get_press(press)(model):
        for seed in (1, 2):
            model(tokens(1, 48, seed=seed), past_key_values=cache)
    layers = len(full_layers(model))
    # Three chunks of 16 tokens are read side by side; the first text is padded to the 24 tokens of the others.
    assert read == [{16 + 24, 3 + 16 + 24}] * layers + [{3 + 16 + 24}] * layers


@pytest.mark.parametrize("reads", ["prompt", "chunk"])
@pytest.mark.parametrize("plus", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt_oss", "cohere", "smollm3"])
def test_chunks_that_are_read_side_by_side_are_scored_as_if_read_alone(
    family: str, plus: bool, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With padding, learned sinks, soft caps, and in a later turn, whose earlier pairs are encoded."""
    if family in ("gemma2", "gpt_oss"):
        layers: dict[str, Any] = {"layer_types": ["full_attention"] * 3}
        model = random_model(family, "eager", 0, **{**models.FAMILIES[family], **layers})
    else:
        model = tiny_model(family, "eager")
    ids, mask = padded_batch([50, 37])
    spec = f"kvzip:0.5,n_sink=3,chunk_size=16,repeat_prompt=,kvzip_plus_normalization={str(plus).lower()},reads={reads}"
    scores: list[list[Tensor]] = []

    def recorded(call: Any, real: Any, values: list[Tensor]) -> None:
        scores[-1] += [value.clone() for value in values]
        store_worth(call, real, values)

    store_worth = kvzip.set_worth
    monkeypatch.setattr(kvzip, "set_worth", recorded)

    def run() -> None:
        scores.append([])
        cache = DynamicCache(config=model.config)
        with kvpress.get_press(f"{spec} + kivi:bits=8,group_size=4,residual_length=0")(model):
            model(ids, attention_mask=mask, past_key_values=cache)
            grown = torch.cat([mask, mask.new_ones(2, 40)], dim=1)
            model(tokens(2, 40, seed=5), attention_mask=grown, past_key_values=cache)

    parts_of, parts = DecoderReader.parts, []

    def counted(reader: DecoderReader, done: Any, length: int) -> int:
        parts.append(parts_of(reader, done, length))
        return parts[-1]

    monkeypatch.setattr(DecoderReader, "parts", counted)
    run()
    assert parts == [64, 64]
    monkeypatch.setattr(DecoderReader, "parts", lambda reader, done, length: 0)
    run()
    assert len(scores[0]) == len(scores[1]) > 0
    for side_by_side, alone in zip(*scores, strict=True):
        # Norms of outputs come from sums in another order, whose rounding is relative to the largest score.
        scale = float(alone[alone.isfinite()].max())
        torch.testing.assert_close(side_by_side, alone, atol=5e-5 * scale, rtol=0)


def test_plus_normalisation() -> None:
    model, ids = tiny_model("llama", "eager"), tokens(1, LENGTH)
    cache = prefill(model, KVzipPress(0.5, kvzip_plus_normalization=True, n_sink=0, repeat_prompt=""), ids)
    inputs: list[Tensor] = []
    hooks = [
        layer.self_attn.register_forward_pre_hook(
            lambda _, __, kw: inputs.append(kw["hidden_states"]), with_kwargs=True
        )
        for layer in model.model.layers
    ]
    weights = attentions(model, ids, ids)
    for hook in hooks:
        hook.remove()
    scores = torch.empty(1, 3, 2, LENGTH)
    for i, layer in enumerate(model.model.layers):
        values = layer.self_attn.v_proj(inputs[i][0, :LENGTH]).view(LENGTH, 2, 32)
        for head in range(4):
            reach = (values[:, head // 2] @ layer.self_attn.o_proj.weight[:, head * 32 : (head + 1) * 32].T).norm(
                dim=-1
            )
            scaled = weights[i][0, head, :, :LENGTH] / inputs[i][0, LENGTH:].norm(dim=-1)[:, None]
            head_scores = (scaled * reach).amax(dim=0)
            scores[0, i, head // 2] = (
                head_scores if head % 2 == 0 else torch.maximum(scores[0, i, head // 2], head_scores)
            )
    assert_kept(cache, model, best(scores, LENGTH * 3))


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_mask_oracle(family: str, padded: bool) -> None:
    model = tiny_model(family)
    ids, mask = padded_batch([40, 26, 13]) if padded else (tokens(2, 40), None)
    actual, expected, cache = decode_both(model, KVzipPress(0.6, repeat_prompt=""), ids, mask)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)
    report = kvpress.memory_report(cache)
    real = 40 + 26 + 13 if padded else 80
    layers = len(full_layers(model))
    assert report.kept < 0.7 * 2 * layers * (real + 6 * ids.shape[0])
    assert report.total_bytes < 0.8 * report.uncompressed_bytes


@pytest.mark.parametrize(
    "spec",
    [
        "kvzip:0.5,repeat_prompt=",
        "kvzip:0.5,layerwise=true,kvzip_plus_normalization=true",
        "kvzip:0.5,repeat_prompt=,reads=chunk",
    ],
)
def test_a_padded_row_equals_that_row_alone(spec: str) -> None:
    model, lengths = tiny_model("gpt_oss", "eager"), [40, 26, 13]
    press = kvpress.get_press(f"{spec},chunk_size=12")
    press.tokenizer = Words()
    ids, mask = padded_batch(lengths)
    with press(model):
        together = generate(model, ids, mask)
    for row, length in enumerate(lengths):
        with press(model):
            alone = generate(model, ids[row : row + 1, -length:])
        assert torch.equal(together.sequences[row, 40:], alone.sequences[0, length:])
        for batch_layer, alone_layer in zip(
            positions(together.past_key_values), positions(alone.past_key_values), strict=True
        ):
            kept = [[at - (40 - length) for at in head if at >= 40 - length] for head in batch_layer[row]]
            assert kept == alone_layer[0]


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
def test_chunked_prefill_keeps_the_same_pairs(padded: bool) -> None:
    model, press = tiny_model("qwen3"), KVzipPress(0.5, repeat_prompt="")
    ids, mask = padded_batch([40, 26]) if padded else (tokens(2, 40), None)
    outcomes = []
    for chunk in (None, 7):
        with press(model):
            output = generate(model, ids, mask, prefill_chunk_size=chunk)
        outcomes.append((output.sequences.tolist(), positions(output.past_key_values)))
    assert outcomes[0] == outcomes[1]


def test_later_turns_share_the_budget_and_keep_the_survivors() -> None:
    model, press = tiny_model("llama"), KVzipPress(0.5, repeat_prompt="")
    cache, sequence = DynamicCache(config=model.config), tokens(2, 24)
    kept: list[set[tuple[int, ...]]] = [set(), set()]
    previous_length = 0
    with press(model):
        for turn in range(3):
            sequence = torch.cat([sequence, tokens(2, 6, seed=turn)], dim=1)
            seen = sequence.shape[1]
            sequence = generate(model, sequence, past_key_values=cache, max_new_tokens=5).sequences
            for row in range(2):
                survivors = {
                    (i, h, at)
                    for i, layer in enumerate(positions(cache))
                    for h, head in enumerate(layer[row])
                    for at in head
                    if at < seen
                }
                assert len(survivors) == 3 * 2 * int(seen * 0.5)
                assert kept[row] <= survivors
                generated = {at for _, _, at in survivors if previous_length <= at < seen - 6}
                assert not turn or len(generated) > 0
                kept[row] = survivors
            previous_length = seen


@pytest.mark.parametrize("rows", [[300], [300, 180]])
def test_turns_share_a_budget_by_their_scores(rows: list[int]) -> None:
    """A budget that the first turn fills is shared with the second: both keep pairs, and sinks stay."""
    model, (ids, mask) = tiny_model("llama"), padded_batch(rows)
    later = tokens(len(rows), 200, seed=3)
    with torch.no_grad(), KVzipPress(budget=64, repeat_prompt="")(model):
        cache = model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True).past_key_values
        first = kvpress.kept_positions(cache)
        model.generate(
            torch.cat([ids, later], dim=1), attention_mask=grow(mask, 200), past_key_values=cache, max_new_tokens=3
        )
    for layer, (before, after) in enumerate(zip(first, kvpress.kept_positions(cache), strict=True)):
        for row, length in enumerate(rows):
            sinks = set(range(300 - length, 304 - length))
            for old, new in zip(before[row], after[row], strict=True):
                earlier = {int(at) for at in new if at < 300}
                assert sinks <= earlier <= set(map(int, old)), f"layer {layer}"
    kept = [int(at) for layer in kvpress.kept_positions(cache) for row in layer for head in row for at in head]
    assert 0.1 < sum(300 <= at < 500 for at in kept) / len(kept) < 0.9
    assert sum(at < 500 for at in kept) == 64 * 6 * len(rows)


def test_recorded_scores_are_counted_and_dropped_where_turns_do_not_need_them() -> None:
    model = tiny_model("llama")
    recorded = []
    for press in (KVzipPress(budget=64, repeat_prompt=""), KVzipPress(0.5, repeat_prompt="")):
        with torch.no_grad(), press(model) as session:
            model(tokens(1, 128), use_cache=True)
        report = kvpress.memory_report(session.cache)
        recorded.append(sum(layer.components.get("scores", 0) for layer in report.layers))
    assert recorded == [4 * 64 * 6, 0]


@pytest.mark.parametrize(("chunk", "repeated"), [(16, 3 * (kvzip.LEAD + 16)), (2048, LENGTH)])
def test_refit_takes_its_queries_from_the_repetition(chunk: int, repeated: int) -> None:
    """The prompt is read twice in all, and values are fitted to the queries of the repeated tokens."""
    model, ids = tiny_model("llama"), tokens(1, LENGTH)
    lengths: list[int] = []
    hook = model.model.register_forward_pre_hook(
        lambda _, __, kw: lengths.append(kw["input_ids"].shape[1]), with_kwargs=True
    )
    with (
        torch.no_grad(),
        kvpress.get_press(f"refit(kvzip:0.5,repeat_prompt=,chunk_size={chunk}):queries=repeat,ridge=1")(
            model
        ) as session,
    ):
        model(ids, use_cache=True)
    hook.remove()
    assert lengths == [LENGTH, repeated]
    other = prefill(model, kvpress.get_press("refit(kvzip:0.5,repeat_prompt=):queries=prefill,ridge=1"), ids)
    stores = [[layer.store.dense.values for layer in cache.layers] for cache in (session.cache, other)]
    assert not all(
        torch.allclose(*pair, atol=1e-4) for pair in zip(*stores, strict=True) if pair[0].shape == pair[1].shape
    )


def test_bfloat16() -> None:
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    cache = prefill(model, KVzipPress(0.5, kvzip_plus_normalization=True, repeat_prompt=""), tokens(2, LENGTH))
    assert sum(len(h) for layer in kvpress.kept_positions(cache) for h in layer[0]) == 3 * LENGTH


def test_scoring_holds_the_chunks_of_one_pass_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    rows: list[int] = []
    column_max = kernels.column_max

    def measured(q: Tensor, stored: Rows, *args: Any, **kwargs: Any) -> Tensor:
        rows.append(stored.count)
        return column_max(q, stored, *args, **kwargs)

    monkeypatch.setattr(kernels, "column_max", measured, raising=False)
    prefill(tiny_model("llama"), KVzipPress(0.5, chunk_size=256, repeat_prompt=""), tokens(1, 1500))
    assert len(rows) == 3 * 2  # 1500 tokens are six chunks, of which a pass reads four
    assert max(rows) == 2 * 4 * (4 + 256 + kvzip.LEAD + 256)


def test_the_tokenizer_beside_a_model_is_found() -> None:
    model, tokenizer = kvpress.load_model("reference")
    ids = tokenizer(" The code for tiger is 4837. A king waits here.", return_tensors="pt").input_ids
    with_tokenizer = prefill(model, KVzipPress(0.3, tokenizer=tokenizer), ids)
    without_tokenizer = prefill(model, KVzipPress(0.3), ids)
    without_prompt = prefill(model, KVzipPress(0.3, repeat_prompt=""), ids)
    assert positions(with_tokenizer) == positions(without_tokenizer) != positions(without_prompt)


def test_without_a_tokenizer_the_error_names_the_ways_out() -> None:
    model = tiny_model("llama")
    press = KVzipPress(0.5)
    with pytest.raises(ValueError, match=r"tokenizer=tokenizer.*repeat_prompt=''"), press(model):
        pass
    with KVzipPress()(model):
        model(tokens(1, 8))


def test_prompts_given_as_embeddings_are_refused() -> None:
    model = tiny_model("llama")
    embeds = model.get_input_embeddings()(tokens(1, 20))
    with KVzipPress(0.5, repeat_prompt="")(model), pytest.raises(ValueError, match="input_ids"):
        model(inputs_embeds=embeds, use_cache=True)


@pytest.mark.parametrize("length", [1, 4])
def test_a_prompt_of_sinks_is_left_whole(length: int) -> None:
    model = tiny_model("llama")
    cache = prefill(model, KVzipPress(0.5, repeat_prompt=""), tokens(2, length))
    assert all(len(head) == length for layer in positions(cache) for row in layer for head in row)


def test_configuration() -> None:
    with pytest.raises(ValueError, match=r"compression_ratio must be in \[0, 1\)"):
        KVzipPress(1.0)
    with pytest.raises(ValueError, match="n_sink must be >= 0"):
        KVzipPress(0.5, n_sink=-1)
    with pytest.raises(TypeError, match="repeat_prompt must be text"):
        KVzipPress(0.5, repeat_prompt=None)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="KVzipPress"):
        kvpress.DecodingPress(KVzipPress(0.5))  # type: ignore[arg-type]
    press = KVzipPress(0.5, tokenizer=Words())
    assert press == KVzipPress(0.5)
    assert "tokenizer" not in kvpress.to_spec(press)
    assert kvpress.get_press(kvpress.to_spec(press)) == press


def test_kept_pairs_are_encoded_by_a_codec_behind_it() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("kvzip:0.5,layerwise=true,repeat_prompt= + kivi:bits=4,group_size=4,residual_length=4")
    alone = prefill(model, kvpress.get_press("kvzip:0.5,layerwise=true,repeat_prompt="), tokens(2, LENGTH))
    cache = prefill(model, press, tokens(2, LENGTH))
    assert positions(cache) == positions(alone)
    assert all(layer.store.segments for layer in cache.layers)
