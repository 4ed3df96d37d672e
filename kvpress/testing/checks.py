# SPDX-License-Identifier: Apache-2.0
"""Checks that every press must pass, each a function of a press and a model that raises `Fault`."""

from __future__ import annotations

import copy
import sys
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

import kvpress
from kvpress.cache.attention import Logits, attend
from kvpress.cache.layout import Layout
from kvpress.cache.segment import Segment
from kvpress.cache.selection import Selection
from kvpress.core.press import BasePress, ComposedPress, built
from kvpress.core.recipe import Eviction, Recipe, recipe_of
from kvpress.hf.models import cache_place, facts_of, with_cache
from kvpress.plan import Geometry, plan
from kvpress.testing.comparison import Fault, Positions, explain, positions, unequal_positions
from kvpress.testing.memory import held_by_cache
from kvpress.testing.models import fingerprint, grow, noise, padded_batch, position_ids, tiny_models, tokens
from kvpress.testing.oracle import decode_both
from kvpress.testing.rows import check_rows_alone

LENGTHS = (300, 229, 152)
"""Tokens of the rows of a padded batch: enough for the default windows and dense tails, one row by an odd padding."""
ALL_PAIRS = 10**6
"""Budget with which a selector reads all pairs."""
PLANNED = 0.03
"""Largest relative error of planned bytes."""


@dataclass(frozen=True)
class Check:
    """A property of presses."""

    name: str
    """Name of the property, which its error begins with."""
    run: Callable[[BasePress, Any, str], None]
    """Raises `Fault` if the press lacks the property on a model."""
    applies: Callable[[Recipe], bool] = lambda recipe: True
    """Whether presses with a recipe have the property."""


def check_press(press: BasePress | str, model: Any = None) -> list[str]:
    """Check that a press has the properties that the test suites check for every press of this library.

    The recipe of the press decides which checks apply. A press that evicts nothing from prompts of 150 to 300 tokens, or
    that reads all of their pairs, is not tested by much: use small budgets, windows and groups.

    Args:
        press: the press, or its spec.
        model: a float32 model on the CPU; None for a tiny random Llama and a tiny random Gemma with sliding windows. A press
            that reads text needs a model with a tokenizer, from `kvpress.load_model`.

    Returns:
        Names of the checks that ran.

    Raises:
        Fault: a property does not hold; an `AssertionError` that begins with the name of the property.
        TypeError: the press is no press, or the model no model.
        ValueError: the model is no float32 model on the CPU.
    """
    checked_press: BasePress = built(press)
    if not isinstance(checked_press, BasePress):
        actual = checked_press.__name__ if isinstance(checked_press, type) else type(checked_press).__name__
        raise TypeError(f"press must be a press, such as KnormPress(0.5), or a spec, got {actual}")
    if not (model is None or isinstance(model, nn.Module)):
        raise TypeError(f"model must be a loaded model of transformers, got {type(model).__name__}")
    names: list[str] = []
    for checked in tiny_models() if model is None else (model,):
        if checked.dtype != torch.float32 or checked.device.type != "cpu":
            raise ValueError(
                f"model must be in float32 on the CPU, so that errors are more than rounding; got {checked.dtype} on "
                f"{checked.device}: call model.float().cpu()"
            )
        recipe = recipe_of(checked_press, facts_of(checked))
        for check in CHECKS:
            if check.applies(recipe):
                with torch.no_grad():
                    check.run(checked_press, checked, f"{check.name} ({checked.config.model_type})")
                names.append(check.name)
    return list(dict.fromkeys(names))


# -- every press -------------------------------------------------------------------------------------------------------


def check_state(press: BasePress, model: Any, name: str) -> None:
    """Check that a request changes neither the press nor the model, and so no later request."""
    unused, before = copy.deepcopy(press), fingerprint(model)
    other_batch, prompt = padded_batch([*LENGTHS[1:]], seed=7), (tokens(2, LENGTHS[0], seed=2), None)
    expected = generate(model, copy.deepcopy(press), *prompt)
    generate(model, press, *other_batch)
    if changed := sorted(changes(press, unused)):
        raise Fault(name, f"a request changed {', '.join(changed)}; state of a request belongs in an observer")
    equal_outputs(name, "a second request", generate(model, press, *prompt), "the same request alone", expected)
    if fingerprint(model) != before:
        raise Fault(name, "hooks, attributes or the attention of the model differ after the `with` block")


