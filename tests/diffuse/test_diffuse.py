# SPDX-License-Identifier: Apache-2.0
"""`diffuse` against plain code, and what its settings promise: passes, rows, thresholds, memory, interruptions."""

from __future__ import annotations

import copy
import gc
import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

import kvpress
from kvpress.cache.report import storage_bytes
from tests.diffuse.plain import MASK, write
from tests.models import fingerprint, padded_batch, tiny_model, tokens

NEW, BLOCK = 18, 8
"""Tokens written, in blocks of which the last one is shorter."""


def wide(family: str) -> Any:
    """A tiny model whose sliding windows hold all tokens here."""
    model = copy.deepcopy(tiny_model(family, "eager" if family in ("gpt_oss", "gemma2") else "sdpa"))
    if getattr(model.config, "sliding_window", None):
        model.config.sliding_window = 64
        for module in model.modules():
            if getattr(module, "sliding_window", None):
                module.sliding_window = 64
    return model


def diffuse(model: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> kvpress.Diffusion:
    settings = {"mask_token": MASK, "block_length": BLOCK, **settings}
    return kvpress.diffuse(model, ids, NEW, attention_mask=mask, **settings)


def written(model: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> list[list[int]]:
    return diffuse(model, ids, mask, **settings).sequences[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("family", ["llama", "qwen3", "mistral", "phi3", "gemma3_text", "gemma2", "gpt_oss", "smollm3"])
def test_without_a_cache_it_is_the_plain_loop(family: str) -> None:
    model, ids = wide(family), tokens(1, 21)
    assert written(model, ids, cache="none", steps=5) == [write(model, ids[0], NEW, BLOCK, 5).tolist()]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("full", [1, 2])
def test_a_cache_holds_the_pairs_of_the_last_whole_pass(family: str, cache: str, full: int) -> None:
    model, ids = wide(family), tokens(1, 21)
    expected = write(model, ids[0], NEW, BLOCK, 5, cache, full=full).tolist()
    assert written(model, ids, cache=cache, steps=5, full_steps=full) == [expected]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("sparse", [False, True])
def test_refreshed_at_every_step_it_is_no_cache(cache: Any, sparse: bool) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20, 11])
    press = kvpress.get_press("sparse_dllm:0.5") if sparse else None
    whole = diffuse(model, ids, mask, cache="none", steps=4)
    found = diffuse(model, ids, mask, cache=cache, steps=4, refresh_every=1, press=press)
    assert torch.equal(found.sequences, whole.sequences)
    assert (found.forwards, found.full_forwards, found.cache) == (whole.forwards, whole.forwards, None)


def test_blocks_see_what_plain_code_keeps_of_some_keys() -> None:
    model, ids = tiny_model("llama"), tokens(1, 21)

    def keep(keys: Tensor, columns: Tensor) -> Tensor:
        # The same for all heads, so that plain code can hold it in one tensor; masked tokens differ by their rotation.
        worth = keys.double().sum(dim=-1).mean(dim=(0, 1))
        return columns[worth.topk(int(len(columns) * 0.5)).indices.sort().values]

    class Mean(kvpress.KnormPress):
        def scores(self, view: Any) -> Tensor:
            return view.keys.double().sum(dim=-1).mean(dim=1, keepdim=True).expand(view.shape)

    expected = write(model, ids[0], NEW, BLOCK, 5, "dual", keep).tolist()
    assert written(model, ids, cache="dual", steps=5, press=Mean(0.5)) == [expected]


PRESSES = [
    None, "sparse_dllm:0.5", "snapkv:0.5,window_size=8", "adakv(sparse_dllm:0.4)",
    "knorm:0.3 + kivi:bits=4,group_size=4,residual_length=0",
]  # fmt: skip


@pytest.mark.parametrize(("cache", "spec"), [("none", None), *itertools.product(("prefix", "dual"), PRESSES)])
def test_a_row_of_a_padded_batch_is_written_as_that_row_alone(cache: Any, spec: str | None) -> None:
    model, (ids, mask) = tiny_model("qwen3"), padded_batch([22, 15])
    settings: dict[str, Any] = {
        "cache": cache,
        "threshold": 0.15,
        "press": None if spec is None else kvpress.get_press(spec),
    }
    together = written(model, ids, mask, **settings)
    assert together == [
        written(model, row[real.bool()][None], **settings)[0] for row, real in zip(ids, mask, strict=True)
    ]


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize(
    ("steps", "full", "refresh"), [(None, 1, None), (3, 1, None), (5, 2, None), (8, 1, 3), (1, 1, None)]
)
def test_passes_and_tokens_read_are_those_of_the_formula(
    cache: Any, steps: int | None, full: int, refresh: Any
) -> None:
    """Of S steps in a block, 1 + those after the cache was filled that are no refresh read less than all."""
    model, ids = tiny_model("llama"), tokens(2, 21)
    more = {} if cache == "none" else {"full_steps": full, "refresh_every": refresh}
    found = diffuse(model, ids, cache=cache, steps=steps, **more)
    blocks, whole = [8, 8, 2], 21 + NEW
    passes = [min(length, steps or BLOCK) for length in blocks]
    wholes = passes
    if cache != "none":
        wholes = [min(n, full) + (max(0, n - full) // refresh if refresh else 0) for n in passes]
    short = [8, 8, 2] if cache == "dual" else [18, 10, 2]
    fed = sum(a * whole + (n - a) * s for n, a, s in zip(passes, wholes, short, strict=True))
    assert found.steps == passes
    assert (found.forwards, found.full_forwards, found.fed_tokens) == (sum(passes), sum(wholes), 2 * fed)
    assert found.tokens_per_forward == NEW / sum(passes)


def test_thresholds_of_0_and_1_write_a_block_and_a_token_a_pass() -> None:
    model, ids = tiny_model("llama"), tokens(2, 9)
    assert diffuse(model, ids, threshold=0.0).steps == [1, 1, 1]
    one = diffuse(model, ids, threshold=1.0)
    assert one.steps == [8, 8, 2]
    assert torch.equal(one.sequences, diffuse(model, ids).sequences)
    assert not bool((one.sequences == MASK).any())


def test_a_threshold_writes_what_reaches_it_and_at_least_one() -> None:
    model, ids = tiny_model("llama"), tokens(1, 12)
    states: list[Tensor] = []
    diffuse(model, ids, cache="none", threshold=0.2, on_step=lambda found: states.append(found.sequences.clone()))
    before = torch.cat([ids, torch.full((1, NEW), MASK)], dim=1)
    first = [state for state in states if bool((state[0, 20:] == MASK).all())]
    assert len(first) > 1
    for after in first:
        logits = model(before, attention_mask=torch.zeros(1, 1, *before.shape[1:] * 2)).logits[0, 12:20].double()
        logits[:, MASK] = -torch.inf
        sure = logits.softmax(-1).amax(-1)
        open_tokens = before[0, 12:20] == MASK
        reached = open_tokens & (sure >= 0.2)
        reached[sure.masked_fill(~open_tokens, -1).argmax()] = True
        assert torch.equal(before[0, 12:20] != after[0, 12:20], reached)
        before = after


def test_temperature_draws_by_the_models_probabilities() -> None:
    """The first token of many rows: its frequencies are within five deviations of softmax(logits / T)."""
    model, rows = tiny_model("llama"), 4000
    prompt = tokens(1, 5)
    logits = model(
        torch.cat([prompt, torch.tensor([[MASK]])], dim=1), attention_mask=torch.zeros(1, 1, 6, 6)
    ).logits[0, -1].double()  # fmt: skip
    logits[MASK] = -torch.inf
    expected = (logits / 2.0).softmax(-1)
    torch.manual_seed(0)
    found = kvpress.diffuse(model, prompt.expand(rows, -1), 1, mask_token=MASK, temperature=2.0, cache="none")
    share = torch.bincount(found.sequences[:, -1], minlength=len(expected)).double() / rows
    assert bool(((share - expected).abs() <= 5 * (expected / rows).sqrt() + 1e-9).all())


@pytest.mark.parametrize(
    "spec", [None, "sparse_dllm:0.5,block_length=8", "knorm:0.5 + kivi:bits=4,group_size=8,residual_length=0"]
)
def test_bytes_reported_are_those_held_and_evicted_pairs_are_free(spec: str | None) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([90, 70])
    press = None if spec is None else kvpress.get_press(spec)
    found = diffuse(model, ids, mask, press=press, steps=3)
    report = kvpress.memory_report(found.cache)
    held = {t.data_ptr(): t for layer in found.cache.layers for t in walked(layer.store)}
    assert report.total_bytes == storage_bytes(list(held.values()))
    around = sum(int((row.sum() + NEW - 2) * (1 if spec is None else 0.5)) for row in mask)
    assert report.kept == 3 * 2 * (around + 2 * 2)
    pair = 2 * 32 * 4
    if spec is None or "kivi" not in spec:
        assert report.total_bytes <= report.kept * pair * 1.05 + 3 * 2000
    else:
        assert report.total_bytes < report.kept * pair * 0.5


def walked(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor that an object leads to."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for each in value.values() for t in walked(each, seen)]
    if isinstance(value, (list, tuple)):
        return [t for each in value for t in walked(each, seen)]
    return walked(vars(value), seen) if hasattr(value, "__dict__") else []


def test_nothing_but_the_cache_is_held_after_it() -> None:
    model, ids = tiny_model("llama"), tokens(1, 64)
    found = diffuse(model, ids, press=kvpress.get_press("sparse_dllm:0.5,block_length=8"))
    gc.collect()
    pairs = [t for t in gc.get_objects() if type(t) is Tensor and t.dim() == 4 and t.shape[2] == 64 + NEW]
    assert not pairs
    assert kvpress.kept_positions(found.cache)[0][0][0].max() < 64 + NEW


def test_an_interruption_keeps_what_was_written_and_leaves_the_model_alone() -> None:
    model, ids = tiny_model("llama"), tokens(2, 12)
    before, whole = fingerprint(model), diffuse(model, ids)
    states: list[kvpress.Diffusion] = []

    def stop(found: kvpress.Diffusion) -> None:
        states.append(found)
        if found.forwards == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        diffuse(model, ids, on_step=stop)
    found = states[-1]
    assert "had written 22 of 36 tokens, of which 1 blocks are finished" in caught.value.__notes__[0]
    assert not found.finished
    assert found.steps == [8]
    assert torch.equal(found.sequences[:, :20], whole.sequences[:, :20])
    assert int((found.sequences == MASK).sum()) == 14
    assert fingerprint(model) == before
    assert torch.equal(diffuse(model, ids).sequences, whole.sequences)


def test_a_pass_that_fails_half_way_leaves_no_mixed_cache() -> None:
    model, ids = tiny_model("llama"), tokens(1, 12)
    found: list[kvpress.Diffusion] = []
    passes = 0

    def fail(*args: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise RuntimeError("out of memory")

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            diffuse(model, ids, on_step=found.append)
    finally:
        hook.remove()
    assert found[-1].forwards == 2
    assert found[-1].cache is None
    assert diffuse(model, ids).finished


def test_another_thread_reads_the_plain_model_meanwhile() -> None:
    model, ids, other = tiny_model("llama"), tokens(1, 12), tokens(2, 9, seed=5)
    plain, whole = model(other).logits, diffuse(model, ids).sequences
    with ThreadPoolExecutor(1) as pool:
        both: list[Tensor] = []
        found = diffuse(
            model, ids, on_step=lambda found: both.append(pool.submit(lambda: model(other).logits).result().detach())
        )
    assert torch.equal(found.sequences, whole)
    assert all(torch.equal(each, plain) for each in both)
    with pytest.raises(RuntimeError, match="is replaced already, by a press or in another thread"):
        diffuse(model, ids, on_step=lambda found: diffuse(model, ids) and None)


def test_two_models_in_two_threads_are_written_as_each_alone() -> None:
    models, ids = [tiny_model("llama"), tiny_model("gpt_oss", "eager")], tokens(1, 6)
    short: Any = {"new_tokens": 2, "mask_token": MASK}
    alone = [kvpress.diffuse(model, ids[:, :5], **short).sequences for model in models]
    with ThreadPoolExecutor(2) as pool:
        both = list(
            pool.map(lambda model: [kvpress.diffuse(model, ids[:, :5], **short).sequences for _ in range(4)], models)
        )
    for own, found in zip(alone, both, strict=True):
        assert all(torch.equal(own, each) for each in found)


def test_stale_pairs_matter_less_the_more_often_they_are_read_anew() -> None:
    """At every step nothing is stale; the divergence of what is read first falls to zero there."""
    model, ids = tiny_model("llama"), tokens(1, 30)
    whole = diffuse(model, ids, cache="none").sequences
    equal = [int((diffuse(model, ids, refresh_every=n).sequences == whole).sum()) for n in (None, 1)]
    assert equal[1] == whole.numel() > equal[0]
    assert math.isfinite(diffuse(model, ids).tokens_per_forward)
