# SPDX-License-Identifier: Apache-2.0
"""Refit of values and log-weights: kept pairs give queries nearly the output that all pairs gave."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpress.cache.attention import attend
from kvpress.cache.codec import Codec
from kvpress.cache.segment import Segment
from kvpress.cache.segment_attention import block_rows
from kvpress.cache.store import KVStore
from kvpress.core.least_squares import Design
from kvpress.core.recipe import Eviction, PassHook, Refit, Weights
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.passes import Pass
from kvpress.observe.queries import QueryGram, SampledQueries
from kvpress.observe.view import LOG_WEIGHT, View

AHEAD = 32
"""Queries of a prompt are rotated to this many positions after the newest token, in turn."""
FEWEST, ONE_IN = 128, 8
"""Values are fitted to one in `ONE_IN` queries of a head, or to `FEWEST`; more brought outputs no closer (docs/frontier.md)."""
REPEATED = 2048
"""Most tokens of a repeated prompt in one pass."""
CodecAt = Callable[[int], Codec | None]


@dataclass(frozen=True)
class Target:
    """Attention of sampled queries of one KV head over all pairs, before the eviction."""

    queries: Tensor
    """Queries `[M, D]`."""
    out: Tensor
    """Outputs `[M, Dv]`."""
    lse: Tensor
    """Log-sum-exp `[M]`, without learned sinks."""
    sinks: Tensor | None
    """Logits of learned sinks `[M]`; None without sinks."""


class KeptDesigns(Observer):
    """Designs of the kept pairs of a layer, which a refit puts here and a codec takes to round values for their queries."""

    def __init__(self) -> None:
        self.designs: dict[int, tuple[Design, float, Tensor]] = {}

    def observe(self, call: LayerCall) -> None:
        """Record nothing: designs exist only after an eviction."""

    def put(self, stream: int, design: Design, ridge: float) -> None:
        """Store the design of all kept pairs of a stream, normalised, and the ridge of its refit."""
        self.designs[stream] = replace(design), ridge, design.mean_diagonal()  # the copy holds no matrix

    def take(self, stream: int) -> tuple[Design, float, Tensor] | None:
        """Remove and return the design of a stream, its ridge and the unit of it; None if its values were not solved for."""
        return self.designs.pop(stream, None)


KEPT_DESIGNS = Wanted(KeptDesigns)
"""Observer whose presence makes a refit keep its designs."""


def observed_queries(view: View, observed: Wanted, limit: int | None = None) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield the sampled queries `[M, D]` of the GQA group of every stream of a view, and their sinks `[M]`.

    Queries of a prompt are rotated to the positions that follow it. With `limit`, no head has more queries; those that remain
    are spread evenly, too.
    """
    call, observer = view.call, view.observer(observed)
    queries = view.query_heads(observer.queries)
    if not observer.repeated and call.layer.rotates:
        future = call.next_positions(view.rows, view.seen, AHEAD)
        future = future[:, torch.arange(queries.shape[2], device=future.device) % AHEAD]
        queries = call.rotate(queries.float(), *call.angles(future)).to(queries.dtype)
    grouped = queries.unflatten(1, (view.shape[1], -1))
    start, stop, _ = view.heads.indices(call.store.heads)
    sinks = None if call.sinks is None else call.sinks.float().view(call.store.heads, -1)[start:stop]
    for index, row in enumerate(view.rows):
        real = observer.order[row].isfinite()
        for head in range(view.shape[1]):
            sampled = grouped[index, head][:, real][:, :limit]  # in the order of their hashes
            logits = None if sinks is None else sinks[head].to(sampled.device).repeat_interleave(sampled.shape[1])
            yield sampled.flatten(0, 1), logits


