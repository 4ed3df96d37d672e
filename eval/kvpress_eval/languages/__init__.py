"""Languages: how the facts and questions of a task are worded."""

from __future__ import annotations

from kvpress_eval.languages.base import Fact, Language
from kvpress_eval.languages.english import EnglishLanguage
from kvpress_eval.languages.reference import ReferenceLanguage

LANGUAGES: dict[str, Language] = {language.name: language for language in (ReferenceLanguage(), EnglishLanguage())}

__all__ = ["LANGUAGES", "Fact", "Language"]
