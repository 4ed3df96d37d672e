# SPDX-License-Identifier: Apache-2.0
"""A press that cannot run is named before any text is read."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from kvpress_eval.common.errors import ConfigError
from kvpress_eval.fidelity.measure import check_press

from tests.models import tiny_model


def test_a_press_whose_file_is_missing_is_named_with_the_command_that_makes_it() -> None:
    engine: Any = SimpleNamespace(model=tiny_model("llama"))
    with pytest.raises(
        ConfigError, match=r"press 'kvquant:calibration=none\.safetensors': .* `kvpress calibrate kvquant"
    ):
        check_press("kvquant:calibration=none.safetensors", engine, 100)
