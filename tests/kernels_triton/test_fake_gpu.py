# SPDX-License-Identifier: Apache-2.0
"""Launches on GPUs that this machine lacks: within the limits of the chip, without a spill, and without a host read of a value.

A sample: `make gpu-dry` launches everything on every chip. Tensors of `meta` have no memory and no values.
"""

from __future__ import annotations

import pytest
import torch

from kvpress import kernels
from kvpress.kernels import Dense

pytest.importorskip("triton", reason="triton is not installed")

from tests.fakegpu import FakeDriver, LaunchError, fake_gpu
from tests.fakegpu.driver import Function, Launcher
from tests.fakegpu.operators import LARGE, OPERATORS, Shape, empty, queries, ranges
from tests.fakegpu.steps import PRESSES, decode_step

FITTING = ("a million tokens", "32 rows of 128k", "128 heads")
"""Sizes that use the kernels of a small problem, which are compiled once."""


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_launch_at_every_size_and_read_no_values(name: str) -> None:
    with fake_gpu(90) as gpu:
        for shape in (Shape(), *(LARGE[size] for size in FITTING)):
            before = len(gpu.launches)
            OPERATORS[name](shape)
            assert len(gpu.launches) > before
    assert not gpu.spilling()


@pytest.mark.parametrize("chip", [80, 100])
@pytest.mark.parametrize("name", ["dense", "packed"])
def test_attention_launches_on_older_and_newer_chips(name: str, chip: int) -> None:
    with fake_gpu(chip) as gpu:
        OPERATORS[name](Shape(channels=128))
    assert gpu.launches
    assert not gpu.spilling()


def test_weights_of_a_large_batch_are_summed_up() -> None:
    """Sum the weights of 16 prompts of 32k tokens, 8 heads, the newest 64 tokens as queries."""
    with fake_gpu(90) as gpu:
        OPERATORS["mass"](Shape(batch=16, heads=8, tokens=2**15, queries=4 * 64))
    assert gpu.counts()["mass"] == 1


def test_scores_have_the_width_of_the_capacity_without_a_host_read() -> None:
    small = Shape()
    labels = Dense(empty(small.rows, small.channels))
    with fake_gpu(90):
        scores = kernels.label_scores(queries(small), labels, ranges(small), capacity=300)
        assert scores.shape == (small.streams, 300)
        with pytest.raises(RuntimeError, match="meta"):
            kernels.label_scores(queries(small), labels, ranges(small))


@pytest.mark.parametrize("name", ["none", "kivi", "quest", "frontier"])
def test_a_decode_step_of_a_press_launches_few_kernels(name: str) -> None:
    with fake_gpu(90) as gpu:
        step = decode_step(PRESSES[name])
    layers = 3
    count = sum(step.values())
    assert 0 < count <= 7 * layers
    assert not [launch for launch in gpu.launches[-count:] if launch.spills]
    # Chunks that are read again attend with 64 queries a program, which have causal limits.
    assert all(launch.kernel == "dense" and launch.spills <= 24 for launch in gpu.spilling())


# -- the driver itself ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("blocks", "message"),
    [
        ((2**31, 1, 1), "with 2147483648 blocks on axis x, which takes 1 to 2147483647"),
        ((1, 65536, 1), "with 65536 blocks on axis y, which takes 1 to 65535"),
        ((1, 1, 65536), "with 65536 blocks on axis z, which takes 1 to 65535"),
    ],
)
def test_a_grid_that_is_too_large_is_refused(blocks: tuple[int, int, int], message: str) -> None:
    launcher = Launcher("mass", 128, 0)
    with fake_gpu(90) as gpu, pytest.raises(LaunchError, match=message):
        launcher(*blocks, 0, Function(32, 0))
    assert not gpu.launches


@pytest.mark.parametrize(
    ("threads", "registers", "message"),
    [
        (2048, 16, "with 2048 threads a block, which has 1024"),
        (512, 160, "needs 160 registers for each of 512 threads"),
    ],
)
def test_a_block_that_is_too_large_is_refused(threads: int, registers: int, message: str) -> None:
    with fake_gpu(90), pytest.raises(LaunchError, match=message):
        Launcher("mass", threads, 0)(1, 1, 1, 0, Function(registers, 0))


def test_shared_memory_is_that_of_the_chip() -> None:
    assert [_shared(chip) for chip in (80, 90, 120)] == [166_912, 232_448, 101_376]


def _shared(chip: int) -> int:
    with fake_gpu(chip) as gpu:
        return gpu.utils.get_device_properties(0)["max_shared_mem"]


def test_tensors_of_a_launch_lie_on_one_device() -> None:
    launcher, tensors = Launcher("dense", 128, 0), (torch.empty(1), torch.empty(1, device="meta"))
    with fake_gpu(90), pytest.raises(LaunchError, match="with tensors of cpu and meta; use one device"):
        launcher(1, 1, 1, 0, Function(32, 0), tensors)


def test_an_empty_grid_launches_nothing_and_the_driver_is_gone_afterwards() -> None:
    from kvpress.kernels.triton import device
    from tests.fakegpu.driver import active_driver

    before = active_driver._active
    with fake_gpu(90) as gpu:
        Launcher("dense", 128, 0)(0, 1, 1, 0, Function(32, 0))
        assert isinstance(active_driver.active, FakeDriver)
    assert not gpu.launches
    assert active_driver._active is before
    assert not device.available(torch.empty(1))
