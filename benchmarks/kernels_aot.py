# SPDX-License-Identifier: Apache-2.0
"""Compile the Triton kernels for several chips, without a GPU, and count the instructions of the machine code.

    python benchmarks/kernels_aot.py [--out benchmarks/results/aot.json] [--chips 80 90]

Per variant: registers, spilled bytes, shared memory. Of the loop over the cache, or of the full program where each reads one
block: instructions, instructions per byte of cache (all warps together; inner loops count once), and the loads from global
memory, by whether they go to shared memory asynchronously and whether they load 128 bits.
"""

from __future__ import annotations

import argparse
import json
import re
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

import torch  # noqa: E402
import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from benchmarks.cubin import disassemble, resource_usage  # noqa: E402
from kvpress.kernels.attention.triton import basis, coded, dense, merge, packed, packed_kernel  # noqa: E402
from kvpress.kernels.formats.packed import NARROW as NARROW_SCALES  # noqa: E402
from kvpress.kernels.mass import triton as mass  # noqa: E402
from kvpress.kernels.prefill import triton as prefill  # noqa: E402
from kvpress.kernels.quantisation import triton as pack  # noqa: E402
from kvpress.kernels.scores import triton as scores  # noqa: E402
from kvpress.kernels.scores.contract import LABEL_BITS  # noqa: E402
from kvpress.kernels.selection import parallel  # noqa: E402
from kvpress.kernels.selection import triton as selection  # noqa: E402
from kvpress.kernels.triton import grid  # noqa: E402

