# SPDX-License-Identifier: Apache-2.0
"""RestoreKV: learned tokens that read a prompt before it is evicted from, and whose pairs replace some of it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from kvpress.core import calibration as calibration
from kvpress.core.host import host
from kvpress.core.linear import embedding_of
from kvpress.core.model import ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.appended import BEHIND, ReadBehind
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.learned import check_shape, fetch, name_of, tensors_of
from kvpress.presses.lora import Adapter, pairs_of, read_adapter

METHOD, EMBEDDINGS = "restorekv", "restore_embeddings"
RANK, ALPHA = 8, 16.0
"""Rank and alpha of the adapters that `kvpress calibrate` makes."""
NEEDED = (
    "RestoreKVPress needs embeddings and an adapter that were learned for the model, which are published as "
    "higokri/RestoreKV-<model> and higokri/RestoreKV-<model>_plus for some; give adapter=, a folder or a repository "
    "of such, or make a file with `kvpress calibrate restorekv --model ... --data ... --out ...`"
)


@register(
    "restorekv",
    "evict",
    "RestoreKV, 2026, arXiv:2608.01247",
    example="restorekv:0.5",
    needs="embeddings and an adapter that were learned for the model: published ones, a folder or a file (`adapter`)",
    refuses=(Refusal("restorekv:0.5", "there is no published adapter for the model, and no folder is given"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs a folder per model; its own tests run padding, turns, codecs and files with one"),
        Exemption("fuzz", "the pairs of learned tokens are at no position of the full cache that it compares with"),
    ),
)
@dataclass
class RestoreKVPress(KVzipPress):
    """Evict as KVzip does, and keep the pairs of a few learned tokens that have read the whole prompt.

    Before the eviction, n learned embeddings are read behind the prompt at positions T to T + n - 1, in one pass through
    the model with a LoRA adapter; no other pass uses the adapter. Their n pairs in every head of every layer are kept, and
    KVzip's scores choose the other pairs of the same budget:

        kept pairs per head = n + (KVzip's share of the remaining budget, on average)

    A prompt that is not compressed gets no learned pairs; every later turn adds n of its own. The learned keys are rotated
    back by n positions, so that following tokens see them at distances 1 to n. They belong to no token: `kept_positions`
    shows them as -1.

    `adapter` is a file of `kvpress calibrate restorekv` for the model, or a folder or a repository of the hub with
    `restore_embeddings.safetensors`, `adapter_config.json` and `adapter_model.safetensors`, the last two in the format of
    the peft package. None is `higokri/RestoreKV-<model>`, with the suffix `_plus` for scores with
    `kvzip_plus_normalization`; for the bundled reference model it is the file that ships with it, made for scores without.
    The other arguments are those of KVzip.

    Paper: RestoreKV, 2026, arXiv:2608.01247.
    Differs from the paper: following tokens keep their positions, where the authors shift them by n; so the tokens of the
    prompt are n positions nearer to them. Sliding layers store no learned pairs.
    """

    adapter: str | None = field(default=None, kw_only=True)

    def learned(self, model: ModelFacts) -> Restore:
        """Return the learned tokens and their adapter for a model."""
        return Restore.of(model, self.adapter or self.published(model))

    def published(self, model: ModelFacts) -> str:
        """Return the path or repository of a model's adapter, used where `adapter` is None."""
        plus = "_plus" if self.kvzip_plus_normalization else ""
        shipped = None if plus else calibration.shipped_for(model, METHOD)
        return str(shipped) if shipped else f"higokri/RestoreKV-{name_of(model, NEEDED)}{plus}"

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        recipe = super().recipe(model)
        if model is None or not model.loaded or self.amount.keeps_all:
            return recipe
        if model.shards.is_divided:
            raise NotImplementedError(
                f"RestoreKVPress adds an adapter to whole projections, and tensor parallel divides those of {model.name} among "
                f"{model.shards.count} ranks; use kvzip, or load the model without tp_plan"
            )
        restore = self.learned(model)
        (step,) = recipe.evictions
        scoring = step.prepare
        assert scoring is not None  # noqa: S101 - KVzip repeats the prompt

        def act(done: Pass) -> None:
            scoring.act(done)
            restore.read(done)

        return replace(recipe, evictions=(replace(step, beside=restore.count, prepare=replace(scoring, act=act)),))

    def post_init_from_model(self, model: nn.Module) -> None:
        """Refuse a model that the adapter was not made for."""
        if not self.amount.keeps_all:
            self.learned(host().facts_of(model)).check(model)


@dataclass(frozen=True, eq=False)
class Restore:
    """Learned tokens with the adapter that reads them."""

    embeddings: Tensor
    """Embeddings `[n, hidden]` of the tokens."""
    adapter: Adapter
    """Adapter that is active while the tokens are read."""

    @classmethod
    def of(cls, model: ModelFacts, place: str) -> Restore:
        """Read tokens and adapter from a folder, a repository of the hub, or a file that was calibrated for the model."""
        if Path(place).is_file():
            calibrated = calibration.read(place, METHOD)
            calibrated.check(METHOD, model, place, lambda layer: {})
            tensors = {name: tensor for name, tensor in calibrated.tensors.items() if name != EMBEDDINGS}
            return cls(calibrated.tensors[EMBEDDINGS], Adapter(place, ALPHA / RANK, pairs_of(tensors, RANK, place)))
        file = fetch(place, f"{EMBEDDINGS}.safetensors", NEEDED)
        embeddings = tensors_of(file)
        check_shape(embeddings, EMBEDDINGS, (None, None), file, "the learned tokens")
        return cls(embeddings[EMBEDDINGS], read_adapter(place, NEEDED))

    @property
    def count(self) -> int:
        """Number of learned tokens."""
        return len(self.embeddings)

    def check(self, model: Any) -> None:
        """Refuse a model of another shape, or one whose layers look up token ids."""
        if any(name.endswith("per_layer_input_gate") for name, _ in model.named_modules()):
            raise NotImplementedError(
                f"every layer of {type(model).__name__} looks up the ids of its tokens, and learned tokens have none; use kvzip"
            )
        hidden = embedding_of(model).shape[-1]
        check_shape({EMBEDDINGS: self.embeddings}, EMBEDDINGS, (None, hidden), self.adapter.place, type(model).__name__)
        self.adapter.check(model)

    def read(self, done: Pass) -> None:
        """Read the tokens behind a prompt and store their pairs in the observers of the layers."""
        like = embedding_of(done.model)
        batch = done.calls[0].store.batch
        first = done.position.reshape(-1, *done.position.shape[-2:]).amax(dim=0)  # [B or 1, 1]
        embeds = self.embeddings.to(like.device, like.dtype).expand(batch, -1, -1)
        steps = torch.arange(self.count, device=first.device)
        read_at, kept_at = first + steps, first + steps - self.count

        def keep(call: LayerCall) -> None:
            window = call.store.window
            keys, values = (
                pairs[:, :, window.length - self.count : window.length] for pairs in (window.keys, window.values)
            )
            if call.layer.rotates:
                unrotated = call.unrotate(keys, *call.angles(read_at))
                keys = call.rotate(unrotated, *(angles.float() for angles in call.angles(kept_at))).to(keys.dtype)
            observer: ReadBehind = call.store.observers[BEHIND]
            observer.pairs = keys.clone(), values.clone()

        with self.adapter.added(done.model):
            done.read(embeds, keep)
