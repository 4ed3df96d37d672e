# SPDX-License-Identifier: Apache-2.0
"""Contexts that are read once for several presses give each press the figures that it has alone, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import ConfigError, EvalError
from kvpress_eval.fidelity import continuation
from kvpress_eval.fidelity.comparison import Comparison
from kvpress_eval.fidelity.figures import Fidelity
from kvpress_eval.run.models import Engine
from torch import Tensor
from transformers import DynamicCache

import kvpress
from tests.models import tiny_model, tokens

CONTEXT, TOKENS = 96, 12
SHARING = [
    "none",
    "snapkv:0.5,window_size=8",
    "adakv(snapkv:0.5,window_size=8)",
    "random:0.5",
    "h2o:0.5",
    "kivi:bits=2,group_size=16,residual_length=8",
    "quest:budget=16,page_size=4,skip_layers=0",
    "decoding(random):compression_interval=4,target_size=40",
]
NOT_SHARING = "kvzip:0.5,repeat_prompt="
PRESSES = {
    "llama": [*SHARING[:3], NOT_SHARING, *SHARING[3:], "tidal_decode:budget=16,skip_layers=0,reselect_layer=2"],
    "gemma3_text": SHARING,
}


def comparison(model: Any, texts: int = 3, **settings: Any) -> Comparison:
    engine = Engine(model, None, "")  # type: ignore[arg-type]
    return Comparison(engine, tokens(texts, CONTEXT + TOKENS), CONTEXT, batch_size=2, **settings)


def untimed(fidelity: Fidelity) -> dict[str, Any]:
    return replace(fidelity, seconds=0.0).row()


@contextmanager
def passes(model: Any) -> Iterator[list[tuple[int, ...]]]:
    """The shape of the ids of every forward pass."""
    seen: list[tuple[int, ...]] = []

    def note(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        del module
        seen.append(tuple((args[0] if args else kwargs["input_ids"]).shape))

    handle = model.register_forward_pre_hook(note, with_kwargs=True)
    yield seen
    handle.remove()


@pytest.mark.parametrize(
    ("family", "chunk", "layers"),
    [("llama", 5, True), ("gemma3_text", 1, False)],
)
def test_figures_of_several_presses_equal_those_of_each_alone(family: str, chunk: int, layers: bool) -> None:
    model, presses = tiny_model(family), PRESSES[family]
    together = comparison(model, chunk=chunk, layers=layers).fidelities(presses)
    for press, figures in zip(presses, together, strict=True):
        alone = comparison(model, chunk=chunk, layers=layers).fidelity(press)
        for name in ("kl", "agrees", "nll", "full_nll"):
            assert torch.equal(getattr(figures, name), getattr(alone, name)), (press, name)
        assert untimed(figures) == untimed(alone)


@pytest.mark.parametrize("press", [*SHARING[1:7], NOT_SHARING])
def test_a_reading_equals_one_session_over_the_whole_text(press: str) -> None:
    model = tiny_model("llama")
    compared = comparison(model, texts=2)
    cache, logits = DynamicCache(config=model.config), []
    with torch.inference_mode(), torch.random.fork_rng():
        torch.manual_seed(0)
        with kvpress.get_press(press)(model):
            model(compared.ids[:, :CONTEXT], past_key_values=cache, logits_to_keep=1)
            prompt = kvpress.memory_report(cache)
            for token in compared.ids[:, CONTEXT:].split(1, dim=1):
                logits.append(model(token, past_key_values=cache).logits)
    reading = compared.batches[0].read(press)
    assert torch.equal(reading.logits, torch.cat(logits, dim=1))
    assert (reading.prompt, reading.end) == (prompt, kvpress.memory_report(cache))


@pytest.mark.parametrize("layers", [False, True])
def test_a_context_is_read_once_for_all_presses_that_share_it(layers: bool) -> None:
    model = tiny_model("llama")
    with passes(model) as seen:
        comparison(model, layers=layers).fidelities([*SHARING[1:], NOT_SHARING])
    contexts = [shape for shape in seen if shape[1] == CONTEXT]
    # The full cache shares one reading of each of the two batches; the press that reads on has its own.
    assert contexts == [(2, CONTEXT)] * 2 + [(1, CONTEXT)] * 2
    single = [shape for shape in seen if shape[1] == 1]
    continued = len(SHARING)
    assert len(single) == 2 * TOKENS * (1 + continued * (2 if layers else 1))


def test_the_full_cache_is_read_once_however_often_it_is_compared_with() -> None:
    model = tiny_model("llama")
    with passes(model) as seen:
        ours = comparison(model)
        for press in SHARING[1:3]:
            ours.fidelity(press)
        assert [reading.logits.shape[:2] for reading in ours.full] == [(2, TOKENS), (1, TOKENS)]
    assert sum(shape[1] == 1 for shape in seen) == 2 * TOKENS * 3


def test_a_reading_that_fails_together_is_tried_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory suffices for the caches of two presses, but not of four."""
    model, presses = tiny_model("llama"), SHARING[1:6]
    expected = list(map(untimed, comparison(model).fidelities(presses)))
    groups: list[int] = []
    prefill = kvpress.prefill

    def short_of_memory(model: Any, presses: Sequence[Any], ids: Tensor, *arguments: Any) -> Any:
        groups.append(len(presses))
        if len(presses) > 2:
            raise torch.OutOfMemoryError("no memory for so many caches")
        return prefill(model, presses, ids, *arguments)

    monkeypatch.setattr(continuation.kvpress, "prefill", short_of_memory)
    assert list(map(untimed, comparison(model).fidelities(presses))) == expected
    assert groups == [6, 3, 2, 3, 2] * 2


def test_a_shared_reading_is_counted_evenly_and_the_press_itself_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    prefill = kvpress.prefill

    def timed(*arguments: Any) -> Any:
        return replace(prefill(*arguments), seconds=6.0, press_seconds=[0.5, 40.0, 1.0])

    monkeypatch.setattr(continuation.kvpress, "prefill", timed)
    caches = continuation.read_prompts(tiny_model("llama"), SHARING[:3], tokens(1, CONTEXT))
    assert {press: seconds for press, _, seconds in caches} == dict(zip(SHARING, (2.5, 42.0, 3.0), strict=False))


def test_the_press_at_fault_is_named() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match=r"press 'protect.*0:900': .*past a prompt of 96 tokens"):
        comparison(model).fidelities(["snapkv:0.5,window_size=8", "protect(knorm:0.5):tokens=0:900", "none"])
    broken = copy.deepcopy(model)
    with torch.no_grad():
        broken.lm_head.weight.fill_(torch.nan)
    with pytest.raises(EvalError, match="press 'none': NaN in the logits"):
        comparison(broken).fidelities(["snapkv:0.5,window_size=8"])
