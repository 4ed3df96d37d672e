# SPDX-License-Identifier: Apache-2.0
"""Reasons why some presses are worse than random on needles: how much of the answer each press keeps."""

from __future__ import annotations

import torch
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.tasks.catalogue import expand_tasks
from transformers import DynamicCache

import kvpress
from tests.eval.engines import bundled_model

PRESSES = ("random", "qfilter", "triattention", "keydiff")


def kept_of_answers(press: str) -> float:
    """Return the share of the answers' pairs that a press keeps when it keeps half of all pairs."""
    model, tokenizer = bundled_model().model, bundled_model().tokenizer
    (source,) = expand_tasks(RunConfig(tasks=("niah_single",), lengths=(512,), samples=6))
    shares = []
    for sample in source.make(tokenizer):
        begin = sample.context.index(sample.query.answers[0])
        end = begin + len(sample.query.answers[0])
        read = tokenizer(sample.context, return_offsets_mapping=True)
        answer = {place for place, (a, b) in enumerate(read["offset_mapping"]) if a < end and b > begin}
        cache = DynamicCache(config=model.config)
        with kvpress.get_press(f"{press}:0.5")(model):
            model(torch.tensor([read["input_ids"]]), past_key_values=cache)
        heads = [head for layer in kvpress.kept_positions(cache) for head in layer[0]]
        shares += [len(answer & set(head.tolist())) / len(answer) for head in heads]
    return sum(shares) / len(shares)


def test_average_queries_do_not_look_at_the_answer() -> None:
    kept = {press: kept_of_answers(press) for press in PRESSES}
    assert 0.4 < kept["random"] < 0.6
    assert max(kept["qfilter"], kept["triattention"]) < kept["random"] - 0.05
    assert kept["keydiff"] > kept["random"] + 0.2
