# SPDX-License-Identifier: Apache-2.0
"""The model `kvpress` of lm-eval (lm-evaluation-harness): a Hugging Face model whose prompts are read under a press.

The press compresses a prompt without its last token. This token and all later ones are decode steps through the compressed
cache, generated or scored. So even the first token of an answer, or an answer of one letter, depends on the kept pairs.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from torch.nn.functional import log_softmax
from tqdm import tqdm  # type: ignore[import-untyped]
from transformers import Cache

import kvpress
from kvpress.core.press import BasePress
from kvpress.hf.model_files import folder_of
from kvpress.hf.models import new_cache, with_cache
from kvpress_eval.common.errors import ConfigError, unknown_name
from kvpress_eval.config.schema import REFERENCE
from kvpress_eval.run.generation import pad_left, parts, read

LOADING = (
    "attn_implementation", "cache_dir", "device_map", "local_files_only", "max_memory", "quantization_config", "token",
    "use_safetensors", "variant",
)  # fmt: skip
"""Arguments for `from_pretrained` beyond those of HFLM."""

Request = tuple[Any, list[int], list[int]]
"""Request of lm-eval: `((context, continuation), context ids, continuation ids)`; the texts are None for a rolling window."""


@dataclass
class HeldMemory:
    """Memory of the compressed caches of prompts, summed over batches."""

    prompts: int = 0
    """Number of prompts."""
    bytes: int = 0
    """Held bytes."""
    uncompressed_bytes: int = 0
    """Bytes of the same caches without a press."""
    values: float = 0.0
    """Key and value numbers of the uncompressed caches."""

    def add(self, cache: Cache, prompts: int) -> None:
        """Add the memory of a cache of `prompts` prompts."""
        report = kvpress.memory_report(cache)
        self.prompts += prompts
        self.bytes += report.total_bytes
        self.uncompressed_bytes += report.uncompressed_bytes
        self.values += report.uncompressed_bytes / report.value_bytes

    def summary(self) -> dict[str, Any]:
        """Return means per prompt, and bits per value; None without a prompt."""
        count = self.prompts
        return {
            "prompts": count,
            "bytes_per_prompt": self.bytes / count if count else None,
            "uncompressed_bytes_per_prompt": self.uncompressed_bytes / count if count else None,
            "bits_per_value": 8 * self.bytes / self.values if count else None,
        }


@register_model("kvpress")
class KVPressLM(HFLM):
    """HFLM under a press; `pretrained` may be `reference`, `press` is a spec, its dictionary, or a press.

    All other arguments are those of HFLM, with the same defaults. `held` sums the memory of the compressed prompts.

    Raises:
        ConfigError: an argument is unknown, the press is invalid, or the model is an encoder-decoder model.
    """

    def __init__(
        self, pretrained: Any = REFERENCE, press: str | Mapping[str, Any] | BasePress = "none", **kwargs: Any
    ) -> None:
        _refuse_unknown(kwargs)
        if kwargs.get("mixed_precision_dtype") is not None:
            raise ConfigError(
                "mixed_precision_dtype gives keys and values of different dtypes; load the model with dtype"
            )
        self.press = _read_press(press)
        self.held = HeldMemory()
        super().__init__(folder_of(pretrained) if isinstance(pretrained, str) else pretrained, **kwargs)
        if self.backend != "causal":
            raise ConfigError(f"{pretrained!r} is an encoder-decoder model; presses work on decoder-only models")

    def get_model_info(self) -> dict[str, Any]:
        """Return the model's record of lm-eval with the press and its memory so far."""
        press = {"kvpress": kvpress.__version__, "press": kvpress.to_spec(self.press), "held": self.held.summary()}
        return {**super().get_model_info(), **press}

    # -- generation ------------------------------------------------------------------------------------------

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **kwargs: Any) -> Tensor:
        mask = kwargs.get("attention_mask", torch.ones_like(context))
        if int(mask.sum(dim=1).min()) < 2:
            # A prompt of one token has no pair to compress before its last token.
            with self.press(self.model):
                return super()._model_generate(context, max_length, stop, **kwargs)
        cache = self._read(context[:, :-1], mask[:, :-1])
        beams = kwargs.get("num_beams") or 1
        if beams > 1:
            cache.batch_repeat_interleave(beams)
        with kvpress.reading(self.model, self.press):
            return super()._model_generate(context, max_length, stop, **kwargs, **with_cache(cache))

    # -- scoring ---------------------------------------------------------------------------------------------

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations through the compressed cache of their contexts."""
        self._warn("loglikelihood without a context", [request for request in requests if not request.args[0]])
        return super().loglikelihood(requests, disable_tqdm=disable_tqdm)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Score texts as HFLM does, in passes that read no cache; warn that the press has no effect."""
        self._warn("loglikelihood_rolling", requests)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def _warn(self, kind: str, requests: Sequence[Any]) -> None:
        if requests and not self.press.recipe().is_identity:
            tasks = ", ".join(sorted({str(request.task_name) for request in requests}))
            warnings.warn(
                f"{kind} (task {tasks}) is scored in one pass, which never reads the cache: the press has no effect on it, "
                "and any press scores like `none`; `kvpress fidelity` measures a press on running text",
                stacklevel=3,
            )

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        contexts: dict[tuple[int, ...], list[int]] = {}
        single_pass = []
        for index, (texts, context, continuation) in enumerate(requests):
            # As in HFLM, a context that is too long loses its beginning; the last token of a continuation is not read.
            kept = tuple(context[-max(1, self.max_length + 1 - len(continuation)) :])
            if texts is None or len(kept) < 2:
                single_pass.append(index)
            else:
                contexts.setdefault(kept, []).append(index)
        answers: dict[int, tuple[float, bool]] = {}
        if single_pass:
            chosen = [requests[index] for index in single_pass]
            answers.update(
                zip(single_pass, super()._loglikelihood_tokens(chosen, disable_tqdm, override_bs), strict=True)
            )
        with tqdm(total=len(requests) - len(single_pass), disable=disable_tqdm or self.rank != 0) as progress:
            for index, answer in self._score(contexts, requests, override_bs):
                answers[index] = answer
                self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                progress.update()
        return [answers[index] for index in range(len(requests))]

    def _score(
        self, contexts: Mapping[tuple[int, ...], list[int]], requests: Sequence[Request], override_bs: int | None
    ) -> Iterator[tuple[int, tuple[float, bool]]]:
        """Read each context once, longest first, and score its continuations with copies of its cache."""
        order = sorted(contexts, key=lambda context: (-len(context), context))
        size = self.batch_size
        if order and size == "auto":
            size = override_bs or self._detect_batch_size([(None, list(order[0]), [])])
        for batch in parts(order, size):
            ids, mask = pad_left([context[:-1] for context in batch], self.tokenizer.pad_token_id, self.device)
            cache = self._read(ids, mask)
            continuations = [(row, index) for row, context in enumerate(batch) for index in contexts[context]]
            continuations.sort(key=lambda pair: -len(requests[pair[1]][2]))
            for pairs in parts(continuations, size):
                rows = torch.tensor([row for row, _ in pairs], device=self.device)
                branch = copy.deepcopy(cache)
                branch.batch_select_indices(rows)
                last = [batch[row][-1] for row, _ in pairs]
                scored = self._continue(branch, mask[rows], last, [requests[index][2] for _, index in pairs])
                yield from zip((index for _, index in pairs), scored, strict=True)

    def _continue(
        self, cache: Cache, mask: Tensor, last: Sequence[int], continuations: Sequence[list[int]]
    ) -> list[tuple[float, bool]]:
        """Return each continuation's log-likelihood and whether greedy decoding gives it, read token by token.

        Shorter continuations are padded at their end with tokens that do not count.
        """
        targets = torch.zeros(len(continuations), max(map(len, continuations)), dtype=torch.long, device=self.device)
        for row, continuation in enumerate(continuations):
            targets[row, : len(continuation)] = torch.tensor(continuation)
        lengths = torch.tensor([len(continuation) for continuation in continuations], device=self.device)
        tokens = torch.tensor(last, device=self.device)
        total, greedy = torch.zeros(len(last), device=self.device), torch.ones_like(tokens, dtype=torch.bool)
        with kvpress.reading(self.model, self.press):
            for step, target in enumerate(targets.unbind(dim=1)):
                mask = torch.cat([mask, mask.new_ones(len(last), 1)], dim=1)
                logits = read(self.model, tokens[:, None], mask, cache)
                scores = log_softmax(logits, dim=-1, dtype=self.softmax_dtype)
                counts = step < lengths
                total += torch.where(counts, scores.gather(1, target[:, None])[:, 0], 0.0)
                greedy &= ~counts | (scores.argmax(dim=-1) == target)
                tokens = target
        return list(zip(total.tolist(), greedy.tolist(), strict=True))

    # -- reading ---------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _read(self, ids: Tensor, mask: Tensor) -> Cache:
        """Read prompts with left padding under the press; return their compressed cache."""
        cache = new_cache(self.model)
        with self.press(self.model):
            read(self.model, ids, mask, cache)
        self.held.add(cache, len(ids))
        return cache


def _refuse_unknown(arguments: Mapping[str, Any]) -> None:
    """Raise for arguments of neither HFLM nor `from_pretrained`, which would be ignored or fail late."""
    valid = {*inspect.signature(HFLM.__init__).parameters, "press", *LOADING} - {"self", "kwargs"}
    for name in arguments:
        if name not in valid:
            raise ConfigError(
                f"{unknown_name('model argument', name, valid)}; commas inside a press need model_args as JSON: "
                """--model_args '{"pretrained": "reference", "press": "snapkv:0.5,window_size=32"}'"""
            )


def _read_press(press: str | Mapping[str, Any] | BasePress) -> BasePress:
    if isinstance(press, BasePress):
        return press
    try:
        return kvpress.press_from_dict(dict(press)) if isinstance(press, Mapping) else kvpress.get_press(press)
    except (KeyError, ValueError, TypeError) as error:
        raise ConfigError(f"press {press!r}: {error.args[0] if error.args else error}") from error
