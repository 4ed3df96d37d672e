# SPDX-License-Identifier: Apache-2.0
"""Refinement: trained caches answer more like the full cache, keep their size, and are ordinary caches."""

from __future__ import annotations

import copy
import errno
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

import kvpress
from kvpress.cache.decoded import decode_pairs
from kvpress.hf.generation.ask import ask, read_text
from kvpress.hf.models import with_cache
from kvpress.hf.refine import refine, state, study
from kvpress.hf.refine.refine import Refined, refine_text
from kvpress.hf.refine.trainable import TrainableCache
from kvpress.hf.session.rereading import logits_behind
from kvpress.hf.session.session import session

NAMES = ("tiger", "otter", "lantern", "hammer", "necklace", "piano", "drum", "coat")
FACTS = "".join(f" The old river runs. The code for {name} is {1000 + 37 * n}." for n, name in enumerate(NAMES))
TEXT = (FACTS + " The old house stands." * 4) * 2
Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    model, tokenizer = kvpress.load_model("reference")
    return model.float(), tokenizer


@pytest.fixture(autouse=True)
def few_items(monkeypatch: pytest.MonkeyPatch) -> None:
    """Train on few short items for many steps, at a rate for the few steps of a test."""
    for name, value in (("_HELD", 2), ("_BATCH", 2), ("_TRAINING", 20.0), ("RATE", 0.1)):
        monkeypatch.setattr(refine, name, value)
    monkeypatch.setattr(study, "TOKENS", 12)
    monkeypatch.setattr(study, "_QUESTION", 8)


def ticks() -> Callable[[], float]:
    """Return a clock that advances by a second at each look."""
    return itertools.count(1.0).__next__


def refined(loaded: Loaded, path: Path, press: str = "knorm:0.8", minutes: float = 3, **more: Any) -> Refined:
    return refine_text(*loaded, press, TEXT, minutes, path, clock=ticks(), **more)


def logits(loaded: Loaded, cache: Any, press: str, ids: Sequence[int]) -> Tensor:
    """Return the log-probabilities `[n, vocabulary]` of ids behind a copy of a cache, read in the ordinary way."""
    model, _ = loaded
    with torch.no_grad(), kvpress.reading(model, press):
        read = model(torch.tensor([ids]), use_cache=True, **with_cache(copy.deepcopy(cache)))
        return read.logits[0].log_softmax(dim=-1)


def test_a_trained_cache_answers_more_like_the_full_one_at_the_same_size(loaded: Loaded, tmp_path: Path) -> None:
    press, (model, tokenizer) = "knorm:0.8", loaded
    trained = refined(loaded, tmp_path / "state", minutes=5)
    assert trained.after < 0.8 * trained.before
    start, ids = read_text(model, tokenizer, press, TEXT)
    full, _ = read_text(model, tokenizer, "none", TEXT)
    assert torch.equal(trained.ids, ids)
    sizes = [kvpress.memory_report(cache).total_bytes for cache in (start, trained.cache)]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.01)
    assert all(parameter.requires_grad for parameter in model.parameters())
    # Other continuations, read in the ordinary way.
    others = study.SelfStudy(model, tokenizer, TEXT, ids, full).continuations(8, seed=99)
    kl = {"start": 0.0, "trained": 0.0}
    for item in others:
        goal = logits(loaded, full, "none", [*item.prompt, *item.answer])[len(item.prompt) :]
        for name, cache in (("start", start), ("trained", trained.cache)):
            actual = logits(loaded, cache, press, [*item.prompt, *item.answer])[len(item.prompt) :]
            kl[name] += float((goal.exp() * (goal - actual)).sum(-1).mean())
    assert kl["trained"] < 0.9 * kl["start"]
    kvpress.save(trained.cache, tmp_path / "a.kv", model, press, tokens=trained.ids, notes=trained.notes)
    again = kvpress.load(tmp_path / "a.kv", model)
    assert torch.equal(*(logits(loaded, cache, press, ids[0, :8].tolist()) for cache in (again, trained.cache)))
    assert ask(model, tokenizer, again, " The code for hammer is", press, max_new_tokens=4).tokens <= 4
    assert kvpress.cache_info(tmp_path / "a.kv").notes["refined"]["after"] == trained.after


@pytest.mark.parametrize("press", ["knorm:0.8", "frontier:smaller=10", "kivi:bits=4"])
def test_changed_pairs_are_read_alike_in_training_and_behind_an_ordinary_cache(loaded: Loaded, press: str) -> None:
    model, tokenizer = loaded
    cache, ids = read_text(model, tokenizer, press, TEXT)
    with session(press, model, evict=False, private=True) as current, torch.no_grad():
        trainable = TrainableCache(current, cache, ids[:, :1])
        torch.manual_seed(0)
        for parameter in trainable.parameters:
            parameter += 0.05 * torch.randn_like(parameter) * parameter.std()
        trainable.update_errors()
        trained = logits_behind(current, trainable.floats(), ids[:, 5:12])[0].log_softmax(dim=-1)
    stored, start = (logits(loaded, c, press, ids[0, 5:12].tolist()) for c in (trainable.encoded(), cache))
    torch.testing.assert_close(trained, stored, atol=5e-3, rtol=0)
    assert float((stored - start).abs().max()) > 0.1


