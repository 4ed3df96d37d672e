# SPDX-License-Identifier: Apache-2.0
"""A press, its spec and its plain data are equivalent, and errors suggest the intended name."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

import kvpress
from kvpress import KIVIPress, KnormPress, QuestPress, SnapKVPress
from kvpress.core.registry import Entry, find
from kvpress.core.spec import press_from_dict
from kvpress.plan import Geometry, longest_context, plan
from kvpress.presses import ComposedPress
from tests.caches import positions
from tests.folders import new_folder
from tests.models import tiny_model, tokens

TABLE = new_folder() / "heads.tsv"
TABLE.write_text("0.5\t1.0\n0.25\t0.0\n")
NON_DEFAULT: list[kvpress.BasePress] = [
    kvpress.NonePress(),
    KnormPress(0.25),
    KnormPress(budget=7),
    kvpress.RandomPress(0.5, seed=3),
    kvpress.StreamingLLMPress(0.3, n_sink=2, reindex=True),
    SnapKVPress(0.75, window_size=8, kernel_size=3),
    kvpress.TOVAPress(0.1),
    kvpress.ObservedAttentionPress(1e-3),
    kvpress.H2OPress(budget=64, recent_ratio=0.25, interval=4, normalize="count"),
    kvpress.ExpectedAttentionPress(
        0.6, n_future_positions=9, n_sink=0, use_covariance=False, use_vnorm=False, epsilon=1e-05
    ),
    kvpress.ExpectedAttentionStatsPress(0.6, 9, 0, False, False, 1e-5, stats_folder="x"),
    kvpress.H2OPress(0.5, normalize="decay", decay=0.9),
    kvpress.KeyDiffPress(0.5),
    kvpress.LeverageScorePress(0.5, sketch_dimension=16),
    kvpress.NonCausalAttnPress(0.5, chunk_size=64),
    kvpress.CompactorPress(0.5, sink_size_start=2, sink_size_end=3, chunk_size=32, sketch_dimension=16, blending=0.3),
    kvpress.RestoreKVPress(0.4, layerwise=True, n_sink=2, repeat_prompt="Again", adapter="folder"),
    kvpress.KVzipPress(0.5, layerwise=True, n_sink=2, kvzip_plus_normalization=True, repeat_prompt="Again"),
    kvpress.DuoAttentionPress(0.5, on_the_fly_scoring=True, sink_size=4, recent_size=32, interval=16),
    kvpress.RLKVPress(0.5, table=str(TABLE), sink_size=4, recent_size=32),
    kvpress.CriticalKVPress(SnapKVPress(0.5), epsilon=1e-3, first_stage_ratio=0.25),
    kvpress.CriticalAdaKVPress(KnormPress(0.5), alpha_safeguard=0.1, epsilon=1e-3, first_stage_ratio=0.25),
    kvpress.ChunkPress(KnormPress(0.5), chunk_length=64),
    kvpress.ChunkKVPress(SnapKVPress(0.5), chunk_length=10),
    kvpress.BlockPress(kvpress.KeyDiffPress(0.5), block_size=64),
    kvpress.KeyRerotationPress(KnormPress(0.5)),
    kvpress.PerLayerCompressionPress(KnormPress(), compression_ratios=[0.25, 0.5]),
    kvpress.PyramidKVPress(0.9, window_size=4, beta=5),
    kvpress.AdaKVPress(SnapKVPress(0.5, window_size=4), alpha_safeguard=0.1),
    kvpress.DecodingPress(kvpress.AdaKVPress(KnormPress()), compression_interval=3, target_size=5),
    kvpress.DecodingPress(KnormPress(), target_ratio=0.5, hidden_states_buffer_size=8),
    kvpress.PrefillDecodingPress(SnapKVPress(0.5), kvpress.DecodingPress(KnormPress(), target_size=9)),
    kvpress.PrefillDecodingPress(prefilling_press=SnapKVPress(0.5)),
    kvpress.PrefillDecodingPress(decoding_press=kvpress.H2OPress(0.5)),
    kvpress.PrefillDecodingPress(),
    kvpress.DropSpansPress("<a>", "</a>", KnormPress(0.5)),
    kvpress.ProtectPress(KnormPress(0.5), "0:4 9:12", "<a>..</a>", "system tool", "user"),
    kvpress.ConversationPress(KnormPress(), budget=64, interval=8),
    KIVIPress(4),
    KIVIPress((4, 2), group_size=16, residual_length=0, skip_layers=(0, 3)),
    KIVIPress(skip_layers=(1,)),
    kvpress.TurboQuantPress((3, 2), seed=4),
    KIVIPress((8, (4, 2), 2), sinks=4),
    kvpress.AdaQuantPress(((8, 4), (2, 1)), group_size=32, residual_length=0),
    kvpress.GEARPress(4, group_size=32, rank=8, generated_rank=0, outliers=0.5, passes=1, buffer_length=96, sinks=1),
    kvpress.GEARPress(backbone="kcvt", residual_length=9, skip_layers=(2,)),
    kvpress.GEARLPress(3, rank=2),
    kvpress.ZipCachePress((8, 4), (2, 1), salient_ratio=0.25, probe_ratio=1.0, interval=7, residual_length=3, sinks=2),
    kvpress.CoupledQuantPress((10, 8), (8, 4), "books.safetensors", residual_length=0, sinks=0),
    QuestPress(64, page_size=8, skip_layers=0),
    QuestPress(0.125, n_sink=4, n_recent=16),
    kvpress.DoubleSparsityPress(
        0.25, channels=8, label_bits=16, skip_layers=1, calibration="c.json", statistic="k", reduce="sum", offload=True
    ),
    kvpress.OffloadPress(QuestPress(64), to="host"),
    kvpress.TidalDecodePress(128, skip_layers=1, reselect_layer=9, heads="query", correction=16, n_sink=4),
    ComposedPress([KnormPress(0.5), KIVIPress(4), QuestPress(128)]),
    kvpress.PrefillDecodingPress(
        ComposedPress([KnormPress(0.5), kvpress.KeyDiffPress(0.25)]), kvpress.DecodingPress(kvpress.TOVAPress())
    ),
]
NON_DEFAULT += [
    kvpress.HeadKVPress(0.5, table=str(TABLE)),
    kvpress.ScopePress("adaptive", 300),
    kvpress.EOptShrinkQPress(3, rank=2, buffer_length=32),
    kvpress.OscarPress((3, 2), key_clip=0.9, group_size=32, sinks=4),
    kvpress.VectorPress(kvpress.SnapKVPress(0.5), share=0.5),
    kvpress.AgentKVPress(0.5, 16, 4, "<think> [THINK]", "<call>", "<output> 12:80", "<user>", False),
]
NON_DEFAULT += [kvpress.get_press(spec) for entry in kvpress.list_presses() for spec in (entry.example, *entry.cases)]
named = pytest.mark.parametrize("press", NON_DEFAULT, ids=lambda p: type(p).__name__)


def names() -> list[str]:
    return [entry.name for entry in kvpress.list_presses()]


def test_every_registered_press_is_tried_with_other_than_default_arguments() -> None:
    tried = {type(press) for press in NON_DEFAULT if kvpress.to_spec(press) not in names()}
    assert tried == {entry.press for entry in kvpress.list_presses() if dataclasses.fields(entry.press)}


@named
def test_spec_round_trip(press: kvpress.BasePress) -> None:
    spec = kvpress.to_spec(press)
    again = kvpress.get_press(spec)
    assert type(again) is type(press)
    assert again == press
    assert kvpress.to_spec(again) == spec


@named
def test_data_round_trip_through_yaml(press: kvpress.BasePress) -> None:
    data = kvpress.press_to_dict(press)
    text = yaml.safe_dump(data)
    again = kvpress.press_from_dict(yaml.safe_load(text))
    assert type(again) is type(press)
    assert again == press
    assert yaml.safe_dump(kvpress.press_to_dict(again)) == text


def test_data_holds_only_settings_that_differ_from_the_defaults() -> None:
    assert kvpress.press_to_dict(SnapKVPress(0.5)) == {"name": "snapkv", "compression_ratio": 0.5}
    assert kvpress.press_to_dict(KIVIPress()) == {"name": "kivi"}
    assert kvpress.to_spec(KIVIPress()) == "kivi"
    assert kvpress.press_to_dict(kvpress.AdaKVPress(KnormPress())) == {"name": "adakv", "press": {"name": "knorm"}}


@pytest.mark.parametrize(
    ("spec", "press"),
    [
        ("snapkv:0.5", SnapKVPress(0.5)),
        ("  snapkv : 0.5 ", SnapKVPress(0.5)),
        ("snapkv:compression_ratio=0.5", SnapKVPress(0.5)),
        ("snapkv:0.5,window_size=8", SnapKVPress(0.5, window_size=8)),
        ("snapkv:0.5,8,3", SnapKVPress(0.5, window_size=8, kernel_size=3)),
        ("snapkv:5e-1", SnapKVPress(0.5)),
        ("knorm:budget=1024", KnormPress(budget=1024)),
        ("kivi:2", KIVIPress(2)),
        ("kivi:bits=(4,2)", KIVIPress((4, 2))),
        ("kivi:bits = (4, 2), group_size = 16", KIVIPress((4, 2), group_size=16)),
        ("kivi:skip_layers=3", KIVIPress(skip_layers=(3,))),
        ("quest:256", QuestPress(256)),
        ("random:0.5,seed=none", kvpress.RandomPress(0.5)),
        ("streaming_llm:0.5,reindex=TRUE", kvpress.StreamingLLMPress(0.5, reindex=True)),
        ("expected_attention:0.5,epsilon=1e+1", kvpress.ExpectedAttentionPress(0.5, epsilon=10.0)),
        ("adakv(snapkv:0.5)", kvpress.AdaKVPress(SnapKVPress(0.5))),
        ("adakv(snapkv:0.5):alpha_safeguard=0.1", kvpress.AdaKVPress(SnapKVPress(0.5), 0.1)),
        ("adakv(snapkv:0.5):0.1", kvpress.AdaKVPress(SnapKVPress(0.5), 0.1)),
        ("decoding(adakv(knorm)):64", kvpress.DecodingPress(kvpress.AdaKVPress(KnormPress()), 64)),
        ("prefill_decoding(decoding_press=h2o:0.5)", kvpress.PrefillDecodingPress(None, kvpress.H2OPress(0.5))),
        ("adakv( press = snapkv:0.5 ):0.1", kvpress.AdaKVPress(SnapKVPress(0.5), 0.1)),
        (
            "prefill_decoding(snapkv:0.5; decoding(knorm))",
            kvpress.PrefillDecodingPress(SnapKVPress(0.5), kvpress.DecodingPress(KnormPress())),
        ),
        ("knorm:0.5+kivi:4+quest:64", ComposedPress([KnormPress(0.5), KIVIPress(4), QuestPress(64)])),
        (
            "adakv(expected_attention:0.6) + kivi:bits=2,group_size=32 + quest:budget=1024",
            ComposedPress(
                [kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(0.6)), KIVIPress(2, group_size=32), QuestPress(1024)]
            ),
        ),
    ],
    ids=str,
)
def test_grammar(spec: str, press: kvpress.BasePress) -> None:
    assert kvpress.get_press(spec) == press


@pytest.mark.parametrize(
    "name", ["StreamingLLM", "streaming-llm", "streaming_llm", "StreamingLLMPress", "STREAMING_LLM"]
)
def test_names_ignore_case_dashes_and_underscores(name: str) -> None:
    assert kvpress.get_press(f"{name}:0.5") == kvpress.StreamingLLMPress(0.5)
    assert kvpress.press_from_dict({"name": name}) == kvpress.StreamingLLMPress()


def test_a_press_is_its_own_spec() -> None:
    press = KnormPress(0.5)
    assert kvpress.get_press(press) is press


@pytest.mark.parametrize(
    ("spec", "error", "words"),
    [
        ("snapkw:0.5", KeyError, ["'snapkw'", "did you mean snapkv?", "kvpress list"]),
        ("adakv(snapkw:0.5)", KeyError, ["'snapkw'", "did you mean snapkv?"]),
        ("zzzz", KeyError, ["unknown press 'zzzz'", "kvpress list"]),
        ("snapkv:0.5,windw_size=8", ValueError, ["'windw_size'", "did you mean window_size?", "kernel_size"]),
        ("snapkv:0.5,qqq=8", ValueError, ["no argument 'qqq'", "it takes: compression_ratio"]),
        ("none:0.5", ValueError, ["none", "0.5"]),
        ("knorm:0.5,7", ValueError, ["knorm takes no further argument", "7"]),
        ("snapkv(knorm):0.5", ValueError, ["snapkv takes no further argument", "KnormPress"]),
        ("adakv", ValueError, ["adakv needs press", "adakv(snapkv:0.5)"]),
        ("decoding:64", ValueError, ["decoding needs base_press"]),
        ("adakv(snapkv:0.5", ValueError, ["parenthesis is not closed", "adakv(snapkv:0.5"]),
        ("adakv(snapkv:0.5))", ValueError, ["')'"]),
        ("adakv snapkv", ValueError, ["expected ':'", "'snapkv'"]),
        ("snapkv:0.5,window_size=8,5", ValueError, ["bare value", "'5'"]),
        ("snapkv:0.5,compression_ratio=0.6", ValueError, ["compression_ratio", "twice"]),
        ("snapkv:window_size=4,window_size=8", ValueError, ["window_size", "twice"]),
        ("adakv(snapkv:0.5; press=knorm)", ValueError, ["press", "twice"]),
        ("adakv(inner=snapkv:0.5)", ValueError, ["no argument 'inner'"]),
        ("snapkv:", ValueError, ["empty", "snapkv:"]),
        ("snapkv:0.5,", ValueError, ["empty", "snapkv:0.5,"]),
        ("", ValueError, ["name of a press"]),
        ("knorm:0.5 +", ValueError, ["name of a press"]),
        ("+ knorm:0.5", ValueError, ["name of a press"]),
        ("adakv()", ValueError, ["name of a press"]),
        ("snapkv:half", TypeError, ["compression_ratio", "'half'"]),
        ("snapkv:1.5", ValueError, ["must be in [0, 1), got 1.5"]),
        ("snapkv:__import__('os')", TypeError, ["compression_ratio must be a number"]),
        ("per_layer_compression(knorm):compression_ratios=0.5", TypeError, ["one ratio per layer, got 0.5"]),
        (7, TypeError, ["a spec such as 'snapkv:0.5'", "int"]),
    ],
    ids=str,
)  # fmt: skip
def test_mistakes(spec: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        kvpress.get_press(spec)
    for word in words:
        assert word in str(raised.value)


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        ({"name": "snapkw"}, KeyError, ["did you mean snapkv?"]),
        ({"name": "snapkv", "windw_size": 8}, ValueError, ["'windw_size'", "did you mean window_size?"]),
        ({"compression_ratio": 0.5}, ValueError, ["'name'"]),
        (["snapkv"], ValueError, ["'name'", "['snapkv']"]),
        ({"name": "adakv"}, ValueError, ["adakv needs press"]),
        ({"name": "adakv", "press": {"name": "kivi"}}, TypeError, ["AdaKVPress", "KIVIPress"]),
        ({"name": "snapkv", "compression_ratio": "0.5"}, TypeError, ["compression_ratio must be a number", "'0.5'"]),
        ({"name": "composed", "presses": []}, ValueError, ["at least one press"]),
    ],
    ids=str,
)
def test_mistakes_in_data(data: Any, error: type[Exception], words: list[str]) -> None:
    with pytest.raises(error) as raised:
        kvpress.press_from_dict(data)
    for word in words:
        assert word in str(raised.value)


def test_reading_data_does_not_change_it() -> None:
    data = {
        "name": "composed",
        "presses": [{"name": "knorm", "compression_ratio": 0.5}, {"name": "kivi", "bits": [4, 2]}],
    }
    before = yaml.safe_dump(data)
    press = kvpress.press_from_dict(data)
    assert press == KnormPress(0.5) + KIVIPress((4, 2))
    assert yaml.safe_dump(data) == before


# -- composition ---------------------------------------------------------------------------------------------


def test_sums_are_flat() -> None:
    a, b, c = KnormPress(0.5), KIVIPress(4), QuestPress(64)
    for press in ((a + b) + c, a + (b + c), ComposedPress([a + b, c]), ComposedPress([ComposedPress([a, b]), c])):
        assert isinstance(press, ComposedPress)
        assert press.presses == [a, b, c]
    assert kvpress.to_spec(a + b + c) == (
        "knorm:compression_ratio=0.5 + kivi:bits=4 + quest:budget=64"
    )  # fmt: skip


def test_composing_leaves_the_parts_alone() -> None:
    first = KnormPress(0.5) + KIVIPress(4)
    composed = first + QuestPress(64)
    assert len(first.presses) == 2
    assert len(composed.presses) == 3


def test_roles_of_a_sum() -> None:
    press = KnormPress(0.5) + KIVIPress(4) + QuestPress(64)
    recipe = press.recipe()
    assert recipe.codec_at(0) == KIVIPress(4).codec_at(0)
    assert recipe.selector_at(2).budget.size == 64
    assert not recipe.acting("decode")
    assert not recipe.is_identity
    assert (kvpress.NonePress() + kvpress.NonePress()).recipe().is_identity
    assert (KIVIPress(4) + kvpress.H2OPress(0.5)).recipe().acting("decode")


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ([KIVIPress(2), KIVIPress(4)], ["KIVIPress and KIVIPress", "one codec"]),
        ([QuestPress(64), KnormPress(0.5), QuestPress(32)], ["QuestPress and QuestPress", "one selector"]),
        (
            [kvpress.H2OPress(0.5), kvpress.DecodingPress(KnormPress())],
            ["H2OPress and DecodingPress", "while decoding"],
        ),
        ([], ["at least one press"]),
    ],
    ids=["codecs", "selectors", "schedules", "empty"],
)
def test_sums_that_make_no_sense(parts: list[kvpress.BasePress], words: list[str]) -> None:
    with pytest.raises(ValueError, match=words[0]) as raised:
        ComposedPress(parts)
    for word in words:
        assert word in str(raised.value)


def test_a_sum_of_something_else() -> None:
    with pytest.raises(TypeError, match="presses must hold presses, got float"):
        KnormPress(0.5) + 4.0  # type: ignore[operator]


def test_specs_are_accepted_wherever_a_press_is(tmp_path: Path) -> None:
    model, ids, spec = tiny_model("llama"), tokens(1, 20), "snapkv:0.5,window_size=4"
    press, geometry = kvpress.get_press(spec), Geometry.of(model.config)
    assert kvpress.AdaKVPress(spec) == kvpress.AdaKVPress(press)  # type: ignore[arg-type]
    assert kvpress.PrefillDecodingPress(spec, "decoding(knorm)").prefilling_press == press  # type: ignore[arg-type]
    assert press + "kivi:bits=4" == kvpress.ComposedPress([spec, "kivi:bits=4"])  # type: ignore[list-item]
    assert plan(spec, geometry, 100) == plan(press, geometry, 100)
    assert longest_context(spec, geometry, 10**6) == longest_context(press, geometry, 10**6)
    expected = positions(kvpress.prefill(model, [press], ids).caches[0])
    assert positions(kvpress.prefill(model, [spec], ids).caches[0]) == expected
    assert positions(kvpress.PrefixStore(tmp_path).read(model, spec, ids)) == expected
    assert kvpress.PrefixStore(tmp_path).find(model, press, ids) is not None
    with kvpress.reading(model, "kivi:bits=4") as session:
        assert session.press == kvpress.KIVIPress(4)
    with pytest.raises(KeyError, match="did you mean snapkv"), kvpress.reading(model, "snapkw:0.5"):
        pass
    with pytest.raises(TypeError, match=r"press object or a spec.*got int"), kvpress.reading(model, 5):  # type: ignore[arg-type]
        pass
    wrapper = kvpress.AdaKVPress(press)
    wrapper.press = "knorm:0.5"  # type: ignore[assignment]
    with wrapper(model):
        assert wrapper.press == KnormPress(0.5)


# -- the registry --------------------------------------------------------------------------------------------


def test_entries_are_complete() -> None:
    listed = kvpress.list_presses()
    assert len({entry.name for entry in listed}) == len(listed)
    for entry in listed:
        assert isinstance(entry, Entry)
        assert entry.summary.endswith((".", ":")) or entry.summary
        assert "Differs from the paper:" in (entry.press.__doc__ or ""), entry.name
        assert ("arXiv:" in entry.paper) == ("arXiv:" in (entry.press.__doc__ or "")), entry.name
        assert find(entry.press.__name__) is entry
        assert getattr(kvpress, entry.press.__name__) is entry.press


def test_a_press_of_the_user_is_found_and_a_name_is_not_taken_twice() -> None:
    from kvpress.core import registry

    @kvpress.register("first_tokens", "evict")
    @dataclasses.dataclass
    class FirstTokensPress(KnormPress):
        """Keep the first tokens."""

        offset: int = 2

    try:
        assert kvpress.get_press("FirstTokens:0.5,offset=3") == FirstTokensPress(0.5, offset=3)
        assert kvpress.to_spec(FirstTokensPress(0.5, offset=3)) == "first_tokens:compression_ratio=0.5,offset=3"
        with pytest.raises(ValueError, match="'First-Tokens' exists already: FirstTokensPress"):
            kvpress.register("First-Tokens", "evict")(KnormPress)
        assert find("first_tokens").status == "experimental"
        with pytest.raises(
            ValueError, match="status must be one of recommended, reproduction, experimental, got 'good'"
        ):
            kvpress.register("second_tokens", "evict", status="good")  # type: ignore[arg-type]
        with pytest.raises(
            ValueError, match=r"role must be one of baseline, evict, .*, got 'evcit' for 'second_tokens'"
        ):
            kvpress.register("second_tokens", "evcit")  # type: ignore[arg-type]
        for name in ("second tokens", "second:tokens", "2nd_tokens", ""):
            with pytest.raises(ValueError, match=f"as specs contain it, got '{name}'"):
                kvpress.register(name, "evict")
    finally:
        registry._entries.pop("firsttokens")
    with pytest.raises(KeyError, match=r"@kvpress\.register"):
        kvpress.to_spec(FirstTokensPress())


# -- any press -----------------------------------------------------------------------------------------------

ratios = st.floats(0, 1, exclude_max=True)
budgets = st.integers(1, 10**9)
scorers = st.one_of(
    st.builds(KnormPress, ratios),
    st.builds(lambda n: KnormPress(budget=n), budgets),
    st.builds(kvpress.RandomPress, ratios, st.none() | st.integers(0)),
    st.builds(kvpress.StreamingLLMPress, ratios, st.integers(0, 99), st.booleans()),
    st.builds(SnapKVPress, ratios, st.integers(1, 999), st.integers(0, 9).map(lambda k: 2 * k + 1)),
    st.builds(
        kvpress.ExpectedAttentionPress, ratios, budgets, st.integers(0, 9), st.booleans(), st.booleans(),
        st.floats(0, allow_nan=False, allow_infinity=False),
    ),
)  # fmt: skip
evictors = st.one_of(scorers, st.builds(kvpress.AdaKVPress, scorers, st.floats(0, 1)))
bits = st.sampled_from([1, 2, 3, 4, 8])
codecs = st.builds(
    KIVIPress, bits | st.tuples(bits, bits), budgets, st.integers(0, 999), st.lists(st.integers(0, 99)).map(tuple)
)
decoders = st.builds(kvpress.DecodingPress, evictors, budgets, budgets, budgets, target_ratio=st.none() | ratios)
presses = st.one_of(
    evictors, codecs, decoders,
    st.builds(kvpress.PrefillDecodingPress, st.none() | evictors, st.none() | decoders),
    st.builds(lambda a, b, c: ComposedPress([a, b, c]), evictors, codecs, st.builds(QuestPress, st.integers(16, 999))),
)  # fmt: skip


@settings(max_examples=100, deadline=None, derandomize=True)
@given(press=presses)
def test_any_press_comes_back(press: kvpress.BasePress) -> None:
    assert kvpress.get_press(kvpress.to_spec(press)) == press
    assert kvpress.press_from_dict(yaml.safe_load(yaml.safe_dump(kvpress.press_to_dict(press)))) == press


@settings(max_examples=200, deadline=None, derandomize=True)
@given(text=st.text("snapkv0.5:;,=()+ -_\\x00é", max_size=30))
def test_any_text_is_a_press_or_a_clear_error(text: str) -> None:
    try:
        press = kvpress.get_press(text)
    except (ValueError, KeyError, TypeError):
        return
    assert kvpress.get_press(kvpress.to_spec(press)) == press


def test_deeply_nested_specs_are_refused_by_their_depth() -> None:
    for spec in ("chunk(" * 2000 + "knorm:0.5" + ")" * 2000, "chunk(" * 2000, "knorm:budget=" + "(" * 3000):
        with pytest.raises(
            ValueError, match=r"nested at most 32 deep, got [23]000 in a spec that starts with '"
        ) as raised:
            kvpress.get_press(spec)
        assert len(str(raised.value)) < 200
    data: dict[str, Any] = {"name": "knorm"}
    for _ in range(2000):
        data = {"name": "chunk", "press": data}
    with pytest.raises(ValueError, match="nested at most 32 deep, got 33"):
        press_from_dict(data)
    with pytest.raises((ValueError, TypeError)):
        kvpress.get_press("knorm:" + "-" * 100_000 + "1")
    with pytest.raises((ValueError, TypeError)):
        kvpress.get_press("knorm:" + "[" * 100_000)
