"""What a run survives, from the outside: kills, signals, damaged files, bad disks, racing processes, failing presses.

Faults inside the work come from a press, which is code that users write. Processes that are killed are forked from a server
that has imported everything, so that each costs a fraction of a second.
"""

from __future__ import annotations

import errno
import gc
import io
import json
import multiprocessing
import os
import random
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub.constants
import pytest
import torch
from kvpress_eval import environment, job, runner
from kvpress_eval.config import RunConfig
from kvpress_eval.console import app
from kvpress_eval.errors import DiskFullError, EvalError, OutputError
from kvpress_eval.models import Engine, load_engine
from kvpress_eval.runner import run
from kvpress_eval.store import read_rows
from rich.console import Console

import kvpress
from kvpress import registry
from kvpress.presses.base import view_of
from tests.eval.content import content

Small = Callable[..., RunConfig]

FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([__name__])


def work(config: RunConfig) -> None:
    """Run a configuration in a process of its own; its exit code is that of the run."""
    sys.exit(run(config, Console(file=io.StringIO())).exit_code)


def command(arguments: Sequence[str]) -> None:
    """Run the command line in a process of its own."""
    sys.stdout = sys.stderr = io.StringIO()
    app(arguments)


def without_network(arguments: Sequence[str], offline: bool) -> None:
    """Run the command line where no connection can be made, whether or not the hub's library was told so."""

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
    deadline = time.monotonic() + 60
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
    """Return what the run gives that nothing happens to."""
    whole = config.model_copy(update={"out": folder / "whole"})
    assert run(whole, Console(file=io.StringIO())).exit_code == 0
    return content(whole)


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


@cache
def bundled_model() -> Engine:
    return load_engine(RunConfig(lengths=(64,)))


@pytest.fixture(autouse=True)
def _load_the_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "load_engine", lambda config: bundled_model())


@dataclass
class SabotagedPress(kvpress.ScorerPress):
    """Does what a test tells it to do while it scores; it is told how many rows the batch has."""

    act: ClassVar[Callable[[int], None]]

    def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        type(self).act(view_of(kwargs).call.store.batch)
        return values.norm(dim=-1)


@pytest.fixture
def sabotage() -> Iterator[Callable[[Callable[[int], None]], None]]:
    """Makes the press `sabotaged` do something; it exists for one test."""
    kvpress.list_presses()
    kvpress.register("sabotaged", "evict")(SabotagedPress)

    def during(act: Callable[[int], None]) -> None:
        SabotagedPress.act = staticmethod(act)  # type: ignore[assignment]

    during(lambda rows: None)
    yield during
    del registry._entries["sabotaged"]


# Kills


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_kill_9_at_random_moments(small: Small, quiet: Console, tmp_path: Path) -> None:
    config = small(
        presses=("none", "random:0.5", "kivi:bits=4,residual_length=8"), tasks=("niah_single", "vt"), samples=10
    )
    rng = random.Random(9)  # noqa: S311  # reproducible, not secret
    for done in [0, *sorted(rng.sample(range(2, 45), 5))]:
        before = lines(config)
        process = start(work, config)
        wait_for(lambda done=done: count(config) >= done, process)  # type: ignore[misc]
        time.sleep(rng.uniform(0, 0.05))
        seen = count(config)
        process.kill()
        process.join()
        assert count(config) >= seen
        assert all(lines(config)[cell][: len(rows)] == rows for cell, rows in before.items())
        files = list(config.out.glob("cells/*/rows.jsonl"))
        assert sum(read_rows(path)[2] for path in files) <= 1
        assert not any(read_rows(path)[1] for path in files)
    kept = {line for rows in lines(config).values() for line in rows}
    assert 2 <= len(kept) < 60
    assert run(config, quiet).exit_code == 0
    assert kept < {line for rows in lines(config).values() for line in rows}
    assert content(config) == uninterrupted(config, tmp_path)


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_record_cut_off_anywhere_is_run_again(small: Small, quiet: Console) -> None:
    config = small(samples=2)
    run(config, quiet)
    whole, path = content(config), next(config.out.glob("cells/*/rows.jsonl"))
    record = path.read_bytes()
    last = record.rindex(b"\n", 0, -1) + 1
    for cut in random.Random(1).sample(range(last, len(record)), 6):  # noqa: S311  # reproducible, not secret
        path.write_bytes(record[:cut])
        assert run(config, quiet).exit_code == 0
        assert content(config) == whole


# Signals


