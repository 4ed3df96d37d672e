"""Every evicting press, as a spec for prompts of a few dozen tokens: the suites of all presses run over this list.

Where a press cannot take part in a suite, `kvpress/facts.py` gives the reason, and `docs/presses/README.md` shows it.
"""

from __future__ import annotations

from kvpress.facts import EVERY_SUITE, FACTS

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

EXEMPT = frozenset(name for name, facts in FACTS.items() for item in facts.exempt if item.suite == EVERY_SUITE)
"""Presses that have suites of their own instead."""
