# SPDX-License-Identifier: Apache-2.0
"""Limit of positions of a model, beyond which its answers are wrong without an error."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any
from weakref import WeakSet

from torch import Tensor, nn
from transformers.configuration_utils import PreTrainedConfig

from kvpress.core.recipe import Recipe

_MOVING = ("dynamic", "longrope")
"""Types of RoPE whose frequencies depend on the largest position, and not on distances alone."""
_warned: WeakSet[nn.Module] = WeakSet()


def positions_of(config: PreTrainedConfig) -> int | None:
    """Return the number of positions of a model from its configuration; None without a limit.

    That is `max_position_embeddings`, or the number to which a scaled rotary embedding extends it. Configurations differ in
    whether `max_position_embeddings` includes the scaling, and the larger reading counts: `factor` times
    `original_max_position_embeddings` where that is given (YaRN, LongRoPE, Llama 3), else `factor` times
    `max_position_embeddings` for a factor of all layers (linear, dynamic). A factor of one kind of layer alone, as in Gemma 3,
    is included already. ALiBi, recurrent models and configurations that name no positions have no limit.
    """
    text = config.get_text_config(decoder=True)
    limit = getattr(text, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit < 1 or _uses_alibi(text) or not getattr(text, "num_attention_heads", None):
        return None
    return max([limit, *_extended(text, limit)])


def _extended(text: Any, limit: int) -> Iterator[int]:
    """Yield the positions that each scaled rotary embedding of a decoder reaches."""
    for rope, of_all_layers in _embeddings(text):
        factor, original = rope.get("factor"), rope.get("original_max_position_embeddings")
        if factor and (original or of_all_layers):
            yield int(factor * (original or limit))


def _embeddings(text: Any) -> list[tuple[dict[str, Any], bool]]:
    """Return the settings of the rotary embeddings of a decoder, and whether they are those of all layers."""
    rope = getattr(text, "rope_parameters", None) or {}
    by_kind = [value for value in rope.values() if isinstance(value, dict)]
    return [(value, False) for value in by_kind] or ([(rope, True)] if rope else [])


def _uses_alibi(text: Any) -> bool:
    attention = getattr(text, "attn_config", None)
    return bool(getattr(text, "alibi", False) or getattr(attention, "alibi", False))


def reach(config: PreTrainedConfig, recipe: Recipe, tokens: int) -> int:
    """Return the positions that reading `tokens` needs: fewer where a press closes the gaps that it leaves while it reads.

    Rotary attention depends on distances alone, and these then lie within the kept pairs and one chunk.
    """
    ropes = _embeddings(config.get_text_config(decoder=True))
    relative = ropes and not any(str(rope.get("rope_type")).startswith(_MOVING) for rope, _ in ropes)
    return recipe.span(tokens) if relative else tokens


def check_positions(
    config: PreTrainedConfig, tokens: int, fix: str, subject: str = "", recipe: Recipe | None = None
) -> None:
    """Refuse to read `tokens` tokens if the model has fewer positions.

    Args:
        config: the model's configuration.
        tokens: tokens in the cache once all is read.
        fix: advice at the end of the message.
        subject: beginning of the message, by default `"<tokens> tokens are"`.
        recipe: the press, which may need fewer positions than tokens.

    Raises:
        ValueError: the tokens exceed the positions.
    """
    limit = positions_of(config)
    if limit is not None and (tokens if recipe is None else reach(config, recipe, tokens)) > limit:
        raise ValueError(f"{subject or f'{tokens} tokens are'} over the {limit} positions {_of(config)}: {fix}")


def warn_past_positions(model: nn.Module, limit: int, tokens: int, kwargs: dict[str, Any]) -> None:
    """Warn once for a model about a pass that exceeds its positions.

    `tokens` counts the columns of the cache; the position ids or the mask of the pass leave out padding.
    """
    if model in _warned:
        return
    positions, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
    if isinstance(positions, Tensor) and positions.numel():
        tokens = int(positions.max()) + 1
    elif isinstance(mask, Tensor) and mask.dim() == 2:
        tokens = int(mask.sum(dim=1).max())
    if tokens > limit:
        _warned.add(model)
        warnings.warn(
            f"{tokens} tokens are over the {limit} positions that {type(model).__name__} was made for: answers are not to be "
            "relied on; read less, or set the rope scaling of the model",
            RuntimeWarning,
            stacklevel=2,
        )


def _of(config: PreTrainedConfig) -> str:
    return f"that {(getattr(config, 'architectures', None) or [type(config).__name__])[0]} was made for"
