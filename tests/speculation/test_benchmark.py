# SPDX-License-Identifier: Apache-2.0
"""The benchmark measures every draft on a tiny model, with plausible figures."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import speculate


def test_every_draft_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "found.json"
    few = {name: speculate.drafts(200)[name] for name in ("kivi:bits=4", "chunks, 1/16")}
    monkeypatch.setattr(speculate, "drafts", lambda length: few)
    speculate.main([
        "--random", "--length", "200", "--layers", "2", "--hidden", "256", "--tokens", "8", "--rounds", "1", "--out", str(out),
    ])  # fmt: skip
    rows = json.loads(out.read_text())["rows"]
    assert [row["draft"] for row in rows] == [*few, "partial verification"]
    for row in rows:
        assert row["tokens"] == 8
        assert 1 <= row["tokens_per_round"] <= 5
        assert row["seconds"] > 0
        assert row["plain_seconds"] > 0
        assert row["target_bytes"] >= 200 * 2 * 2 * 64 * 2


def test_only_named_drafts_are_measured_and_plain_decoding_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, timed = tmp_path / "found.json", []
    few = {name: speculate.drafts(100)[name] for name in ("kivi:bits=4", "chunks, 1/16", "streaming_llm:0.9")}
    monkeypatch.setattr(speculate, "drafts", lambda length: few)
    plain = speculate.plain
    monkeypatch.setattr(speculate, "plain", lambda *arguments: timed.append(1) or plain(*arguments))
    options = ["--random", "--length", "100", "--layers", "1", "--hidden", "256", "--tokens", "3", "--rounds", "1"]
    speculate.main([*options, "--drafts", "streaming_llm:0.9", "kivi:bits=4", "--out", str(out)])
    assert [row["draft"] for row in json.loads(out.read_text())["rows"]] == ["kivi:bits=4", "streaming_llm:0.9"]
    assert len(timed) == 1
    with pytest.raises(ValueError, match=r"drafts must be some of .*'partial verification', got 'kivi'"):
        speculate.main([*options, "--drafts", "kivi"])
