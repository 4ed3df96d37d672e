# SPDX-License-Identifier: Apache-2.0
"""Presses around other presses: refused combinations, and settings that they pass on."""

from __future__ import annotations

from typing import Any

import pytest

import kvpress
from kvpress import KnormPress


class OwnCompress(kvpress.ScorerPress):
    def score(self, *arguments: Any) -> Any:
        raise NotImplementedError

    def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any) -> Any:
        return keys, values


@pytest.mark.parametrize("wrapper", [kvpress.AdaKVPress, kvpress.KeyRerotationPress, kvpress.BlockPress])
def test_presses_that_do_not_score_are_refused(wrapper: Any) -> None:
    with pytest.raises(TypeError, match="needs a press that scores pairs, such as SnapKVPress, got NonePress"):
        wrapper(kvpress.NonePress())
    with pytest.raises(TypeError, match="OwnCompress has its own `compress`"):
        wrapper(OwnCompress(0.5))


@pytest.mark.parametrize("outer", ["adakv", "chunkkv", "criticalkv", "critical_adakv"])
@pytest.mark.parametrize("inner", ["adakv(knorm)", "chunk(knorm)", "block(knorm)", "key_rerotation(chunkkv(knorm))"])
def test_two_wrappers_do_not_choose_the_same_pairs(outer: str, inner: str) -> None:
    with pytest.raises(TypeError, match="would both choose the pairs to keep"):
        kvpress.get_press(f"{outer}({inner})")


@pytest.mark.parametrize("spec", ["adakv(key_rerotation(knorm:0.5))", "block(criticalkv(keydiff:0.5))",
                                  "key_rerotation(chunk(knorm:0.5))"])  # fmt: skip
def test_other_nestings_pass_the_ratio_on(spec: str) -> None:
    press: Any = kvpress.get_press(spec)
    assert press.compression_ratio == 0.5
    assert press.recipe().kept(100) == 50
    press.compression_ratio = 0.75
    assert press.recipe().kept(100) == 25
    assert kvpress.get_press(kvpress.to_spec(press)) == press


def test_wrappers_are_head_wise_where_the_inner_press_is() -> None:
    assert kvpress.KeyRerotationPress(kvpress.AdaKVPress(KnormPress())).recipe().ragged
    assert not kvpress.KeyRerotationPress(KnormPress()).recipe().ragged
