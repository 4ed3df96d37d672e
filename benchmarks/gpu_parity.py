# SPDX-License-Identifier: Apache-2.0
"""Every operator on a device against its float32 reference, on ragged streams; one row per case.

    python -m benchmarks.gpu_parity [--checks dense,int4] [--device cuda] [--small]

Rows that no stream uses, and memory that a kernel should write, hold NaN. An error is the largest difference, relative to the
largest entry of the reference. The first case of every kernel and type comes first, then the second of each, and so on.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu_parts import Row, Task, part_arguments, serve
from benchmarks.problems import Corrected, Coupled, Dense, Rotated, Streams, Uniform, generator
from kvpress import kernels
from kvpress.cache.attention import Logits, attend, flash
from kvpress.kernels import BITS, CODE_BITS
from kvpress.kernels.attention import reference as attention_reference
from kvpress.kernels.mass import reference as mass_reference
from kvpress.kernels.prefill import reference as prefill_reference
from kvpress.kernels.quantisation import reference as quantise_reference
from kvpress.kernels.scores import reference as scores_reference
from kvpress.kernels.selection import reference as selection_reference

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest errors: four roundings of a weight for products of 16 bits, another order of sums for float32."""

CODED_LIMIT = LIMITS[torch.float16]
"""Kernels on codes multiply in float16, for queries of every dtype."""

Results = Sequence[Tensor]
Call = Callable[[], Results]


@dataclass(frozen=True)
class Sizes:
    """Shapes that are checked."""

    dims: tuple[int, ...]
    """Head dims."""
    lengths: list[int]
    """Lengths of the streams."""
    queries: tuple[int, ...]
    """Queries of a stream."""
    long: list[int]
    """Lengths of streams that several programs choose from."""


FULL = Sizes((128, 64, 96, 256), [0, 1, 17, 129, 1000, 4101], (1, 8, 80), [0, 5, 20000, 70001])
SMALL = Sizes((128, 64), [0, 1, 17, 129], (1,), [0, 5, 600])


@dataclass(frozen=True)
class Case:
    """One problem of a kernel."""

    kind: str
    """Kernel and dtype."""
    name: str
    limit: float
    """Largest relative error."""
    build: Callable[[], tuple[Call, Call]]
    """Returns a call of the operator and a call of its reference."""


