# SPDX-License-Identifier: Apache-2.0
"""Several processes read one prompt: they keep the pairs that one process keeps, and all end soon after a failure."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import DynamicCache

import kvpress
from kvpress.hf.generation.parallel_prefill import balanced
from tests.caches import positions
from tests.models import grow, padded_batch, position_ids, tiny_model

SPECS = (
    "none",
    "snapkv:0.5,window_size=20",
    "h2o:budget=24",
    "expected_attention:0.5",
    "adakv(snapkv:0.5,window_size=4) + kivi:bits=4,group_size=4,residual_length=4 + quest:budget=16,page_size=4,skip_layers=0",
    "kvzip:0.5,repeat_prompt=",
    "budgeted(sample(leverage_score)):smaller=8",
    "bounded(snapkv:window_size=4,budget=40):chunk=16",
)
CASES = [
    *(("llama", spec) for spec in SPECS),
    ("qwen3", SPECS[1]),
    ("qwen3", SPECS[5]),
    ("phi3", SPECS[3]),
    ("phi3", SPECS[6]),
]


def together(work: Callable[..., Any], folder: Path, processes: int, *arguments: Any, seconds: int = 120) -> list[Any]:
    """Run `work(rank, report, *arguments)` in processes of one group; return the reports of each, None if it died.

    Processes that run after `seconds` are killed.
    """
    fork = multiprocessing.get_context("fork")
    queue = fork.Queue()

    def run(rank: int) -> None:
        torch.set_num_threads(1)
        dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=processes)
        with torch.no_grad():
            work(rank, lambda reports: queue.put((rank, reports)), *arguments)
        queue.close()
        queue.join_thread()
        os._exit(0)

    running = [fork.Process(target=run, args=(rank,)) for rank in range(processes)]
    for process in running:
        process.start()
    reports, end = {}, time.monotonic() + seconds
    while time.monotonic() < end and any(process.is_alive() for process in running):
        while not queue.empty():
            rank, message = queue.get()
            reports.setdefault(rank, []).append(message)
        time.sleep(0.02)
    while not queue.empty():
        rank, message = queue.get()
        reports.setdefault(rank, []).append(message)
    for process in running:
        process.kill()
        process.join()
    return [reports.get(rank) for rank in range(processes)]


def ask(model: Any, ids: Tensor, mask: Tensor, cache: Any) -> Tensor:
    mask = grow(mask, ids.shape[1])
    at = position_ids(mask, ids.shape[1])
    logits: Tensor = model(ids, attention_mask=mask, position_ids=at, past_key_values=cache).logits
    return logits


def read_all(rank: int, report: Callable[[Any], None], parts: Any) -> None:
    for family, spec in CASES:
        model, (ids, mask) = tiny_model(family), padded_batch([97, 70])
        cache = kvpress.parallel_prefill(model, spec, ids, mask, parts=parts)
        if cache is None:
            continue
        with kvpress.reading(model, kvpress.get_press(spec)):
            logits = ask(model, ids[:, :3], mask, cache)
        report((family, spec, rank, positions(cache), logits.tolist()))


@pytest.mark.parametrize(("processes", "parts"), [(2, None), (3, (50, 13, 34))])
def test_the_kept_pairs_are_those_of_one_process(processes: int, parts: Any, tmp_path: Path) -> None:
    *others, last = together(read_all, tmp_path, processes, parts)
    assert others == [None] * (processes - 1)
    assert len(last) == len(CASES)
    for family, spec, rank, places, logits in last:
        assert rank == processes - 1
        model, press = tiny_model(family), kvpress.get_press(spec)
        ids, mask = padded_batch([97, 70])
        cache = DynamicCache(config=model.config)
        with press(model):
            model(ids, attention_mask=mask, position_ids=position_ids(mask, 97), past_key_values=cache)
        with kvpress.reading(model, press):
            expected = ask(model, ids[:, :3], mask, cache)
        torch.testing.assert_close(torch.tensor(logits), expected, atol=2e-3, rtol=2e-3, msg=f"{family} {spec}")
        assert places == positions(cache), (family, spec)


PATTERNS = (
    "tri_shape:sinks=8,local=8,last=8,block=8",
    "minference:vertical=6,slash=12,last=8,block=8 + snapkv:0.5,window_size=4 + kivi:bits=4,group_size=4,residual_length=4",
)


def read_by_pattern(rank: int, report: Callable[[Any], None]) -> None:
    model, (ids, mask) = tiny_model("llama"), padded_batch([97, 70])
    for spec in PATTERNS:
        cache = kvpress.parallel_prefill(model, spec, ids, mask, parts=(49, 48))
        if cache is not None:
            with kvpress.reading(model, kvpress.get_press(spec)):
                report((spec, positions(cache), ask(model, ids[:, :3], mask, cache).tolist()))


def test_a_pattern_reads_each_part_as_a_chunk(tmp_path: Path) -> None:
    _, last = together(read_by_pattern, tmp_path, 2)
    assert [logits[0] for logits in last] == list(PATTERNS)
    model, (ids, mask) = tiny_model("llama"), padded_batch([97, 70])
    for spec, places, logits in last:
        answers = []
        for chunk in (49, None):
            press = kvpress.get_press(spec)
            with press(model):
                cache = DynamicCache(config=model.config)
                model.generate(
                    ids, attention_mask=mask, past_key_values=cache, max_new_tokens=1, do_sample=False,
                    prefill_chunk_size=chunk,
                )  # fmt: skip
            if chunk:
                assert places == positions(cache), spec
            with kvpress.reading(model, press):
                answers.append(ask(model, ids[:, :3], mask, cache))
        torch.testing.assert_close(torch.tensor(logits), answers[0], atol=2e-3, rtol=2e-3, msg=spec)
        assert not torch.allclose(answers[0], answers[1], atol=1e-3), "chunks make no difference, so nothing was tested"


def fail(rank: int, report: Callable[[Any], None], how: str, who: int, slow: int | None) -> None:
    model = tiny_model("llama")
    if rank == slow:
        model.model.layers[1].mlp.register_forward_hook(lambda *arguments: time.sleep(0.5))
    if rank == who:

        def stop(*arguments: Any) -> None:
            del arguments
            if how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            raise MemoryError("no room")

        model.model.layers[1].mlp.register_forward_hook(stop)
    ids, mask = padded_batch([97, 70])
    if how == "differs" and rank == who:
        ids = ids + 1
    started = time.monotonic()
    try:
        kvpress.parallel_prefill(model, "snapkv:0.5", ids, mask)
    except Exception as error:
        report((type(error).__name__, str(error), time.monotonic() - started))
    else:
        report(("nothing", "", 0.0))


@pytest.mark.parametrize(
    ("how", "who", "slow"),
    [
        *itertools.product(["raises", "dies", "differs"], [0, 1, 2], [None]),
        *(("raises", who, slow) for who, slow in itertools.permutations([0, 1, 2], 2)),
    ],
)
def test_a_lost_process_is_an_error_on_all_others_soon(how: str, who: int, slow: int | None, tmp_path: Path) -> None:
    reports = together(fail, tmp_path, 3, how, who, slow)
    for rank, report in enumerate(reports):
        if how == "dies" and rank == who:
            assert report is None
            continue
        ((kind, message, seconds),) = report
        assert seconds < 20
        assert kind in ("ConnectionError", "MemoryError", "RuntimeError"), (rank, kind, message)
        if how == "raises":
            assert kind == ("MemoryError" if rank == who else "ConnectionError")
            assert "no room" in message


def refuse(rank: int, report: Callable[[Any], None]) -> None:
    ids = torch.ones(1, 10, dtype=torch.int64)
    tries = [
        ("llama", ids, {"parts": (3, 3)}), ("llama", ids, {"parts": (10, 0)}), ("llama", ids[:, :1], {}),
        ("llama", ids[:, :0], {}), ("gemma3_text", ids, {}),
    ]  # fmt: skip
    for family, inputs, settings in tries:
        try:
            kvpress.parallel_prefill(tiny_model(family), "none", inputs, **settings)
        except (ValueError, NotImplementedError) as error:
            report(str(error))


def test_bad_input_is_refused_before_anything_is_read(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"call torch\.distributed\.init_process_group"):
        kvpress.parallel_prefill(tiny_model("llama"), "none", torch.ones(1, 9, dtype=torch.int64))
    for report in together(refuse, tmp_path, 2):
        for message, expected in zip(
            report,
            (
                "add up to the 10 tokens",
                "at least 1",
                "1 tokens cannot be read by 2",
                "empty",
                "layers of sliding_attention",
            ),
            strict=True,
        ):
            assert expected in message


def test_later_parts_are_shorter() -> None:
    model = tiny_model("llama")
    cuts = balanced(model, 100_000, 4)
    lengths = [b - a for a, b in itertools.pairwise(cuts)]
    assert sum(lengths) == 100_000
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > 1.5 * lengths[-1]
    assert balanced(model, 3, 3) == [0, 1, 2, 3]
