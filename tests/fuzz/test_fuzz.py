# SPDX-License-Identifier: Apache-2.0
"""All cases of CI, and a check that they contain every method."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from typing import Any

import pytest
import torch

import kvpress
from kvpress import kernels
from tests.fuzz import specs
from tests.fuzz.__main__ import report
from tests.fuzz.cases import COUNT, Case, ci_cases, dimensions, random_cases, reaches
from tests.fuzz.models import DTYPES, FAMILIES
from tests.fuzz.properties import refused, run
from tests.fuzz.shrink import shrunk
from tests.fuzz.talk import talk


@pytest.mark.parametrize("number", range(COUNT))
def test_everything_holds(number: int) -> None:
    """Run a case of CI. The message of a failure has the command that repeats the case and makes it smaller."""
    case = ci_cases()[number]
    if faults := run(case):
        pytest.fail("\n".join(report(case, fault) for fault in faults), pytrace=False)


def test_every_method_is_drawn() -> None:
    """Fail for a method without values for its settings in `tests/fuzz/specs.py`."""
    names = set().union(*map(reaches, ci_cases()))
    assert set(specs.methods()) - names <= {"none"}


ALONE = {
    "prefill_decoding": "prefill_decoding(knorm:0.5)",
    "composed": "knorm:0.5 + tova:0.5",
    "budgeted": "budgeted(snapkv:window_size=4):smaller=8",
    "twilight": "twilight(quest:budget=16,page_size=4,skip_layers=0):p=0.5",
    "vattention": "vattention(quest:budget=16,page_size=4,skip_layers=0):epsilon=0.5",
    "offload": "offload(quest:budget=16,page_size=4,skip_layers=0)",
}


def settings_of(name: str) -> str:
    """Return a spec in which one method works by itself."""
    method = specs.methods()[name]
    tree: dict[str, Any] = {"name": name, **{field: values[0] for field, values in method.choices.items()}}
    if method.holds:
        # snapkv's scores fall with the distance, so that choosing by chunk, head or value makes a difference.
        tree[method.holds] = {"name": "snapkv", "window_size": 4}
        if method.holds == "press":
            tree[method.holds]["compression_ratio"] = 0.5
    tree = {field: value for field, value in tree.items() if value is not None}
    return specs.text_of(specs.resolved_tree(tree))


@pytest.mark.parametrize("name", [name for name in specs.methods() if name != "none"])
def test_every_method_acts_on_these_prompts(name: str) -> None:
    """Check that settings suit short prompts: with too large ones every property would hold."""
    case = Case(ALONE[name] if name in ALONE else settings_of(name), rows="one", turns="2")
    pressed, stock = (talk(case, tree) for tree in (specs.tree_of(case.spec), None))
    assert not all(
        torch.allclose(a.logits, b.logits, atol=1e-3) for a, b in zip(pressed.turns, stock.turns, strict=True)
    )


LOST = (
    "family=reference dtype=float32 rows=one check=repeat seed=388689 :: knorm:0.25 + frontier:bytes=30000",
    "rows=long check=alone seed=658768 :: cam(fastkvzip:0.5,window_size=4,window_ratio=0.1,gates={gates}):"
    "compression_interval=5,target_size=14",
    "family=qwen2 rows=even check=repeat seed=21445 :: attention_matching:budget=30,tokens=32,ridge=1.0 + "
    "think:key_channel_compression_ratio=0.5,window_size=8",
    "family=reference rows=one turns=long check=repeat seed=643477 :: block(keydiff:budget=18):block_size=5 + "
    "gear_l:group_size=8,backbone=kcvt,buffer_length=4,residual_length=8",
    "rows=one check=beside seed=220968 :: decoding(knorm:0.5):compression_interval=3,target_size=20",
    "family=reference rows=one check=repeat seed=156008 :: budgeted(kvzip:chunk_size=8,repeat_prompt=,reads=chunk):bytes=30000",
)


@pytest.mark.parametrize(
    "text", LOST, ids=["refit", "rewrite", "keys that outweigh", "old tables", "chunks", "another dtype"]
)
def test_cases_that_once_failed(text: str) -> None:
    """Layers that lose all their pairs, keys that a codec decodes badly, bytes of replaced tables, chunks that are turns,
    a model in another dtype than its configuration.
    """
    assert run(Case.parse(text)) == []


def test_few_cases_are_refused() -> None:
    """Check that few presses refuse their case before any work, as such a case tests nothing."""
    words = []
    for case in ci_cases():
        with contextlib.suppress(RuntimeError):  # raised by the case itself
            words += [f"{case}: {message}" for message in [refused(case)] if message]
    assert len(words) <= COUNT // 20, "\n".join(words)


def test_values_of_every_dimension_meet() -> None:
    named: dict[str, list[Any]] = {"family": list(FAMILIES), "dtype": list(DTYPES)}
    named |= {name: dimensions()[name] for name in ("rows", "chunk", "turns", "beams", "check")}
    impossible = {("rows", "one", "check", "alone"), ("chunk", 0, "check", "chunks"), ("turns", "1", "check", "copy")}
    for (first, ones), (second, twos) in itertools.combinations(named.items(), 2):
        met = {(getattr(case, first), getattr(case, second)) for case in ci_cases()}
        missing = {(first, a, second, b) for a, b in set(itertools.product(ones, twos)) - met}
        assert missing <= impossible


def test_a_case_is_read_back_and_drawn_again() -> None:
    for case in ci_cases()[::20]:
        assert Case.parse(str(case)) == case
    assert list(itertools.islice(random_cases(5), 3)) == list(itertools.islice(random_cases(5), 3))
    assert Case.parse("knorm:0.5") == Case("knorm:0.5")


def test_a_fault_is_found_named_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Score the keys of a row with the values of its neighbour, as a careless scorer would; the fault must be found."""
    scores = kvpress.KnormPress.scores

    def careless(self: Any, view: Any) -> torch.Tensor:
        rows = scores(self, view)
        return rows if len(rows) == 1 else rows.roll(1, dims=2)

    case = Case("adakv(knorm:0.5)", "qwen3", rows="even", turns="2", check="alone")
    assert run(case) == []
    monkeypatch.setattr(kvpress.KnormPress, "scores", careless)
    (fault,) = run(case)
    assert fault.kind == "alone"
    small = shrunk(case, fault.kind)
    assert small == dataclasses.replace(case, spec="knorm:compression_ratio=0.5", family="llama", turns="1")
    assert f"python -m tests.fuzz '{small}'" in report(small, fault)


def test_a_fault_of_an_operator_is_no_rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let an operator read with queries of the neighbour, which is right for one row, and where pairs are decoded."""
    decode_parts = kernels.decode_parts

    def careless(queries: torch.Tensor, *arguments: Any) -> Any:
        return decode_parts(queries if len(queries) == 2 else queries.roll(2, dims=0), *arguments)

    case = Case("kivi:bits=4,group_size=8,residual_length=8", rows="even", check="alone")
    assert run(case) == []
    monkeypatch.setattr(kernels, "decode_parts", careless)
    (fault,) = run(case)
    assert fault.kind == "alone"
