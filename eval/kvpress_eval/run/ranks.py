# SPDX-License-Identifier: Apache-2.0
"""Tensor-parallel ranks of a worker: processes of one machine, each with a part of the heads of the model.

All ranks run the same parts of a run in the same order, and only rank 0 sends results. Ranks end together: a process whose
passes do not match those of the others would wait for them without end.
"""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from kvpress_eval.run.interrupt import Interrupt

MATCHING_SECONDS = 60
"""Seconds in which all ranks must fail, if one of them does."""


class Ranks:
    """Group of the ranks of a worker, as seen from one of them."""

    def __init__(self, rank: int, count: int, folder: str) -> None:
        """Join the ranks that meet in a folder; returns when all of them have."""
        os.environ.update(
            RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="localhost", MASTER_PORT="0"
        )
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(rank)
        meeting = (Path(folder) / "ranks").as_uri()
        dist.init_process_group("nccl" if on_gpu else "gloo", init_method=meeting, rank=rank, world_size=count)
        self._control = dist.new_group(backend="gloo")

    def agree(self, value: bool) -> bool:
        """Return the value of rank 0, which all ranks call this for."""
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self._control)
        return values[0]

    def match_failure(self) -> None:
        """Wait until all ranks have failed; end this process if one of them has not."""
        try:
            dist.monitored_barrier(self._control, timeout=timedelta(seconds=MATCHING_SECONDS))
        except RuntimeError:
            os._exit(1)


class SharedInterrupt(Interrupt):
    """Interrupt that all ranks see at the same point of their work, once it is requested from rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        super().__init__()

    @property
    def requested(self) -> bool:
        """Whether rank 0 is to stop; all ranks read this together."""
        return self._ranks.agree(self._is_requested)

    @requested.setter
    def requested(self, value: bool) -> None:
        self._is_requested = value


class Followers:
    """Processes of the ranks after the first, which end with it; rank 0 ends if one of them does."""

    def __init__(self, count: int, follow: Callable[..., None], arguments: Sequence[Any]) -> None:
        """Start `follow(rank, count, folder, parts, *arguments)` for each rank, with `parts` a connection to receive from."""
        context = get_context("spawn")
        self._folder = tempfile.TemporaryDirectory()
        self._parts: list[connection.Connection] = []
        ends = []
        for rank in range(1, count):
            receiving, sending = context.Pipe(duplex=False)
            process = context.Process(
                target=follow, args=(rank, count, self._folder.name, receiving, *arguments), daemon=True
            )
            process.start()
            receiving.close()
            self._parts.append(sending)
            ends.append(process.sentinel)
        end_with(ends)
        self.ranks = Ranks(0, count, self._folder.name)

    def send(self, part: Any) -> None:
        """Send a part of a run to each rank."""
        for sending in self._parts:
            sending.send(part)


def end_with_parent() -> None:
    """End this process as soon as the one that started it ends."""
    parent = parent_process()
    assert parent is not None  # noqa: S101 - ranks after the first are started by it
    end_with([parent.sentinel])


def end_with(sentinels: Sequence[Any]) -> None:
    """End this process as soon as another one ends, even if it waits for the other in a collective operation."""

    def watch() -> None:
        connection.wait(sentinels)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
