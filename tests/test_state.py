"""A press leaves nothing behind on models and presses, and everything that a request needs lives in its cache."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from tests.models import COMMON, padded_batch, tiny_model, tokens
from tests.oracle import Oracle
from tests.presses.evicting import EVICTING
from tests.test_bad_input import fingerprint

CODEC = "kivi:bits=4,group_size=4,residual_length=4"
STORAGES = {
    "window": "none",
    "uniform": "snapkv:0.5,window_size=4",
    "ragged": "adakv(snapkv:0.5,window_size=4)",
    "kivi": CODEC,
    "quest": "quest:budget=16,page_size=4,skip_layers=0",
    "composed": f"adakv(snapkv:0.5,window_size=4) + {CODEC} + quest:budget=16,page_size=4,skip_layers=0",
}


def generate(model: Any, ids: Tensor, mask: Tensor | None = None, **settings: Any) -> Any:
    settings = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **settings}
    return model.generate(ids, attention_mask=mask, **settings)


def prefill(model: Any, press: Any, ids: Tensor) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with press(model):
        model(ids, past_key_values=cache)
    return cache


def positions(cache: Any) -> list[list[list[list[int]]]]:
    return [[[head.tolist() for head in row] for row in layer] for layer in kvpress.kept_positions(cache)]


def pairs(cache: Any) -> set[int]:
    """The different numbers of pairs that heads of compressed layers hold."""
    return {n for layer in cache.layers if hasattr(layer, "store") for n in layer.store.stored()}


# -- what a block changes is undone --------------------------------------------------------------------------


@contextmanager
def raising_score(error: type[BaseException]) -> Iterator[Any]:
    class Broken(kvpress.ScorerPress):
        def score(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
            if module.layer_idx == 1:
                raise error("broken on purpose")
            return keys.norm(dim=-1)

    with pytest.raises(error, match="broken on purpose"):
        yield Broken(0.5)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_an_exception_while_scoring_restores_everything(family: str, error: type[BaseException]) -> None:
    model = tiny_model(family)
    before, expected = fingerprint(model), generate(model, tokens(1, 20)).sequences
    with raising_score(error) as press, press(model):
        generate(model, tokens(1, 20))
    assert fingerprint(model) == before
    assert torch.equal(generate(model, tokens(1, 20)).sequences, expected)


def test_an_exception_of_the_caller_restores_everything() -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    with pytest.raises(ZeroDivisionError), kvpress.SnapKVPress(0.5)(model):
        raise ZeroDivisionError(generate(model, tokens(1, 20)))
    assert fingerprint(model) == before
    with pytest.raises(ZeroDivisionError), kvpress.reading(model):
        raise ZeroDivisionError
    assert fingerprint(model) == before


@contextmanager
def failing(module: Any) -> Iterator[None]:
    def fail(*_: Any) -> None:
        raise OSError("failed on purpose")

    handle = module.register_forward_pre_hook(fail)
    try:
        with pytest.raises(OSError, match="failed on purpose"):
            yield
    finally:
        handle.remove()


def test_an_exception_inside_attention_leaves_no_open_call_on_the_cache() -> None:
    model = tiny_model("llama")
    press = kvpress.get_press("knorm:0.5")
    cache = prefill(model, press, tokens(1, 20))
    with failing(model.model.layers[0].self_attn.o_proj), press(model):
        model(tokens(1, 3), past_key_values=cache)
    with pytest.raises(RuntimeError, match="inside a press"):
        model(tokens(1, 3), past_key_values=cache)


def test_sub_configurations_get_their_own_attention_back() -> None:
    text = {
        **COMMON,
        "sliding_window": 8,
        "num_hidden_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
    }
    vision = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
              "image_size": 28, "patch_size": 14}  # fmt: skip
    config = CONFIG_MAPPING["gemma3"](text_config=text, vision_config=vision, mm_tokens_per_image=4)
    model = AutoModelForImageTextToText.from_config(
        config, attn_implementation={"text_config": "sdpa", "vision_config": "eager"}
    ).eval()
    before = fingerprint(model)
    assert len(set(before[0].values())) > 1
    ids = tokens(1, 20)
    expected = generate(model, ids).sequences
    with kvpress.get_press("none")(model):
        assert model.config.get_text_config()._attn_implementation == "kvpress"
        assert torch.equal(generate(model, ids).sequences, expected)
    assert fingerprint(model) == before
    with raising_score(ValueError) as press, press(model):
        generate(model, ids)
    assert fingerprint(model) == before


def test_a_normal_block_restores_everything() -> None:
    for family in ("llama", "qwen3_moe", "gpt_oss"):
        model = tiny_model(family, "eager")
        before = fingerprint(model)
        with kvpress.get_press(STORAGES["composed"])(model):
            assert fingerprint(model) != before
            generate(model, tokens(1, 20))
        assert fingerprint(model) == before


def test_a_subclass_of_generate_set_by_the_user_survives() -> None:
    model = tiny_model("llama", seed=3)
    own = model.generate
    model.generate = lambda *args, **kwargs: own(*args, **kwargs)
    mine = model.generate
    try:
        with kvpress.KnormPress(0.5)(model):
            generate(model, tokens(1, 12))
        assert model.__dict__.get("generate") is mine
    finally:
        model.__dict__.pop("generate", None)


# -- presses, models and caches beside each other ------------------------------------------------------------


def steps(model: Any, cache: Any, seed: int) -> list[Tensor]:
    """Decode four fixed tokens, as separate passes that can be interleaved."""
    return [lambda t=t: model(tokens(2, 1, seed + t), past_key_values=cache).logits for t in range(4)]


def test_two_presses_on_two_models_interleaved() -> None:
    first, second = tiny_model("llama"), tiny_model("qwen3")
    specs = (STORAGES["composed"], "knorm:0.6")
    caches = [prefill(m, kvpress.get_press(s), tokens(2, 30)) for m, s in zip((first, second), specs, strict=True)]
    expected = []
    for model, spec, cache in zip((first, second), specs, caches, strict=True):
        with kvpress.get_press(spec)(model):
            expected.append([step() for step in steps(model, copy.deepcopy(cache), 5)])
    together = [DynamicCache(config=first.config), DynamicCache(config=second.config)]
    with kvpress.get_press(specs[0])(first), kvpress.get_press(specs[1])(second):
        for model, cache in zip((first, second), together, strict=True):
            model(tokens(2, 30), past_key_values=cache)
        assert [positions(cache) for cache in together] == [positions(cache) for cache in caches]
        for i, (a, b) in enumerate(zip(steps(first, together[0], 5), steps(second, together[1], 5), strict=True)):
            assert torch.equal(a(), expected[0][i])
            assert torch.equal(b(), expected[1][i])


def test_leaving_one_of_two_models_keeps_the_other() -> None:
    first, second = tiny_model("llama"), tiny_model("llama", seed=1)
    with kvpress.KnormPress(0.5)(first):
        with kvpress.KnormPress(0.5)(second):
            pass
        with_press = generate(first, tokens(1, 20)).past_key_values
        without = generate(second, tokens(1, 20)).past_key_values
    assert kvpress.memory_report(with_press).kept < kvpress.memory_report(with_press).seen
    assert kvpress.memory_report(without).kept == kvpress.memory_report(without).seen


def test_two_models_that_share_one_configuration_take_turns() -> None:
    """transformers keeps the attention implementation in the configuration, so it cannot differ between them."""
    config = CONFIG_MAPPING["llama"](**COMMON)
    first, second = (AutoModelForCausalLM.from_config(config).eval() for _ in range(2))
    assert first.config is second.config
    with kvpress.KnormPress(0.5)(first):
        with pytest.raises(RuntimeError, match="shares its configuration"), kvpress.KnormPress(0.7)(second):
            pass
        assert kvpress.memory_report(first(tokens(1, 20), use_cache=True).past_key_values).kept == 3 * 2 * 10
    assert prefill(second, kvpress.KnormPress(0.5), tokens(1, 20)).get_seq_length() == 20


@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_two_caches_on_one_model_interleaved(spec: str) -> None:
    model = tiny_model("llama")
    press = kvpress.get_press(spec)
    prompts = (tokens(2, 30), tokens(2, 22, seed=4))
    expected = []
    for prompt in prompts:
        cache = DynamicCache(config=model.config)
        with press(model):
            model(prompt, past_key_values=cache)
            expected.append([step() for step in steps(model, cache, 7)])
    caches = [DynamicCache(config=model.config) for _ in prompts]
    with press(model):
        for prompt, cache in zip(prompts, caches, strict=True):
            model(prompt, past_key_values=cache)
        for i, (a, b) in enumerate(zip(steps(model, caches[0], 7), steps(model, caches[1], 7), strict=True)):
            assert torch.equal(a(), expected[0][i])
            assert torch.equal(b(), expected[1][i])


@pytest.mark.parametrize(
    "spec", [*EVICTING, CODEC, STORAGES["quest"], STORAGES["composed"], "decoding(knorm):target_size=9"]
)
def test_a_press_keeps_no_state(spec: str) -> None:
    model, press, fresh = tiny_model("llama"), kvpress.get_press(spec), kvpress.get_press(spec)
    with press(model):
        generate(model, *padded_batch([30, 11]))
    assert press == fresh
    assert set(press.__dict__) - set(fresh.__dict__) <= {"_last_cache"}
    with press(model) as session:
        again = generate(model, tokens(2, 25, seed=2)).sequences
        kept = positions(session.cache)
    with fresh(model) as session:
        assert torch.equal(generate(model, tokens(2, 25, seed=2)).sequences, again)
        assert positions(session.cache) == kept


def test_last_cache() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    assert press.last_cache is None
    with press(model):
        model.generate(tokens(1, 20), max_new_tokens=2)
    assert kvpress.memory_report(press.last_cache).layers[0].kept == 2 * 11


# -- a compressed cache lives on -----------------------------------------------------------------------------


@pytest.mark.parametrize("length", [1, 5], ids=["one", "several"])
@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("spec", EVICTING)
def test_a_later_block_reads_at_the_right_positions(spec: str, padded: bool, length: int) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    ids, mask = padded_batch([40, 26]) if padded else (tokens(2, 40), None)
    at = None if mask is None else (mask.cumsum(1) - 1).clamp_min(0)
    cache, stock = DynamicCache(config=model.config), DynamicCache(config=model.config)
    with press(model):
        model(ids, attention_mask=mask, past_key_values=cache, position_ids=at)
    kept = kvpress.kept_positions(cache)
    model(ids, attention_mask=mask, past_key_values=stock, position_ids=at)
    new = tokens(2, length, seed=11)
    if mask is not None:
        mask = torch.cat([mask, mask.new_ones(2, length)], dim=1)
        at = (mask.cumsum(1) - 1)[:, -length:]
    with kvpress.reading(model):
        found = model(new, attention_mask=mask, past_key_values=cache, position_ids=at).logits
    expected = Oracle(model, kept, 40).logits(new, stock, mask, at)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)
    assert cache.get_seq_length() == 40 + length
    assert all(
        later.tolist() == [*now.tolist(), *range(40, 40 + length)]
        for a, b in zip(kept, kvpress.kept_positions(cache), strict=True)
        for c, d in zip(a, b, strict=True)
        for now, later in zip(c, d, strict=True)
    )


@pytest.mark.parametrize("spec", EVICTING)
def test_every_turn_under_a_press_is_cut_to_its_share(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    one, two = DynamicCache(config=model.config), DynamicCache(config=model.config)
    turns = [tokens(2, 24), tokens(2, 12, seed=3), tokens(2, 10, seed=4)]
    sets = []
    with press(model):
        for turn in turns:
            model(turn, past_key_values=one)
            sets.append(positions(one))
    for turn in turns:
        with press(model):
            model(turn, past_key_values=two)
    assert positions(one) == positions(two)
    seen, heads = 0, 2
    for turn, before, after in zip(turns, [None, *sets[:-1]], sets, strict=True):
        seen += turn.shape[1]
        inner = getattr(press, "press", press)
        for layer, kept in enumerate(after):
            for row, found in enumerate(kept):
                if "pyramid" not in spec:
                    assert sum(map(len, found)) == heads * inner.kept_of(seen)
                for head, at in enumerate(found):
                    known = set(range(seen - turn.shape[1], seen)) | set(before[layer][row][head] if before else [])
                    assert set(at) <= known


@pytest.mark.parametrize("spec", ["knorm:0.5", STORAGES["composed"]])
def test_generating_turn_by_turn_under_one_block(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)

    def talk(blocks: int) -> tuple[Tensor, Any]:
        sequence, cache = tokens(2, 24), DynamicCache(config=model.config)
        if blocks == 1:
            with press(model):
                for turn in range(3):
                    sequence = torch.cat([sequence, tokens(2, 5, seed=turn)], dim=1)
                    sequence = generate(model, sequence, past_key_values=cache).sequences
        else:
            for turn in range(3):
                sequence = torch.cat([sequence, tokens(2, 5, seed=turn)], dim=1)
                with press(model):
                    sequence = generate(model, sequence, past_key_values=cache).sequences
        return sequence, cache

    (together, first), (apart, second) = talk(1), talk(3)
    assert torch.equal(together, apart)
    assert positions(first) == positions(second)
    assert first.get_seq_length() == together.shape[1] - 1
    assert kvpress.memory_report(first).kept < kvpress.memory_report(first).seen


def test_a_cache_that_was_filled_outside_is_cut_on_its_next_turn() -> None:
    model = tiny_model("llama")
    cache = DynamicCache(config=model.config)
    model(tokens(2, 20), past_key_values=cache)
    with kvpress.KnormPress(0.5)(model):
        model(tokens(2, 10, seed=2), past_key_values=cache)
    assert pairs(cache) == {15}
    assert positions(cache) == positions(
        prefill(model, kvpress.KnormPress(0.5), torch.cat([tokens(2, 20), tokens(2, 10, seed=2)], 1))
    )


@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_a_copy_serves_every_question(spec: str) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    context = prefill(model, press, tokens(2, 40))
    before = positions(context), kvpress.memory_report(context)
    frozen = copy.deepcopy(context)
    questions = [tokens(2, n, seed=n) for n in (3, 6, 1)]

    def answer(question: Tensor, source: Any) -> Tensor:
        mask = torch.ones(2, 40 + question.shape[1], dtype=torch.long)
        with kvpress.reading(model, press):
            return generate(model, question, mask, past_key_values=copy.deepcopy(source), max_new_tokens=12).sequences

    forwards = [answer(question, context) for question in questions]
    backwards = [answer(question, context) for question in reversed(questions)]
    for a, b in zip(forwards, reversed(backwards), strict=True):
        assert torch.equal(a, b)
    after = kvpress.memory_report(context)
    assert context.get_seq_length() == 40
    assert positions(context) == before[0]
    assert [layer.kept for layer in after.layers] == [layer.kept for layer in before[1].layers]
    for ours, theirs in zip(context.layers, frozen.layers, strict=True):
        for name, held in ours.store.tensors().items():
            if name != "indexes":  # selectors may add their index when they first read
                for x, y in zip(held, theirs.store.tensors()[name], strict=True):
                    assert torch.equal(x, y)


@pytest.mark.parametrize("spec", [name for name in STORAGES if name != "window"])
def test_compressed_pairs_are_not_read_outside_a_block(spec: str) -> None:
    model = tiny_model("llama")
    cache = prefill(model, kvpress.get_press(STORAGES[spec]), tokens(1, 40))
    with pytest.raises(RuntimeError, match=r"with press\(model\)"):
        model(tokens(1, 1), past_key_values=cache)
    with pytest.raises(RuntimeError, match=r"kvpress\.reading\(model\)"):
        generate(model, tokens(1, 41), past_key_values=cache)
    assert cache.get_seq_length() == 40


def test_reading_evicts_nothing() -> None:
    model, press = tiny_model("llama"), kvpress.KnormPress(0.5)
    cache = prefill(model, press, tokens(2, 20))
    with kvpress.reading(model, press):
        model(tokens(2, 6), past_key_values=cache)
    assert pairs(cache) == {16}


# -- schedules -----------------------------------------------------------------------------------------------

SCHEDULES = [
    pytest.param("decoding(knorm):compression_interval=4,target_size=12", 9, 13, id="decoding"),
    pytest.param("decoding(snapkv:window_size=4):compression_interval=3,target_size=12", 9, 12, id="decoding-snapkv"),
    pytest.param("decoding(adakv(knorm)):compression_interval=4,target_size=12", 9, 13, id="decoding-adakv"),
    pytest.param("decoding(expected_attention):compression_interval=5,target_size=12", 9, 16, id="decoding-expected"),
    pytest.param(
        "prefill_decoding(knorm:budget=8; decoding(knorm):compression_interval=4,target_size=6)", 9, 7, id="both"
    ),
    pytest.param("h2o:budget=8", 9, 8, id="h2o"),
    pytest.param("h2o:budget=8,interval=4", 9, 9, id="h2o-interval"),
]
STORED = {"dense": "", "codec": f" + {CODEC}", "quest": " + quest:budget=8,page_size=4,skip_layers=0"}
STORED["all"] = STORED["codec"] + STORED["quest"]


@pytest.mark.parametrize("stored", STORED.values(), ids=STORED)
@pytest.mark.parametrize("beams", [1, 3], ids=["greedy", "beams"])
@pytest.mark.parametrize(("spec", "steps", "expected"), SCHEDULES)
def test_schedules_keep_the_declared_number_of_pairs(
    spec: str, steps: int, expected: int, beams: int, stored: str
) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([30, 17, 11])
    rows = 3 * beams
    with kvpress.get_press(spec + stored)(model):
        output = generate(model, ids, mask, max_new_tokens=steps + 1, num_beams=beams)
    cache = output.past_key_values
    assert cache.get_seq_length() == 30 + steps
    for layer in cache.layers:
        counts = torch.tensor(layer.store.stored()).view(rows, 2)
        assert counts.sum(dim=1).tolist() == [2 * expected] * rows
        if "adakv" not in spec:
            assert counts.unique().tolist() == [expected]
    for layer in positions(cache):
        for row, heads in enumerate(layer):
            pads = 30 - [30, 17, 11][row // beams]
            assert all(at == sorted(set(at)) and at[0] >= pads and at[-1] == 29 + steps for at in heads)


def test_a_decoding_target_may_be_a_ratio() -> None:
    model = tiny_model("llama")
    with kvpress.get_press("decoding(knorm):compression_interval=4,target_ratio=0.75")(model):
        cache = generate(model, tokens(1, 28), max_new_tokens=13).past_key_values
    assert pairs(cache) == {(28 + 12) // 4}


def test_decoding_press_leaves_the_prompt_whole() -> None:
    model = tiny_model("llama")
    with kvpress.get_press("decoding(knorm):compression_interval=8,target_size=4")(model):
        cache = generate(model, tokens(1, 28), max_new_tokens=8).past_key_values
    assert pairs(cache) == {28 + 7}


@pytest.mark.parametrize("spec", [case.values[0] for case in SCHEDULES])
def test_a_padded_row_decodes_on_schedule_as_if_it_were_alone(spec: str) -> None:
    model = tiny_model("llama")
    lengths = [30, 17, 11]
    ids, mask = padded_batch(lengths)
    with kvpress.get_press(spec)(model):
        together = generate(model, ids, mask, max_new_tokens=16).sequences
    for row, length in enumerate(lengths):
        with kvpress.get_press(spec)(model):
            alone = generate(model, ids[row : row + 1, -length:], max_new_tokens=16).sequences
        assert torch.equal(together[row, -16:], alone[0, -16:])


# -- prefill in chunks ---------------------------------------------------------------------------------------


class FromHidden(kvpress.ScorerPress):
    """A press of a user that scores from hidden states: it must be shown those of the whole prompt."""

    def score(
        self, module: Any, hidden_states: Tensor, keys: Tensor, values: Any, attentions: Any, kwargs: Any
    ) -> Tensor:
        assert hidden_states.shape[1] == keys.shape[2]
        return hidden_states[..., 0][:, None].expand(keys.shape[:3])


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize(
    "spec", [*EVICTING, CODEC, STORAGES["quest"], STORAGES["composed"], SCHEDULES[0].values[0], "own"]
)
def test_chunked_prefill_keeps_the_same_pairs(spec: str, padded: bool) -> None:
    model = tiny_model("llama")
    press = FromHidden(0.5) if spec == "own" else kvpress.get_press(spec)
    ids, mask = padded_batch([40, 26, 13]) if padded else (tokens(2, 40), None)
    found = {}
    for chunk in (None, 7):
        with press(model):
            output = generate(model, ids, mask, prefill_chunk_size=chunk)
        found[chunk] = output.sequences, positions(output.past_key_values)
    assert found[7][1] == found[None][1]
    assert torch.equal(found[7][0], found[None][0])


@pytest.mark.parametrize("spec", ["knorm:0.5", "snapkv:0.5,window_size=4", "expected_attention:0.5"])
@pytest.mark.parametrize("whole", [True, False], ids=["all-ids", "new-ids"])
def test_a_later_turn_in_chunks(spec: str, whole: bool) -> None:
    model, press = tiny_model("llama"), kvpress.get_press(spec)
    context, question = tokens(2, 12), tokens(2, 15, seed=5)
    ids = torch.cat([context, question], dim=1) if whole else question
    mask = torch.ones(2, 27, dtype=torch.long)
    found = {}
    for chunk in (None, 7):
        cache = prefill(model, press, context)
        with press(model):
            output = generate(model, ids, mask, prefill_chunk_size=chunk, past_key_values=cache)
        found[chunk] = output.sequences, positions(output.past_key_values)
    assert found[7][1] == found[None][1]
    assert torch.equal(found[7][0], found[None][0])


# -- a decode step does not wait for the device --------------------------------------------------------------


WAITING = ("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__", "__index__")


@contextmanager
def waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Where tensors are read by the host; what operators do to check their arguments on the CPU is left out."""
    found: list[str] = []

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            caller = sys._getframe(1).f_code
            if "/kvpress/kernels/" not in caller.co_filename:
                found.append(f"{name} in {caller.co_filename}:{caller.co_name}")
            return function(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in WAITING:
            patch.setattr(Tensor, name, watched(name, getattr(Tensor, name)))
        patch.setattr(torch, "equal", watched("equal", torch.equal))
        yield found


@pytest.mark.parametrize("padded", [False, True], ids=["even", "padded"])
@pytest.mark.parametrize("spec", STORAGES.values(), ids=STORAGES)
def test_a_decode_step_waits_for_no_layer(spec: str, padded: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is read per layer; with padding, the mask of a forward pass is looked at once for all of them."""
    model = tiny_model("llama")
    ids, mask = padded_batch([40, 26]) if padded else (tokens(2, 40), None)
    spec = spec.replace("budget=16", "budget=8")
    with kvpress.get_press(spec)(model):
        cache = model(ids, attention_mask=mask, use_cache=True).past_key_values
        for t in range(3):
            real = None if mask is None else torch.cat([mask, mask.new_ones(2, t + 1)], dim=1)
            at = torch.full((2, 1), 40 + t)
            with waits(monkeypatch) as found:
                model(tokens(2, 1, t), attention_mask=real, position_ids=at, past_key_values=cache)
    assert len(found) == len(set(found)), "read once per layer"
    assert padded or not found