@pytest.mark.parametrize(
    ("signals", "code"), [([signal.SIGINT], 130), ([signal.SIGINT] * 2, 130), ([signal.SIGTERM], 143)]
)
def test_signals_end_the_command_in_time(small: Small, quiet: Console, signals: list[int], code: int) -> None:
    config = small(presses=("none",), samples=40)
    process = start(command, options(config))
    wait_for(lambda: count(config) >= 2, process)
    for number in signals:
        assert process.pid is not None
        os.kill(process.pid, number)
        time.sleep(0.01)
    process.join(10)
    assert process.exitcode == code
    assert 2 <= count(config) < 40
    assert not any(read_rows(path)[2] for path in config.out.glob("cells/*/rows.jsonl"))
    assert run(config, quiet).exit_code == 0


def test_a_second_ctrl_c_leaves_the_model_as_it_was(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("none", "sabotaged:0.5"), samples=2)
    engine = bundled_model()
    attention, handler = engine.model.config._attn_implementation, signal.getsignal(signal.SIGINT)

    def twice(rows: int) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    sabotage(twice)
    with pytest.raises(KeyboardInterrupt):
        run(config, quiet)
    assert engine.model.config._attn_implementation == attention
    hooks = ("_forward_hooks", "_forward_pre_hooks")
    assert not any(getattr(module, name) for module in engine.model.modules() for name in hooks)
    assert signal.getsignal(signal.SIGINT) is handler
    sabotage(lambda rows: None)
    assert run(config, quiet).exit_code == 0


# Files


@pytest.mark.filterwarnings("ignore:.*moved . damaged rows", "ignore:.*dropped an unfinished last line")
@pytest.mark.parametrize("seed", range(4))
def test_a_flipped_byte_costs_only_its_rows(small: Small, quiet: Console, seed: int) -> None:
    config = small(presses=("none",), samples=4)
    run(config, quiet)
    whole, path = content(config), next(config.out.glob("cells/*/rows.jsonl"))
    damaged = bytearray(path.read_bytes())
    rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
    # The first seed hits the end of a line, so that two become one.
    position = damaged.index(b"\n") if seed == 0 else rng.randrange(len(damaged))
    damaged[position] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    good = {line for line in bytes(damaged).split(b"\n") if line in lines(config)[path.parent.name]}
    intact = [row["sample"] for row in read_rows(path)[0]]
    result = run(config, quiet)
    assert result.exit_code == 0
    assert 2 <= len(intact) < 4
    assert len(good) >= len(intact)
    assert sorted(map(str, content(config)[path.parent.name])) == sorted(map(str, whole[path.parent.name]))
    aside = path.with_suffix(".jsonl.corrupt").read_bytes().rstrip(b"\n")
    assert aside in bytes(damaged)


@pytest.mark.filterwarnings("ignore:.*moved . damaged rows", "ignore:.*not readable", "ignore:.*dropped an unfinished")
@pytest.mark.parametrize("name", ["rows.jsonl", "cell.json", "kept.json", "done.json"])
@pytest.mark.parametrize("damage", [b"", b"\xff\xfe\x00\n"])
def test_damaged_files_are_written_again(small: Small, quiet: Console, name: str, damage: bytes) -> None:
    config = small(samples=2)
    run(config, quiet)
    whole, path = content(config), next(config.out.glob("cells/*/rows.jsonl")).with_name(name)
    path.write_bytes(damage)
    result = run(config, quiet)
    assert result.exit_code == 0
    assert [len(cell.scores) for cell in result.cells] == [2, 2]
    assert content(config) == whole
    if damage and name != "done.json":
        assert path.with_name(f"{name}.corrupt").exists()


# Disks


class Disk:
    """A disk under `folder` with `room` for so many bytes; after that writing fails with an error of the system."""

    def __init__(self, folder: Path, room: int, error: int) -> None:
        self.folder, self.room, self.error = folder, room, error
        self.real = io.open

    def open(self, file: Any, mode: str = "r", *arguments: Any, **options: Any) -> Any:
        if not {*mode} & {*"wax+"} or self.folder not in Path(file).parents:
            return self.real(file, mode, *arguments, **options)
        buffered = io.BufferedWriter(_OnDisk(self, file, mode.replace("b", "")))
        return buffered if "b" in mode else io.TextIOWrapper(buffered, encoding="utf-8")


