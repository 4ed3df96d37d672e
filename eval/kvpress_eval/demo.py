"""The run of `kvpress demo`: every kind of press, alone and composed, on the bundled reference model."""

from __future__ import annotations

from pathlib import Path

from kvpress_eval.config import REFERENCE, RunConfig

PRESSES = (
    "none",
    "random:0.5",
    "streaming_llm:0.5",
    "snapkv:0.5",
    "tova:0.5",
    "h2o:0.5",
    "expected_attention:0.5,epsilon=0.01",
    "adakv(expected_attention:0.5,epsilon=0.01)",
    "kivi:bits=4,residual_length=32",
    "kivi:bits=2,residual_length=32",
    "quest:budget=128",
    "expected_attention:0.25,epsilon=0.01 + kivi:bits=4,residual_length=32 + quest:budget=128",
)


def demo_config(out: Path) -> RunConfig:
    """Return a run that takes a few minutes on two CPU cores."""
    return RunConfig(
        model=REFERENCE,
        presses=PRESSES,
        lengths=(1024,),
        samples=10,
        max_new_tokens=16,
        threads=1,
        out=out,
    )
