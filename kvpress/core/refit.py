# SPDX-License-Identifier: Apache-2.0
"""Values, and logit weights, solved for: what stays after an eviction answers queries as all pairs did."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kvpress.cache.attention import attend
from kvpress.cache.codec import Codec
from kvpress.cache.store import KVStore
from kvpress.core.least_squares import Design
from kvpress.core.recipe import Eviction, PassHook, Refit, Weights
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Wanted
from kvpress.observe.passes import Pass
from kvpress.observe.queries import SampledQueries
from kvpress.observe.view import LOG_WEIGHT, View

AHEAD = 32
"""How many positions behind the newest token the queries of a prompt are turned to, one after another."""
REPEATED = 2048
"""Tokens that are read again at a time."""
CodecAt = Callable[[int], Codec | None]


@dataclass(frozen=True)
class Target:
    """What `queries [M, D]` of one kv head got from all pairs: `out [M, Dv]`, and `lse [M]` without learned sinks.

    `sinks [M]` are the logits of these, None where there are none.
    """

    queries: Tensor
    out: Tensor
    lse: Tensor
    sinks: Tensor | None


def asked(view: View, wanted: Wanted) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield, for every stream of a view, the queries `[M, D]` of its group that were sampled, and their sinks `[M]`.

    Those of a prompt are turned to the positions that come next.
    """
    call, observer = view.call, view.observer(wanted)
    queries = view.query_heads(observer.queries)
    if not observer.repeated and call.layer.rotates:
        future = call.next_positions(view.rows, view.seen, AHEAD)
        future = future[:, torch.arange(queries.shape[2], device=future.device) % AHEAD]
        queries = call.rotate(queries.float(), *call.angles(future)).to(queries.dtype)
    grouped = queries.unflatten(1, (view.shape[1], -1))
    start, stop, _ = view.heads.indices(call.store.heads)
    sinks = None if call.sinks is None else call.sinks.float().view(call.store.heads, -1)[start:stop]
    for place, row in enumerate(view.rows):
        real = observer.order[row].isfinite()
        for head in range(view.shape[1]):
            own = grouped[place, head][:, real]
            each = None if sinks is None else sinks[head].to(own.device).repeat_interleave(own.shape[1])
            yield own.flatten(0, 1), each


def targets(view: View, wanted: Wanted) -> list[Target]:
    """Return what every stream of a view gives the sampled queries while all pairs are there."""
    weight = view.side.get(LOG_WEIGHT)
    keys, values = view.keys.flatten(0, 1), view.values.flatten(0, 1)
    found = []
    for n, (queries, sinks) in enumerate(asked(view, wanted)):
        own = None if weight is None else weight.flatten(0, 1)[n : n + 1]
        pairs = keys[n : n + 1].float(), values[n : n + 1].float()
        out, lse = attend(queries[None], *pairs, view.call.logits, log_weight=own)
        found.append(Target(queries, _beside_sinks(out[0], lse[0], sinks), lse[0], sinks))
    return found


def refit(call: LayerCall, wanted: Refit, found: dict[int, Target], codec: CodecAt) -> None:
    """Solve for the values of the pairs that stay in some streams, so that they give what was `found` when all were there.

    Keys are those that will be read: where the layer has a codec, what it makes of them. Pairs of earlier turns keep their
    values and weights, whatever stores them.
    """
    store, keys = call.store, kept_keys(call, codec)
    if wanted.weights is not None:
        weights = {n: fitted_weights(call, wanted.weights, target, keys(n), n) for n, target in found.items()}
        store.weigh({n: weight.half() for n, weight in weights.items()})
    dense = store.dense
    if dense is None:
        return
    values = dense.values.clone()
    for n, target in found.items():
        end, fresh = dense.layout.rows(n).stop, fitted_values(call, wanted.ridge, target, keys(n), n)
        values[end - len(fresh) : end] = fresh.to(values.dtype)
    store.replace_dense(values=values)


def kept_keys(call: LayerCall, codec: CodecAt) -> Callable[[int], Tensor]:
    """Return what reads the keys `[t, D]` of a stream that has been cut, as they will be once the codec has sealed them.

    A copy of the layer is sealed for it: it shares what is sealed already, and lives as long as what is returned.
    """
    own = codec(call.layer.index)
    store = call.store
    if own is not None:
        bare = copy.copy(store)
        bare.observers = {}
        store = copy.deepcopy(bare)
        store.observers = call.store.observers  # which a codec may read
        store.settle(own, replace(call.sealing, shared=dict(call.tokens.shared)), turn=True)
    return lambda n: torch.cat([part.read(part.layout.rows(n))[0] for part in store.sealed]).float()


