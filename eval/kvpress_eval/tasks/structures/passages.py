# SPDX-License-Identifier: Apache-2.0
"""Questions about one passage among others, as SQuAD and HotpotQA have them."""

from __future__ import annotations

from itertools import cycle

from kvpress_eval.tasks.hub import HubFile
from kvpress_eval.tasks.questions import Published, hotpot, squad
from kvpress_eval.tasks.sample import Query, Spans
from kvpress_eval.tasks.scene import SHORT, Scene, Task


def answer_question(scene: Scene) -> tuple[str, Spans, Query]:
    """The passages that answer a question among others, the ones most like them first; samples differ in the question."""
    if scene.questions is None:
        raise ValueError("this task needs questions")
    language, room = scene.prose, scene.length - scene.total("")
    for question in scene.questions.shuffled(scene.seed, scene.index):
        asked = [language.passage(text) for text in question.passages]
        if sum(map(scene.cost, asked)) <= room:
            break
    near, left = [], (room - sum(map(scene.cost, asked))) // 2
    for text in scene.rng.sample(question.near, len(question.near)):
        left -= scene.cost(language.passage(text))
        if left < 0:
            break
        near.append(language.passage(text))
    own = {*question.passages, *question.near}
    others = [text for text in scene.questions.passages if text not in own]
    scene.rng.shuffle(others)
    filler = map(language.passage, cycle(others))
    context, spans = scene.weave([[text] for text in asked], [[text] for text in near], filler)
    return context, spans, language.ask_question(question.text, question.answers)


SQUAD = Published(
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
HOTPOTQA = Published(
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