def changes(press: BasePress, unused: BasePress) -> Iterator[str]:
    """Yield the attributes that differ between a press and its unused copy, those of inner presses included."""
    ours, theirs = ({k: v for k, v in vars(p).items() if k != "_last_cache"} for p in (press, unused))
    for key in ours.keys() | theirs.keys():
        if key not in ours or key not in theirs or differ(ours[key], theirs[key]):
            yield f"{type(press).__name__}.{key}"


def differ(first: Any, second: Any) -> bool:
    """Return whether two attributes differ, which may be tensors, presses, or lists of both."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        return not torch.equal(first, second)
    if isinstance(first, BasePress) and isinstance(second, BasePress):
        return any(changes(first, second))
    if isinstance(first, (list, tuple)) and isinstance(second, (list, tuple)):
        return len(first) != len(second) or any(map(differ, first, second))
    # Objects without `__eq__` are equal to themselves only: their copies are compared by type.
    comparable = "__eq__" in {name for kind in type(first).__mro__[:-1] for name in vars(kind)}
    return type(first) is not type(second) or (comparable and bool(first != second))


def check_rows(press: BasePress, model: Any, name: str) -> None:
    """Check that a row of a padded batch is stored and read as alone."""
    check_rows_alone(model, press, LENGTHS, name, exact=False)


def check_memory(press: BasePress, model: Any, name: str) -> None:
    """Check that the memory report counts all bytes that the cache holds, after a prompt and after generated tokens."""
    for count in (1, 10):
        cache = DynamicCache(config=model.config)
        generate(model, press, *padded_batch(list(LENGTHS)), max_new_tokens=count, **with_cache(cache))
        reported, held_size = kvpress.memory_report(cache).total_bytes, held_by_cache(cache)
        if reported != held_size:
            raise Fault(name, f"{reported} bytes are reported and {held_size} held after {count - 1} generated tokens")


def check_saving(press: BasePress, model: Any, name: str) -> None:
    """Check that a saved and loaded cache goes on, in a later turn, as the cache itself."""
    ids, mask = padded_batch(list(LENGTHS[:2]))
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask), **with_cache(cache))
    with tempfile.TemporaryDirectory() as folder:
        kvpress.save(cache, Path(folder) / "cache.kv", model)
        loaded = kvpress.load(Path(folder) / "cache.kv", model)
        logits = [later_turn(model, press, each_cache, mask) for each_cache in (cache, loaded)]
        difference = float((logits[0] - logits[1]).abs().max())
        if difference or positions(loaded) != positions(cache):
            raise Fault(name, f"logits of a later turn differ by {difference:.2g} from those without a file")


def later_turn(model: Any, press: BasePress, cache: Any, mask: Tensor) -> Tensor:
    """Read 5 tokens at once and 6 one by one behind a cache; return their logits `[B, 11, V]`."""
    outputs = []
    with press(model):
        for ids in tokens(len(mask), 11, seed=9).split([5, 1, 1, 1, 1, 1, 1], dim=1):
            mask = grow(mask, ids.shape[1])
            at = position_ids(mask, ids.shape[1])
            outputs.append(model(ids, attention_mask=mask, position_ids=at, **with_cache(cache)).logits)
    return torch.cat(outputs, dim=1)


def check_chunks(press: BasePress, model: Any, name: str) -> None:
    """Check that a prompt read in chunks keeps the same pairs as in one pass; noise may explain scores that tie."""
    batch = padded_batch(list(LENGTHS[:2]))
    _, whole_prompt = generate(model, press, *batch)
    _, chunks = generate(model, press, *batch, prefill_chunk_size=70)

    def noisy(seed: int) -> int:
        with noise(seed, model):
            return len(unequal_positions(generate(model, press, *batch)[1], whole_prompt))

    unequal = unequal_positions(chunks, whole_prompt)
    is_rounding, explained = explain(len(unequal), noisy)
    if not is_rounding:
        raise Fault(
            name,
            f"a prompt in chunks of 70 tokens keeps {len(unequal)} other pairs than in one pass, rounding explains "
            f"{explained:.0f}: {unequal[0]}",
        )


def check_threads(press: BasePress, model: Any, name: str) -> None:
    """Check that two threads in one `with` block get the results of requests one after another."""
    prompts = [tokens(1, length, seed=length) for length in LENGTHS[:2]]
    expected = [generate(model, press, prompt) for prompt in prompts]
    with press(model), switching_often(), ThreadPoolExecutor(2) as pool:
        results = [pool.submit(generate, model, None, prompts[n % 2]) for n in range(4)]
        for n, result in enumerate(results):
            equal_outputs(name, "a request beside another", result.result(), "alone", expected[n % 2])


@contextmanager
def switching_often() -> Iterator[None]:
    """Let threads alternate fifty times as often as the interpreter does by default."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def generate(
    model: Any, press: BasePress | None, ids: Tensor, mask: Tensor | None = None, **settings: Any
) -> tuple[Tensor, Positions]:
    """Generate eight tokens greedily; return sequences and positions of kept pairs. None for a press that is installed."""
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **settings}
    if press is None:
        output = model.generate(ids, attention_mask=torch.ones_like(ids) if mask is None else mask, **settings)
        return output.sequences, positions(output.past_key_values)
    with press(model):
        return generate(model, None, ids, mask, **settings)