@pytest.mark.parametrize(
    "press", ["frontier:smaller=10", "refit(snapkv:0.5) + kivi:bits=4,group_size=16", "kivi:bits=4"]
)
def test_untrained_pairs_are_encoded_to_the_same_cache(loaded: Loaded, press: str) -> None:
    model, tokenizer = loaded
    cache, ids = read_text(model, tokenizer, press, TEXT)
    with session(press, model, evict=False, private=True) as current:
        trainable = TrainableCache(current, cache, ids[:, :1])
    for ours, theirs in zip(trainable.encoded().layers, cache.layers, strict=True):
        old, new = decode_pairs(theirs.store), decode_pairs(ours.store)
        assert torch.equal(old.slots, new.slots)
        assert old.layout.lengths == new.layout.lengths
        for before, after in ((old.keys, new.keys), (old.values, new.values)):
            assert float((after - before).norm() / before.norm()) < 0.1
        assert (old.log_weight is None) == (new.log_weight is None)


def test_gradients_are_those_of_the_logits_by_stored_numbers(loaded: Loaded) -> None:
    model, tokenizer = loaded
    press = "frontier:smaller=10"
    cache, ids = read_text(model, tokenizer, press, TEXT)
    with session(press, model, evict=False, private=True) as current:
        trainable = TrainableCache(current, cache, ids[:, :1])
        parameters = trainable.parameters[:3]
        assert [tuple(parameter.shape[1:]) for parameter in parameters] == [(64,), (64,), ()]

        def mean() -> Tensor:
            return logits_behind(current, trainable.floats(), ids[:, 5:12]).square().mean()

        with torch.enable_grad():
            gradients = torch.autograd.grad(mean(), parameters)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            direction = gradient / gradient.norm()
            ends = []
            for step in (0.02, -0.02):
                with torch.no_grad():
                    parameter += step * direction
                    ends.append(float(mean()))
                    parameter -= step * direction
            assert (ends[0] - ends[1]) / 0.04 == pytest.approx(float(gradient.norm()), rel=0.05)


def test_a_killed_refinement_continues(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, lines = tmp_path / "state", []
    step = refine._Refinement._step

    def killed(self: Any, current: Any) -> None:
        if self.state.steps == 5:
            raise KeyboardInterrupt
        step(self, current)

    monkeypatch.setattr(refine._Refinement, "_step", killed)
    with pytest.raises(KeyboardInterrupt):
        refined(loaded, path)
    monkeypatch.setattr(refine._Refinement, "_step", step)
    assert [file.name for file in tmp_path.iterdir()] == ["state"]
    with pytest.raises(ValueError, match="belongs to another refinement, with another press: remove it"):
        refined(loaded, path, press="knorm:0.7")
    done = refined(loaded, path, minutes=1, report=lines.append)
    assert lines[0].startswith(f"continuing {path} after ")
    assert lines[0].endswith("minutes and 5 steps")
    assert done.steps > 5
    assert done.after < done.before
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ValueError, match="is no state of a refinement, or is damaged"):
        refined(loaded, path)