def targets(view: View, observed: Wanted) -> list[Target]:
    """Return the attention of the sampled queries over all pairs, for every stream of a view."""
    weight = view.side.get(LOG_WEIGHT)
    keys, values = view.keys.flatten(0, 1), view.values.flatten(0, 1)
    outputs = []
    for n, (queries, sinks) in enumerate(observed_queries(view, observed, max(FEWEST, view.seen // ONE_IN))):
        log_weight = None if weight is None else weight.flatten(0, 1)[n : n + 1]
        pairs = keys[n : n + 1].float(), values[n : n + 1].float()
        out, lse = attend(queries[None], *pairs, view.call.logits, log_weight=log_weight)
        outputs.append(Target(queries, _scaled_by_sinks(out[0], lse[0], sinks), lse[0], sinks))
    return outputs


def refit(call: LayerCall, settings: Refit, goals: dict[int, Target], codec: CodecAt) -> None:
    """Replace the values of kept pairs, stream by stream, so that outputs come closest to `goals`.

    Keys are those that later steps read: decoded ones where the layer has a codec. Pairs of earlier turns keep their values
    and log-weights.
    """
    store = call.store
    if not store.sealed:  # heads and layers compete, and this layer has lost all its pairs
        return
    designs: KeptDesigns | None = store.observers.get(KEPT_DESIGNS)
    watched: QueryGram | None = store.observers.get(Wanted(QueryGram))
    if watched is not None:  # the codec then rounds for the same queries
        watched.replace({n: target.queries for n, target in goals.items()})
    keys, weights, fitted = kept_keys(call, codec), {}, {}
    for n, target in goals.items():
        design = Design(target.queries, keys(n), call.logits, target.lse, _stored_weights(store, n))
        if settings.weights is not None:
            weights[n] = fitted_weights(call, settings.weights, design, n).half()
            design = design.weighed(weights[n].float())
        if store.dense is not None:
            design = design.normalised(target.sinks)
            fitted[n] = fitted_values(call, settings.ridge, target, design, n)
            if designs is not None:
                designs.put(n, design, settings.ridge)
    if weights:
        store.weigh(weights)
    dense = store.dense
    if dense is None:
        return
    values = dense.values.clone()
    for n, value in fitted.items():
        end = dense.layout.rows(n).stop
        values[end - len(value) : end] = value.to(values.dtype)
    store.replace_dense(values=values)


def kept_keys(call: LayerCall, codec: CodecAt) -> Callable[[int], Tensor]:
    """Return a function that reads the kept keys `[t, D]` of a stream as they are after the codec has sealed them.

    With a codec, the function holds a copy of the layer that is sealed for it; sealed segments are shared, not copied.
    """
    layer_codec = codec(call.layer.index)
    store = call.store
    if layer_codec is not None:
        without_observers = copy.copy(store)
        without_observers.observers = {}
        store = copy.deepcopy(without_observers)
        store.observers = call.store.observers  # codecs may read them
        store.settle(layer_codec, replace(call.sealing, shared=dict(call.tokens.shared), trial=True), turn=True)
    keys = [_keys_by_stream(segment) for segment in store.sealed]
    return lambda n: torch.cat([by_stream[n] for by_stream in keys]).float()


def _keys_by_stream(segment: Segment) -> Sequence[Tensor]:
    """Return the keys `[t, D]` of every stream of a segment, decoded in blocks of rows."""
    lengths, total = segment.layout.lengths, segment.layout.total
    if not segment.encoded:
        return torch.split(segment.read(slice(None))[0], list(lengths))
    step = block_rows(segment.device)
    blocks = [segment.read(slice(start, min(start + step, total)))[0] for start in range(0, max(1, total), step)]
    return torch.split(torch.cat(blocks), list(lengths))


def fitted_weights(call: LayerCall, settings: Weights, kept: Design, stream: int) -> Tensor:
    """Return log-weights `[t]` with which the kept pairs of a stream get the attention mass of all pairs, for every query.

    The divisors of the design `kept` are those of all pairs.
    """
    pairs, count = len(kept.keys), _count_of_turn(call, stream)
    design = kept.part(slice(pairs - count, None))
    dtype, device = torch.float32 if settings.ridge else torch.float64, kept.keys.device
    ones = torch.ones(pairs, 1, dtype=dtype, device=device)
    low, high = math.exp(-settings.down), math.exp(settings.up)
    factor, missing = ones[pairs - count :], 1 - kept.apply(ones)
    unit = None if count == pairs else kept.mean_diagonal()
    solved = (factor + design.solve(missing, settings.ridge, unit)).clamp(low, high)
    if settings.steps:
        goal, step = missing + design.apply(factor), 1 / max(design.norm(), 1e-30) ** 2
        for _ in range(settings.steps):
            solved = (solved - step * design.back(design.apply(solved) - goal)).clamp(low, high)
    weights = torch.zeros(pairs, device=device) if kept.log_weight is None else kept.log_weight.clone()
    weights[pairs - count :] += solved[:, 0].log()
    return weights


def fitted_values(call: LayerCall, ridge: float, target: Target, kept: Design, stream: int) -> Tensor:
    """Return new values `[m, Dv]` for the pairs of this turn in a stream; pairs of earlier turns keep theirs.

    The weights of the design `kept` sum to 1 over all kept pairs and learned sinks.
    """
    values = torch.cat([segment.read(segment.layout.rows(stream))[1] for segment in call.store.sealed]).float()
    residual = target.out - kept.apply(values)
    newest = slice(len(values) - _count_of_turn(call, stream), None)
    # Pairs of a turn that get little attention must not make up for the errors of all earlier pairs.
    unit = None if newest.start == 0 else kept.mean_diagonal()
    return values[newest] + kept.part(newest).solve(residual if ridge else residual.double(), ridge, unit).float()


def _count_of_turn(call: LayerCall, stream: int) -> int:
    """Return how many kept pairs of a stream are from this prompt or turn; they are its newest, and all dense."""
    dense = call.store.dense
    if dense is None or not call.tokens.prompt_start:
        return 0 if dense is None else dense.layout.lengths[stream]
    return int((dense.slots()[dense.layout.rows(stream)] >= call.tokens.prompt_start).sum())


def _scaled_by_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the output `[M, Dv]` scaled down by the share of the attention that learned sinks take."""
    return out if sinks is None else out * torch.sigmoid(lse - sinks)[:, None]


def _stored_weights(store: KVStore, stream: int) -> Tensor | None:
    """Return the log-weights of the sealed pairs of a stream, float32 [t]; None if no segment has any."""
    if all(segment.log_weight is None for segment in store.sealed):
        return None
    parts = []
    for segment in store.sealed:
        rows = segment.layout.rows(stream)
        zeros = torch.zeros(rows.stop - rows.start, device=segment.device)
        parts.append(zeros if segment.log_weight is None else segment.log_weight[rows].float())
    return torch.cat(parts)


def refitting(step: Eviction, settings: Refit) -> Eviction:
    """Return an eviction that also refits kept pairs; with `repeated`, it reads the prompt a second time first.

    An eviction that reads the prompt again itself is not given another reading.
    """
    earlier = step.prepare
    if not settings.repeated or (earlier is not None and earlier.repeats):
        return replace(step, refit=settings)

    def act(done: Pass) -> None:
        if earlier is not None:
            earlier.act(done)
        read_again(settings.queries, done)

    check = (lambda: None) if earlier is None else earlier.check
    tokens = REPEATED if earlier is None else max(REPEATED, earlier.tokens)
    hook = PassHook(act, ("prefill",), reads=True, tokens=tokens, check=check)
    return replace(step, refit=settings, prepare=hook)


def read_again(observed: Wanted, done: Pass) -> None:
    """Read the prompt a second time behind itself; the observers sample the queries of the second reading."""
    rows = done.rows()
    for start in range(0, max(len(row.tokens) for row in rows), REPEATED):
        texts = [row.tokens[start : start + REPEATED] for row in rows]
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=done.position.device)
        lengths = torch.tensor([len(text) for text in texts])
        columns = torch.arange(longest).expand(len(rows), -1)
        columns = torch.where(columns < lengths[:, None], columns + start, -1)

        def watch(call: LayerCall, columns: Tensor = columns) -> None:
            observer: SampledQueries = call.store.observers[observed]
            observer.add(call, columns)

        done.read(ids, watch)
