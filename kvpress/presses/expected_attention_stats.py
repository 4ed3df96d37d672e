# SPDX-License-Identifier: Apache-2.0
"""Expected attention from queries that were seen before, not from the prompt's own."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.expected_attention import ExpectedAttentionPress
from kvpress.presses.learned import check_shape, fetch, read

METHOD = "expected_attention"
FILE = "expected-attention.safetensors"
COMMAND = f"kvpress calibrate {METHOD} --model ... --data ... --out {FILE}"
PUBLISHED, PUBLISHED_FILE = "alessiodevoto/exp_att_stats", "model.safetensors"
"""Start of the names of the authors' repositories, and the file in each."""
TENSORS = {"mean": "query_mean", "covariance": "query_cov"}
"""Tensors of a published file, `[L, Hq, D]` and `[L, Hq, D, D]`, by our names."""
SAMPLING = {"sample_seq_len": "--tokens", "num_samples": "--sequences", "dataset_name": "--data"}
"""Arguments that name published statistics, each with the option of the command that makes others."""
NEEDED = (
    "ExpectedAttentionStatsPress needs statistics of the model's queries. Those of some models are published as "
    f"{PUBLISHED}_<model>_<dataset_name>_<num_samples>_<sample_seq_len>_<n_sink>; for others, run `{COMMAND}` and pass that "
    "file as stats_folder="
)


@register(
    "expected_attention_stats",
    "evict",
    "Devoto et al., 2025, arXiv:2510.00636",
    example="expected_attention_stats:0.5,epsilon=0.02",
    needs="statistics of the model's queries: published ones, or `kvpress calibrate expected_attention` (`stats_folder`)",
    refuses=(
        Refusal(
            "expected_attention_stats:0.5", "no statistics are published for the model, and `stats_folder` is not set"
        ),
    ),
    exempt=(
        Exemption(
            EVERY_SUITE,
            "needs a file per model; its own tests run the oracle, padding, chunks and decoding with calibrated ones",
        ),
    ),
)
@dataclass
class ExpectedAttentionStatsPress(ExpectedAttentionPress):
    """Score as `ExpectedAttentionPress`, with mean and covariance of queries measured on other texts.

        score[t] = (mean over the group of softmax(z)[t] + epsilon) * ||v_t||

    z is computed from mu `[Hq, D]` and S `[Hq, D, D]` of each layer. `stats_folder` is the file that `kvpress calibrate
    expected_attention` writes, a published file, a folder with `expected-attention.safetensors` or `model.safetensors`, or a
    repository of the hub; None is the file of the bundled reference model, and for other models the authors'
    `alessiodevoto/exp_att_stats_<model>_<dataset_name>_<num_samples>_<sample_seq_len>_<n_sink>`, with `_` for `/`. No queries
    are recorded while the prompt is read. `dataset_name`, `num_samples` and `sample_seq_len` only name published statistics:
    texts, their number, and the characters read of each. With `stats_folder`, other values than the defaults raise ValueError.

    Paper: Devoto et al., Expected Attention: KV Cache Compression by Estimating Attention from Future Queries
    Distribution, 2025, arXiv:2510.00636.
    Differs from the paper: the statistics are measured beforehand, as in NVIDIA kvpress; otherwise as ExpectedAttentionPress.
    """

    sample_seq_len: int = 1000
    num_samples: int = 100
    dataset_name: str = "kmfoda/booksum"
    stats_folder: str | None = None

    def validate(self) -> None:
        super().validate()
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name in SAMPLING and value != field.default and self.stats_folder is not None:
                raise ValueError(
                    f"{field.name}={value!r} names published statistics, and stats_folder={self.stats_folder!r} is read "
                    f"instead: leave one of them out; to compute others, run `{COMMAND}` with {SAMPLING[field.name]}"
                )

    @staticmethod
    def available_stats() -> list[str]:
        """Return the bundled files, each a value for `stats_folder`: there is one, for the reference model."""
        return [str(calibration.shipped(FILE.removesuffix(".safetensors")))]

    def published(self, model: ModelFacts) -> str:
        """Return the path or repository of a model's statistics, used where `stats_folder` is None."""
        if shipped := calibration.shipped_for(model, FILE.removesuffix(".safetensors")):
            return str(shipped)
        if not model.source:
            raise ValueError(f"{NEEDED}: this {model.name} was not loaded from a path, so it has no name to look for")
        sampled = self.dataset_name, str(self.num_samples), str(self.sample_seq_len), str(self.n_sink)
        return "_".join((PUBLISHED, *(part.replace("/", "_") for part in (model.source, *sampled))))

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or not model.loaded:
            return super().recipe(model)
        sampling = {name: getattr(type(self), name) for name in SAMPLING}
        named = replace(self, **sampling, stats_folder=self.stats_folder or self.published(model))
        named.check(model)
        return ExpectedAttentionPress.recipe(named, model)

    def check(self, model: ModelFacts) -> None:
        """Refuse statistics that were made for another model."""
        measured, source = self.measured(), str(self.stats_folder)
        if isinstance(measured, Calibration):
            measured.check(METHOD, model, source, _shapes)
            return
        shapes = {layer.index: _shapes(layer) for layer in model.growing}
        for layer, of_layer in shapes.items():
            for name, tensor in TENSORS.items():
                check_shape(
                    measured, tensor, (len(model.layers), *of_layer[name]), source, f"layer {layer} of {model.name}"
                )

    def measured(self) -> Calibration | dict[str, Tensor]:
        """Read the statistics from a calibrated or a published file."""
        if self.stats_folder is None:
            raise ValueError(
                "which statistics to read follows from the model: use the press inside `with press(model)`, or give "
                "stats_folder=, a file, a folder or a repository"
            )
        return read(file_of(self.stats_folder), METHOD)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return ()

    def statistics(self, view: View) -> tuple[Tensor, Tensor]:
        measured, rows, layer = self.measured(), view.call.store.batch, view.call.layer.index

        def of_layer(name: str) -> Tensor:
            if isinstance(measured, Calibration):
                whole = measured.tensors[f"{layer}.{name}"]
            else:
                whole = measured[TENSORS[name]][layer]
            tensor = view.call.layer.shards.part(whole).to(view.keys.device, torch.float32)
            return view.query_heads(tensor.expand(rows, *tensor.shape))

        return of_layer("mean"), of_layer("covariance")


def file_of(place: str) -> Path:
    """Return the file of statistics at a path, in a folder or in a repository of the hub.

    Raises:
        FileNotFoundError: there is none.
    """
    own = Path(place) / FILE if Path(place).is_dir() else Path(place)
    return own if own.is_file() else fetch(place, PUBLISHED_FILE, NEEDED)


def _shapes(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a calibration stores for a layer."""
    return {"mean": (layer.heads, layer.head_dim), "covariance": (layer.heads, layer.head_dim, layer.head_dim)}
