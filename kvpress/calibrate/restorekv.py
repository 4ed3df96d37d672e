# SPDX-License-Identifier: Apache-2.0
"""Learned tokens and the adapter that they are read with, for `restorekv`, by distillation of the full cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import kl_div

from kvpress.calibrate.gates import Held, frozen, softmax
from kvpress.calibrate.repeated import read_twice
from kvpress.calibrate.run import Parts, Report, Settings
from kvpress.core.checks import Count, Positive, Range, Size, check_fields
from kvpress.core.host import Asked, host
from kvpress.core.model import ModelFacts
from kvpress.core.scoring import top
from kvpress.presses.kvzip import KVzipPress
from kvpress.presses.lora import Adapter
from kvpress.presses.restorekv import ALPHA, EMBEDDINGS, METHOD, RANK, Restore

COUNT = 8
"""Learned tokens."""
RATIOS = (0.5, 0.95)
"""Between which shares of a prompt are evicted in training, drawn for every step."""


@dataclass(frozen=True)
class RestoreKVSettings(Settings):
    """8 learned tokens and a LoRA of rank 8 of all linear layers, a file for `restorekv`.

        loss = KL(full || cut) + KL(cut || full), on the predictions of the answer tokens

    The last `answer` tokens of every sequence are what the tokens before them are the prompt of. Cut is a cache with the pairs
    that KVzip's scores choose beside those of the learned tokens, at a ratio drawn from 0.5 to 0.95 for each of
    `steps` updates (AdamW, learning rate `lr`); `seed` is that of what is drawn. Nothing of the model is trained. Keys and
    values of all sequences are held meanwhile.

    After RestoreKV, 2026, arXiv:2608.01247, whose sizes and loss it takes.
    Differs from the paper: the prompt is read a second time without words that ask for it, tokens begin as embeddings of the
    model's own vocabulary, and the schedule is a constant learning rate.
    """

    method: ClassVar[str] = METHOD

    answer: Annotated[int, Range(2, whole=True)] = 64
    steps: Count = 300
    lr: Positive = 0.002
    seed: Size = 0

    @property
    def shortest(self) -> int:
        return self.answer + 10 * COUNT

    def check(self, model: ModelFacts) -> None:
        check_fields(self)

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        del parts
        drawn = torch.Generator().manual_seed(self.seed)
        learned = untrained(model, drawn)
        learned.check(model)
        growing = {layer.index for layer in host().facts_of(model).growing}
        prompts = []
        for done, ids in enumerate(sequences):
            prompts.append(self.read(model, ids.to(model.device), growing))
            report("sequences", done + 1, len(sequences))
        flat = [each.requires_grad_() for pair in learned.adapter.weights.values() for each in pair]
        optimiser = torch.optim.AdamW([learned.embeddings.requires_grad_(), *flat], lr=self.lr, weight_decay=0.0)
        for step in range(self.steps):
            prompt = prompts[int(torch.randint(len(prompts), (1,), generator=drawn))]
            ratio = RATIOS[0] + (RATIOS[1] - RATIOS[0]) * float(torch.rand((), generator=drawn))
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

    def read(self, model: Any, ids: Tensor, growing: set[int]) -> Prompt:
        """Read a sequence `ids [T]` and note what is needed of it."""
        length = len(ids) - self.answer
        with torch.no_grad():
            worth = {layer: found.scores for layer, found in read_twice(model, ids[:length], plus=False).items()}
            prompt = Prompt(ids, length, growing, worth)
            with host().attending(model, prompt):
                prompt.target = model(ids[None], use_cache=False).logits[0, length:].float().log_softmax(dim=-1)
                for at in (0, -COUNT):
                    prompt.reads[at] = {}
                    prompt.phase = at
                    model(ids[None, :length], position_ids=prompt.places(at, length), use_cache=False)
        return prompt


def untrained(model: Any, drawn: torch.Generator) -> Restore:
    """Return tokens of the model's own vocabulary, and an adapter that adds nothing yet."""
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    rows = torch.randint(len(table.weight), (COUNT,), generator=drawn)
    embeddings = table(rows[None].to(table.weight.device))[0].detach().float()
    weights = {}
    for name, layer in model.named_modules():
        if isinstance(layer, nn.Linear) and layer is not head:
            a = torch.randn(RANK, layer.in_features, generator=drawn) / layer.in_features**0.5
            weights[name] = a.to(layer.weight.device), torch.zeros(layer.out_features, RANK, device=layer.weight.device)
    return Restore(embeddings, Adapter("what is trained", ALPHA / RANK, weights))


