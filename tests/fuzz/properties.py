# SPDX-License-Identifier: Apache-2.0
"""What must hold for every spec, on every model, however the conversation goes."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

import kvpress
from tests.caches import reachable
from tests.fuzz import specs
from tests.fuzz.cases import ROWS, Case
from tests.fuzz.models import model_of
from tests.fuzz.pairs import (
    PROTECTED,
    RAGGED,
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
        for check in (check_bytes, check_pairs):
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
            kept = counts(last.positions, row * beams + beam, pads, layers)
            _compare(tree, events, kept, seen - pads, f"row {row} of {length} tokens, turn {len(found.turns)}")


def _compare(tree: Tree, events: list[Event], kept: list[list[int]], seen: int, where: str) -> None:
    window = streaming_window(tree)
    alone = len(specs.parts_of(specs.without(specs.without(tree, "codec"), "selector"))) == 1
    if window is not None:
        least, interval = window
        most = least + interval + spared(tree) + sum(event.new for event in events[1:])
        for heads in kept if alone else []:
            for count in heads:
                if count != seen and not min(least, seen) <= count <= most:
                    raise Fault("pairs", f"{where}: a head keeps {count} of {seen}, a window is {least}")
        return
    expected = [expected_pairs(tree, events, layer) for layer in range(len(kept))]
    if any(count is None for count in expected) or events[0].new <= PROTECTED:
        return
    totals = [sum(heads) / len(heads) for heads in kept]
    if not between_layers(tree):
        # A head that an earlier turn left fewer pairs than the others has none to make up for it.
        slack = 0.1 if len(events) > 1 and RAGGED & {part["name"] for part in specs.inside(tree)} else 0.0
        if any(not (1 - slack) * want <= total <= want for total, want in zip(totals, expected, strict=True)):
            raise Fault("pairs", f"{where}: {totals} per head, by layer; the spec says {expected}")
        return
    names = [part["name"] for part in specs.inside(tree)]
    if alone and "pyramidkv" in names and len(events) == 1 and expected[0] < seen and totals[0] <= totals[-1]:
        raise Fault("pyramid", f"{where}: {totals} per head, by layer: the first layers should keep more")
    mean, wanted = sum(totals) / len(totals), sum(expected) / len(expected)  # type: ignore[arg-type]
    # Layers round on their own; in later turns one that is below its share has nothing to give to the others.
    slack = 1 if len(events) == 1 else 1 + 0.1 * wanted
    # A pyramid's share of a layer may be more than an earlier pyramid has left there.
    below = bool({"cake", "pyramidkv"} & set(names)) and (
        len(events) > 1 or not alone or bool({*specs.intervals(), "prefill_decoding"} & set(names))
    )
    if mean - wanted > slack or (wanted - mean > slack and not below):
        raise Fault("pairs", f"{where}: {mean} per head, over all layers; the spec says {wanted}")


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


def same_counts(found: Talk, expected: Talk, words: str) -> None:
    """Check that two conversations kept equally many real pairs of every layer and row."""
    lengths, layers = ROWS[found.case.rows], full_layers(found.model)
    for number, (one, two) in enumerate(zip(found.turns, expected.turns, strict=True)):
        rows = len(one.positions[layers[0]])
        for row in range(rows):
            pads = max(lengths) - lengths[row * len(lengths) // rows]
            ours, theirs = (list(map(sum, counts(turn.positions, row, pads, layers))) for turn in (one, two))
            if ours != theirs:
                raise Fault(words, f"turn {number + 1}, row {row}: {ours} pairs by layer, not {theirs}")


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
    kept = kvpress.kept_positions(found.cache)
    twin = found.copy()
    torch.manual_seed(case.seed)
    twin.turn()
    after = [_bits(tensor) for tensor in reachable(found.cache) if not counts_streams(tensor, found)]
    if len(before) != len(after) or not all(map(torch.equal, before, after)):
        raise Fault("copy", "going on with a copy changes tensors of the original")
    if any(
        not torch.equal(a, b)
        for one, two in zip(kept, kvpress.kept_positions(found.cache), strict=True)
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
    same(logits_of(found), logits_of(stock), lambda n: logits_of(talk(case, None, noise=n)), "keep all")
    lengths, last = ROWS[case.rows], found.turns[-1].positions
    layers, seen = full_layers(found.model), found.cache.get_seq_length()
    for row in range(len(last[layers[0]])):
        pads = max(lengths) - lengths[row * len(lengths) // len(last[layers[0]])]
        kept = counts(last, row, pads, layers)
        if {count for heads in kept for count in heads} != {seen - pads}:
            raise Fault("keep all", f"{kept} of {seen - pads} pairs are left")


def alone(case: Case, tree: Tree, base: Talk) -> None:
    """A row of a batch is that row alone, without its padding."""
    lengths, window = ROWS[case.rows], streaming_window(tree)
    layers = full_layers(base.model)
    for row, length in enumerate(lengths):
        if window is not None and length < window[0]:
            continue  # its streaming heads are first cut when those of its neighbours are
        found = talk(case, tree, rows=(row,))
        batch = logits_of(base, slice(row, row + 1))

        def again(n: int, row: int = row) -> Tensor:
            return logits_of(talk(case, tree, rows=(row,), noise=n))

        same(batch, logits_of(found), again, f"alone (row {row})")
        pads = max(lengths) - length
        for number, (together, apart) in enumerate(zip(base.turns, found.turns, strict=True)):
            beams = len(apart.positions[layers[0]])
            for beam in range(beams):
                ours = counts(together.positions, row * beams + beam, pads, layers)
                theirs = counts(apart.positions, beam, 0, layers)
                if list(map(sum, ours)) != list(map(sum, theirs)) and not between_layers(tree):
                    raise Fault("alone", f"row {row}, turn {number + 1} keeps {ours} in a batch, {theirs} alone")


def select_all(case: Case, tree: Tree, base: Talk) -> None:
    """A selector that may read everything is no selector."""
    del base
    plain = specs.without(tree, "selector")
    found, expected = observed(case, specs.selects_all(tree)), talk(case, plain)
    same(logits_of(found), logits_of(expected), lambda n: logits_of(talk(case, plain, noise=n)), "select all")
    same_counts(found, expected, "select all")


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
        found = observed(case, both)
        words = f"beside ({specs.text_of(other)})"
        same(logits_of(found), logits_of(base), lambda n: logits_of(talk(case, tree, noise=n)), words)
        same_counts(found, base, words)
        return


def chunks(case: Case, tree: Tree, base: Talk) -> None:
    """A prompt that is read in chunks is a prompt that is read at once."""
    whole = talk(case, tree, chunk=0)
    same(logits_of(base), logits_of(whole), lambda n: logits_of(talk(case, tree, chunk=0, noise=n)), "chunks")
    same_counts(base, whole, "chunks")


CHECKS: dict[str, Callable[[Case, Tree, Talk], None]] = {
    "repeat": repeat, "copy": copies, "keep_all": keep_all, "alone": alone, "select_all": select_all, "beside": beside,
    "chunks": chunks,
}  # fmt: skip
