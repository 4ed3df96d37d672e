# SPDX-License-Identifier: Apache-2.0
"""Every operator on a device against its float32 reference, on ragged streams; one finding per case, and one per check.

    python -m benchmarks.gpu_parity [--checks dense,int4] [--device cuda] [--small]

Rows that no stream uses, and memory that a kernel should write, hold NaN. An error is the largest difference, relative to the
largest entry of the reference.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

import kvpress
from benchmarks.gpu_parts import Budget, emit, part_arguments, reason
from benchmarks.problems import Corrected, Coupled, Dense, Partial, Streams, Uniform, generator
from kvpress import kernels
from kvpress.kernels import BITS, CODE_BITS
from kvpress.kernels.mass import reference as mass_reference
from kvpress.kernels.prefill import reference as prefill_reference
from kvpress.kernels.quantisation import reference as quantise_reference
from kvpress.kernels.scores import reference as scores_reference

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
LIMITS = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Four roundings of a weight, which is what products of 16 bits cost; float32 sums in another order."""

CODED_LIMIT = LIMITS[torch.float16]
"""Kernels on codes multiply in float16 whatever the queries are."""


@dataclass(frozen=True)
class Sizes:
    """Which shapes are checked."""

    dims: tuple[int, ...]
    lengths: list[int]
    queries: tuple[int, ...]
    new_tokens: int


FULL = Sizes((128, 64, 96, 256), [0, 1, 17, 129, 1000, 4101], (1, 8, 80), 30)
SMALL = Sizes((128, 64), [0, 1, 17, 129], (1,), 4)


@dataclass(frozen=True)
class Case:
    """A problem: `run` returns what the operator found and what it should have found."""

    name: str
    limit: float
    run: Callable[[], tuple[Sequence[Tensor], Sequence[Tensor]]]


def error(found: Tensor, expected: Tensor) -> float:
    """Relative error; infinite where minus infinities stand elsewhere, NaN where anything is NaN."""
    found, expected = found.float(), expected.float()
    nothing = expected.isneginf()
    if found.shape != expected.shape or not torch.equal(found.isneginf(), nothing):
        return float("inf")
    found, expected = found.masked_fill(nothing, 0.0), expected.masked_fill(nothing, 0.0)
    if not found.numel():
        return 0.0
    return float((found - expected).abs().max() / expected.abs().max().clamp_min(1e-12))


def attention_case(name: str, limit: float, build: Callable[[], Any], **options: Any) -> Case:
    """Compare `attend` of a cache with its reference; tensors among the options are made from the cache's rows."""

    def run() -> tuple[Partial, Partial]:
        cache = build()
        given = {key: value(cache) if callable(value) else value for key, value in options.items()}
        return cache.attend(**given), cache.reference(**given)

    return Case(name, limit, run)


def random_log_weight(cache: Any) -> Tensor:
    """A log-weight per stored row."""
    device = cache.streams.q.device
    return torch.randn(cache.streams.rows, generator=generator(device), device=device)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": 3},
    "softcap": {"softcap": 5.0},
    "log_weight": {"log_weight": random_log_weight, "causal": 3},
}


def fenced(streams: Streams) -> Dense:
    """Dense rows with NaN wherever no stream reads."""
    cache = Dense(streams)
    unused = torch.ones(streams.rows, dtype=torch.bool, device=streams.q.device)
    for rows in streams.where.numbers():
        unused[rows] = False
    for tensor in cache.tensors():
        tensor[unused] = float("nan")
    return cache


def listed_case(name: str, limit: float, build: Callable[[], Any]) -> Case:
    """Compare attention to sampled rows with the reference of the cache."""

    def run() -> tuple[Partial, Partial]:
        cache = build()
        where = cache.streams.sample(3)
        return cache.attend(where), cache.reference(where)

    return Case(name, limit, run)


