# SPDX-License-Identifier: Apache-2.0
"""Expected attention from queries that were seen before, not from the prompt's own."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import LayerFacts, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.observer import Wanted
from kvpress.observe.view import View
from kvpress.presses.expected_attention import ExpectedAttentionPress

METHOD = "expected_attention"
FILE = "expected-attention.safetensors"
COMMAND = f"kvpress calibrate {METHOD} --model ... --data ... --out {FILE}"
SAMPLING = {"sample_seq_len": "--tokens", "num_samples": "--sequences", "dataset_name": "--data"}
"""Arguments of NVIDIA kvpress for computing statistics, each with the option of the command that replaces it."""


@register(
    "expected_attention_stats",
    "evict",
    "Devoto et al., 2025, arXiv:2510.00636",
    example="expected_attention_stats:0.5,epsilon=0.02",
    needs="statistics of the model's queries: `kvpress calibrate expected_attention` (`stats_folder`)",
    refuses=(
        Refusal(
            "expected_attention_stats:0.5", "without a file of its own, a model other than the bundled reference model"
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

    z is computed from mu `[Hq, D]` and S `[Hq, D, D]` of each layer, which come from a calibration of this model.
    `stats_folder` is the file that `kvpress calibrate expected_attention` writes, or a folder with
    `expected-attention.safetensors`; None is the file of the bundled reference model. No queries are recorded while the prompt
    is read. `sample_seq_len`, `num_samples` and `dataset_name` are arguments of NVIDIA kvpress, where the press computes the
    statistics; here the command computes them, so values other than the defaults raise ValueError.

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
            if field.name in SAMPLING and value != field.default:
                raise ValueError(
                    f"{field.name}={value!r} has no effect, because this press does not compute statistics: run "
                    f"`{COMMAND}` with {SAMPLING[field.name]}, and pass the file as stats_folder"
                )

    @staticmethod
    def available_stats() -> list[str]:
        """Return the bundled files, each a value for `stats_folder`: there is one, for the reference model."""
        return [str(calibration.shipped(FILE.removesuffix(".safetensors")))]

    @property
    def source(self) -> Path:
        """Path of the calibration file."""
        if self.stats_folder is None:
            return calibration.shipped(FILE.removesuffix(".safetensors"))
        path = Path(self.stats_folder)
        return path / FILE if path.is_dir() else path

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None and model.loaded:
            bundled = "stats_folder=None means the bundled file, which"
            self.measured().check(METHOD, model, bundled if self.stats_folder is None else self.source, _shapes)
        return super().recipe(model)

    def measured(self) -> Calibration:
        """Read the calibration file."""
        return calibration.read(self.source, METHOD)

    @property
    def wants(self) -> tuple[Wanted, ...]:
        return ()

    def statistics(self, view: View) -> tuple[Tensor, Tensor]:
        tensors, rows = self.measured().tensors, view.call.store.batch

        def of_layer(name: str) -> Tensor:
            tensor = view.call.layer.shards.part(tensors[f"{view.call.layer.index}.{name}"]).to(view.keys.device)
            return view.query_heads(tensor.expand(rows, *tensor.shape))

        return of_layer("mean"), of_layer("covariance")


def _shapes(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor that a calibration stores for a layer."""
    return {"mean": (layer.heads, layer.head_dim), "covariance": (layer.heads, layer.head_dim, layer.head_dim)}