def equal_outputs(
    name: str, words: str, actual: tuple[Tensor, Positions], reference: str, expected: tuple[Tensor, Positions]
) -> None:
    """Raise `Fault` unless two requests kept the same pairs and generated the same tokens."""
    if unequal := unequal_positions(actual[1], expected[1]):
        raise Fault(name, f"{words} keeps {len(unequal)} other pairs than {reference}: {unequal[0]}")
    if not torch.equal(actual[0], expected[0]):
        count = int((actual[0] != expected[0]).sum())
        raise Fault(name, f"{words} generates {count} other tokens than {reference}")


# -- presses that evict ------------------------------------------------------------------------------------------------


def evicts_prompts(recipe: Recipe) -> bool:
    """Whether pairs of every long prompt are evicted."""
    return any(step.compress is not None or not step.amount.keeps_all for step in recipe.acting("prefill"))


def check_freed(press: BasePress, model: Any, name: str) -> None:
    """Check that evicted pairs are neither stored nor counted."""
    cache = DynamicCache(config=model.config)
    with press(model):
        model(tokens(2, LENGTHS[0]), **with_cache(cache))
    part = kvpress.memory_report(cache).shrinking
    if part.kept >= part.seen or part.total_bytes >= part.uncompressed_bytes:
        raise Fault(
            name,
            f"{part.kept} of {part.seen} pairs stay after a prompt of {LENGTHS[0]} tokens, {part.total_bytes} of "
            f"{part.uncompressed_bytes} bytes",
        )


def only_hides(recipe: Recipe) -> bool:
    """Whether a step reads unchanged pairs: all that were not evicted."""
    changed = (recipe.codec, recipe.selector, recipe.pattern, recipe.dropping, recipe.chunk)
    return bool(recipe.evictions) and changed == (None,) * 5 and not any(map(changes_pairs, recipe.evictions))


def changes_pairs(step: Eviction) -> bool:
    """Whether an eviction changes keys or values of the pairs that stay."""
    rewriting = (step.rewrite, step.refit, step.compress, step.hook)
    return rewriting != (None,) * 4 or step.closes_gaps or step.beside > 0


def check_oracle(press: BasePress, model: Any, name: str) -> None:
    """Check that decoding on the evicted cache equals full attention with exactly the evicted pairs masked."""
    for ids, mask in (padded_batch(list(LENGTHS)), (tokens(2, LENGTHS[1]), None)):
        logits, expected, _ = decode_both(model, press, ids, mask)
        difference = float((logits - expected).abs().max())
        if not torch.allclose(logits, expected, atol=2e-4, rtol=1e-4):
            raise Fault(name, f"logits differ by {difference:.2g} from full attention with the evicted pairs masked")