def dense_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    def build(dtype: torch.dtype, dim: int, queries: int) -> Callable[[], Dense]:
        return lambda: fenced(Streams.random(sizes.lengths, queries, dim, dtype, device, gap=5))

    for dtype in FLOATS:
        label = named(dtype)
        for dim in sizes.dims:
            yield attention_case(f"decode {label} D{dim}", LIMITS[dtype], build(dtype, dim, 4))
            yield listed_case(f"select {label} D{dim}", LIMITS[dtype], build(dtype, dim, 4))
        for queries in sizes.queries:
            yield attention_case(f"decode {label} M{queries}", LIMITS[dtype], build(dtype, 128, queries))
        for option, given in OPTIONS.items():
            yield attention_case(f"decode {label} {option}", LIMITS[dtype], build(dtype, 128, 12), **given)


def uniform_cases(bits: int) -> Callable[[Sizes, str], Iterator[Case]]:
    """Cases of one bit width: its unpacking is code of its own."""

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
            yield attention_case(f"decode {name}", CODED_LIMIT, make)
        for name in ("D64", "D128", "keys per token", "blocks"):
            yield listed_case(f"select {name}", CODED_LIMIT, built[name])
        for option, given in OPTIONS.items():
            yield attention_case(f"decode {option}", CODED_LIMIT, build(queries=12), **given)
        yield attention_case("decode after evictions", CODED_LIMIT, build(evicted=True))

    return cases


def correction_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    for bits in (2, 4):
        for dim in sizes.dims:
            streams = Streams.random(sizes.lengths, 4, dim, torch.bfloat16, device, gap=5)

            def build(s: Streams = streams, bits: int = bits, **settings: Any) -> Corrected:
                return Corrected(s, bits, value_group=(1, 16), **settings)

            yield attention_case(f"decode {bits} bit D{dim}", CODED_LIMIT, build)
            yield listed_case(f"select {bits} bit D{dim}", CODED_LIMIT, build)
    for rank in (1, 3, 16):
        streams = Streams.random(sizes.lengths, 4, 128, torch.bfloat16, device, gap=5)
        yield attention_case(f"rank {rank}", CODED_LIMIT, lambda s=streams, r=rank: Corrected(s, 2, rank=r, chunk=50))


