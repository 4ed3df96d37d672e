# SPDX-License-Identifier: Apache-2.0
"""Questions about one passage among others, from SQuAD and HotpotQA."""

from __future__ import annotations

from itertools import cycle

from kvpress_eval.tasks.data_files import HubFile
from kvpress_eval.tasks.questions import PublishedQuestions, hotpot, squad
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import SHORT, Scene, Task


def answer_question(scene: Scene) -> tuple[str, Spans, Query]:
    """Build a context of passages with the answer, similar passages and others; each sample has another question."""
    if scene.questions is None:
        raise ValueError("this task needs questions")
    language, room = scene.prose, scene.length - scene.total("")
    for question in scene.questions.shuffled(scene.seed, scene.index):
        targets = [language.passage(text) for text in question.passages]
        if sum(map(scene.cost, targets)) <= room:
            break
    similar, room_for_similar = [], (room - sum(map(scene.cost, targets))) // 2
    for text in scene.rng.sample(question.near, len(question.near)):
        room_for_similar -= scene.cost(language.passage(text))
        if room_for_similar < 0:
            break
        similar.append(language.passage(text))
    of_question = {*question.passages, *question.near}
    others = [text for text in scene.questions.passages if text not in of_question]
    scene.rng.shuffle(others)
    filler = map(language.passage, cycle(others))
    context, spans = scene.weave([[text] for text in targets], [[text] for text in similar], filler)
    return context, spans, language.ask_question(question.text, question.answers)


SQUAD = PublishedQuestions(
    HubFile(
        ("squad.json", "squad.jsonl", "squad.parquet", "dev-v2.0.json"),
        "rows with title, context, question and answers, or the published JSON file",
        "rajpurkar/squad_v2",
        "3ffb306f725f7d2ce8394bc1873b24868140c412",
        "squad_v2/validation-00000-of-00001.parquet",
        "0560174ab095c5ac0a8c8dc8da05f1625453c45a77e4ce9cabc6947ddfdd24cb",
    ),
    squad,
)
HOTPOTQA = PublishedQuestions(
    HubFile(
        ("hotpotqa.json", "hotpotqa.jsonl", "hotpotqa.parquet", "hotpot_dev_distractor_v1.json"),
        "rows with question, answer, context and supporting_facts",
        "hotpotqa/hotpot_qa",
        "1908d6afbbead072334abe2965f91bd2709910ab",
        "distractor/validation-00000-of-00001.parquet",
        "c20b638ca82b21d04fe12e14ff417ad05153d4d215a65de54497fca4e972f7c6",
    ),
    hotpot,
)
TASKS = {
    "qa_1": Task(answer_question, SHORT, questions=SQUAD),
    "qa_2": Task(answer_question, SHORT, questions=HOTPOTQA),
}
