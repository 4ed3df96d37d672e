# SPDX-License-Identifier: Apache-2.0
"""What all methods share: reading the data, finished layers that survive a stop, where a file comes from."""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from kvpress.calibrate import file as calibration
from kvpress.calibrate.file import Calibration, identify
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Settings(ABC):
    """A method, by what it lets one choose: subclasses are dataclasses whose fields are recorded in the file."""

    method: ClassVar[str]

    @property
    def shortest(self) -> int:
        """Fewest tokens of a sequence from which anything can be learned."""
        return 1

    @abstractmethod
    def check(self, model: ModelFacts) -> None:
        """Refuse settings that do not suit the model, before any work."""

    def check_out(self, out: Path) -> None:  # noqa: B027 - most methods write any file
        """Refuse a file that cannot be written as its name says, before any work."""

    def outputs(self, out: Path) -> tuple[Path, ...]:
        """Return the files that `write` writes for `out`."""
        return (out,)

    @abstractmethod
    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        """Return what the file holds, by name; finished `parts` need no more work."""

    def write(self, found: Calibration, model: ModelFacts, out: Path) -> None:
        """Write the file."""
        del model
        found.write(out)


@dataclass(frozen=True)
class Observed(Settings):
    """A method that learns from what its observers see of each layer, and nothing from the layers together.

    `layers_at_once` bounds how many layers are recorded in one reading of the data; None records all.
    """

    layers_at_once: ClassVar[int | None] = None

    @property
    def gradients(self) -> bool:
        """Whether the loss is propagated back while the data are read."""
        return False

    @abstractmethod
    def observer(self) -> Observer:
        """Return what watches one layer; it sees every sequence, one after the other."""

    @abstractmethod
    def tensors(self, observed: Any) -> dict[str, Tensor]:
        """Return what the file holds of a layer, from its observer."""

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        layers = [layer.index for layer in host().facts_of(model).growing]
        missing = [layer for layer in layers if not parts.has(layer)]
        report("layers", len(layers) - len(missing), len(layers))
        step = self.layers_at_once or len(layers)
        for start in range(0, len(missing), step):
            for layer, observed in collect(model, sequences, missing[start : start + step], self, report).items():
                parts.write(layer, self.tensors(observed))
                report("layers", len(layers) - len(missing) + missing.index(layer) + 1, len(layers))
        return {name: t for layer in layers for name, t in parts.read(layer).items()}


def calibrate(
    model: Any,
    sequences: Tensor,
    settings: Settings,
    out: Path,
    source: str = "token ids",
    report: Report = lambda what, done, total: None,
) -> Calibration:
    """Fit what `settings` say and write it to `out`; finished layers of a stopped run are kept and reused.

    Args:
        model: a causal language model.
        sequences: token ids `[S, T]` to read.
        settings: what to fit, and how.
        out: the calibration file; layers are collected beside it in a folder that is removed at the end.
        source: where the data come from, for the record.
        report: called with (what, done, total) as work goes on.

    Raises:
        NotImplementedError: no layer has a cache that grows, of which something could be learned.
    """
    facts = host().facts_of(model)
    if not facts.growing:
        kinds = ", ".join(sorted({layer.kind for layer in facts.layers})) or "none with attention"
        raise NotImplementedError(
            f"{facts.name} has no layer whose cache grows, so nothing is learned of it; its layers are {kinds}"
        )
    settings.check(facts)
    settings.check_out(out)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and sequences.shape[1] > limit:
        raise ValueError(f"sequences of {sequences.shape[1]} tokens are over the {limit} positions of the model")
    if sequences.shape[1] < settings.shortest or not len(sequences):
        raise ValueError(f"sequences must be [S >= 1, T >= {settings.shortest}] token ids, got {list(sequences.shape)}")
    provenance = {
        "method": settings.method,
        "settings": json.loads(json.dumps(asdict(settings))),
        "model": identify(facts),
        "data": {
            "source": source,
            "sequences": len(sequences),
            "tokens": sequences.shape[1],
            "sha256": hashlib.sha256(sequences.to(torch.int64).cpu().numpy().tobytes()).hexdigest(),
        },
        "torch": torch.__version__,
    }
    parts = Parts(out.with_name(out.name + ".parts"), provenance)
    found = Calibration(settings.fit(model, sequences, parts, report), provenance)
    settings.write(found, facts, out)
    parts.remove()
    return found


class Parts:
    """The finished layers of a run, one file each, in a folder of their own; damaged ones are fitted again."""

    def __init__(self, folder: Path, provenance: dict[str, Any]) -> None:
        self.folder, self.provenance = folder, provenance
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.safetensors")):
            try:
                made = calibration.read(path).provenance
            except ValueError:
                path.unlink()
                continue
            if made != provenance:
                raise ValueError(
                    f"{folder} holds layers of a run with another model, data or settings; remove it or choose another --out"
                )

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer:03d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a layer is finished."""
        return self._path(layer).is_file()

    def write(self, layer: int, tensors: dict[str, Tensor]) -> None:
        """Keep a finished layer."""
        named = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        Calibration(named, self.provenance).write(self._path(layer))

    def read(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors of a finished layer."""
        return calibration.read(self._path(layer)).tensors

    def remove(self) -> None:
        """Remove the folder once everything is in one file."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        self.folder.rmdir()


def collect(
    model: Any, sequences: Tensor, layers: Sequence[int], settings: Observed, report: Report
) -> dict[int, Observer]:
    """Read all sequences and return what the given layers' observers saw."""
    observers = {layer: settings.observer() for layer in layers}
    with trainable_inputs(model) if settings.gradients else torch.no_grad(), _Watching(observers)(model):
        for done, ids in enumerate(sequences):
            ids = ids[None].to(model.device)
            if settings.gradients:
                with torch.enable_grad():
                    model(ids, labels=ids).loss.backward()
            else:
                model(ids)
            report("sequences", done + 1, len(sequences))
    return observers


@contextmanager
def trainable_inputs(model: Any) -> Iterator[None]:
    """Let gradients flow from the input embeddings on, and to no weight."""
    before = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(False)
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        yield
    finally:
        hook.remove()
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)


@dataclass
class _Watching(BasePress):
    """Changes nothing, and shows every pass of a layer to its observer, whatever the cache."""

    layers: dict[int, Observer]

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(observers=(Wanted(_ByLayer, _Layers(self.layers)),))


@dataclass(frozen=True, eq=False)
class _Layers:
    """Observers by layer, as an argument that is equal to itself only."""

    observers: dict[int, Observer]


class _ByLayer(Observer):
    def __init__(self, layers: _Layers) -> None:
        self.layers = layers.observers

    def observe(self, call: LayerCall) -> None:
        if call.layer in self.layers:
            self.layers[call.layer].observe(call)
