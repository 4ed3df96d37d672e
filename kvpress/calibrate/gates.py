# SPDX-License-Identifier: Apache-2.0
"""Trained gates of KV heads between full attention and a window, for RLKV, DuoAttention and LeanK.

Only the gates are trained. The attention of a head with gate a is a times full attention plus 1 - a times attention to sinks
and recent tokens. Prompts are read with full attention, as the presses do that use the table.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
from torch import Tensor

from kvpress.atomic import write_whole
from kvpress.calibrate.run import CalibrationSettings, FinishedLayers, Report
from kvpress.core.calibration import Calibration
from kvpress.core.checks import Count, NotNegative, Positive, Range, Size, check_fields
from kvpress.core.host import AttentionInputs, host
from kvpress.core.model import ModelFacts

TENSOR = "gates"
PairsByLayer = dict[int, tuple[Tensor, Tensor]]
"""Keys `[1, H, T, D]` and values `[1, H, T, Dv]` of a prompt by layer, float32."""


@dataclass(frozen=True)
class TableSettings(CalibrationSettings):
    """Settings of a method that writes a table of heads (`.tsv`), which `duo_attention` and `rlkv` read."""

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        if len({layer.kv_heads for layer in model.layers}) > 1:
            raise ValueError(
                f"{self.method} needs the same number of kv heads in every layer, which {model.name} does not have"
            )

    def check_out(self, out: Path) -> None:
        if out.suffix != ".tsv":
            raise ValueError(f"{self.method} writes a table of heads: --out must end in .tsv, got {out}")

    def outputs(self, out: Path) -> tuple[Path, ...]:
        return out, out.with_suffix(".json")

    def write(self, result: Calibration, model: ModelFacts, out: Path) -> None:
        """Write the table, and its provenance to `<name>.json` in the same folder."""
        del model
        rows = ("\t".join(f"{value:.4f}" for value in row) for row in result.tensors[TENSOR].tolist())
        write_whole(out.with_suffix(".json"), json.dumps(result.provenance, sort_keys=True, indent=1).encode())
        write_whole(out, ("\n".join(rows) + "\n").encode())


@dataclass(frozen=True)
class GateSettings(TableSettings):
    """Settings of gates `[L, H]` of all KV heads, trained with AdamW from 1 and clamped to [0, 1].

    Layers with a sliding window are not gated: theirs stay 1, so that presses cut other heads before them.
    A sequence is a prompt with an answer, its last `answer` tokens. Keys and values of all sequences are in memory during
    training. The file is a table that `duo_attention` and `rlkv` read (`.tsv`).
    """

    sink_size: Size
    """First tokens in the window of a streaming head."""
    recent_size: Count
    """Newest tokens in the window of a streaming head."""
    price: NotNegative
    """Weight of the mean gate in the loss."""
    steps: Count
    """Number of updates."""
    lr: Positive
    """Learning rate."""
    answer: Annotated[int, Range(2, whole=True)] = 64
    """Tokens at the end of a sequence that the loss is computed on."""
    seed: Size = 0
    """Random seed."""

    @property
    def shortest(self) -> int:
        return self.answer + self.sink_size + self.recent_size + 1

    def fit(self, model: Any, sequences: Tensor, finished: FinishedLayers, report: Report) -> dict[str, Tensor]:
        del finished
        facts = host().facts_of(model)
        gates = torch.ones(len(facts.layers), *self.gated(facts), device=model.device)
        attention = self.attention(gates.requires_grad_(), {layer.index for layer in facts.growing})
        optimiser = torch.optim.AdamW([gates], lr=self.lr, weight_decay=0.0)
        generator = torch.Generator(device=model.device).manual_seed(self.seed)
        with frozen(model), host().attending(model, attention):
            prompts: list[tuple[Any, PairsByLayer]] = []
            for done, ids in enumerate(sequences):
                with torch.no_grad():
                    prompt = self.prompt(model, attention, ids.to(model.device))
                prompts += [] if prompt is None else [(prompt, attention.pairs)]
                report("sequences", done + 1, len(sequences))
            if not prompts:
                raise ValueError(
                    f"{self.method} needs tokens that the model predicts with full attention and not with streaming heads, and "
                    "these data have none: give texts whose ends depend on distant tokens, or a smaller sink_size and "
                    "recent_size"
                )
            for step in range(self.steps):
                index = int(torch.randint(len(prompts), (1,), generator=generator, device=model.device))
                prompt, attention.pairs = prompts[index]
                with torch.enable_grad():
                    loss = self.loss(model, attention, prompt, generator)
                    optimiser.zero_grad()
                    loss.backward()
                optimiser.step()
                with torch.no_grad():
                    gates.clamp_(0, 1)
                report("steps", step + 1, self.steps)
        return self.named(gates.detach().cpu(), facts)

    def attention(self, gates: Tensor, growing: set[int]) -> Gated:
        """Return the attention function with these gates."""
        return Gated(gates, growing, self.sink_size, self.recent_size)

    def gated(self, model: ModelFacts) -> tuple[int, ...]:
        """Return the shape of the gates of a layer."""
        return (model.layers[0].kv_heads,)

    def named(self, gates: Tensor, model: ModelFacts) -> dict[str, Tensor]:
        """Return the tensors of the file by name, from the trained gates."""
        del model
        return {TENSOR: gates}

    @abstractmethod
    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> Any:
        """Read a sequence `ids [T]` once and return the inputs of its loss; None if nothing can be learned from it."""

    @abstractmethod
    def loss(self, model: Any, attention: Gated, prompt: Any, generator: torch.Generator) -> Tensor:
        """Return the loss of a sequence that was read, as a function of the gates."""


@dataclass(frozen=True)
class Distilled(GateSettings):
    """Settings of gates trained by distillation: the last hidden states of the answer must stay those of full attention."""

    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> tuple[Tensor, Tensor]:
        start = len(ids) - self.answer
        return ids, attention.read(model, ids).hidden_states[-1][0, start:].float()

    def loss(self, model: Any, attention: Gated, prompt: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
        del generator
        (ids, target), start = prompt, len(prompt[0]) - self.answer
        output = attention.follow(model, ids[None, start:], torch.tensor([start], device=ids.device))
        distance: Tensor = (output.hidden_states[-1][0].float() - target).square().mean() / target.square().mean()
        return distance + self.price * attention.mean_gate()


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Freeze the model in evaluation mode, and restore its state afterwards."""
    before, training = {p: p.requires_grad for p in model.parameters()}, model.training
    model.requires_grad_(False).eval()
    try:
        yield
    finally:
        model.train(training)
        for parameter, required in before.items():
            parameter.requires_grad_(required)


