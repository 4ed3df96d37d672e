# SPDX-License-Identifier: Apache-2.0
"""A row of a batch is stored and read as that row alone: other rows change neither its codes nor its choices."""

from __future__ import annotations

from typing import Any

import pytest

import kvpress
from kvpress.testing.rows import check_rows_alone
from tests.fuzz.models import model_of
from tests.fuzz.specs import resolved
from tests.models import tiny_model
from tests.presses.evicting import EVICTING as PRESSES

QUEST = "quest:budget=16,page_size=8,skip_layers=0"
LABELS = "double_sparsity:budget=12,channels=8,skip_layers=0,calibration={channels}"
CODECS = {
    "kivi": "kivi:bits=8,group_size=8,residual_length=8,sinks=2",
    "adaquant": "adaquant:bits=(8,4),group_size=8,residual_length=8",
    "zipcache": "zipcache:bits=8,low_bits=4,interval=8,residual_length=4,probe_ratio=0.5",
    "gear": "gear:bits=8,group_size=8,buffer_length=8,residual_length=4,rank=2",
    "gear, one chunk": "gear:bits=8,backbone=kcvt,buffer_length=8,residual_length=4,rank=2",
    "cq": "cq:bits=4,coupled=2,calibration={books},residual_length=4",
    "aquakv": "aquakv:bits=(4,2),calibration={predictors},residual_length=4",
    "turboquant": "turboquant:bits=8,residual_length=8",
    "rotated": "rotated:bits=8,residual_length=8",
    "merged layers": "minicache:group_size=8,residual_length=4",
    "merged layers in codes": "minicache:bits=8,group_size=8,retained=0.2",
}
SELECTORS = {
    "quest": QUEST,
    "labels": LABELS,
    "offloaded": f"{LABELS},offload=true",
    "tidal": "tidal_decode:budget=12,skip_layers=0",
    "sparq": "sparq:budget=12,channels=8",
    "blocks": "infllm_v2:budget=24,block_size=4,kernel_size=4,stride=2,n_sink=4,n_recent=8",
    "loki": "loki:budget=12,channels=8",
    "codes of keys": "pqcache:budget=12,bits=3",
    "with a sample": "vattention(loki:budget=12,channels=8):epsilon=0.5",
    "by turns": "loopserve:budget=12,coverage=1.0,last=8,every=4",
}
EVICTING = {
    "again and again": "h2o:0.4,interval=3 + kivi:bits=8,group_size=4,residual_length=4",
    "quest behind it": "h2o:0.4,interval=3 + quest:budget=8,page_size=4,skip_layers=0",
    "pages of codes": "decoding(knorm):compression_interval=5,target_size=30 + {gear} + "
    "quest:budget=12,page_size=6,skip_layers=0",
    "by head": "adakv(snapkv:0.3,window_size=4) + {zipcache} + tidal_decode:budget=8,skip_layers=0",
    "by layer": "pyramidkv:0.3,window_size=4,beta=4 + {kivi} + tidal_decode:budget=8,skip_layers=0",
    "part by part": "bounded(compactor:0.5,sink_size_start=2,sink_size_end=2,chunk_size=8,sketch_dimension=8):chunk=7",
    "of a size": "frontier:smaller=2",
    "of bytes, in two widths": "frontier:bytes=15000",
    "without values": "vector(adakv(snapkv:0.3,window_size=4)):calibration={predictors}",
    "labels of codes": "adakv(snapkv:0.3,window_size=4) + {turboquant} + {labels}",
}
SPECS = {
    "the defaults": ("kivi", (190, 156)),
    **{name: (spec, (60, 26, 9)) for name, spec in CODECS.items()},
    **{name: (spec, (110, 76)) for name, spec in SELECTORS.items()},
    "quest": (QUEST, (60, 26, 9)),
    "too short to begin": ("mxfp4:residual_length=8", (60, 5)),
    **{name: (spec, (60, 23)) for name, spec in EVICTING.items()},
}


def press_of(spec: str) -> Any:
    for name, inner in (CODECS | SELECTORS).items():
        spec = spec.replace(f"{{{name}}}", inner)
    return kvpress.get_press(resolved(spec, "llama"))


@pytest.mark.parametrize("name", SPECS)
def test_a_padded_row_is_that_row_alone(name: str) -> None:
    spec, lengths = SPECS[name]
    check_rows_alone(model_of("llama", "float32"), press_of(spec), lengths)


IN_LATER_TURNS = [
    *PRESSES,
    "budgeted(snapkv):smaller=10",
    "decoding(r_kv:window_size=6):compression_interval=4,target_size=20",
    "finch:0.5,window_size=6",
    *(entry.example for entry in kvpress.list_presses() if entry.role == "quantise" and not entry.needs),
]


@pytest.mark.parametrize("spec", IN_LATER_TURNS)
def test_a_row_with_a_padded_later_turn_is_that_row_alone(spec: str) -> None:
    """Padding lies between the turns of two rows; one has fewer new tokens than windows of newest queries hold."""
    check_rows_alone(tiny_model("llama"), press_of(spec), (40, 31, 34), exact=False, later=(3, 12, 9), generated=(2, 2))
