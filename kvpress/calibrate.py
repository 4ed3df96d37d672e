"""Fitting what a method needs to know about a model: run it over data layer by layer, resumable, and write one file."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvpress import calibration
from kvpress.calibration import Calibration, identify
from kvpress.checks import check_count
from kvpress.context import LayerCall
from kvpress.observe import Observer
from kvpress.presses.base import BasePress, Observers
from kvpress.quant.coupled import METHOD, check_coupling
from kvpress.quant.kmeans import kmeans
from kvpress.shapes import layer_shapes

LAYERS_AT_ONCE = 4
"""Layers whose keys and values are held at once; the model reads the data again for the next ones."""
SINKS = 4
"""Tokens at the start of each sequence that are left out: their keys are far from all others, and they stay dense."""

Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CoupledSettings:
    """How books are fitted: channels per code and bits per code of keys and of values, and the rounds of k-means.

    With `fisher`, every vector weighs its squared gradient of the language-modelling loss.
    """

    coupled: tuple[int, int] = (4, 4)
    bits: tuple[int, int] = (8, 8)
    fisher: bool = True
    iterations: int = 100
    seed: int = 0

    def check(self, model: Any) -> None:
        """Refuse settings that do not suit the model, before any work."""
        check_count("iterations", self.iterations)
        for shape in layer_shapes(model.config.get_text_config(decoder=True)):
            check_coupling(shape.head_dim, self.coupled, self.bits)


@dataclass
class Record:
    """What one layer computed: keys before their rotary embedding and values, `[tokens, H, D]`, and squared gradients."""

    keys: list[Tensor]
    values: list[Tensor]
    key_weights: list[Tensor]
    value_weights: list[Tensor]


def calibrate(
    model: Any,
    sequences: Tensor,
    settings: CoupledSettings,
    out: Path,
    source: str = "token ids",
    report: Report = lambda what, done, total: None,
) -> Calibration:
    """Fit books for coupled quantisation and write them to `out`; finished layers of a stopped run are kept and reused.

    Args:
        model: a causal language model.
        sequences: token ids `[S, T]` to read.
        settings: what to fit.
        out: the calibration file; layers are collected beside it in a folder that is removed at the end.
        source: where the data come from, for the record.
        report: called with (what, done, total) as work goes on.
    """
    from kvpress.hf import growing_layers

    settings.check(model)
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    if limit and sequences.shape[1] > limit:
        raise ValueError(f"sequences of {sequences.shape[1]} tokens are over the {limit} positions of the model")
    if sequences.shape[1] <= 2 * SINKS or not len(sequences):
        raise ValueError(f"sequences must be [S >= 1, T > {2 * SINKS}] token ids, got {list(sequences.shape)}")
    provenance = {
        "method": METHOD,
        "settings": asdict(settings) | {"coupled": list(settings.coupled), "bits": list(settings.bits)},
        "model": identify(model),
        "data": {
            "source": source,
            "sequences": len(sequences),
            "tokens": sequences.shape[1],
            "sha256": hashlib.sha256(sequences.to(torch.int64).cpu().numpy().tobytes()).hexdigest(),
        },
        "torch": torch.__version__,
    }
    parts = Parts(out.with_name(out.name + ".parts"), provenance)
    layers = growing_layers(model)
    missing = [layer for layer in layers if not parts.has(layer)]
    report("layers", len(layers) - len(missing), len(layers))
    for start in range(0, len(missing), LAYERS_AT_ONCE):
        chosen = missing[start : start + LAYERS_AT_ONCE]
        for layer, record in collect(model, sequences, chosen, settings.fisher, report).items():
            parts.write(layer, fit_books(record, settings))
            report("layers", len(layers) - len(missing) + missing.index(layer) + 1, len(layers))
    found = Calibration({name: t for layer in layers for name, t in parts.read(layer).items()}, provenance)
    found.write(out)
    parts.remove()
    return found


class Parts:
    """The finished layers of a run, one file each, in a folder of their own."""

    def __init__(self, folder: Path, provenance: dict[str, Any]) -> None:
        self.folder, self.provenance = folder, provenance
        folder.mkdir(parents=True, exist_ok=True)
        for path in sorted(folder.glob("*.safetensors")):
            if calibration.read(path).provenance != provenance:
                raise ValueError(
                    f"{folder} holds layers of a run with another model, data or settings; remove it or choose another --out"
                )

    def _path(self, layer: int) -> Path:
        return self.folder / f"{layer:03d}.safetensors"

    def has(self, layer: int) -> bool:
        """Whether a layer is finished."""
        return self._path(layer).is_file()

    def write(self, layer: int, books: dict[str, Tensor]) -> None:
        """Keep a finished layer."""
        tensors = {f"{layer}.{name}": book for name, book in books.items()}
        Calibration(tensors, self.provenance).write(self._path(layer))

    def read(self, layer: int) -> dict[str, Tensor]:
        """Return the tensors of a finished layer."""
        return calibration.read(self._path(layer)).tensors

    def remove(self) -> None:
        """Remove the folder once everything is in one file."""
        for path in self.folder.glob("*.safetensors"):
            path.unlink()
        self.folder.rmdir()


def fit_books(record: Record, settings: CoupledSettings) -> dict[str, Tensor]:
    """Books of one layer, `keys` and `values`, float16 `[H, D / c, 2**b, c]` each."""
    sides = {"keys": (record.keys, record.key_weights), "values": (record.values, record.value_weights)}
    books = {}
    for side, (name, (vectors, gradients)) in enumerate(sides.items()):
        coupled, bits = settings.coupled[side], settings.bits[side]
        points = torch.cat(vectors).permute(1, 2, 0).unflatten(1, (-1, coupled)).transpose(2, 3).float()
        weights = torch.ones(points.shape[:3], device=points.device)
        if settings.fisher:
            squares = torch.cat(gradients).permute(1, 2, 0).unflatten(1, (-1, coupled))
            weights = balance(squares.float().sum(dim=2))
        fitted = [
            kmeans(p, w, 2**bits, settings.iterations, settings.seed)[0] for p, w in zip(points, weights, strict=True)
        ]
        books[name] = torch.stack(fitted).half()
    return books


def balance(weights: Tensor) -> Tensor:
    """Scale weights `[..., n]` to mean 1; they span many decades, so the largest thousandth is cut off first."""
    highest = weights.kthvalue(max(1, int(0.999 * weights.shape[-1])), dim=-1, keepdim=True).values
    cut = torch.minimum(weights, highest)
    mean = cut.mean(dim=-1, keepdim=True)
    return torch.where(mean > 0, cut / mean.clamp_min(torch.finfo(cut.dtype).tiny), torch.ones_like(cut))


def collect(model: Any, sequences: Tensor, layers: Sequence[int], gradients: bool, report: Report) -> dict[int, Record]:
    """Read all sequences and return what the given layers computed."""
    records = {layer: Record([], [], [], []) for layer in layers}
    with trainable_inputs(model) if gradients else torch.no_grad(), _Recording(records, gradients)(model):
        for done, ids in enumerate(sequences):
            ids = ids[None].to(model.device)
            if gradients:
                with torch.enable_grad():
                    model(ids, labels=ids).loss.backward()
            else:
                model(ids)
            report("sequences", done + 1, len(sequences))
    return records


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


class _Recorder(Observer):
    """Copies what a layer puts into an empty cache."""

    def __init__(self, records: dict[int, Record], gradients: bool) -> None:
        self.records, self.gradients = records, gradients

    def observe(self, call: LayerCall) -> None:
        record = self.records.get(call.layer)
        if record is None:
            return
        keys, values = call.store.window.keys, call.store.window.values
        record.keys.append(_tokens(call.unrotate(keys.detach())))
        record.values.append(_tokens(values.detach()))
        if self.gradients:
            keys.register_hook(lambda g: record.key_weights.append(_tokens(call.unrotate(g)).float().square()))
            values.register_hook(lambda g: record.value_weights.append(_tokens(g).float().square()))

    def tensors(self) -> list[Tensor]:
        return []

    def select_rows(self, rows: Tensor) -> None:
        """Nothing is held per row."""

    def to(self, device: torch.device | str) -> None:
        """Nothing is held on a device."""


def _tokens(vectors: Tensor) -> Tensor:
    """`[1, H, n, D]` as `[n - SINKS, H, D]`, a copy."""
    return vectors[0, :, SINKS:].transpose(0, 1).contiguous()


@dataclass
class _Recording(BasePress):
    """Changes nothing, and records."""

    records: dict[int, Record]
    gradients: bool

    def observers(self) -> Observers:
        return {"calibration": partial(_Recorder, self.records, self.gradients)}
