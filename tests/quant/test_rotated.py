# SPDX-License-Identifier: Apache-2.0
"""Centred vectors behind a Hadamard matrix against the formula, and the cost of a prompt's last pairs."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import kvpress
from kvpress.cache.attention import Logits, attend
from kvpress.cache.codec import Sealing
from kvpress.cache.layout import Layout
from kvpress.cache.segment import DenseSegment, Segment
from kvpress.cache.storage import tensors_in
from kvpress.cache.store import KVStore
from kvpress.hf.models import with_cache
from kvpress.hf.session.requests import Request, here
from kvpress.hf.session.session import session
from kvpress.kernels import Packed, unpack
from kvpress.kernels.cpu import build, launch
from kvpress.observe.call import AttentionLayer, LayerCall, NewTokens
from kvpress.observe.queries import QueryGram
from kvpress.quant.hadamard import hadamard
from kvpress.quant.rotated import GRAM, CentredCodec, RotatedSegment, SteppedRows
from kvpress.quant.rounding import QueryMetric
from tests.models import padded_batch, position_ids, tiny_model, tokens

CPU = torch.device("cpu")


def pairs(lengths: list[int], dim: int = 64, seed: int = 0) -> DenseSegment:
    """Pairs whose mean is far from zero and whose channels differ a lot, as those of real keys."""
    layout, generator = Layout(lengths), torch.Generator().manual_seed(seed)
    spread = torch.linspace(0.2, 5.0, dim)
    keys, values = torch.randn(2, layout.total, dim, generator=generator) * spread + 4 * spread.flip(0)
    return DenseSegment(keys, values, layout)


@pytest.mark.parametrize("dim", [1, 8, 64, 80, 96, 128, 192])
def test_the_matrix_is_orthonormal_and_its_own_inverse(dim: int) -> None:
    matrix = hadamard(dim, CPU).double()
    torch.testing.assert_close(matrix @ matrix, torch.eye(dim, dtype=torch.float64), atol=1e-6, rtol=0)
    assert torch.equal(matrix, matrix.T)
    assert matrix.abs().max() == pytest.approx((dim & -dim) ** -0.5)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dim", [64, 80])
def test_decoded_pairs_equal_the_formula(bits: int, dim: int) -> None:
    dense = pairs([37, 20], dim)
    segment = CentredCodec((bits, bits), 0).encode(dense, Sealing(2))
    assert isinstance(segment, RotatedSegment)
    matrix, top_code = hadamard(dim, CPU).double(), 2**bits - 1
    sides = (dense.keys, segment.keys), (dense.values, segment.values)
    for (side, stored), decoded in zip(sides, segment.read(slice(None)), strict=True):
        z = unpack(stored.codes, bits).double() - top_code / 2
        for n in range(2):
            rows = dense.layout.rows(n)
            centre = side[rows].double().mean(dim=0).bfloat16().double()
            y, codes, step = (side[rows].double() - centre) @ matrix, z[rows], stored.step[rows].double()[:, None]
            # The step is the least-squares step for the codes, and the codes are the nearest ones for a step close to it.
            torch.testing.assert_close(step, (y * codes).sum(1, True) / codes.square().sum(1, True), atol=0, rtol=1e-3)
            nearest = (y / step + top_code / 2).round().clamp(0, top_code) - top_code / 2
            assert (nearest != codes).double().mean() < (0.2 if bits == 8 else 0.06)
            expected = (step * codes) @ matrix + centre
            torch.testing.assert_close(decoded[rows].double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("bits", "error"), [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497)])
def test_the_error_is_about_that_of_the_best_levels(bits: int, error: float) -> None:
    """Compare with the table of Lloyd and Max for unit Gaussian channels; even steps lose less than a fifth more at 4 bits."""
    x = torch.randn(4000, 64, generator=torch.Generator().manual_seed(1))
    decoded, _ = CentredCodec((bits, bits), 0).encode(DenseSegment(x, x, Layout([4000])), Sealing(1)).read(slice(None))
    assert float((decoded - x).square().mean()) < error * (1.15 if bits == 4 else 1.05)


def test_centring_and_rotating_pay() -> None:
    dense = pairs([400])

    def loss(spec: str) -> float:
        codec = kvpress.get_press(spec).recipe().codec_at(0)
        assert codec is not None
        decoded, _ = codec.encode(dense, Sealing(1)).read(slice(None))
        return float((decoded - dense.keys).square().mean())

    assert loss("rotated:bits=2") < 0.5 * loss("turboquant:bits=2")


def test_later_pairs_share_the_centre_and_join() -> None:
    codec = CentredCodec((4, 4), 0)
    first = codec.encode(pairs([40, 0, 33]), Sealing(3))
    assert isinstance(first, RotatedSegment)
    later = codec.encode(pairs([32, 32, 32], seed=1), Sealing(3, (first,)))
    assert isinstance(later, RotatedSegment)
    assert first.key_centre is not None
    assert later.key_centre is not None
    assert torch.equal(later.key_centre[[0, 2]], first.key_centre[[0, 2]])
    assert bool(later.key_centre[1].abs().sum() > 0)  # the stream that came late has its own
    later._set_slots(torch.cat([torch.arange(50, 82)] * 3))
    assert first.joinable(later)
    joined = Segment.join([first, later])
    for n in range(3):
        parts = [part.read(part.layout.rows(n))[0] for part in (first, later)]
        assert torch.equal(joined.read(joined.layout.rows(n))[0], torch.cat(parts))


@pytest.mark.parametrize("level", [None, *(build.supported_levels() if launch.level() else ())])
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_attention_is_that_of_the_decoded_pairs(
    level: str | None, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if level is not None:
        monkeypatch.setattr(launch, "level", lambda: level)
    segment = CentredCodec((3, 2), 0).encode(pairs([90, 0, 41]), Sealing(3))
    segment.log_weight = torch.rand(segment.layout.total, generator=torch.Generator().manual_seed(4)).half()
    queries = torch.randn(3, 4, 64, generator=torch.Generator().manual_seed(5))
    logits = Logits(0.05, softcap)
    out, lse = segment.attend(queries, logits)
    listed = torch.stack([torch.arange(n, n + 7) for n in (3, 0, 92)])
    counts = torch.tensor([7, 0, 5])
    chosen, _ = segment.attend_rows(queries, logits, listed, counts)
    for n in range(3):
        rows = segment.layout.rows(n)
        if rows.start == rows.stop:
            assert bool((out[n] == 0).all())
            assert bool(lse[n].isneginf().all())
            continue
        for pick, actual in ((torch.arange(rows.start, rows.stop), out[n]), (listed[n, : int(counts[n])], chosen[n])):
            keys, values = (side[None] for side in segment.read(pick))
            expected, total = attend(
                queries[n : n + 1], keys, values, logits, None, segment.log_weight[None, pick].float()
            )
            torch.testing.assert_close(actual, expected[0], atol=2e-3 * float(values.abs().max()), rtol=0)
        keys, values = (side[None] for side in segment.read(rows))
        _, total = attend(queries[n : n + 1], keys, values, logits, None, segment.log_weight[None, rows].float())
        torch.testing.assert_close(lse[n], total[0], atol=2e-3, rtol=1e-3)


def test_a_prompt_is_encoded_to_its_last_pair_and_generated_ones_in_tiles() -> None:
    model = tiny_model("llama")
    with kvpress.RotatedPress(4, residual_length=0)(model) as session:
        model.generate(tokens(2, 45), max_new_tokens=1, do_sample=False)
        store = session.cache.layers[0].store
        assert [segment.layout.lengths for segment in store.segments] == [(45,) * 4]
        assert store.dense is None
    with kvpress.RotatedPress(4, residual_length=0)(model) as session:
        model.generate(tokens(2, 45), max_new_tokens=40, do_sample=False)
        store = session.cache.layers[0].store
        assert sum(segment.layout.lengths[0] for segment in store.segments) == 45 + 32
        assert store.window.length == 39 - 32


@pytest.mark.parametrize("family", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss", "glm4"])
def test_eight_bits_hardly_move_the_logits_of_a_padded_batch(family: str) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    ids, mask = padded_batch([40, 29])

    def last_logits() -> tuple[torch.Tensor, DynamicCache]:
        cache = DynamicCache(config=model.config)
        for stop in (39, 40):
            chunk = ids[:, cache.get_seq_length() : stop]
            at = position_ids(mask[:, :stop], chunk.shape[1])
            with torch.no_grad():
                logits = model(chunk, attention_mask=mask[:, :stop], position_ids=at, past_key_values=cache).logits
        return logits[:, -1], cache

    expected, _ = last_logits()
    with kvpress.get_press("rotated:bits=8,residual_length=0")(model):
        actual, cache = last_logits()
    report = kvpress.memory_report(cache)
    assert report.total_bytes < 0.7 * report.uncompressed_bytes
    assert not torch.equal(actual, expected)
    assert (actual - expected).norm() < 0.25 * expected.norm()


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_rows_whose_step_does_not_fit_are_refused(bits: int) -> None:
    limit = torch.finfo(torch.float16).max / max(1.0, (2**bits - 1) / 2)
    rows = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))

    def encode(side: torch.Tensor) -> SteppedRows:
        return SteppedRows.encode(side, torch.zeros(1, 64), Layout([40]), bits)

    unit = limit / float(encode(rows).step.amax())
    assert bool(encode(0.99 * unit * rows).operand().read(torch.arange(40)).isfinite().all())
    with pytest.raises(ValueError, match=f"at most {limit:.0f} with {bits} bits, but these keys or values .* use kivi"):
        encode(1.02 * unit * rows)


def skewed_queries(streams: int, dim: int = 64) -> torch.Tensor:
    """Queries `[N, M, D]` that look in a few directions much more than in others, as those of real models."""
    generator = torch.Generator().manual_seed(7)
    directions = torch.linalg.qr(torch.randn(streams, dim, dim, generator=generator))[0]
    return torch.randn(streams, 500, dim, generator=generator) * torch.linspace(0.1, 3.0, dim) ** 2 @ directions


@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("lengths", [[70, 70], [90, 0, 41]], ids=["even", "ragged"])
def test_keys_are_rounded_for_the_queries_of_their_stream(bits: int, lengths: list[int]) -> None:
    dense, queries = pairs(lengths), skewed_queries(len(lengths))
    watched = QueryGram()
    watched.gram = (queries.mT @ queries)[None]
    codec = CentredCodec((bits, bits), 0)
    plain = codec.encode(dense, Sealing(len(lengths)))
    weighed = codec.encode(dense, Sealing(len(lengths), observers={GRAM: watched}))
    assert isinstance(plain, RotatedSegment)
    assert isinstance(weighed, RotatedSegment)
    assert torch.equal(plain.values.codes, weighed.values.codes)
    for n in range(len(lengths)):
        rows = dense.layout.rows(n)
        if rows.stop == rows.start:
            continue
        before, after = (
            ((part.read(rows)[0] - dense.keys[rows]) @ queries[n].T).square().sum(dim=1) for part in (plain, weighed)
        )
        assert float(after.mean()) < 0.6 * float(before.mean())
        assert float((after <= 1.02 * before).double().mean()) > 0.95


def test_channels_are_rounded_one_after_another() -> None:
    """Codes are those of a plain loop in float64, in which every error is spread over all later channels at once."""
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(2, 90, 40, generator=generator) @ torch.randn(2, 40, 40, generator=generator)
    y, step, top_code = torch.randn(2, 50, 40, generator=generator), torch.rand(2, 50, 1, generator=generator) + 0.1, 15
    metric = QueryMetric(queries.mT @ queries)
    left, feedback, codes = y.double(), metric.feedback.double(), []
    for channel in range(40):
        now = left[:, :, channel, None]
        codes.append((now / step + top_code / 2).round().clamp(0, top_code) - top_code / 2)
        left = left - (now - codes[-1] * step) * feedback[:, None, channel]
    assert torch.equal(metric._rounded(y, step, top_code), torch.cat(codes, dim=2).float())


def test_without_preference_among_channels_rounding_to_the_nearest_code_is_best() -> None:
    dense = pairs([50])
    watched = QueryGram()
    watched.gram = torch.eye(64)[None, None]
    plain, weighed = (
        (codec.encode(dense, sealing).read(slice(None))[0] - dense.keys).square().sum(dim=1)
        for codec, sealing in (
            (CentredCodec((4, 4), 0), Sealing(1)),
            (CentredCodec((4, 4), 0), Sealing(1, observers={GRAM: watched})),
        )
    )
    assert bool((weighed <= 1.001 * plain).all())
    assert float(weighed.sum()) > 0.97 * float(plain.sum())


@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
@pytest.mark.parametrize("spec", ["rotated:bits=4,residual_length=0", "frontier:smaller=20", "frontier:smaller=40"])
def test_the_queries_are_watched_and_their_moments_dropped_with_the_prompt(
    family: str, spec: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, grams = tiny_model(family), []

    def fit(self: QueryMetric, *arguments: object) -> tuple[torch.Tensor, torch.Tensor]:
        grams.append(self.weights)
        return original(self, *arguments)

    original = QueryMetric.fit
    monkeypatch.setattr(QueryMetric, "fit", fit)
    ids, mask = padded_batch([60, 41])
    cache = DynamicCache(config=model.config)
    with kvpress.get_press(spec)(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask), past_key_values=cache)
    assert grams
    assert all(bool(gram.isfinite().all()) for gram in grams)
    assert all(GRAM not in getattr(layer, "store", cache).__dict__.get("observers", {}) for layer in cache.layers)


@pytest.mark.parametrize("spec", ["frontier:smaller=20", "refit(knorm:0.5) + rotated:bits=4,residual_length=0"])
def test_keys_of_refitted_pairs_are_encoded_once(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The refit reads decoded keys, so that keys are encoded before values are known; their codes are kept for the layer."""
    model, (ids, mask) = tiny_model("llama"), padded_batch([90, 61])
    encode, encoded = SteppedRows.encode.__func__, []

    def note(cls: type, side: torch.Tensor, *arguments: object) -> SteppedRows:
        encoded.append(side)
        return encode(cls, side, *arguments)

    def read() -> list[Segment]:
        encoded.clear()
        cache = DynamicCache(config=model.config)
        with kvpress.get_press(spec)(model):
            for turn in range(2):
                seen = mask if not turn else torch.cat([mask, torch.ones(2, 20 * turn, dtype=mask.dtype)], dim=1)
                new = ids if not turn else tokens(2, 20, seed=turn)
                model(
                    new, attention_mask=seen, position_ids=position_ids(seen)[:, -new.shape[1] :], **with_cache(cache)
                )
        return [segment for layer in cache.layers for segment in layer.store.segments]

    monkeypatch.setattr(SteppedRows, "encode", classmethod(note))
    once, calls = read(), len(encoded)
    monkeypatch.setattr(Sealing, "once", lambda self, name, tensors, encode: encode())
    twice = read()
    assert calls * 3 == len(encoded) * 2  # the refit reads keys alone, which are then left out of the second encoding
    for ours, plain in zip(once, twice, strict=True):
        assert all(map(torch.equal, tensors_in(ours), tensors_in(plain)))