def test_a_state_is_written_every_minute(loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds: list[float] = []

    def look(self: Any, current: Any) -> None:
        """Take no step, and read the time in the file."""
        if path.exists():
            seconds.append(torch.load(path)["seconds"])
        assert self.elapsed - (seconds[-1] if seconds else 0) < 80

    path = tmp_path / "state"
    monkeypatch.setattr(refine._Refinement, "_step", look)
    monkeypatch.setattr(refine._Refinement, "_measure", lambda self: None)
    refined(loaded, path, minutes=4)
    assert len(set(seconds)) == 4  # one of the start, so that an unwritable folder is found before the training


def test_a_training_that_makes_it_worse_leaves_the_cache_of_the_press(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refine, "RATE", 100.0)
    press = "kivi:bits=4"
    kept = refined(loaded, tmp_path / "state", press=press, minutes=0.3)
    start, _ = read_text(*loaded, press, TEXT)
    assert kept.after == kept.before
    assert "since no trained one was better" in str(kept)
    assert torch.equal(*(logits(loaded, cache, press, kept.ids[0, :8].tolist()) for cache in (kept.cache, start)))


def test_a_training_that_makes_it_worse_goes_on_from_the_best_state_in_smaller_steps(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(refine, "RATE", 3.0)
    monkeypatch.setattr(refine, "_MEASURING", 10.0)  # after every minute
    lines: list[str] = []
    kept = refined(loaded, tmp_path / "state", minutes=8, report=lines.append)
    assert any(line == "back to the best, with 0.33 of the first learning rate" for line in lines)
    assert torch.load(tmp_path / "state", weights_only=True)["rate_share"] < 1
    assert kept.after < 0.8 * kept.before


@pytest.mark.parametrize(
    ("press", "text", "minutes", "message"),
    [
        ("knorm:0.8", TEXT, 0.0, "--refine must be a number of minutes above 0, such as 10, got 0"),
        ("knorm:0.8", TEXT, float("nan"), "above 0, such as 10, got nan"),
        ("knorm:0.8", " The old river runs.", 1.0, r"the text has \d+ tokens, and refining needs at least 64"),
        ("none", TEXT, 1.0, "none has not compressed the text, so there is nothing to train"),
        ("minicache", TEXT, 1.0, "pairs of several layers share their numbers"),
        ("knorm:0.5 + quest:budget=16", TEXT, 1.0, "each token reads other pairs of it; leave out the selector"),
    ],
)
def test_what_cannot_be_refined(
    loaded: Loaded, tmp_path: Path, press: str, text: str, minutes: float, message: str
) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=message):
        refine_text(*loaded, press, text, minutes, tmp_path / "state")
    assert not list(tmp_path.iterdir())


def unread(*arguments: object, **settings: object) -> None:
    pytest.fail("the text was read")


def test_what_the_text_does_not_change_is_refused_before_it_is_read(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "state"
    refined(loaded, path, minutes=0.1)
    monkeypatch.setattr(refine, "read_text", unread)
    with pytest.raises(ValueError, match="belongs to another refinement, with another press"):
        refined(loaded, path, press="knorm:0.7")
    with pytest.raises(NotImplementedError, match="leave out the selector"):
        refined(loaded, tmp_path / "other", press="knorm:0.5 + quest:budget=16")
    model, tokenizer = loaded
    tokens = len(tokenizer.encode(TEXT))
    behind = study.tokens_behind(model, tokenizer, TEXT)
    assert behind >= study._QUESTION + study.TOKENS
    monkeypatch.setattr(model.config, "max_position_embeddings", tokens + behind - 1)
    with pytest.raises(
        ValueError, match=rf"{tokens} tokens of the text and {behind} of questions and answers are over"
    ):
        refined(loaded, tmp_path / "other")


def test_a_full_cache_is_copied_for_as_many_prompts_as_fit(loaded: Loaded, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = loaded
    full, ids = read_text(model, tokenizer, "none", TEXT)
    size, rows = kvpress.memory_report(full).total_bytes, []
    read = study.SelfStudy._continued_batch

    def counted(self: Any, prompts: Any, *arguments: Any) -> Any:
        rows.append(len(prompts))
        return read(self, prompts, *arguments)

    monkeypatch.setattr(study.SelfStudy, "_continued_batch", counted)
    items = {}
    for limit, expected in ((8 * size, [5]), (2 * size, [2, 2, 1]), (size // 2, [1] * 5)):
        monkeypatch.setattr(study, "_COPIES_BYTES", limit)
        rows.clear()
        items[limit] = study.SelfStudy(model, tokenizer, TEXT, ids, full).continuations(5, seed=3)
        assert rows == expected
    assert len({tuple(item.prompt for item in made) for made in items.values()}) == 1
    # Equal prompts are not continued alike: the draws of one batch follow those of the batch before.
    prompts = [items[size // 2][0].prompt] * 5
    continued = study.SelfStudy(model, tokenizer, TEXT, ids, full)._continued(prompts, 12, seed=3, sampled=True)
    assert len(set(map(tuple, continued))) > 1


def test_stored_distributions_of_the_full_cache_are_normalised(loaded: Loaded, tmp_path: Path) -> None:
    refinement = None

    def keep(self: Any, current: Any) -> None:
        nonlocal refinement
        refinement = self
        sums = [float(self._goal(current, item).exp().sum(dim=-1).sub(1).abs().max()) for item in self.state.items]
        assert max(sums) < 1e-5

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(refine._Refinement, "_step", keep)
        refined(loaded, tmp_path / "state", minutes=0.1)
    assert refinement is not None
    assert refinement.teacher


def test_a_full_disk_is_an_error_of_the_system(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    with pytest.raises(OSError, match="No space left") as error, open("/dev/full", "wb", buffering=0) as file:
        state._serialise({"tensor": torch.zeros(200_000)}, file)
    assert error.value.errno == errno.ENOSPC


def test_a_model_without_a_backward_pass_is_refused(
    loaded: Loaded, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = refine.logits_behind
    monkeypatch.setattr(refine, "logits_behind", lambda *arguments: read(*arguments).detach())
    with pytest.raises(ValueError, match="no gradient reaches the cache of LlamaForCausalLM"):
        refined(loaded, tmp_path / "state")
