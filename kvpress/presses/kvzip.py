# SPDX-License-Identifier: Apache-2.0
"""Scores from the attention of a model that repeats its prompt."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvpress import kernels
from kvpress.cache.attention import group_queries
from kvpress.cache.streams import StoredPairs, StreamPairs, spread_sinks
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BudgetPress
from kvpress.core.recipe import Eviction, PassHook, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import ByScore, Scorer
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.passes import Pass, ReadRow
from kvpress.observe.queries import SampledQueries
from kvpress.observe.view import View
from kvpress.presses.adakv import Competition
from kvpress.presses.criticalkv import check_outputs, output_weight

LEAD = 8
"""Number of tokens before a later chunk that are quoted to mark its beginning."""
SMALLEST = 1e-30
"""Smallest recorded score; 0 marks a pair without one."""


@register(
    "kvzip",
    "evict",
    "Kim et al., 2025, arXiv:2505.23416",
    example="kvzip:0.5",
    cases=("kvzip:0.5,layerwise=true,repeat_prompt=",),
    refuses=(Refusal("kvzip:0.5", "there is no tokenizer beside the model and `repeat_prompt` is text"),),
    exempt=(
        Exemption(
            "pairs per layer",
            "layers share one budget; what is kept is tested against eager attention",
            "`layerwise=False`",
        ),
    ),
    status="recommended",
)
@dataclass
class KVzipPress(BudgetPress):
    """Keep the pairs that the model reads when it repeats its prompt; heads and layers compete.

    After the prompt, the model reads the prompt a second time in chunks of `chunk_size` tokens. `repeat_prompt` is the
    instruction before each chunk; for later chunks it becomes "Repeat the part of the previous context exactly, starting with"
    and the last 8 tokens before the chunk. The pairs of instruction and chunk are removed again. The queries i of a pass attend
    to the sinks, the chunk c in the cache, and the pass itself:

        score[b, h, t] = max over i and the GQA group of softmax(q_i . k)[t],   t in c

    `kvzip_plus_normalization` replaces the attention weight a by `a * ||W_o v_t|| / ||x_i||`, where x_i is the input of the
    attention and W_o the output projection of the query head. The first `n_sink` tokens always stay. `layerwise` gives every
    layer the same number of pairs.

    With `reads=chunk`, a pass attends only to the pairs of its softmax: the sinks, the chunk and the pass itself. The cost of
    the second reading then grows in proportion to the prompt; with `prompt`, every pass attends to the whole prompt.

    With a ratio, pairs that survived a turn stay in later turns. With a fixed number of pairs, all turns share its pairs: each
    pair keeps its score, in 4 bytes, and generated tokens, which no pass repeats, get the mean score of their head.

    `tokenizer` encodes the instruction; without it, the tokenizer in the model's folder does. `repeat_prompt=""` needs no
    tokenizer: the prompt is read a second time without an instruction.

    Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, 2025, arXiv:2505.23416.
    Differs from the paper: nothing in the scores; each row of a batch is scored on its own, and evicted pairs are freed.
    """

    layerwise: bool = False
    n_sink: Size = 4
    kvzip_plus_normalization: bool = False
    chunk_size: Count = 2048
    repeat_prompt: str = "\n\nRepeat the previous context exactly."
    reads: Literal["prompt", "chunk"] = "prompt"
    tokenizer: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer  # type: ignore[attr-defined]
        self.validate()

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.repeat_prompt, str):
            raise TypeError(f"repeat_prompt must be text, got {self.repeat_prompt!r}")

    @property
    def protected(self) -> int:
        return self.n_sink

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        questions = _Questions(self.repeat_prompt, self.tokenizer, model)  # type: ignore[attr-defined]
        if self.kvzip_plus_normalization:
            check_outputs(model)
        hook = PassHook(
            partial(self._repeat, questions), ("prefill",), reads=True, repeats=True, tokens=self.chunk_size,
            check=questions.ids,
        )  # fmt: skip
        scope = "layer" if self.layerwise else "cache"
        scorer: Scorer = Repetition() if self.budget is None else LastingRepetition()
        step = Eviction(scorer, self.amount, Competition(scope=scope), prepare=hook)
        return Recipe((step,))

    def _repeat(self, questions: _Questions, prefill: Pass) -> None:
        """Read the prompt again and store the scores of its pairs in the observers of their layers."""
        rows = prefill.rows()
        scores = RepetitionScores(prefill, rows, self.n_sink)
        first, later, suffix = questions.ids()
        for start in range(0, max(len(row.tokens) for row in rows), self.chunk_size):
            stop = start + self.chunk_size
            texts, places = [], []
            for row in rows:
                chunk = row.tokens[start:stop]
                lead = [*later, *row.tokens[start - LEAD : start]] if start else first
                texts.append([*lead, *suffix, *chunk] if chunk else [])
                places.append([-1] * (len(texts[-1]) - len(chunk)) + [*range(start, start + len(chunk))])
            longest = max(map(len, texts))
            scores.set_chunk(slice(start, stop), [len(text) for text in texts])
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=prefill.position.device)
            place = torch.tensor([row + [-1] * (longest - len(row)) for row in places])

            self.read_chunk(prefill, ids, place, scores)
        for call in prefill.calls:
            set_worth(call, prefill.mask, scores.values[call.layer.index])

    def read_chunk(self, prefill: Pass, ids: Tensor, place: Tensor, scores: RepetitionScores) -> None:
        """Read `ids [B, m]`, an instruction and a chunk of the prompt, after the prompt, and store the scores of the chunk.

        `place [B, m]` is the index of each token in the prompt, -1 for the instruction and for padding.
        """

        def watch(call: LayerCall) -> None:
            plus = self.kvzip_plus_normalization
            scores.take_in(call, call.hidden_states.float().norm(dim=-1) if plus else None)
            add_repeated_queries(call, place)

        prefill.read(ids, watch, scores.nearby if self.reads == "chunk" else None)


def add_repeated_queries(call: LayerCall, place: Tensor) -> None:
    """Add the queries of a repeated prompt to the observers of a layer that sample them; `place [B, m]` as in `read_chunk`."""
    for observer in call.store.observers.values():
        if isinstance(observer, SampledQueries) and observer.repeated:
            observer.add(call, place)


class Worth(Observer):
    """Scores of stored pairs from the repetition of a prompt, `values[n] [pairs]` for stream n."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def observe(self, call: LayerCall) -> None:
        """Record nothing: `set_worth` sets `values` after the prefill."""

    def tensors(self) -> list[Tensor]:
        return self.values

    def select_rows(self, rows: Tensor) -> None:
        """Drop all values: the eviction has read them already, and the next prompt computes new ones."""
        self.values = []

    def to(self, device: torch.device | str) -> None:
        self.values = [value.to(device) for value in self.values]