# -- presses that quantise or select -----------------------------------------------------------------------------------


def sealed_cache(press: BasePress, model: Any) -> tuple[Any, Tensor]:
    """Return the cache of a padded batch after a prompt and a later turn, with its mask."""
    ids, mask = padded_batch(list(LENGTHS[:2]))
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, position_ids=position_ids(mask), **with_cache(cache))
    later_turn(model, press, cache, mask)
    return cache, grow(mask, 11)


def check_stored_pairs(press: BasePress, model: Any, name: str) -> None:
    """Check that attention to encoded pairs, and pairs taken from them, are those of the decoded pairs."""
    cache, _ = sealed_cache(press, model)
    segments = [s for layer in cache.layers if hasattr(layer, "store") for s in layer.store.segments if s.encoded]
    if not segments:
        raise Fault(name, f"no pair of prompts of {LENGTHS[:2]} tokens is encoded: use a smaller dense tail or group")
    for segment in segments:
        check_segment(segment, name)


def check_planned_bytes(press: BasePress, model: Any, name: str) -> None:
    """Check that `plan`, which reads `pair_bytes` of a codec and its kin, predicts the bytes that a prompt takes."""
    cache, tokens_read = DynamicCache(config=model.config), LENGTHS[0]
    generate(model, press, tokens(1, tokens_read, seed=2), None, max_new_tokens=1, **with_cache(cache))
    held_size = kvpress.memory_report(cache).total_bytes
    planned = plan(press, Geometry.of(model), tokens_read).total_bytes
    if abs(planned - held_size) > PLANNED * held_size:
        raise Fault(
            name,
            f"{held_size} bytes are held after {tokens_read} tokens, and {planned} are planned, from `pair_bytes`, "
            "`tile_bytes`, `fixed_bytes`, `table_bytes` and `shared_bytes` of the codec",
        )


def check_segment(segment: Segment, name: str) -> None:
    """Check one encoded segment."""
    layout, kind = segment.layout, type(segment).__name__
    keys, values = segment.read(slice(None))
    rows = torch.arange(0, layout.total, 3, device=segment.device)
    for whole_side, side, chosen in zip((keys, values), ("keys", "values"), segment.read(rows), strict=True):
        for read, count in ((whole_side, layout.total), (chosen, len(rows))):
            if read.dtype != torch.float32 or read.dim() != 2 or len(read) != count:
                actual = f"{str(read.dtype).removeprefix('torch.')} {list(read.shape)}"
                raise Fault(
                    name, f"{side} of {kind} read at {count} rows are {actual}, not float32 [{count}, channels]"
                )
        if not torch.equal(whole_side[rows], chosen):
            error = float((whole_side[rows] - chosen).abs().max())
            raise Fault(name, f"{side} of {kind} read at chosen rows differ by {error:.2g} from those read at once")
    queries = torch.randn(
        layout.streams, 2, keys.shape[1], generator=torch.Generator().manual_seed(0), dtype=keys.dtype
    )
    logits = Logits(1 / float((queries[0] @ keys.T).std()))
    output, lse = segment.attend(queries, logits)
    # Kernels may round queries to 8 bits.
    allowed = 0.02 * float(values.abs().max())
    for stream in range(layout.streams):
        part = layout.rows(stream)
        weight = None if segment.log_weight is None else segment.log_weight[None, part]
        expected, expected_lse = attend(
            queries[stream, None], keys[None, part], values[None, part], logits, log_weight=weight
        )
        error = float((output[stream] - expected[0]).abs().max())
        lse_error = float((lse[stream] - expected_lse[0]).abs().nan_to_num().max())
        if error > allowed or lse_error > 0.05:
            raise Fault(
                name,
                f"attention to {kind} differs by {error:.2g} (log-sum-exp by {lse_error:.2g}) from attention to its decoded "
                f"pairs, {allowed:.2g} is allowed",
            )