class _OnDisk(io.FileIO):
    """A file that gets as much as there is room for, as the last write to a full disk does."""

    def __init__(self, disk: Disk, file: Any, mode: str) -> None:
        self.disk = disk
        super().__init__(file, mode)

    def write(self, data: Any) -> int:
        taken = min(len(data), self.disk.room)
        if not taken:
            raise OSError(self.disk.error, os.strerror(self.disk.error))
        self.disk.room -= taken
        return super().write(bytes(data[:taken]))


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_disk_that_fills_up_again_and_again(
    small: Small, quiet: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(samples=4)
    rng, codes = random.Random(3), [DiskFullError.exit_code]  # noqa: S311  # reproducible, not secret
    while codes[-1] == DiskFullError.exit_code:
        disk = Disk(config.out, rng.randrange(200, 5000), errno.ENOSPC)
        monkeypatch.setattr(io, "open", disk.open)
        codes.append(exit_code(config))
        monkeypatch.setattr(io, "open", disk.real)
        for done in config.out.glob("cells/*/done.json"):
            rows, bad, torn = read_rows(done.with_name("rows.jsonl"))
            assert (len(rows), bad, torn) == (json.loads(done.read_text())["samples"], [], False)
    assert codes[-1] == 0
    assert len(codes) > 4
    assert content(config) == uninterrupted(config, tmp_path)


def test_damage_that_cannot_be_moved_aside(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(presses=("none",), samples=2)
    run(config, quiet)
    path = next(config.out.glob("cells/*/rows.jsonl"))
    path.write_bytes(b"damaged\n" + path.read_bytes())
    for room in (0, 4096):
        disk = Disk(path.parent, room, errno.ENOSPC)
        monkeypatch.setattr(io, "open", disk.open)
        with pytest.warns(UserWarning, match="moved 1 damaged rows"):
            assert exit_code(config) == (0 if room else 7)
        monkeypatch.setattr(io, "open", disk.real)
    assert path.with_suffix(".jsonl.corrupt").read_bytes() == b"damaged\n"


@pytest.mark.filterwarnings("ignore:.*dropped an unfinished last line")
def test_a_disk_that_becomes_read_only(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small()
    disk = Disk(config.out, 6000, errno.EROFS)
    monkeypatch.setattr(io, "open", disk.open)
    with pytest.raises(OutputError, match="Read-only file system") as stopped:
        run(config, quiet)
    assert stopped.value.exit_code == 4
    assert count(config) >= 1
    monkeypatch.setattr(io, "open", disk.real)
    assert run(config, quiet).exit_code == 0


def test_a_folder_that_vanishes(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("sabotaged:0.5",), samples=2)
    sabotage(lambda rows: shutil.rmtree(config.out, ignore_errors=True))
    with pytest.raises(OutputError, match="cannot write") as stopped:
        run(config, quiet)
    assert stopped.value.exit_code == 4
    sabotage(lambda rows: None)
    assert run(config, quiet).exit_code == 0


# Failing work


def fails(error: type[Exception]) -> Callable[[int], None]:
    def act(rows: int) -> None:
        raise error("broken")

    return act


@pytest.mark.parametrize("error", [ValueError, RecursionError, MemoryError])
def test_whatever_a_press_raises_costs_its_cell_only(
    small: Small, quiet: Console, sabotage: Any, error: type[Exception]
) -> None:
    config = small(presses=("none", "sabotaged:0.5", "knorm:0.5"), samples=2)
    sabotage(fails(error))
    result = run(config, quiet)
    none, broken, knorm = result.cells
    assert result.exit_code == 1
    assert none.complete
    assert knorm.complete
    assert not broken.scores
    assert broken.failure is not None
    assert broken.failure["status"] == "error"
    assert "in act" in broken.failure["details"]
    sabotage(lambda rows: None)
    assert run(config, quiet).exit_code == 0


def test_a_scorer_that_raises_costs_its_cell_only(
    small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small(presses=("none",), tasks=("niah_single", "vt"), samples=2)
    score = job.score

    def broken(query: Any, text: str) -> float:
        if len(query.answers) > 1 or "Let" in str(query):
            raise ZeroDivisionError("no answer")
        return score(query, text)

    monkeypatch.setattr(job, "score", broken)
    single, vt = run(config, quiet).cells
    assert single.complete
    assert vt.problem == "error: ZeroDivisionError: no answer"
    assert "in broken" in (vt.failure or {})["details"]


def live_bytes() -> int:
    """Return the bytes of all tensors that exist."""
    gc.collect()
    storages = [item.untyped_storage() for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def test_without_memory_a_batch_is_halved(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("none", "sabotaged:0.5"), samples=4, batch_size=4)
    attempts = []

    def at_most_two(rows: int) -> None:
        attempts.append(rows)
        if rows > 2:
            raise torch.OutOfMemoryError("4 rows are too many")

    sabotage(at_most_two)
    before = live_bytes()
    none, halved = run(config, quiet).cells
    assert none.complete
    assert halved.complete
    assert {row["batch_size"] for row in none.rows} == {4}
    assert {row["batch_size"] for row in halved.rows} == {2}
    assert attempts[0] == 4
    assert live_bytes() <= 1.01 * before + 2**16


def test_without_any_memory_the_next_cell_runs(small: Small, quiet: Console, sabotage: Any) -> None:
    config = small(presses=("sabotaged:0.5", "none"), samples=2, batch_size=2)
    sabotage(fails(torch.OutOfMemoryError))
    before = live_bytes()
    result = run(config, quiet)
    failed, none = result.cells
    assert result.exit_code == 1
    assert none.complete
    assert failed.problem == "oom: OutOfMemoryError: broken"
    assert (failed.failure or {})["peak_bytes"] > 2**20
    assert live_bytes() <= 1.01 * before + 2**16


def test_nan_while_decoding_is_never_a_score(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(config: RunConfig) -> Any:
        engine = load_engine(config)

        def spoil(module: Any, inputs: Any, output: torch.Tensor) -> torch.Tensor:
            return output * torch.nan if output.shape[1] == 1 else output

        engine.model.model.layers[1].mlp.register_forward_hook(spoil)
        return engine

    monkeypatch.setattr(runner, "load_engine", broken)
    result = run(small(presses=("none",)), quiet)
    assert result.exit_code == 1
    assert "nan: FloatingPointError: NaN in the logits" in str(result.cells[0].problem)
    assert not result.cells[0].scores


def test_a_slow_sample_times_out_alone(small: Small, quiet: Console, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small(presses=("none",), max_seconds_per_sample=2.0)

    def slow(config: RunConfig) -> Any:
        engine = load_engine(config)

        def wait(module: Any, inputs: Any) -> None:
            if count(config) == 1:
                time.sleep(1)

        engine.model.model.layers[1].mlp.register_forward_pre_hook(wait)
        return engine

    monkeypatch.setattr(runner, "load_engine", slow)
    result = run(config, quiet)
    assert [row["status"] for row in result.cells[0].rows] == ["ok", "timeout", "ok"]
    assert result.cells[0].problem == "1 timed out"


# The world outside


@pytest.mark.parametrize("offline", [True, False])
def test_a_hub_that_cannot_be_reached(small: Small, offline: bool) -> None:
    config = small(samples=1)
    start(time.sleep, 0).join()  # what processes are forked from has imported everything
    before = time.monotonic()
    process = start(without_network, [*options(config), "--model", "someone/a-model"], offline)
    process.join(30)
    assert process.exitcode == 3
    assert time.monotonic() - before < 10


def test_a_clock_that_runs_backwards(
    small: Small, quiet: Console, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small()
    whole = uninterrupted(config, tmp_path)
    seconds = iter(range(10**9, 0, -(10**6)))
    monkeypatch.setattr(time, "time", lambda: float(next(seconds)))
    for module in (job, environment):
        monkeypatch.setattr(module, "now", lambda: "1970-01-01T00:00:00+00:00")
    first, again = run(config, quiet), run(config, quiet)
    assert first.exit_code == again.exit_code == 0
    assert content(config) == whole
    # Two runs of the same second are two runs.
    assert first.record["run"] != again.record["run"]
    assert all(row["measured"]["prefill_seconds"] > 0 for cell in first.cells for row in cell.rows)


# Processes side by side


def test_eight_processes_race_for_cells_and_one_dies(small: Small, quiet: Console) -> None:
    depths = tuple(round(0.05 * step, 2) for step in range(20))
    presses = ("none", *(f"random:0.{tenths}" for tenths in range(1, 10)))
    config = small(presses=presses, depths=depths, samples=1, max_new_tokens=1)
    processes = [start(work, config) for _ in range(8)]
    wait_for(lambda: count(config) >= 10, processes[0])
    processes[0].kill()
    for process in processes:
        process.join(60)
    assert processes[0].exitcode == -signal.SIGKILL
    assert {process.exitcode for process in processes[1:]} <= {0, 5}
    result = run(config, quiet)
    assert result.exit_code == 0
    assert len(result.cells) == 200
    found = lines(config)
    assert len(found) == 200
    assert all(len(rows) == 1 for rows in found.values())
    assert len({json.loads(rows[0])["measured"]["run"] for rows in found.values()}) > 1