def error(results: Tensor, expected: Tensor) -> float:
    """Return the relative error; infinite where minus infinities are in different places, NaN where anything is NaN."""
    results, expected = results.float(), expected.float()
    nothing = expected.isneginf()
    if results.shape != expected.shape or not torch.equal(results.isneginf(), nothing):
        return float("inf")
    results, expected = results.masked_fill(nothing, 0.0), expected.masked_fill(nothing, 0.0)
    if not results.numel():
        return 0.0
    return float((results - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def worst_error(results: Results, expected: Results) -> float:
    """Return the largest error of several results; NaN counts as the largest."""
    errors = [error(ours, theirs) for ours, theirs in zip(results, expected, strict=True)]
    return max(errors, key=lambda value: float("inf") if value != value else value)


def in_turn(cases: Iterator[Case]) -> list[Case]:
    """Sort cases: the first of every kind, then the second of every kind, and so on."""
    seen: Counter[str] = Counter()
    ranked = []
    for case in cases:
        ranked.append((seen[case.kind], case))
        seen[case.kind] += 1
    return [case for _, case in sorted(ranked, key=lambda pair: pair[0])]


def attention_case(kind: str, name: str, limit: float, build: Callable[[], Any], **options: Any) -> Case:
    """Compare `attend` of a cache with its reference; options that are functions are called with the cache."""

    def calls() -> tuple[Call, Call]:
        cache = build()
        arguments = {key: value(cache) if callable(value) else value for key, value in options.items()}
        return lambda: cache.attend(**arguments), lambda: cache.reference(**arguments)

    return Case(kind, name, limit, calls)


def random_log_weight(cache: Any) -> Tensor:
    """Return a log-weight per stored row."""
    device = cache.streams.q.device
    return torch.randn(cache.streams.rows, generator=generator(device), device=device)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": 3},
    "softcap": {"softcap": 5.0},
    "log_weight": {"log_weight": random_log_weight, "causal": 3},
}


def fenced(streams: Streams) -> Dense:
    """Return dense rows with NaN wherever no stream reads."""
    cache = Dense(streams)
    unused = torch.ones(streams.rows, dtype=torch.bool, device=streams.q.device)
    for rows in streams.where.numbers():
        unused[rows] = False
    for tensor in cache.tensors():
        tensor[unused] = float("nan")
    return cache


def listed_case(kind: str, name: str, limit: float, build: Callable[[], Any]) -> Case:
    """Compare attention to sampled rows with the reference of the cache."""
    return attention_case(f"{kind}, listed", name, limit, build, where=lambda cache: cache.streams.sample(3))


def dense_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    def build(dtype: torch.dtype, dim: int, queries: int) -> Callable[[], Dense]:
        return lambda: fenced(Streams.random(sizes.lengths, queries, dim, dtype, device, gap=5))

    for dtype in FLOATS:
        label, limit = named(dtype), LIMITS[dtype]
        for dim in sizes.dims:
            yield attention_case(label, f"decode {label} D{dim}", limit, build(dtype, dim, 4))
            yield listed_case(label, f"select {label} D{dim}", limit, build(dtype, dim, 4))
        for queries in sizes.queries:
            yield attention_case(label, f"decode {label} M{queries}", limit, build(dtype, 128, queries))
        for option, arguments in OPTIONS.items():
            yield attention_case(label, f"decode {label} {option}", limit, build(dtype, 128, 12), **arguments)


def uniform_cases(bits: int) -> Callable[[Sizes, str], Iterator[Case]]:
    """Return the cases of one bit width, which has its own code for unpacking."""

    def cases(sizes: Sizes, device: str) -> Iterator[Case]:
        def build(dim: int = 128, queries: int = 4, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
            return lambda: Uniform(Streams.random(sizes.lengths, queries, dim, dtype, device, gap=5), bits, **settings)

        built = {f"D{dim}": build(dim, value_group=(1, 16)) for dim in sizes.dims}
        built |= {named(dtype): build(dtype=dtype) for dtype in FLOATS}
        built |= {f"M{queries}": build(queries=queries) for queries in sizes.queries}
        built |= {
            "keys per token": build(key_group=(1, 32)),
            "keys in groups of 64": build(key_group=(64, 1)),
            "one scale per row": build(key_group=(1, 128), value_group=(1, 128)),
            "blocks": build(key_group=(5, 4), value_group=(32, 1)),
            "float32 scales": build(scales=torch.float32),
            "4 bit values": build(value_bits=4),
        }
        for name, make in built.items():
            kind = name if name in ("keys per token", "one scale per row") else "decode"
            yield attention_case(kind, f"decode {name}", CODED_LIMIT, make)
        for name in ("D64", "D128", "keys per token", "blocks"):
            yield listed_case("decode", f"select {name}", CODED_LIMIT, built[name])
        for option, arguments in OPTIONS.items():
            yield attention_case("decode", f"decode {option}", CODED_LIMIT, build(queries=12), **arguments)
        yield attention_case("decode", "decode after evictions", CODED_LIMIT, build(evicted=True))

    return cases


def rotated_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Rows in a Hadamard basis with one step each, as `rotated` and `frontier` store them."""
    for bits, value_bits in ((2, 2), (3, 3), (4, 3), (4, 4), (8, 4), (8, 8)):
        name = f"{bits} bit" if bits == value_bits else f"{bits} and {value_bits} bit"
        for dim in sizes.dims:
            streams = Streams.random(sizes.lengths, 4, dim, torch.bfloat16, device, gap=5)

            def build(s: Streams = streams, bits: int = bits, value_bits: int = value_bits) -> Rotated:
                return Rotated(s, bits, value_bits=value_bits)

            yield attention_case(name, f"decode {name} D{dim}", CODED_LIMIT, build)
        yield listed_case(name, f"select {name} D{dim}", CODED_LIMIT, build)


def correction_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    for bits in (2, 4):
        for dim in sizes.dims:
            streams = Streams.random(sizes.lengths, 4, dim, torch.bfloat16, device, gap=5)

            def build(s: Streams = streams, bits: int = bits, **settings: Any) -> Corrected:
                return Corrected(s, bits, value_group=(1, 16), **settings)

            yield attention_case(f"{bits} bit", f"decode {bits} bit D{dim}", CODED_LIMIT, build)
            yield listed_case(f"{bits} bit", f"select {bits} bit D{dim}", CODED_LIMIT, build)
    for rank in (1, 3, 16):
        streams = Streams.random(sizes.lengths, 4, 128, torch.bfloat16, device, gap=5)
        yield attention_case(
            "rank", f"rank {rank}", CODED_LIMIT, lambda s=streams, r=rank: Corrected(s, 2, rank=r, chunk=50)
        )


def lookup_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    def build(dim: int = 128, queries: int = 4, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
        return lambda: Coupled(Streams.random(sizes.lengths, queries, dim, dtype, device, gap=5), books=3, **settings)

    for rotary in (False, True):
        settings = {f"D{dim}": {"dim": dim} for dim in sizes.dims}
        settings |= {named(dtype): {"dtype": dtype} for dtype in FLOATS}
        settings |= {f"M{queries}": {"queries": queries} for queries in sizes.queries}
        # The number of channels per code keeps the codebooks small and the codes of a row whole bytes.
        settings |= {f"{bits} bit": {"bits": bits, "coupled": 4 if bits > 8 else 2} for bits in CODE_BITS}
        for name, arguments in settings.items():
            make = build(**arguments, rotary=rotary)
            turned = ", keys before rotary" if rotary else ""
            kind = f"{name if 'bit' in name else 'decode'}{turned}"
            yield attention_case(kind, f"decode {name}{turned}", CODED_LIMIT, make)
            if name in ("D128", "4 bit", "10 bit"):
                yield listed_case(f"decode{turned}", f"select {name}{turned}", CODED_LIMIT, make)
    yield attention_case("float32 books", "decode float32 books", CODED_LIMIT, build(books_dtype=torch.float32))
    for dtype in (torch.float16, torch.float32):
        make, name = build(bits=4, coupled=1, shared=True, books_dtype=dtype), f"row scales and one {named(dtype)} book"
        yield attention_case("row scales", f"decode {name}", CODED_LIMIT, make)
        yield listed_case("row scales", f"select {name}", CODED_LIMIT, make)
    for option, arguments in OPTIONS.items():
        yield attention_case("decode", f"decode {option}", CODED_LIMIT, build(queries=12), **arguments)


def column_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    statistics: dict[str, Callable[..., Tensor]] = {
        "sum": kernels.column_mass,
        "squares": lambda *a, **k: kernels.column_mass(*a, power=2, **k),
        "max": kernels.column_max,
    }

    def case(name: str, dtype: torch.dtype, dim: int, statistic: Any, causal: int, has_sums: bool) -> Case:
        def calls() -> tuple[Call, Call]:
            cache = fenced(Streams.random(sizes.lengths, 4 * max(1, causal), dim, dtype, device, gap=5))
            s = cache.streams
            rows = replace(cache.rows, log_weight=random_log_weight(cache))
            where = (s.q, rows, s.where, s.options(causal=causal))
            lse = cache.reference(log_weight=rows.log_weight, causal=causal)[1] if has_sums else None
            return (
                lambda: [statistics[statistic](*where, lse=lse)],
                lambda: [mass_reference.receive(*where, statistic, lse)],
            )

        return Case(f"{statistic} {named(dtype)}", name, LIMITS[dtype], calls)

    for dtype in FLOATS:
        for dim in sizes.dims:
            yield case(f"sum {named(dtype)} D{dim}", dtype, dim, "sum", 16, True)
        for statistic in statistics:
            for has_sums in (False, True):
                name = f"{statistic} {named(dtype)}{' of given sums' if has_sums else ''}"
                yield case(name, dtype, 128, statistic, 0, has_sums)


def prefill_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Sparse causal attention of the newest tokens of two prompts, one of which begins with padding."""
    total = sizes.lengths[-1]
    queries, pads = total - total // 3, total // 5

    def case(name: str, dtype: torch.dtype, dim: int, block: int, columns: bool, softcap: float | None) -> Case:
        def calls() -> tuple[Call, Call]:
            seeded = generator(device)

            def random(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=seeded, device=device)

            q, keys, values = (
                random(2, heads, n, dim).to(dtype) for heads, n in ((8, queries), (2, total), (2, total))
            )
            chosen = random(2, 8, -(-queries // block), -(-total // block)) > 1
            tiles = kernels.Tiles(chosen, block, random(2, 8, total) > 2 if columns else None)
            real = torch.arange(total, device=device) >= torch.tensor([[0], [pads]], device=device)
            lists = tiles.lists(queries, total)
            return (
                lambda: kernels.block_prefill(q, keys, values, tiles, scale=0.1, softcap=softcap, real=real),
                lambda: prefill_reference.attend(q, keys, values, lists, real, 0.1, softcap),
            )

        return Case(f"{named(dtype)}{' columns' if columns else ''}", name, LIMITS[dtype], calls)

    for dtype in FLOATS:
        for dim in sizes.dims:
            yield case(f"{named(dtype)} D{dim}", dtype, dim, 64, False, None)
        yield case(f"{named(dtype)} columns", dtype, 128, 64, True, None)
    for block in (16, 100, 128):
        yield case(f"blocks of {block}", torch.bfloat16, 128, block, True, 5.0)


def page_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    def bounds(dtype: torch.dtype, dim: int) -> tuple[Call, Call]:
        cache = Dense(Streams.random(sizes.lengths, 4, dim, dtype, device, gap=5))
        s, low, high = cache.streams, torch.minimum(*cache.tensors()), torch.maximum(*cache.tensors())
        sides = kernels.Dense(low), kernels.Dense(high)
        return (
            lambda: [kernels.page_bounds(s.q, low, high, s.where)],
            lambda: [scores_reference.score(s.q, *sides, s.where, "max", s.longest)],
        )

    def labels(dtype: torch.dtype, width: int, reduce: str, bits: int | None = None) -> tuple[Call, Call]:
        cache = fenced(Streams.random(sizes.lengths, 4, width, dtype, device, gap=5))
        s, keys = cache.streams, cache.rows.keys
        if bits is not None:
            keys = kernels.quantise(Dense(s).tensors()[0], bits, (1, width))
        return (
            lambda: [kernels.label_scores(s.q, keys, s.where, reduce=reduce)],
            lambda: [scores_reference.score(s.q, None, keys, s.where, reduce, s.longest)],
        )

    for dtype in FLOATS:
        for dim in sizes.dims:
            yield Case(
                f"bounds {named(dtype)}",
                f"bounds {named(dtype)} D{dim}",
                LIMITS[dtype],
                lambda t=dtype, d=dim: bounds(t, d),
            )
        for width in (8, 16, 32):
            for reduce in ("max", "sum"):
                yield Case(
                    f"labels {named(dtype)}", f"labels {named(dtype)} {width} {reduce}", LIMITS[dtype],
                    lambda t=dtype, w=width, r=reduce: labels(t, w, r),
                )  # fmt: skip
    for bits in (4, 8):
        for reduce in ("max", "sum"):
            yield Case(
                f"labels {bits} bit", f"labels {bits} bit 32 {reduce}", CODED_LIMIT,
                lambda b=bits, r=reduce: labels(torch.bfloat16, 32, r, b),
            )  # fmt: skip


def selection_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """The best rows of ragged streams; a stream's rows are listed in order, so that the lists are equal."""
    for lengths in (sizes.lengths, sizes.long):
        yield from _selections(lengths, device)


def _selections(lengths: list[int], device: str) -> Iterator[Case]:
    streams = Streams.random(lengths, 1, 16, torch.float32, device)
    capacity = streams.longest
    scores = torch.randn(len(lengths), capacity, generator=generator(device), device=device)
    scores[torch.arange(capacity, device=device) >= streams.lengths[:, None]] = float("-inf")

    def calls(k: int, first: int, last: int) -> tuple[Call, Call]:
        return (
            lambda: kernels.top_rows(scores, streams.where, k, first=first, last=last),
            lambda: selection_reference.choose(scores, streams.where, k, first, last),
        )

    scores = (scores * 64).round() / 64  # many are equal
    for k in sorted({1, 16, capacity // 4, capacity}):
        yield Case("best rows", f"best {k} of {capacity} rows", 0.0, lambda k=k: calls(k, 0, 0))
        if k > 5:
            yield Case(
                "best rows",
                f"best {k} of {capacity} rows, 2 first and 3 last among them",
                0.0,
                lambda k=k: calls(k, 2, 3),
            )


def merge_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Attention over several parts merged into one, including parts of which a query reads nothing."""

    def calls(parts: int, queries: int, dim: int) -> tuple[Call, Call]:
        random = generator(device)
        outs = torch.randn(parts, 6, queries, dim, generator=random, device=device)
        sums = 3 * torch.randn(parts, 6, queries, generator=random, device=device)
        sums[0, 1], sums[:, 2] = float("-inf"), float("-inf")
        outs = outs.masked_fill(sums.isneginf()[..., None], 0.0)
        pairs = list(zip(outs, sums, strict=True))
        return lambda: kernels.merge(pairs), lambda: attention_reference.merge(pairs)

    for dim in sizes.dims:
        yield Case("merge", f"2 parts D{dim}", LIMITS[torch.float32], lambda d=dim: calls(2, 4, d))
    for parts, queries in ((3, 1), (5, 80)):
        yield Case(
            "merge", f"{parts} parts M{queries}", LIMITS[torch.float32], lambda p=parts, m=queries: calls(p, m, 128)
        )


def flash_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Outputs and log-sum-exp of torch's FlashAttention, which the second reading of a prompt uses."""

    def calls(dim: int, dtype: torch.dtype) -> tuple[Call, Call]:
        random, logits = generator(device), Logits(dim**-0.5)
        q, keys, values = (
            torch.randn(2, 4, length, dim, generator=random, device=device).to(dtype)
            for length in (300, max(sizes.lengths), max(sizes.lengths))
        )

        def ours() -> Results:
            partial = flash(q, keys, values, logits)
            if partial is None:
                raise RuntimeError("torch has no FlashAttention for these tensors")
            return partial

        queries, flat_keys, flat_values = (tensor.float().flatten(0, 1) for tensor in (q, keys, values))
        return ours, lambda: attend(queries, flat_keys, flat_values, logits)

    for dim in sizes.dims:
        for dtype in (torch.float16, torch.bfloat16):
            yield Case("flash", f"{str(dtype)[6:]} D{dim}", LIMITS[dtype], lambda d=dim, t=dtype: calls(d, t))


def quantise_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Codes, scales and zeros must equal those of the reference bit by bit."""

    def case(dtype: torch.dtype, dim: int, bits: int, group: tuple[int, int]) -> Case:
        def calls() -> tuple[Call, Call]:
            x = torch.randn(1003, dim, generator=generator(device), device=device).to(dtype)
            x[:40] = 1.5  # groups of equal values
            scales = torch.float32 if dtype == torch.float32 else torch.float16
            return (
                lambda: parts(kernels.quantise(x, bits, group)),
                lambda: parts(quantise_reference.encode(x, bits, group, scales)[0]),
            )

        return Case(f"{bits} bit", f"{bits} bit {named(dtype)} D{dim} {group[0]}x{group[1]}", 0.0, calls)

    def parts(packed: kernels.Packed) -> Results:
        return [packed.codes, packed.scale, packed.zero]

    for bits in BITS:
        for group in ((32, 1), (1, 32)):
            yield case(torch.bfloat16, 128, bits, group)
    for dim in sizes.dims:
        yield case(torch.bfloat16, dim, 3, (5, 4))
    for dtype in FLOATS:
        yield case(dtype, 128, 4, (64, 1))


def named(dtype: torch.dtype) -> str:
    """Return the name of a dtype."""
    return str(dtype).removeprefix("torch.")


CHECKS: dict[str, Callable[[Sizes, str], Iterator[Case]]] = {
    "dense": dense_cases,
    **{f"int{bits}": uniform_cases(bits) for bits in BITS},
    "rotated": rotated_cases,
    "corrections": correction_cases,
    "lookup": lookup_cases,
    "columns": column_cases,
    "prefill": prefill_cases,
    "pages": page_cases,
    "selection": selection_cases,
    "merge": merge_cases,
    "flash": flash_cases,
    "quantise": quantise_cases,
}
"""Checks by name; a format whose check fails is not timed."""


def compare(case: Case) -> Row:
    """Return the error of a case and whether it is within its limit."""
    ours, reference = case.build()
    worst = worst_error(ours(), reference())
    return {"limit": case.limit, "error": worst, "passed": worst <= case.limit}


def tasks(names: Sequence[str], sizes: Sizes, device: str) -> list[Task]:
    """Return the cases of several checks, the most important first."""
    cases = [(name, case) for name in names for case in in_turn(CHECKS[name](sizes, device))]
    return [Task({"check": name, "case": case.name}, lambda c=case: compare(c)) for name, case in cases]


def main() -> None:
    parser = part_arguments(__doc__)
    parser.add_argument("--checks", type=lambda names: names.split(","), default=list(CHECKS))
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    # With deterministic algorithms, torch fills new memory with NaN, so that an element that a kernel does not write shows.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore")
    with torch.no_grad():
        serve(tasks(options.checks, SMALL if options.small else FULL, options.device), options)


if __name__ == "__main__":
    main()