def fitted_weights(call: LayerCall, how: Weights, target: Target, keys: Tensor, stream: int) -> Tensor:
    """Return logit weights `[t]` with which a stream has the mass that it had, for every query relative to its own."""
    kept = Design(target.queries, keys, call.logits, target.lse, _stored_weights(call.store, stream))
    fresh = _open(call, stream)
    design = kept.part(slice(len(keys) - fresh, None))
    ones = torch.ones(len(keys), 1, dtype=torch.float32 if how.ridge else torch.float64, device=keys.device)
    low, high = (torch.tensor(edge, dtype=ones.dtype).exp().to(keys.device) for edge in (-how.down, how.up))
    factor = ones[len(keys) - fresh :]
    wanted = 1 - kept.apply(ones) + design.apply(factor)
    factor = (factor + design.solve(wanted - design.apply(factor), how.ridge)).clamp(low, high)
    step = 1 / max(design.norm(), 1e-30) ** 2 if how.steps else 0.0
    for _ in range(how.steps):
        factor = (factor - step * design.back(design.apply(factor) - wanted)).clamp(low, high)
    weights = torch.zeros(len(keys), device=keys.device) if kept.log_weight is None else kept.log_weight.clone()
    weights[len(keys) - fresh :] += factor[:, 0].log()
    return weights


def fitted_values(call: LayerCall, ridge: float, target: Target, keys: Tensor, stream: int) -> Tensor:
    """Return values `[m, Dv]` for the pairs of a stream that are of this turn, given those of the others."""
    weight = _stored_weights(call.store, stream)
    values = torch.cat([part.read(part.layout.rows(stream))[1] for part in call.store.sealed]).float()
    own = None if weight is None else weight[None]
    out, lse = attend(target.queries[None], keys[None], values[None], call.logits, log_weight=own)
    left = target.out - _beside_sinks(out[0], lse[0], target.sinks)
    whole = lse[0] if target.sinks is None else torch.logaddexp(lse[0], target.sinks)
    fresh = slice(len(keys) - _open(call, stream), None)
    design = Design(target.queries, keys, call.logits, whole, weight).part(fresh)
    return values[fresh] + design.solve(left if ridge else left.double(), ridge).float()


def _open(call: LayerCall, stream: int) -> int:
    """How many of the pairs that a stream keeps are of this prompt or turn: its newest ones, all of them dense."""
    dense = call.store.dense
    if dense is None or not call.tokens.prompt_start:
        return 0 if dense is None else dense.layout.lengths[stream]
    return int((dense.slots()[dense.layout.rows(stream)] >= call.tokens.prompt_start).sum())


def _beside_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the output `[M, Dv]` of all pairs once learned sinks have taken their share."""
    return out if sinks is None else out * torch.sigmoid(lse - sinks)[:, None]


def _stored_weights(store: KVStore, stream: int) -> Tensor | None:
    """Logit weights of the sealed pairs of a stream, float32 [t]; None where no part has any."""
    if all(part.log_weight is None for part in store.sealed):
        return None
    parts = []
    for part in store.sealed:
        rows = part.layout.rows(stream)
        none = torch.zeros(rows.stop - rows.start, device=part.device)
        parts.append(none if part.log_weight is None else part.log_weight[rows].float())
    return torch.cat(parts)


def refitting(step: Eviction, how: Refit) -> Eviction:
    """Return an eviction that refits what stays; where its queries are those of a `repeated` prompt, it is read again first."""
    if not how.repeated:
        return replace(step, refit=how)
    earlier = step.prepare

    def act(done: Pass) -> None:
        if earlier is not None:
            earlier.act(done)
        read_again(how.queries, done)

    check = (lambda: None) if earlier is None else earlier.check
    return replace(step, refit=how, prepare=PassHook(act, ("prefill",), reads=True, check=check))


def read_again(wanted: Wanted, done: Pass) -> None:
    """Read the prompt a second time behind itself, and leave a sample of the queries that it then asks with the observers."""
    rows = done.rows()
    for start in range(0, max(len(row.tokens) for row in rows), REPEATED):
        texts = [row.tokens[start : start + REPEATED] for row in rows]
        longest = max(map(len, texts))
        ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=done.position.device)
        lengths = torch.tensor([len(text) for text in texts])
        place = torch.arange(longest).expand(len(rows), -1)
        place = torch.where(place < lengths[:, None], place + start, -1)

        def watch(call: LayerCall, place: Tensor = place) -> None:
            observer: SampledQueries = call.store.observers[wanted]
            observer.add(call, place)

        done.read(ids, watch)
