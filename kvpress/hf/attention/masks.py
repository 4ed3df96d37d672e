# SPDX-License-Identifier: Apache-2.0
"""Attention masks under a press, which are built when an attention needs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

from kvpress.cache.window import RealTokens
from kvpress.hf.attention.native import native_name
from kvpress.hf.session.requests import Request, generated_behind
from kvpress.observe.call import LayerCall


@dataclass
class PressMask:
    """Result of the mask function: the 2-D mask, and the means to build the mask of the model's own attention.

    Models pass masks on unchanged, so one object serves layers with this module's attention and layers with the model's own.
    """

    mask: Tensor | None
    """Real tokens `[B, tokens]`; None without padding."""
    arguments: dict[str, Any]
    """Arguments of the model's own mask function."""
    build: Callable[..., Any]
    """Mask function of the model's own attention implementation."""
    built: dict[int, Any] = field(default_factory=dict)
    """Native masks by their number of keys."""
    real_tokens: RealTokens | None = None
    """Real tokens of the pass, shared by all layers."""
    stored: tuple[int, int] | None = None
    """Number of keys, and the position of the first, that the cache reported to the mask function."""
    later: bool | None = None
    """Result of `sees_later`, once computed."""
    place: torch.device | None = None
    """Device of the masks; None for that of the arguments."""
    moved: dict[torch.device, PressMask] = field(default_factory=dict)
    """This mask on other devices."""

    @property
    def device(self) -> torch.device:
        """Device of the masks."""
        default = "cpu" if self.mask is None else self.mask.device
        return self.place or torch.device(self.arguments.get("device", default))

    def to(self, device: torch.device | str | int, **settings: Any) -> PressMask:
        """Return the mask on a device, one object for all its layers; accelerate moves all inputs of the layers it placed."""
        device = torch.device(device)
        if device == self.device:
            return self
        if device not in self.moved:

            def build(**arguments: Any) -> Any:
                native = self.build(**arguments)
                return native.to(device, **settings) if isinstance(native, Tensor) else native

            mask = None if self.mask is None else self.mask.to(device, **settings)
            self.moved[device] = PressMask(
                mask, self.arguments, build, stored=self.stored, later=self.sees_later(), place=device
            )
        return self.moved[device]

    def real(self, call: LayerCall, request: Request | None) -> RealTokens | None:
        """Return the real tokens among those seen, one object for all layers; None without padding."""
        if self.real_tokens is None and self.mask is not None:
            seen = self.mask[:, : call.store.seen]
            later = call.phase == "decode"
            real = generated_behind(seen, request, call.cache) if later else RealTokens(seen)
            if real.unpadded:
                self.mask = None
            else:
                self.real_tokens = real
        return self.real_tokens

    def native(self, keys: int) -> Any:
        """Return the mask of the model's own attention over `keys` keys, which are all tokens or those of a window."""
        if keys not in self.built:
            sizes = {}
            if self.stored is not None and keys == self.stored[0]:
                sizes = dict(zip(("kv_length", "kv_offset"), self.stored, strict=True))
            self.built[keys] = self.build(**{**self.arguments, **sizes})
        return self.built[keys]

    def sees_later(self) -> bool:
        """Whether a token of the pass attends to the next one, as tokens of an image do in some models."""
        function = self.arguments.get("mask_function", causal_mask_function)
        if function is causal_mask_function:
            return False
        if self.later is None:
            mask, start = self.mask, int(self.arguments["q_offset"])
            device = self.arguments.get("device", "cpu" if mask is None else mask.device)
            at = torch.arange(start, start + self.arguments["q_length"] - 1, device=device)[None]
            row = torch.arange(self.arguments["batch_size"], device=device)[:, None]
            self.later = bool(torch.as_tensor(function(row, torch.zeros_like(row), at, at + 1)).any())
        return self.later

    def __getitem__(self, index: Any) -> PressMask:
        """Return the mask of some queries, for models whose later layers process only the newest tokens."""
        arguments = {**self.arguments, "allow_is_causal_skip": False}
        return PressMask(
            self.mask, arguments, lambda **settings: self.build(**settings)[index], real_tokens=self.real_tokens,
            place=self.place,
        )  # fmt: skip

    def of_tokens(self, index: Tensor, real: Tensor) -> PressMask:
        """Return the mask of a pass over the tokens at `index [B, m]` of a prompt; `real [B, m]` is False for padding."""
        padding_mask = None if bool(real.all()) else real
        if self.arguments.get("mask_function", causal_mask_function) is causal_mask_function:
            lengths = {"q_length": index.shape[1], "kv_length": index.shape[1]}
            arguments = {**self.arguments, **lengths, "attention_mask": padding_mask}
            return PressMask(padding_mask, arguments, self.build, place=self.place)

        def build(**arguments: Any) -> Tensor:
            full_mask = self.build(**{**arguments, "allow_is_causal_skip": False})
            if not isinstance(full_mask, Tensor) or full_mask.dim() != 4:
                raise NotImplementedError(
                    "this model's masks have no entry for each token; use its sdpa or eager attention"
                )
            rows = torch.arange(len(index), device=index.device)[:, None, None]
            chosen = full_mask.expand(len(index), *full_mask.shape[1:])[rows, 0, index[:, :, None], index[:, None]]
            hidden = ~(real[:, None] | torch.eye(index.shape[1], dtype=torch.bool, device=index.device))
            return chosen.masked_fill(hidden, False if chosen.dtype == torch.bool else torch.finfo(chosen.dtype).min)[
                :, None
            ]

        return PressMask(padding_mask, self.arguments, build, place=self.place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise NotImplementedError(
            f"this model reads `{name}` of its attention mask, which compressed attention does not support"
        )


def mask(
    batch_size: int, q_length: int, kv_length: int, q_offset: Any = 0, kv_offset: int = 0, **kwargs: Any
) -> PressMask:
    """Store the arguments of a mask, which is built when an attention needs it. Registered as `kvpress`."""
    stored = kv_length, kv_offset
    if kwargs.get("local_size") is None:
        # A PressLayer reports its stored pairs, for use without a press. Under a press, native attention reads all tokens.
        kv_length, kv_offset = kv_length + kv_offset, 0
    arguments = {
        "batch_size": batch_size, "q_length": q_length, "kv_length": kv_length,
        "q_offset": q_offset, "kv_offset": kv_offset, **kwargs,
    }  # fmt: skip
    return PressMask(
        kwargs.get("attention_mask"),
        arguments,
        ALL_MASK_ATTENTION_FUNCTIONS[native_name(kwargs["config"])],
        stored=stored,
    )
