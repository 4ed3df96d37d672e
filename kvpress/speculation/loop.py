# SPDX-License-Identifier: Apache-2.0
"""Generate with drafts: propose, verify, accept, and take back what was rejected."""

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
from kvpress.hf.clock import now
from kvpress.hf.layer import stop_recording
from kvpress.hf.models import cache_among, new_cache
from kvpress.speculation.accept import accept, draw, pulled
from kvpress.speculation.checks import (
    check_cache,
    check_draft,
    check_head,
    check_models,
    check_partial,
    check_settings,
    inputs_of,
)
from kvpress.speculation.chunks import ChunkPress, choose
from kvpress.speculation.eagle import EagleHead
from kvpress.speculation.forms import Draft, PartialVerification, RetrievedChunks, RetrievedPassages
from kvpress.speculation.headed import HeadReader
from kvpress.speculation.passages import shortened
from kvpress.speculation.prompt import drafted, read_prompt
from kvpress.speculation.reader import Reader


@dataclass
class Speculation:
    """What was generated, and how.

    `sequences [B, T]` are prompts and answers as `generate` returns them, `cache` is the target's, which has read all of them
    but the last token. `proposed` and `accepted` count the tokens of the draft in every round, which gives one token more
    than were accepted. `target_passes` and `draft_passes` are forward passes behind the prompt, `full_rounds` the rounds that
    the whole cache verified. `seconds` is the time behind the prompt, in which `tokens` were generated in every row.
    `target_bytes` are those of the target's cache at the end, `draft_bytes` what other caches hold beside it: what they share
    is counted once.
    """

    sequences: Tensor
    cache: Any
    proposed: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    full_rounds: int = 0
    target_passes: int = 0
    draft_passes: int = 0
    seconds: float = 0.0
    tokens: int = 0
    target_bytes: int = 0
    draft_bytes: int = 0

    @property
    def acceptance(self) -> float:
        """The share of proposed tokens that were accepted."""
        return sum(self.accepted) / max(1, sum(self.proposed))

    @property
    def tokens_per_round(self) -> float:
        """Tokens that a round gives, on average."""
        return (sum(self.accepted) + len(self.accepted)) / max(1, len(self.accepted))

    @property
    def seconds_per_token(self) -> float:
        """Time per generated token of a row, the prompt left out."""
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
    """Generate what `model.generate` generates under `press`, from tokens that a draft proposes and the model verifies.

    In every round the draft proposes tokens one by one from a cache that is cheap to read, and the target reads them in one
    pass. Greedy, what comes out is what plain greedy decoding under `press` generates, but for rounding: several tokens at
    once are multiplied in another order than one by one. Sampled, it has the distribution of the target, whatever the draft.
    Only `verify` and `RetrievedPassages(eta=...)` change what is generated.

    A round that is interrupted leaves the cache as after the last accepted token, but for the newest token of all, which
    only the next round would have read. Give a `past_key_values` of your own to have it then, and a `streamer` for the tokens.

    Args:
        model: the target.
        inputs: the prompt: token ids `[B, n]`, or what a tokenizer returns, with the `attention_mask` where rows are padded
            on the left. Rows go on together: each round accepts what all unfinished rows accept.
        draft: a press or its spec, under which the target itself proposes; another model; an
            `EagleHead`; or a `Draft` that says more.
        press: what the target reads and verifies under.
        verify: verify by a part of the cache in most rounds; not lossless.
        **kwargs: those of `generate`: `max_new_tokens`, `do_sample`, `temperature`, `stopping_criteria`, `streamer`, ...

    Returns:
        The sequences, and how they came about.

    Raises:
        TypeError, ValueError: the draft reads what the target reads, or has another vocabulary, or something that was asked of
            `generate` has no meaning here.
        NotImplementedError: a model has layers from which no token can be taken back, or the cache has a fixed size.

    Paper: Leviathan et al., Fast Inference from Transformers via Speculative Decoding, 2023, arXiv:2211.17192.
    Differs from the paper: the draft may be the target on less of its cache; rows of a batch go on together.
    """
    loop = Loop(model, press, as_draft(draft), verify, kwargs.get("streamer"))
    given = {name: tensor.to(model.device) for name, tensor in inputs_of(inputs).items()}
    check_settings(kwargs, (kwargs.get("generation_config"), model.generation_config))
    found: Speculation = model.generate(**given, custom_generate=loop.generate, **kwargs)
    return found


