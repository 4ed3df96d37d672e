# SPDX-License-Identifier: Apache-2.0
"""LooGLE (Li et al., 2023, arXiv:2311.04939) as tasks: `loogle:SUBSET`."""

from __future__ import annotations

import ast
import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from kvpress_eval.tasks.data_files import HubFile
from kvpress_eval.tasks.documents import DocumentQuestion, PublishedDocuments, Score, sources_of, text_of
from kvpress_eval.tasks.longbench.metrics import rouge_l_parts
from kvpress_eval.tasks.longbench.subsets import CONTEXT
from kvpress_eval.tasks.source import Kind, Source, TaskSettings

_MOST = 20_000
"""Maximum characters of an answer that is parsed as a dictionary."""


def recall(text: str, answers: Sequence[str]) -> float:
    """Return the recall of ROUGE-L, as the package `rouge` 1.0.1 defines it; an empty answer counts as the word "None"."""
    return rouge_l_parts(text or "None", answers[0])[1]


def cloze(text: str, answers: Sequence[str]) -> float:
    """Return the share of masked entities that are exactly right; 0 if the text is not a JSON or Python dictionary.

    Differs from the published code, which evaluates an answer as Python. Here it is parsed as a literal, so that an answer
    with a call or a sum is not a dictionary.
    """
    right = json.loads(answers[0])
    answer = _dictionary(text)
    return sum(name in answer and answer[name] == value for name, value in right.items()) / len(right)


def _dictionary(text: str) -> dict[Any, Any]:
    text = text.strip()
    for read in (ast.literal_eval, json.loads):
        try:
            value = read(text) if len(text) <= _MOST else None
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            continue
        if isinstance(value, dict):
            return value
    return {}


_QUESTION = "\nQuestion: {question}\nAnswer:"
_FORMS: Mapping[str, tuple[str, str, Score, int]] = {
    "shortdep_qa": ("Answer a question about this text.\n", _QUESTION, recall, 300),
    "longdep_qa": ("Answer a question about this text.\n", _QUESTION, recall, 500),
    "longdep_summarization": ("Summarize this paper.\n", "\nSummary:", recall, 500),
    "shortdep_cloze": (
        "In a passage about this text, masks such as <mask-0> stand for persons, places or organisations, the same mask for "
        "the same one. Reply with a JSON object from masks to names, and nothing else.\n",
        _QUESTION,
        cloze,
        50,
    ),
}


def _parse(before: str, after: str, number: str, row: Any) -> list[DocumentQuestion]:
    """Return the questions of a row in the form of the repository (`input`, `qa_pairs`) or of the hub (`context`)."""
    context = before + text_of(row, "input", "context")
    if "qa_pairs" not in row:
        pairs = [{"Q": row.get("question") or "", "A": row["answer"]}]
    elif row["qa_pairs"] == "none":
        pairs = [{"Q": "", "A": row["output"]}]
    else:
        pairs = row["qa_pairs"] if isinstance(row["qa_pairs"], list) else ast.literal_eval(row["qa_pairs"])
    document = str(row.get("doc_id", number))
    return [
        DocumentQuestion(
            str(int(number) + at), document, context, after.format(question=pair["Q"]), (_answer(pair["A"]),)
        )
        for at, pair in enumerate(pairs)
    ]


def _answer(value: Any) -> str:
    """Return an answer as text; the answer of a cloze as JSON."""
    if isinstance(value, str) and not value.strip().startswith("{"):
        return value
    masks = value if isinstance(value, dict) else ast.literal_eval(value)
    if not isinstance(masks, dict) or not masks:
        raise TypeError("an answer must be text, or a dictionary of masks")
    return json.dumps(masks)


TASKS = {
    f"loogle:{subset}": PublishedDocuments(
        f"loogle:{subset}",
        HubFile(
            (f"{subset}.jsonl", f"{subset}.json"),
            "JSON objects with input, qa_pairs and output, or with context, question, answer and doc_id",
            "bigai-nlco/LooGLE",
            None,
            f"{subset}",
        ),
        before + CONTEXT + after,
        partial(_parse, before, after),
        score,
        room,
    )
    for subset, (before, after, score, room) in _FORMS.items()
}
ALL = "loogle:all"


def _expand(names: Sequence[str], request: TaskSettings) -> list[Source]:
    chosen = [task for name in names for task in (TASKS.values() if name == ALL else [TASKS[name]])]
    return [source for task in chosen for source in sources_of(task, request)]


KIND = Kind([*TASKS, ALL], _expand)
