# SPDX-License-Identifier: Apache-2.0
"""One forward pass of one attention layer: the input of observers, scorers, codecs and selectors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kvpress.cache.attention import Logits
from kvpress.cache.codec import Sealing
from kvpress.cache.rotation import Rotation
from kvpress.cache.selection import Selection
from kvpress.cache.store import KVStore
from kvpress.observe.shards import UNDIVIDED, Shards

Phase = Literal["prefill", "decode"]
Cells = Callable[[int], Tensor]
"""Maps the number of tokens before a pass to picture, frame, row and column of each new token, `[B, Q, 4]`."""

_NO_QUERIES, _UNSCALED = torch.empty(0), Logits(1.0)


@dataclass
class NewTokens:
    """New tokens of a forward pass and the tokens before them."""

    seen_before: int
    """Tokens seen before this pass, padding included."""
    mask: Tensor | None = None
    """Real tokens among all seen ones, bool `[B, seen]`; None where nothing is padded."""
    prompt_start: int = 0
    """Tokens seen before the prompt or turn that this pass belongs to."""
    prompt_end: int = 0
    """Tokens seen at the end of a prompt that is read in several passes; 0 for other passes."""
    around_chunk: tuple[int, int] | None = None
    """Tokens seen before and after the prompt whose chunks are turns, if the pass reads such a chunk."""
    chunk: int | None = None
    """Tokens of a prompt between two evictions while it is read; None for a single eviction at its end."""
    candidates: bool = False
    """Whether several tokens after a prompt count as generated, because they may be removed again."""
    around: bool = False
    """Whether stored pairs lie before and after the tokens, which see all of them (masked diffusion)."""
    copies: int = 1
    """Consecutive rows of the batch that began with the same prompt."""
    ids: Tensor | None = None
    """Token ids `[B, Q]`; None where the tokens came as embeddings."""
    axes: Tensor | None = None
    """Positions `[n, B, Q]` where a model counts positions along several axes."""
    cells: Cells | None = None
    """Layout of the images and videos among `ids`; None where the model reads none."""
    tracker: Callable[[], Any] | None = None
    """Returns the tracker of spans in the ids of all tokens (`kvpress.observe.spans`)."""
    rules: dict[str, Any] = field(default_factory=dict)
    """Span rules that observers read, by key."""
    shared: dict[str, Any] = field(default_factory=dict)
    """State that all layers of a cache share."""
    memo: dict[Any, Any] = field(default_factory=dict)
    """Results about the new tokens that all layers of the pass share."""


@dataclass
class AttentionLayer:
    """Attention layer of calls; a session builds it once."""

    module: nn.Module
    """Attention module."""
    index: int
    """Index among all attention layers."""
    count: int
    """Number of attention layers."""
    depth: int = 0
    """Index among the layers whose pairs this library stores."""
    depths: int = 1
    """Number of layers whose pairs this library stores."""
    cache_index: int = 0
    """Index of the cache layer that the module writes."""
    rotates: bool = True
    """Whether the layer applies a rotary embedding to queries and keys."""
    apply_rotary: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None
    """Rotary function of the model, of `(vectors, cos, sin)`; None where it has none."""
    rotary_angles: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Maps `(like, positions [B, n])` to `(cos, sin)`, each `[B, n, d]`, with dtype and device of `like`; None without RoPE."""
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None
    """Expands cached latents to keys and values; None where the module caches keys and values."""
    reads_itself: bool = False
    """Whether the module reads the cache in code of its own, so that queries are unavailable, `[B, H, Q, 0]`."""
    merged_heads: int = 1
    """KV heads of the module that are stored side by side, as one."""
    shards: Shards = UNDIVIDED
    """Ranks among which the heads are divided; tensors of a call hold the heads of this rank."""


