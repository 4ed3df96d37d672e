# SPDX-License-Identifier: Apache-2.0
"""`diffuse` against plain code: passes, rows, thresholds, memory and interruptions."""

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
"""New tokens, and the length of a block; the last block is shorter."""


def wide(family: str) -> Any:
    """Return a tiny model whose sliding windows are longer than the sequences here."""
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
def test_diffusion_without_a_cache_equals_the_plain_loop(family: str) -> None:
    model, ids = wide(family), tokens(1, 21)
    assert written(model, ids, cache="none", steps=5) == [write(model, ids[0], NEW, BLOCK, 5).tolist()]


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("full", [1, 2])
def test_a_cache_stores_the_pairs_of_the_last_full_pass(family: str, cache: str, full: int) -> None:
    model, ids = wide(family), tokens(1, 21)
    expected = write(model, ids[0], NEW, BLOCK, 5, cache, full=full).tolist()
    assert written(model, ids, cache=cache, steps=5, full_steps=full) == [expected]


@pytest.mark.parametrize("cache", ["prefix", "dual"])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_cache_that_is_refreshed_at_every_step_changes_nothing(cache: Any, sparse: bool) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([20, 11])
    press = kvpress.get_press("sparse_dllm:0.5") if sparse else None
    expected = diffuse(model, ids, mask, cache="none", steps=4)
    result = diffuse(model, ids, mask, cache=cache, steps=4, refresh_every=1, press=press)
    assert torch.equal(result.sequences, expected.sequences)
    assert (result.forwards, result.full_forwards, result.cache) == (expected.forwards, expected.forwards, None)


