# SPDX-License-Identifier: Apache-2.0
"""A saved and loaded cache goes on as if nothing had happened, and an incomplete file is not used."""

from __future__ import annotations

import copy
import errno
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import DynamicCache, StaticCache

import kvpress
from kvpress import atomic
from kvpress.cache import container, header
from kvpress.cache.header import header_of
from kvpress.cache.mixed import MixedSegment
from kvpress.core.press import BasePress
from kvpress.observe.observer import Observer, Wanted
from kvpress.quant.codebook import CodedSegment
from tests.caches import STORAGES, positions, prefill
from tests.fuzz.cases import Case, ci_cases, random_cases, reaches
from tests.fuzz.models import BIASED, model_of
from tests.fuzz.properties import logits_of, refused
from tests.fuzz.specs import methods, tree_of
from tests.fuzz.talk import begin
from tests.models import grow, padded_batch, position_ids, tiny_model, tokens

LENGTHS = [60, 37]


def through_a_file(cache: Any, model: Any, path: Path, **options: Any) -> DynamicCache:
    kvpress.save(cache, path, model, **options)
    return kvpress.load(path, model)


def follow(model: Any, press: Any, cache: Any, mask: Tensor | None, steps: int = 10) -> Tensor:
    """Return logits of fixed tokens, read one by one behind a cache."""
    outputs = []
    with kvpress.reading(model, press):
        for step in range(steps):
            mask = grow(mask, 1)
            at = position_ids(mask, 1)
            new = tokens(2 if mask is None else len(mask), 1, seed=step)
            outputs.append(model(new, attention_mask=mask, past_key_values=cache, position_ids=at).logits)
    return torch.cat(outputs, dim=1)


def chosen_cases() -> list[Case]:
    """Return few conversations of the fuzz that use every method: always the one with the most missing methods."""
    cases, missing, more = [], set(methods()) - {"none"}, random_cases(0)
    candidates = {case: reaches(case) for case in ci_cases()}
    while missing:
        case = max(candidates, key=lambda case: len(missing & candidates[case]))
        new = missing & candidates.pop(case)
        if not new:
            case = next(more)
            candidates[case] = reaches(case)
        elif not refused(case):
            cases.append(case)
            missing -= new
    return cases


CASES = chosen_cases()


def test_pairs_of_two_widths_keep_the_offset_of_their_keys(tmp_path: Path) -> None:
    model, press = model_of(BIASED, "float32"), kvpress.get_press("zipcache:interval=4,residual_length=8")
    with press(model):
        cache = model(tokens(1, 60), use_cache=True).past_key_values
    segments = [segment for layer in cache.layers for segment in layer.store.segments]
    assert any(segment.key_offset is not None and isinstance(segment, MixedSegment) for segment in segments)
    loaded = through_a_file(cache, model, tmp_path / "cache.kv")
    assert positions(loaded) == positions(cache)
    mask = torch.ones(1, 60, dtype=torch.long)
    assert torch.equal(follow(model, press, loaded, mask), follow(model, press, cache, mask))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_every_press_goes_on_in_a_later_turn_as_if_its_cache_had_not_been_saved(number: int, tmp_path: Path) -> None:
    """Conversations of the fuzz combine every method with others, codecs, selectors, models, batches and padding."""
    case = replace(CASES[number], turns="reading" if number % 2 else "2", beams=1)
    tree = tree_of(case.spec, case.family)
    talk = begin(case, tree)
    talk.turn()
    twin = talk.copy()
    twin.cache = through_a_file(talk.cache, talk.model, tmp_path / "cache.kv")
    assert positions(twin.cache) == positions(talk.cache)
    for conversation in (talk, twin):
        torch.manual_seed(case.seed)
        conversation.turn()
    assert torch.equal(logits_of(twin), logits_of(talk))
    assert positions(twin.cache) == positions(talk.cache)


