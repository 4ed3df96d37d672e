# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.report.page import SHADES, kept_view
from kvpress_eval.report.show import show, to_html
from kvpress_eval.run.kept import MOST_TOKENS, kept_of, tokens_of
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase

import kvpress
from tests.eval.commands import invoke

TEXT = "The code for paint is 8392. A school and a valley falls slowly. The rough shadow travels within the king."


def bits(marks: str, tokens: int) -> list[int]:
    return [int(bit) for digit in marks for bit in f"{int(digit, 16):04b}"][:tokens]


@pytest.mark.parametrize("spec", ["none", "adakv(snapkv:0.5,window_size=4)", "kivi:bits=4,residual_length=0"])
def test_marks_are_the_positions_that_are_stored(spec: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(kvpress.reference_path())
    ids = torch.arange(5, 54)[None]
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), kvpress.get_press(spec)(model):
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(ids, attention_mask=mask, position_ids=positions, past_key_values=cache)
    kept = kept_of(cache, 42)
    for layer, (shares, heads) in enumerate(zip(kept["budgets"], kept["heads"], strict=True)):
        for head, (share, marks) in enumerate(zip(shares, heads, strict=True)):
            stored = kvpress.kept_positions(cache)[layer][0][head].tolist()
            assert bits(marks, 42) == [int(column in stored) for column in range(7, 49)]
            assert share == pytest.approx(sum(bits(marks, 42)) / 42, abs=1e-4)


def test_long_texts_have_budgets_only() -> None:
    keys = torch.zeros(1, 2, MOST_TOKENS + 4, 1)
    cache = DynamicCache()
    cache.update(keys, keys, 0)
    cache.layers.append(SimpleNamespace())  # type: ignore[arg-type]  # one without pairs
    assert kept_of(cache, MOST_TOKENS + 4) == {"budgets": [[1.0, 1.0], []], "heads": []}
    view = kept_view(kept_of(cache, MOST_TOKENS + 4))
    assert (view["width"], view["pieces"]) == (2, [])


def test_tokens_join_to_the_text(
    byte_tokenizer: PreTrainedTokenizerBase, reference_tokenizer: PreTrainedTokenizerBase
) -> None:
    text = "The café is open.\n Is it?"
    for tokenizer in (byte_tokenizer, reference_tokenizer):
        ids = tokenizer(text)["input_ids"]
        view = tokens_of(tokenizer, ids, text, [[4, 8]])
        assert len(view["tokens"]) == len(ids)
        assert "".join(view["tokens"]) == text
        assert "caf" in "".join(view["tokens"][number] for number in view["answer"])
        assert "open" not in "".join(view["tokens"][number] for number in view["answer"])


def test_tokens_of_a_tokenizer_without_offsets() -> None:
    slow: Any = SimpleNamespace(is_fast=False, decode=lambda ids: f"<{ids[0]}>")
    assert tokens_of(slow, [3, 4], "any") == {"tokens": ["<3>", "<4>"], "answer": []}


def test_shades_count_the_heads() -> None:
    kept = {
        "budgets": [[1.0, 0.2], [0.4, 0.0]],
        "heads": [["f8", "40"], ["c0", "00"]],
        "tokens": list("abcde"),
        "answer": [1],
    }
    view = kept_view(kept)
    expected = [
        (letter, num_heads * SHADES // 4, letter == "b")
        for letter, num_heads in zip("abcde", (2, 3, 1, 1, 1), strict=True)
    ]
    assert view["pieces"] == expected
    assert [head["tokens"] for head in view["layers"][0]] == ["f8", "40"]


def test_a_page_describes_each_press(tmp_path: Path) -> None:
    config = RunConfig(
        presses=("none", "random:0.5", "decoding(knorm:0.5)", "kivi:bits=4,residual_length=0", "quest:budget=16"),
        lengths=(16,),
        threads=1,
    )
    shown, record = show(config, TEXT, None)
    notes = {item.press: " ".join(item.notes) for item in shown}
    assert notes["none"] == "keeps everything"
    assert "evicts tokens" in notes["random:0.5"]
    assert "while tokens are generated" in notes["decoding(knorm:0.5)"]
    assert "fewer bits" in notes["kivi:bits=4,residual_length=0"]
    assert "chosen anew" in notes["quest:budget=16"]
    text = to_html(shown, record, "<b>name</b>")
    assert "<b>name" not in text
    assert text.count('<section id="press-') == 5
    assert text.count("<script") == 1


def test_only_the_first_tokens() -> None:
    config = RunConfig(presses=("none",), lengths=(16,), threads=1)
    ((full_text,), _), ((first_tokens,), _) = (show(config, TEXT, tokens) for tokens in (None, 9))
    assert first_tokens.kept["tokens"] == full_text.kept["tokens"][:9]
    assert first_tokens.memory.seen < full_text.memory.seen
    with pytest.raises(DataError, match="--tokens 4096 takes the first"):
        show(config, "The king waits. " * 2000, None)


def test_the_command(tmp_path: Path) -> None:
    source, out = tmp_path / "text.txt", tmp_path / "made" / "show.html"
    source.write_text(TEXT)
    code, output = invoke("show", "--press", "random:0.5", "--text", str(source), "--out", str(out), "--threads", "1")
    assert code == 0, output
    assert "random:0.5: evicts tokens of the prompt" in output
    assert all(f">{word}<" in out.read_text() for word in (" paint", " valley"))
    code, _ = invoke("show", "--press", "none", "--text", "-", "--out", str(out), input=TEXT)
    assert code == 0
    assert "standard input" in out.read_text()


@pytest.mark.parametrize(
    ("press", "text", "code", "message"),
    [
        ("snapkw:0.5", "words", 2, "snapkv"),
        ("none", None, 3, "cannot read"),
        ("none", " \n", 3, "the text is empty"),
        ("none", "\udcff", 3, "cannot read"),
    ],
)
def test_mistakes(press: str, text: str | None, code: int, message: str, tmp_path: Path) -> None:
    source = tmp_path / "text.txt"
    if text is not None:
        source.write_bytes(text.encode("utf-8", "surrogateescape"))
    got, output = invoke("show", "--press", press, "--text", str(source), "--out", str(tmp_path / "show.html"))
    assert (got, message in output) == (code, True), output


def test_out_must_be_a_file(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    code, output = invoke("show", "--press", "none", "--text", str(tmp_path / "text.txt"), "--out", str(tmp_path))
    assert (code, "is a folder" in output) == (4, True)