@dataclass
class LayerCall:
    """One forward pass of one attention layer."""

    layer: AttentionLayer
    """Attention layer."""
    tokens: NewTokens
    """New tokens."""
    store: KVStore
    """Pairs of the layer."""
    kwargs: dict[str, Any]
    """Keyword arguments of the module, the cache under `past_key_values`."""
    hidden_states: Tensor
    """Input of the module, `[B, Q, hidden]`."""
    phase: Phase = "prefill"
    """Whether the tokens belong to a prompt or turn, or are generated."""
    queries: Tensor = _NO_QUERIES
    """Queries `[B, Hq, Q, D]` that the attention function received, rotated."""
    logits: Logits = _UNSCALED
    """Scale and soft cap of the logits."""
    sinks: Tensor | None = None
    """Learned extra logits of the softmax, one for each query head."""
    lse: Tensor | None = None
    """Log-sum-exp of the pass, `[N, M]`; None where the model's own attention ran."""
    window_lse: Tensor | None = None
    """Log-sum-exp over the window alone, where a pattern computed only some tiles."""
    read: Selection = None
    """Sealed pairs that each new token read; None for all."""
    attentions: Tensor | None = None
    """Attention weights; None where the model does not return them."""
    left: dict[int, int] = field(default_factory=dict)
    """Pairs that the next ratio refers to, by row, where earlier evictions of this prompt have cut the row."""
    causal: bool = False
    """Whether the mask of the pass hides later tokens and padding, and nothing else."""
    written: tuple[Tensor, Tensor] | None = None
    """Keys and values `[B, H, Q, D]` that the module wrote to its cache."""
    output: Any = None
    """Output of the module; None until it returns."""
    by_hand: bool = False
    """Whether the caller passed tensors without a model, and counts returned pairs, not tokens seen."""
    tried: dict[Hashable, tuple[tuple[Tensor, ...], Any]] = field(default_factory=dict)
    """Results of a trial encoding of the pairs of this pass (`Sealing.once`)."""

    @property
    def cache(self) -> Any:
        """Cache of all layers, `past_key_values` in `kwargs` under every version of transformers."""
        return self.kwargs["past_key_values"]

    def count(self, tokens: int) -> None:
        """Set the phase of a pass of so many new tokens."""
        in_prompt = self.tokens.seen_before == 0 or self.tokens.seen_before < self.tokens.prompt_end
        self.phase = "prefill" if in_prompt or (tokens > 1 and not self.tokens.candidates) else "decode"

    @property
    def is_first_prompt(self) -> bool:
        """Whether the pass reads the prompt that a cache begins with, so that no earlier state exists."""
        return self.phase == "prefill" and self.tokens.prompt_start == 0

    def keep_store(self, unit: int | None = None) -> None:
        """Save the store before a change that dropping pairs cannot undo; see `KVStore.save`."""
        if self.is_first_prompt:
            self.store.fix()
        else:
            self.store.save(unit)

    @property
    def follows_eviction(self) -> bool:
        """Whether an eviction within the prompt came right before this pass."""
        return bool(
            self.tokens.chunk
            and self.tokens.prompt_end
            and (self.tokens.prompt_end - self.tokens.seen_before) % self.tokens.chunk == 0
        )

    def without_tensors(self) -> LayerCall:
        """Return a call without the tensors of its pass, which over all layers would be larger than the cache."""
        empty, positions = self.queries.new_zeros(1, 1, 1), self.kwargs.get("position_ids")
        axes = self.tokens.axes
        return replace(
            self,
            tokens=replace(self.tokens, ids=None, axes=None if axes is None else axes[..., -1:].clone()),
            kwargs={} if positions is None else {"position_ids": positions[..., -1:].clone()},
            hidden_states=empty[:, :0],
            queries=self.queries.new_empty(*self.queries.shape[:2], 0, self.queries.shape[3]),
            lse=None,
            window_lse=None,
            attentions=None,
            output=None,
            written=None,
            read=None,
        )

    def need(self, what: str) -> None:
        """Raise NotImplementedError if the module reads its cache itself, so that `what` is unavailable."""
        if self.layer.reads_itself:
            raise NotImplementedError(
                f"{type(self.layer.module).__name__} reads its cache by itself, so {what} are unavailable; use a press that "
                "scores pairs by their keys and values, such as knorm, keydiff, streaming_llm or random"
            )

    @property
    def sealing(self) -> Sealing:
        """Input of a codec that encodes pairs of this layer."""
        rotation = Rotation(
            self.angles,
            str(getattr(self.layer.module, "layer_type", None)),
            type(self.layer.module).__name__,
            self.rotate,
            known=self.layer.rotary_angles is not None and self.layer.apply_rotary is not None,
        )
        return Sealing(
            heads=self.store.heads,
            generated=self.phase == "decode",
            seen=self.store.seen,
            mask=self.tokens.mask,
            rotation=rotation if self.layer.rotates else None,
            shared=self.tokens.shared,
            tried=self.tried,
        )

    @property
    def whole_lse(self) -> Tensor:
        """Log-sum-exp of the pass over all stored pairs.

        Raises:
            ValueError: the attention function of the model ran, which returns none.
        """
        if self.lse is None:
            raise ValueError("the model's own attention ran, which returns no log-sum-exp")
        return self.lse

    def lse_of(self, rows: slice, tokens: Tensor, logits: Tensor) -> Tensor:
        """Return the log-sum-exp of queries over all pairs and sinks, float32 `[b, H, G, n]`, also if the pass read only some.

        `rows` are rows of the batch, `tokens` indexes into this pass, and `logits [b, H, G, n, T]` cover the window.
        """
        shape = self.store.batch, self.store.heads, -1, self.queries.shape[2]
        if self.lse is None:
            window = logits.logsumexp(dim=-1)
            if self.sinks is None:
                return window
            return torch.logaddexp(window, self.sinks.float().view(1, self.store.heads, -1, 1).to(window.device))
        pass_lse = self.lse.view(shape)[rows][..., tokens]
        if self.window_lse is None:
            return pass_lse
        window_lse = self.window_lse.view(shape)[rows][..., tokens]
        sealed_lse = pass_lse + torch.log1p(-torch.exp((window_lse - pass_lse).clamp_max(0)))
        return torch.logaddexp(logits.logsumexp(dim=-1), sealed_lse)

    @property
    def position_embeddings(self) -> tuple[Tensor, Tensor] | None:
        """`(cos, sin)`, each `[1 or B, Q, d]`, that the layer received for its new tokens; None where it received none."""
        return rotary_parts(self.kwargs.get("position_embeddings"))

    def unrotated(self, vectors: Tensor) -> Tensor:
        """Undo the rotary embedding of vectors of this pass's tokens."""
        embeddings = self.position_embeddings
        return self.unrotate(vectors, *embeddings) if embeddings is not None and self.layer.rotates else vectors

    def next_positions(self, rows: Sequence[int], seen: int, count: int) -> Tensor:
        """Return the positions `[b, count]` of the next tokens of some rows that have seen `seen` tokens."""
        positions = self.kwargs.get("position_ids") if self.tokens.axes is None else self.tokens.axes
        device = self.queries.device
        offsets = torch.arange(count, device=device)[None]
        if not isinstance(positions, Tensor) or positions.dim() < 2 or positions.numel() == 0:
            return offsets + seen
        newest = positions.reshape(-1, *positions.shape[-2:])[:, :, -1].amax(dim=0).to(device)
        return (newest if len(newest) > 1 else newest.expand(max(rows) + 1))[list(rows), None] + 1 + offsets

    def unrotate(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Undo the rotation of `vectors [B, heads, n, D]` by `cos` and `sin [B, n, d]`, in float32.

        Exact for cos and sin that carry a factor (YaRN) or were rounded to 16 bits.
        """
        cos, sin = cos.float(), sin.float()
        square = cos**2 + sin**2
        return self.rotate(vectors.float(), cos / square, -sin / square)

    def rotate(self, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotate `vectors [B, heads, n, D]` with the model's own rotary function; linear in `cos` and `sin [B, n, d]`."""
        if self.layer.apply_rotary is None:
            raise NotImplementedError(
                f"{type(self.layer.module).__name__} has no `apply_rotary_pos_emb`: methods that need keys or queries before "
                "the rotary embedding are not available for this model"
            )
        return self.layer.apply_rotary(vectors, cos, sin)

    def angles(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Return `(cos, sin)`, each `[B, n, d]`, of this layer's rotary embedding at `positions [B, n]`."""
        if self.layer.rotary_angles is None:
            raise NotImplementedError(f"no rotary embedding belongs to {type(self.layer.module).__name__}")
        like = self.queries if self.hidden_states is None else self.hidden_states
        return self.layer.rotary_angles(like, positions)

    def softmax(self, scores: Tensor) -> Tensor:
        """Compute the softmax over the last axis of `scores [N, G, n, T]`, with the layer's learned attention sinks if any."""
        if self.sinks is None:
            return torch.softmax(scores, dim=-1)
        sinks = self.sinks.float().view(1, self.store.heads, -1, 1).expand(self.store.batch, -1, -1, -1)
        sinks = sinks.reshape(scores.shape[0], scores.shape[1], 1, 1).expand(-1, -1, scores.shape[2], 1)
        return torch.softmax(torch.cat([scores, sinks], dim=-1), dim=-1)[..., :-1]


def rotary_parts(embeddings: Any) -> tuple[Tensor, Tensor] | None:
    """Return a rotary embedding as `(cos, sin)`, also from complex numbers; None for anything else."""
    if isinstance(embeddings, Tensor) and embeddings.is_complex():
        return embeddings.real, embeddings.imag
    if isinstance(embeddings, tuple) and len(embeddings) == 2 and all(isinstance(part, Tensor) for part in embeddings):
        cos, sin = embeddings
        return cos, sin
    return None
