# SPDX-License-Identifier: Apache-2.0
"""Choice of the next token of each row, by the settings of its request alone."""

from __future__ import annotations

import torch
from torch import Tensor

from kvpress_eval.serve.requests import GenerationJob


def next_token(logits: Tensor, job: GenerationJob) -> tuple[int, float | None, list[tuple[int, float]]]:
    """Return the next token of a request for its `logits [V]`, its log-probability, and the most likely tokens with theirs.

    Sampled tokens are drawn by the generator of the request, so that other requests of the batch do not change them. The
    grammar of the request moves behind the token. Log-probabilities are those before the grammar.
    """
    logits = logits.float()
    allowed = logits if job.grammar is None else job.grammar.masked(logits)
    token = int(allowed.argmax()) if job.sampling.temperature == 0 else _drawn(allowed, job)
    if not bool(allowed[token].isfinite()):
        raise FloatingPointError(f"the logits of the next token are not finite: {float(allowed[token])}")
    if job.grammar is not None:
        job.grammar.accept(token)
    if job.sampling.top_logprobs is None:
        return token, None, []
    logprobs = logits.log_softmax(dim=-1)
    best = logprobs.topk(min(job.sampling.top_logprobs, len(logprobs)))
    top = list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
    return token, float(logprobs[token]), top


def _drawn(logits: Tensor, job: GenerationJob) -> int:
    if job.generator is None:
        job.generator = torch.Generator()
        if job.sampling.seed is None:
            job.generator.seed()
        else:
            job.generator.manual_seed(job.sampling.seed)
    # The largest logit becomes 0, which no temperature makes infinite.
    scaled = (logits - logits.max()).double() / job.sampling.temperature
    probabilities = scaled.float().softmax(dim=-1).cpu()
    if job.sampling.top_p < 1:
        ordered, order = probabilities.sort(descending=True, stable=True)
        is_outside = ordered.cumsum(dim=-1) - ordered >= job.sampling.top_p
        is_outside[0] = False  # the most likely token stays for any `top_p`
        probabilities = probabilities.index_fill(0, order[is_outside], 0.0)
    return int(torch.multinomial(probabilities, 1, generator=job.generator))
