# SPDX-License-Identifier: Apache-2.0
"""The published wording of the questions is used where its files are, and checked."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from kvpress_eval.common.errors import DataError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.tasks.longbench.subsets import CHOICE, FORMS
from kvpress_eval.tasks.sample import score
from transformers import PreTrainedTokenizerBase

from tests.eval.jsonl import write_lines
from tests.eval.tasks.longbench.rows import cell_ids, expand, only, question


def published(folder: Path, **templates: Any) -> None:
    (folder / "dataset2prompt.json").write_text(json.dumps(templates), encoding="utf-8")


VERSION_2 = "In {x}: <$DOC$> what is $Q$ of $C_A$, $C_B$, $C_C$ and $C_D$? {}\n"


def test_the_published_wording_is_used_where_it_is(data: Path, byte_tokenizer: PreTrainedTokenizerBase) -> None:
    context = "{braces} stay"
    write_lines(data / "trec.jsonl", question(0, context=context, input="{input} too"))
    write_lines(data / "trec_e.jsonl", question(0, context=context, input="{input} too"))
    published(data, trec="Types, 类:\n{context}\n=> {input}!")
    for name in ("longbench:trec", "longbench:trec_e", "longbench:trec_e:0-4k"):
        (sample,) = only(name, data, byte_tokenizer)
        assert sample.context == "Types, 类:\n" + context
        assert sample.query.question == "\n=> {input} too!"
        assert not sample.query.chat
        assert score(sample.query, "Number\nQuestion") == 1
    assert only("longbench-v2:hard", data, byte_tokenizer)[0].context.startswith(CHOICE.before)


def test_the_published_wording_of_version_2_has_its_own_marks(
    data: Path, byte_tokenizer: PreTrainedTokenizerBase
) -> None:
    published(data)
    (data / "longbench-v2-prompt.txt").write_text(VERSION_2)
    sample = only("longbench-v2:hard", data, byte_tokenizer)[0]
    assert sample.context == "In {x}: <def f(): ..."
    assert sample.query.question == "> what is Which? of a, b, c and d? {}\n"


def test_a_cell_is_named_by_the_wording(data: Path) -> None:
    def wording(name: str) -> str:
        (task,) = expand(name, data)
        return str(task.identity["wording"])

    config = RunConfig(tasks=("longbench:trec", "longbench-v2"), lengths=(512,), data_dir=data)
    assert (wording("longbench:trec"), wording("longbench-v2")) == ("kvpress", "kvpress")
    ours = cell_ids(config)
    # The cell names the file of the wording, even where its words are the same.
    published(data, trec=FORMS["trec"].template)
    (data / "longbench-v2-prompt.txt").write_text(VERSION_2)
    theirs = cell_ids(config)
    assert not set(ours) & set(theirs)
    for name, file in (("longbench:trec", "dataset2prompt.json"), ("longbench-v2", "longbench-v2-prompt.txt")):
        assert wording(name) == f"{file} sha256:{hashlib.sha256((data / file).read_bytes()).hexdigest()}"
    published(data, trec="Now {context} {input}")
    assert cell_ids(config)[0] != theirs[0]
    assert cell_ids(config)[1] == theirs[1]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "trec: not JSON"),
        ("[]", "no template for trec: "),
        ("{}", "no template for trec: "),
        ('{"trec": 1}', "no template for trec: "),
        ('{"trec": "{context}"}', r"trec: the template lacks \{input\}; it takes \{context\}, \{input\}, each once"),
        ('{"trec": "{input}"}', r"trec: the template lacks \{context\};"),
        ('{"trec": "{context} {input!r}"}', r"trec: the template lacks \{input\};"),
        ('{"trec": "{input} {context}"}', r"trec: the template has \{input\}, \{context\};"),
        ('{"trec": "{context} {context} {input}"}', r"trec: the template has \{context\}, \{context\}, \{input\};"),
        ('{"trec": "{context} {input} {length}"}', r"trec: the template has .*\{length\};"),
        ('{"trec": "{context} {input} {"}', "trec: not a template "),
    ],
)
def test_a_damaged_wording_is_named(data: Path, text: str, problem: str) -> None:
    (data / "dataset2prompt.json").write_text(text)
    with pytest.raises(DataError, match=r"dataset2prompt\.json: " + problem):
        expand("longbench:trec", data)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (VERSION_2.replace("$C_B$", "$C_E$").encode(), r"the template lacks \$C_B\$; it takes \$DOC\$, \$Q\$, "),
        (b"", r"the template lacks \$DOC\$, \$Q\$, \$C_A\$, \$C_B\$, \$C_C\$, \$C_D\$;"),
        (VERSION_2.replace("$C_A$", "$C_B$ $C_A$").encode(), r"the template has .*\$C_B\$, \$C_A\$, \$C_B\$"),
        (b"\xff", "not UTF-8"),
    ],
)
def test_a_damaged_wording_of_version_2_is_named(data: Path, text: bytes, problem: str) -> None:
    (data / "longbench-v2-prompt.txt").write_bytes(text)
    with pytest.raises(DataError, match=r"longbench-v2-prompt\.txt: longbench-v2: " + problem):
        expand("longbench-v2", data)


def test_a_wording_that_cannot_be_read_is_refused(data: Path) -> None:
    (data / "dataset2prompt.json").mkdir()
    with pytest.raises(DataError, match=r"cannot read .*dataset2prompt\.json"):
        expand("longbench:trec", data)