class Gated:
    """Attention function that reads prompts with full attention, and the tokens after them with gates.

    Keys and values of a prompt are stored by `read`, for any number of rows that continue the prompt or a part of it.

    Args:
        gates: `[L, H]` of all layers.
        growing: indexes of the layers that are gated, whose caches grow.
        sink_size: first tokens that a streaming head reads.
        recent_size: newest tokens that a streaming head reads.
    """

    def __init__(self, gates: Tensor, growing: set[int], sink_size: int, recent_size: int) -> None:
        self.gates, self.growing = gates, growing
        self.sink_size, self.recent_size = sink_size, recent_size
        self.pairs: PairsByLayer = {}
        self.starts: Tensor | None = None
        self.open: float | None = None

    def mean_gate(self) -> Tensor:
        """Return the mean gate of the gated layers; others must keep their gates, which attention does not depend on."""
        return self.gates[sorted(self.growing)].mean()

    def read(self, model: Any, ids: Tensor) -> Any:
        """Read a prompt `ids [T]` with full attention and return the model's output."""
        self.pairs, self.starts = {}, None
        return model(ids[None], use_cache=False, output_hidden_states=True)

    def follow(self, model: Any, ids: Tensor, starts: Tensor, gate: float | None = None) -> Any:
        """Read `ids [B, n]` with gates and return the model's output; row b continues the first `starts[b]` prompt tokens.

        A `gate` replaces the gates of all heads.
        """
        self.starts, self.open = starts, gate
        positions = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
        try:
            return model(ids, position_ids=positions, use_cache=False, output_hidden_states=True)
        finally:
            self.starts = None

    def __call__(self, call: AttentionInputs) -> Tensor | None:
        if self.starts is None:
            self.pairs[call.layer] = call.keys.float(), call.values.float()
            return None
        batch, heads, new, dim = call.keys.shape
        keys, values = self.pairs[call.layer]
        prompt_positions = torch.arange(keys.shape[2], device=keys.device)
        query = (self.starts[:, None] + torch.arange(new, device=keys.device))[..., None]
        key = torch.cat([prompt_positions.expand(batch, -1), query[..., 0]], dim=1)[:, None]
        # A row sees the prompt tokens before its start.
        exists = torch.cat(
            [prompt_positions < self.starts[:, None], torch.ones(batch, new, device=keys.device, dtype=torch.bool)], 1
        )
        visible = exists[:, None] & (key <= query)
        if call.window:
            visible = visible & (query - key < call.window)
        in_window = visible & ((key < self.sink_size) | (query - key < self.recent_size))

        def logits(scale: Tensor | None = None) -> Tensor:
            """Return logits `[B, H, G, n, S]`; prompt keys are multiplied by `scale [H, D]`."""
            queries = call.queries if scale is None else call.queries * scale.repeat_interleave(groups, dim=0)[:, None]
            queries = queries.reshape(batch, heads, -1, dim)
            past = call.logits(queries, keys.expand(batch, -1, -1, -1))
            present = call.logits(queries, call.keys.float())
            per_head: Tensor = torch.cat([past, present], dim=-1).unflatten(2, (-1, new))
            return per_head

        groups = call.queries.shape[1] // heads
        if call.layer in self.growing:
            weights = self.weights(call, logits, visible[:, None, None], in_window[:, None, None])
        else:
            weights = softmax(logits().masked_fill(~visible[:, None, None], -torch.inf), call.sinks)
        weights = weights.flatten(2, 3)
        out = (
            weights[..., : len(prompt_positions)] @ values + weights[..., len(prompt_positions) :] @ call.values.float()
        )
        per_head: Tensor = out.unflatten(2, (-1, new))
        return per_head.flatten(1, 2)

    def weights(
        self, call: AttentionInputs, logits: Callable[..., Tensor], visible: Tensor, in_window: Tensor
    ) -> Tensor:
        """Return attention weights `[B, H, G, n, S]`.

        Args:
            call: the layer's attention call.
            logits: returns logits `[B, H, G, n, S]`.
            visible: mask of full attention, bool `[B, 1, 1, n, S]`.
            in_window: mask of a streaming head, of the same shape.
        """
        products = logits()
        full, streaming = (
            softmax(products.masked_fill(~seen, -torch.inf), call.sinks) for seen in (visible, in_window)
        )
        gate = self.gates[call.layer] if self.open is None else torch.full_like(self.gates[call.layer], self.open)
        gate = gate[:, None, None, None]
        return gate * full + (1 - gate) * streaming


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax of `logits [B, H, G, n, S]`, with learned sinks `[H * G]` in the denominator."""
    if sinks is None:
        return logits.softmax(dim=-1)
    extra = sinks.float().view(1, *logits.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., :-1]
