# SPDX-License-Identifier: Apache-2.0
"""Books and levels for the tiny models, so that calibrated codecs can be tested on them."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvpress.calibrate import CoupledSettings, EnergySettings, LevelSettings, PredictorSettings, calibrate
from tests.models import tiny_model, tokens


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: two channels in a code of four bits."""
    folder = tmp_path_factory.mktemp("books")
    made = {}
    for family in ("llama", "qwen3", "phi3"):
        made[family] = folder / f"{family}.safetensors"
        settings = CoupledSettings((2, 2), (4, 4), fisher=family == "llama", iterations=5)
        calibrate(tiny_model(family), tokens(4, 100, seed=50), settings, made[family])
    return made


@pytest.fixture(scope="session")
def levels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: levels for `kvquant`."""
    folder = tmp_path_factory.mktemp("levels")
    made = {}
    for family in ("llama", "qwen3", "phi3"):
        made[family] = folder / f"{family}.safetensors"
        settings = LevelSettings(fisher=family == "llama", iterations=5)
        calibrate(tiny_model(family), tokens(4, 100, seed=50), settings, made[family])
    return made


@pytest.fixture(scope="session")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: predictors for `aquakv`."""
    folder = tmp_path_factory.mktemp("predictors")
    made = {}
    for family in ("llama", "qwen3", "phi3"):
        made[family] = folder / f"{family}.safetensors"
        calibrate(tiny_model(family), tokens(4, 100, seed=50), PredictorSettings(iterations=5), made[family])
    return made


@pytest.fixture(scope="session")
def energies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: energies of pairs of channels for `block_gtq`."""
    folder = tmp_path_factory.mktemp("energies")
    made = {}
    for family in ("llama", "qwen3", "phi3"):
        made[family] = folder / f"{family}.safetensors"
        calibrate(tiny_model(family), tokens(4, 100, seed=50), EnergySettings(), made[family])
    return made