def test_a_trial_is_reused_for_equal_tensors_alone() -> None:
    keys, tried = torch.ones(3), {}
    assert Sealing(1, trial=True, tried=tried).once("keys", (keys,), lambda: 1) == 1
    assert Sealing(1, tried=tried).once("keys", (torch.zeros(3),), lambda: 2) == 2
    assert Sealing(1, trial=True, tried=tried).once("keys", (keys,), lambda: 3) == 3
    assert Sealing(1, tried=tried).once("keys", (keys.clone(),), lambda: 4) == 3
    assert not tried
    assert Sealing(1, tried=tried).once("keys", (keys,), lambda: 5) == 5
    assert not tried  # what is not encoded again is not held


def test_autocast_changes_neither_moments_nor_codes() -> None:
    """Sums of 16 bits, of queries that mostly look in one direction, have no Cholesky factor."""
    queries = torch.randn(1, 2, 500, 64, generator=torch.Generator().manual_seed(0))
    queries[..., 3], queries[..., 40] = 200.0, -200.0
    keys = torch.randn(1, 1, 80, 64, generator=torch.Generator().manual_seed(1))
    encoded = []
    for autocast in (False, True):
        store, watched = KVStore(keys, keys), QueryGram()
        store.append(keys, keys)
        layer = AttentionLayer(torch.nn.Module(), 0, 1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            watched.observe(LayerCall(layer, NewTokens(0), store, {}, keys, queries=queries))
            store.observers[GRAM] = watched
            store.settle(CentredCodec((4, 4), 0), Sealing(1), turn=True)
        encoded.append(store.segments[0])
    assert all(isinstance(segment, RotatedSegment) for segment in encoded)
    for side in ("keys", "values"):
        plain, other = (getattr(segment, side) for segment in encoded)
        assert torch.equal(plain.codes, other.codes)
        assert torch.equal(plain.step, other.step)


@pytest.mark.parametrize(("bits", "skipped"), [("3", "1"), ("(4,2,4)", "()"), ("2", "()")])
def test_queries_are_watched_only_where_keys_are_rounded_for_them(bits: str, skipped: str) -> None:
    """No moments stay in a layer without a codec, which would keep those of every turn."""
    model, watching = tiny_model("llama"), []
    press = kvpress.get_press(f"rotated:bits={bits},residual_length=0,skip_layers={skipped}")
    cache = DynamicCache(config=model.config)
    observe = QueryGram.observe

    def note(self: QueryGram, call: LayerCall) -> None:
        watching.append(call.layer.index)
        observe(self, call)

    with pytest.MonkeyPatch.context() as patch, press(model):
        patch.setattr(QueryGram, "observe", note)
        for turn in range(2):
            model(tokens(1, 20, seed=turn), **with_cache(cache))
    assert set(watching) == {"3": {0, 2}, "(4,2,4)": {0, 2}, "2": set()}[bits]
    assert all(GRAM not in layer.store.observers for layer in cache.layers)


def test_queries_that_were_taken_back_do_not_count() -> None:
    """A prompt in chunks that fails, is taken back, and goes on with other tokens."""
    model, press = tiny_model("llama"), kvpress.get_press("rotated:bits=4,residual_length=0")
    first, wrong, right = tokens(1, 16), tokens(1, 16, seed=1), tokens(1, 16, seed=2)
    grams = []
    for again in (False, True):
        cache = DynamicCache(config=model.config)
        with session(press, model) as current, pytest.MonkeyPatch.context() as patch:
            request = Request(model, current, cache=cache, prompt_end=48)
            patch.setattr(here, "request", request)
            if again:
                model(wrong, **with_cache(cache))
                cache.crop(-16)
            model(first, **with_cache(cache))
            model(right, **with_cache(cache))
            grams.append([layer.store.observers[GRAM].gram for layer in cache.layers])
    for plain, taken_back in zip(*grams, strict=True):
        torch.testing.assert_close(plain, taken_back)


def test_padding_does_not_count_among_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen, original = tiny_model("llama"), [], QueryMetric.__init__

    def init(self: QueryMetric, gram: torch.Tensor) -> None:
        seen.append(gram)
        original(self, gram)

    monkeypatch.setattr(QueryMetric, "__init__", init)
    ids, mask = padded_batch([60, 41])
    with kvpress.get_press("rotated:bits=4,residual_length=0")(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask))
        model(ids[1:, -41:])
    layers = len(seen) // 2
    assert layers == model.config.num_hidden_layers
    for batch, alone in zip(seen[:layers], seen[layers:], strict=True):
        torch.testing.assert_close(batch[len(alone) :], alone, atol=1e-3, rtol=1e-3)


def test_an_operand_holds_no_tensor_of_its_own_and_is_kept_for_the_next_token() -> None:
    segment = CentredCodec((2, 4), 0).encode(pairs([40, 70]), Sealing(2))
    assert isinstance(segment, RotatedSegment)
    first = segment.as_rows()
    assert first is not None
    assert segment.as_rows() is first
    for side, stored in ((first.keys, segment.keys), (first.values, segment.values)):
        assert isinstance(side, Packed)
        assert side.zero is None
        assert side.scale.data_ptr() == stored.step.data_ptr()
        assert side.codes.data_ptr() == stored.codes.data_ptr()
