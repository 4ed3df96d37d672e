# SPDX-License-Identifier: Apache-2.0
"""Every causal type of transformers, tiny and random, under a press: does it work, is it refused, or is it wrong?

    python -m benchmarks.families [--types llama,gpt2] [--out docs/models.md]

Each type runs in a process of its own, on one core. A model works if (1) its logits and greedy tokens under a press that
removes nothing are those of the model alone; (2) under `knorm:0.5` every layer whose stock cache grows holds half of the
prompt's pairs; and (3) its logits are then those of the model's own attention with exactly the evicted pairs hidden.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvpress
from benchmarks import tiny
from kvpress.hf.attention.self_caching import reads_itself
from kvpress.hf.models import attention_modules, cache_place, uses_interface, with_cache

PROMPT, STEPS, ROWS = 40, 5, 2
SPEC = "knorm:0.5"
CLOSE = {"atol": 2e-4, "rtol": 1e-3}
SECONDS = 120
WORKS, REFUSED, WRONG, IGNORED = "works", "refused", "silently wrong", "silently uncompressed"
CRASHES, UNBUILT, STOCK = "crashes", "not buildable", "stock fails"
BY_ITSELF = "reads its cache by itself"
VERDICTS = (WORKS, REFUSED, CRASHES, WRONG, IGNORED, STOCK, UNBUILT)
ORACLE = "kvpress_families_oracle"


@dataclass(frozen=True)
class Row:
    """The verdict on one type, and why it is not `works`."""

    kind: str
    verdict: str
    reason: str = ""


class FailedError(Exception):
    """Ends the trial of a type with a verdict."""

    def __init__(self, verdict: str, reason: Any) -> None:
        super().__init__(verdict, reason)
        self.verdict, self.reason = verdict, _one_line(reason)


def _one_line(reason: Any) -> str:
    """Return a reason as one short line."""
    if not isinstance(reason, BaseException):
        return str(reason)
    text = " ".join(str(reason).split())
    if isinstance(reason, (NotImplementedError, ValueError, TypeError)) and "kvpress" in _file(reason):
        return text
    return f"{type(reason).__name__}: {text[:160]}"


def _file(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return frames[-1].filename if frames else ""


@dataclass
class Run:
    """Logits of a model for a prompt and the tokens after it, and its cache afterwards."""

    logits: list[Tensor]
    cache: Any


class Prompt:
    """Random prompt and random tokens that follow it."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.ids = torch.randint(3, tiny.VOCAB - 3, (ROWS, PROMPT), generator=generator)
        self.next = torch.randint(3, tiny.VOCAB - 3, (ROWS, STEPS), generator=generator)

    @torch.no_grad()
    def run(self, model: Any, cache: Any = None) -> Run:
        """Read the prompt, then the following tokens one by one."""
        logits = []
        for ids in (self.ids, *self.next.split(1, dim=1)):
            out = model(input_ids=ids, **with_cache(cache), use_cache=True)
            cache = getattr(out, "past_key_values", None)
            logits.append(out.logits)
            if cache is None:
                raise FailedError(IGNORED, "the model keeps no cache")
        return Run(logits, cache)

    @torch.no_grad()
    def generate(self, model: Any) -> Tensor:
        """Continue the prompt greedily."""
        mask = torch.ones_like(self.ids)
        tokens: Tensor = model.generate(self.ids, attention_mask=mask, max_new_tokens=STEPS, do_sample=False)
        return tokens


