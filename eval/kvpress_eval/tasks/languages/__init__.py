# SPDX-License-Identifier: Apache-2.0
"""Languages: how the facts and questions of a task are worded."""

from __future__ import annotations

from kvpress_eval.tasks.languages.base import Fact, Language
from kvpress_eval.tasks.languages.english import EnglishLanguage
from kvpress_eval.tasks.languages.reference import ReferenceLanguage

LANGUAGES: dict[str, Language] = {language.name: language for language in (ReferenceLanguage(), EnglishLanguage())}

__all__ = ["LANGUAGES", "Fact", "Language"]
