# SPDX-License-Identifier: Apache-2.0
"""Calibration of `restorekv`: learned tokens and their adapter, by distillation of the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from kvpress.calibrate.gates import PairsByLayer, frozen, softmax
from kvpress.calibrate.repeated import read_twice
from kvpress.calibrate.run import CalibrationSettings, FinishedLayers, Report
from kvpress.core.checks import Count, Positive, Range, Size, check_fields
from kvpress.core.host import AttentionInputs, host
from kvpress.core.linear import device_of, embedding_of
from kvpress.core.model import ModelFacts
from kvpress.core.scoring import top
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.lora import Adapter
from kvpress.presses.restorekv import ALPHA, EMBEDDINGS, METHOD, RANK, Restore

COUNT = 8
"""Number of learned tokens."""
RATIOS = (0.5, 0.95)
"""Range of the compression ratio, which is drawn for every training step."""


@dataclass(frozen=True)
class RestoreKVSettings(CalibrationSettings):
    """8 learned tokens and a LoRA of rank 8 of all linear layers, for `restorekv`.

        loss = KL(full || cut) + KL(cut || full), on the predictions of the answer tokens

    A sequence is a prompt with an answer, its last `answer` tokens. "Cut" is a cache with the pairs of the learned tokens and
    the best pairs of the prompt by KVzip's scores, at a ratio drawn from 0.5 to 0.95 for each update. The optimiser is AdamW.
    The model's weights do not change. Keys and values of all sequences are in memory during training.

    After RestoreKV, 2026, arXiv:2608.01247, with its sizes and loss.
    Differs from the paper: no words request the second reading of the prompt, tokens begin as embeddings of the model's
    vocabulary, and the learning rate is constant.
    """

    method: ClassVar[str] = METHOD

    answer: Annotated[int, Range(2, whole=True)] = 64
    """Tokens at the end of a sequence that the loss is computed on."""
    steps: Count = 300
    """Number of updates."""
    lr: Positive = 0.002
    """Learning rate."""
    seed: Size = 0
    """Random seed."""

    @property
    def shortest(self) -> int:
        return self.answer + 10 * COUNT

    def check(self, model: ModelFacts) -> None:
        check_fields(self)

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        del finished
        generator = torch.Generator().manual_seed(self.seed)
        learned = untrained(model, generator)
        learned.check(model)
        growing = {layer.index for layer in host().facts_of(model).growing}
        prompts = []
        for done, ids in enumerate(sequences):
            prompts.append(self.read(model, ids.to(model.device), growing))
            report("sequences", done + 1, len(sequences))
        flat = [matrix.requires_grad_() for pair in learned.adapter.weights.values() for matrix in pair]
        optimiser = torch.optim.AdamW([learned.embeddings.requires_grad_(), *flat], lr=self.lr, weight_decay=0.0)
        for step in range(self.steps):
            prompt = prompts[int(torch.randint(len(prompts), (1,), generator=generator))]
            ratio = RATIOS[0] + (RATIOS[1] - RATIOS[0]) * float(torch.rand((), generator=generator))
            with frozen(model), torch.enable_grad():
                loss = distance(prompt.answers(model, learned, ratio), prompt.target)
                optimiser.zero_grad()
                loss.backward()
            torch.nn.utils.clip_grad_norm_([learned.embeddings, *flat], 1.0)
            optimiser.step()
            report("steps", step + 1, self.steps)
        named = {
            f"{name}.lora_{side}.weight": pair["AB".index(side)]
            for name, pair in learned.adapter.weights.items()
            for side in "AB"
        }
        return {EMBEDDINGS: learned.embeddings, **named}

    def read(self, model: Any, ids: Tensor, growing: set[int]) -> ReadPrompt:
        """Read a sequence `ids [T]` and return its prompt, with scores, pairs and target."""
        length = len(ids) - self.answer
        with torch.no_grad():
            scores = {layer: reading.scores for layer, reading in read_twice(model, ids[:length], plus=False).items()}
            prompt = ReadPrompt(ids, length, growing, scores)
            with host().attending(model, prompt):
                prompt.target = model(ids[None], use_cache=False).logits[0, length:].float().log_softmax(dim=-1)
                for start in (0, -COUNT):
                    prompt.reads[start] = {}
                    prompt.phase = start
                    model(ids[None, :length], position_ids=prompt.positions(start, length), use_cache=False)
        return prompt


def untrained(model: Any, generator: torch.Generator) -> Restore:
    """Return embeddings of random tokens of the vocabulary, and an adapter that adds nothing yet."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = torch.randint(table.num_embeddings, (COUNT,), generator=generator)
    embeddings = table(rows[None].to(device_of(table, rows.device)))[0].detach().float()
    weights = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            a = torch.randn(RANK, layer.in_features, generator=generator) / layer.in_features**0.5
            device = device_of(layer, a.device)
            weights[name] = a.to(device), torch.zeros(layer.out_features, RANK, device=device)
    return Restore(embeddings, Adapter("untrained adapter", ALPHA / RANK, weights))


