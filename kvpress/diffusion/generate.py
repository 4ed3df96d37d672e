# SPDX-License-Identifier: Apache-2.0
"""`diffuse`: text by a masked-diffusion language model, block by block."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kvpress.core.press import BasePress
from kvpress.core.recipe import Recipe
from kvpress.core.spec import get_press
from kvpress.diffusion.presses import recipe_around
from kvpress.diffusion.reader import BlockCache, Reader
from kvpress.diffusion.settings import Cached, Settings, choose
from kvpress.hf.attending import attending
from kvpress.hf.bidirectional import check_bidirectional
from kvpress.hf.checks import check_padding


@dataclass(eq=False)
class Diffusion:
    """What `diffuse` has written.

    `sequences [B, prompt + new_tokens]` hold the mask token where nothing is written yet, `steps` how many steps each finished
    block took. `forwards` passes of the model read `fed_tokens` tokens, over all rows; `full_forwards` of them read the whole
    sequence. `cache` holds the pairs that the last block read, for `kvpress.memory_report`; None where none were held, and
    after a pass that failed.
    """

    sequences: Tensor
    steps: list[int] = field(default_factory=list)
    forwards: int = 0
    full_forwards: int = 0
    fed_tokens: int = 0
    cache: BlockCache | None = None
    finished: bool = False
    written: int = 0

    @property
    def tokens_per_forward(self) -> float:
        """Tokens written in a row per pass of the model."""
        return self.written / (len(self.sequences) * self.forwards) if self.forwards else 0.0

    def _count(self, reader: Reader) -> None:
        self.forwards, self.full_forwards = reader.forwards, reader.full_forwards
        self.fed_tokens, self.cache = reader.fed_tokens, reader.cache


@torch.no_grad()
def diffuse(
    model: Any,
    inputs: Tensor | Mapping[str, Tensor],
    new_tokens: int = 128,
    *,
    attention_mask: Tensor | None = None,
    mask_token: int | None = None,
    block_length: int = 32,
    steps: int | None = None,
    threshold: float | None = None,
    temperature: float = 0.0,
    cache: Cached = "dual",
    press: BasePress | str | None = None,
    full_steps: int = 1,
    refresh_every: int | None = None,
    on_step: Callable[[Diffusion], None] | None = None,
) -> Diffusion:
    """Write `new_tokens` behind each prompt with a model that fills in masked tokens; its causal mask is removed.

    Blocks of `block_length` are written from left to right, and the tokens of a block in the order of the model's confidence:
    over `steps` passes, equally many in each (`block_length`, so one at a time, by default), or in each pass all that reach the
    probability `threshold`, at least the surest. `temperature` draws tokens, by torch's generator; 0 takes the most likely.

    What a step reads (Fast-dLLM): with `cache` "none" the whole sequence; with "prefix" the block and all behind it, before
    the pairs of what comes earlier; with "dual" the block alone, between the pairs of all other tokens. These are of the last
    pass that read the whole sequence: the first `full_steps` of each block, and from there every `refresh_every`-th, None for
    no more. A `press`, or its spec, decides what is held around the block: it evicts, as `sparse_dllm:0.5` does, and its
    codec encodes.

    `inputs` are token ids `[B, n]`, or what a tokenizer returns; rows are padded on the left, as `attention_mask [B, n]` says.
    `mask_token` is the id that stands for an unknown token, by default the `mask_token_id` of the model's configuration; it
    is never written. `on_step` is called after each step with the result so far; when something is raised, it keeps what
    was written before.

    Papers: Nie et al., Large Language Diffusion Models, 2025, arXiv:2502.09992; Wu et al., Fast-dLLM, 2025.
    Differs from the papers: rows of a batch go on until the block of each is full; a step that has nothing left to write in a
    row leaves it. Models whose logits are of the next token, such as Dream, are not supported.

    Raises:
        ValueError, TypeError: an argument is out of range, or says nothing beside another one.
        NotImplementedError: the model's causal mask cannot be removed, or the press needs what a block does not show.
        RuntimeError: a press is active on the model.
        FloatingPointError: logits are not finite.
    """
    settings = Settings(new_tokens, block_length, steps, threshold, temperature, cache, full_steps, refresh_every)
    ids, real = _prompt(inputs, attention_mask)
    mask_token = _mask_token(model, mask_token, ids)
    facts = check_bidirectional(model, ids.shape[1] + new_tokens)
    press = None if press is None else get_press(press)
    if press is not None and cache == "none":
        raise ValueError(
            f"{type(press).__name__} acts on what is held, and cache='none' holds nothing: use 'prefix' or 'dual'"
        )
    recipe = Recipe() if press is None else recipe_around(press, facts, block_length)

    found = Diffusion(torch.cat([ids, ids.new_full((len(ids), new_tokens), mask_token)], dim=1))
    mask = torch.cat([real, real.new_ones(len(ids), new_tokens)], dim=1)
    reader = Reader(model, facts, recipe, mask, prefix=cache == "prefix")
    try:
        with attending(model, reader.attend):
            for first, stop in settings.blocks(ids.shape[1]):
                _write_block(found, reader, settings, first, stop, mask_token, on_step)
    except BaseException as error:
        found._count(reader)
        error.add_note(
            f"diffuse had written {found.written} of {len(ids) * new_tokens} tokens, of which {len(found.steps)} blocks are "
            "finished; on_step is called with the result after every step, and keeps it"
        )
        raise
    found.finished = True
    return found


def _write_block(
    found: Diffusion,
    reader: Reader,
    settings: Settings,
    first: int,
    stop: int,
    mask_token: int,
    on_step: Callable[[Diffusion], None] | None,
) -> None:
    block, step = found.sequences[:, first:stop], 0
    open_tokens = torch.ones_like(block, dtype=torch.bool)
    while bool(open_tokens.any()):
        if settings.reads_all(step):
            logits = reader.read(found.sequences, first, stop, fill=not settings.reads_all(step + 1))
        else:
            logits = reader.reread(found.sequences, first, stop)
        new = choose(settings, step, logits, open_tokens, mask_token)
        block.copy_(new.where(new >= 0, block))
        open_tokens &= new < 0
        found.written += int((new >= 0).sum())
        step += 1
        if not bool(open_tokens.any()):
            found.steps.append(step)
        found._count(reader)
        if on_step is not None:
            on_step(found)


def _prompt(inputs: Tensor | Mapping[str, Tensor], attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids `[B, n]` and which of them are real."""
    if isinstance(inputs, Mapping):
        if attention_mask is not None and "attention_mask" in inputs:
            raise ValueError("attention_mask is given twice: in inputs, and by itself")
        attention_mask = inputs.get("attention_mask", attention_mask)
        inputs = inputs["input_ids"]
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
        found = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(f"inputs must be token ids, whole numbers [batch, tokens], got {found}")
    if not inputs.numel():
        raise ValueError(f"inputs must hold at least one row and one token, got {tuple(inputs.shape)}")
    if attention_mask is None:
        return inputs.long(), torch.ones_like(inputs, dtype=torch.bool)
    if attention_mask.shape != inputs.shape:
        raise ValueError(
            f"attention_mask must have the shape of the prompts, {tuple(inputs.shape)}, got {tuple(attention_mask.shape)}"
        )
    check_padding(attention_mask)
    real = attention_mask.bool()
    if bool((real.long().diff(dim=1) < 0).any()):
        raise ValueError("attention_mask has holes: rows are padded on the left alone")
    return inputs.long(), real


def _mask_token(model: Any, mask_token: int | None, ids: Tensor) -> int:
    size = model.get_input_embeddings().num_embeddings
    if mask_token is None:
        mask_token = getattr(model.config, "mask_token_id", None)
        if mask_token is None:
            raise ValueError(
                f"the configuration of {type(model).__name__} has no mask_token_id: give the id of the token that stands for "
                "an unknown one as mask_token"
            )
    if isinstance(mask_token, bool) or not isinstance(mask_token, int) or not 0 <= mask_token < size:
        raise ValueError(f"mask_token must be a token id in [0, {size - 1}], got {mask_token!r}")
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"inputs must be token ids in [0, {size - 1}], got {int(ids.min())} to {int(ids.max())}")
    return mask_token
