# SPDX-License-Identifier: Apache-2.0
"""Subsets of LongBench: prompts, lengths of answers, and metrics.

The wording is ours; `wording.py` replaces it by the published wording if the user has its file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import fmean

from kvpress_eval.tasks.longbench import metrics

CONTEXT = "{context}"


@dataclass(frozen=True)
class PromptForm:
    """Prompt and metric of a subset."""

    template: str
    """Prompt with fields in braces, `{context}` among them."""
    metric: Callable[..., float]
    """Scores a text against one answer."""
    max_new_tokens: int
    """Maximum tokens of an answer."""
    chat: bool = True
    """Put the prompt into the model's chat template; few-shot and code prompts are continued without it."""
    first_line: bool = False
    """Score only the first line of an answer."""
    wording: str = "kvpress"
    """Origin of the template."""

    @property
    def before(self) -> str:
        """Prompt before the context."""
        return self.template.partition(CONTEXT)[0].format()

    @property
    def after(self) -> str:
        """Prompt after the context, with its fields in braces."""
        return self.template.partition(CONTEXT)[2]

    @property
    def needs_jieba(self) -> bool:
        """Whether the metric needs jieba, which separates Chinese words."""
        return self.metric in (metrics.f1_chinese, metrics.rouge_l_chinese)


def _template(task: str, heading: str, question: str) -> str:
    """Return a template with the task before the context and again after it."""
    return f"{task}\n\n{heading}\n{CONTEXT}\n\n{task}\n\n{question}"


_QUESTION = "Question: {input}\nAnswer:"
_QUESTION_CHINESE = "问题：{input}\n答案："
_PASSAGES = _template(
    "Find the answer to a question in the passages. Reply with the answer alone, without further words.",
    "Passages:",
    _QUESTION,
)

FORMS: Mapping[str, PromptForm] = {
    "narrativeqa": PromptForm(
        _template(
            "Answer a question about the story, which is a novel or the script of a film. Reply with a short phrase if one "
            "is enough, without an explanation.",
            "Story:",
            _QUESTION,
        ),
        metrics.f1,
        128,
    ),
    "qasper": PromptForm(
        _template(
            "Answer a question about the scientific article. Reply with a short phrase or one sentence if that is enough, "
            'without an explanation; to a yes/no question with "yes" or "no"; and with "unanswerable" if the article does '
            "not hold the answer.",
            "Article:",
            _QUESTION,
        ),
        metrics.f1,
        128,
    ),
    "multifieldqa_en": PromptForm(
        _template(
            "Answer a question about the text. Reply briefly, with the answer alone, without further words.",
            "Text:",
            _QUESTION,
        ),
        metrics.f1,
        64,
    ),
    "multifieldqa_zh": PromptForm(
        _template("请根据文本，用中文简短地回答一个问题。只写答案，不加别的内容。", "文本：", _QUESTION_CHINESE),
        metrics.f1_chinese,
        64,
    ),
    "hotpotqa": PromptForm(_PASSAGES, metrics.f1, 32),
    "2wikimqa": PromptForm(_PASSAGES, metrics.f1, 32),
    "musique": PromptForm(_PASSAGES, metrics.f1, 32),
    "dureader": PromptForm(
        _template("请阅读这些文章，根据其中的内容回答一个问题。", "文章：", _QUESTION_CHINESE),
        metrics.rouge_l_chinese,
        128,
    ),
    "gov_report": PromptForm(
        _template("Summarize the government report in about one page.", "Report:", "Summary:"), metrics.rouge_l, 512
    ),
    "qmsum": PromptForm(
        _template(
            "Respond to a question or an instruction about the meeting. Reply with one sentence or several.",
            "Transcript:",
            "Query: {input}\nAnswer:",
        ),
        metrics.rouge_l,
        512,
    ),
    "multi_news": PromptForm(
        _template("Summarize the news articles, all together, in about one page.", "Articles:", "Summary:"),
        metrics.rouge_l,
        512,
    ),
    "vcsum": PromptForm(_template("请用一段话概括这次会议的内容。", "记录：", "概括："), metrics.rouge_l_chinese, 512),
    "trec": PromptForm(
        "Name the type of the last question, as the examples do. Reply with the name of the type alone.\n\n"
        "{context}\n{input}",
        metrics.classification,
        64,
        chat=False,
        first_line=True,
    ),
    "triviaqa": PromptForm(
        "Answer the last question from its passage, as the examples do. Reply with the answer alone, without further "
        "words.\n\n{context}\n\n{input}",
        metrics.f1,
        32,
        chat=False,
        first_line=True,
    ),
    "samsum": PromptForm(
        "Summarize the last dialogue, as the examples do. Reply with a few short sentences.\n\n{context}\n\n{input}",
        metrics.rouge_l,
        128,
        chat=False,
        first_line=True,
    ),
    "lsht": PromptForm(
        "请仿照例子，写出最后一条新闻的类别。只写类别名称。\n\n{context}\n{input}",
        metrics.classification,
        64,
        chat=False,
        first_line=True,
    ),
    "passage_count": PromptForm(
        _template(
            "Some of the paragraphs are repeated. Count the different ones, each once. Reply with the number alone, in "
            "digits.",
            "Paragraphs:",
            "Answer:",
        ),
        metrics.count,
        32,
    ),
    "passage_retrieval_en": PromptForm(
        _template(
            'Find the paragraph that an abstract summarizes. Reply with its number alone, in the form "Paragraph 12".',
            "Paragraphs:",
            "Abstract: {input}\nAnswer:",
        ),
        metrics.retrieval,
        32,
    ),
    "passage_retrieval_zh": PromptForm(
        _template("请找出一则摘要所概括的段落。只写段落的编号，形式为“段落12”。", "段落：", "摘要：{input}\n答案："),
        metrics.retrieval,
        32,
    ),
    "lcc": PromptForm(
        "Write the next line of this code.\n\n{context}Next line:\n", metrics.code_similarity, 64, chat=False
    ),
    "repobench-p": PromptForm(
        "Write the next line of this code.\n\n{context}{input}Next line:\n", metrics.code_similarity, 64, chat=False
    ),
}
"""The 21 subsets of version 1."""