@pytest.mark.parametrize(
    ("family", "spec"),
    [
        *((family, spec) for family in ("llama", "gemma3_text", "qwen3_next", "gpt_oss") for spec in STORAGES.values()),
        ("mistral", "none"),  # all of its layers slide
    ],
)
def test_layers_of_all_kinds_are_kept(family: str, spec: str, tmp_path: Path) -> None:
    model = tiny_model(family, "eager" if family == "gpt_oss" else "sdpa")
    press, (ids, mask) = kvpress.get_press(spec), padded_batch(LENGTHS)
    cache = prefill(model, press, ids, mask)
    loaded = through_a_file(cache, model, tmp_path / "cache.kv", press=press, tokens=ids, mask=mask)
    assert kvpress.cache_info(tmp_path / "cache.kv").get_press() == press
    assert [type(layer) for layer in loaded.layers] == [type(layer) for layer in cache.layers]
    assert torch.equal(follow(model, press, loaded, mask), follow(model, press, cache, mask))
    assert loaded.get_seq_length() == cache.get_seq_length()


@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_a_file_is_as_large_as_its_cache(spec: str, tmp_path: Path) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    cache = prefill(model, press, tokens(2, 400))
    total = kvpress.memory_report(cache).total_bytes
    info = kvpress.save(cache, tmp_path / "cache.kv", model, press)
    assert info.file_bytes == (tmp_path / "cache.kv").stat().st_size
    assert 0.99 * total <= info.file_bytes - info.header_bytes <= 1.01 * total
    loaded = kvpress.memory_report(kvpress.load(tmp_path / "cache.kv", model))
    assert loaded.total_bytes == pytest.approx(total, rel=0.01)
    assert (info.memory_bytes, info.kept, info.seen) == (total, loaded.kept, loaded.seen)


