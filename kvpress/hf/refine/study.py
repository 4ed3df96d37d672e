# SPDX-License-Identifier: Apache-2.0
"""Self-study: questions and continuations about a text that the model itself generates behind the full cache of the text."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from kvpress.cache.report import memory_report
from kvpress.hf.generation.ask import framed, question_text
from kvpress.hf.models import with_cache

TOKENS = 32
"""Most tokens of an answer or a continuation."""
_QUESTION = 24
"""Most tokens of a question."""
_TEMPERATURE = 0.6
"""Temperature of questions and continuations; answers are greedy."""
_QUOTED = (4, 16)
"""Fewest and most tokens of a quotation that is continued."""
_SEEDS = (
    "Ask one question about the text above that it answers. Write only the question.",
    "Ask one question about a name, a number or another detail of the text above. Write only the question.",
    "Ask for a summary of one part of the text above. Write only the request.",
    "Ask one question whose answer needs two different parts of the text above. Write only the question.",
)
"""Requests for a question, in turn; a model without a chat template continues `Question:` instead."""
_PLAIN_SEED = "\nQuestion:"
_COPIES_BYTES = 2**30
"""Memory for copies of the full cache, one for each prompt that is continued at once; a larger cache is copied once."""


@dataclass(frozen=True)
class StudyItem:
    """Tokens that are read behind the text: a prompt, and the tokens whose distributions are compared."""

    kind: str
    """"question", "continuation" or "passage"."""
    prompt: tuple[int, ...]
    """Ids before the answer, one or more."""
    answer: tuple[int, ...]
    """Ids of the answer, the continuation or the passage, one or more."""


def tokens_behind(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str) -> int:
    """Return the most tokens that a study reads behind a text: a request, question or quotation, and what follows it."""
    _, after = framed(model, tokenizer, text)

    def count(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    request = max(map(count, _requests(tokenizer, after))) + _QUESTION
    question = (
        count(question_text(tokenizer, "") + after) + 2 * _QUESTION + TOKENS
    )  # a question may have more tokens than its ids
    return max(request, question, 1 + _QUOTED[1] + TOKENS)


def _requests(tokenizer: PreTrainedTokenizerBase, after: str) -> list[str]:
    """Return the texts that the model continues with a question; `after` is the text between a question and its answer."""
    if tokenizer.chat_template is None:
        return [_PLAIN_SEED]
    return [question_text(tokenizer, request) + after for request in _SEEDS]


class SelfStudy:
    """Generates items about one text, in batches, behind its full cache."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor, full: DynamicCache
    ) -> None:
        """Keep the full cache of `ids [1, n]`, which is copied for every batch."""
        self.model, self.tokenizer, self.ids, self.full = model, tokenizer, ids, full
        _, self.after = framed(model, tokenizer, text)
        self.num_questions = 0

    def questions(self, count: int, seed: int) -> list[StudyItem]:
        """Return up to `count` questions that the model asks, with the answers that it gives; empty questions are left out."""
        requests = _requests(self.tokenizer, self.after)
        prompts = [self._encode(requests[(self.num_questions + n) % len(requests)]) for n in range(count)]
        self.num_questions += count
        texts = [self._first_line(ids) for ids in self._continued(prompts, _QUESTION, seed, sampled=True)]
        questions = [self._encode(self._question(text)) for text in dict.fromkeys(texts) if text]
        answers = self._continued(questions, TOKENS, seed, sampled=False) if questions else []
        return [_item("question", *pair) for pair in zip(questions, answers, strict=True) if pair[1]]

    def continuations(self, count: int, seed: int) -> list[StudyItem]:
        """Return `count` quotations from random places of the text, on a new line, each with a sampled continuation."""
        draw = random.Random(seed)  # noqa: S311 - no secret
        text, line = self.ids[0].tolist(), self._encode("\n")
        prompts = []
        for _ in range(count):
            length = draw.randint(*_QUOTED)
            start = draw.randrange(len(text) - length)
            prompts.append([*line, *text[start : start + length]])
        continued = self._continued(prompts, TOKENS, seed, sampled=True)
        return [_item("continuation", *pair) for pair in zip(prompts, continued, strict=True) if pair[1]]

    def passages(self, count: int, seed: int) -> list[StudyItem]:
        """Return `count` passages from random places of the text itself, on a new line; nothing is generated."""
        draw = random.Random(seed)  # noqa: S311 - no secret
        text, line = self.ids[0].tolist(), self._encode("\n")
        length = min(len(text) - 1, TOKENS + _QUOTED[0])
        starts = [draw.randrange(len(text) - length) for _ in range(count)]
        passages = [text[start : start + length] for start in starts]
        return [_item("passage", [*line, *part[: _QUOTED[0]]], part[_QUOTED[0] :]) for part in passages]

    def _question(self, question: str) -> str:
        return question_text(self.tokenizer, question) + self.after

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _first_line(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=True).strip()
        return text.splitlines()[0].strip() if text else ""

    def _continued(self, prompts: Sequence[Sequence[int]], tokens: int, seed: int, *, sampled: bool) -> list[list[int]]:
        """Return up to `tokens` ids that follow each prompt behind the text; the end token is the last one, if it comes.

        As many prompts are read at once as copies of the full cache fit into `_COPIES_BYTES`.
        """
        draws = torch.Generator(device=self.ids.device).manual_seed(seed)
        most = max(1, _COPIES_BYTES // memory_report(self.full).total_bytes)
        batches = [prompts[start : start + most] for start in range(0, len(prompts), most)]
        return [row for batch in batches for row in self._continued_batch(batch, tokens, draws if sampled else None)]

    def _continued_batch(
        self, prompts: Sequence[Sequence[int]], tokens: int, draws: torch.Generator | None
    ) -> list[list[int]]:
        """Return up to `tokens` ids that follow each prompt, all in one batch: sampled with `draws`, or greedy without."""
        ends = _end_tokens(self.model)
        cache = copy.deepcopy(self.full)
        cache.batch_repeat_interleave(len(prompts))
        longest = max(map(len, prompts))
        pads = torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts])
        new = torch.tensor([[0] * (longest - len(ids)) + list(ids) for ids in prompts]).to(self.ids.device)
        mask = torch.cat([torch.ones(len(prompts), self.ids.shape[1], dtype=torch.long), pads], dim=1).to(new.device)
        rows: list[list[int]] = [[] for _ in prompts]
        is_open = [True] * len(prompts)
        with torch.no_grad():
            for _ in range(tokens):
                positions = (mask.cumsum(dim=1) - 1)[:, -new.shape[1] :].clamp_min(0)
                output = self.model(
                    new,
                    attention_mask=mask,
                    position_ids=positions,
                    **with_cache(cache),
                    use_cache=True,
                    logits_to_keep=1,
                )
                logits = output.logits[:, -1].float()
                if draws is not None:
                    new = torch.multinomial(torch.softmax(logits / _TEMPERATURE, dim=-1), 1, generator=draws)
                else:
                    new = logits.argmax(dim=-1, keepdim=True)
                for n, token in enumerate(new[:, 0].tolist()):
                    if is_open[n]:
                        rows[n].append(token)
                        is_open[n] = token not in ends
                if not any(is_open):
                    break
                mask = torch.cat([mask, mask.new_ones(len(prompts), 1)], dim=1)
        return rows


def _item(kind: str, prompt: Sequence[int], answer: Sequence[int]) -> StudyItem:
    return StudyItem(kind, tuple(prompt), tuple(answer))


def _end_tokens(model: PreTrainedModel) -> set[int]:
    """Return the ids that end an answer of a model."""
    config = model.generation_config
    ends = None if config is None else config.eos_token_id
    return set() if ends is None else set(ends) if isinstance(ends, list) else {int(ends)}