class LastingWorth(Observer):
    """Scores of pairs from the repetition of their prompt, in a per-pair array, for the evictions of all later turns."""

    lasts = True
    sides = ("worth",)

    def observe(self, call: LayerCall) -> None:
        """Record nothing: `set_worth` writes the array after the prefill."""


def set_worth(call: LayerCall, mask: Tensor | None, values: list[Tensor]) -> None:
    """Store the scores `values[n] [pairs]` of all pairs of stream n in the observers of a layer; `mask` as in `StoredPairs`."""
    store, window = call.store, call.store.window
    if Wanted(Worth) in store.observers:
        store.observers[Wanted(Worth)].values = values
    if Wanted(LastingWorth) in store.observers:
        recorded = torch.zeros(store.batch * store.heads, window.length, device=window.keys.device)
        for n, slots in enumerate(StoredPairs(store, mask).slots):
            columns = slots[slots >= window.first] - window.first
            recorded[n, columns.to(recorded.device)] = values[n][len(slots) - len(columns) :].clamp_min(SMALLEST)
        window.side[LastingWorth.sides[0]] = recorded.view(store.batch, store.heads, -1)


@dataclass(frozen=True)
class Repetition(ByScore):
    """Scorer that reads the scores stored in `Worth`; pairs that survived a turn stay in later turns."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(Worth),)

    def for_fixed_size(self) -> Scorer:
        return LastingRepetition()

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        values = view.observer(*self.wants).values
        return torch.stack([values[n] for n in view.streams]).view(view.shape)


@dataclass(frozen=True)
class LastingRepetition(ByScore):
    """Scorer that reads `LastingWorth`, so that pairs of all turns compete."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(LastingWorth),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        return view.recorded(self.wants[0], fill=True)


