# SPDX-License-Identifier: Apache-2.0
"""Running a calibration: reading the data, resuming after a stop, and writing the file with its provenance."""

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

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration, identify
from kvpress.core.host import host
from kvpress.core.model import ModelFacts
from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.observe.call import LayerCall
from kvpress.observe.observer import Observer, Wanted

Report = Callable[[str, int, int], None]
"""Progress callback: the unit of work, the number that is done, and the total."""
RECORDED = 2**31
"""Bytes of keys, values and their gradients that are recorded in one reading of the data."""


@dataclass(frozen=True)
class CalibrationSettings(ABC):
    """Settings of a calibration method. Subclasses are dataclasses whose fields are recorded in the file."""

    method: ClassVar[str]

    @property
    def shortest(self) -> int:
        """Fewest tokens that a sequence needs."""
        return 1

    @abstractmethod
    def check(self, model: ModelFacts) -> None:
        """Raise ValueError or NotImplementedError if the settings do not suit the model; called before any work."""

    def check_out(self, out: Path) -> None:  # noqa: B027 - most methods write any file
        """Raise ValueError if the method cannot write a file of this name; called before any work."""

    def outputs(self, out: Path) -> tuple[Path, ...]:
        """Return the files that `write` writes for `out`."""
        return (out,)

    @abstractmethod
    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        """Return the tensors of the file by name; layers in `finished` need no more work."""

    def write(self, result: Calibration, model: ModelFacts, out: Path) -> None:
        """Write the file."""
        del model
        result.write(out)