def distance(cut: Tensor, full: Tensor) -> Tensor:
    """Return the symmetric KL divergence of log-probabilities `[n, vocabulary]`, averaged over tokens."""
    forward = kl_div(cut, full, reduction="sum", log_target=True)
    return (forward + kl_div(full, cut, reduction="sum", log_target=True)) / len(cut)


class ReadPrompt:
    """Prompt of a sequence, and the attention function for the tokens that are read after it.

    `reads[0]` are the pairs of the prompt. `reads[-COUNT]` are its pairs at positions that are COUNT earlier: learned tokens at
    the last COUNT positions of the prompt see them at the right distances, and their keys need no rotation afterwards.

    Args:
        ids: token ids `[T]` of the sequence.
        length: tokens of the prompt.
        growing: indexes of the layers whose caches grow.
        scores: KVzip scores `[H, length]` of the prompt by layer.
    """

    def __init__(self, ids: Tensor, length: int, growing: set[int], scores: dict[int, Tensor]) -> None:
        self.ids, self.length, self.growing = ids, length, growing
        scores = {layer: tensor.clone() for layer, tensor in scores.items()}
        for tensor in scores.values():
            tensor[:, : KVzipPress.n_sink] = torch.inf
        self.scores = scores
        self.reads: dict[int, PairsByLayer] = {}
        self.phase: int | str | None = None
        self.learned: PairsByLayer = {}
        self.kept: dict[int, Tensor] = {}
        self.target = torch.empty(0)

    def positions(self, start: int, count: int) -> Tensor:
        """Return `count` positions from `start` on, `[1, count]`."""
        return torch.arange(start, start + count, device=self.ids.device)[None]

    def answers(self, model: Any, learned: Restore, ratio: float | None) -> Tensor:
        """Return the log-probabilities `[answer, vocabulary]` of a cut cache; of the full cache if `ratio` is None."""
        self.kept, self.learned = {} if ratio is None else self._chosen(ratio), {}
        with host().attending(model, self):
            if ratio is not None:
                self.phase = "learned"
                dtype = embedding_of(model).dtype
                with learned.adapter.added(model):
                    model(
                        inputs_embeds=learned.embeddings[None].to(dtype),
                        position_ids=self.positions(self.length - COUNT, COUNT),
                        use_cache=False,
                    )
            self.phase = "answer"
            answer = self.ids[None, self.length :]
            output = model(answer, position_ids=self.positions(self.length, answer.shape[1]), use_cache=False)
        self.phase = None
        logits: Tensor = output.logits[0]
        return logits.float().log_softmax(dim=-1)

    def _chosen(self, ratio: float) -> dict[int, Tensor]:
        """Mark the prompt's pairs `[H, T]` of each layer that are kept, so that learned pairs fit into the budget too."""
        flat = torch.cat([scores.flatten() for scores in self.scores.values()])
        heads = len(flat) // self.length
        count = max(heads, heads * (int(self.length * (1 - ratio)) - COUNT))
        masks = top(flat, count).split([scores.numel() for scores in self.scores.values()])
        return {layer: mask.view_as(scores) for (layer, scores), mask in zip(self.scores.items(), masks, strict=True)}

    def __call__(self, call: AttentionInputs) -> Tensor | None:
        if self.phase is None:
            return None
        if isinstance(self.phase, int):
            self.reads[self.phase][call.layer] = call.keys.float(), call.values.float()
            return None
        reads = self.reads[-COUNT if self.phase == "learned" else 0]
        keys, values = reads[call.layer]
        new, start = call.keys.shape[2], keys.shape[2]
        positions = torch.arange(start + new, device=keys.device)
        visible = positions <= positions[start:, None]  # [n, T + n]
        if call.window:
            visible = visible & (positions[start:, None] - positions < call.window)
        seen = visible[None].expand(call.keys.shape[1], -1, -1)  # [H, n, T + n]
        keys, values = (torch.cat([old, added.float()], 2) for old, added in ((keys, call.keys), (values, call.values)))
        if self.phase == "learned":
            self.learned[call.layer] = call.keys.float(), call.values.float()
        elif self.kept and call.layer in self.growing:
            kept = torch.cat([self.kept[call.layer], self.kept[call.layer].new_ones(len(seen), new)], dim=1)
            seen = torch.cat([seen.new_ones(len(seen), new, COUNT), seen & kept[:, None]], dim=2)
            learned_keys, learned_values = self.learned[call.layer]
            keys, values = torch.cat([learned_keys, keys], dim=2), torch.cat([learned_values, values], dim=2)
        queries = call.queries.float().reshape(1, keys.shape[1], -1, keys.shape[3])
        logits = call.logits(queries, keys).unflatten(2, (-1, new))
        weights = softmax(logits.masked_fill(~seen[None, :, None], -torch.inf), call.sinks).flatten(2, 3)
        per_head: Tensor = (weights @ values).unflatten(2, (-1, new))
        return per_head.flatten(1, 2)