def test_tensors_shared_by_layers_are_written_once_and_shared_again(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    press = kvpress.get_press("cq:bits=8,coupled=4,residual_length=16")
    ids = tokenizer(["The code for tiger is 4837. " * 40] * 2, return_tensors="pt").input_ids
    cache = prefill(model, press, ids)
    loaded = through_a_file(cache, model, tmp_path / "cache.kv", press=press)
    (angles,) = loaded._kvpress_shared.values()
    coded = [part for layer in loaded.layers for part in layer.store.segments if isinstance(part, CodedSegment)]
    assert len(coded) == len(loaded.layers)
    assert all(part.rotation is not None and part.rotation.angles is angles for part in coded)
    # Offsets and first slots of streams are copied to the device when they are needed.
    sizes = [
        sum(
            layer.components[name]
            for layer in kvpress.memory_report(stored).layers
            for name in ("dense", "codes", "tables")
        )
        for stored in (cache, loaded)
    ]
    assert 0.95 * sizes[0] < sizes[1] <= sizes[0]
    # Segments of a layer can be joined only while they share one codebook.
    assert torch.equal(follow(model, press, loaded, None, 70), follow(model, press, cache, None, 70))
    assert [len(layer.store.segments) for layer in loaded.layers] == [
        len(layer.store.segments) for layer in cache.layers
    ]


QUESTION = " Question: what is the code for tiger? Answer:"
ELSEWHERE = (
    f"QUESTION = {QUESTION!r}"
    + """
import sys, json, torch, kvpress
torch.set_num_threads(1)
model, tokenizer = kvpress.load_model("reference")
answers = []
for path in sys.argv[1:]:
    info, cache = kvpress.cache_info(path), kvpress.load(path, model, tokenizer=tokenizer)
    asked = tokenizer([QUESTION] * info.batch, return_tensors="pt", add_special_tokens=False)
    mask = torch.cat([info.mask, asked.attention_mask], dim=1)
    ids = torch.cat([info.tokens, asked.input_ids], dim=1)
    with kvpress.reading(model, info.get_press()):
        out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
    answers.append(out[:, ids.shape[1]:].tolist())
print(json.dumps(answers))
"""
)


def test_another_process_answers_alike(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    texts = [
        "The river runs. The code for tiger is 4837. " + "The old house stands. " * 30,
        "The code for tiger is 2951. " * 9,
    ]
    inputs = tokenizer(texts, return_tensors="pt", padding=True)
    questions = tokenizer(
        [" Question: what is the code for tiger? Answer:"] * 2, return_tensors="pt", add_special_tokens=False
    )
    ids, mask = (torch.cat([inputs[n], questions[n]], dim=1) for n in ("input_ids", "attention_mask"))
    paths, expected = [], []
    for number, spec in enumerate(
        ("frontier:smaller=4", "adakv(snapkv:0.5) + kivi:bits=4,residual_length=32", "quest:budget=64")
    ):
        press, path = kvpress.get_press(spec), tmp_path / f"{number}.kv"
        cache = prefill(model, press, inputs.input_ids, inputs.attention_mask)
        kvpress.save(
            cache, path, model, press, tokens=inputs.input_ids, mask=inputs.attention_mask, tokenizer=tokenizer
        )
        with kvpress.reading(model, press):
            out = model.generate(ids, attention_mask=mask, past_key_values=cache, max_new_tokens=8, do_sample=False)
        paths.append(str(path))
        expected.append(out[:, ids.shape[1] :].tolist())
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", ELSEWHERE, *paths], capture_output=True, text=True, check=True, timeout=300
    )
    assert json.loads(done.stdout.splitlines()[-1]) == expected


def small(tmp_path: Path, spec: str = STORAGES["composed"]) -> tuple[Any, DynamicCache, Path]:
    """Return a model, a cache of it, and the file that the cache was saved to."""
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    cache, path = prefill(model, press, tokens(2, 60)), tmp_path / "cache.kv"
    kvpress.save(cache, path, model, press)
    return model, cache, path


def test_any_reader_of_safetensors_reads_it_layer_by_layer(tmp_path: Path) -> None:
    _, cache, path = small(tmp_path)
    tensors = load_file(path)
    assert torch.equal(tensors["layers.2.store.window.keys"], cache.layers[2].store.window.filled_keys)
    names = [name for name in tensors if name.startswith("layers.")]
    assert names
    text = path.read_bytes()
    table = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    placed = {name: entry["data_offsets"][0] for name, entry in table.items() if name.startswith("layers.")}
    order = [int(name.split(".")[1]) for name in sorted(placed, key=lambda name: (placed[name], name))]
    assert order == sorted(order)


def test_loading_maps_the_file_and_leaves_it_as_it_is(tmp_path: Path) -> None:
    model, cache, path = small(tmp_path, "none")
    before = path.read_bytes()
    loaded = kvpress.load(path, model)
    path.unlink()
    path.write_bytes(b"something else")
    loaded.layers[0].store.window.keys += 0
    assert torch.equal(follow(model, BasePress(), loaded, None), follow(model, BasePress(), cache, None))
    path.write_bytes(before)
    twice = [kvpress.load(path, model) for _ in range(2)]
    twice[0].layers[0].store.window.keys.zero_()
    assert bool(twice[1].layers[0].store.window.keys.any())
    assert path.read_bytes() == before


def data(content: bytes) -> bytes:
    """Return the content of a file behind its header."""
    return content[8 + int.from_bytes(content[:8], "little") :]


def test_tensors_are_written_in_pieces_whatever_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "CHUNK", 100)
    source = torch.randn(3, 5, 7, 4)
    for tensor in (source, source.transpose(1, 2), source[:, :, 2:6], source[..., 1], source[0, 0, 0, 0], source[:0]):
        pieces = [bytes(piece) for piece in container._pieces(tensor)]
        assert b"".join(pieces) == bytes(container.view_of(tensor.contiguous()))
        assert all(len(piece) <= 100 for piece in pieces)


def test_saving_changes_nothing_and_may_be_repeated(tmp_path: Path) -> None:
    model, cache, path = small(tmp_path)
    twin, first = copy.deepcopy(cache), path.read_bytes()
    press = kvpress.get_press(STORAGES["composed"])
    kvpress.save(kvpress.load(path, model), path, model, press)
    assert data(path.read_bytes()) == data(first)
    assert torch.equal(follow(model, press, cache, None), follow(model, press, twin, None))


