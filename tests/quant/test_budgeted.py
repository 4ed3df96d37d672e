# SPDX-License-Identifier: Apache-2.0
"""A size is met, layers share it by error, and settings that the size decides are refused."""

from __future__ import annotations

import copy
import re
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.cache.report import parse_bytes
from kvpress.core.scoring import Scored
from kvpress.plan import Geometry, plan
from kvpress.quant.budgeted import QUERIES, ByError, error
from kvpress.quant.rotated import RotatedSegment
from kvpress.quant.widths import SizeLimit, widths_held
from tests.models import full_layers, grow, padded_batch, position_ids, tiny_model, tokens


@pytest.fixture(scope="module")
def reference() -> Any:
    return kvpress.load_model("reference")[0]


def assert_size_met(spec: str, smaller: float, model: Any) -> Any:
    """Compress 2048 tokens, compare the size with the factor and with the plan, and return the cache."""
    ids = torch.randint(5, 900, (1, 2048), generator=torch.Generator().manual_seed(0))
    press = kvpress.get_press(spec)
    with press(model) as session:
        model.generate(ids, max_new_tokens=1, do_sample=False)
    report = kvpress.memory_report(session.cache)
    held_bytes = report.total_bytes - sum(layer.components.get("tables", 0) for layer in report.layers)  # of a key bias
    # A layer that keeps all pairs needs no slots and log-weights, and a pair is a larger share of a small cache.
    assert 0.99 * smaller <= report.uncompressed_bytes / held_bytes <= 1.04 * smaller
    planned = plan(press, Geometry.of(model.config), 2048)
    assert planned.total_bytes == pytest.approx(held_bytes, rel=0.04)
    return session.cache


@pytest.mark.parametrize("smaller", [4, 10, 20, 50])
@pytest.mark.parametrize("spec", ["frontier", "budgeted(adakv(snapkv))", "budgeted(compactor)"])
def test_the_size_is_met(spec: str, smaller: int, reference: Any) -> None:
    """All pairs but one of each head are encoded."""
    cache = assert_size_met(f"{spec}:smaller={smaller}", smaller, reference)
    counts = [len(head) for layer in kvpress.kept_positions(cache) for head in layer[0]]
    stores = [layer.store for layer in cache.layers]
    assert all(store.window.length == 0 and set(store.sealed[0].layout.lengths) == {1} for store in stores)
    assert all(isinstance(store.sealed[1], RotatedSegment) and len(store.sealed) == 2 for store in stores)
    assert len(set(counts)) > 2  # layers compete, and heads too behind `kvzip`


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("size", ["bytes=30000", "smaller=20"])
def test_a_model_may_be_in_another_dtype_than_its_configuration(size: str, dtype: torch.dtype) -> None:
    """`Module.to` leaves the dtype of the configuration as it was."""
    model = copy.deepcopy(tiny_model("llama")).to(dtype)
    model.config.dtype = torch.float32 if dtype == torch.bfloat16 else torch.bfloat16
    with kvpress.get_press(f"frontier:{size}")(model) as session:
        model.generate(tokens(1, 300), max_new_tokens=1, do_sample=False)
    report = kvpress.memory_report(session.cache)
    limit = 30000 if size.startswith("bytes") else report.uncompressed_bytes / 20
    assert 0.9 * limit <= report.total_bytes <= 1.01 * limit
    assert Geometry.of(model).dtype == dtype


@pytest.mark.parametrize("spec", ["frontier:smaller=12", "frontier:smaller=40", "frontier:smaller=12,passes=3"])
def test_rows_are_compressed_as_alone(spec: str) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([400, 310, 333])
    press = kvpress.get_press(spec)

    def kept(ids: torch.Tensor, mask: torch.Tensor) -> list[list[list[list[int]]]]:
        with torch.no_grad(), press(model):
            output = model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True)
        positions = kvpress.kept_positions(output.past_key_values)
        return [[[list(map(int, head)) for head in row] for row in layer] for layer in positions]

    together = kept(ids, mask)
    for row in range(3):
        pad = int((mask[row] == 0).sum())
        alone = kept(ids[row : row + 1, pad:], mask[row : row + 1, pad:])
        assert [[[i - pad for i in head] for head in layer[row]] for layer in together] == [layer[0] for layer in alone]


