# SPDX-License-Identifier: Apache-2.0
"""Runs in this process and in other processes, and the rows they have written.

Processes to be killed are forked from a server that has imported everything, so that each costs a fraction of a second.
"""

from __future__ import annotations

import errno
import io
import multiprocessing
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import huggingface_hub.constants
from kvpress_eval.common.errors import EvalError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.console import app
from kvpress_eval.run.runner import run
from rich.console import Console

from tests.eval.content import content

Small = Callable[..., RunConfig]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])
PATIENCE = 600
"""Seconds after which a process counts as hanging."""


def work(config: RunConfig) -> None:
    """Run a configuration in a process of its own; its exit code is that of the run."""
    sys.exit(run(config, Console(file=io.StringIO())).exit_code)


def command(arguments: Sequence[str]) -> None:
    """Run the command line in a process of its own."""
    sys.stdout = sys.stderr = io.StringIO()
    app(arguments)


def without_network(arguments: Sequence[str], offline: bool) -> None:
    """Run the command line with all connections refused, with or without the offline mode of the hub's library."""

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise OSError(errno.ENETUNREACH, "Network is unreachable")

    huggingface_hub.constants.HF_HUB_OFFLINE = offline
    socket.getaddrinfo = socket.socket.connect = refuse  # type: ignore[method-assign,assignment]
    command(arguments)


def start(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    process = FORKS.Process(target=target, args=arguments, daemon=True)
    process.start()
    return process


def wait_for(happened: Callable[[], bool], process: BaseProcess) -> None:
    """Wait until something has happened, however slow the machine is, or the process has ended."""
    deadline = time.monotonic() + PATIENCE
    while not happened() and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.002)


def lines(config: RunConfig) -> dict[str, list[bytes]]:
    """Return the finished lines of every cell."""
    files = config.out.glob("cells/*/rows.jsonl")
    return {path.parent.name: path.read_bytes().split(b"\n")[:-1] for path in files}


def count(config: RunConfig) -> int:
    return sum(map(len, lines(config).values()))


def uninterrupted(config: RunConfig, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the contents of an undisturbed run."""
    undisturbed = config.model_copy(update={"out": folder / "whole"})
    assert run(undisturbed, Console(file=io.StringIO())).exit_code == 0
    return content(undisturbed)


def exit_code(config: RunConfig) -> int:
    """Return the exit code with which the command would end."""
    try:
        return run(config, Console(file=io.StringIO())).exit_code
    except EvalError as error:
        return error.exit_code


def options(config: RunConfig) -> list[str]:
    """Return the command line of a configuration."""
    presses = [option for press in config.presses for option in ("--press", press)]
    numbers = ["--samples", str(config.samples), "--max-new-tokens", str(config.max_new_tokens), "--threads", "1"]
    lengths = ["--lengths", ",".join(map(str, config.lengths)), "--tasks", ",".join(config.tasks)]
    return ["eval", *presses, *lengths, *numbers, "--out", str(config.out)]
