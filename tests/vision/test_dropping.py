# SPDX-License-Identifier: Apache-2.0
"""Image tokens that later layers skip: equal to a full reading that hides them from these layers."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache
from transformers.masking_utils import causal_mask_function, eager_mask, sdpa_mask

import kvpress
from kvpress.hf.attention.masks import PressMask
from tests.bad_input.refusals import forward, generate, refused
from tests.caches import positions
from tests.models import fingerprint, grow, padded_batch, position_ids, tiny_model, tokens
from tests.vision.hidden import Hidden
from tests.vision.models import IMAGE, image_batch, tiny_vlm
from tests.vision.test_reading import row_of

STEPS = 4
TEXT = ["llama", "qwen3", "phi3", "granite"]
VISION = ["llava", "qwen2_5_vl", "qwen3_vl"]
RANGES = [(2, 9), (11, 15)]
SPEC = " ".join(f"{first}:{end}" for first, end in RANGES)


def inputs_of(kind: str) -> tuple[Any, dict[str, Any], Tensor]:
    """Return a model, its inputs and the columns of images, for a batch of three rows, two of them padded."""
    if kind in VISION:
        model, inputs = tiny_vlm(kind), image_batch(kind, [(5, 12), (4, 8), (0, 3)])
        return model, inputs, inputs["input_ids"] == IMAGE
    ids, mask = padded_batch([30, 21, 16])
    free = torch.zeros_like(ids, dtype=torch.bool)
    for row in range(3):
        for first, end in RANGES:
            pads = int((1 - mask[row]).sum())
            free[row, pads + first : pads + end] = True
    return tiny_model(kind), {"input_ids": ids, "attention_mask": mask, "position_ids": position_ids(mask)}, free


def following(model: Any, mask: Tensor) -> Tensor:
    """Return positions of the newest tokens."""
    at, deltas = (mask.sum(dim=1) - 1)[:, None], getattr(model.base_model, "rope_deltas", None)
    return at if deltas is None else (at + deltas).expand(3, -1, -1)


def read(model: Any, inputs: dict[str, Any]) -> tuple[Tensor, Tensor, DynamicCache]:
    """Return logits of a prompt and of some tokens behind it, and the cache."""
    cache, mask = DynamicCache(config=model.config), inputs["attention_mask"]
    new = tokens(len(mask), STEPS, seed=9) % (IMAGE - 3) + 3
    with torch.no_grad():
        prompt, decoded = model(**inputs, past_key_values=cache).logits, []
        for step in range(STEPS):
            grown = grow(mask, step + 1)
            at = following(model, grown)
            step_inputs = {"attention_mask": grown, "position_ids": at, "past_key_values": cache}
            decoded.append(model(input_ids=new[:, step : step + 1], **step_inputs).logits)
    return prompt, torch.cat(decoded, dim=1), cache


def fastv(free: Tensor, layer: int, ratio: float) -> Any:
    """Return the tokens that FastV hides behind a layer, by plain code."""

    def decide(after: int, weights: Tensor, gone: Tensor | None) -> Tensor:
        if after != layer:
            return torch.zeros_like(free) if gone is None else gone
        hidden = free.clone()
        for row, worth in enumerate(weights.mean(dim=1)[:, -1]):
            image_columns = free[row].nonzero().flatten()
            best = image_columns[worth[image_columns].argsort(descending=True)[: int(len(image_columns) * (1 - ratio))]]
            hidden[row, best] = False
        return hidden

    return decide


def must_drop(free: Tensor, real: Tensor, layers: tuple[int, ...], all_below: float, each_below: float) -> Any:
    """Return the tokens that MustDrop hides behind some layers, token by token."""

    def decide(after: int, weights: Tensor, gone: Tensor | None) -> Tensor:
        hidden = torch.zeros_like(free) if gone is None else gone.clone()
        for row in range(len(free)) if after in layers else ():
            text = (real[row] & ~free[row]).nonzero().flatten().tolist()
            remaining = (free[row] & ~hidden[row]).nonzero().flatten().tolist()
            paid = weights[row].mean(dim=0)
            total = sum(float(paid[t, j]) for t in text for j in remaining)
            for j in remaining:
                few = sum(float(paid[t, j]) for t in text) < all_below * total
                hidden[row, j] = few and max(float(paid[t, j]) for t in text) < each_below
        return hidden

    return decide


def agree(kind: str, spec: str, decide: Any, cut: tuple[int, int] = (0, -1)) -> tuple[Any, DynamicCache, Hidden]:
    """Compare a press with the full reading that hides the tokens that `decide` returns."""
    model, inputs, free = inputs_of(kind)
    hidden = Hidden(decide(free), cut)
    with hidden.on(model):
        prompt, further, _ = read(model, inputs)
    before = fingerprint(model)
    with kvpress.get_press(spec)(model):
        logits, decoded, cache = read(model, inputs)
    text = inputs["attention_mask"].bool() & ~free
    torch.testing.assert_close(logits[text], prompt[text], atol=2e-4, rtol=1e-3)
    torch.testing.assert_close(decoded, further, atol=2e-4, rtol=1e-3)
    assert fingerprint(model) == before
    return model, cache, hidden


def holds(cache: DynamicCache, kind: str, gone: list[Tensor | None]) -> None:
    """Check that every layer holds the pairs of the tokens that were not gone, and no others; padding may be there."""
    _, inputs, free = inputs_of(kind)
    real, newest = inputs["attention_mask"].bool(), [*range(free.shape[1], free.shape[1] + STEPS)]
    for layer, hidden in zip(positions(cache), gone, strict=True):
        for row, heads in enumerate(layer):
            stays = real[row] if hidden is None else real[row] & ~hidden[row]
            expected = [*stays.nonzero().flatten().tolist(), *newest]
            pads = int((~real[row]).sum())
            assert [[at for at in head if at >= pads] for head in heads] == [expected] * len(heads)


@pytest.mark.parametrize("kind", [*TEXT, *VISION])
def test_fastv_is_a_full_reading_that_hides_tokens_of_least_attention(kind: str) -> None:
    spec = "fastv:0.6,layer=1" + ("" if kind in VISION else f",tokens={SPEC}")
    _, cache, hidden = agree(kind, spec, lambda free: fastv(free, 1, 0.6))
    holds(cache, kind, [None, None, *(hidden.gone[layer] for layer in range(2, len(cache.layers)))])


@pytest.mark.parametrize("kind", ["granite", *VISION])
@pytest.mark.parametrize("all_below", [0.3, 1.0])
def test_must_drop_is_a_full_reading_that_hides_tokens_unattended_by_text(kind: str, all_below: float) -> None:
    _, inputs, free = inputs_of(kind)
    layers = (0, 1) if kind == "granite" else (0, 2)
    spec = f"must_drop:all_below={all_below},each_below=0.25,layers={layers}".replace(" ", "")
    spec += "" if kind in VISION else f",tokens={SPEC}"
    real = inputs["attention_mask"].bool()
    plain = must_drop(free, real, layers, all_below, 0.25)
    _, cache, hidden = agree(kind, spec, lambda _: plain, cut=(0, layers[-1]))
    final = hidden.gone[layers[-1] + 1]
    assert bool(final.any())
    holds(cache, kind, [final] * len(cache.layers))


def test_thresholds_that_drop_nothing_and_key_tokens() -> None:
    model, inputs, free = inputs_of("llava")
    plain = read(model, inputs)
    with kvpress.get_press("must_drop:layers=(0,1)")(model):
        outputs = read(model, inputs)
    assert torch.equal(outputs[0], plain[0])
    keys = kvpress.get_press("protect(must_drop:each_below=1.0,layers=(0,1)):tokens=6:8")
    with keys(model):
        cache = read(model, inputs)[2]
    for layer in positions(cache):
        for row, heads in enumerate(layer):
            pads = int((1 - inputs["attention_mask"][row]).sum())
            remaining = set(free[row].nonzero().flatten().tolist())
            assert all(remaining & set(head) == {pads + 6, pads + 7} for head in heads)


def test_later_layers_compute_nothing_of_dropped_tokens() -> None:
    model, inputs, free = inputs_of("llava")
    lengths: list[int] = []
    handles = [
        layer.mlp.register_forward_pre_hook(lambda _, inputs_of_mlp: lengths.append(inputs_of_mlp[0].shape[1]))
        for layer in model.get_decoder().layers
    ]
    with kvpress.get_press("fastv:0.5,layer=1")(model), torch.no_grad():
        model(**inputs, use_cache=True)
    for handle in handles:
        handle.remove()
    length, dropped = free.shape[1], int(free[0].sum()) // 2
    assert lengths == [length, length, length - dropped, length - dropped]


BESIDE = [
    "kivi:bits=8,group_size=4,residual_length=4",
    "knorm:0.3",
    "adakv(keydiff:0.4) + kivi:bits=8,group_size=4,residual_length=4 + quest:budget=8,page_size=4,skip_layers=0",
    "decoding(knorm):compression_interval=3,target_size=20",
]


@pytest.mark.parametrize("composed", BESIDE)
@pytest.mark.parametrize("kind", ["llama", "qwen2_5_vl"])
def test_a_padded_row_equals_that_row_alone_beside_other_presses(kind: str, composed: str) -> None:
    model, inputs, _ = inputs_of(kind)
    spec = f"fastv:0.6,layer=1 + {composed}" if kind in VISION else f"fastv:0.6,layer=1,tokens={SPEC} + {composed}"
    inputs.pop("position_ids", None)
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    with kvpress.get_press(spec)(model):
        together = model.generate(**inputs, **settings)
        together_kept = positions(together.past_key_values)
        for row in range(3):
            alone = model.generate(**row_of(inputs, row, kind), **settings)
            assert torch.equal(alone.sequences[0, -8:], together.sequences[row, -8:])
            pads = int((1 - inputs["attention_mask"][row]).sum())
            for layer, kept in zip(together_kept, positions(alone.past_key_values), strict=True):
                assert [[at - pads for at in head if at >= pads] for head in layer[row]] == kept[0]
    report = kvpress.memory_report(together.past_key_values)
    assert report.kept < report.seen


def test_nothing_dropped_is_bit_for_bit_the_plain_reading() -> None:
    model, inputs, _ = inputs_of("llava")
    plain = read(model, inputs)[:2]
    for spec in ("fastv:0.0", "protect(fastv:0.5):tokens=0:30"):
        ids = {name: value[:1] for name, value in inputs.items()}
        with kvpress.get_press(spec)(model):
            logits = read(model, ids)[0]
        with torch.no_grad():
            assert torch.equal(logits, model(**ids).logits)
    assert plain[0].shape[1] == inputs["input_ids"].shape[1]


def test_protected_image_tokens_go_on_and_later_turns_are_read_whole() -> None:
    model, inputs, free = inputs_of("llava")
    cache = DynamicCache(config=model.config)
    second = image_batch("llava", [(2, 3)] * 3, seed=4)
    second["attention_mask"] = torch.cat([inputs["attention_mask"], second["attention_mask"]], dim=1)
    length = free.shape[1]
    with kvpress.get_press("protect(fastv:0.75,layer=0):tokens=7:10")(model), torch.no_grad():
        model(**inputs, past_key_values=cache)
        model(**second, past_key_values=cache)
    for layer in positions(cache)[1:]:
        for row, heads in enumerate(layer):
            pads = int((1 - inputs["attention_mask"][row]).sum())
            for head in heads:
                assert {pads + 7, pads + 8, pads + 9} <= set(head)
                assert {*range(length, length + 21)} <= set(head)
                assert sum(at < length for at in head) < int(inputs["attention_mask"][row].sum())


@pytest.mark.parametrize(
    "spec", ["vision(knorm:0.5)", "must_drop:each_below=0.2,layers=(0,1)", "video_xl2:dense=0,pool=4"]
)
def test_a_cache_with_images_goes_on_from_a_file_and_as_a_tuple(spec: str, tmp_path: Path) -> None:
    model, inputs, _ = inputs_of("llava")
    cache, press = DynamicCache(config=model.config), kvpress.get_press(spec)
    with press(model), torch.no_grad():
        logits = model(**inputs, past_key_values=cache).logits
        assert torch.equal(model(**inputs, return_dict=False)[0], logits)
        kvpress.save(cache, tmp_path / "images.kv", model, press)
        loaded = kvpress.load(tmp_path / "images.kv", model)
        mask, new = grow(inputs["attention_mask"], 1), tokens(3, 1, seed=3) % IMAGE
        inputs_of_turn = {"input_ids": new, "attention_mask": mask}
        resumed, direct = (model(**inputs_of_turn, past_key_values=stored).logits for stored in (loaded, cache))
    assert torch.equal(resumed, direct)
    assert positions(loaded) == positions(cache)


def test_beams_copies_and_files_go_on_from_the_remaining_tokens(tmp_path: Path) -> None:
    model, inputs, _ = inputs_of("llama")
    press = kvpress.get_press(f"fastv:0.5,layer=0,tokens={SPEC}")
    settings = {"max_new_tokens": 6, "do_sample": False}
    first_row = {name: value[:1] for name, value in inputs.items() if name != "position_ids"}
    with press(model), torch.no_grad():
        cache = DynamicCache(config=model.config)
        model(**first_row, past_key_values=cache)
        kvpress.save(cache, tmp_path / "prompt.kv", model, press)
        longer = torch.cat([first_row["input_ids"], tokens(1, 3, seed=8)], dim=1)
        direct = model.generate(longer, past_key_values=copy.deepcopy(cache), **settings)
        loaded = kvpress.load(tmp_path / "prompt.kv", model)
        assert torch.equal(model.generate(longer, past_key_values=loaded, **settings), direct)
        beams = model.generate(**first_row, num_beams=2, **settings)
        assert beams.shape[1] == first_row["input_ids"].shape[1] + 6


SHORT = "fastv:0.5,layer=0,tokens=2:5"


@pytest.mark.parametrize(
    ("family", "spec", "error", "word"),
    [
        ("gemma3_text", SHORT, NotImplementedError, "sliding_attention"),
        ("qwen3_next", SHORT, NotImplementedError, "has layers that"),
        ("llama", "fastv:0.5,layer=2,tokens=2:5", ValueError, "layers below 2"),
        ("llama", "fastv:0.5,layer=0", ValueError, "names none"),
        ("llama", f"{SHORT} + snapkv:0.5", NotImplementedError, "RecentQueries"),
        ("llama", f"{SHORT} + minference", NotImplementedError, "a pattern"),
        ("llama", f"{SHORT} + bounded(knorm:0.5):chunk=8", NotImplementedError, "bounded(x)"),
    ],
)
def test_models_and_presses_that_cannot_be_handed_fewer_tokens_are_refused(
    family: str, spec: str, error: type[Exception], word: str
) -> None:
    model = tiny_model(family)
    refused(model, lambda: forward(model, spec, tokens(1, 20)), error, word)


def test_prompts_that_cannot_be_handed_on_in_part_are_refused() -> None:
    model, ids = tiny_model("llama"), tokens(1, 20)
    refused(model, lambda: generate(model, SHORT, ids, prefill_chunk_size=8), NotImplementedError, "prefill_chunk_size")
    refused(model, lambda: generate(model, SHORT, ids[:, :4]), ValueError, "ends past")
    refused(model, lambda: forward(model, SHORT, ids, output_hidden_states=True), ValueError, "output_hidden_states")


def test_a_prompt_without_images_is_read_whole_with_a_warning() -> None:
    model, (ids, mask) = tiny_vlm("llava"), padded_batch([20, 12])
    with kvpress.get_press("fastv:0.5,layer=0")(model), pytest.warns(RuntimeWarning, match="no image or video tokens"):
        cache = model(input_ids=ids % IMAGE, attention_mask=mask, use_cache=True).past_key_values
    assert kvpress.memory_report(cache).kept == kvpress.memory_report(cache).seen


@pytest.mark.parametrize("build", [sdpa_mask, eager_mask])
def test_a_mask_of_some_tokens_is_that_of_all_at_their_places(build: Any) -> None:
    """Masks that are more than causal are gathered, so that positions in the whole prompt count."""
    real = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1, 1]], dtype=torch.bool)

    def near(batch: Any, head: Any, query: Any, key: Any) -> Any:
        return causal_mask_function(batch, head, query, key) & (query - key < 4)

    arguments = {"batch_size": 2, "q_length": 8, "kv_length": 8, "q_offset": 0, "kv_offset": 0, "attention_mask": real}
    arguments |= {"dtype": torch.float32, "mask_function": near}
    full = PressMask(real, arguments, build).native(8)
    index, remaining = torch.tensor([[0, 2, 5, 6, 7], [0, 1, 3, 4, 7]]), torch.tensor([[0, 1, 1, 1, 1], [1] * 5]).bool()
    gathered = PressMask(real, arguments, build).of_tokens(index, remaining).native(5)
    assert gathered.shape == (2, 1, 5, 5)
    for row in range(2):
        at = index[row][remaining[row]]
        assert torch.equal(gathered[row, 0][remaining[row]][:, remaining[row]], full[row, 0][at][:, at])
    hidden = False if gathered.dtype == torch.bool else torch.finfo(gathered.dtype).min
    assert bool((gathered[0, 0, 1:, 0] == hidden).all())
