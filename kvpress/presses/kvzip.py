# SPDX-License-Identifier: Apache-2.0
"""Scores from the attention of a model that repeats its prompt."""

from __future__ import annotations

from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from kvpress.core.checks import Count, Size
from kvpress.core.model import ModelFacts
from kvpress.core.press import BudgetPress
from kvpress.core.recipe import Eviction, PassHook, Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.core.scoring import Scorer
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.observe.queries import SampledQueries
from kvpress.presses.adakv import Competition
from kvpress.presses.criticalkv import check_outputs
from kvpress.presses.repetition import LastingRepetition, Repetition, RepetitionScores, set_worth

LEAD = 8
"""Number of tokens before a later chunk that are quoted to mark its beginning."""


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
        opening, later, suffix = questions.ids()
        starts = range(0, max(len(row.tokens) for row in rows), self.chunk_size)
        parts = self.parts(prefill)
        for group in (starts[first : first + max(1, parts)] for first in range(0, len(starts), max(1, parts))):
            texts, places = [], []
            for row in rows:
                for start in group:
                    chunk = row.tokens[start : start + self.chunk_size]
                    lead = [*later, *row.tokens[start - LEAD : start]] if start else opening
                    texts.append([*lead, *suffix, *chunk] if chunk else [])
                    places.append([-1] * (len(texts[-1]) - len(chunk)) + [*range(start, start + len(chunk))])
            longest, shape = max(map(len, texts)), (len(rows), -1)
            lengths = torch.tensor([len(text) for text in texts]).view(shape)
            scores.set_chunks([slice(start, start + self.chunk_size) for start in group], lengths)
            ids = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=prefill.position.device)
            place = torch.tensor([row + [-1] * (longest - len(row)) for row in places])
            self.read_chunks(prefill, ids.view(shape), place.view(shape), scores, len(group) if parts else 0)
        for call in prefill.calls:
            set_worth(call, prefill.mask, scores.of_layer(call.layer.index))

    def parts(self, prefill: Pass) -> int:
        """Return how many chunks one pass reads side by side; 0 where it reads one, unsplit."""
        return prefill.parts(self.chunk_size)

    def read_chunks(self, prefill: Pass, ids: Tensor, place: Tensor, scores: RepetitionScores, parts: int) -> None:
        """Read chunks of the prompt, each behind its instruction and directly after the prompt, and store their scores.

        `ids [B, parts * m]` are the texts, as `parts` of `Pass.read`. `place [B, parts * m]` is the index of each token in the
        prompt, -1 for instructions and for padding.
        """

        def watch(call: LayerCall) -> None:
            plus = self.kvzip_plus_normalization
            scores.take_in(call, call.hidden_states.float().norm(dim=-1) if plus else None)
            add_repeated_queries(call, place)

        prefill.read(ids, watch, scores.nearby if self.reads == "chunk" else None, parts)


def add_repeated_queries(call: LayerCall, place: Tensor) -> None:
    """Add the queries of a repeated prompt to the observers of a layer that sample them; `place [B, m]` as in `read_chunks`."""
    for observer in call.store.observers.values():
        if isinstance(observer, SampledQueries) and observer.repeated:
            observer.add(call, place)


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