@pytest.mark.parametrize("spec", ["frontier", "budgeted(adakv(snapkv))"])
@pytest.mark.parametrize("size", ["40KB", "100KB", "0.19MiB", "300000"])
def test_bytes_are_met(spec: str, size: str, reference: Any) -> None:
    ids = torch.randint(5, 900, (1, 1024), generator=torch.Generator().manual_seed(0))
    press = kvpress.get_press(f"{spec}:bytes={size}")
    with press(reference) as session:
        reference.generate(ids, max_new_tokens=1, do_sample=False)
    held_bytes = kvpress.memory_report(session.cache).total_bytes
    held_bytes -= sum(layer.components.get("tables", 0) for layer in kvpress.memory_report(session.cache).layers)
    # A pair of each of the 8 heads is 2% of 40 KB; layers that keep all pairs need no slots.
    assert 0.97 * parse_bytes(size) <= held_bytes <= parse_bytes(size)
    assert plan(press, Geometry.of(reference.config), 1024).total_bytes == pytest.approx(held_bytes, rel=0.04)


def test_a_factor_and_its_bytes_are_the_same_cache(reference: Any) -> None:
    """1024 tokens take 2 MiB, so 20 times smaller and a twentieth of it in bytes give the same bits, pairs and answers."""
    ids = torch.randint(5, 900, (1, 1024), generator=torch.Generator().manual_seed(1))
    segments = []
    for size in ("smaller=20", f"bytes={2**21 // 20}"):
        with kvpress.get_press(f"budgeted(adakv(snapkv)):{size}")(reference) as session:
            torch.manual_seed(0)
            reference.generate(ids, max_new_tokens=1, do_sample=False)
        segments.append([store.sealed[1] for store in (layer.store for layer in session.cache.layers)])
    for by_factor, by_bytes in zip(*segments, strict=True):
        assert by_factor.layout.lengths == by_bytes.layout.lengths
        assert by_factor.keys.bits == by_bytes.keys.bits
        assert torch.equal(by_factor.keys.codes, by_bytes.keys.codes)
        assert torch.equal(by_factor.values.codes, by_bytes.values.codes)


@pytest.mark.parametrize("size", ["bytes=1GB", "bytes=30000", "smaller=12"])
def test_a_press_that_also_evicts_generated_tokens_keeps_to_the_size(size: str) -> None:
    """Its sums of attention count among the bytes, and pairs that fit are not evicted."""
    model, ids = tiny_model("llama"), tokens(1, 97)
    caches = {}
    for spec in (f"budgeted(h2o:interval=4):{size}", "none"):
        with kvpress.get_press(spec)(model) as session:
            model.generate(ids, max_new_tokens=1, do_sample=False)
        report = kvpress.memory_report(session.cache)
        allowed = {"bytes=30000": 30_000, "smaller=12": report.uncompressed_bytes / 12}.get(size, 10**9)
        assert spec == "none" or report.total_bytes <= allowed
        with kvpress.get_press(spec)(model) as session:
            caches[spec] = model.generate(
                ids, max_new_tokens=12, do_sample=False, return_dict_in_generate=True, output_logits=True
            )
    first, second = caches.values()
    stored = [sum(layer.store.stored()) for layer in first.past_key_values.layers]
    if size == "bytes=1GB":
        assert stored == [2 * (97 + 11)] * 3
        assert all(torch.allclose(*pair, atol=1e-3) for pair in zip(first.logits, second.logits, strict=True))
    else:
        assert sum(stored) < 2 * 3 * 97


