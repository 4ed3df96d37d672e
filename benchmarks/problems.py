# SPDX-License-Identifier: Apache-2.0
"""Random caches in every storage format, on any device, and float32 attention over them as the reference.

Pairs are stored as a cache stores them: on the host, large tensors are on huge pages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache import memory
from kvpress.kernels import STEP, Coded, Correction, Listed, Options, Packed, Ranges, Rotary, Rows, Where
from kvpress.kernels.attention import reference as plain
from kvpress.quant.hadamard import hadamard
from kvpress.quant.rotated import SteppedRows

Partial = tuple[Tensor, Tensor]
KEY_GROUP, VALUE_GROUP = (32, 1), (1, 32)


@dataclass(frozen=True)
class Streams:
    """Queries of N streams, and the place of each stream in a flat storage."""

    q: Tensor
    starts: Tensor
    lengths: Tensor
    rows: int
    longest: int

    @classmethod
    def random(
        cls, lengths: list[int], queries: int, dim: int, dtype: torch.dtype, device: str = "cpu", gap: int = 0
    ) -> Streams:
        """Return streams of the given lengths, with `gap` unused rows before each of them."""
        length = torch.tensor(lengths)
        starts = (length + gap).cumsum(0) - length
        q = torch.randn(len(lengths), queries, dim, generator=generator(device), device=device).to(dtype)
        return cls(q, starts.to(device), length.to(device), int(starts[-1] + length[-1]), max(lengths))

    @property
    def dim(self) -> int:
        """Channels of a query."""
        return self.q.shape[2]

    @property
    def scale(self) -> float:
        """Factor of the logits."""
        return self.dim**-0.5

    @property
    def where(self) -> Ranges:
        """All rows of each stream."""
        return Ranges(self.starts, self.lengths)

    def options(self, **options: Any) -> Options:
        """Options of the operators."""
        return Options(self.scale, **options)

    def sample(self, share: int) -> Listed:
        """Return some rows of each stream, one in `share`."""
        random, device = generator(self.q.device), self.q.device
        counts = -(-self.lengths // share)
        rows = torch.zeros(len(counts), -(-self.longest // share), dtype=torch.int32, device=device)
        for n, (start, length, count) in enumerate(
            zip(self.starts.tolist(), self.lengths.tolist(), counts.tolist(), strict=True)
        ):
            chosen = torch.randperm(length, generator=random, device=device)[:count].sort().values
            rows[n, :count] = (start + chosen).int()
        return Listed(rows, counts)


def generator(device: str | torch.device, seed: int = 0) -> torch.Generator:
    """Return a new random generator of a device."""
    return torch.Generator(device).manual_seed(seed)


class Cache(ABC):
    """Keys and values of some streams in one format."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams

    @abstractmethod
    def attend(self, **options: Any) -> Partial:
        """Run the operator: outputs float32 [N, M, Dv] and log-sum-exps float32 [N, M]."""

    @abstractmethod
    def reference(self, **options: Any) -> Partial:
        """Float32 attention over the same pairs."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """Return the stored tensors of the cache."""

    def read_bytes(self) -> int:
        """Return the bytes that one decode step reads."""
        return size(self.tensors())


class Stored(Cache):
    """A cache that is one operand of the kernels."""

    rows: Rows

    def attend(self, where: Where | None = None, log_weight: Tensor | None = None, **options: Any) -> Partial:
        s, rows = self.streams, replace(self.rows, log_weight=log_weight)
        return kernels.decode(s.q, rows, where or s.where, s.options(**options))

    def reference(self, where: Where | None = None, log_weight: Tensor | None = None, **options: Any) -> Partial:
        s, rows = self.streams, replace(self.rows, log_weight=log_weight)
        return plain.decode(s.q, rows, where or s.where, s.options(**options))

    def tensors(self) -> list[Tensor]:
        return present(*self.rows.keys.tensors(), *self.rows.values.tensors())


def as_cached(operand: Any) -> Any:
    """Move tensors, and dataclasses of them, into the memory of a cache: large ones on huge pages."""
    if isinstance(operand, Tensor):
        return memory.moved(operand)
    if not is_dataclass(operand) or isinstance(operand, type):
        return operand
    return replace(
        operand, **{field.name: as_cached(getattr(operand, field.name)) for field in fields(operand) if field.init}
    )


class Given(Stored):
    """A cache whose operand was made elsewhere."""

    def __init__(self, streams: Streams, rows: Rows) -> None:
        super().__init__(streams)
        self.rows = as_cached(rows)


def present(*tensors: Tensor | None) -> list[Tensor]:
    """Return the tensors that are not None."""
    return [tensor for tensor in tensors if tensor is not None]


def size(tensors: list[Tensor]) -> int:
    """Bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Dense(Stored):
    """Keys and values as the model computed them, in the dtype of the queries."""

    def __init__(self, streams: Streams, seed: int = 0) -> None:
        super().__init__(streams)
        q, random = streams.q, generator(streams.q.device, seed)
        shape = (streams.rows, streams.dim)
        keys, values = (torch.randn(shape, generator=random, device=q.device, dtype=q.dtype) for _ in range(2))
        self.rows = as_cached(Rows(kernels.Dense(keys), kernels.Dense(values)))