def check_choices(press: BasePress, model: Any, name: str) -> None:
    """Check that a selector chooses pairs of each stream's own, each once."""
    cache, mask = sealed_cache(press, model)
    for layer, layouts, selection in choices(press, model, cache, mask):
        for chosen in (pairs for heads in selection or [] for pairs in zip(layouts, heads, strict=True)):
            layout, (rows, counts) = chosen[0], (chosen[1].rows.long(), chosen[1].counts.tolist())
            for n, count in enumerate(counts):
                read, own_rows = rows[n, :count], layout.rows(n % layout.streams)
                if len(read.unique()) != count:
                    raise Fault(name, f"a token reads {count - len(read.unique())} pairs twice in layer {layer}")
                if count and not own_rows.start <= int(read.min()) <= int(read.max()) < own_rows.stop:
                    raise Fault(
                        name,
                        f"stream {n % layout.streams} of layer {layer} reads rows {int(read.min())} to {int(read.max())}; its "
                        f"pairs are rows {own_rows.start} to {own_rows.stop - 1}",
                    )


def choices(press: BasePress, model: Any, cache: Any, mask: Tensor) -> list[tuple[int, list[Layout], Selection]]:
    """Read one token and return the selection of every layer, with the layouts of its segments."""
    records: list[tuple[int, list[Layout], Selection]] = []

    def record(module: Any, *_: Any) -> None:
        index = cache_place(module)
        call = cache.layers[index].call
        if call is not None and call.read is not None:
            records.append((index, [segment.layout for segment in call.store.segments], call.read))

    with kvpress.reading(model, press) as session:
        handles = [session.modules[n].register_forward_hook(record, prepend=True) for n in session.growing]
        try:
            step(model, cache, mask)
        finally:
            for handle in handles:
                handle.remove()
    return records


def step(model: Any, cache: Any, mask: Tensor) -> Tensor:
    """Read one token behind a cache; return its logits."""
    grown = grow(mask, 1)
    at = position_ids(grown, 1)
    new = tokens(len(mask), 1, seed=8)
    logits: Tensor = model(new, attention_mask=grown, position_ids=at, **with_cache(cache)).logits
    return logits


def check_all_pairs(press: BasePress, model: Any, name: str) -> None:
    """Check that a selector whose budget is all pairs gives the logits of a cache that is read in full."""
    generous = with_budget(press)
    cache, mask = sealed_cache(generous, model)
    with kvpress.reading(model, kvpress.get_press("none")):
        expected = step(model, copy.deepcopy(cache), mask)
    with kvpress.reading(model, generous):
        difference = float((step(model, cache, mask) - expected).abs().max())
    if not difference <= 1e-4:
        raise Fault(name, f"logits differ by {difference:.2g} from those of a cache that is read in full")


def with_budget(press: BasePress) -> BasePress:
    """Return the press, its selector with a budget of all pairs, also inside a wrapper; unchanged without a field `budget`."""
    if isinstance(press, ComposedPress):
        return ComposedPress([with_budget(part) for part in press.presses])
    selecting: Any = press
    if press.recipe().selector is not None and isinstance(getattr(press, "press", None), BasePress):
        wrapper: BasePress = replace(selecting, press=with_budget(selecting.press))
        return wrapper
    if press.recipe().selector is None or not hasattr(press, "budget"):
        return press
    generous: BasePress = replace(selecting, budget=ALL_PAIRS)
    return generous


CHECKS = (
    Check("no state", check_state),
    Check("evicted pairs are freed", check_freed, evicts_prompts),
    Check("memory report", check_memory),
    Check("stored pairs", check_stored_pairs, lambda recipe: recipe.codec is not None),
    Check("chosen pairs", check_choices, lambda recipe: recipe.selector is not None),
    Check(
        "planned bytes",
        check_planned_bytes,
        lambda recipe: recipe.codec is not None and all(step.is_identity for step in recipe.evictions),
    ),
    Check("budget of all pairs", check_all_pairs, lambda recipe: recipe.selector is not None),
    Check("mask oracle", check_oracle, only_hides),
    Check("padded row", check_rows),
    Check("saved cache", check_saving),
    Check("chunked prompt", check_chunks, lambda recipe: recipe.pattern is None and recipe.dropping is None),
    Check("threads", check_threads),
)
"""All checks, the most specific errors first."""
