# SPDX-License-Identifier: Apache-2.0
"""Every subset has its form of question, and categories are averaged when all of them ran."""

from __future__ import annotations

import pytest
from kvpress_eval.tasks.longbench.subsets import CATEGORIES, EVEN, FORMS, averages

WITHOUT_INPUT = {"gov_report", "multi_news", "vcsum", "passage_count", "lcc"}


def test_every_subset_has_a_form() -> None:
    assert len(FORMS) == 21
    assert len(EVEN) == 13
    assert set(EVEN) < set(FORMS)
    for name, form in FORMS.items():
        assert form.template.count("{context}") == 1
        assert form.before + "{context}" + form.after == form.template
        assert form.after.count("{input}") == (name not in WITHOUT_INPUT)
        assert "{" not in form.after.format(input="asked")
    listed = {subset for categories in CATEGORIES.values() for subsets in categories.values() for subset in subsets}
    assert listed == set(FORMS)


@pytest.mark.parametrize(
    ("subset", "phrases"),
    [
        ("qasper", ('"yes"', '"no"', '"unanswerable"')),
        ("hotpotqa", ("the answer alone",)),
        ("multifieldqa_zh", ("只写答案",)),
        ("trec", ("the name of the type alone",)),
        ("lsht", ("只写类别名称",)),
        ("passage_count", ("the number alone",)),
        ("passage_retrieval_en", ('"Paragraph 12"',)),
        ("passage_retrieval_zh", ("段落12",)),
    ],
)
def test_prompts_name_the_form_that_the_metric_needs(subset: str, phrases: tuple[str, ...]) -> None:
    assert all(words in FORMS[subset].template for words in phrases)


def test_categories_average_complete_subsets() -> None:
    scores: dict[str, float | None] = {"longbench:lcc": 0.2, "longbench:repobench-p": 0.4, "longbench:qasper": 0.5}
    assert averages(scores) == {"longbench en code": pytest.approx(0.3), "longbench zh code": pytest.approx(0.3)}
    all_scores = {f"longbench:{subset}": 0.5 for subset in FORMS} | scores
    category_averages = averages(all_scores)
    assert len(category_averages) == 14
    # Six categories weigh the same, however many subsets they have.
    assert category_averages["longbench en"] == pytest.approx((5 * 0.5 + 0.3) / 6)
    assert averages(all_scores | {"longbench:trec": None})["longbench en"] is None
    assert averages({"vt": 1.0}) == {}
