# SPDX-License-Identifier: Apache-2.0
"""What must hold for every spec, on every model, however the conversation goes."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

import kvpress
from kvpress.hf.models import facts_of
from kvpress.quant.budgeted import OfSize
from kvpress.quant.widths import LEAST, WIDTHS
from tests.caches import reachable
from tests.fuzz import specs
from tests.fuzz.cases import ROWS, Case
from tests.fuzz.models import model_of
from tests.fuzz.pairs import (
    PROTECTED,
    Event,
    between_layers,
    counts,
    expected_pairs,
    spared,
    streaming_window,
)
from tests.fuzz.specs import Tree
from tests.fuzz.talk import Talk, begin, talk
from tests.models import full_layers

TRIES = 12
"""Noisy runs before a difference counts as more than rounding."""


class Fault(AssertionError):  # noqa: N818 - what a case found, not an error of the program
    """A property that does not hold; `kind` names it."""

    def __init__(self, kind: str, words: str) -> None:
        super().__init__(f"{kind}: {words}")
        self.kind = kind.partition(" (")[0]


def run(case: Case) -> list[Fault]:
    """Try a case; return what does not hold, once for each kind."""
    faults: dict[str, Fault] = {}
    try:
        if refused(case):
            return []
        tree = specs.tree_of(case.spec, case.family)
        base = observed(case, tree, faults)
        CHECKS[case.check](case, tree, base)
    except Fault as fault:
        faults[fault.kind] = fault
    except Exception as error:  # whatever is raised is what was looked for
        kind = f"raises {type(error).__name__}"
        faults[kind] = Fault(kind, f"{str(error)[:300]} {_place(error)}")
    return list(faults.values())


def refused(case: Case) -> str:
    """In which words a press refuses a model or its prompts, before any work; nothing if it does not."""
    try:
        press = kvpress.press_from_dict(specs.tree_of(case.spec, case.family))
        for length in ROWS[case.rows]:
            press.recipe().check_length(length)
        with press(model_of(case.family, case.dtype)):
            return ""
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)


def _place(error: BaseException) -> str:
    """Where in the library an error came from."""
    found, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if "/kvpress/" in name:
            found = f"(kvpress/{name.rpartition('/kvpress/')[2]}:{step.tb_lineno})"
        step = step.tb_next
    return found


def observed(case: Case, tree: Tree, faults: dict[str, Fault] | None = None) -> Talk:
    """Hold a conversation, and look at its bytes and pairs after every turn; what does not hold goes into `faults`."""
    found = begin(case, tree)
    for _ in found.plan:
        found.turn()
        for check in (check_bytes, check_pairs, check_size):
            try:
                check(found, tree)
            except Fault as fault:
                if faults is None:
                    raise
                faults.setdefault(fault.kind, fault)
    return found


# -- bytes and pairs, in every case ------------------------------------------------------------------------------------


def check_bytes(found: Talk, tree: Tree) -> None:
    """Reported bytes are those of all storages that the cache reaches, but for a few numbers per stream, such as lengths."""
    del tree
    held: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for tensor in reachable(found.cache):
        storage = tensor.untyped_storage()
        held[storage.data_ptr()] = storage.nbytes()
        if counts_streams(tensor, found):
            numbers[storage.data_ptr()] = storage.nbytes()
    reported = kvpress.memory_report(found.cache).total_bytes
    total, uncounted = sum(held.values()), sum(numbers.values())
    if not total - uncounted <= reported <= total:
        raise Fault("bytes", f"{reported} reported, {total} held, {uncounted} of them numbers per stream")


def counts_streams(tensor: Tensor, found: Talk) -> bool:
    """Whether a tensor holds a whole number per row and head at most: lengths and offsets, noted when they are first asked."""
    config = model_of(found.case.family, found.case.dtype).config
    streams = max(len(rows) for rows in found.turns[-1].positions) * config.num_key_value_heads
    whole = tensor.dtype in (torch.int32, torch.int64)
    return whole and tensor.untyped_storage().nbytes() <= tensor.element_size() * (streams + 1)


def check_pairs(found: Talk, tree: Tree) -> None:
    """Kept pairs ascend without repeats, and are as many as the spec says."""
    last, layers = found.turns[-1], full_layers(found.model)
    seen = found.cache.get_seq_length()
    beams = len(last.positions[layers[0]]) // len(found.rows)
    lengths = [ROWS[found.case.rows][row] for row in found.rows]
    for layer in layers:
        for heads in last.positions[layer]:
            for at in heads:
                if len(at) and (bool((at.diff() <= 0).any()) or not 0 <= int(at[0]) <= int(at[-1]) < seen):
                    raise Fault("positions", f"layer {layer} keeps {at.tolist()} of {seen}")
    for row, length in enumerate(lengths):
        pads = max(lengths) - length
        events = [
            Event(turn.new - (pads if not number else 0), turn.steps - 1, turn.evicts)
            for number, turn in enumerate(found.turns)
        ]
        for beam in range(beams):
            left = counts(last.positions, row * beams + beam, pads, layers)
            _compare(tree, events, left, seen - pads, f"row {row} of {length} tokens, turn {len(found.turns)}")


def _compare(tree: Tree, events: list[Event], left: list[list[int]], seen: int, where: str) -> None:
    window = streaming_window(tree)
    alone = len(specs.parts_of(specs.without(specs.without(tree, "codec"), "selector"))) == 1
    if window is not None:
        least, interval = window
        most = least + interval + spared(tree) + sum(event.new for event in events[1:])
        for heads in left if alone else []:
            for count in heads:
                if count != seen and not min(least, seen) <= count <= most:
                    raise Fault("pairs", f"{where}: a head keeps {count} of {seen}, a window is {least}")
        return
    expected = [expected_pairs(tree, events, layer) for layer in range(len(left))]
    if any(count is None for count in expected) or events[0].new <= PROTECTED:
        return
    totals = [sum(heads) / len(heads) for heads in left]
    if not between_layers(tree):
        if any(total != want for total, want in zip(totals, expected, strict=True)):
            raise Fault("pairs", f"{where}: {totals} per head, by layer; the spec says {expected}")
        return
    names = [part["name"] for part in specs.inside(tree)]
    if alone and "pyramidkv" in names and len(events) == 1 and expected[0] < seen and totals[0] <= totals[-1]:
        raise Fault("pyramid", f"{where}: {totals} per head, by layer: the first layers should keep more")
    mean, wanted = sum(totals) / len(totals), sum(expected) / len(expected)  # type: ignore[arg-type]
    slack = 1  # layers round on their own
    # A pyramid's share of a layer may be more than an earlier pyramid has left there.
    below = bool({"cake", "pyramidkv"} & set(names)) and (
        len(events) > 1 or not alone or bool({*specs.intervals(), "prefill_decoding"} & set(names))
    )
    if mean - wanted > slack or (wanted - mean > slack and not below):
        raise Fault("pairs", f"{where}: {mean} per head, over all layers; the spec says {wanted}")


def check_size(found: Talk, tree: Tree) -> None:
    """A cache of a size holds that after every prompt or turn of several tokens, generated ones on top; one row is tried."""
    press, last = kvpress.press_from_dict(tree), found.turns[-1]
    beams = found.case.beams if len(found.turns) == len(found.plan) else 1
    if not isinstance(press, OfSize) or not last.evicts or last.new < 2 or len(found.rows) * beams > 1:
        return
    seen = found.cache.get_seq_length() - (last.steps - 1)
    room = press.room(facts_of(found.model), weighs=any(step.weighs for step in press.recipe().evictions))
    least = room.streams * room.held(min(LEAST, seen), min(WIDTHS))
    size = max(room.allowed(seen) * room.streams, least)
    layers = [layer for layer in kvpress.memory_report(found.cache).layers if layer.compressible]
    held = sum(layer.total_bytes - layer.components.get("window", 0) for layer in layers)
    dropped = sum(layer.kept for layer in layers) < sum(layer.seen for layer in layers)
    # A pair is a larger part of a small cache, and layers that keep all of theirs need no places.
    if held > size or (dropped and held < 0.85 * size):
        raise Fault(
            "size", f"{held:.0f} bytes after {seen} tokens and {len(found.turns)} turns; {size:.0f} may be held"
        )


# -- comparing ---------------------------------------------------------------------------------------------------------


def logits_of(found: Talk, rows: slice = slice(None)) -> Tensor:
    """Logits of the last step of every turn but all steps of it, flat."""
    last = len(found.turns) - 1
    beams = found.case.beams
    parts = []
    for number, turn in enumerate(found.turns):
        scale = beams if number == last else 1
        chosen = slice(None) if rows == slice(None) else slice(rows.start * scale, rows.stop * scale)
        parts.append(turn.logits[:, chosen].flatten())
    return torch.cat(parts).double()


def same(found: Tensor, expected: Tensor, again: Callable[[int], Tensor], words: str, free: float = 0.0) -> None:
    """Check that two runs say the same, up to `free` or to what rounding explains.

    Random models amplify rounding, and a pair whose score is a rounding error below another's may change places with it. How
    far that carries depends on everything, so it is measured: `again(n)` runs `expected` with noise of the size of rounding
    on its input, and the two may differ by twice what the worst of a few such runs differs.
    """
    if not bool(found.isfinite().all()):
        raise Fault(words, "logits are not finite")
    apart = float((found - expected).abs().max())
    explained = free / 2
    for n in range(TRIES):
        if apart <= 2 * explained:
            return
        explained = max(explained, float((again(n) - expected).abs().max()))
    if not apart <= 2 * explained:
        raise Fault(words, f"logits differ by {apart:.2g}, rounding explains {explained:.2g}")


def kept(found: Talk, rows: slice = slice(None)) -> Tensor:
    """Real pairs that were kept of some rows of the batch, `[turns * rows * beams, layers]`."""
    lengths, layers, parts = [ROWS[found.case.rows][row] for row in found.rows], full_layers(found.model), []
    for turn in found.turns:
        beams = len(turn.positions[layers[0]]) // len(lengths)
        for row in range(len(lengths))[rows]:
            pads = max(lengths) - lengths[row]
            own = (counts(turn.positions, row * beams + beam, pads, layers) for beam in range(beams))
            parts += [list(map(sum, heads)) for heads in own]
    return torch.tensor(parts)


def same_counts(found: Tensor, expected: Tensor, again: Callable[[int], Tensor], words: str) -> None:
    """Check that two runs kept equally many pairs of every layer, or as many others as rounding explains.

    How many pairs a layer keeps hangs on single numbers where layers compete, and in sums that are rounded to whole pairs. Two
    that lie a rounding error apart change places under noise of that size: this is measured as in `same`.
    """
    apart, explained = int((found - expected).abs().max()), 0
    for n in range(TRIES):
        if apart <= 2 * explained:
            return
        explained = max(explained, int((again(n) - expected).abs().max()))
    if apart > 2 * explained:
        at = int((found - expected).abs().amax(dim=1).argmax())
        raise Fault(
            words, f"{found[at].tolist()} pairs by layer, not {expected[at].tolist()}; rounding explains {explained}"
        )


class Again:
    """Runs a conversation again with noise on its input, once for every seed."""

    def __init__(self, case: Case, tree: Tree | None, rows: tuple[int, ...] = (), chunk: int | None = None) -> None:
        self.run = cache(lambda seed: talk(case, tree, rows, chunk, seed))

    def logits(self, seed: int) -> Tensor:
        return logits_of(self.run(seed))

    def kept(self, seed: int) -> Tensor:
        return kept(self.run(seed))


# -- the properties ----------------------------------------------------------------------------------------------------


def repeat(case: Case, tree: Tree, base: Talk) -> None:
    """Two runs are equal, bit by bit."""
    again = talk(case, tree)
    if not torch.equal(logits_of(again), logits_of(base)):
        raise Fault("repeat", f"logits differ by {float((logits_of(again) - logits_of(base)).abs().max()):.2g}")
    _same_positions(again, base, "repeat")


def _same_positions(found: Talk, expected: Talk, words: str) -> None:
    for one, two in zip(found.turns, expected.turns, strict=True):
        for layer, (ours, theirs) in enumerate(zip(one.positions, two.positions, strict=True)):
            for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if not all(map(torch.equal, a, b)):
                    raise Fault(words, f"other pairs are kept in layer {layer}, row {row}")


def _bits(tensor: Tensor) -> Tensor:
    """The bytes of a tensor: room that nothing was written to yet may read as NaN, which equals nothing."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def copies(case: Case, tree: Tree, base: Talk) -> None:
    """A copy of a cache goes on as the cache itself does, and leaves it as it was."""
    found = begin(case, tree)
    while len(found.turns) < len(found.plan) - 1:
        found.turn()
    before = [_bits(tensor).clone() for tensor in reachable(found.cache) if not counts_streams(tensor, found)]
    positions = kvpress.kept_positions(found.cache)
    twin = found.copy()
    torch.manual_seed(case.seed)
    twin.turn()
    after = [_bits(tensor) for tensor in reachable(found.cache) if not counts_streams(tensor, found)]
    if len(before) != len(after) or not all(map(torch.equal, before, after)):
        raise Fault("copy", "going on with a copy changes tensors of the original")
    if any(
        not torch.equal(a, b)
        for one, two in zip(positions, kvpress.kept_positions(found.cache), strict=True)
        for ours, theirs in zip(one, two, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ):
        raise Fault("copy", "going on with a copy changes what the original keeps")
    torch.manual_seed(case.seed)
    found.turn()
    for words, one in (("a copy", twin), ("an original that was copied", found)):
        if not torch.equal(logits_of(one), logits_of(base)):
            raise Fault("copy", f"{words} goes on differently than without a copy")
        _same_positions(one, base, "copy")


def keep_all(case: Case, tree: Tree, base: Talk) -> None:
    """With every ratio at 0 and nothing encoded, a spec is no press."""
    del base
    found = observed(case, specs.keeps_all(tree))
    stock = talk(case, None)
    same(logits_of(found), logits_of(stock), Again(case, None).logits, "keep all")
    lengths, last = ROWS[case.rows], found.turns[-1].positions
    layers, seen = full_layers(found.model), found.cache.get_seq_length()
    for row in range(len(last[layers[0]])):
        pads = max(lengths) - lengths[row * len(lengths) // len(last[layers[0]])]
        left = counts(last, row, pads, layers)
        if {count for heads in left for count in heads} != {seen - pads}:
            raise Fault("keep all", f"{left} of {seen - pads} pairs are left")


def alone(case: Case, tree: Tree, base: Talk) -> None:
    """A row of a batch is that row alone, without its padding."""
    window = streaming_window(tree)
    for row, length in enumerate(ROWS[case.rows]):
        if window is not None and length < window[0]:
            continue  # its streaming heads are first cut when those of its neighbours are
        found, again, own = talk(case, tree, rows=(row,)), Again(case, tree, rows=(row,)), slice(row, row + 1)
        same(logits_of(base, own), logits_of(found), again.logits, f"alone (row {row})")
        same_counts(kept(base, own), kept(found), again.kept, f"alone (row {row})")


def select_all(case: Case, tree: Tree, base: Talk) -> None:
    """A selector that may read everything is no selector."""
    del base
    plain = specs.without(tree, "selector")
    found, expected, again = observed(case, specs.selects_all(tree)), talk(case, plain), Again(case, plain)
    same(logits_of(found), logits_of(expected), again.logits, "select all")
    same_counts(kept(found), kept(expected), again.kept, "select all")


def beside(case: Case, tree: Tree, base: Talk) -> None:
    """Another press that keeps everything changes nothing, whatever it watches."""
    rng = specs.seeded(case.seed)
    parts = specs.parts_of(tree)
    own = [part["name"] for part in specs.inside(tree) if specs.place_of(part) == "scorer"]
    for _ in range(20):
        # Rather the same method with other settings: it watches the same things in another way.
        name = rng.choice([rng.choice(specs.names("scorer")), *own])
        other = specs.keeps_all(specs.resolved_tree(specs.settings_for(name, rng), case.family))
        if specs.place_of(parts[0]) in ("codec", "selector") or not specs.is_spec([other, *parts]):
            continue
        both = specs.composed([other, *parts])
        found, again = observed(case, both), Again(case, tree)
        words = f"beside ({specs.text_of(other)})"
        same(logits_of(found), logits_of(base), again.logits, words)
        same_counts(kept(found), kept(base), again.kept, words)
        return


def chunks(case: Case, tree: Tree, base: Talk) -> None:
    """A prompt that is read in chunks is a prompt that is read at once."""
    whole, again = talk(case, tree, chunk=0), Again(case, tree, chunk=0)
    same(logits_of(base), logits_of(whole), again.logits, "chunks")
    same_counts(kept(base), kept(whole), again.kept, "chunks")


CHECKS: dict[str, Callable[[Case, Tree, Talk], None]] = {
    "repeat": repeat, "copy": copies, "keep_all": keep_all, "alone": alone, "select_all": select_all, "beside": beside,
    "chunks": chunks,
}  # fmt: skip
