"""`pipeline("kv-press-text-generation")`: ask questions about contexts that are compressed once."""

from __future__ import annotations

import contextlib
import copy
import logging
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Pipeline
from transformers.cache_utils import Cache
from transformers.pipelines import PIPELINE_REGISTRY

from kvpress.core.press import BasePress
from kvpress.hf.layer import PressLayer
from kvpress.hf.models import load, new_cache, reference_path
from kvpress.hf.prefixes import PrefixStore
from kvpress.hf.session import Session, session

TASK = "kv-press-text-generation"
logger = logging.getLogger(__name__)


class KVPressTextGenerationPipeline(Pipeline):
    """Compress a context, or a batch of contexts, before the questions are seen, then answer each question from it.

    The context is read once; every question works on a copy of the compressed cache, so that answers do not depend on
    each other. Answers come from `model.generate`: any of its arguments can be given. What is read and kept is logged at the
    level DEBUG.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for name in ("generate_answer", "_remove_answer_from_cache"):
            if name in vars(cls):
                raise TypeError(
                    f"{cls.__name__} overrides {name!r}, which nothing calls here: override `_forward` instead"
                )

    def __call__(
        self,
        context: str | Sequence[str],
        question: str | None = None,
        questions: Sequence[str] | None = None,
        answer_prefix: str | None = None,
        press: BasePress | None = None,
        max_new_tokens: int = 50,
        max_context_length: int | None = None,
        enable_thinking: bool = False,
        cache: Cache | None = None,
        prefix_store: PrefixStore | None = None,
        **generate: Any,
    ) -> dict[str, Any] | list[dict[str, Any]]:
        """Return `{"answer": text}` for one or no question, `{"answers": [...]}` for `questions`.

        A list of contexts is read as one batch and returns a list. `cache` is filled with the compressed context and
        can be passed again with a further context. Contexts longer than `max_context_length` tokens lose their end.
        Contexts that a `prefix_store` holds are not read again, and those that it does not hold are read into it.
        """
        if question is not None and questions is not None:
            raise ValueError("give either question or questions, not both")
        asked = list(questions) if questions is not None else [question or ""]
        contexts = [context] if isinstance(context, str) else list(context)
        if not contexts or not asked:
            raise ValueError(f"need at least one context and one question, got {len(contexts)} and {len(asked)}")
        if max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be >= 1, got {max_new_tokens}")
        if prefix_store is not None:
            generate["prefix_store"] = prefix_store
        inputs = self.preprocess(contexts, asked, answer_prefix or "", max_context_length, enable_thinking)
        answers = self._forward(inputs, press, cache, max_new_tokens=max_new_tokens, **generate)
        results = self.postprocess(answers, many=questions is not None)
        return results[0] if isinstance(context, str) else results

    def _sanitize_parameters(self, **kwargs: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        return {}, {}, {}

    def preprocess(
        self,
        contexts: list[str],
        questions: list[str],
        answer_prefix: str,
        max_context_length: int | None,
        enable_thinking: bool,
    ) -> dict[str, Any]:
        """Tokenise: contexts padded on the left to `[B, n]`, and one `[1, m]` tensor of ids per question."""
        framed = [self._frame(context, enable_thinking) for context in contexts]
        suffix = framed[0][1]
        rows = [self.tokenizer.encode(text, add_special_tokens=False)[:max_context_length] for text, _ in framed]
        longest = max(len(row) for row in rows)
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, longest - len(row) :] = torch.tensor(row)
            mask[i, longest - len(row) :] = 1
        asked = [
            self.tokenizer.encode(
                question + suffix + answer_prefix, return_tensors="pt", add_special_tokens=False
            ).long()
            for question in questions
        ]
        return {
            "ids": ids.to(self.device),
            "mask": mask.to(self.device),
            "questions": [q.to(self.device) for q in asked],
        }

    def _frame(self, context: str, enable_thinking: bool) -> tuple[str, str]:
        """Split the chat template around the place where the question goes: `(text before, text after)`."""
        if self.tokenizer.chat_template is None:
            return (self.tokenizer.bos_token or "") + context, "\n"
        mark = "\x00question\x00"
        chat = self.tokenizer.apply_chat_template(
            [{"role": "user", "content": context + mark}],
            add_generation_prompt=True,
            tokenize=False,
            enable_thinking=enable_thinking,
        )
        before, _, after = chat.partition(mark)
        return before, after

    def _forward(
        self,
        inputs: dict[str, Any],
        press: BasePress | None = None,
        cache: Cache | None = None,
        prefix_store: PrefixStore | None = None,
        **generate: Any,
    ) -> list[Tensor]:
        """Read the contexts under the press, then generate one `[B, new]` tensor of answers per question."""
        ids, mask = inputs["ids"], inputs["mask"]
        if prefix_store is not None and cache is not None:
            raise ValueError("give either cache or prefix_store: contexts of a store begin with an empty cache")
        cache = new_cache(self.model) if cache is None else cache
        before = cache.get_seq_length()
        if before and len(ids) > 1 and not bool(mask.all()):
            raise ValueError("a cache that already holds tokens can only be continued by contexts of equal length")
        past = mask.new_ones(len(ids), before)
        mask = torch.cat([past, mask], dim=1)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)[:, before:]
        if prefix_store is not None:
            cache = prefix_store.read(self.model, press, ids, mask)
        else:
            with torch.no_grad(), self._open(press, evict=press is not None):
                self.model(
                    ids,
                    attention_mask=mask,
                    position_ids=positions,
                    past_key_values=cache,
                    use_cache=True,
                    logits_to_keep=1,
                )
        logger.debug("Context Length: %d", ids.shape[1])
        if logger.isEnabledFor(logging.DEBUG):
            stores = [layer.store for layer in cache.layers if isinstance(layer, PressLayer)]
            held = [n for store in stores if store is not None for n in store.stored()]
            logger.debug(
                "Compressed Context Length: %d", round(sum(held) / len(held)) if held else before + ids.shape[1]
            )
        branches = max(generate.get("num_beams") or 1, generate.get("num_return_sequences") or 1)
        answers = []
        for question in inputs["questions"]:
            asked = question.expand(len(ids), -1)
            full = torch.cat([mask, mask.new_ones(asked.shape)], dim=1)
            own = copy.deepcopy(cache)
            if branches > 1:
                own.batch_repeat_interleave(branches)
            # Only the length of ids already in the cache matters to `generate`, so the new ones are passed alone.
            with torch.no_grad(), self._open(press, evict=False):
                output = self.model.generate(
                    asked,
                    attention_mask=full,
                    past_key_values=own,
                    **{"do_sample": False, **generate},
                )
            answers.append(output[:, asked.shape[1] :])
        return answers

    def _open(self, press: BasePress | None, evict: bool) -> AbstractContextManager[Session]:
        """Open a block for this thread alone: others may ask the same pipeline, under other presses."""
        return session(BasePress() if press is None else press, self.model, evict, private=True)

    def postprocess(self, answers: list[Tensor], many: bool) -> list[dict[str, Any]]:
        """Decode: one dictionary per context."""
        texts = [self.tokenizer.batch_decode(answer, skip_special_tokens=True) for answer in answers]
        rows = range(len(texts[0]))
        return [{"answers": [text[i] for text in texts]} if many else {"answer": texts[0][i]} for i in rows]


def register_pipeline() -> None:
    """Make the task known to `transformers.pipeline`; done once, when the first press is looked up."""
    with contextlib.suppress(KeyError):
        PIPELINE_REGISTRY.check_task(TASK)
        return
    PIPELINE_REGISTRY.register_pipeline(TASK, KVPressTextGenerationPipeline, pt_model=AutoModelForCausalLM)


def load_model(name: str, **kwargs: Any) -> tuple[Any, Any]:
    """Return `(model, tokenizer)` of `reference`, a local folder or a hub name; keyword arguments go to the model."""
    register_pipeline()
    return load(reference_path() if name == "reference" else name, **kwargs)
