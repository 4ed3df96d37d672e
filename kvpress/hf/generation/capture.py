# SPDX-License-Identifier: Apache-2.0
"""One decode step, recorded once and replayed for every token until something that it reads is replaced.

A step is static when it finds everything where it lay the time before: its inputs in fixed tensors, sealed pairs untouched,
and the fill of the open window counted on the device (`kvpress.cache.window.Cursor`). Nothing on the host takes part in it,
so what it launches can be replayed. Whatever a press or codec does about the new token happens outside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpress.kernels.triton import device as triton

SPARE = 256
"""Tokens by which a full window grows for a step that is to be replayed: every growth costs a recording."""

Outputs = dict[str, Tensor]
Step = Callable[[], Outputs]


class Recorder(Protocol):
    """Runs a static step, and makes it repeatable."""

    def warm(self, step: Step) -> Outputs:
        """Run the step once; what is compiled or cached on first use is ready afterwards."""

    def record(self, step: Step) -> Step:
        """Return the step as recorded, without having run it; every call overwrites the outputs of the one before."""


class GraphRecorder:
    """Records CUDA graphs on `device`; all share one pool of memory."""

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise ValueError(f"capture needs a CUDA device, but the model is on {device}; use capture=False")
        if not triton.available(torch.empty(0, device=device)):
            raise ValueError(
                f"capture needs the Triton kernels, which need triton and a GPU of compute capability "
                f"{'.'.join(map(str, triton.LEAST_CAPABILITY))} or later; use capture=False"
            )
        self.stream = torch.cuda.Stream(device)
        self.graph: torch.cuda.CUDAGraph | None = None

    def warm(self, step: Step) -> Outputs:
        # On the stream that records, whose matrix library has to have its workspace before.
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = step()
        current.wait_stream(self.stream)
        return outputs

    def record(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # The graph before lives until this one shares its pool: a pool without graphs cannot be joined.
        pool = None if self.graph is None else self.graph.pool()
        try:
            with torch.cuda.graph(graph, pool=pool, stream=self.stream, capture_error_mode="thread_local"):
                outputs = step()
        except RuntimeError as error:
            raise RuntimeError(
                "the decode step of this model cannot be recorded as a CUDA graph, probably because it waits for the "
                "device; use capture=False"
            ) from error
        self.graph = graph

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay


class Replay:
    """Runs `step(inputs, settings)`: at first as it is, from the second time on recorded.

    `state` names the objects that the step reads and writes in place. A call with other ones, other settings or inputs of
    other shapes starts afresh.
    """

    def __init__(self, recorder: Recorder, step: Callable[[dict[str, Tensor], dict[str, Any]], Outputs]) -> None:
        self.recorder = recorder
        self.step = step
        self.forget()

    def forget(self) -> None:
        """Let go of the step and of all that it reads."""
        self.state: Sequence[object] = ()
        self.inputs: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {}
        self.replay: Step | None = None

    def __call__(self, state: Sequence[object], inputs: dict[str, Tensor], settings: dict[str, Any]) -> Outputs:
        """Run one step and return its outputs, which are the caller's to keep."""
        if not self._continues(state, inputs, settings):
            self.forget()
            self.state, self.settings = state, settings
            self.inputs = {name: tensor.clone() for name, tensor in inputs.items()}
            return self.recorder.warm(self._run)
        for name, tensor in inputs.items():
            self.inputs[name].copy_(tensor)
        if self.replay is None:
            self.replay = self.recorder.record(self._run)
        return {name: tensor.clone() for name, tensor in self.replay().items()}

    def _run(self) -> Outputs:
        return self.step(self.inputs, self.settings)

    def _continues(self, state: Sequence[object], inputs: dict[str, Tensor], settings: dict[str, Any]) -> bool:
        return (
            len(state) == len(self.state)
            and all(new is old for new, old in zip(state, self.state, strict=True))
            and settings == self.settings
            and _shapes(inputs) == _shapes(self.inputs)
        )


def _shapes(inputs: dict[str, Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in inputs.items()}
