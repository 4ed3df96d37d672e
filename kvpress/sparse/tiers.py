# SPDX-License-Identifier: Apache-2.0
"""Storage tiers: pairs that a selector chooses from lie in host memory or in a file."""

from __future__ import annotations

import copy
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import nn

from kvpress.cache.codec import Codec
from kvpress.cache.tier import FileTier
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Refusal, register
from kvpress.core.selector import Selector
from kvpress.sparse.offload import HostCodec


@register(
    "offload",
    "select",
    "Pan et al., 2024, arXiv:2409.04992",
    example="offload(quest:budget=1024):to=file",
    refuses=(
        Refusal("offload(snapkv:0.5)", "it selects nothing, so that all pairs would be fetched for every token"),
        Refusal("offload(tidal_decode)", "layers that choose for others read everything"),
        Refusal("offload(double_sparsity:offload=true)", "its pairs lie in host memory already"),
        Refusal("offload(kivi + quest):to=host", "host memory holds pairs as they are; a file holds encoded ones too"),
        Refusal("kivi + offload(quest)", "two codecs; put the codec inside: offload(kivi + quest)"),
        Refusal("offload(quest):folder=/no/such/folder", "the folder is not there"),
    ),
)
@dataclass
class OffloadPress(BasePress):
    """Keep the sealed pairs that a selector chooses from outside of the memory that the model runs in.

    `press` is a selector, or a composition with one. What it chooses by, such as labels or the bounds of pages, stays where
    the model runs, the choice is made there, and of the pairs only chosen ones are fetched. What is read is what would
    be read without. Layers in which the selector reads everything (`skip_layers`) keep their pairs where they are.

    `to` is "file" or "host". "file", for models on the CPU: pairs as they are stored, encoded ones too, lie in files that are
    mapped into memory. The system reads the pages of chosen pairs, and keeps them while it has memory to spare. `folder` is
    where the files are made, by default the system's folder for temporary files; the system removes them with the cache, or
    when the process ends. Where there is no room, an OSError says so before pairs are let go. "host", for models on another
    device: pairs lie in pinned host memory, as they are. A model on the CPU has them there anyway, so nothing moves, which a
    warning says. `double_sparsity:offload=true` is the same and fetches a layer ahead.

    `kvpress.memory_report` lists `file` and `host` bytes apart, and `fetched_bytes`: the bytes of pairs that were
    read from there, each time that a token chose them.

    Paper: Pan et al., InstInfer: In-Storage Attention Offloading for Cost-Effective Long-Context LLM Inference, 2024,
    arXiv:2409.04992.
    Differs from the paper: a memory map takes the place of its storage device; the attention to chosen pairs is computed by the
    processor, not in the device; which pairs are chosen is up to the selector inside, where the paper has one of its own.
    """

    press: BasePress
    to: Literal["file", "host"] = "file"
    folder: str | None = None

    def validate(self) -> None:
        super().validate()
        if not isinstance(self.press, BasePress):
            raise TypeError(
                f"OffloadPress needs a selector, such as QuestPress(budget=1024), got {type(self.press).__name__}"
            )
        self.press.validate()
        if self.folder is not None and self.to == "host":
            raise ValueError(f"folder={self.folder!r} is for to='file'; leave it out with to='host'")
        if self.folder is not None and not (Path(self.folder).is_dir() and os.access(self.folder, os.W_OK)):
            raise ValueError(f"folder must be a folder that can be written to, got {self.folder!r}; make it first")
        self.recipe()

    def post_init_from_model(self, model: nn.Module) -> None:
        self.press.post_init_from_model(model)
        device = next(model.parameters()).device.type
        if self.to == "file" and device != "cpu":
            raise NotImplementedError(
                f"to='file' is for models on the CPU, which read the file's memory map, and this one is on {device}; use "
                "to='host'"
            )
        if self.to == "file" and os.name != "posix":
            raise NotImplementedError("to='file' needs a POSIX system, which lets a file be removed while it is mapped")
        if self.to == "host" and device == "cpu":
            warnings.warn(
                "to='host' changes nothing for a model on the CPU: its pairs lie in host memory; use to='file'",
                RuntimeWarning,
                stacklevel=2,
            )

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        inner, name = self.press.recipe(model), type(self.press).__name__
        if inner.selector is None:
            raise TypeError(
                f"OffloadPress needs a selector, such as QuestPress(budget=1024), got {name}, which reads every pair for "
                "every token; fetching all of them would take longer than the model"
            )
        if inner.offloads:
            raise TypeError(f"OffloadPress cannot move pairs that {name} offloads; leave out one of both")
        if self.to == "host" and inner.codec is not None:
            raise ValueError(f"to='host' holds pairs as they are, and {name} encodes them; use to='file'")
        selecting = [layer.index for layer in model.growing] if model is not None else [1 << 16]
        for layer in selecting:
            found = inner.selector_at(layer)
            if found is not None and type(found).after is not Selector.after:
                raise TypeError(
                    f"OffloadPress cannot move pairs that {name} chooses from: some of its layers read all of them to choose "
                    "for others; use a selector with an index, such as quest or double_sparsity"
                )

        def at(layer: int) -> Codec | None:
            codec = inner.codec_at(layer)
            if codec is None or inner.selector_at(layer) is None:
                return codec
            if self.to == "host":
                return HostCodec(codec.group, codec.residual)
            moving = copy.copy(codec)
            moving.tier = FileTier(self.folder)
            return moving

        return replace(inner, codec=at, offloads=True)
