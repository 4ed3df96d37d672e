"""Replayed decode steps give the tokens that steps run one by one give, and nothing on the host takes part in them.

No GPU is needed: `Tape` repeats recorded operators on the tensors of the recording, as a CUDA graph does. Replaying one is
wrong exactly where a graph would be: where a step depends on a number, a shape or an object of the host.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cache
from types import FrameType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from kvpress.hf.session import session
from kvpress.kernels.cpu import launch
from tests.models import COMMON, FAMILIES, fingerprint, padded_batch, tiny_model, tokens
from tests.pairwise import every_pair

pytestmark = pytest.mark.skipif(not launch.available(torch.empty(0)), reason="no C++ compiler on this machine")

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}
KIVI = "kivi:bits=4,group_size=16,residual_length=16"
QUEST = "quest:budget=32,page_size=8,skip_layers=0"
SPECS = {
    "off": "snapkv:0",
    "snapkv": "snapkv:0.5,window_size=4",
    "kivi": KIVI,
    "quest": QUEST,
    "kivi-quest": f"{KIVI} + {QUEST}",
    "ragged": "adakv(snapkv:0.5,window_size=4)",
    "schedule": "decoding(knorm):compression_interval=30,target_size=40",
}
PROMPTS = {"one": (tokens(1, 50), None), "padded": padded_batch([50, 31, 44])}


class Tape(TorchDispatchMode):
    """Operators and compiled kernels in the order they ran, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.launch = launch.run

    def __enter__(self) -> Tape:
        def recorded(*args: Any, **kwargs: Any) -> int:
            self.operators.append((self.launch, args, kwargs, None))
            return self.launch(*args, **kwargs)

        launch.run = recorded  # torch does not see what compiled kernels do
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        launch.run = self.launch
        super().__exit__(*args)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in WAITS and not checks_arguments():
            raise RuntimeError(f"{func} waits for the device")
        for value, argument in zip(args, func._schema.arguments, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.before.setdefault(id(value), (value, value.clone()))
        result = func(*args, **(kwargs or {}))
        self.operators.append((func, args, kwargs or {}, result))
        return result

    def undo(self) -> None:
        """Take back what was written: recording a graph runs nothing."""
        for tensor, value in reversed(self.before.values()):
            tensor.copy_(value)

    def replay(self) -> None:
        for func, args, kwargs, result in self.operators:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def checks_arguments() -> bool:
    """Whether a kernel is reading a value: on the CPU they check their arguments, on a GPU they do not."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "/kvpress/kernels/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class TapeRecorder:
    """Stands in for CUDA graphs; counts what was done."""

    def __init__(self) -> None:
        self.warmed = self.recorded = self.replayed = 0

    def warm(self, step: Callable[[], Any]) -> Any:
        self.warmed += 1
        return step()

    def record(self, step: Callable[[], Any]) -> Callable[[], Any]:
        self.recorded += 1
        with Tape() as tape:
            outputs = step()
        tape.undo()

        def replay() -> Any:
            self.replayed += 1
            tape.replay()
            return outputs

        return replay


@cache
def model_of(family: str, layers: int = 2) -> Any:
    """A random model of a family, without sliding windows."""
    settings = {**COMMON, **FAMILIES[family], "num_hidden_layers": layers, "sliding_window": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


def generate(model: Any, ids: Tensor, mask: Tensor | None, **settings: Any) -> Any:
    settings = {"max_new_tokens": 101, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(ids, attention_mask=mask, **settings)


def assert_same_caches(found: Any, expected: Any) -> None:
    for ours, theirs in zip(found.layers, expected.layers, strict=True):
        assert ours.store.stored() == theirs.store.stored()
        for part, other in zip(
            [*ours.store.segments, ours.store.open_segment(None)],
            [*theirs.store.segments, theirs.store.open_segment(None)],
            strict=True,
        ):
            assert torch.equal(part.slots(), other.slots())
            assert all(map(torch.equal, part.read(slice(None)), other.read(slice(None))))


# -- the same tokens ------------------------------------------------------------------------------------------


@every_pair(
    lambda row: row.get("family", "llama") == "llama" or row.get("spec") not in ("quest", "schedule"),
    family=["llama", "qwen3", "mistral", "phi3"],
    spec=SPECS,
    prompt=PROMPTS,
)
def test_same_tokens_and_same_cache(family: str, spec: str, prompt: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvpress.hf.replay.SPARE", 40)
    model, press, recorder = model_of(family), kvpress.get_press(spec), TapeRecorder()
    with press(model):
        expected = generate(model, *prompt)
    with session(press, model, recorder=recorder):
        found = generate(model, *prompt)
    assert torch.equal(found.sequences, expected.sequences)
    assert_same_caches(found.past_key_values, expected.past_key_values)
    assert recorder.recorded > 1, "no window grew and no tile was encoded"
    assert recorder.replayed >= 100 - recorder.warmed >= 85


def test_sampling_and_several_sequences() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["snapkv"])
    settings = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 20}
    found = []
    for recorder in (None, TapeRecorder()):
        torch.manual_seed(3)
        with session(press, model, recorder=recorder):
            found.append(generate(model, *PROMPTS["padded"], **settings).sequences)
    assert torch.equal(*found)


def test_reading_a_compressed_context() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["ragged"])
    context, question = tokens(1, 40), tokens(1, 6, seed=5)
    ids = torch.cat([context, question], dim=1)
    found = []
    for recorder in (None, TapeRecorder()):
        cache = DynamicCache(config=model.config)
        with press(model):
            model(context, past_key_values=cache)
        with session(kvpress.NonePress(), model, evict=False, recorder=recorder):
            found.append(generate(model, ids, None, past_key_values=cache).sequences)
    assert torch.equal(*found)


# -- what a replayed step depends on --------------------------------------------------------------------------


def test_a_recorded_step_runs_again_without_the_host() -> None:
    """Ten tokens through the recorded step alone, while every counter of the host stands still."""
    model, press = model_of("qwen3"), kvpress.get_press(SPECS["ragged"])
    ids, mask = PROMPTS["padded"]
    new = tokens(3, 12, seed=8)
    caches = [DynamicCache(config=model.config) for _ in range(2)]
    positions = mask.sum(dim=1, keepdim=True)
    grown = [torch.cat([mask, torch.ones(3, t, dtype=mask.dtype)], dim=1) for t in range(13)]

    def read(cache: Any, t: int) -> Tensor:
        return model(
            new[:, t : t + 1], attention_mask=grown[t + 1], position_ids=positions + t, past_key_values=cache
        ).logits

    with press(model):
        model(ids, attention_mask=mask, past_key_values=caches[0])
        expected = [read(caches[0], t) for t in range(12)]
    with session(press, model, recorder=TapeRecorder()) as opened:
        model(ids, attention_mask=mask, past_key_values=caches[1])
        found = [read(caches[1], t) for t in range(2)]
        replay, seen = opened.captured.replay, caches[1].get_seq_length()
        for t in range(2, 12):
            replay.inputs["input_ids"].copy_(new[:, t : t + 1])
            replay.inputs["position_ids"].copy_(positions + t)
            found.append(replay.replay()["logits"].clone())
        assert caches[1].get_seq_length() == seen
    assert all(map(torch.equal, found, expected))


def test_outputs_are_the_callers_to_keep() -> None:
    model, press = model_of("llama"), kvpress.get_press("none")
    found = []
    for recorder in (None, TapeRecorder()):
        with session(press, model, recorder=recorder):
            cache = model(tokens(1, 20), use_cache=True).past_key_values
            outputs = [model(tokens(1, 1, seed=t), past_key_values=cache) for t in range(6)]
        assert all(output.past_key_values is cache for output in outputs)
        found.append(torch.cat([output.logits for output in outputs]))
    assert torch.equal(*found)
    assert type(outputs[-1]) is type(outputs[0])


@pytest.mark.parametrize("spec", ["off", "kivi-quest", "ragged"])
def test_calls_that_are_no_plain_step_fall_in_between(spec: str) -> None:
    """A turn, hidden tokens, other rows and another cache, each between steps that are replayed."""
    model, press = model_of("llama"), kvpress.get_press(SPECS[spec])
    ids, mask = PROMPTS["padded"]

    def conversation() -> list[Tensor]:
        real, logits = mask, []
        caches = [DynamicCache(config=model.config) for _ in range(2)]

        def read(new: Tensor, which: int = 0, hidden: int = 0) -> None:
            nonlocal real
            if not which:
                real = torch.cat([real, torch.ones(real.shape[0], new.shape[1], dtype=mask.dtype)], dim=1)
            shown = real.clone()
            shown[:, 20 : 20 + hidden] = 0
            logits.append(model(new, attention_mask=None if which else shown, past_key_values=caches[which]).logits)

        model(ids, attention_mask=mask, past_key_values=caches[0])
        model(tokens(1, 30), past_key_values=caches[1])
        for t in range(4):
            read(tokens(3, 1, seed=t))
        read(tokens(3, 5, seed=20))
        for t in range(4):
            read(tokens(3, 1, seed=30 + t))
        read(tokens(3, 1, seed=40), hidden=3)
        for t in range(6):
            read(tokens(1 if t % 2 else 3, 1, seed=50 + t), which=t % 2)
        caches[0].batch_select_indices(torch.tensor([2, 0]))
        real = real[[2, 0]]
        for t in range(4):
            read(tokens(2, 1, seed=60 + t))
        caches[0] = copy.deepcopy(caches[0])
        caches[0].crop(-1)
        real = real[:, :-1]
        for t in range(4):
            read(tokens(2, 1, seed=70 + t))
        return logits

    recorder = TapeRecorder()
    with press(model):
        expected = conversation()
    with session(press, model, recorder=recorder):
        found = conversation()
    assert recorder.replayed >= 8
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_captured_cache_lives_on_without_capture() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["kivi"])
    found = []
    for recorder in (None, TapeRecorder()):
        with session(press, model, recorder=recorder):
            first = generate(model, *PROMPTS["one"], max_new_tokens=7)
        with press(model):
            found.append(generate(model, first.sequences, None, past_key_values=first.past_key_values).sequences)
    assert torch.equal(*found)


def test_a_generate_leaves_no_cache_behind() -> None:
    model, press = model_of("llama"), kvpress.get_press("none")
    before = fingerprint(model)
    with session(press, model, recorder=TapeRecorder()) as opened:
        generate(model, *PROMPTS["one"], max_new_tokens=5)
        assert not opened.captured.calls
        assert not opened.captured.replay.state
        assert opened.captured.replay.replay is None
    assert fingerprint(model) == before


def test_memory_of_the_counters_is_reported() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["snapkv"])
    with session(press, model, recorder=TapeRecorder()):
        cache = generate(model, *PROMPTS["padded"], max_new_tokens=5).past_key_values
    store = cache.layers[0].store
    counters = {tensor.data_ptr() for tensor in store.window.cursor.tensors()}
    assert counters <= {tensor.data_ptr() for parts in store.tensors().values() for tensor in parts}


@pytest.mark.parametrize("blocks", [1, 2], ids=["one block", "a block each"])
def test_threads_replay_steps_of_their_own(blocks: int) -> None:
    """One after the other: a tape records whatever runs meanwhile, in other threads too."""
    model, press = model_of("llama"), kvpress.get_press(SPECS["kivi"])
    prompts = [tokens(1, 30), tokens(2, 22, seed=1)]

    @torch.no_grad()
    def start(ids: Tensor) -> Any:
        return model(ids, use_cache=True).past_key_values

    @torch.no_grad()
    def step(ids: Tensor, held: Any, number: int) -> Tensor:
        return model(tokens(len(ids), 1, seed=number), past_key_values=held).logits

    with press(model):
        caches = [start(ids) for ids in prompts]
        expected = [step(*pair, n) for n in range(12) for pair in zip(prompts, caches, strict=True)]
    recorders = [TapeRecorder() for _ in range(blocks)]
    with ExitStack() as stack:
        pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in prompts]
        opened = [session(press, model, recorder=recorder) for recorder in recorders]
        for pool, block in zip(pools, opened, strict=False):
            (pool.submit(block.__enter__) if blocks > 1 else pool.submit(int)).result()
        if blocks == 1:
            stack.enter_context(opened[0])
        caches = [pool.submit(start, ids).result() for pool, ids in zip(pools, prompts, strict=True)]
        found = [
            pool.submit(step, ids, held, n).result()
            for n in range(12)
            for pool, ids, held in zip(pools, prompts, caches, strict=True)
        ]
        for pool, block in zip(pools, opened if blocks > 1 else [], strict=False):
            pool.submit(block.__exit__, None, None, None).result()
    assert all(map(torch.equal, found, expected))
    assert sum(recorder.replayed for recorder in recorders) >= 12


def test_a_captured_cache_goes_from_mode_to_mode() -> None:
    model, press = model_of("llama"), kvpress.get_press(SPECS["snapkv"])
    found = []
    for recorder in (None, TapeRecorder()):
        logits, held = [], DynamicCache(config=model.config)
        with session(press, model, recorder=recorder):
            for n, mode in enumerate((torch.inference_mode, torch.no_grad, torch.inference_mode, torch.no_grad)):
                with mode():
                    for part in range(5):
                        new = tokens(1, 1 if n or part else 30, seed=10 * n + part)
                        logits.append(model(new, past_key_values=held).logits.clone())
        found.append(torch.cat(logits, dim=1))
    assert torch.equal(*found)


# -- what is refused ------------------------------------------------------------------------------------------


def refused(model: Any, press: Any, words: str) -> None:
    before = fingerprint(model)
    with pytest.raises(ValueError, match=words), session(press, model, recorder=TapeRecorder()):
        pass
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("family", "kind"),
    [("gemma3_text", "sliding_attention"), ("gpt_oss", "sliding_attention"), ("qwen3_next", "linear_attention")],
)
def test_models_with_other_layers_are_refused(family: str, kind: str) -> None:
    model = tiny_model(family, "eager")
    refused(model, kvpress.get_press("knorm:0.5"), f"{type(model).__name__} has {kind} layers.*capture=False")


@pytest.mark.parametrize("spec", ["h2o:0.5", "decoding(snapkv)", "decoding(tova)"])
def test_presses_that_watch_every_token_are_refused(spec: str) -> None:
    refused(model_of("llama"), kvpress.get_press(spec), "watches every generated token.*capture=False")


def test_positions_that_change_on_the_host_are_refused() -> None:
    settings = {**COMMON, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}}
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**settings)).eval()
    refused(model, kvpress.get_press("none"), "rotary embedding.*capture=False")


def test_other_devices_are_refused() -> None:
    model = model_of("llama")
    before = fingerprint(model)
    for enter in (
        lambda: kvpress.get_press("none")(model, capture=True),
        lambda: kvpress.reading(model, capture=True),
    ):
        with (
            pytest.raises(ValueError, match="needs a CUDA device, but the model is on cpu; use capture=False"),
            enter(),
        ):
            pass
    assert fingerprint(model) == before


@pytest.mark.parametrize(
    ("settings", "words"),
    [({"num_beams": 2}, "num_beams=2"), ({"output_hidden_states": True}, "output_hidden_states")],
    ids=["beams", "hidden states"],
)
def test_ways_of_generating_that_cannot_be_replayed(settings: dict[str, Any], words: str) -> None:
    model = model_of("llama")
    ran: list[int] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with session(kvpress.get_press("none"), model, recorder=TapeRecorder()):
        with pytest.raises(ValueError, match=f"{words}.*capture=False"):
            generate(model, *PROMPTS["one"], **settings)
        assert not ran
        generate(model, *PROMPTS["one"], max_new_tokens=3)
    handle.remove()


# -- on a GPU -------------------------------------------------------------------------------------------------


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("spec", SPECS)
def test_graphs_give_the_same_tokens(spec: str, prompt: str) -> None:
    model, press = copy.deepcopy(model_of("llama")).cuda(), kvpress.get_press(SPECS[spec])
    ids, mask = (None if part is None else part.cuda() for part in PROMPTS[prompt])
    with press(model):
        expected = generate(model, ids, mask)
    with press(model, capture=True):
        found = generate(model, ids, mask)
    assert torch.equal(found.sequences, expected.sequences)
