# SPDX-License-Identifier: Apache-2.0
"""Refine a compressed cache: train its pairs until the model answers behind it as behind the whole text.

Self-study of Cartridges (Eyuboglu et al., 2025, arXiv:2506.06266): the model asks and answers questions about the text behind
the full cache, and the KL divergence between its distributions behind the two caches is minimised. Differs from the paper: the
pairs start from those that a press keeps, not from the first tokens of the text; each batch of items is generated while the
training runs; passages of the text are items too; and pairs are encoded again in the formats of the press.
"""

from __future__ import annotations

import hashlib
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_utils import PreTrainedModel
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

import kvpress
from kvpress.core.calibration import identify
from kvpress.core.press import BasePress
from kvpress.core.spec import get_press, to_spec
from kvpress.hf.generation.ask import read_text, text_ids
from kvpress.hf.models import facts_of
from kvpress.hf.positions import check_positions
from kvpress.hf.refine.state import RefineState
from kvpress.hf.refine.study import SelfStudy, StudyItem, tokens_behind
from kvpress.hf.refine.trainable import TrainableCache, check_trainable
from kvpress.hf.session.rereading import logits_behind
from kvpress.hf.session.session import Session, session

SHORTEST = 64
"""Fewest tokens of a text that is refined."""
RATE = 0.02
"""Learning rate, relative to the size of a layer's keys or values."""
_HELD = 4
"""Questions, and continuations, of each of the two sets that are not trained on."""
_BATCH = 4
"""Questions, continuations and passages of a batch."""
_STEP_ITEMS = 2
"""Items of a step."""
_WARM_UP = 10
"""Steps until the learning rate is reached; it then falls linearly to zero at the end of the time."""
_SMALLER = 3.0
"""Divisor of the learning rate after a minute that has not led to a better state."""
_ROUNDED = 4
"""Steps between two looks at the rounding errors of the formats."""
_TRAINING = 2.0
"""Time of training for a batch, relative to the time of its generation."""
_SAVED = 60.0
"""Seconds between two states in the file."""
_MEASURING = 0.1
"""Largest share of the time that measuring the best state takes."""
_TEACHER_BYTES = 2**29
"""Memory for the full cache's distributions; those beyond it are computed again."""


@dataclass(frozen=True)
class Refined:
    """Trained cache, and the figures of its training."""

    cache: Cache
    """Cache in the formats of the press, with as many bytes as before."""
    ids: Tensor
    """Ids `[1, n]` that it has read."""
    before: float
    """Mean KL from the full cache's distributions to those of the untrained cache, in nats, over the held-out items."""
    after: float
    """The same of the trained cache, at most `before`."""
    held_out: int
    """Held-out items."""
    items: int
    """Items that were trained on."""
    steps: int
    """Steps of the optimiser."""

    def __str__(self) -> str:
        kept = "" if self.after < self.before else "; the cache is that of the press, since no trained one was better"
        return (
            f"held-out KL {self.before:.4f} before, {self.after:.4f} after ({self.held_out} questions and continuations that "
            f"were not trained on; {self.steps} steps on {self.items} items){kept}"
        )

    @property
    def notes(self) -> dict[str, Any]:
        """Figures for the file of the cache."""
        names = ("before", "after", "held_out", "items", "steps")
        return {"refined": {name: getattr(self, name) for name in names}}


def check_minutes(minutes: float) -> None:
    """Refuse a time that is no positive number of minutes.

    Raises:
        ValueError: it is zero, negative, infinite or NaN.
    """
    if not (minutes > 0 and math.isfinite(minutes)):
        raise ValueError(f"--refine must be a number of minutes above 0, such as 10, got {minutes:g}")


def refine_text(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    press: BasePress | str,
    text: str,
    minutes: float,
    path: Path,
    *,
    report: Callable[[str], None] = lambda line: None,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
) -> Refined:
    """Read a text under a press, and train the cache for some minutes.

    Args:
        model: the model, whose parameters do not change; gradients must pass through it.
        tokenizer: its tokenizer.
        press: a press that evicts or encodes, or both, or its spec.
        text: the text, of 64 tokens or more.
        minutes: time of training, with the generation of its items, above 0; reading and the held-out items come on top.
        path: file of the state, which is written every minute. If it exists, the refinement continues there.
        report: called with a line about the progress.
        seed: random seed of the items.
        clock: returns seconds.

    Raises:
        ValueError: minutes or the text are too few, the text and a question about it exceed the positions of the model, the
            state belongs to another refinement, the press has compressed nothing, or no gradient reaches the cache.
        NotImplementedError: the cache of this press or model cannot be trained.
        OSError: the state cannot be written.
    """
    check_minutes(minutes)
    press, ids = get_press(press), text_ids(model, tokenizer, text)
    if ids.shape[1] < SHORTEST:
        raise ValueError(
            f"the text has {ids.shape[1]} tokens, and refining needs at least {SHORTEST}: compress without it"
        )
    behind = tokens_behind(model, tokenizer, text)
    subject = f"{ids.shape[1]} tokens of the text and {behind} of questions and answers are"
    fix = "give a shorter text, or compress without --refine"
    check_positions(model.config, ids.shape[1] + behind, fix, subject)
    with session(press, model, evict=False, private=True, tokenizer=tokenizer) as current:
        check_trainable(current)
    identity = {
        "kvpress": kvpress.__version__,
        "model": identify(facts_of(model)),
        "dtype": str(model.dtype),
        "press": to_spec(press),
        "text": hashlib.sha256(str(ids.tolist()).encode()).hexdigest(),
        "seed": seed,
    }
    state = RefineState.load(path, identity, ids.device) if path.exists() else None
    with torch.random.fork_rng(devices=[ids.device] if ids.device.type == "cuda" else []):
        torch.manual_seed(seed)
        cache, _ = read_text(model, tokenizer, press, text)
    with _frozen(model), session(press, model, evict=False, private=True, tokenizer=tokenizer) as current:
        trained = TrainableCache(current, cache, ids[:, :1])
    full, _ = read_text(model, tokenizer, "none", text)
    study = SelfStudy(model, tokenizer, text, ids, full)
    refinement = _Refinement(model, press, trained, study, 60 * minutes, path, report, seed, clock)
    with _frozen(model):
        return refinement.run(identity, state)


