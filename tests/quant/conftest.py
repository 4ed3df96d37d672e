# SPDX-License-Identifier: Apache-2.0
"""Books and levels for the tiny models, so that calibrated codecs can be tested on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from kvpress.calibrate import (
    CalibrationSettings,
    CoupledSettings,
    EnergySettings,
    LevelSettings,
    PredictorSettings,
    RotationSettings,
    calibrate,
)
from tests.models import tiny_model, tokens


def calibrated(folder: Path, settings: Callable[[str], CalibrationSettings]) -> dict[str, Path]:
    """Calibrate a tiny model of every family with its settings; returns the files."""
    files = {}
    for family in ("llama", "qwen3", "phi3"):
        files[family] = folder / f"{family}.safetensors"
        calibrate(tiny_model(family), tokens(4, 100, seed=50), settings(family), files[family])
    return files


@pytest.fixture(scope="session")
def books(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: two channels in a code of four bits."""
    return calibrated(
        tmp_path_factory.mktemp("books"),
        lambda family: CoupledSettings((2, 2), (4, 4), fisher=family == "llama", iterations=5),
    )


@pytest.fixture(scope="session")
def levels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: levels for `kvquant`."""
    return calibrated(
        tmp_path_factory.mktemp("levels"), lambda family: LevelSettings(fisher=family == "llama", iterations=5)
    )


@pytest.fixture(scope="session")
def predictors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: predictors for `aquakv`."""
    return calibrated(tmp_path_factory.mktemp("predictors"), lambda _: PredictorSettings(iterations=5))


@pytest.fixture(scope="session")
def energies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: energies of pairs of channels for `block_gtq`."""
    return calibrated(tmp_path_factory.mktemp("energies"), lambda _: EnergySettings())


@pytest.fixture(scope="session")
def rotations(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Calibration files by model family: rotations for `oscar`."""
    return calibrated(tmp_path_factory.mktemp("rotations"), lambda _: RotationSettings())
