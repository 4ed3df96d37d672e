# SPDX-License-Identifier: Apache-2.0
"""Attention while the model repeats its prompt."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from kvpress import kernels
from kvpress.cache.attention import group_queries
from kvpress.cache.streams import Stored
from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BudgetPress
from kvpress.core.recipe import Eviction, PassHook, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import ByScore
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.passes import Pass, ReadRow
from kvpress.observe.view import View
from kvpress.presses.adakv import Competition
from kvpress.presses.criticalkv import check_outputs, output_weight

LEAD = 8
"""Tokens before a later chunk that say where it begins."""


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
)
@dataclass
class KVzipPress(BudgetPress):
    """Keep the pairs that the model reads when it repeats its prompt; heads and layers compete.

    Behind the prompt, chunk after chunk of `chunk_size` tokens is read again, led in by `repeat_prompt`, and then taken back. A
    later chunk is asked for as "the part of the previous context" that starts with the last 8 tokens before it. With the
    softmax of its queries i over the sinks, the chunk c and what is read itself,

        score[b, h, t] = max over i and the group of softmax(q_i . k)[t],   t in c

    `kvzip_plus_normalization` scores `a * ||W_o v_t|| / ||x_i||` in the place of weights a, with x_i the input of the
    attention and W_o the output projection of the query head. The first `n_sink` tokens always stay, and so do pairs that
    survived an earlier turn. `layerwise` gives every layer the same number of pairs.

    The prompt of repetition is text, which `tokenizer` reads, else the one beside the model. `repeat_prompt=""` needs none:
    the prompt is simply read a second time.

    Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, 2025, arXiv:2505.23416.
    Differs from the paper: nothing in the scores; rows of a batch are scored alone, and what is evicted is freed.
    """

    layerwise: bool = False
    n_sink: Size = 4
    kvzip_plus_normalization: bool = False
    chunk_size: Count = 2048
    repeat_prompt: str = "\n\nRepeat the previous context exactly."
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
        asked = _Questions(self.repeat_prompt, self.tokenizer, model)  # type: ignore[attr-defined]
        if self.kvzip_plus_normalization:
            check_outputs(model)
        hook = PassHook(partial(self._repeat, asked), ("prefill",), reads=True, check=asked.ids)
        scope = "layer" if self.layerwise else "cache"
        step = Eviction(Repetition(), self.amount, Competition(scope=scope), prepare=hook)
        return Recipe((step,))

    def _repeat(self, asked: _Questions, done: Pass) -> None:
        """Read the prompt again and leave what its pairs are worth with the observers of their layers."""
        rows = done.rows()
        scores = _Scores(done, rows, self.n_sink, self.kvzip_plus_normalization)
        first, later, suffix = asked.ids()
        for start in range(0, max(len(row.tokens) for row in rows), self.chunk_size):
            stop = start + self.chunk_size
            texts = []
            for row in rows:
                chunk = row.tokens[start:stop]
                lead = [*later, *row.tokens[start - LEAD : start]] if start else first
                texts.append([*lead, *suffix, *chunk] if chunk else [])
            longest = max(map(len, texts))
            scores.chunk(slice(start, stop), [len(text) for text in texts])
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=done.position.device)
            done.read(ids, scores.take_in)


class Worth(Observer):
    """What the repetition of a prompt found stored pairs worth: `values[n]` for stream n."""

    def __init__(self) -> None:
        self.values: list[Tensor] = []

    def observe(self, call: LayerCall) -> None:
        """The repetition fills it in."""

    def tensors(self) -> list[Tensor]:
        return self.values

    def select_rows(self, rows: Tensor) -> None:
        """Values are read before anything else happens to the cache, and a prompt makes new ones."""
        self.values = []

    def to(self, device: torch.device | str) -> None:
        self.values = [value.to(device) for value in self.values]


@dataclass(frozen=True)
class Repetition(ByScore):
    """The scores that `Worth` holds."""

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(Worth),)

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`."""
        values = view.observer(*self.wants).values
        return torch.stack([values[n] for n in view.streams]).view(view.shape)


@dataclass
class _Questions:
    """The ids that ask a model to repeat its prompt, by `tokenizer` or the one beside the model."""

    text: str
    tokenizer: Any
    model: ModelFacts | None

    def ids(self) -> tuple[list[int], list[int], list[int]]:
        """Return those that ask for the first chunk, for a later one, and that begin an answer."""
        if not self.text:
            return [], [], []
        tokenizer = self.tokenizer or self._beside()
        later = (
            self.text.replace("the previous context", "the part of the previous context").rstrip(".")
            + ", starting with"
        )
        first, later, suffix = (
            tokenizer.encode(text, add_special_tokens=False) for text in (self.text, later, _answer_header(tokenizer))
        )
        return first, later, suffix

    def _beside(self) -> Any:
        source = "" if self.model is None else self.model.source
        try:
            if self.model is None or self.model.tokenizer is None:
                raise ValueError("no model is loaded")
            return self.model.tokenizer()
        except (OSError, ValueError, TypeError) as error:
            raise ValueError(
                f"KVzipPress asks the model in words to repeat its prompt, but there is no tokenizer at {source!r}: give one, "
                "KVzipPress(..., tokenizer=tokenizer), or read the prompt again without asking, repeat_prompt=''"
            ) from error


