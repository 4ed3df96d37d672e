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
COMMAND = f"kvpress calibrate --method {METHOD} --model ... --data ... --out {FILE}"
SAMPLING = {"sample_seq_len": "--tokens", "num_samples": "--sequences", "dataset_name": "--data"}
"""Arguments about making statistics, and the options of the command that stand for them."""


@register(
    "expected_attention_stats",
    "evict",
    "Devoto et al., 2025, arXiv:2510.00636",
    example="expected_attention_stats:0.5,epsilon=0.02",
    needs="statistics of the model's queries: `kvpress calibrate --method expected_attention` (`stats_folder`)",
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
    """Expected attention with mean and covariance of queries that were measured on other texts.

        score[t] = (mean over the group of softmax(z)[t] + epsilon) * ||v_t||, as in ExpectedAttentionPress,

    with mu and S of each layer `[Hq, D]` and `[Hq, D, D]` from a calibration of this model: `stats_folder` is the file that
    `kvpress calibrate --method expected_attention` writes, or a folder that holds `expected-attention.safetensors`; None
    is the one that ships with the bundled reference model. Nothing is watched while the prompt is read.
    `sample_seq_len`, `num_samples` and `dataset_name` are arguments of NVIDIA kvpress, where the press itself makes the
    statistics; here the command does, so other values than the defaults are refused.

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
            given = getattr(self, field.name)
            if field.name in SAMPLING and given != field.default:
                raise ValueError(
                    f"{field.name}={given!r} is about making statistics, which a press does not do here: use "
                    f"`{COMMAND}` with {SAMPLING[field.name]}, and give the file as stats_folder"
                )

    @staticmethod
    def available_stats() -> list[str]:
        """Return the files that ship with this library, each a value for `stats_folder`: that of the reference model."""
        return [str(calibration.shipped(FILE.removesuffix(".safetensors")))]

    @property
    def source(self) -> Path:
        """The calibration file."""
        if self.stats_folder is None:
            return calibration.shipped(FILE.removesuffix(".safetensors"))
        given = Path(self.stats_folder)
        return given / FILE if given.is_dir() else given

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is not None and model.loaded:
            bundled = "stats_folder=None means the bundled file, which"
            self.measured().check(METHOD, model, bundled if self.stats_folder is None else self.source, _held)
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
            found = tensors[f"{view.call.layer.index}.{name}"].to(view.keys.device)
            return view.query_heads(found.expand(rows, *found.shape))

        return of_layer("mean"), of_layer("covariance")


def _held(layer: LayerFacts) -> dict[str, tuple[int, ...]]:
    return {"mean": (layer.heads, layer.head_dim), "covariance": (layer.heads, layer.head_dim, layer.head_dim)}