class _Refinement:
    """Training of one cache."""

    def __init__(
        self,
        model: PreTrainedModel,
        press: BasePress,
        trained: TrainableCache,
        study: SelfStudy,
        limit: float,
        path: Path,
        report: Callable[[str], None],
        seed: int,
        clock: Callable[[], float],
    ) -> None:
        self.model, self.press, self.trained, self.study = model, press, trained, study
        self.limit, self.path, self.report, self.seed, self.clock = limit, path, report, seed, clock
        self.optimiser = torch.optim.Adam(trained.groups(RATE), betas=(0.9, 0.99))
        self.rates = [group["lr"] for group in self.optimiser.param_groups]
        self.start = [tensor.detach().clone() for tensor in trained.parameters]
        self.teacher: dict[StudyItem, Tensor] = {}
        self.teacher_bytes = 0

    def run(self, identity: dict[str, Any], stored: RefineState | None) -> Refined:
        """Train until the time is over, on from a stored state if there is one; return the best state."""
        self.state = self._new(identity) if stored is None else self._resumed(stored)
        self.started, self.earlier = self.clock(), self.state.seconds
        self.saved, self.measured, self.measuring = self.elapsed, self.elapsed, 0.0
        if stored is None:
            self._save()  # a folder that cannot be written to, or a full disk, is found before the training
        try:
            while self.elapsed < self.limit:
                self._round()
        except KeyboardInterrupt:
            self._save()
            raise
        self._measure()
        self._save()
        return self._result()

    @property
    def elapsed(self) -> float:
        """Seconds spent, those of earlier processes included."""
        return self.earlier + self.clock() - self.started

    def _new(self, identity: dict[str, Any]) -> RefineState:
        """Return the state of a new refinement, with its items that are not trained on."""
        self.report(
            f"the model asks and answers {2 * _HELD} questions and continues {2 * _HELD} quotations, to measure on"
        )
        questions, continued = self._generated(2 * _HELD, number=0)
        chosen_by, held_out = ([*questions[half::2], *continued[half::2]] for half in (0, 1))
        state = RefineState(identity, chosen_by, held_out, 0.0, 0.0)
        state.before, state.best_kl = (self._kl(self.trained.cache, items) for items in (held_out, chosen_by))
        self.report(f"held-out KL before: {state.before:.4f} nats ({len(held_out)} items)")
        return state

    def _resumed(self, state: RefineState) -> RefineState:
        """Continue from the tensors of a stored state."""
        state.check_shapes(self.path, [tensor.shape for tensor in self.trained.parameters])
        self.trained.load(state.tensors)
        self.optimiser.load_state_dict(state.optimiser)
        self.report(f"continuing {self.path} after {state.seconds / 60:.1f} minutes and {state.steps} steps")
        return state

    def _generated(self, count: int, number: int) -> tuple[list[StudyItem], list[StudyItem]]:
        """Return up to `count` questions and `count` continuations of batch `number`."""
        seed = self.seed + (number << 20)
        return self.study.questions(count, seed), self.study.continuations(count, seed)

    def _round(self) -> None:
        """Generate a batch of items, then train for twice as long as that took."""
        state, began = self.state, self.elapsed
        state.rounds += 1
        not_trained_on = {item.prompt for item in (*state.chosen_by, *state.held_out)}
        questions, continued = self._generated(_BATCH, state.rounds)
        passages = self.study.passages(_BATCH, self.seed + state.rounds)
        made = [*questions, *continued, *passages]
        state.items += [item for item in made if item.prompt not in not_trained_on]
        until = min(self.limit, self.elapsed + _TRAINING * (self.elapsed - began))
        while True:
            with self._block() as current:
                self._step(current)
            if self.elapsed - self.saved >= _SAVED:
                if self.measuring <= _MEASURING * (self.elapsed - self.measured) and not self._measure():
                    self._step_back()
                self._save()
            if self.elapsed >= until:
                return

    def _step(self, current: Session) -> None:
        """Take one step of the optimiser on a few items.

        Raises:
            ValueError: no gradient reaches the cache.
        """
        state = self.state
        left = max(0.0, 1 - self.elapsed / self.limit)
        for group, rate in zip(self.optimiser.param_groups, self.rates, strict=True):
            group["lr"] = rate * state.rate_share * left * min(1.0, (state.steps + 1) / _WARM_UP)
        self.optimiser.zero_grad()
        if state.steps % _ROUNDED == 0 or not self.trained.errors:
            self.trained.update_errors()
        draw = random.Random(f"{self.seed} {state.steps}")  # noqa: S311 - no secret
        chosen = draw.sample(state.items, min(_STEP_ITEMS, len(state.items)))
        for item in chosen:
            goal = self._goal(current, item)
            with torch.enable_grad():
                loss = _divergence(goal, _log_probs(current, self.trained.floats(), item)) / len(chosen)
                if not loss.requires_grad:
                    raise ValueError(
                        f"no gradient reaches the cache of {type(self.model).__name__}: its layers, such as those of some "
                        "formats of quantised weights, have no backward pass; load other weights of it"
                    )
                loss.backward()
        self.trained.spare_sinks()
        if all(tensor.grad is None or bool(tensor.grad.isfinite().all()) for tensor in self.trained.parameters):
            self.optimiser.step()
        state.steps += 1

    def _measure(self) -> bool:
        """Measure the current state as it would be stored; keep it, and return whether it is the best so far."""
        began = self.elapsed
        kl = self._kl(self.trained.encoded(), self.state.chosen_by)
        is_best = kl < self.state.best_kl
        if is_best:
            self.state.best_kl = kl
            self.state.best = [tensor.detach().clone() for tensor in self.trained.parameters]
        self.measured, self.measuring = self.elapsed, self.elapsed - began
        self.report(
            f"{self.measured / 60:.1f} min, {self.state.steps} steps on {len(self.state.items)} items: KL {kl:.4f}, best "
            f"{self.state.best_kl:.4f}"
        )
        return is_best

    def _step_back(self) -> None:
        """Return to the best state, with a smaller learning rate: one that suits a coarse cache ruins a fine one."""
        self.trained.load(self.state.best or self.start)
        self.trained.errors.clear()
        self.optimiser.state.clear()
        self.state.rate_share /= _SMALLER
        self.report(f"back to the best, with {self.state.rate_share:.2g} of the first learning rate")

    def _save(self) -> None:
        self.state.seconds = self.elapsed
        self.state.tensors = [tensor.detach() for tensor in self.trained.parameters]
        self.state.optimiser = self.optimiser.state_dict()
        self.state.save(self.path)
        self.saved = self.elapsed

    def _result(self) -> Refined:
        """Return the best state, or the start if the best one is not better on the held-out items too."""
        state, cache, after = self.state, self.trained.cache, self.state.before
        if state.best:
            self.trained.load(state.best)
            best = self.trained.encoded()
            kl = self._kl(best, state.held_out)
            cache, after = (best, kl) if kl < state.before else (cache, after)
        return Refined(cache, self.study.ids, state.before, after, len(state.held_out), len(state.items), state.steps)

    def _block(self) -> AbstractContextManager[Session]:
        return session(self.press, self.model, evict=False, private=True)

    @torch.no_grad()
    def _kl(self, cache: Cache, items: Sequence[StudyItem]) -> float:
        """Return the mean divergence over items, in nats."""
        with self._block() as current:
            return fmean(
                float(_divergence(self._goal(current, item), _log_probs(current, cache, item))) for item in items
            )

    @torch.no_grad()
    def _goal(self, current: Session, item: StudyItem) -> Tensor:
        """Return the log-probabilities `[n, vocabulary]` behind the full cache, from memory where they are.

        They are rounded to half precision, and normalised afterwards: a KL to a rounded distribution may be negative.
        """
        half = self.teacher.get(item)
        if half is None:
            half = _log_probs(current, self.study.full, item).half()
            if self.teacher_bytes + half.nbytes <= _TEACHER_BYTES:
                self.teacher[item], self.teacher_bytes = half, self.teacher_bytes + half.nbytes
        return half.float().log_softmax(dim=-1)


def _log_probs(current: Session, cache: Cache, item: StudyItem) -> Tensor:
    """Return the log-probabilities `[n, vocabulary]`, float32, of the n tokens of an item's answer."""
    ids = torch.tensor([[*item.prompt, *item.answer]], device=current.model.device)
    logits = logits_behind(current, cache, ids[:, :-1])
    return logits[0, len(item.prompt) - 1 :].float().log_softmax(dim=-1)


def _divergence(goal: Tensor, actual: Tensor) -> Tensor:
    """Return the mean KL divergence over tokens, in nats."""
    return (goal.exp() * (goal - actual)).sum(dim=-1).mean()


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """Let no parameter of a model require a gradient inside the block."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
