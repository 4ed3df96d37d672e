# SPDX-License-Identifier: Apache-2.0
"""Storage tiers: a selector's pairs in host memory or in a file."""

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
        Refusal("offload(snapkv:0.5)", "without a selector, all pairs would be fetched for every token"),
        Refusal("offload(tidal_decode)", "layers that choose for later layers read everything"),
        Refusal("offload(double_sparsity:offload=true)", "its pairs are in host memory already"),
        Refusal(
            "offload(kivi + quest):to=host", "host memory stores pairs without a codec; a file stores encoded ones too"
        ),
        Refusal("kivi + offload(quest)", "two codecs; put the codec inside: offload(kivi + quest)"),
        Refusal("offload(quest):folder=/no/such/folder", "the folder does not exist"),
    ),
)
@dataclass
class OffloadPress(BasePress):
    """Move the sealed pairs of a selector out of the model's memory: to files, or to host memory.

    `press` is a selector, or a composition with one. Its index, such as labels or the bounds of pages, stays on the model's
    device and chooses there; only chosen pairs are fetched, and outputs do not change. Layers in which the
    selector reads everything (`skip_layers`) are not moved.

    `to` is "file" or "host". "file" is for models on the CPU: stored pairs, encoded ones too, move to memory-mapped files. The
    operating system reads the pages of chosen pairs, and caches them in free memory. `folder` is the folder of the files, by
    default the system's folder for temporary files. The files are removed with the cache, or when the process ends. On a full
    disk, an OSError is raised and no pair is lost. "host" is for models on another device: pairs move to pinned host memory,
    in the model's type. For a model on the CPU it changes nothing, and warns. `double_sparsity:offload=true` does the same and
    fetches one layer ahead.

    `kvpress.memory_report` lists `file` and `host` bytes separately, and `fetched_bytes`: the bytes of pairs that were read
    from there, counted each time that a token chose them.

    Paper: Pan et al., InstInfer: In-Storage Attention Offloading for Cost-Effective Long-Context LLM Inference, 2024,
    arXiv:2409.04992.
    Differs from the paper: a memory map takes the place of its storage device; the attention to chosen pairs is computed by the
    processor, not in the device; the inner selector chooses the pairs, where the paper has its selector.
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
            raise ValueError(
                f"folder must be an existing folder that can be written to, got {self.folder!r}; create it first"
            )
        self.recipe()

    def post_init_from_model(self, model: nn.Module) -> None:
        self.press.post_init_from_model(model)
        device = next(model.parameters()).device.type
        if self.to == "file" and device != "cpu":
            raise NotImplementedError(
                f"to='file' is for models on the CPU, which read the file's memory map, and this model is on {device}; use "
                "to='host'"
            )
        if self.to == "file" and os.name != "posix":
            raise NotImplementedError("to='file' needs a POSIX system, which lets a file be removed while it is mapped")
        if self.to == "host" and device == "cpu":
            warnings.warn(
                "to='host' changes nothing for a model on the CPU, whose pairs are in host memory already; use to='file'",
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
            raise TypeError(
                f"OffloadPress cannot move the pairs of {name}, which offloads them itself; remove one of the two"
            )
        if self.to == "host" and inner.codec is not None:
            raise ValueError(f"to='host' stores pairs without a codec, and {name} encodes them; use to='file'")
        selecting = [layer.index for layer in model.growing] if model is not None else [1 << 16]
        for layer in selecting:
            selector = inner.selector_at(layer)
            if selector is not None and type(selector).after is not Selector.after:
                raise TypeError(
                    f"OffloadPress cannot move the pairs of {name}: some of its layers read all pairs to choose for later "
                    "layers; use a selector with an index, such as quest or double_sparsity"
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
