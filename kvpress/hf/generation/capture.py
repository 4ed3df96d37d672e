# SPDX-License-Identifier: Apache-2.0
"""Record a decode step once, and replay it for every token until a tensor that it reads is replaced.

A step is static if all its tensors stay at their addresses: inputs in fixed tensors, sealed pairs unchanged, and the length of
the window counted on the device (`kvpress.cache.window.Cursor`). The step does no work on the host, so its kernels can be
replayed. Eviction and encoding run outside the step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from kvpress.kernels.triton import device as triton

SPARE = 256
"""Tokens by which a full window grows during capture; every growth costs a new recording."""

Outputs = dict[str, Tensor]
Step = Callable[[], Outputs]


class Recorder(Protocol):
    """Recorder of static steps."""

    def warm(self, step: Step) -> Outputs:
        """Run the step once, so that kernels are compiled and caches filled before recording."""

    def record(self, step: Step) -> Step:
        """Return the recorded step without running it. Every call overwrites the outputs of the last."""


class GraphRecorder:
    """Recorder of CUDA graphs on `device`; all graphs share one memory pool."""

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
        # Run on the recording stream, so that cuBLAS allocates its workspace for it before recording.
        current = torch.cuda.current_stream(self.stream.device)
        self.stream.wait_stream(current)
        with torch.cuda.stream(self.stream):
            outputs = step()
        current.wait_stream(self.stream)
        return outputs

    def record(self, step: Step) -> Step:
        graph = torch.cuda.CUDAGraph()
        # Keep the last graph until this one shares its pool, since a pool without graphs is freed.
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
    """Runner of `step(inputs, settings)`: the first call runs it, the second records it, later calls replay it.

    `state` has the objects that the step reads and writes in place. A call with other objects, settings or input shapes starts
    over.
    """

    def __init__(self, recorder: Recorder, step: Callable[[dict[str, Tensor], dict[str, Any]], Outputs]) -> None:
        self.recorder = recorder
        self.step = step
        self.forget()

    def forget(self) -> None:
        """Release the recording and all tensors that it reads."""
        self.state: Sequence[object] = ()
        self.inputs: dict[str, Tensor] = {}
        self.settings: dict[str, Any] = {}
        self.replay: Step | None = None

    def __call__(self, state: Sequence[object], inputs: dict[str, Tensor], settings: dict[str, Any]) -> Outputs:
        """Run one step and return its outputs, as copies that the caller may keep."""
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