def as_draft(draft: Any) -> Draft:
    """Return what a draft was given as."""
    if isinstance(draft, Draft):
        return draft
    if isinstance(draft, EagleHead):
        return Draft(head=draft)
    return Draft(draft) if isinstance(draft, (str, BasePress)) else Draft(model=draft)


class Loop:
    """One call of `speculate`, first its arguments, checked, and then what is under way."""

    def __init__(
        self, model: Any, press: BasePress | str, draft: Draft, verify: PartialVerification | None, streamer: Any
    ) -> None:
        self.streamer = streamer  # `generate` hands it to its own loops alone
        self.model, self.draft, self.retrieve, self.verify = model, draft, draft.retrieve, verify
        if verify is not None and not isinstance(verify, PartialVerification):
            raise TypeError(f"verify must be kvpress.PartialVerification(...), got {type(verify).__name__}")
        self.own = draft.model is None or draft.model is model
        self.press, self.proposing = get_press(press), get_press(draft.press)
        if isinstance(self.retrieve, RetrievedChunks):
            self.proposing = self.proposing + ChunkPress(self.retrieve.chunk)
        if self.own and not isinstance(self.retrieve, RetrievedPassages):
            self.proposing = drafted(self.press, self.proposing)
        self.verifying = None if verify is None else drafted(self.press, get_press(verify.press))
        check_models(model, draft.model)
        if draft.head is None:
            check_draft(self.press, self.proposing, self.own, self.retrieve)
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
        """Stand in for the decoding loop of `generate`, with everything that it has prepared."""
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
        return self._reported()

    def _read_prompt(self, mask: Tensor) -> None:
        """Read the prompt for all caches, and generate the token that follows it."""
        self.target = Reader(self.model, self.press, self.report.cache, mask)
        self.drafter: Reader | HeadReader
        if self.draft.head is None:
            self.drafter = Reader(self.model if self.own else self.draft.model, self.proposing, None, mask)
        else:
            self.drafter = HeadReader(self.model, self.draft.head, mask)
        self.partial = None if self.verifying is None else Reader(self.model, self.verifying, None, mask)
        self.others = [reader for reader in (self.drafter, self.partial) if reader is not None]
        readers = [reader for reader in self.others if isinstance(reader, Reader)]
        if isinstance(self.retrieve, RetrievedChunks) and self.target.session.reads_itself:
            raise NotImplementedError(
                f"{type(self.model).__name__} computes attention by itself, so that its queries are not known and cannot "
                "choose chunks; use a press as the draft"
            )
        short = self.retrieve if isinstance(self.retrieve, RetrievedPassages) else None
        together = [reader for reader in readers if reader is self.partial or (self.own and short is None)]
        with self._heard_of(self.target):
            logits = read_prompt(self.target, together, self.ids)
        if isinstance(self.drafter, HeadReader):
            self.drafter.read_prompt(self.ids)
        elif self.drafter not in together:
            ids, self.drafter.mask = (self.ids, mask) if short is None else shortened(short, self.ids, mask)
            self.drafter.cache = new_cache(self.drafter.model)
            read_prompt(self.drafter, [], ids)
        if isinstance(self.retrieve, RetrievedChunks) and isinstance(self.drafter, Reader):
            choose(self.retrieve, mask).put(self.drafter.cache)
            self.target.session.asked = []
        for reader in (self.target, *self.others):
            reader.passes = 0
        self.due = 1
        self.behind = self.drafter.seen - self.prompt
        self._append(draw(self._distribution(self.ids, logits[:, 0]))[:, None])

    def _heard_of(self, reader: Reader) -> AbstractContextManager[None]:
        """Hand a head the hidden states of what a reader of the target reads in a block."""
        return self.drafter.listening(reader) if isinstance(self.drafter, HeadReader) else nullcontext()

    @contextmanager
    def _opened(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(self.target.opened())
            if not self.own and isinstance(self.drafter, Reader):
                stack.enter_context(self.drafter.opened())
            try:
                yield
            except BaseException:
                self._take_back()
                raise
            finally:
                stop_recording(self.target.cache.layers)

    # -- rounds ----------------------------------------------------------------------------------------------

    def _round(self) -> None:
        """Propose, verify, and go back to what was accepted."""
        count = min(self.draft.tokens, self.longest - self.ids.shape[1] - 1)
        proposed, draft = self._propose(count)
        rounds = len(self.report.accepted) + 1
        full = self.verify is None or rounds % self.verify.refresh == 0
        target = self._verify(self.target if full or self.partial is None else self.partial, proposed)
        if isinstance(self.retrieve, RetrievedPassages) and self.retrieve.eta and count:
            target[:, :count] = pulled(target[:, :count], draft, self.retrieve.eta, self.retrieve.alpha)
        accepted, follows = accept(proposed, draft, target, self.running)
        self._append(torch.cat([proposed[:, :accepted], follows[:, None]], dim=1))
        self._take_back()
        self.report.proposed.append(count)
        self.report.accepted.append(accepted)
        if full:
            self.report.full_rounds += 1
            self._refresh(rounds)

    def _propose(self, count: int) -> tuple[Tensor, Tensor]:
        """Return so many tokens of the draft, `[B, k]`, and the distributions that they were drawn from, `[B, k, V]`."""
        ids, distributions = self.ids, []
        for _ in range(count):
            logits = self.drafter.read(ids[:, self.drafter.seen - self.behind :])
            distributions.append(self._distribution(ids, logits[:, -1]))
            ids = torch.cat([ids, draw(distributions[-1])[:, None]], dim=1)
        found = torch.stack(distributions, dim=1) if count else torch.empty(len(ids), 0, 0, device=ids.device)
        return ids[:, self.ids.shape[1] :], found

    def _verify(self, reader: Reader, proposed: Tensor) -> Tensor:
        """Return the distributions of the target at the proposed tokens and after them, `[B, k + 1, V]`."""
        ids = torch.cat([self.ids, proposed], dim=1)
        with self._heard_of(reader):
            logits = reader.read(ids[:, reader.seen :], proposed.shape[1] + 1)
        known = self.ids.shape[1]
        return torch.stack(
            [self._distribution(ids[:, : known + i], each) for i, each in enumerate(logits.unbind(1))], 1
        )

    def _distribution(self, ids: Tensor, logits: Tensor) -> Tensor:
        """Return what `generate` draws the token behind `ids [B, T]` from, `[B, V]`; all in one token where it is greedy."""
        scores = self.processors(ids, logits.float())
        if self.samples:
            return torch.softmax(scores, dim=-1)
        return torch.zeros_like(scores).scatter_(1, scores.argmax(dim=-1, keepdim=True), 1.0)

    def _append(self, new: Tensor) -> None:
        """Add tokens `[B, n]` until all rows have stopped; rows that have are padded."""
        for token in new.unbind(1):
            token = token.masked_fill(~self.running, self.pad)
            self.ids = torch.cat([self.ids, token[:, None]], dim=1)
            self.report.tokens += 1
            if self.streamer is not None:
                self.streamer.put(token.cpu())
            self.running = self.running & ~self.stops(self.ids, None)
            if not bool(self.running.any()):
                return

    def _take_back(self) -> None:
        """Let every cache hold accepted tokens alone, and not the newest, which nothing has read yet."""
        read = self.ids.shape[1] - 1
        for reader in (self.target, *self.others):
            reader.take_back(read + (self.behind if reader is self.drafter else 0))

    def _refresh(self, rounds: int) -> None:
        """Choose anew what the draft and a partial verification read, after a round that the whole cache verified."""
        if isinstance(self.retrieve, RetrievedChunks) and isinstance(self.drafter, Reader) and rounds >= self.due:
            self.due = rounds + self.retrieve.every
            attention = self.target.newest_attention()
            choose(self.retrieve, self.target.mask, attention).put(self.drafter.cache)
        if self.partial is not None:
            self.partial.copy_of(self.target)

    def _catch_up(self) -> None:
        """Let the target's cache hold what a partial one verified."""
        behind = self.ids[:, self.target.seen : -1]
        if behind.shape[1]:
            self.target.read(behind)

    def _reported(self) -> Speculation:
        report, caches = self.report, [reader.cache for reader in self.others if isinstance(reader, Reader)]
        report.sequences = self.ids
        readers = [reader for reader in (self.target, self.partial) if reader is not None]
        report.target_passes = sum(reader.passes for reader in readers)
        report.draft_passes = self.drafter.passes
        report.target_bytes = memory_report(report.cache).total_bytes
        report.draft_bytes = memory_report(report.cache, *caches).total_bytes - report.target_bytes
        if isinstance(self.drafter, HeadReader):
            report.draft_bytes += self.drafter.bytes
        return report
