# SPDX-License-Identifier: Apache-2.0
"""Attention of the question at the end of a prompt, normalised by the number of tokens that a query attends to."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.core.rerotation import closing_gaps
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted
from kvpress.observe.queries import append_real, new_real_tokens
from kvpress.observe.view import View
from kvpress.presses.chunk import InChunks


@register(
    "finch",
    "evict",
    "Corallo & Papotti, 2024, arXiv:2408.00167",
    example="finch:0.5,window_size=64",
    refuses=(
        Refusal("finch:0.5", "it needs a delimiter or a window to find the question"),
        Refusal(
            "decoding(finch:window_size=8)", "it scores by the question of a prompt, and generated tokens have none"
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE, "keys move, so hiding the evicted ones is another computation; its own tests compare each part"
        ),
        Exemption("fuzz", "random ids hold no delimiter; `snapkv`, `chunk` and `key_rerotation`, its parts, are drawn"),
    ),
)
@dataclass
class FinchPress(ScorerPress):
    """Score a pair by the attention of the question, which follows a delimiter at the end of the prompt.

        score[h, t] = mean over the question's tokens i and the group of c(i) softmax(q_i . k)[t]

    c(i) is the number of tokens that i attends to, or 1 without `normalize_scores`. The question always stays, and the
    delimiter is always evicted. With `chunk_length`, each chunk of at most that many pairs keeps the same share.
    `rerotate_keys` rotates the kept keys to consecutive positions. The question is the tokens after the last token
    `delimiter_token_id`, which `update_model_and_tokenizer` adds for the text `delimiter_token`; or, without a delimiter, the
    newest `window_size` tokens.

    Paper: Corallo & Papotti, FINCH: Prompt-guided Key-Value Cache Compression for Large Language Models, 2024,
    arXiv:2408.00167.
    Differs from the paper: the prompt is read in one pass, as in NVIDIA kvpress; the question attends to the delimiter, where
    NVIDIA kvpress removes its embedding from the input. Questions may differ in length between rows of a batch.
    """

    chunk_length: Count | None = None
    normalize_scores: bool = True
    rerotate_keys: bool = True
    window_size: Count | None = field(default=None, kw_only=True)
    delimiter_token: str | None = field(default=None, kw_only=True)
    delimiter_token_id: Size | None = field(default=None, kw_only=True)

    def validate(self) -> None:
        super().validate()
        if self.window_size is not None and self.delimiter_token_id is not None:
            raise ValueError(
                f"set either window_size={self.window_size} or delimiter_token_id={self.delimiter_token_id}: both would mark "
                "the question"
            )

    def update_model_and_tokenizer(self, model: Any, tokenizer: Any, delimiter_token: str = "<|finch_sep|>") -> Any:  # noqa: S107
        """Add a token for the delimiter to tokenizer and model, and return the tokenizer.

        A prompt is then context + delimiter + question.
        """
        if delimiter_token not in tokenizer.get_vocab():
            tokenizer.add_special_tokens({"additional_special_tokens": [delimiter_token]})
        self.delimiter_token = delimiter_token
        self.delimiter_token_id = int(tokenizer.convert_tokens_to_ids(delimiter_token))
        if len(tokenizer) > model.get_input_embeddings().num_embeddings:
            model.resize_token_embeddings(len(tokenizer))
        return tokenizer

    @property
    def protected(self) -> int:
        return self.window_size or 0

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return (Wanted(QuestionQueries, self.window_size, self.delimiter_token_id),)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None and self.window_size is None and self.delimiter_token_id is None:
            raise ValueError(
                "FinchPress needs to find the question in the prompt: call update_model_and_tokenizer and put the delimiter "
                "before the question, or set window_size="
            )
        recipe = super().recipe(model)
        (step,) = recipe.evictions
        if self.chunk_length is not None:
            step = replace(step, scorer=InChunks(step.scorer, self.chunk_length))
        if self.rerotate_keys:
            step = closing_gaps(step)
        return replace(recipe, evictions=(replace(step, fixed=True),))

    def scores(self, view: View) -> Tensor:
        """Return `[b, h, n]`, infinite for the question and minus infinite for the delimiter."""
        full_view = view if view.whole is None else view.whole
        key = QuestionQueries, full_view.heads.start
        if key not in full_view.memo:
            full_view.memo[key] = self._scores(full_view)
        scores: Tensor = full_view.memo[key]
        return scores if view.index is None else scores.gather(2, view.index)

    def _check_room(self, view: View, width: int) -> None:
        """Raise ValueError if the last chunk keeps fewer pairs than the question has tokens, which are `width`."""
        if self.chunk_length is None:
            return
        chunks = -(-view.length // self.chunk_length)
        capacity = view.target - view.target * (view.length * (chunks - 1) // chunks) // view.length
        if width > capacity:
            raise ValueError(
                f"chunk_length={self.chunk_length} leaves {capacity} pairs of the last chunk, fewer than the {width} tokens "
                "of the question: use longer chunks or a smaller compression_ratio"
            )

    def _scores(self, view: View) -> Tensor:
        question = view.observer(*self.wants)
        sizes = question.sizes(view.rows)
        width = int(sizes.max())
        self._check_room(view, width)
        positions = torch.arange(view.seen - width, view.seen, device=view.positions.device)
        counts = (positions >= view.seen - sizes[:, None]).float() / sizes[:, None]
        if self.normalize_scores:
            counts = counts * (positions + 1)
        scores = torch.empty(view.shape, device=view.positions.device)
        for h, head in enumerate(view.per_head()):
            weights = head.attention(head.query_heads(question.queries)[:, :, -width:])[:, 0]
            scores[:, h] = torch.einsum("bgwn,bw->bn", weights, counts) / weights.shape[1]
        first = (view.seen - sizes)[:, None, None]
        scores.masked_fill_(view.positions >= first, torch.inf)
        if self.delimiter_token_id is not None:
            scores.masked_fill_(view.positions == first - 1, -torch.inf)
        return scores


class QuestionQueries(Observer):
    """Observer of the question's queries, `queries [B, Hq, w, D]`: after the last delimiter, or the newest `window` tokens.

    `size [B]` is the number of these tokens of each row, padding not counted, and -1 where a delimiter is missing. Rows with
    fewer than `w` have queries of other tokens before them.
    """

    state_names = ("queries", "size")

    def __init__(self, window: int | None, delimiter: int | None) -> None:
        self.window, self.delimiter = window, delimiter
        self.queries: Tensor | None = None
        self.size: Tensor | None = None

    def observe(self, call: LayerCall) -> None:
        if call.phase == "decode":
            return
        if call.tokens.seen_before == call.tokens.prompt_start or self.queries is None or self.size is None:
            self.queries = call.queries[:, :, :0]
            start = -1 if self.window is None else 0
            self.size = torch.full((len(call.queries),), start, device=call.queries.device)
        real = new_real_tokens(call)
        if real is None:
            real = torch.ones(len(self.size), call.queries.shape[2], dtype=torch.bool, device=self.size.device)
        self.size = torch.where(self.size >= 0, self.size + real.sum(dim=1), self.size)
        if self.window is not None:
            self.size = self.size.clamp_max(self.window)
        if self.delimiter is not None:
            if call.tokens.ids is None:
                raise ValueError("FinchPress searches its delimiter in token ids: pass the prompt as input_ids")
            new = real.shape[1]
            order = torch.arange(new, device=real.device)
            last = torch.where((call.tokens.ids.to(real.device) == self.delimiter) & real, order, -1).amax(dim=1)
            later = (real & (order > last[:, None])).sum(dim=1)
            self.size = torch.where(last >= 0, later, self.size)
        self.queries, _ = append_real(self.queries, None, call.queries, real, max(1, int(self.size.max())))

    def sizes(self, rows: list[int]) -> Tensor:
        """Return the number of tokens of each row's question, `[b]`.

        Raises:
            ValueError: there is no delimiter, or no token after it.
        """
        assert self.size is not None  # noqa: S101 - a prompt has been read
        if self.window is not None:
            return self.size[rows].clamp_min(1)
        sizes = self.size[rows]
        if bool((sizes < 1).any()):
            row = rows[int((sizes < 1).nonzero()[0])]
            raise ValueError(
                f"row {row} of the prompt has no question: put the delimiter (token {self.delimiter}) between context and "
                "question"
            )
        return sizes
