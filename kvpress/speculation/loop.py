# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding: propose, verify, accept, and remove rejected tokens from the caches."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpress.cache.report import memory_report
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press
from kvpress.hf.cache.layer import stop_recording
from kvpress.hf.generation.clock import now
from kvpress.hf.models import cache_among, new_cache
from kvpress.speculation.accept import accept, draw, pulled
from kvpress.speculation.checks import (
    check_cache,
    check_chunks,
    check_draft,
    check_eta,
    check_head,
    check_models,
    check_partial,
    check_selectors,
    check_settings,
    inputs_of,
)
from kvpress.speculation.chunks import RetrievedChunkPress, choose
from kvpress.speculation.eagle import EagleHead
from kvpress.speculation.forms import Draft, PartialVerification, RetrievedChunks, RetrievedPassages
from kvpress.speculation.headed import HeadReader
from kvpress.speculation.passages import shortened
from kvpress.speculation.prompt import drafted, read_prompt
from kvpress.speculation.reader import TokenReader


@dataclass
class Speculation:
    """Result of `speculate`."""

    sequences: Tensor
    """Prompts and answers `[B, T]`, as `generate` returns them."""
    cache: Any
    """Cache of the target, which has read all tokens but the last."""
    proposed: list[int] = field(default_factory=list)
    """Tokens that the draft proposed in each round."""
    accepted: list[int] = field(default_factory=list)
    """Tokens that were accepted in each round; a round generates one more."""
    full_rounds: int = 0
    """Rounds that were verified with the full cache."""
    target_passes: int = 0
    """Forward passes of the target after the prompt."""
    draft_passes: int = 0
    """Forward passes of the draft after the prompt."""
    seconds: float = 0.0
    """Time after the prompt."""
    tokens: int = 0
    """Tokens that were generated in every row."""
    target_bytes: int = 0
    """Bytes of the target's cache at the end."""
    draft_bytes: int = 0
    """Bytes of the other caches at the end, without memory that they share with the target's."""

    @property
    def acceptance(self) -> float:
        """Share of the proposed tokens that were accepted."""
        return sum(self.accepted) / max(1, sum(self.proposed))

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens that a round generates."""
        return (sum(self.accepted) + len(self.accepted)) / max(1, len(self.accepted))

    @property
    def seconds_per_token(self) -> float:
        """Time per generated token of a row, without the prompt."""
        return self.seconds / max(1, self.tokens)


def speculate(
    model: Any,
    inputs: Any,
    *,
    draft: Draft | BasePress | str | Any,
    press: BasePress | str = "none",
    verify: PartialVerification | None = None,
    **kwargs: Any,
) -> Speculation:
    """Generate the output of `model.generate` with `press`, faster, from tokens that a draft proposes and the model verifies.

    In every round the draft proposes tokens one by one with a cache that is fast to read, and the target reads them in one
    pass. Greedy decoding generates the tokens of plain greedy decoding with `press`, except where rounding differs: a pass of
    several tokens sums products in another order. Sampled tokens have the distribution of the target for any draft. Only
    `verify` and `RetrievedPassages(eta=...)` change the output.

    An interrupted round leaves the cache as after the last accepted token, without the newest token, which the next round would
    have read. To keep this cache, pass `past_key_values`; to receive the tokens, pass a `streamer`.

    Args:
        model: the target.
        inputs: the prompt: token ids `[B, n]`, or the output of a tokenizer, with an `attention_mask` if rows are padded on the
            left. Rows advance together: each round accepts the tokens that all unfinished rows accept.
        draft: a press or its spec, with which the target proposes; another model; an `EagleHead`; or a `Draft` with all
            settings.
        press: press of the target's cache, or its spec.
        verify: verify with a part of the cache in most rounds; not lossless.
        **kwargs: arguments of `generate`: `max_new_tokens`, `do_sample`, `temperature`, `stopping_criteria`, `streamer`, ...

    Returns:
        The sequences, with counts of tokens, passes, bytes and time.

    Raises:
        TypeError, ValueError: the draft reads the same pairs as the target, or has another vocabulary, or an argument of
            `generate` is not supported.
        NotImplementedError: a model has layers from which no token can be removed, or the cache has a fixed size.

    Paper: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, arXiv:2211.17192.
    Differs from the paper: the draft may be the target with less of its cache; rows of a batch advance together.
    """
    loop = Loop(model, press, as_draft(draft), verify, kwargs.get("streamer"))
    prompt = {name: tensor.to(model.device) for name, tensor in inputs_of(inputs).items()}
    settings = (kwargs.get("generation_config"), model.generation_config)
    check_settings(kwargs, settings)
    check_eta(loop.retrieve, kwargs, settings)
    result: Speculation = model.generate(**prompt, custom_generate=loop.generate, **kwargs)
    return result


def as_draft(draft: Any) -> Draft:
    """Return the `Draft` of a `Draft`, head, press, spec or model."""
    if isinstance(draft, Draft):
        return draft
    if isinstance(draft, EagleHead):
        return Draft(head=draft)
    return Draft(draft) if isinstance(draft, (str, BasePress)) else Draft(model=draft)


class Loop:
    """State of one call of `speculate`: its checked arguments, readers and results."""

    def __init__(
        self, model: Any, press: BasePress | str, draft: Draft, verify: PartialVerification | None, streamer: Any
    ) -> None:
        self.streamer = streamer  # `generate` does not pass it to a custom loop
        self.model, self.draft, self.retrieve, self.verify = model, draft, draft.retrieve, verify
        if verify is not None and not isinstance(verify, PartialVerification):
            raise TypeError(f"verify must be kvpress.PartialVerification(...), got {type(verify).__name__}")
        self.draft_is_target = draft.model is None or draft.model is model
        self.press, self.proposing = get_press(press), get_press(draft.press)
        check_chunks(self.retrieve, self.proposing)
        if isinstance(self.retrieve, RetrievedChunks):
            self.proposing = self.proposing + RetrievedChunkPress(self.retrieve.chunk)
        if self.draft_is_target and not isinstance(self.retrieve, RetrievedPassages):
            advice = "use a draft that evicts or encodes, such as 'streaming_llm:0.9', or another model"
            check_selectors(self.press, self.proposing, "draft", advice)
            self.proposing = drafted(self.press, self.proposing)
        self.verifying = None if verify is None else get_press(verify.press)
        if self.verifying is not None:
            check_selectors(self.press, self.verifying, "partial verification", "leave out verify=")
            self.verifying = drafted(self.press, self.verifying)
        check_models(model, draft.model)
        if draft.head is None:
            check_draft(self.press, self.proposing, self.draft_is_target, self.retrieve)
        else:
            check_head(model, self.press, draft.head)
        if self.verifying is not None:
            check_partial(self.press, self.verifying)

    def generate(
        self,
        model: Any,
        input_ids: Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Speculation:
        """Replace the decoding loop of `generate`, with the arguments that it prepared."""
        del model
        cache, mask = cache_among(model_kwargs.values()), model_kwargs.get("attention_mask")
        check_cache(cache)
        self.processors, self.stops = logits_processor, stopping_criteria
        self.samples, self.longest = bool(generation_config.do_sample), int(generation_config.max_length)
        pad = generation_config._pad_token_tensor
        self.pad = 0 if pad is None else int(pad)
        self.ids, self.prompt = input_ids, input_ids.shape[1]
        self.running = torch.ones(len(input_ids), dtype=torch.bool, device=input_ids.device)
        self.report = Speculation(input_ids, new_cache(self.model) if cache is None else cache)
        self._read_prompt(torch.ones_like(input_ids) if mask is None else mask)
        started = now(input_ids.device)
        with self._opened():
            while bool(self.running.any()):
                self._round()
            self._catch_up()
        self.report.seconds = now(input_ids.device) - started
        if self.streamer is not None:
            self.streamer.end()
        return self._finished_report()

    def _read_prompt(self, mask: Tensor) -> None:
        """Fill all caches with the prompt, and generate the token after it."""
        self.target = TokenReader(self.model, self.press, self.report.cache, mask)
        self.drafter: TokenReader | HeadReader
        if self.draft.head is None:
            self.drafter = TokenReader(
                self.model if self.draft_is_target else self.draft.model, self.proposing, None, mask
            )
        else:
            self.drafter = HeadReader(self.model, self.draft.head, mask)
        self.partial = None if self.verifying is None else TokenReader(self.model, self.verifying, None, mask)
        self.others = [reader for reader in (self.drafter, self.partial) if reader is not None]
        readers = [reader for reader in self.others if isinstance(reader, TokenReader)]
        if isinstance(self.retrieve, RetrievedChunks) and self.target.session.reads_itself:
            raise NotImplementedError(
                f"{type(self.model).__name__} computes attention itself, so that its queries cannot choose chunks; use a "
                "press as the draft"
            )
        short = self.retrieve if isinstance(self.retrieve, RetrievedPassages) else None
        sharing = [reader for reader in readers if reader is self.partial or (self.draft_is_target and short is None)]
        with self._recording(self.target):
            logits = read_prompt(self.target, sharing, self.ids)
        if isinstance(self.drafter, HeadReader):
            self.drafter.read_prompt(self.ids)
        elif self.drafter not in sharing:
            ids, self.drafter.mask = (self.ids, mask) if short is None else shortened(short, self.ids, mask)
            self.drafter.cache = new_cache(self.drafter.model)
            read_prompt(self.drafter, [], ids)
        if isinstance(self.retrieve, RetrievedChunks) and isinstance(self.drafter, TokenReader):
            choose(self.retrieve, mask).put(self.drafter.cache)
            self.target.session.recorded = []
        for reader in (self.target, *self.others):
            reader.passes = 0
        self.next_choice = 1
        # Tokens seen by the draft minus those seen by the target; negative after a shortened prompt.
        self.offset = self.drafter.seen - self.prompt
        self._append(draw(self._distribution(self.ids, logits[:, 0]))[:, None])

    def _recording(self, reader: TokenReader) -> AbstractContextManager[None]:
        """Record the hidden states of tokens that a reader of the target reads in a block, if the draft is a head."""
        return self.drafter.recording(reader) if isinstance(self.drafter, HeadReader) else nullcontext()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        """Install the sessions of target and draft, and crop all caches to accepted tokens if an error is raised."""
        with ExitStack() as stack:
            stack.enter_context(self.target.opened())
            if not self.draft_is_target and isinstance(self.drafter, TokenReader):
                stack.enter_context(self.drafter.opened())
            try:
                yield
            except BaseException:
                self._crop()
                raise
            finally:
                stop_recording(self.target.cache.layers)

    # -- rounds ----------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Propose, verify, and remove rejected tokens."""
        count = min(self.draft.tokens, self.longest - self.ids.shape[1] - 1)
        proposed, draft = self._propose(count)
        rounds = len(self.report.accepted) + 1
        full = self.verify is None or rounds % self.verify.refresh == 0
        target = self._verify(self.target if full or self.partial is None else self.partial, proposed)
        if isinstance(self.retrieve, RetrievedPassages) and self.retrieve.eta and count:
            target[:, :count] = pulled(target[:, :count], draft, self.retrieve.eta, self.retrieve.alpha)
        accepted, next_token = accept(proposed, draft, target, self.running)
        self._append(torch.cat([proposed[:, :accepted], next_token[:, None]], dim=1))
        self._crop()
        self.report.proposed.append(count)
        self.report.accepted.append(accepted)
        if full:
            self.report.full_rounds += 1
            self._refresh(rounds)

    def _propose(self, count: int) -> tuple[Tensor, Tensor]:
        """Return `count` tokens of the draft, `[B, k]`, and the distributions that they were drawn from, `[B, k, V]`."""
        ids, distributions = self.ids, []
        for _ in range(count):
            logits = self.drafter.read(ids[:, self.drafter.seen - self.offset :])
            distributions.append(self._distribution(ids, logits[:, -1]))
            ids = torch.cat([ids, draw(distributions[-1])[:, None]], dim=1)
        stacked = torch.stack(distributions, dim=1) if count else torch.empty(len(ids), 0, 0, device=ids.device)
        return ids[:, self.ids.shape[1] :], stacked

    def _verify(self, reader: TokenReader, proposed: Tensor) -> Tensor:
        """Return the distributions of the target at the proposed tokens and after them, `[B, k + 1, V]`."""
        ids = torch.cat([self.ids, proposed], dim=1)
        with self._recording(reader):
            logits = reader.read(ids[:, reader.seen :], proposed.shape[1] + 1)
        length = self.ids.shape[1]
        return torch.stack(
            [self._distribution(ids[:, : length + i], column) for i, column in enumerate(logits.unbind(1))], 1
        )

    def _distribution(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return the distribution of `generate` for the token after `ids [B, T]`, `[B, V]`; one-hot for greedy decoding."""
        scores = self.processors(ids, logits.float())
        if self.samples:
            return torch.softmax(scores, dim=-1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)

    def _append(self, new: Tensor) -> None:
        """Append tokens `[B, n]` until all rows have stopped; stopped rows are padded."""
        for token in new.unbind(1):
            token = token.masked_fill(~self.running, self.pad)
            self.ids = torch.cat([self.ids, token[:, None]], dim=1)
            self.report.tokens += 1
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            self.running = self.running & ~self.stops(self.ids, None)
            if not bool(self.running.any()):
                return

    def _crop(self) -> None:
        """Crop every cache to the accepted tokens without the newest one, which no model has read yet."""
        seen = self.ids.shape[1] - 1
        for reader in (self.target, *self.others):
            reader.crop(seen + (self.offset if reader is self.drafter else 0))

    def _refresh(self, rounds: int) -> None:
        """Update the chunks of the draft and the partial cache, after a round that the full cache verified."""
        if (
            isinstance(self.retrieve, RetrievedChunks)
            and isinstance(self.drafter, TokenReader)
            and rounds >= self.next_choice
        ):
            self.next_choice = rounds + self.retrieve.every
            attention = self.target.newest_attention()
            choose(self.retrieve, self.target.mask, attention).put(self.drafter.cache)
        if self.partial is not None:
            self.partial.share(self.target)

    def _catch_up(self) -> None:
        """Read the tokens that only the partial cache has seen into the target's cache."""
        missing = self.ids[:, self.target.seen : -1]
        if missing.shape[1]:
            self.target.read(missing)

    def _finished_report(self) -> Speculation:
        """Return the result with sequences, passes and bytes."""
        report, caches = self.report, [reader.cache for reader in self.others if isinstance(reader, TokenReader)]
        report.sequences = self.ids
        readers = [reader for reader in (self.target, self.partial) if reader is not None]
        report.target_passes = sum(reader.passes for reader in readers)
        report.draft_passes = self.drafter.passes
        report.target_bytes = memory_report(report.cache).total_bytes
        report.draft_bytes = memory_report(report.cache, *caches).total_bytes - report.target_bytes
        if isinstance(self.drafter, HeadReader):
            report.draft_bytes += self.drafter.bytes
        return report
