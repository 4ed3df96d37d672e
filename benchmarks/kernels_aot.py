"""Compile the Triton decode kernels for several chips, without any of them, and count what the machine code does.

    python benchmarks/kernels_aot.py [--out benchmarks/results/aot.json] [--chips 80 90]

Per variant: registers, spilled bytes, shared memory, copies of 128 bits in the loop that go to shared memory asynchronously,
instructions of the loop, and those per byte of cache that the loop reads (all warps together).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")

import triton  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402

from kvpress.kernels.triton import columns, dense, grid, lookup, merge, pack, uniform  # noqa: E402

CHIPS = (80, 90, 100, 120)
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Shared memory that one program may use, in bytes."""

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
TYPES = {"fp32": 4, "fp16": 2, "bf16": 2}


@dataclass(frozen=True)
class Variant:
    """A kernel with its arguments: pointer types, constants, and the bytes that one trip of its loop reads, 0 for no loop."""

    name: str
    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, Any]
    loop_bytes: float
    scalars: dict[str, str] = field(default_factory=dict)
    warps: int = 4
    stages: int = 3
    registers: int | None = None


@dataclass(frozen=True)
class Figures:
    """What one variant compiles to."""

    registers: int
    spills: int
    shared: int
    loop_instructions: int
    loop_async_copies: int
    instructions_per_byte: float


def dense_variant(dtype: str, D: int, rows: int, *, listed: bool = False) -> Variant:
    """Dense decode of one chip-independent shape."""
    padded = grid.padded(D)
    block = grid.block_rows(2 * padded, TYPES[dtype])
    pointers = {"Q": dtype, "KEYS": dtype, "VALUES": dtype, "LENGTHS": "i64", "OUT": "fp32", "LSE": "fp32"}
    pointers["LISTED" if listed else "STARTS"] = "i64"
    constants = {"D": D, "DV": D, "DP": padded, "DVP": padded, "BM": rows, "BN": block}
    name = f"dense{'-select' if listed else ''} {dtype} D{D} M{rows}"
    row_bytes = 2 * D * TYPES[dtype]
    scalars = {"key_stride": "aligned", "value_stride": "aligned"}
    return Variant(name, dense._kernel, pointers, constants, block * row_bytes, scalars)


def uniform_variant(
    bits: int,
    D: int,
    rows: int,
    group: int = 32,
    *,
    key_group: tuple[int, int] | None = None,
    listed: bool = False,
    dtype: str = "fp16",
) -> Variant:
    """Quantised decode: keys in groups of rows unless told otherwise, values in groups of channels."""
    kg, vg = key_group or (group, 1), (1, group)
    block, fold = uniform.block_rows(kg[0], contiguous=not listed)
    key = uniform.columns(D, bits, None if fold else kg[1])
    value = uniform.columns(D, bits, vg[1])
    sides = {f"{side}{part}": dtype for side in ("KEY_", "VALUE_") for part in ("SCALE", "ZERO")}
    pointers = {"Q": "bf16", "KEYS": "u8", "VALUES": "u8", "LENGTHS": "i64", "OUT": "fp32", "LSE": "fp32", **sides}
    pointers["LISTED" if listed else "STARTS"] = "i64"
    constants = {
        "D": D, "K_BITS": bits, "K_GR": kg[0], "K_GC": kg[1], "DV": D, "V_BITS": bits, "V_GR": vg[0], "V_GC": vg[1],
        "KC": key.chunks, "KW": key.width, "KP": key.padded, "KPARTS": key.parts, "FOLD": fold,
        "VC": value.chunks, "VW": value.width, "VP": value.padded, "VPARTS": value.parts, "BM": rows, "BN": block,
    }  # fmt: skip
    scales = sum(2 * TYPES[dtype] * D / (gr * gc) for gr, gc in (kg, vg))
    shape = f"K{kg[0]}x{kg[1]} V{vg[0]}x{vg[1]}"
    name = f"int{bits}{'-select' if listed else ''} {shape} D{D} M{rows}"
    loop_bytes = block * (2 * D * bits / 8 + scales)
    limits: dict[str, Any] = {"warps": uniform.WARPS, "stages": uniform.STAGES, "registers": uniform.registers(2 * D)}
    return Variant(name, uniform.decode_kernel, pointers, constants, loop_bytes, **limits)


