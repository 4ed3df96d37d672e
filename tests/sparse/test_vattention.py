# SPDX-License-Identifier: Apache-2.0
"""vAttention: the size of the sample, its weights, its error over many draws, and draws that do not depend on the batch."""

from __future__ import annotations

import copy
import math
from statistics import NormalDist, stdev
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.attention import merge
from kvpress.sparse.vattention import Sampled, draw_keys, sample_sizes
from kvpress.testing import check_press
from tests.models import tiny_model, tokens
from tests.pairwise import every_pair
from tests.sparse.selecting import STORAGE, assert_rows_decode_as_alone, build, partials_of, prefilled, step
from tests.sparse.stored import DIM, GROUPS, LENGTHS, STREAMS, call_of, chosen_ranks, pairs_of

INNER = {
    "quest": "quest:budget={budget},page_size=4,skip_layers=0",
    "forced": "loki:budget={budget},channels=8,label_bits=16,n_sink=3,n_recent=5",
}


def press_of(budget: int = 12, **settings: Any) -> Any:
    return kvpress.VAttentionPress(kvpress.PQCachePress(budget, bits=4, n_sink=2, n_recent=2), **settings)


def queries_of(tokens: int = 1, size: float = 1.0) -> Tensor:
    return size * torch.randn(tokens * STREAMS, GROUPS, DIM, generator=torch.Generator().manual_seed(5))


def exact(call: Any, stream: int, query: Tensor) -> tuple[Tensor, Tensor]:
    """Return output `[g, D]` and log-sum-exp `[g]` of attention to all pairs of a stream, float64."""
    keys, values, weights = pairs_of(call, stream)
    logits = call.logits(query.double(), keys) + weights
    return logits.softmax(dim=1) @ values, logits.logsumexp(dim=1)


@pytest.mark.parametrize(("epsilon", "delta"), [(0.1, 0.1), (0.3, 0.05), (0.02, 0.5)])
def test_the_size_of_a_sample_follows_from_the_formula(epsilon: float, delta: float) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = 2 * torch.randn(5, 2, 20, generator=generator) + 60  # exponentials overflow without a reference
    num_base, num_remaining = torch.tensor([20, 12, 2, 7, 0]), torch.tensor([400, 90, 9, 7, 0])
    logits.masked_fill_(torch.arange(20) >= num_base[:, None, None], -torch.inf)
    lse = torch.tensor([[62.0, 68.0]]).expand(5, -1)
    sizes = sample_sizes(logits, num_base, lse, num_remaining, epsilon, delta)
    for row, (count, n) in enumerate(zip(num_base.tolist(), num_remaining.tolist(), strict=True)):
        for head in range(2):
            terms = [math.exp(s - 60) for s in logits[row, head, :count].double().tolist()]
            if count < 2:
                assert sizes[row, head] == n
                continue
            denominator = math.exp(float(lse[row, head]) - 60) + n * sum(terms) / count
            bound = NormalDist().inv_cdf(1 - delta / 2) * n * stdev(terms) / (epsilon * denominator)
            expected = min(n, max(count, math.ceil(bound**2 / (1 + bound**2 / n))))
            assert sizes[row, head] == expected


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("epsilon", [0.5, 0.1, 0.02])
def test_the_output_weighs_sampled_pairs_by_the_pairs_that_they_stand_for(
    epsilon: float, softcap: float | None
) -> None:
    call, queries = call_of(LENGTHS, softcap=softcap), queries_of()
    selector = press_of(epsilon=epsilon).recipe().selector(0)
    chosen_alone = selector.inner.choose(call, queries)
    out, lse = merge(partials_of(selector, call, queries))
    (read,) = call.read
    assert all(isinstance(pairs, Sampled) for pairs in read)
    fewer = 0
    for stream, query in enumerate(queries):
        keys, values, weights = pairs_of(call, stream)
        chosen = set(chosen_ranks(call, chosen_alone[0], stream, stream))
        sample = set(chosen_ranks(call, [pairs.sample for pairs in read], stream, stream))
        assert not chosen & sample
        assert sorted(chosen | sample) == chosen_ranks(call, read, stream, stream)
        ratio = (len(keys) - len(chosen)) / len(sample)
        fewer += ratio > 1
        logits = call.logits(query.double(), keys) + weights
        terms = torch.zeros_like(logits)
        for ranks, factor in ((chosen, 1.0), (sample, ratio)):
            terms[:, list(ranks)] = factor * logits[:, list(ranks)].exp()
        torch.testing.assert_close(lse[stream].double(), terms.sum(dim=1).log(), atol=1e-5, rtol=1e-5)
        expected = terms @ values / terms.sum(dim=1, keepdim=True)
        torch.testing.assert_close(out[stream].double(), expected, atol=1e-5, rtol=1e-5)
    assert fewer or epsilon == 0.02