EVEN = (
    "qasper", "multifieldqa_en", "hotpotqa", "2wikimqa", "gov_report", "multi_news", "trec", "triviaqa", "samsum",
    "passage_count", "passage_retrieval_en", "lcc", "repobench-p",
)  # fmt: skip
"""The subsets that LongBench-E has as well, sampled evenly over three ranges of length."""

EVEN_RANGES = {"0-4k": range(4000), "4-8k": range(4000, 8000), "8k+": range(8000, 2**63)}
"""The ranges of LongBench-E, in words."""

CHOICE = PromptForm(
    _template(
        "Choose the right one of four answers to a question about the text. Reply with its letter, in the form "
        '"The correct answer is (letter)".',
        "Text:",
        "Question: {question}\n(A) {A}\n(B) {B}\n(C) {C}\n(D) {D}\nAnswer:",
    ),
    metrics.letter,
    128,
)
"""Version 2, without chain of thought."""

PARTS = {
    "domain": (
        "Single-Document QA",
        "Multi-Document QA",
        "Long In-context Learning",
        "Long-dialogue History Understanding",
        "Code Repository Understanding",
        "Long Structured Data Understanding",
    ),
    "difficulty": ("easy", "hard"),
    "length": ("short", "medium", "long"),
}
"""The fields by which version 2 is reported, and their values."""

CATEGORIES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "en": {
        "single-document QA": ("narrativeqa", "qasper", "multifieldqa_en"),
        "multi-document QA": ("hotpotqa", "2wikimqa", "musique"),
        "summarization": ("gov_report", "qmsum", "multi_news"),
        "few-shot": ("trec", "triviaqa", "samsum"),
        "synthetic": ("passage_count", "passage_retrieval_en"),
        "code": ("lcc", "repobench-p"),
    },
    "zh": {
        "single-document QA": ("multifieldqa_zh",),
        "multi-document QA": ("dureader",),
        "summarization": ("vcsum",),
        "few-shot": ("lsht",),
        "synthetic": ("passage_retrieval_zh",),
        "code": ("lcc", "repobench-p"),
    },
}
"""Categories in the tables of the paper, by language; code counts in both languages."""


def averages(scores: Mapping[str, float | None]) -> dict[str, float | None]:
    """Return the average of each category with all subsets, and of each language with all categories."""
    results: dict[str, float | None] = {}
    for language, categories in CATEGORIES.items():
        means = {}
        for category, subsets in categories.items():
            names = [f"longbench:{subset}" for subset in subsets]
            if all(name in scores for name in names):
                means[f"longbench {language} {category}"] = _mean([scores[name] for name in names])
        if len(means) == len(categories):
            results[f"longbench {language}"] = _mean(list(means.values()))
        results |= means
    return results


def _mean(values: list[float | None]) -> float | None:
    measured = [value for value in values if value is not None]
    return fmean(measured) if len(measured) == len(values) else None
