# SPDX-License-Identifier: Apache-2.0
"""Operators: each checks its arguments, then runs the compiled kernel of the device, or plain torch where there is none.

No other module of the kernels imports this one. The Triton back ends are imported on first use, so that triton is needed on a
GPU only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from kvpress.kernels import checks
from kvpress.kernels.attention import contract as attention
from kvpress.kernels.attention import cpu as attention_cpu
from kvpress.kernels.attention import reference as attention_reference
from kvpress.kernels.counting import count
from kvpress.kernels.cpu import launch
from kvpress.kernels.formats.dense import Dense
from kvpress.kernels.formats.offset import Products
from kvpress.kernels.formats.operand import Listed, Options, Part, Ranges, Rows, Where
from kvpress.kernels.formats.packed import Packed
from kvpress.kernels.formats.pages import Pages
from kvpress.kernels.mass import contract as mass
from kvpress.kernels.mass import cpu as mass_cpu
from kvpress.kernels.mass import reference as mass_reference
from kvpress.kernels.prefill import contract as prefill
from kvpress.kernels.prefill import cpu as prefill_cpu
from kvpress.kernels.prefill import reference as prefill_reference
from kvpress.kernels.quantisation import contract as quantisation
from kvpress.kernels.quantisation import cpu as quantisation_cpu
from kvpress.kernels.quantisation import reference as quantisation_reference
from kvpress.kernels.scores import contract as scoring
from kvpress.kernels.scores import cpu as scoring_cpu
from kvpress.kernels.scores import reference as scoring_reference
from kvpress.kernels.selection import contract as selection
from kvpress.kernels.selection import cpu as selection_cpu
from kvpress.kernels.selection import reference as selection_reference
from kvpress.kernels.tile_mass import contract as tiles_of
from kvpress.kernels.tile_mass import cpu as tile_mass_cpu
from kvpress.kernels.tile_mass import reference as tile_mass_reference
from kvpress.kernels.triton import device

MOST_QUERIES = 64
"""Query rows per stream past which a matrix product on decoded blocks is faster than a decode kernel."""

MOST_PRODUCTS = 2**24
"""Most float32 products of queries with an offset that are in memory at a time; more streams are processed in blocks."""


def serves(queries: Tensor, storage: Tensor) -> bool:
    """Whether a compiled operator should attend from `queries [N, M, D]` to pairs stored in `storage`."""
    return queries.shape[1] <= MOST_QUERIES and (launch.available(storage) or device.available(storage))


def decode(q: Tensor, rows: Rows, where: Where, options: Options) -> tuple[Tensor, Tensor]:
    """Attend from the queries of each stream to its rows; `kvpress.kernels.attention.contract` has the formulas.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16. Their rotary embedding is applied already, also where keys are
            stored without it.
        rows: keys and values in one format; dense ones float32, bfloat16 or float16.
        where: a range of rows for each stream, or a list of rows, which excludes a causal mask.
        options: scale, softcap, causal mask and sinks.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].

    Raises:
        ValueError: shapes, dtypes or sizes do not match, or, on a CPU, `where` refers to rows that are not stored.
        TypeError: keys and values have different formats.
    """
    return decode_parts(q, [Part(rows, where)], options)


def decode_parts(
    q: Tensor, parts: Sequence[Part], options: Options, others: Sequence[tuple[Tensor, Tensor]] = ()
) -> tuple[Tensor, Tensor]:
    """Attend to several disjoint sets of rows, as `merge` of the results of `decode`; raises as `decode`.

    On a CPU, one call of compiled code reads all parts; on a GPU, one launch merges those without a basis and an offset.

    Args:
        q: queries [N, M, D], as in `decode`.
        parts: stored rows, and those of them that each stream attends to.
        options: as in `decode`; a causal mask applies to the last part, which ends with the new tokens.
        others: outputs [N, M, Dv] and log-sum-exp [N, M] over further disjoint rows, float32; merged with the result.

    Returns:
        Outputs, float32 [N, M, Dv], and log-sum-exp of the logits, float32 [N, M].
    """
    call = None if others else attention_cpu.cached_call(q, parts, options)
    if call is not None and launch.available(q):
        return call.run(q, parts)
    attention.check(q, parts, options)
    if others:
        attention.check_parts(others)
        checks.shape("out", others[0][0], (*q.shape[:2], parts[0].value_channels), torch.float32)
    has_offset = any([part.rows.key_offset is not None for part in parts])
    if has_offset and (step := _streams_at_once(q, parts)) < len(q):
        blocks = [_of_streams(n, n + step, parts, options, others) for n in range(0, len(q), step)]
        results = [
            decode_parts(q[n : n + step], *block) for n, block in zip(range(0, len(q), step), blocks, strict=True)
        ]
        return torch.cat([out for out, _ in results]), torch.cat([lse for _, lse in results])
    added = [_products(q, part) for part in parts] if has_offset else [None] * len(parts)
    storage = parts[0].rows.keys.storage
    if launch.available(storage):
        out, lse = attention_cpu.decode_parts(q, parts, options, others, added=added)
        return attention.with_sinks(out, lse, options.sinks)

    def options_of(part: Part) -> Options:
        return replace(options, causal=0) if options.causal and part is not parts[-1] else options

    on_gpu = device.available(storage)
    joint = [part for part in parts if on_gpu and part.rows.is_plain and (len(parts) > 1 or others)]
    run = _attend_on_gpu if on_gpu else _attend_in_torch
    single = [(part, extra) for part, extra in zip(parts, added, strict=True) if part not in joint]
    results = [*others, *(run(q, part, options_of(part), extra) for part, extra in single)]
    if joint:
        from kvpress.kernels.attention import triton as attention_triton

        for part in joint:
            count(part.kernel)
        launches = [attention_triton.launch(q, part.rows, part.where, options_of(part)) for part in joint]
        out, lse = attention_triton.merge_partials(q, [*attention_triton.as_partials(results), *launches])
    else:
        out, lse = results[0] if len(results) == 1 else merge(results)
    return attention.with_sinks(out, lse, options.sinks)


def _streams_at_once(q: Tensor, parts: Sequence[Part]) -> int:
    """Return the number of streams whose products with offsets fit into `MOST_PRODUCTS`."""
    places = max(part.rows.key_offset.places for part in parts if part.rows.key_offset is not None)
    return max(1, MOST_PRODUCTS // (q.shape[1] * places))


def _of_streams(
    first: int, last: int, parts: Sequence[Part], options: Options, others: Sequence[tuple[Tensor, Tensor]]
) -> tuple[list[Part], Options, list[tuple[Tensor, Tensor]]]:
    """Return the arguments of `decode_parts` for the streams first .. last - 1."""
    sinks = None if options.sinks is None else options.sinks[first:last]
    chosen = [Part(part.rows, part.where.streams(first, last)) for part in parts]
    return chosen, replace(options, sinks=sinks), [(out[first:last], lse[first:last]) for out, lse in others]


def _products(q: Tensor, part: Part) -> Products | None:
    offset = part.rows.key_offset
    return None if offset is None else offset.products(q, part.where.stream)


def _attend_on_gpu(q: Tensor, part: Part, options: Options, added: Products | None) -> tuple[Tensor, Tensor]:
    from kvpress.kernels.attention import triton as attention_triton

    count(part.kernel)
    return attention_triton.attend(q, part.rows, part.where, options, added)


def _attend_in_torch(q: Tensor, part: Part, options: Options, added: Products | None) -> tuple[Tensor, Tensor]:
    rows, stream = part.rows, part.where.stream
    shift = None
    if rows.key_basis is not None:
        shift = None if rows.key_basis.centre is None else options.scale * rows.key_basis.products(q, stream)
        q = rows.key_basis.enter(q, stream)
    out, lse = attention_reference.decode(q, rows, part.where, options, added)
    if rows.value_basis is not None:
        out = rows.value_basis.leave(out, stream)
        if rows.value_basis.centre is not None:
            out = out.masked_fill(lse.isneginf()[..., None], 0.0)
    return out, lse if shift is None else lse + shift


def merge(parts: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Merge attention results of the same queries over disjoint sets of rows, exact in float32 and without gradients.

    Args:
        parts: outputs [N, M, Dv] and log-sum-exp [N, M] of each set, float32; 0 and minus infinity where a query sees no row.

    Returns:
        Outputs [N, M, Dv] and log-sum-exp [N, M] over the rows of all sets, float32.

    Raises:
        ValueError: parts differ in shape or dtype.
    """
    attention.check_parts(parts)
    out, _ = parts[0]
    if launch.available(out):
        return attention_cpu.merge(parts)
    if device.available(out):
        from kvpress.kernels.attention import triton as attention_triton

        return attention_triton.merge_partials(out, attention_triton.as_partials(parts))
    return attention_reference.merge(parts)