@pytest.mark.parametrize(("size", "epsilon", "delta"), [(0.5, 0.05, 0.1), (0.8, 0.1, 0.2), (1.0, 0.2, 0.1)])
def test_the_denominator_is_unbiased_and_rarely_off_by_epsilon(size: float, epsilon: float, delta: float) -> None:
    call, queries = call_of([[600, 500, 400, 550]]), queries_of(size=size)
    call.store.segments[0].log_weight = None
    expected = [exact(call, stream, query) for stream, query in enumerate(queries)]
    ratios, sums, num_read = [], [], []
    for seed in range(150):
        selector = press_of(epsilon=epsilon, delta=delta, base=0.1, seed=seed).recipe().selector(0)
        out, lse = merge(partials_of(selector, call, queries))
        ratios.append(torch.stack([(lse[n] - expected[n][1]).exp() for n in range(STREAMS)]))
        sums.append(torch.stack([out[n] * ratios[-1][n][:, None] - expected[n][0] for n in range(STREAMS)]))
        num_read.append(call.read[0][0].counts.double())
    error = torch.stack(ratios) - 1
    # With 600 draws of the largest size in a group, the share of misses has a standard error below 0.02.
    assert float((error.abs() > epsilon).double().mean()) <= delta + 0.04
    assert torch.stack(num_read).mean() < 0.9 * 512.5  # the mean length of the streams
    for samples in (error, torch.stack(sums)):
        spread = samples.std(dim=0) / len(samples) ** 0.5
        # One of 12 heads, or of 192 channels, is beyond four standard errors in one of 80 sets of seeds.
        assert bool((samples.mean(dim=0).abs() <= 4 * spread + 1e-6).all())


def test_even_attention_needs_the_first_sample_only() -> None:
    call, queries = call_of([[200] * STREAMS]), queries_of(size=0.0)
    call.store.segments[0].log_weight = torch.zeros(200 * STREAMS)
    _, lse = merge(partials_of(press_of(base=0.1).recipe().selector(0), call, queries))
    (pairs,) = call.read[0]
    assert pairs.sample.counts.tolist() == [19] * STREAMS  # a tenth of the 188 pairs that pqcache does not choose
    torch.testing.assert_close(lse, torch.full_like(lse, math.log(200)))


def test_a_small_epsilon_reads_everything_and_is_exact() -> None:
    call, queries = call_of(LENGTHS), queries_of(tokens=3)
    selector = press_of(epsilon=1e-6).recipe().selector(0)
    selection = selector.choose(call, queries)
    out, lse = merge(selector.attend_to(call, queries, selection))
    for row, query in enumerate(queries):
        expected, expected_lse = exact(call, row % STREAMS, query)
        torch.testing.assert_close(out[row].double(), expected, atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse[row].double(), expected_lse, atol=1e-5, rtol=1e-5)


def test_draws_differ_between_heads_layers_tokens_and_seeds() -> None:
    samples = []
    for index, seed in ((0, 0), (1, 0), (0, 1), (0, 0)):
        call, queries = call_of([[200] * STREAMS], index=index, tokens=2), queries_of(tokens=2)
        (read,) = press_of(epsilon=0.9, seed=seed).recipe().selector(0).choose(call, queries)
        samples.append([tuple(chosen_ranks(call, [read[0].sample], n % STREAMS, n)) for n in range(2 * STREAMS)])
    assert samples[0] == samples[3]
    # Rows of a batch at the same position draw the same numbers, so that only the first row counts.
    streams = [sample for drawn in samples[:3] for n, sample in enumerate(drawn) if n % STREAMS < 2]
    assert len(set(streams)) == len(streams) == 12
    call = call_of([[200] * STREAMS], tokens=2)
    keys = draw_keys(call, 2 * STREAMS, 0, 0).view(2, 2, 2)
    assert torch.equal(keys[:, 0], keys[:, 1])
    assert len(keys[:, 0].unique()) == 4
    call.tokens.mask = torch.ones(2, 302, dtype=torch.bool)
    call.tokens.mask[1, :1] = False
    padded = draw_keys(call, 2 * STREAMS, 0, 0).view(2, 2, 2)
    assert torch.equal(padded[:, 0], keys[:, 0])
    assert torch.equal(padded[1, 1], keys[0, 0])