CHIPS = (80, 90, 100, 120)
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory limit of one program, in bytes."""

NARROW = {
    "int1 K32x1 V1x32 D128 M4": "Triton gives a thread less than a row of 16 bytes",
    "int4 K16x1 V1x16 D80 M4": "rows of 40 bytes begin at multiples of 8",
}
"""Why a variant that streams the cache copies fewer than 128 bits at a time."""

SPILLS = {
    "int2 K32x1 V1x32 D128 M4 many": 16,
    "int4 K1x32 V1x32 D128 M4 levels float8_e8m0fnu": 40,
    "int4 K32x1 V1x32 D256 M4 rank 4": 16,
}
"""Bytes of a thread that some variants spill: a few addresses, which other limits would make more of."""

STREAMS = 8
"""Streams among which programs are divided."""

TYPES = {"fp32": 4, "fp16": 2, "bf16": 2, "u8": 1}


@dataclass(frozen=True)
class Variant:
    """A kernel with its arguments."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    """Type of each pointer argument."""
    constants: dict[str, Any]
    """Compile-time constants."""
    read_bytes: float
    """Bytes that one trip of the loop reads."""
    scalars: dict[str, str] = field(default_factory=dict)
    tuples: dict[str, tuple[str | None, ...]] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    registers: int | None = None
    streams: bool = True
    """Whether the loop is over the cache; a program without such a loop reads its bytes once."""


@dataclass(frozen=True)
class Figures:
    """Result of compiling one variant."""

    registers: int
    """Registers per thread."""
    spills: int
    """Spilled bytes per thread."""
    shared: int
    """Shared memory of a program, in bytes."""
    instructions: int
    """Instructions of the loop."""
    instructions_per_byte: float
    """All warps together."""
    wide_copies: int
    """Asynchronous copies to shared memory of 128 bits."""
    narrow_copies: int
    """Asynchronous copies to shared memory of fewer bits."""
    wide_loads: int
    """Other loads of 128 bits."""
    narrow_loads: int
    """Other loads of fewer bits."""


def dense_variant(dtype: str, D: int, rows: int, *, listed: bool = False, weighted: bool = False) -> Variant:
    """Dense decode of one chip-independent shape."""
    padded = grid.padded(D)
    block = grid.block_rows(2 * padded, TYPES[dtype])
    pointers = {"Q": dtype, "KEYS": dtype, "VALUES": dtype, "LENGTHS": "i64", "OUT": "fp32", "LSE": "fp32"}
    pointers["LISTED" if listed else "STARTS"] = "i64"
    pointers |= {"LOG_WEIGHT": "fp32"} if weighted else {}
    constants = {"D": D, "DV": D, "DP": padded, "DVP": padded, "BM": rows, "BN": block, "NP": STREAMS}
    name = f"dense{'-select' if listed else ''} {dtype} D{D} M{rows}{' weighted' if weighted else ''}"
    row_bytes = 2 * D * TYPES[dtype]
    scalars, registers = {"key_stride": "aligned", "value_stride": "aligned"}, dense.registers(rows)
    return Variant(name, dense._kernel, pointers, constants, block * row_bytes, scalars, registers=registers)


def packed_variant(
    bits: int,
    D: int,
    rows: int,
    group: int = 32,
    *,
    key_group: tuple[int, int] | None = None,
    listed: bool = False,
    dtype: str = "fp16",
    rank: int = 0,
    outliers: bool = False,
    weighted: bool = False,
    floats: torch.dtype | None = None,
    row_scaled: bool = False,
    centred: bool = False,
    many: bool = False,
) -> Variant:
    """Quantised decode; by default keys in groups of rows, values in groups of channels.

    With `floats`, codes are indices of levels and have scales of that dtype without zeros; with `row_scaled`, keys have a
    factor per row; with `centred`, the middle code means zero; with `many`, there are streams for all programs that fit.
    """
    kg, vg = key_group or (group, 1), (1, group)
    launch = packed.limits(2 * D, bits, rows, rank > 0 or outliers, floats is not None, listed, kg[1] == D, many)
    block, fold = packed.block_rows(kg[0], not listed, launch.block)
    key = packed.units(D, bits, None if fold else kg[1])
    value = packed.units(D, bits, vg[1])
    narrow = 0 if floats is None else NARROW_SCALES.get(floats, 0)
    dtype = "u8" if narrow else dtype
    parts = ("SCALE", "ZERO") if floats is None and not centred else ("SCALE",)
    sides = {f"{side}{part}": dtype for side in ("KEY_", "VALUE_") for part in parts}
    pointers = {"Q": "bf16", "KEYS": "u8", "VALUES": "u8", "LENGTHS": "i64", "OUT": "fp32", "LSE": "fp32", **sides}
    pointers["LISTED" if listed else "STARTS"] = "i64"
    pointers |= {"LOG_WEIGHT": "fp32"} if weighted else {}
    pointers |= {} if floats is None else {"KEY_LEVELS": "fp16", "VALUE_LEVELS": "fp16"}
    pointers |= {"KEY_ROW_SCALE": "fp16"} if row_scaled else {}
    constants = {
        "D": D, "K_BITS": bits, "K_GR": kg[0], "K_GC": kg[1], "DV": D, "V_BITS": bits, "V_GR": vg[0], "V_GC": vg[1],
        "KC": key.chunks, "KW": key.width, "KP": key.padded, "KPARTS": key.parts, "K_UNIT": key.size, "FOLD": fold,
        "VC": value.chunks, "VW": value.width, "VP": value.padded, "VPARTS": value.parts, "V_UNIT": value.size,
        "BM": min(rows, launch.queries), "BN": block,
        "NP": STREAMS, "HIGH": packed.outlier_tiles(D), "K_NARROW": narrow, "V_NARROW": narrow,
        "K_POINT": (2**bits - 1) / 2 * centred, "V_POINT": (2**bits - 1) / 2 * centred,
    }  # fmt: skip
    for side in "KV":
        constants |= {f"{side}_RANK": rank, f"{side}_RP": packed.padded_rank(rank)}
    terms = ("*fp16", "*fp16", "*i32") if rank else (None,) * 3
    terms += ("*i32", "*u8", "*fp16") if outliers else (None,) * 3
    corrected = f" rank {rank}" if rank else ""
    corrected += " outliers" if outliers else ""
    corrected += " weighted" if weighted else ""
    corrected += "" if floats is None else f" levels {str(floats).removeprefix('torch.')}"
    corrected += " rows scaled" if row_scaled else ""
    corrected += " centred" if centred else ""
    corrected += " many" if many else ""
    scales = sum(len(parts) * TYPES[dtype] * D / (gr * gc) for gr, gc in (kg, vg))
    shape = f"K{kg[0]}x{kg[1]} V{vg[0]}x{vg[1]}"
    name = f"int{bits}{'-select' if listed else ''} {shape} D{D} M{rows}{corrected}"
    read_bytes = block * (2 * D * bits / 8 + scales + 2 * row_scaled)
    limits: dict[str, Any] = {"warps": launch.warps, "stages": packed.STAGES, "registers": launch.registers}
    tuples = {"KEY_TERMS": terms, "VALUE_TERMS": terms}
    return Variant(name, packed_kernel.decode_kernel, pointers, constants, read_bytes, tuples=tuples, **limits)


def coded_variant(
    D: int,
    coupled: int,
    bits: int,
    rows: int,
    *,
    half: int = 0,
    listed: bool = False,
    scaled: bool = False,
    weighted: bool = False,
    outliers: bool = False,
) -> Variant:
    """Decode on codes for `coupled` channels each; with `half`, keys get their rotary embedding when read.

    With `scaled`, one codebook serves all groups and rows have scales; `weighted` adds log-weights and an index of streams.
    """
    sizes = {"B": bits, "G": D // coupled, "BG": 1 if scaled else D // coupled, "E": 2**bits, "C": coupled}
    key, value = coded.spans(D, coupled, half), coded.spans(D, coupled, 0)
    constants = {f"{side}{name}": size for side in "KV" for name, size in sizes.items()}
    constants |= {"HALF": half, "KS": key.span, "KSP": key.span_padded, "KHP": key.pair_padded, "KRP": key.rest_padded}
    block = coded.block_rows(2 * D, half, scaled)
    constants |= {"VCP": value.span_padded, "VGP": value.rest_padded, "BM": rows, "BN": block, "NP": STREAMS}
    constants["HIGH"] = packed.outlier_tiles(D)
    pointers = {"Q": "bf16", "KEY_CODES": "u8", "KEY_BOOK": "fp16", "VALUE_CODES": "u8", "VALUE_BOOK": "fp16"}
    pointers |= {"LENGTHS": "i64", "OUT": "fp32", "LSE": "fp32"}
    pointers |= {"KEY_SCALE": "fp16", "VALUE_SCALE": "fp16"} if scaled else {}
    pointers |= {"LOG_WEIGHT": "fp32", "STREAM": "i64"} if weighted else {}
    pointers["LISTED" if listed else "STARTS"] = "i64"
    if half:
        pointers |= {"COARSE": "fp32", "FINE": "fp32", "SHIFT": "i64", "POSITIONS": "i32"}
    turned = f" rotary {2 * half}" if half else ""
    options = f"{' scaled' if scaled else ''}{' weighted' if weighted else ''}{' outliers' if outliers else ''}"
    name = f"coded{'-select' if listed else ''} {coupled}c{bits}b{turned} D{D} M{rows}{options}"
    aligned = {"key_stride": "aligned", "value_stride": "aligned"}
    read_bytes = block * 2 * D / coupled * bits / 8
    return Variant(
        name,
        coded._kernel,
        pointers,
        constants,
        read_bytes,
        aligned,
        dict.fromkeys(("KEY_TERMS", "VALUE_TERMS"), ("*i32", "*u8", "*fp16") if outliers else (None,) * 3),
        warps=coded.WARPS,
        registers=coded.registers(scaled, outliers),
    )


def scores_variant(dtype: str, D: int, rows: int, *, labels: bool = False) -> Variant:
    """Bounds of pages, or scores of labels."""
    element_bytes = TYPES[dtype] * (1 if labels else 2)
    pointers = {"HIGH": dtype} if labels else {"LOW": dtype, "HIGH": dtype}
    return _scores(f"{'labels' if labels else 'bounds'} {dtype}", D, D, element_bytes, 0, rows, pointers)


def coded_labels_variant(bits: int, D: int, rows: int) -> Variant:
    """Scores of quantised labels."""
    pointers = {"HIGH": "u8", "SCALE": "fp16", "ZERO": "fp16"}
    return _scores(f"labels int{bits}", D, D * bits // 8, 1, bits, rows, pointers)


def _scores(
    name: str, D: int, width: int, element_bytes: int, bits: int, rows: int, pointers: dict[str, str]
) -> Variant:
    block = scores.block_rows(width, element_bytes)
    pointers = {"Q": "bf16", "STARTS": "i64", "COUNTS": "i64", "OUT": "fp32", **pointers}
    constants = {"REDUCE": "max", "D": D, "BITS": bits, "DP": grid.padded(width), "BM": rows, "BN": block, "POINT": 0.0}
    limits: dict[str, Any] = {"warps": scores.WARPS, "stages": scores.STAGES, "registers": scores.registers(D)}
    read_bytes, aligned = block * width * element_bytes, {"stride": "aligned"}
    return Variant(
        f"{name} D{D} M{rows}", scores._kernel, pointers, constants, read_bytes, aligned, streams=False, **limits
    )


def prefill_variant(dtype: str, D: int, block: int, *, columns: bool = False) -> Variant:
    """Sparse causal attention of query blocks of `block` tokens."""
    padded = grid.padded(D)
    keys = prefill.key_rows(block, 2 * padded, TYPES[dtype])
    pointers = {"Q": dtype, "KEYS": dtype, "VALUES": dtype, "ENDS": "i64", "TILES": "i32", "OUT": "fp32", "LSE": "fp32"}
    pointers |= {"COLUMN_ENDS": "i64", "COLUMNS": "i32", "REAL": "u8"} if columns else {}
    constants = {"D": D, "DV": D, "DP": padded, "DVP": padded, "BN": keys}
    constants["BM"] = prefill.query_rows(block, TYPES[dtype])
    names = [f"{side}_{stride}" for side in ("key", "value") for stride in ("row", "head", "stride")]
    sizes = ("queries", "length", "heads", "group", "halvings")
    return Variant(
        f"prefill {dtype} D{D} block {block}{' columns padded' if columns else ''}",
        prefill._kernel,
        pointers,
        constants,
        keys * 2 * D * TYPES[dtype],
        {**dict.fromkeys([*names, "block"], "aligned"), **dict.fromkeys(sizes, "any")},
        warps=prefill.warps(2 * padded * TYPES[dtype], columns),
        stages=prefill.STAGES,
        streams=not columns,
    )


def other_variants() -> Iterator[Variant]:
    """Merging, statistics of weights, and quantise-and-pack."""
    for name, lengths in (("merge D128", ("*i64",)), ("merge 3 results D128", (None,) * 3)):
        count, block = len(lengths), merge.SPLIT_BLOCK if lengths[0] else 1
        constants: dict[str, Any] = {"SPLITS": (1056,) * count, "BLOCKS": (64,) * count, "COUNT": count, "NP": STREAMS}
        constants |= {"DV": 128, "DVP": merge.CHANNELS, "BLOCK": merge.SPLIT_BLOCK}
        tuples: dict[str, tuple[str | None, ...]] = dict.fromkeys(("OUTS", "LSES"), ("*fp32",) * count)
        tuples["LENGTHS"] = lengths
        floats, limits = {"OUT": "fp32", "LSE": "fp32"}, merge.REGISTERS
        read_bytes = count * block * 129 * 4
        yield Variant(
            name, merge._kernel, floats, constants, read_bytes, tuples=tuples, registers=limits, streams=False
        )
    pointers = {"SCORES": "fp32", "STARTS": "i64", "LENGTHS": "i64", "ROWS": "i32", "COUNTS": "i64"}
    sizes = dict.fromkeys(("stride", "capacity", "first", "last"), "any")
    for block in (2048, selection.LONGEST):
        yield Variant(
            f"best of {block} rows",
            selection._kernel,
            pointers,
            {"BLOCK": block},
            4 * block,
            sizes,
            warps=block // (32 * selection.PER_THREAD),
            streams=False,
        )
    tensors = {"HISTOGRAMS": "i32", "SUMS": "i32"}
    chunks = {"PLACES": parallel.PLACES, "LARGEST": parallel.LARGEST, "CHUNK": parallel.CHUNK, "BLOCK": parallel.BLOCK}
    for name, kernel, known in (
        ("digits", parallel._histogram_kernel, {"KNOWN": 4}),
        ("counts", parallel._count_kernel, {}),
        ("rows", parallel._list_kernel, {"CHUNKS": 16}),
    ):
        yield Variant(
            f"{name} of best rows",
            kernel,
            pointers | tensors,
            chunks | known,
            4 * parallel.CHUNK,
            sizes,
            warps=parallel.WARPS,
            streams=False,
        )
    matrices = {"ROTATION": "fp32", "CENTRE": "bf16", "OUT": "fp32", "SHIFT": "fp32"}
    constants = {"D": 128, "C": 128, "BM": basis.BM, "BC": basis.BC, "BK": basis.BK}
    for name, kernel, tensors in (
        ("enter basis D128", basis._enter_kernel, {"Q": "bf16"}),
        ("leave basis D128", basis._leave_kernel, {"X": "fp32", "LSE": "fp32", "SHIFTED": "fp32"}),
    ):
        padding = {"DP": 128} if "enter" in name else {}
        read_bytes = 4 * basis.BK * (basis.BM + basis.BC)
        yield Variant(name, kernel, matrices | tensors, constants | padding, read_bytes, streams=False)
    for dtype, weighted in (("bf16", False), ("fp16", False), ("bf16", True)):
        pointers = {"Q": dtype, "KEYS": dtype, "QUERY_LSE": "fp32", "STARTS": "i64", "LENGTHS": "i64", "OUT": "fp32"}
        pointers |= {"LOG_WEIGHT": "fp32"} if weighted else {}
        constants = {"STATISTIC": "sum", "D": 128, "DP": 128, "BM": 64, "BN": mass.BLOCK}
        yield Variant(
            f"mass {dtype} D128{' weighted' if weighted else ''}",
            mass._kernel,
            pointers,
            constants,
            64 * 128 * 2,
            {"key_stride": "aligned"},
            stages=2,
            streams=False,
        )
    pointers = {"X": "bf16", "SCALE": "fp16", "ZERO": "fp16", "CODES": "u8"}
    aligned = {"stride": "aligned"}
    for group in ((32, 1), (1, 32)):
        groups, name = 128 // group[1], f"{group[0]}x{group[1]} D128"
        constants = {
            "LEVELS": 15,
            "GROUPS": groups,
            "GR": group[0],
            "GC": group[1],
            **pack.range_blocks(group, groups),
        }
        yield Variant(
            f"ranges {name}",
            pack._ranges_kernel,
            pointers,
            constants,
            2 * pack.TILE,
            aligned,
            streams=False,
        )
        for bits, plane in ((4, 4), (2, 2), (3, 1)):
            constants = {"C": 128, "BITS": bits, "GR": group[0], "GC": group[1], "PLANE": plane, "SHIFT": bits - plane}
            constants |= {"FIRST": 32 if bits == 3 else 0, **pack.code_blocks(128, plane)}
            variant = f"pack int{bits} {name}"
            yield Variant(variant, pack._codes_kernel, pointers, constants, 2 * pack.TILE, aligned, streams=False)


def variants() -> Iterator[Variant]:
    """Yield all variants of the table."""
    for dtype, D in (("bf16", 64), ("bf16", 80), ("bf16", 96), ("bf16", 128), ("bf16", 192), ("bf16", 256)):
        yield dense_variant(dtype, D, 16)
    yield dense_variant("fp16", 128, 16)
    yield dense_variant("fp32", 128, 16)
    yield dense_variant("bf16", 128, 64)
    yield dense_variant("bf16", 128, 16, listed=True)
    yield dense_variant("bf16", 128, 16, weighted=True)
    for bits in (1, 2, 3, 4, 8):
        yield packed_variant(bits, 128, 4)
    for D in (64, 80, 96, 192, 256):
        yield packed_variant(4, D, 4, 16 if D == 80 else 32)
    for bits in (2, 4):
        yield packed_variant(bits, 128, 4, many=True)
        yield packed_variant(bits, 128, 4, 128, key_group=(1, 128), centred=True, many=True)
        yield packed_variant(bits, 128, 4, 64)
        yield packed_variant(bits, 128, 4, 128, key_group=(1, 128))
        yield packed_variant(bits, 128, 4, 128, key_group=(1, 128), centred=True)
        yield packed_variant(bits, 128, 4, listed=True)
    yield packed_variant(4, 128, 16)
    yield packed_variant(4, 128, 4, weighted=True)
    for bits in (2, 4):
        yield packed_variant(bits, 128, 4, rank=2)
        yield packed_variant(bits, 128, 4, outliers=True)
        yield packed_variant(bits, 128, 4, rank=4, outliers=True)
    yield packed_variant(4, 128, 8, rank=16)
    yield packed_variant(4, 128, 8, rank=16, outliers=True)
    yield packed_variant(4, 64, 8, rank=4, outliers=True)
    yield packed_variant(4, 256, 4, rank=4)
    yield packed_variant(4, 256, 4, rank=4, outliers=True)
    yield packed_variant(2, 128, 4, 128, key_group=(1, 128), rank=4, outliers=True)
    yield packed_variant(4, 128, 4, listed=True, rank=4, outliers=True)
    for listed in (False, True):
        yield packed_variant(8, 128, 4, 128, key_group=(1, 128), floats=torch.float16, listed=listed)
        yield packed_variant(4, 128, 4, 16, key_group=(1, 16), floats=torch.float8_e4m3fn, listed=listed)
        yield packed_variant(4, 128, 4, 32, key_group=(1, 32), floats=torch.float8_e8m0fnu, listed=listed)
        yield packed_variant(4, 128, 4, 128, row_scaled=True, listed=listed)
    yield packed_variant(2, 128, 4, 128, row_scaled=True)
    yield packed_variant(4, 64, 4, 16, key_group=(1, 16), floats=torch.float8_e4m3fn)
    yield packed_variant(4, 256, 4, 16, key_group=(1, 16), floats=torch.float8_e4m3fn)
    for coupled in (2, 4, 8):
        yield coded_variant(128, coupled, 8, 4)
    for bits in (1, 2, 3, 4, 9, 10, 12):
        yield coded_variant(128, 4 if bits > 4 else 1, bits, 4)
    yield coded_variant(128, 4, 8, 4, listed=True)
    yield coded_variant(128, 4, 8, 4, listed=True, weighted=True)
    for bits in (2, 3, 4):
        yield coded_variant(128, 1, bits, 4, scaled=True)
    yield coded_variant(128, 1, 4, 4, scaled=True, weighted=True)
    yield coded_variant(128, 1, 4, 4, listed=True, scaled=True)
    for D, coupled, bits, half in (
        (128, 4, 8, 64),
        (128, 1, 4, 64),
        (128, 4, 10, 32),
        (96, 3, 8, 16),
        (256, 8, 8, 128),
    ):
        yield coded_variant(D, coupled, bits, 4, half=half)
    for listed in (False, True):
        yield coded_variant(128, 1, 3, 4, half=64, scaled=True, outliers=True, listed=listed)
    yield coded_variant(64, 1, 4, 4, half=32, scaled=True, outliers=True)
    yield coded_variant(128, 1, 4, 4, scaled=True, outliers=True)
    for dtype, D in (("bf16", 64), ("bf16", 128), ("bf16", 256), ("fp32", 128)):
        yield scores_variant(dtype, D, 16)
    for dtype, D in (("bf16", 16), ("bf16", 32), ("bf16", 128), ("fp32", 16)):
        yield scores_variant(dtype, D, 16, labels=True)
    for bits in LABEL_BITS:
        yield coded_labels_variant(bits, 128 if bits == 1 else 32, 16)
    for dtype, D in (("bf16", 64), ("bf16", 80), ("bf16", 128), ("bf16", 256), ("fp16", 128), ("fp32", 128)):
        yield prefill_variant(dtype, D, 64)
    yield prefill_variant("fp32", 64, 64)
    yield prefill_variant("bf16", 128, 128)
    yield prefill_variant("bf16", 128, 16)
    yield prefill_variant("bf16", 128, 64, columns=True)
    yield from other_variants()


def compile_variant(variant: Variant, chip: int) -> Figures:
    """Compile for one chip and read the machine code."""
    signature: dict[str, Any] = {}
    constants: dict[str | tuple[int, ...], Any] = dict(variant.constants)
    attributes: dict[tuple[int, ...], list[list[object]]] = {}
    tuples = {"OFFSETS": (None,) * 3, **variant.tuples}  # keys without an offset
    for index, name in enumerate(variant.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in tuples:
            signature[name] = tuple(kind or "constexpr" for kind in tuples[name])
            for position, kind in enumerate(tuples[name]):
                if kind is None:
                    constants[(index, position)] = None
                else:
                    attributes[(index, position)] = [["tt.divisibility", 16]]
        elif name in variant.pointers:
            signature[name] = f"*{variant.pointers[name]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif variant.scalars.get(name) == "aligned":
            signature[name] = "i32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name in ("scale", "factor"):
            signature[name] = "fp32"
        elif name in ("M", "R", "width", "streams", "splits", "books", *variant.scalars):
            signature[name] = "i32"
        else:  # an option that is not used
            signature[name], constants[name] = "constexpr", None
    source = triton.compiler.ASTSource(variant.kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    if variant.registers:
        options["maxnreg"] = variant.registers
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    registers, spills = resource_usage(compiled.asm["cubin"])
    code = disassemble(compiled.asm["cubin"])
    body = main_loop(code) or instructions(code)
    loads = [line for line in body if re.match(r"(@\S+ )?(LDGSTS|LDG)\b", line)]
    kinds = [("LDGSTS" in line, ".128" in line) for line in loads]
    return Figures(
        registers,
        spills,
        compiled.metadata.shared,
        len(body),
        round(len(body) * variant.warps / variant.read_bytes, 3),
        *(kinds.count(kind) for kind in ((True, True), (True, False), (False, True), (False, False))),
    )


def instructions(code: str) -> list[str]:
    """Return all instructions of disassembled code."""
    return [line.strip() for line in re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", code, re.MULTILINE)]


def main_loop(code: str) -> list[str]:
    """Return the instructions of the innermost loop with a softmax."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(lines)
        else:
            lines += instructions(line)
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*?(\.L_x_\d+)", line)
        if target and labels.get(target[1], at) < at:
            body = lines[labels[target[1]] : at + 1]
            if any("MUFU.EX2" in x for x in body):
                loops.append(body)
    return min(loops, key=len, default=[])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chips", type=int, nargs="+", default=list(CHIPS))
    parser.add_argument(
        "--only", default="", help="variants whose name contains this; the other variants of the file are kept"
    )
    arguments = parser.parse_args()
    names = ("regs", "spills", "shared", "instr", "/byte", "copy128", "copy", "load128", "load")
    print(f"{'variant':42} {'chip':>6}", *(f"{name:>7}" for name in names))
    results: dict[str, dict[str, Any]] = {}
    for variant in variants():
        if arguments.only not in variant.name:
            continue
        for chip in arguments.chips:
            figures = asdict(compile_variant(variant, chip))
            results.setdefault(variant.name, {})[f"sm_{chip}"] = figures
            print(f"{variant.name:42} sm_{chip:<3}", *(f"{figure:7}" for figure in figures.values()), flush=True)
    if arguments.out:
        if arguments.only and arguments.out.is_file():
            before = json.loads(arguments.out.read_text())
            if before["triton"] != triton.__version__:
                parser.error(
                    f"{arguments.out} was made with triton {before['triton']}: remove --only to make the whole table again"
                )
            names_now = {variant.name for variant in variants()}
            results = {name: chips for name, chips in before["variants"].items() if name in names_now} | results
        record = {"triton": triton.__version__, "variants": results}
        arguments.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