def lookup_variant(D: int, coupled: int, entries: int, rows: int) -> Variant:
    """Decode on codes of 8 bits for so many coupled channels."""
    names = ("G", "E", "C", "GP", "CP")
    sizes = lookup.sizes((8, D // coupled, entries, coupled))
    constants = {f"{side}{name}": size for side in "KV" for name, size in zip(names, sizes, strict=True)}
    pointers = {"Q": "bf16", "KEY_CODES": "u8", "KEY_BOOK": "fp16", "VALUE_CODES": "u8", "VALUE_BOOK": "fp16"}
    pointers |= {"STARTS": "i64", "LENGTHS": "i64", "BOOK_OF_STREAM": "i64", "OUT": "fp32", "LSE": "fp32"}
    constants |= {"BM": rows, "BN": lookup.BLOCK}
    name, loop_bytes = f"lookup {coupled}c{entries} D{D} M{rows}", lookup.BLOCK * 2 * D / coupled
    aligned = {"key_stride": "aligned", "value_stride": "aligned"}
    limits: dict[str, Any] = {"warps": lookup.WARPS, "stages": lookup.STAGES}
    return Variant(name, lookup._kernel, pointers, constants, loop_bytes, aligned, **limits)


def other_variants() -> Iterator[Variant]:
    """Merging, column statistics, and quantise-and-pack."""
    floats = {"PARTS": "fp32", "PART_LSE": "fp32", "OUT": "fp32", "LSE": "fp32"}
    yield Variant("merge D128", merge._kernel, floats, {"DV": 128, "DVP": 128, "BLOCK": 16}, 16 * 129 * 4)
    for dtype in ("bf16", "fp16"):
        pointers = {"Q": dtype, "KEYS": dtype, "QUERY_LSE": "fp32", "STARTS": "i64", "LENGTHS": "i64", "OUT": "fp32"}
        constants = {"STATISTIC": "sum", "D": 128, "DP": 128, "BM": 64, "BN": columns.BLOCK}
        yield Variant(
            f"columns {dtype} D128",
            columns._kernel,
            pointers,
            constants,
            64 * 128 * 2,
            {"key_stride": "aligned"},
            stages=2,
        )
    pointers = {"X": "bf16", "SCALE": "fp16", "ZERO": "fp16", "CODES": "u8"}
    aligned = {"stride": "aligned"}
    for group in ((32, 1), (1, 32)):
        groups, name = 128 // group[1], f"{group[0]}x{group[1]} D128"
        constants = {"LEVELS": 15, "GROUPS": groups, "GR": group[0], "GC": group[1], **pack.range_blocks(group, groups)}
        yield Variant(f"ranges {name}", pack._ranges_kernel, pointers, constants, 0, aligned)
        for bits, plane in ((4, 4), (2, 2), (3, 1)):
            constants = {"C": 128, "BITS": bits, "GR": group[0], "GC": group[1], "PLANE": plane, "SHIFT": bits - plane}
            constants |= {"FIRST": 32 if bits == 3 else 0, **pack.code_blocks(128, plane)}
            yield Variant(f"pack int{bits} {name}", pack._codes_kernel, pointers, constants, 0, aligned)


def variants() -> Iterator[Variant]:
    """Everything in the table."""
    for dtype, D in (("bf16", 64), ("bf16", 80), ("bf16", 96), ("bf16", 128), ("bf16", 192), ("bf16", 256)):
        yield dense_variant(dtype, D, 16)
    yield dense_variant("fp16", 128, 16)
    yield dense_variant("fp32", 128, 16)
    yield dense_variant("bf16", 128, 64)
    yield dense_variant("bf16", 128, 16, listed=True)
    for bits in (1, 2, 3, 4, 8):
        yield uniform_variant(bits, 128, 4)
    for D in (64, 80, 96, 192, 256):
        yield uniform_variant(4, D, 4, 16 if D == 80 else 32)
    for bits in (2, 4):
        yield uniform_variant(bits, 128, 4, 64)
        yield uniform_variant(bits, 128, 4, 128, key_group=(1, 128))
        yield uniform_variant(bits, 128, 4, listed=True)
    yield uniform_variant(4, 128, 16)
    for coupled in (2, 4, 8):
        yield lookup_variant(128, coupled, 256, 4)
    yield from other_variants()


def compile_variant(variant: Variant, chip: int) -> Figures:
    """Compile for one chip and read the machine code."""
    signature: dict[str, str] = {}
    constants = dict(variant.constants)
    attributes: dict[tuple[int], list[list[object]]] = {}
    for index, name in enumerate(variant.kernel.arg_names):
        if name in constants:
            signature[name] = "constexpr"
        elif name in variant.pointers:
            signature[name] = f"*{variant.pointers[name]}"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif variant.scalars.get(name) == "aligned":
            signature[name] = "i32"
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif name == "scale":
            signature[name] = "fp32"
        elif name in ("M", "R", "width", "splits"):
            signature[name] = "i32"
        else:  # an option that is not used
            signature[name], constants[name] = "constexpr", None
    source = triton.compiler.ASTSource(variant.kernel, signature, constexprs=constants, attrs=attributes)
    options = {"num_warps": variant.warps, "num_stages": variant.stages}
    if variant.registers:
        options["maxnreg"] = variant.registers
    compiled = triton.compile(source, target=GPUTarget("cuda", chip, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        cubin = os.path.join(folder, "kernel.cubin")
        Path(cubin).write_bytes(compiled.asm["cubin"])
        usage = _run("cuobjdump", "--dump-resource-usage", cubin)
        code = _run("nvdisasm", "-c", cubin)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    if found is None:
        raise RuntimeError(f"cuobjdump reports no resource usage:\n{usage}")
    loop = main_loop(code)
    copies = sum(bool(re.search(r"LDGSTS\S*\.128", line)) for line in loop)
    per_byte = round(len(loop) * variant.warps / variant.loop_bytes, 3) if variant.loop_bytes else 0.0
    return Figures(int(found[1]), int(found[2]), compiled.metadata.shared, len(loop), copies, per_byte)


def main_loop(code: str) -> list[str]:
    """The instructions of the innermost loop with a softmax."""
    lines: list[str] = []
    labels: dict[str, int] = {}
    for line in code.splitlines():
        if label := re.match(r"(\.L_x_\d+):", line.strip()):
            labels[label[1]] = len(lines)
        elif instruction := re.match(r"\s+/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            lines.append(instruction[1])
    loops = []
    for at, line in enumerate(lines):
        target = re.search(r"BRA.*?(\.L_x_\d+)", line)
        if target and labels.get(target[1], at) < at:
            body = lines[labels[target[1]] : at + 1]
            if any("MUFU.EX2" in x for x in body):
                loops.append(body)
    return min(loops, key=len, default=[])


def table(chips: list[int], only: str = "") -> dict[str, dict[str, Figures]]:
    """Figures by variant and chip."""
    return {
        variant.name: {f"sm_{chip}": compile_variant(variant, chip) for chip in chips}
        for variant in variants()
        if only in variant.name
    }


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout  # noqa: S603


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--chips", type=int, nargs="+", default=list(CHIPS))
    parser.add_argument("--only", default="", help="variants whose name contains this")
    arguments = parser.parse_args()
    print(
        f"{'variant':34} {'chip':>7} {'regs':>5} {'spill':>6} {'shared':>7} {'copies':>7} {'loop':>5} {'inst/byte':>9}"
    )
    results: dict[str, dict[str, Any]] = {}
    for variant in variants():
        if arguments.only not in variant.name:
            continue
        for chip in arguments.chips:
            f = compile_variant(variant, chip)
            results.setdefault(variant.name, {})[f"sm_{chip}"] = asdict(f)
            print(
                f"{variant.name:34} {'sm_' + str(chip):>7} {f.registers:5} {f.spills:6} {f.shared:7} "
                f"{f.loop_async_copies:7} {f.loop_instructions:5} {f.instructions_per_byte:9.3f}",
                flush=True,
            )
    if arguments.out:
        record = {"triton": triton.__version__, "variants": results}
        arguments.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
