# SPDX-License-Identifier: Apache-2.0
"""`diffuse`: generate text with a masked-diffusion language model, block by block."""

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
from kvpress.diffusion.reader import BlockCache, DiffusionReader
from kvpress.diffusion.settings import Cached, DiffusionSettings, choose
from kvpress.hf.attention.attention_override import attending
from kvpress.hf.attention.bidirectional import check_bidirectional
from kvpress.hf.positions import check_positions
from kvpress.hf.session.checks import check_padding


@dataclass(eq=False)
class Diffusion:
    """Result of `diffuse`."""

    sequences: Tensor
    """Prompts and new tokens `[B, prompt + new_tokens]`; the mask token where no token is written yet."""
    steps: list[int] = field(default_factory=list)
    """Steps of each finished block."""
    forwards: int = 0
    """Passes of the model."""
    full_forwards: int = 0
    """Passes that read the complete sequence."""
    fed_tokens: int = 0
    """Tokens that all passes read, over all rows."""
    cache: BlockCache | None = None
    """Pairs that the last block read, for `kvpress.memory_report`; None without a cache, and after a pass that failed."""
    finished: bool = False
    """Whether all tokens are written."""
    written: int = 0
    """Number of written tokens, over all rows."""

    @property
    def tokens_per_forward(self) -> float:
        """Tokens that a pass of the model writes in a row, on average."""
        return self.written / (len(self.sequences) * self.forwards) if self.forwards else 0.0

    def _count(self, reader: DiffusionReader) -> None:
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
    """Write `new_tokens` after each prompt with a model that predicts masked tokens; its causal mask is removed.

    Blocks of `block_length` tokens are written from left to right, and the tokens of a block by falling confidence.

    Args:
        model: a masked-diffusion language model.
        inputs: token ids `[B, n]`, or the output of a tokenizer; rows are padded on the left.
        new_tokens: tokens to write.
        attention_mask: mask of the real tokens, `[B, n]`.
        mask_token: id of the mask token, which is never written; None is the `mask_token_id` of the model's configuration.
        block_length: tokens in a block.
        steps: passes per block, each of which writes equally many tokens; None is `block_length`, one token at a time.
        threshold: write, in each pass, all tokens with at least this probability, and at least the most likely one. It replaces
            `steps`.
        temperature: temperature of sampling, with torch's generator; 0 takes the most likely token.
        cache: tokens that a step reads, after Fast-dLLM. "none": the complete sequence. "prefix": the block and all tokens
            after it, with stored pairs of the tokens before. "dual": the block alone, with stored pairs of all other tokens.
            Stored pairs come from the last pass that read the complete sequence.
        press: press, or its spec, of the stored pairs around the block: it evicts, such as `sparse_dllm:0.5`, or encodes them.
        full_steps: first steps of each block that read the complete sequence.
        refresh_every: interval of later steps that read the complete sequence; None is never.
        on_step: called after each step with the result so far. After an error it still has the tokens that were written.

    Returns:
        The sequences, with counts of steps and passes.

    Raises:
        ValueError, TypeError: an argument is out of range, or has no effect with another one, or the model has fewer
            positions than the sequences.
        NotImplementedError: the model's causal mask cannot be removed, or the press does not work around a block.
        RuntimeError: a press is active on the model.
        FloatingPointError: logits are not finite.

    Papers: Nie et al., Large Language Diffusion Models, 2025, arXiv:2502.09992; Wu et al., Fast-dLLM, 2025.
    Differs from the papers: rows of a batch continue until the block of each is full; a full row ignores further steps. Models
    whose logits are for the next token, such as Dream, are not supported.
    """
    settings = DiffusionSettings(
        new_tokens, block_length, steps, threshold, temperature, cache, full_steps, refresh_every
    )
    ids, real = _prompt(inputs, attention_mask)
    mask_token = _mask_token(model, mask_token, ids)
    facts = check_bidirectional(model, ids.shape[1] + new_tokens)
    longest = int(real.sum(dim=1).max()) + new_tokens
    check_positions(model.config, longest, f"shorten the prompts, or lower new_tokens={new_tokens}")
    press = None if press is None else get_press(press)
    if press is not None and cache == "none":
        raise ValueError(
            f"{type(press).__name__} acts on stored pairs, and cache='none' stores none: use 'prefix' or 'dual'"
        )
    most_steps = block_length if steps is None else steps
    if press is not None and full_steps >= most_steps:
        raise ValueError(
            f"{type(press).__name__} acts on stored pairs, which no step of a block reads: full_steps={full_steps} must be "
            f"below {most_steps}, the number of steps"
        )
    recipe = Recipe() if press is None else recipe_around(press, facts, block_length)

    result = Diffusion(torch.cat([ids, ids.new_full((len(ids), new_tokens), mask_token)], dim=1))
    mask = torch.cat([real, real.new_ones(len(ids), new_tokens)], dim=1)
    reader = DiffusionReader(model, facts, recipe, mask, prefix=cache == "prefix")
    try:
        with attending(model, reader.attend):
            for first, stop in settings.blocks(ids.shape[1]):
                _write_block(result, reader, settings, first, stop, mask_token, on_step)
    except BaseException as error:
        result._count(reader)
        error.add_note(
            f"diffuse had written {result.written} of {len(ids) * new_tokens} tokens and finished {len(result.steps)} blocks; "
            "pass on_step to receive the result after every step"
        )
        raise
    result.finished = True
    return result


