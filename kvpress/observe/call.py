# SPDX-License-Identifier: Apache-2.0
"""One forward pass of one attention layer, as it is handed to observers, scorers, codecs and selectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvpress.cache.attention import Logits
from kvpress.cache.chosen import Selection
from kvpress.cache.codec import Sealing
from kvpress.cache.rotation import Rotation
from kvpress.cache.store import KVStore

Phase = Literal["prefill", "decode"]
Cells = Callable[[int], Tensor]
"""Lays out the pictures of a pass behind so many tokens: picture, frame, row and column of each new one, `[B, Q, 4]`."""


@dataclass
class LayerCall:
    """One forward pass of one attention layer.

    `queries [B, Hq, Q, D]` are rotated, as the attention function got them. `mask [B, seen]` marks real tokens, None where
    nothing is padded. `lse [N, M]` is the log-sum-exp of the pass, None where the model's own attention ran, and
    `window_lse` that of the window alone, where a pattern read a part of it. `read` is what each new token read of the
    sealed segments (`kvpress.cache.chosen`), None for all of them. `layer` counts attention layers, of `layers` in all, and
    `depth` those that this library stores, of `depths`. `shared` is state that all layers of the cache have in common.
    `left` says of how many pairs the ratio of the next eviction is, for the rows that earlier ones of this prompt have cut.
    `prompt_end` is how many tokens will have been seen once a prompt that comes in chunks is read, 0 for other passes;
    `prompt_start` is how many had been seen before the prompt or turn. `rotates` says that the layer turns keys and queries
    by their positions. `written` are the keys and values `[B, H, Q, D]` that the module put into its cache, `output` is
    what it returned, once it has. With `reads_itself`, nothing but its pairs is known of the module: `queries [B, H, Q, 0]`
    are empty. `expand` turns latents, where a module caches them, into keys and values. `axes [n, B, Q]` are the positions
    of the new tokens where a model counts them in several axes. With `candidates`, tokens behind the prompt count as
    generated ones though several come at once, because they may be taken back. `ids [B, Q]` are their ids, None where they
    came as embeddings, and `tracker` returns what has found spans in those of all tokens (`kvpress.observe.spans`). `cells`
    lays out the images and videos among `ids`, behind so many tokens, None where no model reads any
    (`kvpress.observe.pictures`). So many rows in a row as `copies` says began with the same prompt. With `around`, the
    queries are those of a block that all stored pairs lie around: it sees earlier and later ones alike.
    """

    module: nn.Module
    store: KVStore
    layer: int
    layers: int
    kwargs: dict[str, Any]
    hidden_states: Tensor
    seen_before: int
    prompt_end: int = 0
    prompt_start: int = 0
    chunk: int | None = None
    depth: int = 0
    depths: int = 1
    phase: Phase = "prefill"
    queries: Tensor = field(default_factory=lambda: torch.empty(0))
    logits: Logits = field(default_factory=lambda: Logits(1.0))
    sinks: Tensor | None = None
    mask: Tensor | None = None
    lse: Tensor | None = None
    window_lse: Tensor | None = None
    read: Selection = None
    attentions: Tensor | None = None
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    rotary_angles: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    shared: dict[str, Any] = field(default_factory=dict)
    left: dict[int, int] = field(default_factory=dict)
    output: Any = None
    rotates: bool = True
    written: tuple[Tensor, Tensor] | None = None
    reads_itself: bool = False
    axes: Tensor | None = None
    candidates: bool = False
    ids: Tensor | None = None
    cells: Cells | None = None
    tracker: Callable[[], Any] | None = None
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    copies: int = 1
    around: bool = False

    @property
    def cache(self) -> Any:
        """The cache of all layers; presses find it under this name in `kwargs`, whatever transformers calls it."""
        return self.kwargs["past_key_values"]

    def count(self, tokens: int) -> None:
        """Work out the phase of a pass of so many new tokens."""
        fresh = self.seen_before == 0 or self.seen_before < self.prompt_end
        self.phase = "prefill" if fresh or (tokens > 1 and not self.candidates) else "decode"

    @property
    def is_first_prompt(self) -> bool:
        """Whether the pass reads the prompt that a cache begins with: there is nothing before it to go back to."""
        return self.phase == "prefill" and self.prompt_start == 0

    def keep_store(self, unit: int | None = None) -> None:
        """Note that something but new pairs is about to come to the store; see `KVStore.save`."""
        if self.is_first_prompt:
            self.store.fix()
        else:
            self.store.save(unit)

    @property
    def follows_eviction(self) -> bool:
        """Whether a part of a prompt was read and evicted from right before this pass."""
        return bool(self.chunk and self.prompt_end and (self.prompt_end - self.seen_before) % self.chunk == 0)

    def without_tensors(self, angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None) -> LayerCall:
        """Return a call without the tensors of its pass: those of all layers together would outweigh the cache.

        `angles` maps `(like, positions)` to `(cos, sin)`; None where the layer has no rotary embedding.
        """
        empty, positions = self.queries.new_zeros(1, 1, 1), self.kwargs.get("position_ids")
        return replace(
            self,
            kwargs={} if positions is None else {"position_ids": positions[..., -1:].clone()},
            axes=None if self.axes is None else self.axes[..., -1:].clone(),
            hidden_states=empty[:, :0],
            ids=None,
            queries=self.queries.new_empty(*self.queries.shape[:2], 0, self.queries.shape[3]),
            lse=None,
            window_lse=None,
            attentions=None,
            output=None,
            written=None,
            read=None,
            rotary_angles=None if angles is None else partial(angles, empty),
        )

    def need(self, what: str) -> None:
        """Refuse to give `what` of a module that reads its cache by itself."""
        if self.reads_itself:
            raise NotImplementedError(
                f"{type(self.module).__name__} reads its cache by itself, so {what} are not known; use a press that scores "
                "pairs by their keys and values, such as knorm, keydiff, streaming_llm or random"
            )

    @property
    def sealing(self) -> Sealing:
        """What a codec may look at when it encodes what this layer holds."""
        rotation = Rotation(
            self.angles,
            str(getattr(self.module, "layer_type", None)),
            type(self.module).__name__,
            self.rotate,
            known=self.rotary_angles is not None and self.apply_rotary is not None,
        )
        return Sealing(
            heads=self.store.heads,
            generated=self.phase == "decode",
            seen=self.store.seen,
            mask=self.mask,
            rotation=rotation if self.rotates else None,
            shared=self.shared,
        )

    @property
    def whole_lse(self) -> Tensor:
        """Log-sum-exp of the pass over all parts; attention over sealed pairs always leaves it."""
        if self.lse is None:
            raise ValueError("the model's own attention ran, which returns no log-sum-exp")
        return self.lse

    def lse_of(self, rows: slice, tokens: Tensor, logits: Tensor) -> Tensor:
        """Log-sum-exp of queries over all pairs and sinks, float32 `[b, H, G, n]`, whatever the pass itself read.

        `rows` are those of the batch, `tokens` indexes into this pass, and `logits [b, H, G, n, T]` are those of the window.
        """
        shape = self.store.batch, self.store.heads, -1, self.queries.shape[2]
        if self.lse is None:
            window = logits.logsumexp(dim=-1)
            if self.sinks is None:
                return window
            return torch.logaddexp(window, self.sinks.float().view(1, self.store.heads, -1, 1).to(window.device))
        found = self.lse.view(shape)[rows][..., tokens]
        if self.window_lse is None:
            return found
        part = self.window_lse.view(shape)[rows][..., tokens]
        others = found + torch.log1p(-torch.exp((part - found).clamp_max(0)))
        return torch.logaddexp(logits.logsumexp(dim=-1), others)

    @property
    def position_embeddings(self) -> tuple[Tensor, Tensor] | None:
        """The `(cos, sin)`, each `[1 or B, Q, d]`, that the layer was handed for its new tokens; None where it was not."""
        return rotary_parts(self.kwargs.get("position_embeddings"))

    def unrotated(self, vectors: Tensor) -> Tensor:
        """Return vectors of this pass's tokens as they were before the rotary embedding."""
        given = self.position_embeddings
        return self.unrotate(vectors, *given) if given is not None and self.rotates else vectors

    def next_positions(self, rows: Sequence[int], seen: int, count: int) -> Tensor:
        """Return the positions `[b, count]` of the tokens that come next in some rows, of which `seen` were read."""
        given = self.kwargs.get("position_ids") if self.axes is None else self.axes
        device = self.queries.device
        ahead = torch.arange(count, device=device)[None]
        if not isinstance(given, Tensor) or given.dim() < 2 or given.numel() == 0:
            return ahead + seen
        newest = given.reshape(-1, *given.shape[-2:])[:, :, -1].amax(dim=0).to(device)
        return (newest if len(newest) > 1 else newest.expand(max(rows) + 1))[list(rows), None] + 1 + ahead

    def unrotate(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo the rotation of `vectors [B, heads, n, D]` by `cos` and `sin [B, n, d]`, in float32.

        Exact for cos and sin that carry a factor (YaRN) or were rounded to 16 bits.
        """
        cos, sin = cos.float(), sin.float()
        square = cos**2 + sin**2
        return self.rotate(vectors.float(), cos / square, -sin / square)

    def rotate(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `vectors [B, heads, n, D]` with the model's own rotary function; linear in `cos` and `sin [B, n, d]`."""
        if self.apply_rotary is None:
            raise NotImplementedError(
                f"{type(self.module).__name__} has no `apply_rotary_pos_emb`: methods that need keys or queries before "
                "the rotary embedding are not available for this model"
            )
        return self.apply_rotary(vectors, cos, sin)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, each `[B, n, d]`, of this layer's rotary embedding at `positions [B, n]`."""
        if self.rotary_angles is None:
            raise NotImplementedError(f"found no rotary embedding beside {type(self.module).__name__}")
        return self.rotary_angles(positions)

    def softmax(self, scores: Tensor) -> Tensor:
        """Softmax over the last axis of `scores [N, G, n, T]`, with the layer's learned attention sinks if any."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self.sinks.float().view(1, self.store.heads, -1, 1).expand(self.store.batch, -1, -1, -1)
        sinks = sinks.reshape(scores.shape[0], scores.shape[1], 1, 1).expand(-1, -1, scores.shape[2], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def rotary_parts(embeddings: Any) -> tuple[Tensor, Tensor] | None:
    """Return a rotary embedding as `(cos, sin)`, also where a model has it as complex numbers; None for anything else."""
    if isinstance(embeddings, Tensor) and embeddings.is_complex():
        return embeddings.real, embeddings.imag
    if isinstance(embeddings, tuple) and len(embeddings) == 2 and all(isinstance(part, Tensor) for part in embeddings):
        cos, sin = embeddings
        return cos, sin
    return None
