# SPDX-License-Identifier: Apache-2.0
"""A replacement of CUDA graphs that repeats recorded operators on the tensors of the recording.

A replay is wrong exactly where a graph's would be: where a step depends on a number, a shape or an object of the host.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from kvpress.kernels.cpu import launch
from tests.models import COMMON, FAMILIES, padded_batch, tokens

WAITS = {torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default, torch.ops.aten.nonzero.default}
KIVI = "kivi:bits=4,group_size=16,residual_length=16"
QUEST = "quest:budget=32,page_size=8,skip_layers=0"
SPECS = {
    "off": "snapkv:0",
    "snapkv": "snapkv:0.5,window_size=4",
    "kivi": KIVI,
    "merged": "minicache:group_size=8,retained=0.2,first_layer=0",
    "quest": QUEST,
    "kivi-quest": f"{KIVI} + {QUEST}",
    "ragged": "adakv(snapkv:0.5,window_size=4)",
    "schedule": "decoding(knorm):compression_interval=30,target_size=40",
}
PROMPTS = {"one": (tokens(1, 50), None), "padded": padded_batch([50, 31, 44])}


class Tape(TorchDispatchMode):
    """Operators and compiled kernels in execution order, with the tensors that they read and wrote."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.launch = launch.call

    def __enter__(self) -> Tape:
        def recorded(*args: Any, **kwargs: Any) -> int:
            self.operators.append((self.launch, args, kwargs, None))
            return self.launch(*args, **kwargs)

        launch.call = recorded  # torch does not record writes of compiled kernels
        return super().__enter__()

    def __exit__(self, *args: Any) -> None:
        launch.call = self.launch
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
        """Undo all writes: recording a graph runs nothing."""
        for tensor, value in reversed(self.before.values()):
            tensor.copy_(value)

    def replay(self) -> None:
        for func, args, kwargs, result in self.operators:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def checks_arguments() -> bool:
    """Return whether a kernel reads a value: kernels check their arguments on the CPU, but not on a GPU."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and "/kvpress/kernels/" not in frame.f_code.co_filename:
        frame = frame.f_back
    return frame is not None


class TapeRecorder:
    """Replacement of CUDA graphs that counts recordings and replays."""

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
    """Return a random model of a family, without sliding windows."""
    settings = {**COMMON, **FAMILIES[family], "num_hidden_layers": layers, "sliding_window": None}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[family](**settings), dtype=torch.float32)
    model.generation_config.eos_token_id = None
    return model.eval()


STEPS = 60


def generate(model: Any, ids: Tensor, mask: Tensor | None, **settings: Any) -> Any:
    settings = {"max_new_tokens": STEPS + 1, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(ids, attention_mask=mask, **settings)


def assert_same_caches(actual: Any, expected: Any) -> None:
    for ours, theirs in zip(actual.layers, expected.layers, strict=True):
        assert ours.store.stored() == theirs.store.stored()
        for part, twin in zip(
            [*ours.store.segments, ours.store.open_segment(None)],
            [*theirs.store.segments, theirs.store.open_segment(None)],
            strict=True,
        ):
            assert torch.equal(part.slots(), twin.slots())
            assert all(map(torch.equal, part.read(slice(None)), twin.read(slice(None))))
