# SPDX-License-Identifier: Apache-2.0
"""Scores from the gradient of a model that repeats its prompt."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from kvpress.core.checks import Count
from kvpress.core.model import NOT_DIFFERENTIABLE, ModelFacts
from kvpress.core.recipe import Recipe
from kvpress.core.registry import Exemption, Refusal, register
from kvpress.observe.call import LayerCall
from kvpress.observe.passes import Pass
from kvpress.presses.criticalkv import check_outputs
from kvpress.presses.kvzip import KVzipPress, add_repeated_queries
from kvpress.presses.repetition import RepetitionScores

FIX = "use kvzip, or frontier with passes=2, which need no gradient"


@register(
    "kvgrad",
    "evict",
    "KVgrad, 2026, OpenReview:cg1wTCJjjk",
    example="kvgrad:0.5",
    cases=("kvgrad:0.5,layerwise=true,repeat_prompt=",),
    refuses=(Refusal("kvgrad:0.5", "there is no tokenizer beside the model and `repeat_prompt` is text"),),
    exempt=(
        Exemption(
            "pairs per layer",
            "layers share one budget; what is kept is tested against autograd on eager attention",
            "`layerwise=False`",
        ),
    ),
)
@dataclass
class KVgradPress(KVzipPress):
    """Keep the pairs that a repetition of the prompt depends on, by input times gradient; heads and layers compete.

    As with `KVzipPress`, the model reads the prompt again in chunks of `chunk_size` tokens behind an instruction. One backward
    pass for each chunk gives the gradient of the squared norm of the last hidden states x[i], before the final norm, at the
    output o[i] of each attention:

        phi            = sum over the tokens i of the pass of ||x[i]||^2
        score[b, h, t] = max over i and the query heads g of the GQA group of a[g, i, t] * ||W_o[g] v[t]|| * ||d phi / d o[i]||

    a is the softmax over the sinks, the pairs of the chunk and the pass itself, W_o[g] the output projection of query head g.
    Only the pass is differentiated: stored pairs and parameters are constants. `layerwise` gives every layer the same number
    of pairs, the first `n_sink` tokens always stay, and `repeat_prompt` and `tokenizer` are those of `KVzipPress`.

    A prompt costs three to four times its prefill. The graph of one chunk is in memory at a time: its activations in all
    layers. In a later turn, whose cache has sealed pairs already, the graph also has their attention weights. Smaller chunks
    need less memory, and more passes over the prompt. phi is divided by a power of two while it is differentiated, so that
    gradients of a float16 model stay in range; those that overflow all the same raise a FloatingPointError.

    Paper: KVgrad, 2026, https://openreview.net/forum?id=cg1wTCJjjk; formulas and defaults from NVIDIA kvpress 0.5.5.
    Differs from the paper: nothing in the scores; each row of a batch is scored on its own, and evicted pairs are freed.
    """

    chunk_size: Count = 512
    kvzip_plus_normalization: bool = field(init=False, default=False, repr=False)
    reads: Literal["prompt", "chunk"] = field(init=False, default="prompt", repr=False)

    def recipe(self, model: ModelFacts | None = None) -> Recipe:
        check_outputs(model)
        if model is not None and not model.differentiable:
            raise NotImplementedError(f"{model.name} {NOT_DIFFERENTIABLE}; {FIX}")
        return super().recipe(model)

    def parts(self, prefill: Pass) -> int:
        return 0  # one graph at a time is in memory

    def read_chunks(self, prefill: Pass, ids: Tensor, place: Tensor, scores: RepetitionScores, parts: int) -> None:
        calls: list[LayerCall] = []
        hidden = prefill.read_differentiably(ids, calls.append)
        outputs = [call.output if isinstance(call.output, Tensor) else call.output[0] for call in calls]
        with torch.inference_mode(False), torch.enable_grad():
            real = torch.arange(ids.shape[1]) < scores.text_lengths.clone()
            states = hidden.float()
            scale = _scale(states.detach())
            objective = (states * (scale * states) * real.to(hidden.device)[..., None]).sum()
            gradients = torch.autograd.grad(objective, outputs)
        finite = [gradient.isfinite().all().to(hidden.device) for gradient in gradients]
        if not bool(torch.stack(finite).all()):  # one wait for a GPU
            raise FloatingPointError(
                f"gradients overflow in {hidden.dtype}, although they are scaled, so that pairs would be scored by NaN: load "
                f"the model in bfloat16 or float32, or {FIX}"
            )
        for call, gradient in zip(calls, gradients, strict=True):
            detached = replace(call, queries=call.queries.detach())
            scores.take_in(detached, scale.to(gradient.device) / gradient.float().norm(dim=-1))
            add_repeated_queries(detached, place)


def _scale(hidden: Tensor) -> Tensor:
    """Return the power of two that brings the largest of the last hidden states, and of their gradients, to about 1.

    Products with it are exact. Residual streams have numbers above 1000, whose gradients grow towards the first layer.
    """
    return torch.exp2(-hidden.abs().amax().clamp_min(torch.finfo(torch.float32).tiny).log2().ceil())
