"""Every evicting press, as a spec for prompts of a few dozen tokens: the suites of all presses run over this list.

Where a press cannot take part in a suite, the suite says so beside its parametrisation and `docs/presses.md` gives the reason.
"""

from __future__ import annotations

EVICTING = [
    "random:0.5,seed=3",
    "knorm:0.5",
    "streaming_llm:0.5",
    "snapkv:0.5,window_size=4",
    "tova:0.5",
    "observed_attention:0.5",
    "h2o:0.5,interval=1000",
    "h2o:0.5,interval=1000,normalize=decay,decay=0.9",
    "expected_attention:0.5",
    "pyramidkv:0.5,window_size=4",
    "adakv(snapkv:0.5,window_size=4)",
    "adakv(expected_attention:0.7)",
    "knorm:budget=9",
    "kvzip:0.5,layerwise=true,repeat_prompt=",
    "keydiff:0.5",
    "leverage_score:0.5,sketch_dimension=16",
    "non_causal_attn:0.5,chunk_size=8",
    "compactor:0.5,sink_size_start=2,sink_size_end=2,chunk_size=8",
    "chunk(snapkv:0.5,window_size=2):chunk_length=8",
    "chunkkv(snapkv:0.5,window_size=4):chunk_length=5",
    "block(keydiff:0.5):block_size=3",
    "criticalkv(snapkv:0.5,window_size=4)",
    "critical_adakv(expected_attention:0.5)",
]

EXEMPT = {
    "expected_attention_stats": "needs a file per model",
    "key_rerotation": "keys move",
    "per_layer_compression": "one ratio per layer",
    "duo_attention": "no budget per layer",
    "rlkv": "no budget per layer",
}
"""Presses that have suites of their own instead, and why; `docs/eviction.md` says it at length."""
