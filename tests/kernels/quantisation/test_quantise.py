# SPDX-License-Identifier: Apache-2.0
"""Quantisation: every level gives the bits of the reference, and the reference rounds to the nearest values."""

from __future__ import annotations

import pytest
import torch

from kvpress.kernels import counters, quantise, reset_counters
from kvpress.kernels.quantisation import cpu, reference
from tests.kernels import emulated
from tests.kernels.compiler import LEVELS, needs_compiler

BITS = [1, 2, 3, 4, 8]


@needs_compiler
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(32, 1), (1, 8), (1, 32), (7, 16), (64, 4), (1, 1), (1000, 96)])
def test_every_level_gives_the_bits_of_the_reference(level: str, bits: int, group: tuple[int, int]) -> None:
    fewer = level == emulated.LEVEL  # each call starts an emulator
    for rows, dim in ((33, 96),) if fewer else ((0, 96), (1, 96), (33, 96), (129, 192)):
        for dtype in (torch.bfloat16,) if fewer else (torch.float32, torch.bfloat16, torch.float16):
            # Rows of very different sizes: subnormal scales, zeros that round past the largest value, constant groups.
            x = torch.randn(rows, dim + 3) * 10 ** torch.empty(rows, 1).uniform_(-8, 4)
            x[::5, : dim // 2] = 3.0
            x = x[:, :dim].to(dtype)
            for parameters in (torch.float16, torch.float32):
                ours, largest = cpu.encode(x, bits, group, parameters, level)
                expected, expected_largest = reference.encode(x, bits, group, parameters)
                pairs = [(getattr(ours, name), getattr(expected, name)) for name in ("codes", "scale", "zero")]
                for a, b in [*pairs, (largest, expected_largest)]:
                    assert a.dtype == b.dtype
                    assert torch.equal(a, b)


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [(32, 1), (1, 32), (5, 4)])
def test_values_come_back_to_half_a_step(
    bits: int, group: tuple[int, int], kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    x = torch.randn(70, 64)
    packed = quantise(x, bits, group)
    decoded = packed.read(torch.arange(70))
    step = packed.scale.repeat_interleave(group[0], 0)[:70].repeat_interleave(group[1], 1)
    assert ((decoded - x).abs() <= step * 0.5001 + 1e-6).all()


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_constant_groups_are_exact(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    packed = quantise(torch.full((40, 32), -2.5).half(), 2, (32, 1))
    assert not packed.codes.any()
    assert not packed.scale.any()
    assert (packed.zero == -2.5).all()


@pytest.mark.parametrize("kernels", ["0", "1"])
def test_parameters_are_as_wide_as_they_must_be(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    x = torch.randn(32, 64)
    large = x.bfloat16()
    large[3, 5] = -40000
    for rows, dtype, expected in (
        (x, None, torch.float32),
        (x, torch.bfloat16, torch.float16),
        (x.half(), None, torch.float16),
        (x.bfloat16(), None, torch.float16),
        (x.bfloat16(), torch.float32, torch.float32),
        (large, None, torch.float32),
        (x[:0].half(), None, torch.float16),
    ):
        packed = quantise(rows, 4, (1, 32), dtype=dtype)
        assert packed.scale.dtype == packed.zero.dtype == expected
        assert packed.scale.isfinite().all()


@pytest.mark.parametrize("kernels", ["0", "1"])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("at", [0, 63, 69])
def test_infinite_values_are_refused(value: float, at: int, kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", kernels)
    x = torch.randn(70, 32).bfloat16()
    x[at, at % 32] = value
    for group in ((32, 1), (1, 32)):
        with pytest.raises(ValueError, match="cannot quantise keys or values with infinite entries"):
            quantise(x, 2, group)


@needs_compiler
def test_fast_path_is_counted_and_does_not_depend_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.randn(1000, 64).bfloat16()
    reset_counters()
    results = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        results.append(quantise(x, 3, (32, 1)))
    assert counters() == {"quantise": 2}
    monkeypatch.setenv("KVPRESS_CPU_KERNELS", "0")
    results.append(quantise(x, 3, (32, 1)))
    assert counters() == {"quantise": 2}
    parts = [[packed.codes, packed.scale, packed.zero] for packed in results]
    assert all(torch.equal(a, b) for result in parts[1:] for a, b in zip(result, parts[0], strict=True))


BAD = {
    "x must be .* \\[R, D\\], got float32 \\[40\\]": {"x": torch.zeros(40)},
    "x must be contiguous": {"x": torch.zeros(16, 40).T},
    "bits must be one of \\(1, 2, 3, 4, 8\\), got 5": {"bits": 5},
    "channels must be a multiple of 8 for 3 bits, got 20": {"x": torch.zeros(40, 20), "bits": 3},
    "group must be \\(rows >= 1, a divisor of 16 channels\\), got \\(32, 3\\)": {"group": (32, 3)},
    "group must be .*, got \\(0, 1\\)": {"group": (0, 1)},
}


@pytest.mark.parametrize("message", BAD)
def test_bad_arguments_are_named(message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quantise(**({"x": torch.zeros(40, 16), "bits": 4, "group": (32, 1)} | BAD[message]))