def lookup_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    def build(dim: int = 128, queries: int = 4, dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
        return lambda: Coupled(Streams.random(sizes.lengths, queries, dim, dtype, device, gap=5), books=3, **settings)

    for rotary in (False, True):
        settings = {f"D{dim}": {"dim": dim} for dim in sizes.dims}
        settings |= {named(dtype): {"dtype": dtype} for dtype in FLOATS}
        settings |= {f"M{queries}": {"queries": queries} for queries in sizes.queries}
        # As many channels per code as keep the books small and the codes of a row whole bytes.
        settings |= {f"{bits} bit": {"bits": bits, "coupled": 4 if bits > 8 else 2} for bits in CODE_BITS}
        for name, given in settings.items():
            make = build(**given, rotary=rotary)
            turned = ", keys before rotary" if rotary else ""
            yield attention_case(f"decode {name}{turned}", CODED_LIMIT, make)
            if name in ("D128", "4 bit", "10 bit"):
                yield listed_case(f"select {name}{turned}", CODED_LIMIT, make)
    yield attention_case("decode float32 books", CODED_LIMIT, build(books_dtype=torch.float32))
    for dtype in (torch.float16, torch.float32):
        make = build(bits=4, coupled=1, shared=True, books_dtype=dtype)
        yield attention_case(f"decode row scales and one {named(dtype)} book", CODED_LIMIT, make)
        yield listed_case(f"select row scales and one {named(dtype)} book", CODED_LIMIT, make)
    for option, given in OPTIONS.items():
        yield attention_case(f"decode {option}", CODED_LIMIT, build(queries=12), **given)


def column_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    statistics: dict[str, Callable[..., Tensor]] = {
        "sum": kernels.column_mass,
        "squares": lambda *a, **k: kernels.column_mass(*a, power=2, **k),
        "max": kernels.column_max,
    }

    def case(name: str, dtype: torch.dtype, dim: int, statistic: Any, causal: int, given: bool) -> Case:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            cache = fenced(Streams.random(sizes.lengths, 4 * max(1, causal), dim, dtype, device, gap=5))
            s = cache.streams
            rows = replace(cache.rows, log_weight=random_log_weight(cache))
            where = (s.q, rows, s.where, s.options(causal=causal))
            lse = cache.reference(log_weight=rows.log_weight, causal=causal)[1] if given else None
            found = statistics[statistic](*where, lse=lse)
            return [found], [mass_reference.receive(*where, statistic, lse)]

        return Case(name, LIMITS[dtype], run)

    for dtype in FLOATS:
        for dim in sizes.dims:
            yield case(f"sum {named(dtype)} D{dim}", dtype, dim, "sum", 16, True)
        for statistic in statistics:
            for given in (False, True):
                name = f"{statistic} {named(dtype)}{' of given sums' if given else ''}"
                yield case(name, dtype, 128, statistic, 0, given)


def prefill_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Sparse causal attention of the newest tokens of two prompts, one of which begins with pads."""
    total = sizes.lengths[-1]
    queries, pads = total - total // 3, total // 5

    def case(name: str, dtype: torch.dtype, dim: int, block: int, columns: bool, softcap: float | None) -> Case:
        def run() -> tuple[Partial, Partial]:
            seeded = generator(device)

            def random(*shape: int) -> Tensor:
                return torch.randn(*shape, generator=seeded, device=device)

            q, keys, values = (
                random(2, heads, n, dim).to(dtype) for heads, n in ((8, queries), (2, total), (2, total))
            )
            chosen = random(2, 8, -(-queries // block), -(-total // block)) > 1
            tiles = kernels.Tiles(chosen, block, random(2, 8, total) > 2 if columns else None)
            real = torch.arange(total, device=device) >= torch.tensor([[0], [pads]], device=device)
            found = kernels.block_prefill(q, keys, values, tiles, scale=0.1, softcap=softcap, real=real)
            lists = tiles.lists(queries, total)
            return found, prefill_reference.attend(q, keys, values, lists, real, 0.1, softcap)

        return Case(name, LIMITS[dtype], run)

    for dtype in FLOATS:
        for dim in sizes.dims:
            yield case(f"{named(dtype)} D{dim}", dtype, dim, 64, False, None)
        yield case(f"{named(dtype)} columns", dtype, 128, 64, True, None)
    for block in (16, 100, 128):
        yield case(f"blocks of {block}", torch.bfloat16, 128, block, True, 5.0)


def page_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    def bounds(dtype: torch.dtype, dim: int) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            cache = Dense(Streams.random(sizes.lengths, 4, dim, dtype, device, gap=5))
            s, low, high = cache.streams, torch.minimum(*cache.tensors()), torch.maximum(*cache.tensors())
            found = kernels.page_bounds(s.q, low, high, s.where)
            sides = kernels.Dense(low), kernels.Dense(high)
            return [found], [scores_reference.score(s.q, *sides, s.where, "max", s.longest)]

        return run

    def labels(dtype: torch.dtype, width: int, reduce: str) -> Callable[[], tuple[list[Tensor], list[Tensor]]]:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            cache = fenced(Streams.random(sizes.lengths, 4, width, dtype, device, gap=5))
            s, keys = cache.streams, cache.rows.keys
            found = kernels.label_scores(s.q, keys, s.where, reduce=reduce)
            return [found], [scores_reference.score(s.q, None, keys, s.where, reduce, s.longest)]

        return run

    for dtype in FLOATS:
        for dim in sizes.dims:
            yield Case(f"bounds {named(dtype)} D{dim}", LIMITS[dtype], bounds(dtype, dim))
        for width in (8, 16, 32):
            for reduce in ("max", "sum"):
                yield Case(f"labels {named(dtype)} {width} {reduce}", LIMITS[dtype], labels(dtype, width, reduce))


def quantise_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """Codes, scales and zeros must equal those of the reference bit by bit."""

    def case(dtype: torch.dtype, dim: int, bits: int, group: tuple[int, int]) -> Case:
        def run() -> tuple[Sequence[Tensor], Sequence[Tensor]]:
            x = torch.randn(1003, dim, generator=generator(device), device=device).to(dtype)
            x[:40] = 1.5  # groups of equal values
            scales = torch.float32 if dtype == torch.float32 else torch.float16
            both = kernels.quantise(x, bits, group), quantise_reference.encode(x, bits, group, scales)[0]
            ours, expected = ([side.codes, side.scale, side.zero] for side in both)
            return ours, expected

        return Case(f"{bits} bit {named(dtype)} D{dim} {group[0]}x{group[1]}", 0.0, run)

    for bits in BITS:
        for group in ((32, 1), (1, 32)):
            yield case(torch.bfloat16, 128, bits, group)
    for dim in sizes.dims:
        yield case(torch.bfloat16, dim, 3, (5, 4))
    for dtype in FLOATS:
        yield case(dtype, 128, 4, (64, 1))


def generation_cases(sizes: Sizes, device: str) -> Iterator[Case]:
    """A random Llama, left padding included, must say the same inside presses that read every pair as it was."""
    config = LlamaConfig(
        vocab_size=128, hidden_size=256, intermediate_size=512, num_hidden_layers=3, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, initializer_range=0.2,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).to(device).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    ids = torch.randint(3, 128, (3, 200), device=device)
    mask = torch.ones_like(ids)
    mask[1, :60], mask[2, :150] = 0, 0
    settings = {"attention_mask": mask, "max_new_tokens": sizes.new_tokens, "do_sample": False}
    plain = model.generate(ids, **settings)

    def case(spec: str, **options: Any) -> Case:
        def run() -> tuple[list[Tensor], list[Tensor]]:
            with kvpress.get_press(spec)(model, **options):
                return [model.generate(ids, **settings)], [plain]

        return Case(f"{spec}{', captured' if options else ''}", 0.0, run)

    for spec in ("none", "snapkv:0", "kivi:bits=2,residual_length=512", "quest:budget=4096"):
        yield case(spec)
    if device != "cpu":
        yield case("snapkv:0", capture=True)


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


CHECKS: dict[str, Callable[[Sizes, str], Iterator[Case]]] = {
    "dense": dense_cases,
    **{f"int{bits}": uniform_cases(bits) for bits in BITS},
    "corrections": correction_cases,
    "lookup": lookup_cases,
    "columns": column_cases,
    "prefill": prefill_cases,
    "pages": page_cases,
    "quantise": quantise_cases,
    "generation": generation_cases,
}
"""What is checked, and by its name here stops the timing of what depends on it."""


def check(name: str, sizes: Sizes, device: str, budget: Budget) -> None:
    """Run the cases of one check and report each; the last finding says whether time was left for all."""
    for case in CHECKS[name](sizes, device):
        if not budget.left:
            emit(check=name, complete=False)
            return
        finding: dict[str, Any] = {"check": name, "case": case.name, "limit": case.limit}
        try:
            found, expected = case.run()
            errors = [error(f, e) for f, e in zip(found, expected, strict=True)]
            worst = max(errors, key=lambda value: float("inf") if value != value else value)
            finding |= {"error": worst, "passed": worst <= case.limit}
        except Exception as problem:  # whatever a compiler or a driver raises is a finding, not the end
            finding |= {"error": reason(problem), "passed": False}
        emit(**finding)
    emit(check=name, complete=True)


def main() -> None:
    parser = part_arguments(__doc__)
    parser.add_argument("--checks", default=",".join(CHECKS))
    args = parser.parse_args()
    if args.device == "cpu":
        torch.set_num_threads(1)
    # With deterministic algorithms, torch fills what it allocates with NaN: a kernel that leaves a gap shows it.
    torch.use_deterministic_algorithms(True, warn_only=True)
    warnings.filterwarnings("ignore")
    budget = Budget(args.seconds)
    with torch.no_grad():
        for name in args.checks.split(","):
            check(name, SMALL if args.small else FULL, args.device, budget)


if __name__ == "__main__":
    main()