def test_every_pair_is_drawn_equally_often() -> None:
    call, queries, times = call_of([[60] * STREAMS]), queries_of(size=0.0), torch.zeros(60)
    call.store.segments[0].log_weight = torch.zeros(60 * STREAMS)
    inner = kvpress.PQCachePress(2, bits=2, n_sink=1, n_recent=1)
    for seed in range(400):
        selector = kvpress.VAttentionPress(inner, base=0.25, seed=seed).recipe().selector(0)
        (read,) = selector.choose(call, queries)
        for stream in range(2):
            times[chosen_ranks(call, [read[0].sample], stream, stream)] += 1
    assert times[[0, -1]].tolist() == [0, 0]
    expected = 800 * 15 / 58
    assert bool(((times[1:-1] - expected).abs() < 4.5 * (expected * (1 - 15 / 58)) ** 0.5).all())


# -- inside a model ----------------------------------------------------------------------------------------------------


@every_pair(inner=["quest", "forced"], storage=STORAGE.keys(), padded={"even": False, "padded": True})
def test_several_new_tokens_equal_one_by_one(inner: str, storage: str, padded: bool) -> None:
    press, new = build(STORAGE[storage] + f"vattention({INNER[inner]}):epsilon=0.3", 16), tokens(2, 4, seed=8)
    model, cache, mask = prefilled(press, padded)
    together = step(model, copy.deepcopy(cache), mask, press, new)
    for t in range(4):
        alone = step(model, cache, mask, press, new[:, t : t + 1])
        torch.testing.assert_close(together[:, t], alone[:, 0], atol=1e-4, rtol=1e-4)
        mask = None if mask is None else torch.nn.functional.pad(mask, (0, 1), value=1)


@pytest.mark.parametrize("storage", ["dense", "ragged", "packed"])
def test_a_padded_row_decodes_as_if_it_were_alone(storage: str) -> None:
    press = build(STORAGE[storage] + f"vattention({INNER['quest']}):epsilon=0.3", 16)
    assert_rows_decode_as_alone(press)


def test_a_sample_brings_the_logits_closer_to_full_attention() -> None:
    model = tiny_model("llama")
    errors = {}
    for name in ("{}", "vattention({}):epsilon=0.2", "vattention({}):epsilon=0.05"):
        press = build(name.format(INNER["quest"]), 16)
        _, cache, mask = prefilled(press, padded=True)
        errors[name] = 0.0
        for seed in range(4):
            full, read = (
                step(model, copy.deepcopy(cache), mask, reader, tokens(2, 1, seed=seed))
                for reader in (kvpress.NonePress(), press)
            )
            errors[name] += float((read - full).square().sum())
    plain, coarse, fine = errors.values()
    assert fine < coarse < plain


def test_presses_that_cannot_be_sampled_behind_are_refused() -> None:
    with pytest.raises(TypeError, match="VAttentionPress needs a selector alone"):
        kvpress.VAttentionPress(kvpress.SnapKVPress(0.5))
    for settings, words in {
        ("epsilon", 0.0): r"epsilon must be in \(0, 1\), got 0.0",
        ("delta", 1.0): r"delta must be in \(0, 1\), got 1.0",
        ("base", 0.0): r"base must be in \(0, 1\), got 0.0",
    }.items():
        with pytest.raises(ValueError, match=words):
            kvpress.VAttentionPress(kvpress.QuestPress(), **dict([settings]))


def test_the_common_properties_of_presses_hold() -> None:
    checks = check_press(build(f"vattention({INNER['quest']}):epsilon=0.3", 32))
    assert {"chosen pairs", "budget of all pairs", "padded row", "saved cache", "threads"} <= set(checks)