def test_blocks_attend_to_the_pairs_that_a_press_keeps() -> None:
    model, ids = tiny_model("llama"), tokens(1, 21)

    def keep(keys: Tensor, columns: Tensor) -> Tensor:
        # Scores are equal for all heads, so that plain code needs one tensor; masked tokens differ by their rotation.
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
def test_passes_and_fed_tokens_follow_the_formula(cache: Any, steps: int | None, full: int, refresh: Any) -> None:
    """The first `full` steps of a block and every `refresh`-th later step are full passes."""
    model, ids = tiny_model("llama"), tokens(2, 21)
    more = {} if cache == "none" else {"full_steps": full, "refresh_every": refresh}
    result = diffuse(model, ids, cache=cache, steps=steps, **more)
    blocks, total = [8, 8, 2], 21 + NEW
    passes = [min(length, steps or BLOCK) for length in blocks]
    full_passes = passes
    if cache != "none":
        full_passes = [min(n, full) + (max(0, n - full) // refresh if refresh else 0) for n in passes]
    short = [8, 8, 2] if cache == "dual" else [18, 10, 2]
    fed = sum(a * total + (n - a) * s for n, a, s in zip(passes, full_passes, short, strict=True))
    assert result.steps == passes
    assert (result.forwards, result.full_forwards, result.fed_tokens) == (sum(passes), sum(full_passes), 2 * fed)
    assert result.tokens_per_forward == NEW / sum(passes)


def test_a_pass_writes_a_block_at_threshold_0_and_a_token_at_threshold_1() -> None:
    model, ids = tiny_model("llama"), tokens(2, 9)
    assert diffuse(model, ids, threshold=0.0).steps == [1, 1, 1]
    result = diffuse(model, ids, threshold=1.0)
    assert result.steps == [8, 8, 2]
    assert torch.equal(result.sequences, diffuse(model, ids).sequences)
    assert not bool((result.sequences == MASK).any())


def test_a_pass_writes_all_tokens_above_the_threshold_and_at_least_one() -> None:
    model, ids = tiny_model("llama"), tokens(1, 12)
    states: list[Tensor] = []
    diffuse(model, ids, cache="none", threshold=0.2, on_step=lambda result: states.append(result.sequences.clone()))
    before = torch.cat([ids, torch.full((1, NEW), MASK)], dim=1)
    first = [state for state in states if bool((state[0, 20:] == MASK).all())]
    assert len(first) > 1
    for after in first:
        logits = model(before, attention_mask=torch.zeros(1, 1, *before.shape[1:] * 2)).logits[0, 12:20].double()
        logits[:, MASK] = -torch.inf
        confidence = logits.softmax(-1).amax(-1)
        open_tokens = before[0, 12:20] == MASK
        reached = open_tokens & (confidence >= 0.2)
        reached[confidence.masked_fill(~open_tokens, -1).argmax()] = True
        assert torch.equal(before[0, 12:20] != after[0, 12:20], reached)
        before = after


def test_sampled_tokens_have_the_models_probabilities() -> None:
    """The frequencies of the first token of many rows are within five deviations of softmax(logits / T)."""
    model, rows = tiny_model("llama"), 4000
    prompt = tokens(1, 5)
    logits = model(
        torch.cat([prompt, torch.tensor([[MASK]])], dim=1), attention_mask=torch.zeros(1, 1, 6, 6)
    ).logits[0, -1].double()  # fmt: skip
    logits[MASK] = -torch.inf
    expected = (logits / 2.0).softmax(-1)
    torch.manual_seed(0)
    result = kvpress.diffuse(model, prompt.expand(rows, -1), 1, mask_token=MASK, temperature=2.0, cache="none")
    share = torch.bincount(result.sequences[:, -1], minlength=len(expected)).double() / rows
    assert bool(((share - expected).abs() <= 5 * (expected / rows).sqrt() + 1e-9).all())


@pytest.mark.parametrize(
    "spec", [None, "sparse_dllm:0.5,block_length=8", "knorm:0.5 + kivi:bits=4,group_size=8,residual_length=0"]
)
def test_reported_bytes_are_those_in_memory_and_evicted_pairs_are_freed(spec: str | None) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([90, 70])
    press = None if spec is None else kvpress.get_press(spec)
    result = diffuse(model, ids, mask, press=press, steps=3)
    report = kvpress.memory_report(result.cache)
    tensors = {t.data_ptr(): t for layer in result.cache.layers for t in tensors_below(layer.store)}
    assert report.total_bytes == storage_bytes(list(tensors.values()))
    kept = sum(int((row.sum() + NEW - 2) * (1 if spec is None else 0.5)) for row in mask)
    assert report.kept == 3 * 2 * (kept + 2 * 2)
    pair = 2 * 32 * 4
    if spec is None or "kivi" not in spec:
        assert report.total_bytes <= report.kept * pair * 1.05 + 3 * 2000
    else:
        assert report.total_bytes < report.kept * pair * 0.5


def tensors_below(value: Any, seen: set[int] | None = None) -> list[Tensor]:
    """Return every tensor that is reachable from an object."""
    seen = set() if seen is None else seen
    if id(value) in seen or isinstance(value, type):
        return []
    seen.add(id(value))
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        return [t for item in value.values() for t in tensors_below(item, seen)]
    if isinstance(value, (list, tuple)):
        return [t for item in value for t in tensors_below(item, seen)]
    return tensors_below(vars(value), seen) if hasattr(value, "__dict__") else []


def test_only_the_cache_stays_in_memory_afterwards() -> None:
    model, ids = tiny_model("llama"), tokens(1, 64)
    result = diffuse(model, ids, press=kvpress.get_press("sparse_dllm:0.5,block_length=8"))
    gc.collect()
    pairs = [t for t in gc.get_objects() if type(t) is Tensor and t.dim() == 4 and t.shape[2] == 64 + NEW]
    assert not pairs
    assert kvpress.kept_positions(result.cache)[0][0][0].max() < 64 + NEW


def test_an_interruption_keeps_the_written_tokens_and_restores_the_model() -> None:
    model, ids = tiny_model("llama"), tokens(2, 12)
    before, expected = fingerprint(model), diffuse(model, ids)
    states: list[kvpress.Diffusion] = []

    def stop(result: kvpress.Diffusion) -> None:
        states.append(result)
        if result.forwards == 11:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as caught:
        diffuse(model, ids, on_step=stop)
    result = states[-1]
    assert "had written 22 of 36 tokens and finished 1 blocks" in caught.value.__notes__[0]
    assert not result.finished
    assert result.steps == [8]
    assert torch.equal(result.sequences[:, :20], expected.sequences[:, :20])
    assert int((result.sequences == MASK).sum()) == 14
    assert fingerprint(model) == before
    assert torch.equal(diffuse(model, ids).sequences, expected.sequences)


def test_a_pass_that_fails_between_layers_drops_the_cache() -> None:
    model, ids = tiny_model("llama"), tokens(1, 12)
    results: list[kvpress.Diffusion] = []
    passes = 0

    def fail(*args: Any) -> None:
        nonlocal passes
        passes += 1
        if passes == 3:
            raise RuntimeError("out of memory")

    hook = model.model.layers[2].register_forward_pre_hook(fail)
    try:
        with pytest.raises(RuntimeError, match="out of memory"):
            diffuse(model, ids, on_step=results.append)
    finally:
        hook.remove()
    assert results[-1].forwards == 2
    assert results[-1].cache is None
    assert diffuse(model, ids).finished


def test_another_thread_can_use_the_plain_model() -> None:
    model, ids, other_ids = tiny_model("llama"), tokens(1, 12), tokens(2, 9, seed=5)
    plain, expected = model(other_ids).logits, diffuse(model, ids).sequences
    with ThreadPoolExecutor(1) as pool:
        concurrent: list[Tensor] = []
        result = diffuse(
            model,
            ids,
            on_step=lambda result: concurrent.append(pool.submit(lambda: model(other_ids).logits).result().detach()),
        )
    assert torch.equal(result.sequences, expected)
    assert all(torch.equal(logits, plain) for logits in concurrent)
    with pytest.raises(RuntimeError, match="is replaced already, by a press or in another thread"):
        diffuse(model, ids, on_step=lambda result: diffuse(model, ids) and None)


def test_two_models_in_two_threads_write_as_alone() -> None:
    models, ids = [tiny_model("llama"), tiny_model("gpt_oss", "eager")], tokens(1, 6)
    short: Any = {"new_tokens": 2, "mask_token": MASK}
    alone = [kvpress.diffuse(model, ids[:, :5], **short).sequences for model in models]
    with ThreadPoolExecutor(2) as pool:
        concurrent = list(
            pool.map(lambda model: [kvpress.diffuse(model, ids[:, :5], **short).sequences for _ in range(4)], models)
        )
    for expected, results in zip(alone, concurrent, strict=True):
        assert all(torch.equal(expected, result) for result in results)


def test_full_passes_at_every_step_remove_the_error_of_stale_pairs() -> None:
    model, ids = tiny_model("llama"), tokens(1, 30)
    expected = diffuse(model, ids, cache="none").sequences
    equal = [int((diffuse(model, ids, refresh_every=n).sequences == expected).sum()) for n in (None, 1)]
    assert equal[1] == expected.numel() > equal[0]
    assert math.isfinite(diffuse(model, ids).tokens_per_forward)
