# SPDX-License-Identifier: Apache-2.0
"""Files with crafted headers and a right digest are refused on load, in bounded time."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvpress
from kvpress.cache import container, header
from tests.caches import prefill
from tests.models import tiny_model, tokens

Tree = dict[str, Any]
INNER = ("about", "blocks", "packed", "digests")
SPECS = {
    "llama": "adakv(snapkv:0.5,window_size=4) + kivi:bits=4,group_size=4,residual_length=4",
    "gemma3_text": "knorm:0.5 + rotated:bits=4,residual_length=8",
}
VALUES: tuple[Any, ...] = (
    0, -1, 1, 2, 3, 7, 64, 2**31, 2**62, 2**63, 10**40, 0.5, True, None, "", "F64", "DenseSegment", [], {}, [1],
    {"tensor": "x"}, {"lengths": [1, 2]}, {"tuple": [4, 4]},
)  # fmt: skip


def taken_apart(content: bytes) -> Tree:
    """Return all JSON of a file, JSON inside of texts included."""
    table = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    metadata = table.pop("__metadata__")
    return {"table": table, "metadata": metadata, **{name: json.loads(metadata[name]) for name in INNER}}


def crafted(content: bytes, tree: Tree, nested: str | None = None) -> bytes:
    """Return a file with this JSON and a right digest; `nested` writes `about` unchanged."""
    metadata = {**tree["metadata"], **{name: json.dumps(tree[name]) for name in INNER}, "sha256": header.NO_DIGEST}
    if nested is not None:
        metadata["about"] = nested
    text = json.dumps({"__metadata__": metadata, **tree["table"]}, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + 8) % 64)
    zero = header._digest_field(header.NO_DIGEST)
    text = text.replace(zero, header._digest_field(hashlib.sha256(text).hexdigest()), 1)
    return len(text).to_bytes(8, "little") + text + content[8 + int.from_bytes(content[:8], "little") :]


def places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield every container of a tree with each of its keys."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ():
        yield tree, key
        yield from places(value)


def mutated(tree: Tree, rng: random.Random) -> Tree:
    """Change one value of a tree: to another value, a near one, one from elsewhere, or none."""
    tree = copy.deepcopy(tree)
    fields = [place for name in ("table", *INNER) for place in places(tree[name])]
    holder, key = rng.choice(fields)
    value = holder[key]
    kind = rng.randrange(5)
    if kind == 0 and isinstance(value, (int, float)):
        holder[key] = value + rng.choice((-1, 1, 8, -value, value, 2**31))
    elif kind == 1:
        source, at = rng.choice(fields)
        holder[key] = copy.deepcopy(source[at])
    elif kind == 2 and isinstance(holder, dict):
        holder[f"{key}x"] = holder.pop(key)
    elif kind == 3:
        del holder[key]
    else:
        holder[key] = rng.choice(VALUES)
    return tree


@pytest.fixture(scope="module", params=SPECS)
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, str, bytes]:
    """Return a model, a spec, and the bytes of a cache of both."""
    model, spec = tiny_model(request.param), SPECS[request.param]
    path = tmp_path_factory.mktemp("saved") / "cache.kv"
    kvpress.save(prefill(model, kvpress.get_press(spec), tokens(2, 60)), path, model, spec, tokens=tokens(2, 60))
    return model, spec, path.read_bytes()


def read_on(model: Any, spec: str, cache: Any) -> None:
    with kvpress.reading(model, kvpress.get_press(spec)):
        model(tokens(2, 1), past_key_values=cache)


def attempt(model: Any, spec: str, content: bytes, path: Path) -> bool:
    """Load a file and read on behind it; return whether it was refused, which takes less than a second."""
    path.write_bytes(content)
    begun, refusal = time.perf_counter(), ""
    try:
        str(kvpress.cache_info(path))
        cache = kvpress.load(path, model)
    except ValueError as error:
        refusal = str(error)
    assert time.perf_counter() - begun < 1
    if not refusal:
        read_on(model, spec, cache)
    return bool(refusal)


@pytest.mark.parametrize("seed", range(4))
def test_random_changes_of_a_header_end_in_a_sentence(seed: int, saved: tuple[Any, str, bytes], tmp_path: Path) -> None:
    """Accepted changes change no length: a pass goes on behind the cache."""
    model, spec, content = saved
    rng, tree = random.Random(seed), taken_apart(content)  # noqa: S311 - the same ones each time
    refused = [attempt(model, spec, crafted(content, mutated(tree, rng)), tmp_path / "x.kv") for _ in range(20)]
    assert sum(refused) >= 10
    assert not attempt(model, spec, crafted(content, tree), tmp_path / "x.kv")


def set_at(path: str, value: Any) -> Callable[[Tree], None]:
    """Return a change of the value at a path of keys, or of indexes in lists."""

    def change(tree: Tree) -> None:
        *before, last = path.split("/")
        node: Any = tree
        for key in before:
            node = node[int(key)] if isinstance(node, list) else node[key]
        node[int(last) if isinstance(node, list) else last] = value

    return change


def shifted(tree: Tree) -> None:
    for entry in list(tree["table"].values())[3:]:
        entry["data_offsets"] = [offset + 64 for offset in entry["data_offsets"]]


def swapped(tree: Tree) -> None:
    first, second = [entry for entry in tree["table"].values() if 0 not in entry["shape"]][:2]
    first["data_offsets"], second["data_offsets"] = second["data_offsets"], first["data_offsets"]


STORE = "about/layers/1/state/dict/0/1/fields"
CHANGES: dict[str, tuple[Callable[[Tree], None], str]] = {
    "heads": (set_at(f"{STORE}/heads", 2**31), "2 rows of 2147483648 heads"),
    "rows": (set_at(f"{STORE}/batch", 2**31), "2147483648 rows of 2 heads"),
    "window": (set_at(f"{STORE}/window/fields/length", 2**40), "1099511627776 tokens"),
    "seen": (set_at(f"{STORE}/seen", 2**31), "does not end at"),
    "layout": (set_at(f"{STORE}/dense/fields/layout/lengths", [2**31, 1, 1, 1]), r"slots of DenseSegment|has shape"),
    "negative": (set_at(f"{STORE}/dense/fields/layout/lengths", [-1, 10**9, 1, 1]), "is not one of"),
    "method": (set_at(f"{STORE}/window/fields/append", 1), "no attribute 'append'"),
    "tokens": (set_at("about/length", 2**40), r"layer 1|described|does not end at"),
    "kind": (set_at("about/layers/1/kind", "DynamicLayer"), "layer 1 of the cache"),
    "shifted": (shifted, "does not lie behind"),
    "swapped": (swapped, r"has a place of|does not lie behind"),
    "shape": (set_at("table/layers.1.store.window.keys/shape", [2**62, 4]), "is no list of at most 8 lengths"),
    "block": (set_at("blocks/1", ["layers.0", 64, 2**40]), "does not begin where"),
    "digests": (set_at("digests", []), "not every block has a digest"),
    "packed": (set_at("packed/layers.1.store.window.keys", ["BF16", [2**40]]), "is packed"),
    "tensor": (
        set_at(f"{STORE}/window/fields/keys", {"tensor": "elsewhere"}),
        "layer 1 of the cache is damaged: KeyError",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_lengths_that_contradict_each_other_are_refused_at_once(
    name: str, saved: tuple[Any, str, bytes], tmp_path: Path
) -> None:
    model, _, content = saved
    change, message = CHANGES[name]
    tree, path = taken_apart(content), tmp_path / "x.kv"
    change(tree)
    path.write_bytes(crafted(content, tree))
    begun = time.perf_counter()
    with pytest.raises(ValueError, match=message):
        kvpress.load(path, model, verify=False)
    assert time.perf_counter() - begun < 1


@pytest.mark.parametrize("depth", [10**5, 900])
def test_nested_json_is_refused(depth: int, saved: tuple[Any, str, bytes], tmp_path: Path) -> None:
    model, _, content = saved
    tree, path = taken_apart(content), tmp_path / "x.kv"
    plain = b"[" * depth + b"]" * depth
    with pytest.raises(ValueError, match=r"no header of safetensors|holds no cache"):
        kvpress.receive(io.BytesIO(len(plain).to_bytes(8, "little") + plain), model)
    inner = json.dumps(tree["about"]).replace('"shared": {"dict": []}', f'"shared": {"[" * depth}{"]" * depth}')
    shared = json.dumps(tree["about"]).replace('"shared": {"dict": []}', f'"shared": {_tuples(depth)}')
    for about in (inner, shared):
        path.write_bytes(crafted(content, tree, about))
        for use in (lambda: kvpress.load(path, model), lambda: kvpress.receive(io.BytesIO(path.read_bytes()), model)):
            with pytest.raises(ValueError, match=r"is not readable|cannot be used|that they share"):
                use()


def _tuples(depth: int) -> str:
    return '{"tuple":[' * depth + "]}" * depth


def test_packed_data_cannot_exceed_its_declared_size(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    frame = torch.frombuffer(bytearray(zstandard.ZstdCompressor().compress(bytes(10**7))), dtype=torch.uint8)
    with pytest.raises(ValueError, match="is packed from 10000000 bytes, not from 64"):
        container._unpacked(frame, torch.bfloat16, (32,))
    described = header.Header({}, {"x": header.Place("U8", (9,), 0, 64, ("BF16", (10**9,)))}, [("x", 0, 64)])
    assert described.held_bytes == 2 * 10**9