class Selected(Cache):
    """Dense pairs of which each stream reads one in `share`: the pairs with the highest label scores for its queries.

    A label is 16 channels of the key, in the dtype of the keys or in `label_bits` bits per channel with one scale and zero
    per row. `select` is the part of a decode step that chooses the pairs, `gather` attends to them; `attend` does both.
    """

    channels = 16

    def __init__(self, dense: Stored, share: int = 16, label_bits: int | None = None) -> None:
        super().__init__(dense.streams)
        keys = dense.tensors()[0]
        self.dense = Given(dense.streams, dense.rows)
        labels = keys[:, : self.channels].contiguous()
        self.labels: kernels.Dense | Packed = kernels.Dense(labels)
        if label_bits is not None:
            self.labels = kernels.quantise(labels, label_bits, (1, self.channels))
        self.count = dense.streams.longest // share
        self.counts = dense.streams.lengths.clamp_max(self.count)

    def score(self) -> Tensor:
        """Label scores of all rows, [N, longest stream]."""
        s = self.streams
        return kernels.label_scores(s.q[..., : self.channels].contiguous(), self.labels, s.where, capacity=s.longest)

    def select(self, scores: Tensor) -> Tensor:
        """Return the numbers of the best rows; `counts` is their number in each stream."""
        return kernels.top_rows(scores, self.streams.where, self.count)[0]

    def gather(self, rows: Tensor, **options: Any) -> Partial:
        """Attend to listed rows."""
        return self.dense.attend(Listed(rows, self.counts), **options)

    def choose(self) -> Tensor:
        """Return the numbers of the best rows, by scores that are not stored, as a selector chooses them."""
        s = self.streams
        label_queries = s.q[..., : self.channels].contiguous()
        return kernels.label_rows(label_queries, self.labels, s.where, self.count, capacity=s.longest)[0]

    def attend(self, **options: Any) -> Partial:
        return self.gather(self.choose(), **options)

    def reference(self, **options: Any) -> Partial:
        # Attend to the rows that the operators chose: rounding may swap two rows at the threshold, which is no error.
        return self.dense.reference(Listed(self.choose(), self.counts), **options)

    def tensors(self) -> list[Tensor]:
        return [*self.dense.tensors(), *present(*self.labels.tensors())]

    def read_bytes(self) -> int:
        pair = 2 * self.streams.dim * self.streams.q.element_size()
        return size(present(*self.labels.tensors())) + int(self.counts.sum()) * pair


class Uniform(Stored):
    """Random codes, with scales and zeros of a realistic size: rows uniform in about +-1.7, as a unit normal."""

    def __init__(
        self,
        streams: Streams,
        key_bits: int,
        value_bits: int | None = None,
        key_group: tuple[int, int] = KEY_GROUP,
        value_group: tuple[int, int] = VALUE_GROUP,
        scales: torch.dtype = torch.float16,
        seed: int = 0,
        evicted: bool = False,
    ) -> None:
        super().__init__(streams)
        random, device = generator(streams.q.device, seed), streams.q.device
        shape = (streams.rows, streams.dim)
        keys = random_packed(shape, key_bits, key_group, scales, random)
        values = random_packed(shape, value_bits or key_bits, value_group, scales, random)
        if evicted:  # eviction left a random number of rows in each group
            kept = torch.randint(0, len(keys.scale), shape[:1], generator=random, device=device)
            keys = replace(keys, group_lengths=kept.bincount(minlength=len(keys.scale)).int())
        self.rows = as_cached(Rows(keys, values))