def test_every_cut_and_every_changed_byte_is_noticed(tmp_path: Path) -> None:
    model, _, path = small(tmp_path)
    content = path.read_bytes()
    begin_of_data = 8 + int.from_bytes(content[:8], "little")
    for length in (0, 5, 8, 100, begin_of_data - 1, begin_of_data, begin_of_data + 1000, len(content) - 1):
        path.write_bytes(content[:length])
        with pytest.raises(ValueError, match=r"cut off|not a file of kvpress"):
            kvpress.load(path, model)
    for place in [
        3,
        9,
        200,
        begin_of_data // 2,
        *range(begin_of_data, len(content), (len(content) - begin_of_data) // 40),
    ]:
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        with pytest.raises(ValueError, match=r"damaged|not a file|cut off"):
            kvpress.load(path, model)
    path.write_bytes(content + b"x")
    with pytest.raises(ValueError, match="something behind it"):
        kvpress.load(path, model)
    path.write_bytes(content)
    kvpress.load(path, model)


def test_foreign_and_later_files_are_refused_by_a_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, _, path = small(tmp_path)
    weights = Path(kvpress.reference_path()) / "model.safetensors"
    with pytest.raises(ValueError, match="holds no cache of kvpress"):
        kvpress.load(weights, model)
    notes = tmp_path / "notes.txt"
    notes.write_text("a text about nothing at all")
    with pytest.raises(ValueError, match="not a file of kvpress"):
        kvpress.load(notes, model)
    with pytest.raises(FileNotFoundError, match=r"kvpress\.save writes one"):
        kvpress.load(tmp_path / "missing.kv", model)
    with pytest.raises(IsADirectoryError, match="this is a folder"):
        kvpress.load(tmp_path, model)
    monkeypatch.setattr(header, "VERSION", 3)
    with pytest.raises(ValueError, match=r"version '2'.*upgrade kvpress"):
        kvpress.load(path, model)


def test_a_file_that_goes_while_it_is_read_is_missing(tmp_path: Path) -> None:
    path = small(tmp_path)[2]
    with path.open("rb") as file:
        path.unlink()
        with pytest.raises(FileNotFoundError):
            header_of(file, path)


def test_another_model_is_refused_and_the_difference_named(tmp_path: Path) -> None:
    model, cache, path = small(tmp_path)
    with pytest.raises(ValueError, match=r"architecture 'LlamaForCausalLM' \(here 'Qwen3ForCausalLM'\)"):
        kvpress.load(path, tiny_model("qwen3"))
    with pytest.raises(ValueError, match="differs from this model in weights"):
        kvpress.load(path, tiny_model("llama", seed=1))
    changed = copy.deepcopy(model)
    changed.config.rope_parameters = {**changed.config.rope_parameters, "rope_theta": 5e5}
    with pytest.raises(ValueError, match="rope_parameters"):
        kvpress.load(path, changed)
    with pytest.raises(ValueError, match=r"load it with dtype=torch\.float32"):
        kvpress.load(path, copy.deepcopy(model).to(torch.bfloat16))
    with pytest.raises(ValueError, match=r"2 kv heads of 32, and this model has 2 of 16"):
        kvpress.save(cache, path, tiny_model("smollm3"))


def test_another_tokenizer_is_refused(tmp_path: Path) -> None:
    model, tokenizer = kvpress.load_model("reference")
    cache = prefill(
        model, kvpress.get_press("knorm:0.5"), tokenizer("The old river runs.", return_tensors="pt").input_ids
    )
    kvpress.save(cache, tmp_path / "cache.kv", model, tokenizer=tokenizer)
    kvpress.load(tmp_path / "cache.kv", model, tokenizer=tokenizer)
    changed = copy.deepcopy(tokenizer)
    changed.add_tokens(["tigerlike"])
    with pytest.raises(ValueError, match="another tokenizer"):
        kvpress.load(tmp_path / "cache.kv", model, tokenizer=changed)


class Unnamed(kvpress.ScorerPress):
    """Press that a spec cannot name."""

    def scores(self, view: Any) -> Tensor:
        return view.values.norm(dim=-1)


def test_an_unsaveable_cache_is_refused_before_writing(tmp_path: Path) -> None:
    model, cache, old = small(tmp_path)
    path = tmp_path / "other.kv"
    with pytest.raises(ValueError, match="the cache is empty"):
        kvpress.save(DynamicCache(config=model.config), path, model)
    with pytest.raises(TypeError, match="got StaticCache"):
        kvpress.save(StaticCache(config=model.config, max_cache_len=8), path, model)
    with pytest.raises(ValueError, match=r"tokens must have shape \[2, 60\].*got \[2, 59\]"):
        kvpress.save(cache, path, model, tokens=tokens(2, 59))
    with pytest.raises(ValueError, match="compress must be None or 'zstd', got 'gzip'"):
        kvpress.save(cache, path, model, compress="gzip")
    with pytest.raises(IsADirectoryError, match="this is a folder"):
        kvpress.save(cache, tmp_path, model)
    with pytest.raises(FileNotFoundError, match="does not exist"):
        kvpress.save(cache, tmp_path / "no" / "cache.kv", model)
    with pytest.raises(ValueError, match="notes must be plain data"):
        kvpress.save(cache, path, model, notes={"what": object()})
    with pytest.raises(ValueError, match=r"Unnamed cannot be noted in a file: Unnamed is not registered"):
        kvpress.save(cache, path, model, Unnamed(0.5))
    with pytest.raises(KeyError, match="snapvk"):
        kvpress.save(cache, path, model, "snapvk:0.5")
    cache.layers[1].interrupted = 10
    with pytest.raises(RuntimeError, match="a forward pass that failed"):
        kvpress.save(cache, path, model)
    assert list(tmp_path.iterdir()) == [old]


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, path = small(tmp_path)
    before = path.read_bytes()
    usage = shutil.disk_usage(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
        with pytest.raises(OSError, match="1000 are free"):
            kvpress.save(cache, path, model)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic.os, "fsync", full)
        with pytest.raises(OSError, match="no space left"):
            kvpress.save(cache, path, model)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_two_writers_of_one_file_leave_a_whole_one(tmp_path: Path) -> None:
    model, cache, path = small(tmp_path)
    caches = [cache, prefill(model, kvpress.get_press("knorm:0.5"), tokens(2, 40))]
    failed = []

    def work(mine: DynamicCache) -> None:
        try:
            for _ in range(5):
                kvpress.save(mine, path, model)
        except BaseException as error:  # shown below
            failed.append(error)

    threads = [threading.Thread(target=work, args=(mine,)) for mine in caches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    assert kvpress.load(path, model).get_seq_length() in (60, 40)
    assert list(tmp_path.iterdir()) == [path]


class Newest(Observer):
    """Keeps the newest query: an observer of a user."""

    state_names = ("query",)

    def __init__(self) -> None:
        self.query: Tensor | None = None

    def observe(self, call: Any) -> None:
        self.query = call.queries[:, :, -1:].clone()


def test_observers_of_users_are_kept_and_unknown_ones_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvpress.cache import files

    model, cache, path = small(tmp_path, "none")
    seen = cache.layers[0].store.observers[Wanted(Newest)] = Newest()
    seen.query = torch.randn(2, 4, 1, 32)
    loaded = through_a_file(cache, model, path)
    assert torch.equal(loaded.layers[0].store.observers[Wanted(Newest)].query, seen.query)
    monkeypatch.delitem(files.kept_whole, "Newest")
    with pytest.raises(ValueError, match="holds a Newest, an unknown class"):
        kvpress.load(path, model)
    with pytest.raises(TypeError, match=r"of the class Newest, which cannot be written to a file"):
        kvpress.save(cache, path, model)


def test_packed_numbers_come_back_bit_by_bit(tmp_path: Path) -> None:
    pytest.importorskip("zstandard")
    model = copy.deepcopy(tiny_model("llama")).to(torch.bfloat16)
    press = kvpress.get_press("knorm:0.25")
    cache = prefill(model, press, tokens(2, 300))
    plain = kvpress.save(cache, tmp_path / "plain.kv", model, press)
    packed = kvpress.save(cache, tmp_path / "packed.kv", model, press, compress="zstd")
    assert packed.file_bytes < 0.9 * plain.file_bytes
    loaded = kvpress.load(tmp_path / "packed.kv", model)
    assert torch.equal(loaded.layers[0].store.dense.keys, cache.layers[0].store.dense.keys)
    mask = torch.ones(2, 300, dtype=torch.long)
    assert torch.equal(follow(model, press, loaded, mask), follow(model, press, cache, mask))


def test_packing_names_missing_requirements(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache, path = small(tmp_path)
    monkeypatch.setattr(container, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r"pip install 'kvpress-toolkit\[zstd\]'"):
        kvpress.save(cache, path, model, compress="zstd")
