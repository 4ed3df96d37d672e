# SPDX-License-Identifier: Apache-2.0
"""Properties that must hold for every spec, on every model, in every conversation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

import kvpress
from kvpress.hf.models import facts_of
from kvpress.quant.budgeted import OfSize, recorded_bytes
from kvpress.quant.widths import FEWEST, WIDTHS
from kvpress.testing.comparison import Fault, explain, same
from kvpress.testing.memory import reachable
from tests.fuzz import specs
from tests.fuzz.cases import ROWS, Case
from tests.fuzz.models import model_of
from tests.fuzz.pairs import (
    PROTECTED,
    Event,
    between_layers,
    counts,
    expected_pairs,
    slopes,
    spared,
    streaming_window,
)
from tests.fuzz.specs import Tree
from tests.fuzz.talk import Talk, begin, decoded, rounded_queries, talk
from tests.models import full_layers


def run(case: Case) -> list[Fault]:
    """Run a case; return one fault of each kind."""
    faults: dict[str, Fault] = {}
    try:
        if refused(case):
            return []
        tree = specs.tree_of(case.spec, case.family)
        base = observed(case, tree, faults)
        try:
            CHECKS[case.check](case, tree, base)
        except Fault:
            if not is_rounded_by_operators(case, tree, base):
                raise
    except Fault as fault:
        faults[fault.kind] = fault
    except Exception as error:  # any exception is a fault of the case
        kind = f"raises {type(error).__name__}"
        faults[kind] = Fault(kind, f"{str(error)[:300]} {_place(error)}")
    return list(faults.values())


def is_rounded_by_operators(case: Case, tree: Tree, base: Talk) -> bool:
    """Return whether a property fails only because operators round queries of encoded pairs to 16 bits.

    Rows that share pairs have their queries rounded together, others separately. The property must hold up to noise of that
    size, and up to the usual noise where pairs are decoded before attention.
    """
    if case.check not in ("keep_all", "alone", "select_all", "beside", "chunks"):
        return False
    if kvpress.press_from_dict(tree).recipe().codec is None:
        return False
    try:
        with rounded_queries():
            CHECKS[case.check](case, tree, base)
        with decoded():
            CHECKS[case.check](case, tree, observed(case, tree))
    except Fault:
        return False
    return True


def refused(case: Case) -> str:
    """Return the message with which a press refuses a model or its prompts before any work; an empty string if it does not."""
    try:
        press = kvpress.press_from_dict(specs.tree_of(case.spec, case.family))
        for length in ROWS[case.rows]:
            press.recipe().check_length(length)
        with press(model_of(case.family, case.dtype)):
            return ""
    except (NotImplementedError, TypeError, ValueError) as error:
        return str(error)


def _place(error: BaseException) -> str:
    """Return the file and line of the library that raised an error."""
    source, step = "", error.__traceback__
    while step is not None:
        name = step.tb_frame.f_code.co_filename
        if "/kvpress/" in name:
            source = f"(kvpress/{name.rpartition('/kvpress/')[2]}:{step.tb_lineno})"
        step = step.tb_next
    return source


def observed(case: Case, tree: Tree, faults: dict[str, Fault] | None = None) -> Talk:
    """Run a conversation and check its bytes and pairs after every turn; store faults in `faults`, or raise them without it."""
    conversation = begin(case, tree)
    for _ in conversation.plan:
        conversation.turn()
        for check in (check_bytes, check_pairs, check_size):
            try:
                check(conversation, tree)
            except Fault as fault:
                if faults is None:
                    raise
                faults.setdefault(fault.kind, fault)
    return conversation


# -- bytes and pairs, in every case ------------------------------------------------------------------------------------


def check_bytes(conversation: Talk, tree: Tree) -> None:
    """Check that reported bytes are those of all storages that the cache reaches, except for a few numbers per stream."""
    del tree
    storages: dict[int, int] = {}
    numbers: dict[int, int] = {}
    for tensor in reachable(conversation.cache):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
        if counts_streams(tensor, conversation):
            numbers[storage.data_ptr()] = storage.nbytes()
    reported = kvpress.memory_report(conversation.cache).total_bytes
    total, uncounted = sum(storages.values()), sum(numbers.values())
    if not total - uncounted <= reported <= total:
        raise Fault("bytes", f"{reported} reported, {total} held, {uncounted} of them numbers per stream")


def counts_streams(tensor: Tensor, conversation: Talk) -> bool:
    """Return whether a tensor has at most one integer per row and head: cached lengths and offsets."""
    config = model_of(conversation.case.family, conversation.case.dtype).config
    streams = max(len(rows) for rows in conversation.turns[-1].positions) * config.num_key_value_heads
    is_integer = tensor.dtype in (torch.int32, torch.int64)
    return is_integer and tensor.untyped_storage().nbytes() <= tensor.element_size() * (streams + 1)


def check_pairs(conversation: Talk, tree: Tree) -> None:
    """Check that kept pairs ascend without repeats, and that their number is that of the spec."""
    last, layers = conversation.turns[-1], full_layers(conversation.model)
    seen = conversation.cache.get_seq_length()
    beams = len(last.positions[layers[0]]) // len(conversation.rows)
    lengths = [ROWS[conversation.case.rows][row] for row in conversation.rows]
    for layer in layers:
        for heads in last.positions[layer]:
            for at in heads:
                if len(at) and (bool((at.diff() <= 0).any()) or not 0 <= int(at[0]) <= int(at[-1]) < seen):
                    raise Fault("positions", f"layer {layer} keeps {at.tolist()} of {seen}")
    for row, length in enumerate(lengths):
        pads = max(lengths) - length
        events = [
            Event(turn.new - (pads if not number else 0), turn.steps - 1, turn.evicts)
            for number, turn in enumerate(conversation.turns)
        ]
        for beam in range(beams):
            kept_counts = counts(last.positions, row * beams + beam, pads, layers)
            _compare(
                tree, events, kept_counts, seen - pads, f"row {row} of {length} tokens, turn {len(conversation.turns)}"
            )


def _compare(tree: Tree, events: list[Event], kept_counts: list[list[int]], seen: int, where: str) -> None:
    window = streaming_window(tree)
    alone = len(specs.parts_of(specs.without(specs.without(tree, "codec"), "selector"))) == 1
    if window is not None:
        window_size, interval = window
        maximum = window_size + interval + spared(tree) + sum(event.new for event in events[1:])
        for heads in kept_counts if alone else []:
            for count in heads:
                if count != seen and not min(window_size, seen) <= count <= maximum:
                    raise Fault("pairs", f"{where}: a head keeps {count} of {seen}, a window is {window_size}")
        return
    expected = [expected_pairs(tree, events, layer) for layer in range(len(kept_counts))]
    if None in expected or events[0].new <= PROTECTED:
        return
    layers = [layer for layer in expected if layer is not None]
    pairs, cuts = [layer.pairs for layer in layers], layers[0].cuts
    totals = [sum(heads) / len(heads) for heads in kept_counts]
    if not between_layers(tree):
        if any(total != want for total, want in zip(totals, pairs, strict=True)):
            raise Fault("pairs", f"{where}: {totals} per head, by layer; the spec gives {pairs}")
        return
    names = [part["name"] for part in specs.inside(tree)]
    if alone and len(events) == 1 and cuts and slopes(cuts[-1]) and totals[0] <= totals[-1]:
        raise Fault("pyramid", f"{where}: {totals} per head, by layer: the first layers should keep more")
    mean, expected_mean = sum(totals) / len(totals), sum(pairs) / len(pairs)
    slack = 1  # each layer rounds its count
    # A later pyramid's share of a layer may exceed what an earlier pyramid left there.
    below = bool({"cake", "pyramidkv"} & set(names)) and (
        len(events) > 1 or not alone or bool({*specs.intervals(), "prefill_decoding"} & set(names))
    )
    if mean - expected_mean > slack or (expected_mean - mean > slack and not below):
        raise Fault("pairs", f"{where}: {mean} per head, over all layers; the spec gives {expected_mean}")


def check_size(conversation: Talk, tree: Tree) -> None:
    """Check that a cache with a size limit keeps to it after every prompt or turn of several tokens; one row is tested.

    Generated tokens come on top of the limit: in the window, with what is recorded of them, and as dense pairs if the press
    also evicts while they are generated.
    """
    press, last = kvpress.press_from_dict(tree), conversation.turns[-1]
    beams = conversation.case.beams if len(conversation.turns) == len(conversation.plan) else 1
    if not isinstance(press, OfSize) or not last.evicts or last.new < 2 or len(conversation.rows) * beams > 1:
        return
    seen = conversation.cache.get_seq_length() - (last.steps - 1)
    facts = facts_of(conversation.model)
    evictions = press.recipe(facts).evictions
    room = press.room(facts, max(recorded_bytes(step) for step in evictions))
    smallest = room.streams * room.held(min(FEWEST, seen), min(WIDTHS))
    size = max(room.allowed(seen) * room.streams, smallest)
    layers = [layer for layer in kvpress.memory_report(conversation.cache).layers if layer.compressible]
    most = size + (last.steps - 1) * room.streams * room.beside_pair
    if any(step.acts_in("decode") for step in evictions):
        most += (last.steps - 1) * room.streams * (room.full + room.beside_codes)
    # The tables of a key bias come on top of the size.
    total = sum(
        layer.total_bytes - sum(layer.components.get(name, 0) for name in ("window", "tables")) for layer in layers
    )
    dropped = sum(layer.kept for layer in layers) < sum(layer.seen for layer in layers)
    # A pair is a larger part of a small cache, and layers that keep all of their pairs store no positions.
    if total > most or (dropped and total < 0.85 * size):
        raise Fault(
            "size", f"{total:.0f} bytes after {seen} tokens and {len(conversation.turns)} turns; {most:.0f} may be held"
        )


# -- comparing ---------------------------------------------------------------------------------------------------------


def logits_of(conversation: Talk, rows: slice = slice(None)) -> Tensor:
    """Return the logits of all steps of the last turn and of the earlier turns, flat."""
    last = len(conversation.turns) - 1
    beams = conversation.case.beams
    parts = []
    for number, turn in enumerate(conversation.turns):
        scale = beams if number == last else 1
        chosen = slice(None) if rows == slice(None) else slice(rows.start * scale, rows.stop * scale)
        parts.append(turn.logits[:, chosen].flatten())
    return torch.cat(parts).double()


def kept(conversation: Talk, rows: slice = slice(None)) -> Tensor:
    """Return the number of real pairs kept of some rows of the batch, `[turns * rows * beams, layers]`."""
    lengths, layers, parts = (
        [ROWS[conversation.case.rows][row] for row in conversation.rows],
        full_layers(conversation.model),
        [],
    )
    for turn in conversation.turns:
        beams = len(turn.positions[layers[0]]) // len(lengths)
        for row in range(len(lengths))[rows]:
            pads = max(lengths) - lengths[row]
            row_counts = (counts(turn.positions, row * beams + beam, pads, layers) for beam in range(beams))
            parts += [list(map(sum, heads)) for heads in row_counts]
    return torch.tensor(parts)


def same_counts(actual: Tensor, expected: Tensor, again: Callable[[int], Tensor], words: str) -> None:
    """Check that two runs kept equally many pairs of every layer, up to the effect of rounding.

    The number of pairs of a layer depends on single values where layers compete, and on sums that are rounded to whole pairs.
    Values that differ by a rounding error change places under noise of that size: this is measured as in `same`.
    """
    difference = int((actual - expected).abs().max())
    is_rounding, explained = explain(difference, lambda n: int((again(n) - expected).abs().max()))
    if not is_rounding:
        at = int((actual - expected).abs().amax(dim=1).argmax())
        raise Fault(
            words,
            f"{actual[at].tolist()} pairs by layer, not {expected[at].tolist()}; rounding explains {explained:.0f}",
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
    """Check that two runs are equal, bit by bit."""
    again = talk(case, tree)
    if not torch.equal(logits_of(again), logits_of(base)):
        raise Fault("repeat", f"logits differ by {float((logits_of(again) - logits_of(base)).abs().max()):.2g}")
    _same_positions(again, base, "repeat")


def _same_positions(conversation: Talk, expected: Talk, words: str) -> None:
    for turn, expected_turn in zip(conversation.turns, expected.turns, strict=True):
        for layer, (ours, theirs) in enumerate(zip(turn.positions, expected_turn.positions, strict=True)):
            for row, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                if not all(map(torch.equal, a, b)):
                    raise Fault(words, f"other pairs are kept in layer {layer}, row {row}")


def _bits(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor: memory that is not written yet may read as NaN, which equals nothing."""
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def copies(case: Case, tree: Tree, base: Talk) -> None:
    """Check that a copy of a cache continues as the cache itself does, and leaves the cache unchanged."""
    conversation = begin(case, tree)
    while len(conversation.turns) < len(conversation.plan) - 1:
        conversation.turn()
    before = [
        _bits(tensor).clone() for tensor in reachable(conversation.cache) if not counts_streams(tensor, conversation)
    ]
    positions = kvpress.kept_positions(conversation.cache)
    twin = conversation.copy()
    torch.manual_seed(case.seed)
    twin.turn()
    after = [_bits(tensor) for tensor in reachable(conversation.cache) if not counts_streams(tensor, conversation)]
    if len(before) != len(after) or not all(map(torch.equal, before, after)):
        raise Fault("copy", "going on with a copy changes tensors of the original")
    if any(
        not torch.equal(a, b)
        for one, two in zip(positions, kvpress.kept_positions(conversation.cache), strict=True)
        for ours, theirs in zip(one, two, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ):
        raise Fault("copy", "going on with a copy changes what the original keeps")
    torch.manual_seed(case.seed)
    conversation.turn()
    for words, one in (("a copy", twin), ("an original that was copied", conversation)):
        if not torch.equal(logits_of(one), logits_of(base)):
            raise Fault("copy", f"{words} goes on differently than without a copy")
        _same_positions(one, base, "copy")


def keep_all(case: Case, tree: Tree, base: Talk) -> None:
    """Check that a spec with every ratio at 0 and nothing encoded gives the result without a press."""
    del base
    conversation = observed(case, specs.keeps_all(tree))
    stock = talk(case, None)
    same(logits_of(conversation), logits_of(stock), Again(case, None).logits, "keep all")
    lengths, last = ROWS[case.rows], conversation.turns[-1].positions
    layers, seen = full_layers(conversation.model), conversation.cache.get_seq_length()
    for row in range(len(last[layers[0]])):
        pads = max(lengths) - lengths[row * len(lengths) // len(last[layers[0]])]
        kept_counts = counts(last, row, pads, layers)
        if {count for heads in kept_counts for count in heads} != {seen - pads}:
            raise Fault("keep all", f"{kept_counts} of {seen - pads} pairs are left")


def alone(case: Case, tree: Tree, base: Talk) -> None:
    """Check that a row of a batch gives the result of that row alone, without its padding.

    Rows correct the same number of tokens, which evictions of one row may lower for all, as `TidalDecodePress` documents.
    """
    if specs.corrects(tree) and specs.evicts_generated(tree):
        return
    window = streaming_window(tree)
    for row, length in enumerate(ROWS[case.rows]):
        if window is not None and length < window[0]:
            continue  # its streaming heads are first cut when those of its neighbours are
        single, again, row_slice = talk(case, tree, rows=(row,)), Again(case, tree, rows=(row,)), slice(row, row + 1)
        same(logits_of(base, row_slice), logits_of(single), again.logits, f"alone (row {row})")
        same_counts(kept(base, row_slice), kept(single), again.kept, f"alone (row {row})")


def select_all(case: Case, tree: Tree, base: Talk) -> None:
    """Check that a selector that may read everything gives the result without a selector."""
    del base
    plain = specs.without(tree, "selector")
    conversation, expected, again = observed(case, specs.selects_all(tree)), talk(case, plain), Again(case, plain)
    same(logits_of(conversation), logits_of(expected), again.logits, "select all")
    same_counts(kept(conversation), kept(expected), again.kept, "select all")


def beside(case: Case, tree: Tree, base: Talk) -> None:
    """Check that another press that keeps everything changes nothing, whichever states it observes.

    Beside a selector, the other press has no codec: a codec sets how many of the newest pairs stay out of the selector's pages.
    """
    rng = specs.seeded(case.seed)
    parts = specs.parts_of(tree)
    scorers = [part["name"] for part in specs.inside(tree) if specs.place_of(part) == "scorer"]
    for _ in range(20):
        # Prefer the same method with other settings: it observes the same states in another way.
        name = rng.choice([rng.choice(specs.names("scorer")), *scorers])
        neighbour = specs.keeps_all(specs.resolved_tree(specs.settings_for(name, rng), case.family))
        stores = specs.encodes(name) and any(specs.place_of(part) == "selector" for part in parts)
        if stores or specs.place_of(parts[0]) in ("codec", "selector") or not specs.is_spec([neighbour, *parts]):
            continue
        pair = specs.composed([neighbour, *parts])
        conversation, again = observed(case, pair), Again(case, tree)
        words = f"beside ({specs.text_of(neighbour)})"
        same(logits_of(conversation), logits_of(base), again.logits, words)
        same_counts(kept(conversation), kept(base), again.kept, words)
        return


def chunks(case: Case, tree: Tree, base: Talk) -> None:
    """Check that a prompt that is read in chunks gives the result of one pass."""
    unchunked, again = talk(case, tree, chunk=0), Again(case, tree, chunk=0)
    same(logits_of(base), logits_of(unchunked), again.logits, "chunks")
    same_counts(kept(base), kept(unchunked), again.kept, "chunks")


CHECKS: dict[str, Callable[[Case, Tree, Talk], None]] = {
    "repeat": repeat, "copy": copies, "keep_all": keep_all, "alone": alone, "select_all": select_all, "beside": beside,
    "chunks": chunks,
}  # fmt: skip