def random_packed(
    shape: tuple[int, int], bits: int, group: tuple[int, int], scales: torch.dtype, random: torch.Generator
) -> Packed:
    """Return random codes of `bits` bits for rows of this shape."""
    rows, channels = shape
    device = random.device
    packed = (rows, channels * bits // 8)
    codes = torch.randint(0, 256, packed, dtype=torch.uint8, generator=random, device=device)
    groups = (-(-rows // group[0]), channels // group[1])
    step = 3.4 / (2**bits - 1)
    scale = step * (0.75 + 0.5 * torch.rand(groups, generator=random, device=device))
    zero = -1.7 + 0.2 * torch.randn(groups, generator=random, device=device)
    return Packed(codes, scale.to(scales), zero.to(scales), bits, group)


class Rotated(Stored):
    """Random codes with one step per row, in a Hadamard basis, as `rotated` and `frontier` store pairs."""

    def __init__(self, streams: Streams, bits: int, seed: int = 0, value_bits: int | None = None) -> None:
        super().__init__(streams)
        device, random = streams.q.device, generator(streams.q.device, seed)
        self.basis = kernels.Basis(rotation=hadamard(streams.dim, device))

        def side(bits: int) -> Packed:
            shape, size = (streams.rows, streams.dim * bits // 8), 3.4 / (2**bits - 1)
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random, device=device)
            step = size * (0.75 + 0.5 * torch.rand(streams.rows, generator=random, device=device))
            return SteppedRows(codes, step.half(), bits).operand()

        sides = side(bits), side(bits if value_bits is None else value_bits)
        self.rows = as_cached(Rows(*sides, key_basis=self.basis, value_basis=self.basis))

    def reference(self, where: Where | None = None, log_weight: Tensor | None = None, **options: Any) -> Partial:
        s, rows = self.streams, Rows(self.rows.keys, self.rows.values, log_weight)
        out, lse = plain.decode(self.basis.enter(s.q, None), rows, where or s.where, s.options(**options))
        return self.basis.leave(out, None), lse


class Corrected(Uniform):
    """Uniform codes with a correction of their error (GEAR): a low-rank term per run of rows, and 2% single channels.

    Without `outliers` there are no single channels (GEAR-L).
    """

    def __init__(
        self,
        streams: Streams,
        bits: int,
        rank: int = 4,
        chunk: int | None = None,
        outliers: bool = True,
        **settings: Any,
    ) -> None:
        super().__init__(streams, bits, **settings)
        random = generator(streams.q.device, 1)
        terms = [random_correction(streams, rank, chunk, random) for _ in range(2)]
        if not outliers:
            terms = [replace(term, first=None, channel=None, delta=None) for term in terms]
        sides = zip((self.rows.keys, self.rows.values), terms, strict=True)
        self.rows = as_cached(Rows(*(replace(side, correction=term) for side, term in sides)))


def random_correction(streams: Streams, rank: int, chunk: int | None, random: torch.Generator) -> Correction:
    """Return low-rank terms per `chunk` rows, or per stream, and outliers in 2% of the channels."""
    device, rows, dim = random.device, streams.rows, streams.dim
    row = torch.arange(rows, device=device)
    owner = row // chunk if chunk else torch.searchsorted(streams.starts, row, right=True).sub(1).clamp_min(0)
    chunks = int(owner.max()) + 1
    share = 0.02 * dim
    counts = int(share) + (torch.rand(rows, generator=random, device=device) < share % 1).int()
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)]).int()
    row_of = row.repeat_interleave(counts)
    rank_in_row = torch.arange(len(row_of), device=device) - first[row_of]
    base = torch.randint(0, dim, (rows,), generator=random, device=device)
    return Correction(
        factor=(0.2 * torch.randn(rows, rank, generator=random, device=device)).half(),
        basis=torch.randn(chunks, rank, dim, generator=random, device=device).half(),
        chunk=owner.int(),
        first=first,
        # 7 channels apart, so that a row never has a channel twice
        channel=((base[row_of] + 7 * rank_in_row) % dim).to(torch.uint8),
        delta=torch.randn(len(row_of), generator=random, device=device).half(),
    )


class Coupled(Stored):
    """Codes of `bits` bits for `coupled` channels (CQ 8c8b); `rotary` keys are encoded before their rotary embedding.

    With `shared`, all groups read one codebook and rows have a scale of their own, as after a rotation (TurboQuant).
    """

    def __init__(
        self,
        streams: Streams,
        bits: int = 8,
        coupled: int = 8,
        rotary: bool = False,
        books: int = 8,
        books_dtype: torch.dtype = torch.float16,
        seed: int = 0,
        shared: bool = False,
    ) -> None:
        super().__init__(streams)
        device, random = streams.q.device, generator(streams.q.device, seed)
        groups = streams.dim // coupled
        shape, sizes = (streams.rows, groups * bits // 8), (books, 1 if shared else groups, 2**bits, coupled)

        def side(rotary: Rotary | None) -> Coded:
            codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=random, device=device)
            book = torch.randn(sizes, generator=random, device=device).to(books_dtype)
            scale = (0.5 + torch.rand(streams.rows, generator=random, device=device)).half() if shared else None
            return Coded(codes, book, bits, scale, rotary)

        self.rows = as_cached(Rows(side(self._rotary() if rotary else None), side(None)))

    def _rotary(self) -> Rotary:
        s = self.streams
        frequency = 1e4 ** -torch.linspace(0, 1, s.dim // 2, device=s.q.device)
        blocks = torch.arange(-(-s.longest // STEP), device=s.q.device)

        def table(at: Tensor) -> Tensor:
            angle = at[:, None] * frequency
            return torch.stack([angle.cos(), angle.sin()], dim=1)

        return Rotary(table(STEP * blocks), table(torch.arange(STEP, device=s.q.device)), -s.starts)