def test_windows_count_among_the_bytes() -> None:
    """Gemma 3 has sliding windows too: their bytes are subtracted from the size, and a size that they fill alone is refused."""
    model = tiny_model("gemma3_text")
    geometry = Geometry.of(model.config)
    windows = SizeLimit(geometry, bytes=1).beside(300)
    assert windows > 0
    size = windows + 12_000
    with kvpress.FrontierPress(bytes=size)(model) as session:
        model.generate(tokens(1, 300), max_new_tokens=2, do_sample=False)  # transformers cuts windows at the next token
    # A pair of each head was generated.
    held_bytes = kvpress.memory_report(session.cache).total_bytes - 4 * 2 * 32 * 4
    assert 0.98 * size <= held_bytes <= 1.01 * size
    with (
        pytest.raises(ValueError, match=rf"layers with a sliding window take {windows} bytes"),
        kvpress.FrontierPress(bytes=windows)(model),
    ):
        model.generate(tokens(1, 300), max_new_tokens=1, do_sample=False)


def test_a_factor_that_windows_keep_from_being_reached_is_warned_of_once() -> None:
    spec = "frontier:smaller=10"
    model = tiny_model("gemma3_text", sliding_window=128)
    ids, words = (
        tokens(2, 400),
        r"smaller=10 holds for the 2 of 3 layers that grow, 86% of a cache of 400 tokens.* 4\.5 times",
    )
    with warnings.catch_warnings(record=True) as caught, kvpress.get_press(spec)(model) as session:
        warnings.simplefilter("always")
        model.generate(ids, max_new_tokens=2, do_sample=False)
    (message,) = [str(warning.message) for warning in caught if "sliding window" in str(warning.message)]
    assert re.search(words, message)
    report = kvpress.memory_report(session.cache)
    assert 4.2 < report.compression_factor < 4.6
    assert report.shrinking.compression_factor > 9
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        with kvpress.get_press(spec)(tiny_model("llama")):
            tiny_model("llama").generate(ids, max_new_tokens=1, do_sample=False)


def test_bytes_that_hold_sixteen_pairs_are_the_least() -> None:
    """The error names a size; that size works, and one byte less does not."""
    model, ids = tiny_model("llama"), tokens(1, 300)
    with pytest.raises(
        ValueError, match="16 pairs of each of 6 heads stay, keys in 4 bits and values in 3,"
    ) as refused:
        plan(kvpress.FrontierPress(bytes=1), Geometry.of(model.config), 300)
    smallest = int(re.search(r"at least (\d+)", str(refused.value))[1])  # type: ignore[index]
    with kvpress.FrontierPress(bytes=smallest)(model) as session:
        model.generate(ids, max_new_tokens=1, do_sample=False)
    assert kvpress.memory_report(session.cache).total_bytes <= smallest
    with pytest.raises(ValueError, match="too small"), kvpress.FrontierPress(bytes=smallest - 2)(model) as session:
        model.generate(ids, max_new_tokens=1, do_sample=False)
    assert session.cache is None


