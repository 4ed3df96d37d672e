# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels compile for chips that this machine lacks, and to no worse code than that of the committed table."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SLACK = 1.05
"""Tolerance, as another patch release of triton may move a register or a few instructions."""

REPRESENTATIVE = [
    ("dense bf16 D128 M16", 80),
    ("dense bf16 D128 M16", 90),
    ("dense-select bf16 D128 M16", 90),
    ("int4 K32x1 V1x32 D128 M4", 80),
    ("int4 K32x1 V1x32 D128 M4", 90),
    ("int4 K32x1 V1x32 D128 M4", 100),
    ("int4 K32x1 V1x32 D128 M4", 120),
    ("int2 K32x1 V1x32 D128 M4", 90),
    ("int8 K32x1 V1x32 D128 M4", 90),
    ("int4-select K32x1 V1x32 D128 M4", 90),
    ("int4 K32x1 V1x32 D128 M4 rank 4 outliers", 90),
    ("int4 K32x1 V1x32 D128 M4 rank 2", 120),
    ("int4 K1x16 V1x16 D64 M4 levels float8_e4m3fn", 90),
    ("int2 K128x1 V1x128 D128 M4 rows scaled", 90),
    ("coded 4c8b D128 M4", 90),
    ("coded 4c8b rotary 128 D128 M4", 100),
    ("coded 1c4b D128 M4", 80),
    ("coded-select 4c8b D128 M4", 120),
    ("coded 1c4b D128 M4 scaled weighted", 90),
    ("mass bf16 D128 weighted", 90),
    ("prefill bf16 D128 block 64", 90),
    ("prefill bf16 D128 block 64 columns padded", 80),
    ("bounds bf16 D128 M16", 90),
    ("labels bf16 D16 M16", 80),
]
"""Every kernel and every chip; the full table is made by the command, which takes minutes."""


@pytest.fixture(scope="module")
def aot() -> ModuleType:
    pytest.importorskip("triton", reason="triton is not installed")
    spec = importlib.util.spec_from_file_location("kernels_aot", ROOT / "benchmarks/kernels_aot.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def committed() -> dict:
    return json.loads((ROOT / "benchmarks/results/aot.json").read_text())


def test_the_committed_table_is_complete_and_within_every_limit(aot: ModuleType, committed: dict) -> None:
    variants = {variant.name: variant for variant in aot.variants()}
    assert set(variants) == set(committed["variants"])
    assert set(aot.NARROW) <= set(variants)
    for name, chips in committed["variants"].items():
        assert set(chips) == {f"sm_{chip}" for chip in aot.CHIPS}
        for chip, figures in chips.items():
            assert figures["spills"] <= aot.SPILLS.get(name, 0), (name, chip)
            assert figures["shared"] <= aot.SHARED[int(chip[3:])], (name, chip)
            if variants[name].streams:
                assert (figures["wide_copies"] == 0) == (name in aot.NARROW), (name, chip)


@pytest.mark.parametrize(("name", "chip"), REPRESENTATIVE)
def test_code_is_not_worse_than_committed(name: str, chip: int, aot: ModuleType, committed: dict) -> None:
    variant = next(v for v in aot.variants() if v.name == name)
    now, before = aot.compile_variant(variant, chip), committed["variants"][name][f"sm_{chip}"]
    assert now.spills == 0
    assert now.shared <= aot.SHARED[chip]
    assert now.wide_copies + now.wide_loads > 0
    if aot.triton.__version__ != committed["triton"]:
        pytest.skip(f"the table was made with triton {committed['triton']}: instructions are not comparable")
    assert now.registers <= SLACK * before["registers"]
    assert now.shared <= SLACK * before["shared"]
    assert now.instructions_per_byte <= SLACK * before["instructions_per_byte"]
    assert now.wide_copies >= before["wide_copies"]
    assert now.narrow_copies + now.narrow_loads <= before["narrow_copies"] + before["narrow_loads"]