@dataclass
class _Questions:
    """Instructions to repeat a prompt, encoded by `tokenizer` or else by the tokenizer in the model's folder."""

    text: str
    tokenizer: Any
    model: ModelFacts | None

    def ids(self) -> tuple[list[int], list[int], list[int]]:
        """Return the ids of the instruction for the first chunk, of that for later chunks, and of the answer's header."""
        if not self.text:
            return [], [], []
        tokenizer = self.tokenizer or self._load_tokenizer()
        later = (
            self.text.replace("the previous context", "the part of the previous context").rstrip(".")
            + ", starting with"
        )
        first, later, suffix = (
            tokenizer.encode(text, add_special_tokens=False) for text in (self.text, later, _answer_header(tokenizer))
        )
        return first, later, suffix

    def _load_tokenizer(self) -> Any:
        source = "" if self.model is None else self.model.source
        try:
            if self.model is None or self.model.tokenizer is None:
                raise ValueError("no model is loaded")
            return self.model.tokenizer()
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"KVzipPress needs a tokenizer for its instruction to repeat the prompt, but there is none at {source!r}: pass "
                "KVzipPress(..., tokenizer=tokenizer), or read the prompt again without an instruction, repeat_prompt=''"
            ) from error


def _answer_header(tokenizer: Any) -> str:
    """Return the text that the chat template puts between the end of a question and its answer."""
    if tokenizer.chat_template is None:
        return "\n"
    mark = "\x00question\x00"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    return str(chat.partition(mark)[2])


_Gathered = tuple[StreamPairs, list[tuple[int, int, int]]]
"""Pairs of every stream that a layer is scored by, and the ranks of its sinks and of its chunk."""