def block_prefill(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    tiles: prefill.Tiles,
    *,
    scale: float,
    softcap: float | None = None,
    real: Tensor | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend causally from the newest tokens to chosen blocks of keys; `kvpress.kernels.prefill.contract` has the formulas.

    Args:
        q: queries [B, Hq, Q, D] of the last Q of T tokens; float32, bfloat16 or float16. Query heads of a GQA group are next to
            each other.
        keys: [B, H, T, D] of the same dtype.
        values: [B, H, T, Dv] of the same dtype.
        tiles: which blocks, and single columns, are read.
        scale: factor of the products.
        softcap: logits become ``softcap * tanh(logits / softcap)``.
        real: False for padding, bool [B, T]; None without padding.
        sinks: extra logit of every head, without a value, in the softmax of its queries, [Hq].

    Returns:
        Outputs, float32 [B, Hq, Q, Dv], and log-sum-exp of the logits, float32 [B, Hq, Q].

    Raises:
        ValueError: shapes, dtypes or sizes do not match.
    """
    prefill.check(q, keys, values, tiles, real, softcap, sinks)
    lists = tiles.lists(q.shape[2], keys.shape[2])
    args = (q, keys, values, lists, real, scale, softcap)
    if launch.available(keys):
        count("block_prefill")
        out, lse = prefill_cpu.attend(*args)
    elif device.available(keys):
        from kvpress.kernels.prefill import triton as prefill_triton

        count("block_prefill")
        out, lse = prefill_triton.attend(*args)
    else:
        out, lse = prefill_reference.attend(*args)
    return attention.with_sinks(out, lse, None if sinks is None else sinks.float().view(-1, 1).expand_as(lse))


def column_mass(
    q: Tensor,
    rows: Rows,
    where: Ranges,
    options: Options,
    *,
    lse: Tensor | None = None,
    query_weight: Tensor | None = None,
    power: int = 1,
) -> Tensor:
    """Sum the softmax weights, or their squares, that each stored row gets from all queries of its stream.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        rows: dense keys, float32, bfloat16 or float16, and log-weights.
        where: rows of each stream, which must not overlap.
        options: scale, softcap, causal mask and sinks.
        lse: log-sum-exp of every query over all rows that it attends to, sinks included, float32 [N, M]; `options.sinks` must
            then be None. None computes it over the stream.
        query_weight: factor of the softmax weights of every query, float32 [N, M], not negative; 1 by default.
        power: 1 for the sum, 2 for the sum of squares.

    Returns:
        The sum of each stored row, float32 [R]; 0 for rows of no stream.
    """
    if power not in (1, 2):
        raise ValueError(f"power must be 1 or 2, got {power}")
    return _receive("column_mass", q, rows, where, options, "sum" if power == 1 else "squares", lse, query_weight)


def column_max(
    q: Tensor,
    rows: Rows,
    where: Ranges,
    options: Options,
    *,
    lse: Tensor | None = None,
    query_weight: Tensor | None = None,
) -> Tensor:
    """Return the largest softmax weight that each stored row gets, float32 [R]; arguments as in `column_mass`."""
    return _receive("column_max", q, rows, where, options, "max", lse, query_weight)


def _receive(
    name: str,
    q: Tensor,
    rows: Rows,
    where: Ranges,
    options: Options,
    statistic: mass.Statistic,
    lse: Tensor | None,
    query_weight: Tensor | None,
) -> Tensor:
    mass.check(q, rows, where, options, lse, query_weight)
    if device.available(rows.keys.storage):  # before `check_apart`, which would wait for the GPU
        from kvpress.kernels.mass import triton as mass_triton

        count(name)
        return mass_triton.receive(q, rows, where, options, statistic, lse, query_weight)
    mass.check_apart(where)
    if launch.available(rows.keys.storage):
        count(name)
        return mass_cpu.receive(q, rows, where, options, statistic, lse, query_weight)
    return mass_reference.receive(q, rows, where, options, statistic, lse, query_weight)


def tile_mass(q: Tensor, keys: Tensor, last: Tensor, tile: tuple[int, int], *, scale: float) -> Tensor:
    """Sum the softmax weights of blocks of queries over tiles of keys; `kvpress.kernels.tile_mass.contract` has the formulas.

    Args:
        q: queries [H, M, D]; float32, bfloat16 or float16. Query heads of a GQA group are next to each other.
        keys: [G, K, D] of the same dtype.
        last: index of the last key that each query sees, int64 [M]; negative where it sees none.
        tile: queries per block, and keys per tile.
        scale: factor of the products.

    Returns:
        Float32 [H, ceil(M / tile[0]), ceil(K / tile[1])].

    Raises:
        ValueError: shapes, dtypes or sizes do not match.
    """
    tiles_of.check(q, keys, last, tile)
    if launch.available(keys):
        count("tile_mass")
        return tile_mass_cpu.receive(q, keys, last, tile, scale)
    # On a GPU, plain torch multiplies on tensor cores already.
    return tile_mass_reference.receive(q, keys, last, tile, scale)


def page_bounds(q: Tensor, low: Tensor, high: Tensor, where: Ranges, *, capacity: int | None = None) -> Tensor:
    """Bound ``q . k`` from above for the keys of each page; maximum over the queries of a stream.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        low: channel-wise minimum of the keys of each page [P, D]; float32, bfloat16 or float16.
        high: channel-wise maximum, as low.
        where: pages of each stream.
        capacity: most pages that a stream can have; None reads the longest stream, which waits for the device.

    Returns:
        Float32 [N, capacity], -inf past the end of a stream.
    """
    scoring.check_bounds(q, low, high, where)
    return _score("page_bounds", q, Dense(low), Dense(high), where, "max", capacity)


def label_scores(
    q: Tensor, labels: Dense | Packed, where: Ranges, *, reduce: str = "max", capacity: int | None = None
) -> Tensor:
    """Score every row by the product of its label with the queries of its stream, on the label's channels only.

    Sums are float32. For quantised labels on the CPU, queries are rounded to 16 bits: with up to 128 channels, scores are
    exact to ``2**-15 * max|q| * sum over d of (code[d] * scale + |zero|)``, where q are all queries of the stream, or their
    sum if `reduce` is "sum".

    Args:
        q: queries on those channels [N, M, r]; float32, bfloat16 or float16.
        labels: labels [R, r], float32, bfloat16 or float16, or codes of 1, 2, 4 or 8 bits with ``group = (1, r)``.
        where: rows of each stream.
        reduce: "max" or "sum" over the queries of a stream.
        capacity: most rows that a stream can have; None reads the longest stream, which waits for the device.

    Returns:
        Float32 [N, capacity], -inf past the end of a stream.
    """
    scoring.check_labels(q, labels, where, reduce)
    return _score("label_scores", q, None, labels, where, reduce, capacity)


def _score(
    name: str,
    q: Tensor,
    low: Dense | None,
    high: Dense | Packed,
    where: Ranges,
    reduce: str,
    capacity: int | None,
) -> Tensor:
    capacity = scoring.capacity_of(where, capacity)
    if device.available(high.storage):  # before `check_capacity`, which would wait for the GPU
        from kvpress.kernels.scores import triton as scoring_triton

        count(name)
        return scoring_triton.score(q, low, high, where, reduce, capacity)
    scoring.check_capacity(where, capacity)
    if launch.available(high.storage):
        count(name)
        return scoring_cpu.score(q, low, high, where, reduce, capacity)
    return scoring_reference.score(q, low, high, where, reduce, capacity)


def top_rows(
    scores: Tensor, where: Ranges, k: int, *, first: int = 0, last: int = 0, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """List the k rows of each stream with the largest scores, in ascending order.

    Args:
        scores: score of each row of a stream, float32 [N, capacity]; rows may be strided, elements of a row may not.
        where: rows of each stream, at most capacity.
        k: rows to choose of each stream, at least 1.
        first: rows at the start of a stream that are always chosen.
        last: rows at the end of a stream that are always chosen; k includes first and last.
        limits: rows to choose of each stream where streams differ, int64 [N], from first + last to k.

    Returns:
        Row numbers ``starts[n] + i``, int32 [N, min(k, capacity)], 0 past the chosen ones, and the number of chosen rows of
        each stream, int64 [N].
    """
    selection.check(scores, where, k, first, last, limits)
    if launch.available(scores):
        count("top_rows")
        return selection_cpu.choose(scores, where, k, first, last, limits)
    if device.available(scores):
        from kvpress.kernels.selection import triton as selection_triton

        count("top_rows")
        return selection_triton.choose(scores, where, k, first, last, limits)
    return selection_reference.choose(scores, where, k, first, last, limits)


def label_rows(
    q: Tensor,
    labels: Dense | Packed,
    where: Ranges,
    k: int,
    *,
    reduce: str = "max",
    capacity: int | None = None,
    first: int = 0,
    last: int = 0,
    limits: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """List the k rows of each stream with the largest label scores: `top_rows` of `label_scores`, with their arguments.

    On the CPU, where there are at least as many streams as threads, each stream's rows are chosen right after its scores, so
    that the scores of all streams are never in memory together.

    Returns:
        As `top_rows`.
    """
    if launch.available(labels.storage) and len(q) >= torch.get_num_threads():
        scoring.check_labels(q, labels, where, reduce)
        selection.check_numbers(q, k, first, last, limits)
        capacity = scoring.capacity_of(where, capacity)
        scoring.check_capacity(where, capacity)
        count("label_rows")
        return selection_cpu.choose_by_labels(q, labels, where, k, reduce, capacity, first, last, limits)
    scores = label_scores(q, labels, where, reduce=reduce, capacity=capacity)
    return top_rows(scores, where, k, first=first, last=last, limits=limits)


def rows_of_blocks(chosen: Listed, blocks: Ranges, pairs: Ranges, size: int, *, longest: int) -> tuple[Tensor, Tensor]:
    """List the rows of chosen blocks of `size` consecutive rows; only the last block of a stream may be shorter.

    Args:
        chosen: blocks of each stream in ascending order, int32 [N, K], as `top_rows` returns them.
        blocks: blocks of each stream.
        pairs: rows of each stream.
        size: rows of a block.
        longest: most rows of a stream.

    Returns:
        Row numbers, int32 [N, min(K * size, longest)], 0 past the listed ones, and their number, int64 [N].
    """
    selection.check_blocks(chosen, blocks, pairs, size, longest)
    if device.available(chosen.rows):
        from kvpress.kernels.selection import triton as selection_triton

        count("rows_of_blocks")
        return selection_triton.of_blocks(chosen.rows, chosen.counts, blocks, pairs, size, longest)
    return selection_reference.of_blocks(chosen.rows, chosen.counts, blocks, pairs, size, longest)


def split_rows(chosen: Listed, segments: Sequence[Ranges], longest: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
    """List the rows in each of several segments of pairs that were chosen by their rank over all segments.

    The pairs of a stream are numbered from 0 on through all segments, in order.

    Args:
        chosen: ranks of each stream in ascending order, int32 [N, K], and their numbers, int64 [N].
        segments: rows of each stream in each segment.
        longest: most rows of a stream in each segment.

    Returns:
        For each segment, row numbers, int32 [N, min(K, its longest)], 0 past the listed ones, and their number, int64 [N].
    """
    selection.check_split(chosen, segments, longest)
    if launch.available(chosen.rows):
        count("split_rows")
        return selection_cpu.split(chosen.rows, chosen.counts, segments, longest)
    return selection_reference.split(chosen.rows, chosen.counts, segments, longest)


def page_rows(
    q: Tensor, pages: Pages, k: int, *, first: int = 0, last: int = 0, limits: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """List the rows of the k pages of each stream with the largest bounds: `rows_of_blocks` of `top_rows` of `page_bounds`.

    On the CPU, where there are at least as many streams as threads, one call of compiled code does all three.

    Args:
        q: queries [N, M, D]; float32, bfloat16 or float16.
        pages: bounds of pages, and the pages and rows of each stream.
        k: pages to choose of each stream.
        first: pages at the start of a stream that are always chosen.
        last: pages at the end of a stream that are always chosen; k includes first and last.
        limits: pages to choose of each stream where streams differ, int64 [N].

    Returns:
        As `rows_of_blocks`.

    Raises:
        ValueError: shapes, dtypes or sizes do not match, or a stream refers to pages that are not stored.
    """
    if launch.available(pages.high) and len(q) >= torch.get_num_threads():
        scoring.check_queries(q)
        selection.check_numbers(q, k, first, last, limits)
        query = q.shape[0], q.shape[2], q.device
        if query not in pages.fits:
            scoring.check_bounds(q, pages.low, pages.high, pages.where)
            selection.check_sizes(len(q), pages.where, pages.pairs, pages.size, pages.longest)
            scoring.check_capacity(pages.where, pages.capacity)
            pages.fits.add(query)
        count("page_rows")
        return selection_cpu.choose_by_bounds(q, pages, k, first, last, limits)
    bounds = page_bounds(q, pages.low, pages.high, pages.where, capacity=pages.capacity)
    rows, counts = top_rows(bounds, pages.where, k, first=first, last=last, limits=limits)
    return rows_of_blocks(Listed(rows, counts), pages.where, pages.pairs, pages.size, longest=pages.longest)


def quantise(x: Tensor, bits: int, group: tuple[int, int], *, dtype: torch.dtype | None = None) -> Packed:
    """Quantise rows in groups of (rows, channels); the last group of rows may be shorter.

    Scales and zeros are float16, which is more precise than bfloat16, or float32 where rows decode to float32 or reach
    `WIDEST`.

    Args:
        x: rows [R, D]; float32, bfloat16 or float16; rows may be strided, elements of a row may not.
        bits: bits per code: 1, 2, 3, 4 or 8.
        group: rows and channels (gr, gc) that share a scale.
        dtype: dtype that rows are decoded to; that of x by default.

    Returns:
        Codes uint8 [R, D * bits / 8], scale and zero [ceil(R / gr), D / gc].

    Raises:
        ValueError: a value is not finite, or rows cannot be packed or cut into groups.
    """
    quantisation.check(x, bits, group)
    parameters = torch.float32 if (dtype or x.dtype) == torch.float32 else torch.float16
    packed, largest = _encode(x, bits, group, parameters)
    size = float(largest)
    if not math.isfinite(size):
        raise ValueError("cannot quantise keys or values with infinite entries; use a wider model dtype")
    if size >= quantisation.WIDEST and parameters == torch.float16:
        packed, _ = _encode(x, bits, group, torch.float32)
    return packed


def _encode(x: Tensor, bits: int, group: tuple[int, int], parameters: torch.dtype) -> tuple[Packed, Tensor]:
    if launch.available(x):
        count("quantise")
        return quantisation_cpu.encode(x, bits, group, parameters)
    if device.available(x):
        from kvpress.kernels.quantisation import triton as quantisation_triton

        count("quantise")
        return quantisation_triton.encode(x, bits, group, parameters)
    return quantisation_reference.encode(x, bits, group, parameters)
