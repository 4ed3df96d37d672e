# SPDX-License-Identifier: Apache-2.0
"""Q-Filters: one calibrated direction per head that keys are projected on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from kvpress.core import calibration as calibration
from kvpress.core.calibration import Calibration
from kvpress.core.model import ModelFacts
from kvpress.core.press import ScorerPress
from kvpress.core.recipe import Recipe
from kvpress.core.registry import EVERY_SUITE, Exemption, Refusal, register
from kvpress.observe.view import View
from kvpress.presses.learned import check_shape, fetch, name_of, read, tensors_of

METHOD = "qfilter"
NAME = "q_filters"
"""Name of the tensor `[L, H, D]` in a file of filters."""
COLLECTION = "nthngdy/q-filters-67a4994dcb302a3d37f3d119"
NEEDED = (
    f"QFilterPress needs filters that were learned for the model; the hub's collection {COLLECTION} has them for some; for "
    f"others make them with `kvpress calibrate {METHOD} --model ... --data ... --out filters.safetensors` and give "
    "that file as filters="
)


@register(
    "qfilter",
    "evict",
    "Godey et al., 2025, arXiv:2503.02812",
    example="qfilter:0.5",
    needs="filters calibrated for the model: published ones, or `kvpress calibrate qfilter` (`filters`)",
    refuses=(Refusal("qfilter:0.5", "there are no published filters for the model, and no file is given"),),
    exempt=(
        Exemption(EVERY_SUITE, "needs a file per model; its own tests run the oracle, padding and decoding with one"),
    ),
)
@dataclass
class QFilterPress(ScorerPress):
    """Score a pair by the projection of its key on the main direction of the head's queries.

        score[b, h, t] = -f[h] . k[b, h, t]

    f `[H, D]` of a layer is minus the mean, over the query heads of the group, of the first right singular vector of their
    rotated queries on other texts; the singular vector points to where queries point. `filters` is a file, a folder with
    `model.safetensors` or a repository of the hub, with one tensor `q_filters [L, H, D]` or as `kvpress calibrate
    qfilter` writes it; None is the authors' `nthngdy/<model>_qfilt`, and for the bundled reference model the file that
    ships with it. No queries are recorded.

    Paper: Godey et al., Q-Filters: Leveraging QK Geometry for Efficient KV Cache Compression, 2025, arXiv:2503.02812.
    Differs from the paper: nothing.
    """

    filters: str | None = field(default=None, kw_only=True)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        if model is None or not model.loaded:
            return super().recipe(model)
        named = replace(self, filters=self.filters or self.published(model))
        named.check(model)
        return ScorerPress.recipe(named, model)

    def published(self, model: ModelFacts) -> str:
        """Return the path or repository of a model's filters, used where `filters` is None."""
        if shipped := calibration.shipped_for(model, METHOD):
            return str(shipped)
        name = name_of(model, NEEDED)
        return f"nthngdy/{name if '405B' in name else name.replace('Meta-Llama', 'Llama')}_qfilt"

    def check(self, model: ModelFacts) -> None:
        """Refuse filters that were made for another model."""
        filters, source = self.load(), str(self.filters)
        if isinstance(filters, Calibration):
            filters.check(METHOD, model, source, lambda layer: {"filter": (layer.kv_heads, layer.head_dim)})
            return
        shapes = {(layer.kv_heads, layer.head_dim) for layer in model.growing}
        if len(shapes) > 1:
            raise ValueError(f"{source}: layers of {model.name} differ in shape, so one tensor cannot be their filters")
        for shape in shapes:
            check_shape(filters, NAME, (len(model.layers), *shape), source, model.name)

    def load(self) -> Calibration | dict[str, Tensor]:
        """Read the filters from a published or a calibrated file."""
        if self.filters is None:
            raise ValueError(
                "which filters to read follows from the model: use the press inside `with press(model)`, or give "
                "filters=, a file, a folder or a repository"
            )
        return read(fetch(self.filters, "model.safetensors", NEEDED), METHOD)

    def scores(self, view: View) -> Tensor:
        """Return scores `[b, h, n]`."""
        filters = self.load()
        layer_filters = (
            filters.tensors[f"{view.layer}.filter"] if isinstance(filters, Calibration) else filters[NAME][view.layer]
        )
        head_filters = layer_filters[view.model_heads].to(view.keys.device, torch.float32)
        return -torch.einsum("bhnd,hd->bhn", view.keys.float(), head_filters)

    @staticmethod
    def load_q_filters(model_name: str) -> Tensor:
        """Return the published filters `[L, H, D]` of a model, by the model's name on the hub."""
        repository = f"nthngdy/{model_name.replace('Meta-Llama', 'Llama')}_qfilt"
        return tensors_of(fetch(repository, "model.safetensors", NEEDED))[NAME]

    @staticmethod
    def available_qfilters() -> list[str]:
        """Return the names of the models with published filters, listed on the hub."""
        from huggingface_hub import get_collection

        return [item.item_id.split("/")[-1].removesuffix("_qfilt") for item in get_collection(COLLECTION).items]