def _answer_header(tokenizer: Any) -> str:
    """Return what the chat template puts between the end of a question and its answer."""
    if tokenizer.chat_template is None:
        return "\n"
    mark = "\x00question\x00"
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], add_generation_prompt=True, tokenize=False, enable_thinking=False
    )
    return str(chat.partition(mark)[2])


class _Scores:
    """Scores of all stored pairs, `values[layer][n] [pairs]` for stream n; infinite for what was not read again."""

    def __init__(self, done: Pass, rows: list[ReadRow], n_sink: int, plus: bool) -> None:
        self.rows, self.n_sink, self.plus = rows, n_sink, plus
        self.values: dict[int, list[Tensor]] = {}
        for call in done.calls:
            worth = call.store.observers[Wanted(Worth)]
            worth.values = [
                torch.full((len(at),), torch.inf, device=call.queries.device)
                for at in Stored(call.store, done.mask).slots
            ]
            self.values[call.layer.index] = worth.values

    def chunk(self, tokens: slice, lengths: list[int]) -> None:
        """Set which tokens of each row the next pass repeats, and how many of its own tokens are real."""
        self.spans = [row.slots[tokens] for row in self.rows]
        self.lengths = torch.tensor(lengths)

    def take_in(self, call: LayerCall) -> None:
        """Add what one layer's queries pay to the pairs of the chunk."""
        store, new = call.store, call.queries.shape[2]
        stored = Stored(store, call.tokens.mask)
        spans = [self._span(at, n // store.heads) for n, at in enumerate(stored.slots)]
        parts = [
            [
                *stored.read(n, 0, sinks),
                *stored.read(n, start, stop),
                *stored.read(n, len(stored.slots[n]) - new, len(stored.slots[n])),
            ]
            for n, (sinks, start, stop) in enumerate(spans)
        ]
        lengths = [sum(len(keys) for keys, _ in part) for part in parts]
        keys, values = (torch.cat([pair[side] for part in parts for pair in part]) for side in (0, 1))
        weights = self._weights(call, keys, values, lengths).split(lengths)
        for found, weight, (sinks, start, stop) in zip(self.values[call.layer.index], weights, spans, strict=True):
            found[start:stop] = weight[sinks : sinks + stop - start]

    def _span(self, slots: Tensor, row: int) -> tuple[int, int, int]:
        """Where a stream's sinks end, and where its pairs of the chunk begin and end."""
        span, sinks = self.spans[row], self.rows[row].real[: self.n_sink]
        if not len(span):
            return 0, 0, 0
        edges = torch.stack([sinks[-1] + 1 if len(sinks) else span[0] * 0, span[0], span[-1] + 1])
        last, start, stop = torch.searchsorted(slots, edges).tolist()
        return last, max(last, start), max(last, stop)

    def _weights(self, call: LayerCall, keys: Tensor, values: Tensor, lengths: list[int]) -> Tensor:
        """Return the score of each of the flat rows of all streams, the newest rows of which are the queries' own."""
        store, new = call.store, call.queries.shape[2]
        queries = group_queries(call.queries, store.heads)
        streams, groups = len(lengths), queries.shape[1] // new
        count = torch.tensor(lengths, device=keys.device)
        real = (torch.arange(new) < self.lengths[:, None]).to(keys.device, torch.float32)

        def spread(per_token: Tensor) -> Tensor:
            """Repeat `[B, new]` for all query heads, as `[N, G * new]`."""
            return per_token[:, None].expand(-1, store.heads * groups, -1).reshape(streams, -1)

        sinks = None
        if call.sinks is not None:
            sinks = call.sinks.float().view(store.heads, groups, 1).expand(-1, -1, new).reshape(store.heads, -1)
            sinks = sinks.repeat(store.batch, 1)
        rows = kernels.Rows(kernels.Dense(keys), kernels.Dense(values))
        where = kernels.Ranges(count.cumsum(0) - count, count, longest=max(lengths))
        options = kernels.Options(call.logits.scale, call.logits.softcap, causal=new)
        with_sinks = replace(options, sinks=sinks)
        if not self.plus:
            return kernels.column_max(queries, rows, where, with_sinks, query_weight=spread(real))
        lse = kernels.decode(queries, rows, where, with_sinks)[1]
        lse = lse + spread(call.hidden_states.float().norm(dim=-1).log())
        weights = torch.zeros(len(keys), device=keys.device)
        for g in range(groups):
            part = slice(g * new, (g + 1) * new)
            found = kernels.column_max(
                queries[:, part], rows, where, options, lse=lse[:, part], query_weight=spread(real)[:, part]
            )
            sizes = [
                _projected(call.layer.module, rows, (n % store.heads) * groups + g)
                for n, rows in enumerate(values.split(lengths))
            ]
            weights = torch.maximum(weights, found * torch.cat(sizes))
        return weights


def _projected(module: nn.Module, values: Tensor, head: int) -> Tensor:
    """Norm of `values [n, Dv]` after the output projection of one query head."""
    weight = output_weight(module)
    assert weight is not None  # noqa: S101 - checked when the block was entered
    weight = weight[:, head * values.shape[1] : (head + 1) * values.shape[1]]
    return (values.float() @ weight.float().T).norm(dim=-1)
