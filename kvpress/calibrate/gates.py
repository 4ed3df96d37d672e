# SPDX-License-Identifier: Apache-2.0
"""Gates of kv heads between full attention and a window: what RLKV and DuoAttention train, each by a loss of its own.

The gates are the only thing that is trained. Of a head with gate a, attention is a times that over everything and 1 - a
times that over sinks and recent tokens. A prompt is read with full attention, as presses do that use the table.
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

from kvpress.calibrate.file import Calibration, write_whole
from kvpress.calibrate.run import Parts, Report, Settings
from kvpress.core.checks import Count, NotNegative, Positive, Range, Size, check_fields
from kvpress.core.host import Asked, host
from kvpress.core.model import ModelFacts

TENSOR = "gates"
Held = dict[int, tuple[Tensor, Tensor]]
"""Keys `[1, H, T, D]` and values of a prompt by layer, float32."""


@dataclass(frozen=True)
class TableSettings(Settings):
    """A method that writes a table of heads (`.tsv`), of the form that `duo_attention` and `rlkv` read."""

    def check(self, model: ModelFacts) -> None:
        check_fields(self)
        if len({layer.kv_heads for layer in model.layers}) > 1:
            raise ValueError(f"{self.method} needs layers of equally many kv heads, which {model.name} does not have")

    def check_out(self, out: Path) -> None:
        if out.suffix != ".tsv":
            raise ValueError(f"{self.method} writes a table of heads: --out must end in .tsv, got {out}")

    def outputs(self, out: Path) -> tuple[Path, ...]:
        return out, out.with_suffix(".json")

    def write(self, found: Calibration, model: ModelFacts, out: Path) -> None:
        """Write the table, and beside it what it was made by: `<name>.json`."""
        del model
        rows = ("\t".join(f"{value:.4f}" for value in row) for row in found.tensors[TENSOR].tolist())
        write_whole(out.with_suffix(".json"), json.dumps(found.provenance, sort_keys=True, indent=1).encode())
        write_whole(out, ("\n".join(rows) + "\n").encode())


@dataclass(frozen=True)
class GateSettings(TableSettings):
    """Gates `[L, H]` of all kv heads, trained by gradient descent (AdamW) from 1 and held in [0, 1].

    The last `answer` tokens of every sequence are what the tokens before them are the prompt of. `sink_size` and `recent_size`
    are the window of a streaming head, `steps` the number of updates, `lr` the learning rate, `price` that of a gate that is
    open; `seed` is that of what is drawn. Keys and values of all sequences are held meanwhile. The file is a table of the
    form that `duo_attention` and `rlkv` read (`.tsv`).
    """

    sink_size: Size
    recent_size: Count
    price: NotNegative
    steps: Count
    lr: Positive
    answer: Annotated[int, Range(2, whole=True)] = 64
    seed: Size = 0

    @property
    def shortest(self) -> int:
        return self.answer + self.sink_size + self.recent_size + 1

    def fit(self, model: Any, sequences: Tensor, parts: Parts, report: Report) -> dict[str, Tensor]:
        del parts
        facts = host().facts_of(model)
        gates = torch.ones(len(facts.layers), *self.gated(facts), device=model.device)
        attention = self.attention(gates.requires_grad_(), {layer.index for layer in facts.growing})
        optimiser = torch.optim.AdamW([gates], lr=self.lr, weight_decay=0.0)
        generator = torch.Generator(device=model.device).manual_seed(self.seed)
        with frozen(model), host().attending(model, attention):
            prompts: list[tuple[Any, Held]] = []
            for done, ids in enumerate(sequences):
                with torch.no_grad():
                    prompt = self.prompt(model, attention, ids.to(model.device))
                prompts += [] if prompt is None else [(prompt, attention.held)]
                report("sequences", done + 1, len(sequences))
            if not prompts:
                raise ValueError(
                    f"{self.method} needs the full model to be right where one that streams is wrong, and no such place is in "
                    "these data: give texts whose ends ask for what stands far before, or a smaller sink_size and recent_size"
                )
            for step in range(self.steps):
                place = int(torch.randint(len(prompts), (1,), generator=generator, device=model.device))
                prompt, attention.held = prompts[place]
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
        """Return the attention that the gates are part of."""
        return Gated(gates, growing, self.sink_size, self.recent_size)

    def gated(self, model: ModelFacts) -> tuple[int, ...]:
        """Return the shape of the gates of a layer."""
        return (model.layers[0].kv_heads,)

    def named(self, gates: Tensor, model: ModelFacts) -> dict[str, Tensor]:
        """Return what the file holds of trained gates."""
        del model
        return {TENSOR: gates}

    @abstractmethod
    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> Any:
        """Read a sequence `ids [T]`, once, and return what losses are made of; None where nothing can be learned."""

    @abstractmethod
    def loss(self, model: Any, attention: Gated, prompt: Any, generator: torch.Generator) -> Tensor:
        """Return the loss of one sequence that was read, which hangs on the gates alone."""


@dataclass(frozen=True)
class Distilled(GateSettings):
    """Gates that may close as far as the last hidden states of the `answer` tokens stay those of full attention."""

    def prompt(self, model: Any, attention: Gated, ids: Tensor) -> tuple[Tensor, Tensor]:
        start = len(ids) - self.answer
        return ids, attention.read(model, ids).hidden_states[-1][0, start:].float()

    def loss(self, model: Any, attention: Gated, prompt: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
        del generator
        (ids, target), start = prompt, len(prompt[0]) - self.answer
        found = attention.follow(model, ids[None, start:], torch.tensor([start], device=ids.device))
        apart = (found.hidden_states[-1][0].float() - target).square().mean() / target.square().mean()
        return apart + self.price * attention.gates.mean()


@contextmanager
def frozen(model: Any) -> Iterator[None]:
    """Train nothing of the model, and leave it as it was."""
    before, training = {p: p.requires_grad for p in model.parameters()}, model.training
    model.requires_grad_(False).eval()
    try:
        yield
    finally:
        model.train(training)
        for parameter, needed in before.items():
            parameter.requires_grad_(needed)


class Gated:
    """An attention function: it reads prompts with the model's own, and what follows them with gates.

    `gates [L, H]` are those of all layers; `growing` ones are gated. What `read` has seen is held by layer, for any number
    of rows that follow the prompt, or a part of it, in float32.
    """

    def __init__(self, gates: Tensor, growing: set[int], sink_size: int, recent_size: int) -> None:
        self.gates, self.growing = gates, growing
        self.sink_size, self.recent_size = sink_size, recent_size
        self.held: Held = {}
        self.starts: Tensor | None = None
        self.open: float | None = None

    def read(self, model: Any, ids: Tensor) -> Any:
        """Read a prompt `ids [T]` with full attention; returns what the model does."""
        self.held, self.starts = {}, None
        return model(ids[None], use_cache=False, output_hidden_states=True)

    def follow(self, model: Any, ids: Tensor, starts: Tensor, gate: float | None = None) -> Any:
        """Read `ids [B, n]`, row b behind the first `starts[b]` tokens of what was read; returns what the model does.

        With a `gate`, all heads have that one.
        """
        self.starts, self.open = starts, gate
        at = starts[:, None] + torch.arange(ids.shape[1], device=ids.device)
        try:
            return model(ids, position_ids=at, use_cache=False, output_hidden_states=True)
        finally:
            self.starts = None

    def __call__(self, asked: Asked) -> Tensor | None:
        if self.starts is None:
            self.held[asked.layer] = asked.keys.float(), asked.values.float()
            return None
        batch, heads, new, dim = asked.keys.shape
        keys, values = self.held[asked.layer]
        known = torch.arange(keys.shape[2], device=keys.device)
        query = (self.starts[:, None] + torch.arange(new, device=keys.device))[..., None]
        key = torch.cat([known.expand(batch, -1), query[..., 0]], dim=1)[:, None]
        # Of what was read, a row sees the tokens before its own start.
        there = torch.cat(
            [known < self.starts[:, None], torch.ones(batch, new, device=keys.device, dtype=torch.bool)], 1
        )
        visible = there[:, None] & (key <= query)
        if asked.window:
            visible = visible & (query - key < asked.window)
        near = visible & ((key < self.sink_size) | (query - key < self.recent_size))

        def logits(scale: Tensor | None = None) -> Tensor:
            """Logits `[B, H, G, n, S]`, of keys that are scaled by `[H, D]`."""
            queries = (
                asked.queries if scale is None else asked.queries * scale.repeat_interleave(groups, dim=0)[:, None]
            )
            queries = queries.reshape(batch, heads, -1, dim)
            past = asked.logits(queries, keys.expand(batch, -1, -1, -1))
            return torch.cat([past, asked.logits(queries, asked.keys.float())], dim=-1).unflatten(2, (-1, new))

        groups = asked.queries.shape[1] // heads
        if asked.layer in self.growing:
            weights = self.weights(asked, logits, visible[:, None, None], near[:, None, None])
        else:
            weights = softmax(logits().masked_fill(~visible[:, None, None], -torch.inf), asked.sinks)
        weights = weights.flatten(2, 3)
        out = weights[..., : len(known)] @ values + weights[..., len(known) :] @ asked.values.float()
        return out.unflatten(2, (-1, new)).flatten(1, 2)

    def weights(self, asked: Asked, logits: Callable[..., Tensor], visible: Tensor, near: Tensor) -> Tensor:
        """Return attention weights `[B, H, G, n, S]`, of what is `visible`, or `near`, `[B, 1, 1, n, S]`."""
        found = logits()
        whole, streaming = (softmax(found.masked_fill(~seen, -torch.inf), asked.sinks) for seen in (visible, near))
        gate = self.gates[asked.layer] if self.open is None else torch.full_like(self.gates[asked.layer], self.open)
        gate = gate[:, None, None, None]
        return gate * whole + (1 - gate) * streaming


def softmax(logits: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax of `logits [B, H, G, n, S]`, beside learned sinks `[H * G]`."""
    if sinks is None:
        return logits.softmax(dim=-1)
    extra = sinks.float().view(1, *logits.shape[1:3], 1, 1).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, extra], dim=-1).softmax(dim=-1)[..., :-1]
