"""Bad input is refused by name, with what is allowed and what to do instead, before the model runs; nothing stays changed.

The numbers are the rows of the reliability table.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, DynamicCache, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

import kvpress
from tests.models import COMMON, padded_batch, tiny_model, tokens
from tests.oracle import decode_both

BASE = {"vocab_size": 97, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}


def fingerprint(model: Any) -> Any:
    """Everything that a press may touch on a model: attention names, hooks and attributes of every module."""
    configs = {id(m.config): m.config._attn_implementation for m in model.modules() if hasattr(m, "config")}
    modules = {
        name: (set(m.__dict__), len(m._forward_pre_hooks), len(m._forward_hooks)) for name, m in model.named_modules()
    }
    return configs, modules


def refused(model: Any, action: Callable[[], Any], error: type[Exception], *words: str) -> None:
    """Check that the action raises `error` naming `words`, without running a decoder layer or changing the model."""
    ran: list[int] = []
    layers = [m for m in model.modules() if "DecoderLayer" in type(m).__name__ or type(m).__name__ == "Block"]
    handles = [layer.register_forward_pre_hook(lambda *_: ran.append(1)) for layer in layers]
    before = fingerprint(model)
    try:
        with pytest.raises(error) as raised:
            action()
        assert fingerprint(model) == before
    finally:
        for handle in handles:
            handle.remove()
    assert type(raised.value) is error or error is KeyError
    message = str(raised.value)
    for word in words:
        assert word in message, f"{word!r} is missing in {message!r}"
    assert not ran, "the model ran before the error"


def generate(model: Any, spec: str, ids: torch.Tensor, **settings: Any) -> Any:
    with kvpress.get_press(spec)(model) as session:
        settings = {"max_new_tokens": 4, "do_sample": False, **settings}
        session.result = model.generate(ids, **settings)
    return session


def small(kind: str, auto: Any = AutoModelForCausalLM, **settings: Any) -> Any:
    torch.manual_seed(0)
    return auto.from_config(CONFIG_MAPPING[kind](**{**BASE, **settings})).eval()


RATIOS = [
    pytest.param(1.0, ValueError, ["compression_ratio must be in [0, 1), got 1.0"], id="1-one"),
    pytest.param(-0.1, ValueError, ["compression_ratio must be in [0, 1), got -0.1"], id="2-negative"),
    pytest.param(float("nan"), ValueError, ["compression_ratio must be in [0, 1), got nan"], id="2-nan"),
    pytest.param("0.5", TypeError, ["compression_ratio must be a number in [0, 1)", "'0.5'", "str"], id="2-text"),
    pytest.param(None, TypeError, ["compression_ratio must be a number in [0, 1)", "None"], id="2-none"),
    pytest.param(True, TypeError, ["compression_ratio must be a number in [0, 1)", "True"], id="2-bool"),
]


@pytest.mark.parametrize(("ratio", "error", "words"), RATIOS)
def test_1_and_2_ratio_at_construction(ratio: Any, error: type[Exception], words: list[str]) -> None:
    refused(tiny_model("llama"), lambda: kvpress.KnormPress(ratio), error, *words)


@pytest.mark.parametrize("wrap", [None, "adakv", "composed", "decoding", "prefill_decoding"])
@pytest.mark.parametrize(("ratio", "error", "words"), [RATIOS[0], RATIOS[3]])
def test_3_ratio_set_later_is_checked_on_entering(
    ratio: Any, error: type[Exception], words: list[str], wrap: str | None
) -> None:
    inner = kvpress.KnormPress(0.5)
    press: Any = {
        None: lambda: inner,
        "adakv": lambda: kvpress.AdaKVPress(inner),
        "composed": lambda: inner + kvpress.KIVIPress(),
        "decoding": lambda: kvpress.DecodingPress(inner),
        "prefill_decoding": lambda: kvpress.PrefillDecodingPress(inner),
    }[wrap]()
    inner.compression_ratio = ratio
    model = tiny_model("llama")
    refused(model, lambda: press(model).__enter__(), error, *words)


@pytest.mark.parametrize("spec", ["knorm:0.5", "snapkv:0.5", "adakv(snapkv:0.5) + kivi:bits=2 + quest:budget=16"])
def test_4_one_token_is_kept(spec: str) -> None:
    model = tiny_model("llama")
    session = generate(model, spec, tokens(1, 1))
    assert torch.equal(session.result, model.generate(tokens(1, 1), max_new_tokens=4, do_sample=False))
    report = kvpress.memory_report(session.cache)
    assert report.kept == report.seen


@pytest.mark.parametrize(
    "spec", ["streaming_llm:0.5,n_sink=12", "snapkv:0.5,window_size=12", "expected_attention:0.5,n_sink=12"]
)
def test_5_a_prompt_inside_sinks_and_window_is_kept(spec: str) -> None:
    model = tiny_model("llama")
    session = generate(model, spec, tokens(2, 12))
    assert torch.equal(session.result, model.generate(tokens(2, 12), max_new_tokens=4, do_sample=False))
    report = kvpress.memory_report(session.cache)
    assert report.kept == report.seen


def test_6_empty_prompt() -> None:
    model = tiny_model("llama")
    empty = torch.zeros(1, 0, dtype=torch.long)
    refused(model, lambda: generate(model, "knorm:0.5", empty), ValueError, "empty", "(1, 0)", "at least one token")


def test_7_budget_that_rounds_to_zero() -> None:
    model = tiny_model("llama")
    words = ["compression_ratio=0.9", "keeps 0 of 5 tokens", "at least 1", "budget=1"]
    refused(model, lambda: generate(model, "knorm:0.9", tokens(2, 5)), ValueError, *words)
    ids, mask = padded_batch([40, 5])
    refused(model, lambda: generate(model, "knorm:0.9", ids, attention_mask=mask), ValueError, *words)


def test_7_the_ratio_that_the_message_names_works() -> None:
    model = tiny_model("llama")
    for length in (2, 3, 7, 10, 30):
        with pytest.raises(ValueError, match="a ratio of at most") as raised:
            generate(model, "knorm:0.999", tokens(1, length))
        named = float(str(raised.value).split("at most ")[1].split()[0])
        report = kvpress.memory_report(generate(model, f"knorm:{named}", tokens(1, length), max_new_tokens=1).cache)
        assert report.kept == report.seen // length


def test_8_budget_and_ratio() -> None:
    words = ["either compression_ratio or budget", "0.5", "12"]
    refused(tiny_model("llama"), lambda: kvpress.get_press("knorm:0.5,budget=12"), ValueError, *words)
    for budget, error in ((0, ValueError), (2.5, TypeError)):
        refused(
            tiny_model("llama"), lambda b=budget: kvpress.KnormPress(budget=b), error, "budget", ">= 1", str(budget)
        )


@pytest.mark.parametrize("settings", [{}, {"prefill_chunk_size": 4}], ids=["whole", "chunked"])
def test_10_right_padding(settings: dict[str, Any]) -> None:
    model = tiny_model("llama")
    mask = torch.tensor([[1] * 10, [1] * 8 + [0] * 2])
    words = ["row 1", "padding_side='left'"]
    run = lambda: generate(model, "knorm:0.5", tokens(2, 10), attention_mask=mask, **settings)  # noqa: E731
    refused(model, run, ValueError, *words)
    refused(model, lambda: forward(model, "knorm:0.5", tokens(2, 10), attention_mask=mask), ValueError, *words)


def forward(model: Any, spec: str, ids: torch.Tensor, **kwargs: Any) -> Any:
    with kvpress.get_press(spec)(model):
        return model(ids, **kwargs)


def test_11_a_row_of_padding() -> None:
    model = tiny_model("llama")
    mask = torch.tensor([[1] * 10, [1] * 10, [0] * 10])
    words = ["row 2", "all padding"]
    refused(model, lambda: generate(model, "knorm:0.5", tokens(3, 10), attention_mask=mask), ValueError, *words)
    refused(model, lambda: forward(model, "knorm:0.5", tokens(3, 10), attention_mask=mask), ValueError, *words)


@pytest.mark.parametrize("call", [generate, forward])
def test_12_four_dimensional_mask(call: Any) -> None:
    model = tiny_model("llama")
    mask = torch.ones(2, 1, 10, 10, dtype=torch.bool)
    words = ["4 dimensions", "2-D mask"]
    refused(model, lambda: call(model, "knorm:0.5", tokens(2, 10), attention_mask=mask), NotImplementedError, *words)


def test_12_packed_positions() -> None:
    model = tiny_model("llama")
    packed = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4, 5]])
    run = lambda: forward(model, "knorm:0.5", tokens(1, 10), position_ids=packed)  # noqa: E731
    refused(model, run, NotImplementedError, "position_ids", "packed")


def test_a_mask_of_the_wrong_length() -> None:
    model = tiny_model("llama")
    run = lambda: forward(model, "knorm:0.5", tokens(1, 10), attention_mask=torch.ones(1, 7))  # noqa: E731
    refused(model, run, ValueError, "7 tokens", "10 are new", "10 columns")


def read_first(model: Any, length: int = 10, batch: int = 2) -> DynamicCache:
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("knorm:0.5")(model):
        model(tokens(batch, length), past_key_values=cache)
    return cache


def test_13_new_ids_without_the_mask_of_the_whole_sequence() -> None:
    model = tiny_model("llama")
    cache = read_first(model)
    words = ["input_ids has 4 tokens", "seen 10", "attention_mask=torch.ones(batch, 10 + 4)"]
    for mask in (None, torch.ones(2, 4, dtype=torch.long)):
        run = lambda m=mask: generate(model, "knorm:0.5", tokens(2, 4), past_key_values=cache, attention_mask=m)  # noqa: E731
        refused(model, run, ValueError, *words)
    assert cache.get_seq_length() == 10


def test_14_nothing_new() -> None:
    model = tiny_model("llama")
    cache = read_first(model)
    for mask in (None, torch.ones(2, 10, dtype=torch.long)):
        run = lambda m=mask: generate(model, "knorm:0.5", tokens(2, 10), past_key_values=cache, attention_mask=m)  # noqa: E731
        refused(model, run, ValueError, "all 10 tokens", "at least one new token")


@pytest.mark.parametrize("chunk", [None, 3])
def test_14_new_ids_may_be_as_many_as_the_cache_holds(chunk: int | None) -> None:
    model = tiny_model("llama")
    new, mask = tokens(2, 10, seed=8), torch.ones(2, 20, dtype=torch.long)
    whole = torch.cat([tokens(2, 10), new], dim=1)
    stock = model.generate(whole, max_new_tokens=4, do_sample=False)
    cache = DynamicCache(config=model.config)
    with kvpress.get_press("none")(model):
        model(tokens(2, 10), past_key_values=cache)
    found = generate(
        model,
        "none",
        new,
        past_key_values=cache,
        attention_mask=mask,
        **({"prefill_chunk_size": chunk} if chunk else {}),
    )
    assert torch.equal(found.result[:, -4:], stock[:, -4:])


def other_models() -> list[Any]:
    def llama(**settings: Any) -> Any:
        return AutoModelForCausalLM.from_config(CONFIG_MAPPING["llama"](**{**COMMON, **settings})).eval()

    return [
        pytest.param(llama, {"head_dim": 16}, ["2 kv heads of dimension 16", "2 of dimension 32"], id="dim"),
        pytest.param(
            llama, {"num_key_value_heads": 4}, ["4 kv heads of dimension 32", "2 of dimension 32"], id="heads"
        ),
        pytest.param(llama, {"num_hidden_layers": 2}, ["2 layers", "3"], id="fewer-layers"),
        pytest.param(llama, {"num_hidden_layers": 4}, ["4 layers", "3"], id="more-layers"),
    ]


@pytest.mark.parametrize("configured", [True, False], ids=["config", "bare"])
@pytest.mark.parametrize("inside", [True, False], ids=["press", "stock"])
@pytest.mark.parametrize(("make", "settings", "words"), other_models())
def test_15_cache_of_another_model(make: Any, settings: dict, words: list[str], inside: bool, configured: bool) -> None:
    model, other = tiny_model("llama"), make(**settings)
    cache = DynamicCache(config=other.config) if configured else DynamicCache()
    if inside:
        with kvpress.get_press("knorm:0.5")(other):
            other(tokens(2, 10), past_key_values=cache)
    else:
        other(tokens(2, 10), past_key_values=cache)
    refused(model, lambda: forward(model, "knorm:0.5", tokens(2, 4), past_key_values=cache), ValueError, *words)


def test_15_cache_of_another_batch() -> None:
    model = tiny_model("llama")
    cache = read_first(model, batch=3)
    run = lambda: forward(model, "knorm:0.5", tokens(2, 4), past_key_values=cache)  # noqa: E731
    with pytest.raises(ValueError, match=r"\(3, 2, '\*', 32\).*\(2, 2, 4, 32\).*one cache per model and batch"):
        run()
    assert cache.get_seq_length() == 10


def test_16_a_compressed_cache_is_not_read_without_a_press() -> None:
    model = tiny_model("llama")
    cache = read_first(model)
    with pytest.raises(RuntimeError, match=r"with press\(model\).*kvpress\.reading\(model\)"):
        model(tokens(2, 4), past_key_values=cache)
    with kvpress.get_press("knorm:0.5")(model):
        model(tokens(2, 4), past_key_values=cache)
    assert cache.get_seq_length() == 14


def test_17_nesting() -> None:
    model = tiny_model("llama")
    before = fingerprint(model)
    with kvpress.get_press("knorm:0.5")(model):
        inside = fingerprint(model)
        with pytest.raises(RuntimeError, match=r"already active.*press_a \+ press_b"), kvpress.SnapKVPress(0.5)(model):
            pass
        assert fingerprint(model) == inside
        model.generate(tokens(1, 10), max_new_tokens=2)
    assert fingerprint(model) == before


ANY = AutoModelForCausalLM
LATENT = {
    "moe_intermediate_size": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "qk_nope_head_dim": 16,
}  # fmt: skip
UNSUPPORTED = [
    pytest.param("t5", AutoModelForSeq2SeqLM, {"d_kv": 8, "d_ff": 32, "num_layers": 2}, "encoder-decoder", id="19"),
    pytest.param("mamba", ANY, {}, "no full-attention layer", id="20-ssm"),
    pytest.param("mistral", ANY, {"sliding_window": 8, "num_key_value_heads": 2}, "no full-attention", id="20-sliding"),
    pytest.param("deepseek_v3", ANY, LATENT, "multi-head latent attention", id="22"),
    pytest.param("bloom", ANY, {}, "", id="23-bloom"),
    pytest.param("mpt", ANY, {"d_model": 32, "n_layers": 2, "n_heads": 4}, "", id="23-mpt"),
    pytest.param("falcon", ANY, {"alibi": True}, "attention interface", id="23-falcon"),
]


@pytest.mark.parametrize("spec", ["knorm:0.5", "kivi:bits=2", "quest:budget=16"])
@pytest.mark.parametrize(("kind", "auto", "settings", "word"), UNSUPPORTED)
def test_19_20_22_23_models(kind: str, auto: Any, settings: dict[str, Any], word: str, spec: str) -> None:
    model = small(kind, auto, **settings)
    press = kvpress.get_press(spec)
    refused(model, lambda: press(model).__enter__(), NotImplementedError, type(model).__name__.split("For")[0], word)


def test_20_without_compression_a_sliding_model_runs() -> None:
    model = tiny_model("mistral")
    assert torch.equal(generate(model, "none", tokens(1, 20)).result, model.generate(tokens(1, 20), max_new_tokens=4))


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
def test_21_only_full_layers_are_compressed_and_named(family: str) -> None:
    model = tiny_model(family, "eager")
    report = kvpress.memory_report(generate(model, "knorm:0.5", tokens(1, 40), max_new_tokens=1).cache)
    assert [layer.compressible for layer in report.layers] == [False, True, True]
    assert [layer.kept for layer in report.layers[1:]] == [2 * 20] * 2
    lines = str(report).splitlines()
    assert sum("as is" in line for line in lines) == 1


def test_23_unknown_attention_arguments_are_refused() -> None:
    model = tiny_model("llama")
    module = model.model.layers[0].self_attn
    original = module.forward
    module.forward = lambda **kwargs: original(position_bias=torch.zeros(1, 4, 10, 10), **kwargs)
    try:
        with pytest.raises(NotImplementedError, match=r"LlamaAttention passes.*position_bias"):
            forward(model, "knorm:0.5", tokens(1, 10), use_cache=True)
    finally:
        del module.forward


@pytest.mark.parametrize("dim", [16, 80, 96, 256])
@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "adakv(snapkv:0.5,window_size=4)"])
def test_24_any_head_dim(dim: int, spec: str) -> None:
    config = CONFIG_MAPPING["llama"](**{**COMMON, "head_dim": dim, "num_hidden_layers": 2})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    found, expected, _ = decode_both(model, kvpress.get_press(spec), tokens(2, 40), None, steps=3)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_25_the_rest_of_a_group_stays_exact() -> None:
    model = tiny_model("llama")
    ids = tokens(2, 127)
    stock = DynamicCache(config=model.config)
    model(ids, past_key_values=stock)
    session = generate(model, "kivi:bits=2,group_size=32,residual_length=0", ids, max_new_tokens=1)
    for ours, theirs in zip(session.cache.layers, stock.layers, strict=True):
        encoded = ours.store.segments[0].layout.lengths
        assert encoded == (96,) * 4
        torch.testing.assert_close(ours.keys[:, :, 96:127], theirs.keys[:, :, 96:127], atol=0, rtol=0)
        torch.testing.assert_close(ours.values[:, :, 96:127], theirs.values[:, :, 96:127], atol=0, rtol=0)


GROUPS = [
    ("kivi:group_size=0", ValueError, ["group_size must be >= 1, got 0"]),
    ("kivi:bits=5", ValueError, ["bits must be one of [1, 2, 3, 4, 8]", "5"]),
    ("kivi:bits=(2,7)", ValueError, ["bits must be one of [1, 2, 3, 4, 8]", "(2, 7)"]),
    ("kivi:residual_length=-1", ValueError, ["residual_length must be >= 0, got -1"]),
    ("quest:page_size=0", ValueError, ["page_size must be >= 1, got 0"]),
    ("quest:budget=4", ValueError, ["budget must be >= 16, got 4"]),
    ("snapkv:kernel_size=4", ValueError, ["kernel_size must be odd, got 4"]),
    ("h2o:recent_ratio=2", ValueError, ["recent_ratio must be in [0, 1], got 2"]),
    ("h2o:normalize=mean", ValueError, ["normalize must be 'none', 'count' or 'decay', got 'mean'"]),
    ("adakv(knorm:0.5):alpha_safeguard=-1", ValueError, ["alpha_safeguard must be in [0, 1], got -1"]),
    ("decoding(knorm):target_size=0", ValueError, ["target_size must be >= 1, got 0"]),
    ("decoding(kivi)", TypeError, ["DecodingPress needs a press that scores", "KIVIPress"]),
    ("adakv(quest)", TypeError, ["AdaKVPress needs a press that scores", "QuestPress"]),
    ("prefill_decoding(kivi:bits=4; decoding(knorm))", ValueError, ["KIVIPress stores", "(...) + KIVIPress"]),
    ("prefill_decoding(knorm:0.5 + quest; h2o:0.5)", ValueError, ["one phase", "compose it"]),
    ("prefill_decoding(knorm; knorm)", ValueError, ["decoding_press must act while tokens", "DecodingPress(KnormPress"]),
    ("random:seed=half", TypeError, ["seed", "'half'"]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "error", "words"), GROUPS)
def test_26_arguments_out_of_range(spec: str, error: type[Exception], words: list[str]) -> None:
    refused(tiny_model("llama"), lambda: kvpress.get_press(spec), error, *words)


def test_26_group_that_does_not_divide_the_head_dim() -> None:
    config = CONFIG_MAPPING["llama"](**{**COMMON, "head_dim": 64, "num_hidden_layers": 1})
    model = AutoModelForCausalLM.from_config(config).eval()
    words = ["group_size must divide the head dim 64", "[16, 32, 64]", "got 48"]
    refused(model, lambda: kvpress.KIVIPress(group_size=48)(model).__enter__(), ValueError, *words)
    refused(model, lambda: kvpress.reading(model, kvpress.KIVIPress(group_size=48)).__enter__(), ValueError, *words)


def test_26_group_size_set_later_is_checked_on_entering() -> None:
    model, press = tiny_model("llama"), kvpress.KIVIPress()
    press.group_size = 0
    refused(model, lambda: press(model).__enter__(), ValueError, "group_size must be >= 1, got 0")


def poison(model: Any, value: float) -> Callable[[], None]:
    """Make one channel of one key of the second layer `value` from now on; returns the undo."""

    def hook(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
        output = output.clone()
        output[0, 3, 5] = value
        return output

    return model.model.layers[1].self_attn.k_proj.register_forward_hook(hook).remove


@pytest.mark.parametrize("spec", ["knorm:0.5", "kivi:bits=2,group_size=4,residual_length=0"])
def test_29_nan_is_named(spec: str) -> None:
    model = tiny_model("llama")
    undo = poison(model, float("nan"))
    try:
        with pytest.raises(FloatingPointError, match=r"NaN in keys of layer 1, row 0, head 0, token 3"):
            forward(model, spec, tokens(2, 10), use_cache=True)
    finally:
        undo()


def test_28_infinity_is_refused_by_a_codec() -> None:
    model = tiny_model("llama")
    undo = poison(model, float("inf"))
    try:
        with pytest.raises(ValueError, match="infinite"):
            forward(model, "kivi:bits=2,group_size=4,residual_length=0", tokens(2, 10), use_cache=True)
    except FloatingPointError:
        pytest.fail("infinity times zero became NaN before the codec saw it")
    finally:
        undo()


def test_36_attention_matrices() -> None:
    model = tiny_model("llama", "eager")
    words = ["output_attentions=True", "no full matrix"]
    for run in (
        lambda: generate(model, "knorm:0.5", tokens(1, 10), output_attentions=True, return_dict_in_generate=True),
        lambda: generate(model, "knorm:0.5", tokens(1, 10), generation_config=GenerationConfig(output_attentions=True)),
        lambda: forward(model, "knorm:0.5", tokens(1, 10), output_attentions=True),
    ):
        refused(model, run, ValueError, *words)


def test_36_attention_matrices_by_configuration() -> None:
    model = tiny_model("llama", "eager")
    model.config.output_attentions = True
    try:
        run = lambda: forward(model, "knorm:0.5", tokens(1, 10), use_cache=True)  # noqa: E731
        refused(model, run, ValueError, "output_attentions=True")
    finally:
        model.config.output_attentions = False


def test_37_static_cache_with_ours_is_the_library_s_error() -> None:
    model = tiny_model("llama")
    settings = {"cache_implementation": "static", "past_key_values": DynamicCache(config=model.config)}
    with pytest.raises(ValueError, match="Passing both `cache_implementation`") as stock:
        model.generate(tokens(1, 10), max_new_tokens=4, **settings)
    refused(model, lambda: generate(model, "knorm:0.5", tokens(1, 10), **settings), ValueError, str(stock.value))


@pytest.mark.parametrize("name", ["static", "quantized", "offloaded_static"])
def test_37_other_caches(name: str) -> None:
    model = tiny_model("llama")
    run = lambda: generate(model, "knorm:0.5", tokens(1, 10), cache_implementation=name)  # noqa: E731
    refused(model, run, NotImplementedError, f"cache_implementation={name!r}", "dynamic cache")


def test_37_a_static_cache_object() -> None:
    from transformers import StaticCache

    model = tiny_model("llama")
    cache = StaticCache(config=model.config, max_cache_len=32)
    with pytest.raises(NotImplementedError, match=r"Static.*fixed size.*dynamic cache"):
        generate(model, "knorm:0.5", tokens(1, 10), past_key_values=cache)


def test_no_cache() -> None:
    model = tiny_model("llama")
    for settings in ({"use_cache": False}, {"generation_config": GenerationConfig(use_cache=False)}):
        run = lambda s=settings: generate(model, "knorm:0.5", tokens(1, 10), **s)  # noqa: E731
        refused(model, run, ValueError, "use_cache=False")


def test_38_assisted_decoding() -> None:
    model = tiny_model("llama")
    for settings in (
        {"prompt_lookup_num_tokens": 3},
        {"generation_config": GenerationConfig(prompt_lookup_num_tokens=3)},
        {"assistant_model": tiny_model("llama", seed=1)},
    ):
        run = lambda s=settings: generate(model, "knorm:0.5", tokens(1, 10), **s)  # noqa: E731
        refused(model, run, NotImplementedError, "assisted decoding", "not supported")


def test_38_assisted_decoding_of_a_cache_is_refused_without_generate() -> None:
    cache = read_first(tiny_model("llama"))
    with pytest.raises(NotImplementedError, match="assisted decoding"):
        cache.layers[0].activate_past_recording()


@pytest.mark.parametrize("spec", ["snapkv:0.5,window_size=4", "adakv(snapkv:0.5,window_size=4)"])
def test_39_beams_and_sequences_equal_the_whole_batch_repeated(spec: str) -> None:
    model = tiny_model("llama")
    ids, mask = padded_batch([30, 17])
    together = generate(model, spec, ids, attention_mask=mask, num_beams=4, num_return_sequences=4, max_new_tokens=8)
    assert together.result.shape == (8, 38)
    for row, length in enumerate((30, 17)):
        own = ids[row : row + 1, -length:]
        alone = generate(model, spec, own, num_beams=4, num_return_sequences=4, max_new_tokens=8)
        assert torch.equal(together.result[4 * row : 4 * row + 4, -8:], alone.result[:, -8:])


@pytest.mark.parametrize(
    ("name", "near"), [("snapkw", "snapkv"), ("Snap-KVs", "snapkv"), ("quset", "quest"), ("adaKVV", "adakv")]
)
def test_40_unknown_press(name: str, near: str) -> None:
    refused(
        tiny_model("llama"), lambda: kvpress.get_press(f"{name}:0.5"), KeyError, repr(name), f"did you mean {near}?"
    )