def _write_block(
    result: Diffusion,
    reader: DiffusionReader,
    settings: DiffusionSettings,
    first: int,
    stop: int,
    mask_token: int,
    on_step: Callable[[Diffusion], None] | None,
) -> None:
    """Write the tokens from `first` to `stop`, step by step."""
    block, step = result.sequences[:, first:stop], 0
    open_tokens = torch.ones_like(block, dtype=torch.bool)
    while bool(open_tokens.any()):
        if settings.reads_all(step):
            logits = reader.read(result.sequences, first, stop, fill=not settings.reads_all(step + 1))
        else:
            logits = reader.reread(result.sequences, first, stop)
        new = choose(settings, step, logits, open_tokens, mask_token)
        block.copy_(new.where(new >= 0, block))
        open_tokens &= new < 0
        result.written += int((new >= 0).sum())
        step += 1
        if not bool(open_tokens.any()):
            result.steps.append(step)
        result._count(reader)
        if on_step is not None:
            on_step(result)


def _prompt(inputs: Tensor | Mapping[str, Tensor], attention_mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return ids and the mask of real tokens, both `[B, n]`."""
    if isinstance(inputs, Mapping):
        if attention_mask is not None and "attention_mask" in inputs:
            raise ValueError("attention_mask is given twice: in inputs, and as an argument")
        attention_mask = inputs.get("attention_mask", attention_mask)
        if "input_ids" not in inputs:
            raise ValueError(f"inputs must have input_ids, token ids [batch, tokens], got {sorted(inputs)}")
        inputs = inputs["input_ids"]
    if not isinstance(inputs, Tensor) or inputs.dim() != 2 or inputs.is_floating_point():
        actual = f"{inputs.dtype} {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise TypeError(f"inputs must be token ids, integers [batch, tokens], got {actual}")
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
        raise ValueError("attention_mask has holes: rows must be padded on the left only")
    return inputs.long(), real


def _mask_token(model: Any, mask_token: int | None, ids: Tensor) -> int:
    """Return the mask token, and check it and the ids against the vocabulary."""
    size = model.get_input_embeddings().num_embeddings
    if mask_token is None:
        mask_token = getattr(model.config, "mask_token_id", None)
        if mask_token is None:
            raise ValueError(
                f"the configuration of {type(model).__name__} has no mask_token_id: pass the id of the mask token as "
                "mask_token"
            )
    if isinstance(mask_token, bool) or not isinstance(mask_token, int) or not 0 <= mask_token < size:
        raise ValueError(f"mask_token must be a token id in [0, {size - 1}], got {mask_token!r}")
    if int(ids.min()) < 0 or int(ids.max()) >= size:
        raise ValueError(f"inputs must be token ids in [0, {size - 1}], got {int(ids.min())} to {int(ids.max())}")
    return mask_token