class Oracle:
    """The model's own attention; later queries do not see those pairs of the prompt that are not in `kept`."""

    def __init__(self, model: Any, kept: list[list[list[Tensor]]], halved: Sequence[int]) -> None:
        self.model, self.kept, self.halved = model, kept, halved
        self.native = model.config._attn_implementation
        self.owner: dict[int, tuple[int, Tensor]] = {}
        self.last = self.stored = -1

    def attention(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Attend as the model does, but only to the pairs of the keys' layer that are not evicted."""
        eager = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        run = ALL_ATTENTION_FUNCTIONS.get_interface(self.native, eager)
        layer = self.owner[id(key)][0] if id(key) in self.owner else self.last
        if query.shape[2] == 1 and key.shape[2] > PROMPT and layer in self.halved:
            attention_mask = self._hiding(layer, query, key, attention_mask)
        return run(module, query, key, value, attention_mask, *args, **kwargs)

    def _recording(self, update: Callable[..., Any]) -> Callable[..., Any]:
        """Return an `update` of caches that remembers which layer was updated last, and which layer returned which keys."""

        def recorded(cache: Any, keys: Tensor, values: Tensor, layer: int, *args: Any, **kwargs: Any) -> Any:
            updated = update(cache, keys, values, layer, *args, **kwargs)
            self.last, self.stored, self.owner[id(updated[0])] = layer, updated[0].shape[2], (layer, updated[0])
            return updated

        return recorded

    def _shown(self, layer: int, stored: int) -> Tensor:
        """Return which of the `stored` columns of a layer are not evicted, `[B, H, stored]`."""
        shown = torch.ones(ROWS, len(self.kept[layer][0]), stored, dtype=torch.bool)
        for row, heads in enumerate(self.kept[layer]):
            for head, kept in enumerate(heads):
                shown[row, head, :PROMPT] = False
                shown[row, head, kept[kept < PROMPT]] = True
        return shown

    def _hiding(self, layer: int, query: Tensor, key: Tensor, mask: Tensor | None) -> Tensor:
        shown, heads = self._shown(layer, key.shape[2]), query.shape[1]
        tiled = key.shape[1] > shown.shape[1] and not torch.equal(key[:, 0], key[:, 1])
        times = heads // shown.shape[1]
        shown = (shown.repeat(1, times, 1) if tiled else shown.repeat_interleave(times, dim=1))[:, :, None]
        if mask is None or mask.dtype == torch.bool:
            return shown if mask is None else shown & mask
        return mask.masked_fill(~shown, torch.finfo(mask.dtype).min)

    def without_evicted(self, logits: Tensor) -> Tensor:
        """Return logits of one query per head with the evicted pairs of the layer that was updated last hidden.

        They are `[B * Hq, 1, n]`, `[B, Hq, 1, n]` or `[B, streams, Hq, 1, n]`; further columns are of new tokens.
        """
        if self.last not in self.halved or not PROMPT < self.stored <= logits.shape[-1]:
            return logits
        shown = self._shown(self.last, self.stored)
        times = logits.numel() // logits.shape[-1] // ROWS // shown.shape[1]
        shown = shown.repeat(1, times, 1) if logits.dim() == 5 else shown.repeat_interleave(times, dim=1)
        shown = functional.pad(shown, (0, logits.shape[-1] - self.stored), value=True)
        return logits.masked_fill(~shown.reshape(logits.shape), float("-inf"))

    def run(self, prompt: Prompt) -> Run:
        """Read everything with the oracle instead of the attention, or of its softmax where a model has its own attention."""
        update, Cache.update = Cache.update, self._recording(Cache.update)
        try:
            if not all(uses_interface(module) for module in attention_modules(self.model)):
                with HidingInSoftmax(self):
                    return prompt.run(self.model)
            AttentionInterface.register(ORACLE, self.attention)
            AttentionMaskInterface.register(ORACLE, ALL_MASK_ATTENTION_FUNCTIONS[self.native])
            self.model.set_attn_implementation(ORACLE)
            return prompt.run(self.model)
        finally:
            Cache.update = update
            if self.model.config._attn_implementation == ORACLE:
                self.model.set_attn_implementation(self.native)


class HidingInSoftmax(TorchFunctionMode):
    """Hides the pairs of an oracle wherever a softmax is computed."""

    def __init__(self, oracle: Oracle) -> None:
        super().__init__()
        self.oracle = oracle

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (functional.softmax, torch.softmax, Tensor.softmax):
            args = (self.oracle.without_evicted(args[0]), *args[1:])
        elif func is functional.scaled_dot_product_attention:
            query, key, value = args
            mask = (kwargs or {}).get("attn_mask")
            logits = query @ key.repeat_interleave(query.shape[1] // key.shape[1], dim=1).mT / query.shape[-1] ** 0.5
            if kwargs["is_causal"]:
                mask = torch.full(logits.shape[-2:], float("-inf")).triu(1)
            elif mask is not None and mask.dtype == torch.bool:
                mask = torch.zeros(mask.shape).masked_fill(~mask, float("-inf"))
            weights = self.oracle.without_evicted(logits if mask is None else logits + mask).softmax(dim=-1)
            return weights @ value.repeat_interleave(query.shape[1] // value.shape[1], dim=1)
        return func(*args, **(kwargs or {}))


def grown(cache: Any) -> list[int]:
    """Return the layers of a stock cache that hold a pair for every token."""
    layers = []
    for index, layer in enumerate(_layers(cache)):
        keys = getattr(layer, "keys", None)
        if isinstance(keys, Tensor) and keys.dim() == 4 and keys.shape[2] == PROMPT + STEPS:
            layers.append(index)
    return layers


def _layers(cache: Any) -> list[Any]:
    if isinstance(cache, Cache) and hasattr(cache, "layers") and cache.layers:
        return list(cache.layers)
    inner = getattr(cache, "self_attention_cache", None)
    return [] if inner is None else list(inner.layers)


def verdict(kind: str) -> Row:
    """Try one type."""
    try:
        return Row(kind, WORKS, BY_ITSELF if _try(kind) else "")
    except FailedError as failed:
        return Row(kind, failed.verdict, failed.reason)


def _try(kind: str) -> bool:
    """Return whether a working model reads its cache in its own attention; raise the fault of a model that does not work."""
    model, prompt = _or(UNBUILT, partial(tiny.tiny, kind)), Prompt()
    try:
        stock = _or(STOCK, partial(prompt.run, model))
    except FailedError as failed:
        if failed.verdict == IGNORED:
            _allowed(model, SPEC)  # a press must raise the refusal
        raise
    _allowed(model, "none")
    with kvpress.get_press("none")(model):
        same = _or(CRASHES, partial(prompt.run, model))
    _compare("with nothing removed", same, stock)
    expected = _or(STOCK, partial(prompt.generate, model))
    with kvpress.get_press("none")(model):
        if not torch.equal(_or(CRASHES, partial(prompt.generate, model)), expected):
            raise FailedError(WRONG, "other tokens with nothing removed")
    halved = grown(stock.cache)
    _allowed(model, SPEC)
    with kvpress.get_press(SPEC)(model):
        half = _or(CRASHES, partial(prompt.run, model))
        kept = kvpress.kept_positions(getattr(half.cache, "self_attention_cache", half.cache))
    uncut = [layer for layer in halved if any(len(head) > PROMPT // 2 + STEPS for row in kept[layer] for head in row)]
    if uncut or not halved:
        raise FailedError(IGNORED, f"cache layers {uncut} hold all pairs" if halved else "no cache layer grows")
    _compare("with half the pairs evicted", half, Oracle(model, kept, halved).run(prompt))
    return any(reads_itself(module) for module in attention_modules(model) if cache_place(module) in halved)


def _or(outcome: str, act: Callable[[], Any]) -> Any:
    """Call `act`, which may fail with an outcome; an error raised by the library itself is a refusal."""
    try:
        return act()
    except FailedError:
        raise
    except Exception as error:
        refused = isinstance(error, (NotImplementedError, ValueError)) and "/kvpress/" in _file(error)
        raise FailedError(REFUSED if outcome == CRASHES and refused else outcome, error) from error


def _allowed(model: Any, spec: str) -> bool:
    """Enter and leave a press, so that its refusals are distinguished from failures of a model under it."""

    def enter() -> None:
        with kvpress.get_press(spec)(model):
            pass

    _or(CRASHES, enter)
    return True


def _compare(when: str, actual: Run, expected: Run) -> None:
    for step, (ours, theirs) in enumerate(zip(actual.logits, expected.logits, strict=True)):
        if not torch.allclose(ours, theirs, **CLOSE):
            raise FailedError(WRONG, f"logits differ by {(ours - theirs).abs().max():.2g} {when}, step {step}")


def guarded(kind: str) -> Row:
    """Try one type in a process of its own, so that a crash or a hang costs only its row."""
    receive, send = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_report, args=(kind, send))
    process.start()
    send.close()
    try:
        if not receive.poll(SECONDS):
            return Row(kind, CRASHES, f"no verdict after {SECONDS} seconds")
        row: Row = receive.recv()
        return row
    except EOFError:
        process.join()
        return Row(kind, CRASHES, f"the process ended with {process.exitcode}")
    finally:
        process.kill()
        process.join()


def _report(kind: str, send: Connection) -> None:
    try:
        send.send(verdict(kind))
    except Exception as error:
        send.send(Row(kind, CRASHES, f"{type(error).__name__}: {error}"))


def page(rows: Sequence[Row]) -> str:
    """Return the page with the verdict on each type."""
    counts = {name: sum(row.verdict == name for row in rows) for name in VERDICTS}
    ran = len(rows) - counts[UNBUILT] - counts[STOCK]
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    lines = [
        "# Models",
        "",
        "<!-- Written by benchmarks/families.py. -->",
        "",
        f"Every type that `AutoModelForCausalLM` of transformers {transformers.__version__} lists, built tiny and at random",
        f"from its configuration class and run on a CPU (torch {torch.__version__}, float32, {today}):",
        "",
        "```",
        "python -m benchmarks.families --out docs/models.md",
        "```",
        "",
        "A type **works** if (1) logits and greedy tokens under the press `none` are those of the model alone; (2) under",
        f"`{SPEC}` every layer whose stock cache grows holds half of the prompt's pairs; (3) its logits are then those of the",
        "model's own attention with exactly the evicted pairs hidden. It is **refused** if a press raises an error with",
        "the reason, before or in the first layer. *Stock fails* and *not buildable* are types whose tiny version",
        "does not run, or does not exist, without any press.",
        "",
        "A type that **reads its cache by itself** caches latents (multi-head latent attention), adds a position bias with an",
        "entry for each column, mixes the cached values of heads, or does not call the attention interface of transformers.",
        "Presses that score pairs by their keys and values (`knorm`, `keydiff`, `streaming_llm`,",
        "`random`, with head budgets, chunks and schedules around them) and codecs (`kivi`, `turboquant`, `gear_l`) work and",
        "free memory, but no step gets faster: the model gets all columns, evicted ones empty. A step took up to twice as",
        "long as in the stock model, and up to five times with a codec (2048 tokens, one CPU thread). Presses that need",
        "queries, attention weights, selected reading or rotated keys are refused. Latents are stored unchanged; all heads",
        "share them, so a press scores the keys and values of all heads side by side. Where heads mix their values",
        "(`diffllama`, `doge`), all heads keep the same pairs, and are scored side by side too.",
        "",
        f"Of {ran} types that run, {counts[WORKS]} work ({100 * counts[WORKS] // max(1, ran)}%); none may be wrong or left "
        "uncompressed without an error.",
        "",
        "Quantised weights and LoRA adapters have [their own table](weights.md).",
        "",
        "| verdict | types |",
        "|---|---|",
        *(f"| {name} | {count} |" for name, count in counts.items()),
        "",
        "| type | verdict | reason |",
        "|---|---|---|",
        *(f"| `{row.kind}` | {row.verdict} | {row.reason.replace('|', '/')} |" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Try the types and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", help="types, separated by commas; all by default")
    parser.add_argument("--out", type=Path, help="Markdown page to write")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for kind in ("llama", "bert"):  # import common modules once, before processes are forked
        verdict(kind)
    rows = []
    for kind in arguments.types.split(",") if arguments.types else tiny.TYPES:
        rows.append(guarded(kind))
        print(f"{rows[-1].kind:28} {rows[-1].verdict:22} {rows[-1].reason}", flush=True)
    for name in VERDICTS:
        print(f"{sum(row.verdict == name for row in rows):4} {name}")
    if arguments.out:
        arguments.out.write_text(page(rows))


if __name__ == "__main__":
    main()
