# SPDX-License-Identifier: Apache-2.0
"""Tasks use words that the tokenizer of the model can spell."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.language import in_words_of
from kvpress_eval.run.runner import prepare
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

import kvpress

ELSEWHERE = RunConfig(model="some/folder")


def test_a_vocabulary_of_the_reference_model_gets_its_words(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    assert in_words_of(ELSEWHERE, reference_tokenizer).wording == "reference"


def test_a_tokenizer_that_spells_everything_gets_english(byte_tokenizer: PreTrainedTokenizerBase) -> None:
    assert in_words_of(ELSEWHERE, byte_tokenizer).wording == "english"


def test_configured_words_stay(reference_tokenizer: PreTrainedTokenizerBase) -> None:
    config = RunConfig(model="some/folder", language="english")
    assert in_words_of(config, reference_tokenizer) is config
    undecided = RunConfig(model="some/folder", lengths=(64,), samples=3)
    resolved = in_words_of(undecided, reference_tokenizer)
    assert resolved.model_fields_set == undecided.model_fields_set | {"language"}
    assert resolved == undecided.model_copy(update={"language": "reference"})


def test_a_folder_with_the_reference_vocabulary_uses_its_words(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(kvpress.reference_path(), tmp_path / "model"))
    fields = {"model": str(folder), "tasks": ("vt",), "lengths": (64,), "samples": 1, "out": tmp_path / "run"}
    config, sources, _ = prepare(RunConfig(**fields))
    assert config.language == "reference"
    assert {source.identity["language"] for source in sources} == {"reference"}
    with pytest.raises(ConfigError, match="not trained on 'kv_retrieval'"):
        prepare(RunConfig(**{**fields, "tasks": ("kv_retrieval",)}))


def test_a_tokenizer_without_letters_is_refused(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "Yes": 1}, unk_token="<unk>"))  # noqa: S106 - no password
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="<unk>")  # noqa: S106
    with pytest.raises(ConfigError, match="spells neither English nor the words of the reference model"):
        in_words_of(ELSEWHERE, tokenizer)
    file_only = RunConfig(model="some/folder", tasks=(f"file:{tmp_path}/mine.jsonl",))
    assert in_words_of(file_only, tokenizer) is file_only