def distance(found: Tensor, target: Tensor) -> Tensor:
    """Symmetric divergence of log-probabilities `[n, vocabulary]`, as the mean over tokens."""
    both = kl_div(found, target, reduction="sum", log_target=True) + kl_div(
        target, found, reduction="sum", log_target=True
    )
    return both / len(found)


class Prompt:
    """The first `length` tokens of a sequence, and the attention of what is read behind them.

    `reads[0]` are its pairs, and `reads[-COUNT]` the same at places that are COUNT earlier, where learned tokens see it at the
    distances that they do, and leave keys that are turned back already.
    """

    def __init__(self, ids: Tensor, length: int, growing: set[int], scores: dict[int, Tensor]) -> None:
        self.ids, self.length, self.growing = ids, length, growing
        scores = {layer: each.clone() for layer, each in scores.items()}
        for each in scores.values():
            each[:, : KVzipPress.n_sink] = torch.inf
        self.scores = scores
        self.reads: dict[int, Held] = {}
        self.phase: int | str | None = None
        self.learned: Held = {}
        self.kept: dict[int, Tensor] = {}
        self.target = torch.empty(0)

    def places(self, start: int, count: int) -> Tensor:
        """Positions `[1, count]` from `start` on."""
        return torch.arange(start, start + count, device=self.ids.device)[None]

    def answers(self, model: Any, learned: Restore, ratio: float | None) -> Tensor:
        """Return the log-probabilities `[answer, vocabulary]` of a cut cache; without a ratio, of the full one."""
        self.kept, self.learned = {} if ratio is None else self._chosen(ratio), {}
        with host().attending(model, self):
            if ratio is not None:
                self.phase = "learned"
                dtype = model.get_input_embeddings().weight.dtype
                with learned.adapter.added(model):
                    model(
                        inputs_embeds=learned.embeddings[None].to(dtype),
                        position_ids=self.places(self.length - COUNT, COUNT),
                        use_cache=False,
                    )
            self.phase = "answer"
            answer = self.ids[None, self.length :]
            found = model(answer, position_ids=self.places(self.length, answer.shape[1]), use_cache=False)
        self.phase = None
        return found.logits[0].float().log_softmax(dim=-1)

    def _chosen(self, ratio: float) -> dict[int, Tensor]:
        """Mark the pairs `[H, T]` of each layer that KVzip keeps beside the learned ones."""
        whole = torch.cat([each.flatten() for each in self.scores.values()])
        heads = len(whole) // self.length
        count = max(heads, heads * (int(self.length * (1 - ratio)) - COUNT))
        parts = top(whole, count).split([each.numel() for each in self.scores.values()])
        return {layer: part.view_as(each) for (layer, each), part in zip(self.scores.items(), parts, strict=True)}

    def __call__(self, asked: Asked) -> Tensor | None:
        if self.phase is None:
            return None
        if isinstance(self.phase, int):
            self.reads[self.phase][asked.layer] = asked.keys.float(), asked.values.float()
            return None
        reads = self.reads[-COUNT if self.phase == "learned" else 0]
        keys, values = reads[asked.layer]
        new, start = asked.keys.shape[2], keys.shape[2]
        at = torch.arange(start + new, device=keys.device)
        visible = at <= at[start:, None]  # [n, T + n]
        if asked.window:
            visible = visible & (at[start:, None] - at < asked.window)
        seen = visible[None].expand(asked.keys.shape[1], -1, -1)  # [H, n, T + n]
        keys, values = (torch.cat([old, own.float()], 2) for old, own in ((keys, asked.keys), (values, asked.values)))
        if self.phase == "learned":
            self.learned[asked.layer] = asked.keys.float(), asked.values.float()
        elif self.kept and asked.layer in self.growing:
            stays = torch.cat([self.kept[asked.layer], self.kept[asked.layer].new_ones(len(seen), new)], dim=1)
            seen = torch.cat([seen.new_ones(len(seen), new, COUNT), seen & stays[:, None]], dim=2)
            own_keys, own_values = self.learned[asked.layer]
            keys, values = torch.cat([own_keys, keys], dim=2), torch.cat([own_values, values], dim=2)
        queries = asked.queries.float().reshape(1, keys.shape[1], -1, keys.shape[3])
        logits = asked.logits(queries, keys).unflatten(2, (-1, new))
        weights = softmax(logits.masked_fill(~seen[None, :, None], -torch.inf), asked.sinks).flatten(2, 3)
        return (weights @ values).unflatten(2, (-1, new)).flatten(1, 2)