@dataclass(frozen=True)
class Observed(CalibrationSettings):
    """Settings of a method that learns from each layer separately, with one observer per layer."""

    keeps_pairs: ClassVar[bool] = False
    """Whether the observer of a layer keeps all keys and values that it sees, so that some layers are recorded at a time."""

    @property
    def gradients(self) -> bool:
        """Whether the loss is back-propagated."""
        return False

    @abstractmethod
    def observer(self) -> Observer:
        """Return the observer of one layer; it gets every sequence, one after the other."""

    @abstractmethod
    def tensors(self, observed: Any) -> dict[str, Tensor]:
        """Return the tensors of a layer by name, from its observer."""

    def layers_at_once(self, model: ModelFacts, tokens: int) -> int:
        """Return how many layers are recorded in one reading of so many tokens: those whose pairs fit into `RECORDED` bytes."""
        if not self.keeps_pairs:
            return len(model.growing)
        of_number = model.dtype.itemsize + (4 if self.gradients else 0)
        layer_bytes = tokens * of_number * max(layer.kv_heads * layer.pair_dim for layer in model.growing)
        return max(1, int(RECORDED // layer_bytes))

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        facts = host().facts_of(model)
        layers = [layer.index for layer in facts.growing]
        missing = [layer for layer in layers if not finished.has(layer)]
        report("layers", len(layers) - len(missing), len(layers))
        step = self.layers_at_once(facts, sequences.numel())
        for start in range(0, len(missing), step):
            for layer, observed in collect(model, sequences, missing[start : start + step], self, report).items():
                finished.write(layer, self.tensors(observed))
                report("layers", len(layers) - len(missing) + missing.index(layer) + 1, len(layers))
        return {name: t for layer in layers for name, t in finished.read(layer).items()}


def calibrate(
    model: Any,
    sequences: Tensor,
    settings: CalibrationSettings,
    out: Path,
    source: str = "token ids",
    report: Report = lambda unit, done, total: None,
) -> Calibration:
    """Run a calibration and write its file; finished layers of a stopped run are reused.

    Args:
        model: a causal language model.
        sequences: token ids `[S, T]` to read.
        settings: the method and its settings.
        out: the calibration file; finished layers are collected in the folder `<out>.parts`, which is removed at the end.
        source: origin of the data, recorded in the file.
        report: progress callback.

    Raises:
        NotImplementedError: no layer has a cache that grows.
        TypeError: sequences are not token ids.
        ValueError: sequences are too short, too long or empty, settings do not suit the model, or `out` is a folder.
    """
    out = Path(out)
    if not isinstance(sequences, Tensor) or sequences.dim() != 2 or sequences.dtype not in (torch.int32, torch.int64):
        is_tensor = isinstance(sequences, Tensor)
        actual = f"{sequences.dtype} {list(sequences.shape)}" if is_tensor else type(sequences).__name__
        raise TypeError(f"sequences must be token ids, a tensor [S, T] of integers, got {actual}")
    if folder := next((path for path in settings.outputs(out) if path.is_dir()), None):
        raise ValueError(f"{folder} is a folder: pass the name of a file as out")
    facts = host().facts_of(model)
    if not facts.growing:
        kinds = ", ".join(sorted({layer.kind for layer in facts.layers})) or "none with attention"
        raise NotImplementedError(
            f"{facts.name} has no layer whose cache grows, so that it cannot be calibrated; its layers are {kinds}"
        )
    settings.check(facts)
    settings.check_out(out)
    if facts.positions is not None and sequences.shape[1] > facts.positions:
        raise ValueError(
            f"sequences of {sequences.shape[1]} tokens are over the {facts.positions} positions of the model: give shorter ones"
        )
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
    finished = FinishedLayers(out.with_name(out.name + ".parts"), provenance)
    result = Calibration(settings.fit(model, sequences, finished, report), provenance)
    settings.write(result, facts, out)
    finished.remove()
    return result


class FinishedLayers:
    """Finished layers of a run, one file each in a folder. Damaged files are removed and their layers fitted again."""

    def __init__(self, folder: Path, provenance: dict[str, Any]) -> None:
        self.folder, self.provenance = folder, provenance
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.safetensors")):
            try:
                previous = calibration.read(path).provenance
            except ValueError:
                path.unlink()
                continue
            if previous != provenance:
                raise ValueError(
                    f"{folder} holds layers of a run with another model, data or settings; remove it or choose another --out"
                )

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer:03d}.safetensors"

    def has(self, layer: int) -> bool:
        """Return whether a layer is finished."""
        return self._path(layer).is_file()

    def write(self, layer: int, tensors: dict[str, Tensor]) -> None:
        """Write the tensors of a finished layer."""
        named = {f"{layer}.{name}": tensor for name, tensor in tensors.items()}
        Calibration(named, self.provenance).write(self._path(layer))

    def read(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors of a finished layer."""
        return calibration.read(self._path(layer)).tensors

    def remove(self) -> None:
        """Remove the folder; called once the calibration file is written."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        self.folder.rmdir()


def collect(
    model: Any, sequences: Tensor, layers: Sequence[int], settings: Observed, report: Report
) -> dict[int, Observer]:
    """Read all sequences and return the observers of the layers, filled."""
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
    """Propagate gradients through activations, from the input embeddings on, but to no weight."""
    before = {p: p.requires_grad for p in model.parameters()}
    model.requires_grad_(False)
    hook = model.get_input_embeddings().register_forward_hook(lambda module, args, out: out.requires_grad_())
    try:
        yield
    finally:
        hook.remove()
        for parameter, required in before.items():
            parameter.requires_grad_(required)


@dataclass
class _Watching(BasePress):
    """Press that passes every call of a layer to its observer and changes nothing."""

    layers: dict[int, Observer]

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        return Recipe(observers=(Wanted(_ByLayer, _Layers(self.layers)),))


@dataclass(frozen=True, eq=False)
class _Layers:
    """Observers by layer. It compares by identity, as an argument of `Wanted` must be hashable."""

    observers: dict[int, Observer]


class _ByLayer(Observer):
    """Observer that passes calls to the observer of their layer."""

    def __init__(self, layers: _Layers) -> None:
        self.layers = layers.observers

    def observe(self, call: LayerCall) -> None:
        if call.layer.index in self.layers:
            self.layers[call.layer.index].observe(call)
