"""Attention while the model repeats its prompt."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kvpress import kernels
from kvpress.attention import group_queries
from kvpress.checks import check_count, check_finite
from kvpress.context import LayerCall, Phase
from kvpress.passes import Pass
from kvpress.presses.base import BudgetPress
from kvpress.presses.criticalkv import check_outputs, output_weight
from kvpress.presses.evict import top
from kvpress.presses.streams import Stored, real_columns
from kvpress.registry import register

CHUNK = 2048
"""Prompt tokens that are repeated at a time."""
LEAD = 8
"""Tokens before a later chunk that say where it begins."""


@register("kvzip", "evict", "Kim et al., 2025, arXiv:2505.23416")
@dataclass
class KVzipPress(BudgetPress):
    """Keep the pairs that the model reads when it repeats its prompt; heads and layers compete.

    Behind the prompt, chunk after chunk is read again, led in by `repeat_prompt`, and then taken back. With the softmax of
    its queries i over the sinks, the chunk c and what is read itself,

        score[b, h, t] = max over i and the group of softmax(q_i . k)[t],   t in c

    `kvzip_plus_normalization` scores `a * ||W_o v_t|| / ||x_i||` in the place of weights a, with x_i the input of the
    attention and W_o the output projection of the query head. The first `n_sink` tokens always stay, and so do pairs that
    survived an earlier turn. `layerwise` gives every layer the same number of pairs.

    The prompt of repetition is text, which `tokenizer` reads, else the one beside the model. `repeat_prompt=""` needs none:
    the prompt is simply read a second time.

    Paper: Kim et al., KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction, 2025, arXiv:2505.23416.
    Differs from the paper: nothing in the scores; rows of a batch are scored alone, and what is evicted is freed.
    """

    is_head_wise: ClassVar[bool] = True

    layerwise: bool = False
    n_sink: int = 4
    kvzip_plus_normalization: bool = False
    repeat_prompt: str = "\n\nRepeat the previous context exactly."
    tokenizer: InitVar[Any] = field(default=None, kw_only=True)

    def __post_init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer  # type: ignore[attr-defined]
        self.validate()

    def validate(self) -> None:
        super().validate()
        check_count("n_sink", self.n_sink, least=0)
        if not isinstance(self.repeat_prompt, str):
            raise TypeError(f"repeat_prompt must be text, got {self.repeat_prompt!r}")

    @property
    def protected(self) -> int:
        return self.n_sink

    @property
    def follows(self) -> tuple[Phase, ...]:
        return () if self.keeps_all else ("prefill",)

    def post_init_from_model(self, model: nn.Module) -> None:
        if not self.keeps_all:
            self._prompts(model)
        if self.kvzip_plus_normalization:
            check_outputs(model)

    def after_pass(self, done: Pass) -> None:
        rows = _Row.all(done)
        kept = [self.kept_of(len(row.real)) for row in rows]
        for call in done.calls:
            check_finite(call.store.window.filled_keys, call.store.window.filled_values, call.layer)
            call.store.targets = kept
        if all(count >= len(row.real) for row, count in zip(rows, kept, strict=True)):
            return
        scores = _Scores(done, rows, self.n_sink, self.kvzip_plus_normalization)
        first, later, suffix = self._prompts(done.model)
        for start in range(0, max(len(row.tokens) for row in rows), CHUNK):
            texts = []
            for row in rows:
                chunk = row.tokens[start : start + CHUNK]
                lead = [*later, *row.tokens[start - LEAD : start]] if start else first
                texts.append([*lead, *suffix, *chunk] if chunk else [])
            longest = max(map(len, texts))
            scores.chunk(start, [len(text) for text in texts])
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=done.position.device)
            done.read(ids, scores.take_in)
        for call, masks in zip(done.calls, scores.keep(kept, self.layerwise), strict=True):
            call.store.evict(masks, call.columns)

    def _prompts(self, model: Any) -> tuple[list[int], list[int], list[int]]:
        """Return the ids that ask for the first chunk, for a later one, and that begin an answer."""
        if not self.repeat_prompt:
            return [], [], []
        tokenizer = self.tokenizer or _tokenizer_beside(model)  # type: ignore[attr-defined]
        later = self.repeat_prompt.rstrip(".") + ", starting with"
        first, later, suffix = (
            tokenizer.encode(text, add_special_tokens=False)
            for text in (self.repeat_prompt, later, _answer_header(tokenizer))
        )
        return first, later, suffix


def _tokenizer_beside(model: Any) -> Any:
    from kvpress.hf import load_tokenizer

    name = model.config._name_or_path
    try:
        return load_tokenizer(name)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"KVzipPress asks the model in words to repeat its prompt, but there is no tokenizer at {name!r}: give one, "
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


@dataclass
class _Row:
    """One row of the batch: the columns of its real tokens, and the ids and columns of those to be read again."""

    real: Tensor
    tokens: list[int]
    columns: Tensor

    @classmethod
    def all(cls, done: Pass) -> list[_Row]:
        if done.ids is None:
            raise ValueError(
                "KVzipPress reads the prompt again, so it must be given as input_ids, not as inputs_embeds"
            )
        first, rows = done.seen - done.ids.shape[1], []
        for ids, at in zip(done.ids.cpu(), real_columns(done.calls[0].store, done.mask), strict=True):
            read = at[at >= first]
            rows.append(cls(at, ids[read - first].tolist(), read))
        return rows


class _Scores:
    """Scores of all stored pairs, `values[i][n] [pairs]` for stream n of call i; infinite for what was not read again."""

    def __init__(self, done: Pass, rows: list[_Row], n_sink: int, plus: bool) -> None:
        self.calls, self.rows, self.n_sink, self.plus = done.calls, rows, n_sink, plus
        self.index = {call.layer: i for i, call in enumerate(done.calls)}
        self.values = [
            [
                torch.full((len(at),), torch.inf, device=call.queries.device)
                for at in Stored(call.store, done.mask).columns
            ]
            for call in done.calls
        ]

    def chunk(self, start: int, lengths: list[int]) -> None:
        """Set which tokens of each row the next pass repeats, and how many of its own tokens are real."""
        self.spans = [row.columns[start : start + CHUNK] for row in self.rows]
        self.lengths = torch.tensor(lengths)

    def take_in(self, call: LayerCall) -> None:
        """Add what one layer's queries pay to the pairs of the chunk."""
        store, new = call.store, call.queries.shape[2]
        stored = Stored(store, call.columns)
        spans = [self._span(at, n // store.heads) for n, at in enumerate(stored.columns)]
        parts = [
            [
                *stored.read(n, 0, sinks),
                *stored.read(n, start, stop),
                *stored.read(n, len(stored.columns[n]) - new, len(stored.columns[n])),
            ]
            for n, (sinks, start, stop) in enumerate(spans)
        ]
        lengths = [sum(len(keys) for keys, _ in part) for part in parts]
        keys, values = (torch.cat([pair[side] for part in parts for pair in part]) for side in (0, 1))
        weights = self._weights(call, keys, values, lengths).split(lengths)
        for found, weight, (sinks, start, stop) in zip(
            self.values[self.index[call.layer]], weights, spans, strict=True
        ):
            found[start:stop] = weight[sinks : sinks + stop - start]

    def _span(self, columns: Tensor, row: int) -> tuple[int, int, int]:
        """Where a stream's sinks end, and where its pairs of the chunk begin and end."""
        span, sinks = self.spans[row], self.rows[row].real[: self.n_sink]
        if not len(span):
            return 0, 0, 0
        edges = torch.stack([sinks[-1] + 1 if len(sinks) else span[0] * 0, span[0], span[-1] + 1])
        last, start, stop = torch.searchsorted(columns, edges).tolist()
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
        about = (keys, count.cumsum(0) - count, count, call.logits.scale)
        settings: dict[str, Any] = {"softcap": call.logits.softcap, "causal": new}
        if not self.plus:
            return kernels.column_max(queries, *about, sinks=sinks, row_weights=spread(real), **settings)
        lse = kernels.dense_decode(queries, keys, keys, *about[1:], sinks=sinks, **settings)[1]
        lse = lse + spread(call.hidden_states.float().norm(dim=-1).log())
        weights = torch.zeros(len(keys), device=keys.device)
        for g in range(groups):
            part = slice(g * new, (g + 1) * new)
            found = kernels.column_max(
                queries[:, part], *about, lse=lse[:, part], row_weights=spread(real)[:, part], **settings
            )
            sizes = [
                _projected(call.module, rows, (n % store.heads) * groups + g)
                for n, rows in enumerate(values.split(lengths))
            ]
            weights = torch.maximum(weights, found * torch.cat(sizes))
        return weights

    def keep(self, kept: list[int], layerwise: bool) -> list[list[Tensor]]:
        """Return, for every call and stream, which stored pairs stay: `kept[b]` per head of row b on average."""
        masks = [list(streams) for streams in self.values]
        layers = range(len(masks))
        for row, count in enumerate(kept):
            for together in [[i] for i in layers] if layerwise else [list(layers)]:
                owned = [
                    (i, row * self.calls[i].store.heads + h) for i in together for h in range(self.calls[i].store.heads)
                ]
                values = [self.values[i][n] for i, n in owned]
                chosen = top(torch.cat(values), min(count * len(owned), sum(map(len, values))))
                for (i, n), mask in zip(owned, chosen.split([len(value) for value in values]), strict=True):
                    masks[i][n] = mask
        return masks


def _projected(module: nn.Module, values: Tensor, head: int) -> Tensor:
    """Norm of `values [n, Dv]` after the output projection of one query head."""
    weight = output_weight(module)
    assert weight is not None  # noqa: S101 - checked when the block was entered
    weight = weight[:, head * values.shape[1] : (head + 1) * values.shape[1]]
    return (values.float() @ weight.float().T).norm(dim=-1)