class RepetitionScores:
    """Scores of all stored pairs, `values[layer][n] [pairs]` for stream n; infinite for pairs that were not read again."""

    def __init__(self, prefill: Pass, rows: list[ReadRow], n_sink: int) -> None:
        self.rows, self.n_sink = rows, n_sink
        self.values: dict[int, list[Tensor]] = {}
        self.outputs: dict[int, Tensor] = {}
        """Weights of output projections by layer, kept until the prompt is read."""
        self.gathered: dict[int, _Gathered] = {}
        """Pairs that layers have attended to, until they are scored."""
        for call in prefill.calls:
            self.values[call.layer.index] = [
                torch.full((len(slots),), torch.inf, device=call.queries.device)
                for slots in StoredPairs(call.store, prefill.mask).slots
            ]

    def set_chunk(self, tokens: slice, lengths: list[int]) -> None:
        """Set the tokens of each row that the next pass repeats, and the length of each row of that pass without padding."""
        self.spans = [row.slots[tokens] for row in self.rows]
        self.lengths = torch.tensor(lengths)

    def nearby(self, call: LayerCall) -> StreamPairs:
        """Return the sinks, the pairs of the chunk and those of the pass, which the layer attends to and is scored by."""
        gathered = self.gathered[call.layer.index] = self._gather(call)
        return gathered[0]

    def take_in(self, call: LayerCall, divisor: Tensor | None = None) -> None:
        """Store the scores that one layer's queries give to the pairs of the chunk.

        With a `divisor [B, m]` of each query, attention weights are divided by it, and multiplied by the norms of the values
        after the output projection. The pass's own pairs are in the store, or else, if it was read under autograd, in
        `call.written`.
        """
        gathered = self.gathered.pop(call.layer.index, None)
        lse = None if gathered is None else call.lse
        pairs, spans = self._gather(call) if gathered is None else gathered
        weights = self._weights(call, pairs, divisor, lse).split(pairs.lengths)
        for scores, weight, (sinks, start, stop) in zip(self.values[call.layer.index], weights, spans, strict=True):
            scores[start:stop] = weight[sinks : sinks + stop - start]

    def _gather(self, call: LayerCall) -> _Gathered:
        """Return, for every stream, the sinks, the pairs of the chunk and those of the pass, with the ranks of `_span`."""
        store, new = call.store, call.queries.shape[2]
        stored, is_stored = StoredPairs(store, call.tokens.mask), store.seen > call.tokens.seen_before
        spans = [self._span(slots, n // store.heads) for n, slots in enumerate(stored.slots)]
        parts = []
        for n, (sinks, start, stop) in enumerate(spans):
            length = len(stored.slots[n])
            own = stored.read(n, length - new, length) if is_stored else _written(call, n)
            parts.append([*stored.read(n, 0, sinks), *stored.read(n, start, stop), *own])
        return StreamPairs.of(parts), spans

    def _span(self, slots: Tensor, row: int) -> tuple[int, int, int]:
        """Return the ranks where a stream's sinks end, and where its pairs of the chunk begin and end."""
        span, sinks = self.spans[row], self.rows[row].real[: self.n_sink]
        if not len(span):
            return 0, 0, 0
        edges = torch.stack([sinks[-1] + 1 if len(sinks) else span[0] * 0, span[0], span[-1] + 1])
        last, start, stop = torch.searchsorted(slots, edges).tolist()
        return last, max(last, start), max(last, stop)

    def _weights(self, call: LayerCall, pairs: StreamPairs, divisor: Tensor | None, lse: Tensor | None) -> Tensor:
        """Return the scores `[rows]` of flat pairs; `lse [N, G * Q]` is that of the queries, None where it is not known."""
        store, new = call.store, call.queries.shape[2]
        queries = group_queries(call.queries, store.heads)
        streams, groups = len(pairs.lengths), queries.shape[1] // new
        real = (torch.arange(new) < self.lengths[:, None]).to(pairs.keys.device, torch.float32)

        def spread(per_token: Tensor) -> Tensor:
            """Repeat `[B, new]` for all query heads, as `[N, G * new]`."""
            return per_token[:, None].expand(-1, store.heads * groups, -1).reshape(streams, -1)

        rows, where = pairs.operands()
        options = kernels.Options(call.logits.scale, call.logits.softcap, causal=new)
        sinks = None if call.sinks is None else spread_sinks(call.sinks, call.queries, streams)
        with_sinks = replace(options, sinks=sinks)
        if divisor is None:
            exact = with_sinks if lse is None else options
            return kernels.column_max(queries, rows, where, exact, lse=lse, query_weight=spread(real))
        lse = kernels.decode(queries, rows, where, with_sinks)[1] if lse is None else lse
        lse = lse + spread(divisor.log())
        keys, values, layer = pairs.keys, pairs.values, call.layer
        weights = torch.zeros(len(keys), device=keys.device)
        if layer.index not in self.outputs:
            self.outputs[layer.index] = output_weight(layer.module, store.heads, values, groups)
        outputs = self.outputs[layer.index]
        for g in range(groups):
            columns = slice(g * new, (g + 1) * new)
            largest = kernels.column_max(
                queries[:, columns], rows, where, options, lse=lse[:, columns], query_weight=spread(real)[:, columns]
            )
            norms = [
                _projected_norms(outputs, stream, (n % store.heads) * groups + g)
                for n, stream in enumerate(values.split(pairs.lengths))
            ]
            weights = torch.maximum(weights, largest * torch.cat(norms))
        return weights


def _written(call: LayerCall, stream: int) -> list[tuple[Tensor, Tensor]]:
    """Return the new pairs `(keys [m, D], values [m, Dv])` of a stream that a pass did not store."""
    assert call.written is not None  # noqa: S101 - for type checkers
    keys, values = (tensor.detach().flatten(0, 1)[stream] for tensor in call.written)
    return [(keys, values)]


def _projected_norms(weight: Tensor, values: Tensor, head: int) -> Tensor:
    """Return the norms `[n]` of `values [n, Dv]` after the output projection `weight [hidden, Hq * Dv]` of one query head."""
    weight = weight[:, head * values.shape[1] : (head + 1) * values.shape[1]]
    norms: Tensor = (values.float() @ weight.float().T).norm(dim=-1)
    return norms