def test_a_prompt_that_fits_stays_as_it_is() -> None:
    model, ids = tiny_model("llama"), tokens(2, 90)
    plain = model.generate(ids, max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True)
    with kvpress.FrontierPress(bytes="1MB")(model) as session:
        output = model.generate(
            ids, max_new_tokens=40, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    torch.testing.assert_close(torch.stack(output.logits), torch.stack(plain.logits), rtol=1e-4, atol=1e-4)
    report = kvpress.memory_report(session.cache)
    assert report.kept == report.seen
    planned = plan(kvpress.FrontierPress(bytes="1MB"), Geometry.of(model.config), 90)
    assert planned.total_bytes == pytest.approx(planned.uncompressed_bytes, rel=0.02)
    assert all(
        not isinstance(segment, RotatedSegment) for layer in session.cache.layers for segment in layer.store.sealed
    )


def test_rows_of_a_batch_have_bits_of_their_own() -> None:
    """Rows have widths of their own, and the same logits as each alone, 40 tokens on; the last one stays dense."""
    model, lengths, longest = tiny_model("llama"), (900, 220, 80, 40, 12), 900
    ids, mask = tokens(5, longest), torch.ones(5, longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, : longest - length] = 0
    options = {"max_new_tokens": 40, "min_new_tokens": 40, "do_sample": False}
    options |= {"output_logits": True, "return_dict_in_generate": True}
    press = kvpress.get_press("budgeted(knorm):bytes=20000")
    with press(model) as session:
        together = model.generate(ids, attention_mask=mask, **options)
    stores = [layer.store for layer in session.cache.layers]
    assert [widths_held(store.segments, 2) for store in stores] == [{0: (4, 3), 1: (4, 4), 2: (8, 4), 3: (8, 8)}] * 3
    for row, length in enumerate(lengths):
        with press(model) as row_session:
            alone = model.generate(ids[row : row + 1, longest - length :], **options)
        assert alone.sequences[0, length:].tolist() == together.sequences[row, longest:].tolist()
        torch.testing.assert_close(alone.logits[0][0], together.logits[0][row], rtol=1e-4, atol=1e-4)
        assert lengths_held(stores, row) == lengths_held([layer.store for layer in row_session.cache.layers], 0)


def lengths_held(stores: list[Any], row: int) -> list[list[int]]:
    """Pairs of every head of a row, by layer."""
    return [store.stored()[2 * row : 2 * row + 2] for store in stores]


@pytest.mark.parametrize("size", ["80KB", "115KB"])
def test_later_turns_are_cut_to_the_same_bytes(size: str) -> None:
    """All turns of 300 tokens fit, whether the first fits whole or not, besides pairs that wait for a group."""
    model, ids = tiny_model("llama"), tokens(1, 900)
    with kvpress.FrontierPress(bytes=size)(model) as session:
        cache = model(ids[:, :300], use_cache=True).past_key_values
        for end in (600, 900):
            model(ids[:, end - 300 : end], past_key_values=cache)
            assert kvpress.memory_report(session.cache).total_bytes <= parse_bytes(size)
            newest = [max(max(head) for head in layer[0]) for layer in kvpress.kept_positions(cache)]
            assert min(newest) > end - 300  # new pairs compete with old ones
    assert len({width for layer in cache.layers for width in widths_held(layer.store.segments, 2).values()}) == 1


SCORERS = (
    "frontier", "budgeted(snapkv)", "budgeted(adakv(snapkv))", "budgeted(sample(compactor))", "budgeted(chunkkv(knorm))",
    "budgeted(kvzip:layerwise=true,repeat_prompt=)", "budgeted(refit(kvzip:layerwise=true,repeat_prompt=))",
)  # fmt: skip
FORMS = [*(f"{spec}:smaller=10" for spec in SCORERS), *(f"{spec}:bytes=80KB" for spec in SCORERS[:3])]


@pytest.mark.parametrize("spec", FORMS)
def test_later_turns_keep_the_size(spec: str, reference: Any) -> None:
    """The size holds over turns of several tokens with generated ones between them, within 4%, all tiles encoded."""
    ids = torch.randint(5, 900, (1, 700), generator=torch.Generator().manual_seed(0))
    cache, seen, press = DynamicCache(config=reference.config), 0, kvpress.get_press(spec)
    for tokens_read in (512, 32, 5, *[1] * 9, 70, 32):
        with press(reference):
            reference(ids[:, seen : seen + tokens_read], past_key_values=cache)
        seen += tokens_read
        report = kvpress.memory_report(cache)
        size = report.uncompressed_bytes / press.smaller if press.bytes is None else parse_bytes(str(press.bytes))
        if tokens_read > 1:
            tables = sum(layer.components.get("tables", 0) for layer in report.layers)  # of a key bias
            # Heads that lost their dense pair take less.
            assert 0.96 * size <= report.total_bytes - tables <= size, f"{seen} tokens"
            stores = [layer.store for layer in cache.layers]
            assert all(len(store.sealed) <= 2 and not store.window.length for store in stores)


def test_every_row_of_a_batch_keeps_the_size() -> None:
    """Two rows, one padded, over two turns: each as it is alone."""
    model, (ids, mask) = tiny_model("llama"), padded_batch([300, 220])
    later = tokens(2, 40, seed=5)
    frontiers = (
        "frontier:smaller=6",
        "frontier:smaller=6,passes=3",
        "frontier:bytes=12KB",
        "frontier:bytes=12KB,passes=3",
    )
    for spec in ("budgeted(adakv(knorm)):smaller=6", *frontiers):
        press = kvpress.get_press(spec)
        with press(model) as session:
            cache = model(ids, attention_mask=mask, position_ids=position_ids(mask), use_cache=True).past_key_values
            longer = grow(mask, 40)
            model(later, attention_mask=longer, position_ids=position_ids(longer, 40), past_key_values=cache)
        stores = [layer.store for layer in session.cache.layers]
        for row, length in enumerate((300, 220)):
            with press(model) as row_session:
                cache = model(ids[row : row + 1, 300 - length :], use_cache=True).past_key_values
                model(later[row : row + 1], past_key_values=cache)
            alone = [layer.store for layer in row_session.cache.layers]
            assert lengths_held(stores, row) == lengths_held(alone, 0)


def test_beams_go_on_sharing_pairs_of_several_widths() -> None:
    """Rows of three widths, repeated as beams, then cut, joined and reordered: each is as its row without beams."""
    model, (ids, mask) = tiny_model("qwen3"), padded_batch([90, 61, 23])
    turns = [tokens(3, 37, seed=1), tokens(3, 5, seed=2)]

    def read(copies: int, chosen: list[int]) -> tuple[torch.Tensor, Any]:
        cache, seen = DynamicCache(config=model.config), mask
        with kvpress.get_press("budgeted(expected_attention):bytes=30000")(model):
            model(ids, attention_mask=seen, past_key_values=cache)
            cache.batch_repeat_interleave(copies)
            seen = grow(seen.repeat_interleave(copies, dim=0), 37)
            model(turns[0].repeat_interleave(copies, dim=0), attention_mask=seen, past_key_values=cache)
            cache.batch_select_indices(torch.tensor(chosen))
            seen, new = grow(seen[chosen], 5), turns[1].repeat_interleave(copies, dim=0)[chosen]
            return model(new, attention_mask=seen, past_key_values=cache).logits, kvpress.kept_positions(cache)

    (logits, kept), (_, alone) = read(3, [0, 0, 1, 4, 4, 5]), read(1, [0, 1, 2])
    torch.testing.assert_close(logits[[0, 0, 3, 3]], logits[[1, 2, 4, 5]], atol=1e-5, rtol=1e-5)
    for layer, alone_layer in zip(kept, alone, strict=True):
        for row, heads in enumerate(layer):
            assert all(map(torch.equal, heads, alone_layer[row // 3]))


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss", "glm4"])
def test_every_family_is_cut_to_size(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    with kvpress.FrontierPress(16)(model) as session:
        model.generate(tokens(2, 300), max_new_tokens=3, do_sample=False)
    growing = [layer.store for layer in session.cache.layers if hasattr(layer, "store")]
    num_kept = sum(sum(segment.layout.lengths) for store in growing for segment in store.segments)
    assert 0 < num_kept < 0.75 * sum(4 * 300 for _ in growing)


@pytest.mark.parametrize(("length", "kept"), [(10, 10), (40, 16)])
def test_short_prompts_keep_sixteen_pairs_a_head(length: int, kept: int) -> None:
    model = tiny_model("llama")
    with kvpress.FrontierPress(50)(model) as session:
        model.generate(tokens(1, length), max_new_tokens=1, do_sample=False)
    assert sum(sum(layer.store.stored()) for layer in session.cache.layers) == 2 * 3 * kept


def test_layers_share_by_the_root_of_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = {0: 0.01, 1: 0.09, 2: 0.04}
    monkeypatch.setattr("kvpress.quant.budgeted.error", lambda layer, count: errors[layer[0].view.layer])

    class Layer:
        length, shape, call = 1000, (1, 2, 1000), SimpleNamespace(phase="prefill")

        def __init__(self, layer: int) -> None:
            self.layer = layer

    scored = [Scored(Layer(n), None) for n in errors]  # type: ignore[arg-type]
    assert ByError(scope="cache").counts(scored, 100) == [50, 150, 100]  # never more than twice the mean, or half of it


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_the_error_is_that_of_the_attention_output(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with attention of the newest quarter of 200 tokens over all pairs and over the kept, weighted ones."""
    model, seen = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa"), []

    def attention(logit: torch.Tensor, sink: torch.Tensor | None) -> torch.Tensor:
        """Return attention weights of pairs; a sink takes its share of the sum."""
        return logit.softmax(0) if sink is None else torch.cat([logit, sink.double()[None]]).softmax(0)[:-1]

    def watched(layer: list[Scored], count: int) -> float:
        seen.append((error(layer, count), layer, count))
        ((scored,), queries) = layer, layer[0].view.newest_queries(QUERIES)
        view, mask = scored.view, scored.scorer.choose(scored, count)
        squared_error = squared_norm = 0.0
        for head in range(view.shape[1]):
            keys, values = view.keys[0, head].double(), view.values[0, head].double()
            weight, kept = scored.log_weight[0, head].double(), mask[0, head].clone()
            kept[-50:], weight[-50:] = True, 0.0
            for query_head in range(view.groups * head, view.groups * (head + 1)):
                sink = None if view.call.sinks is None else view.call.sinks[query_head]
                for i, query in enumerate(queries[0, query_head, -50:].double()):
                    visible = slice(0, view.length - 49 + i)
                    logit = keys[visible] @ query * view.call.logits.scale
                    full_output = attention(logit, sink) @ values[visible]
                    cut_logit = (logit + weight[visible]).masked_fill(~kept[visible], -torch.inf)
                    cut_output = attention(cut_logit, sink) @ values[visible]
                    squared_error, squared_norm = (
                        squared_error + float((cut_output - full_output).square().sum()),
                        squared_norm + float(full_output.square().sum()),
                    )
        assert seen[-1][0] == pytest.approx(squared_error / squared_norm, rel=1e-3)
        return seen[-1][0]

    monkeypatch.setattr("kvpress.quant.budgeted.error", watched)
    with kvpress.get_press("budgeted(sample(leverage_score)):smaller=5")(model):
        model.generate(tokens(1, 200), max_new_tokens=1, do_sample=False)
    assert len(seen) == len(full_layers(model))


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("frontier:smaller=1", "smaller must be"),
        ("frontier:smaller=abc", "smaller must be"),
        ("frontier:smaller=10,passes=4", "passes must be 1, 2 or 3, got 4"),
        ("frontier:smaller=10,gates=f.safetensors", "gates='f.safetensors' score .* set passes=1"),
        ("frontier:smaller=10,passes=3,reads=chunk", "passes=3 .* reads=chunk has no effect"),
        ("budgeted(knorm:0.5):smaller=10", "leave out the ratio"),
        ("budgeted(pyramidkv):smaller=10", "shares out the pairs"),
        ("budgeted(cake):smaller=10", "has its own rule for that"),
        ("frontier + kivi:bits=4", "codec"),
        ("frontier:smaller=10,bytes=4GB", "leave out one of them"),
        ("frontier:bytes=much", "such as 4GB, 512MiB or 300000"),
        ("frontier:bytes=-3", "such as 4GB, 512MiB or 300000"),
        ("frontier:bytes=0", "bytes must be >= 1"),
        ("frontier:bytes=2.5", "such as 4GB, 512MiB or 300000"),
        ("frontier:bytes=true", "such as 4GB, 512MiB or 300000"),
        ("budgeted(knorm:0.5):bytes=4GB", "bytes=4GB sets how many pairs stay: leave out the ratio"),
    ],
)
def test_settings_that_the_size_decides_are_refused(spec: str, words: str) -> None:
    with pytest.raises((TypeError, ValueError), match=words):
        kvpress.get_press(spec)
