# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from pathlib import Path

import pytest
from kvpress_eval.common.errors import ConfigError, DataError
from kvpress_eval.common.files import hash_json
from kvpress_eval.config.load import load_config
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.run.cells import make_cells
from kvpress_eval.tasks.catalogue import expand_tasks
from pydantic import ValidationError


def load(tmp_path: Path, text: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text)
    return load_config(path, {})


def test_yaml_and_overrides(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("presses: [none, 'snapkv:0.5']\nlengths: [512]\nsamples: 7\n")
    config = load_config(path, {"samples": 9})
    assert config.presses == ("none", "snapkv:0.5")
    assert (config.lengths, config.samples) == ((512,), 9)


def test_an_empty_file_means_the_defaults(tmp_path: Path) -> None:
    assert load(tmp_path, "# nothing\n") == RunConfig()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nsampels: 3\n", r"run.yaml:2: unknown key 'sampels': did you mean samples.*allowed: model, presses"),
        ("seed: 1\nsamples: many\n", r"run.yaml:2: samples: .*valid integer"),
        ("samples: 0\n", r"run.yaml:1: samples: .*greater than or equal to 1"),
        ("seed: 1\nsamples: 3\nseed: 2\n", r"run.yaml:3: duplicate key 'seed', first on line 1"),
        ("model: !!python/object/apply:os.system ['true']\n", r"run.yaml:1: could not determine a constructor"),
        ("- none\n", r"run.yaml:1: expected `key: value` lines"),
        ("model: [\n", r"run.yaml:2"),
        ("presses: [none, 'snapkw:0.5']\n", r"run.yaml:1: presses: press 'snapkw:0.5': .*snapkv"),
        ("tasks: [niah_singel]\n", r"run.yaml:1: tasks: unknown task 'niah_singel': did you mean niah_single"),
        ("lengths: [8]\n", r"run.yaml:1: lengths.0: .*greater than or equal to 16"),
        ("depths: [0.5, 1.5]\n", r"run.yaml:1: depths.1: .*less than or equal to 1"),
        ("depth: 0.5\ndepths: [0, 1]\n", r"run.yaml:2: depths: give depth or depths, not both"),
        (
            "filler: essay\n",
            r"run.yaml:1: filler: must be noise, repeat, essays, stdlib, bfcl, human_eval, file:PATH, .*, got 'essay'",
        ),
        (
            "tasks: [vt, fwe]\n",
            r"language: .* not trained on 'fwe': .*words for niah_single, .*, cwe, .*; .*language english",
        ),
        ("filler: file:a.txt\nlanguage: reference\n", r"run.yaml:2: language: .*filler must be noise or repeat"),
    ],
)
def test_mistakes_are_located(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(tmp_path, text)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "none.yaml", {})


def test_configurations_are_frozen_and_closed() -> None:
    with pytest.raises(ValidationError):
        RunConfig().samples = 3  # type: ignore[misc]
    with pytest.raises(ValidationError):
        RunConfig(sample=3)  # type: ignore[call-arg]


def test_a_configuration_survives_json() -> None:
    config = RunConfig(presses=("snapkv:0.5",), depth=0.5, out=Path("runs/x"))
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def ids(config: RunConfig, weights: str = "w") -> list[str]:
    return [cell.id for cell in make_cells(config, expand_tasks(config), weights, "cpu", "bfloat16")]


def test_a_cell_is_named_by_the_fields_that_decide_its_result() -> None:
    config = RunConfig(presses=("none", "snapkv:0.5"), tasks=("vt",), lengths=(512,))
    base = ids(config)
    assert len(set(base)) == 2
    same = {"samples": 7, "out": Path("elsewhere"), "threads": 2}
    assert ids(config.model_copy(update=same)) == base
    assert ids(config.model_copy(update={"language": "reference"})) == base
    for change in (
        {"filler": "repeat"},
        {"depths": (0.0, 1.0)},
        {"seed": 1},
        {"question_aware": True},
        {"depth": 0.5},
        {"batch_size": 2},
        {"max_new_tokens": 8},
    ):
        assert not set(ids(config.model_copy(update=change))) & set(base)
    assert not set(ids(config, weights="other")) & set(base)


def test_the_hash_does_not_depend_on_the_order_of_keys() -> None:
    assert hash_json({"a": 1, "b": [1.5, None]}) == hash_json({"b": [1.5, None], "a": 1})
    assert hash_json({"a": 1}) != hash_json({"a": 2})


def test_repeated_names_run_once() -> None:
    config = RunConfig(presses=("none", "none"), tasks=("vt", "vt"), lengths=(512, 512))
    assert (config.presses, config.tasks, config.lengths) == (("none",), ("vt",), (512,))


def test_a_grid_of_depths_is_a_cell_for_each_depth() -> None:
    config = RunConfig(tasks=("vt", "cwe"), lengths=(512, 1024), depths=(0.0, 1.0))
    cells = make_cells(config, expand_tasks(config), "w", "cpu", "bfloat16")
    assert [(cell.source.task, cell.source.length, cell.depth) for cell in cells] == [
        ("vt", 512, 0.0), ("vt", 512, 1.0), ("vt", 1024, 0.0), ("vt", 1024, 1.0), ("cwe", 512, None), ("cwe", 1024, None),
    ]  # fmt: skip
    assert cells[1].label == "none on vt at 512, depth 1"
    alone = config.model_copy(update={"depths": (), "depth": 1.0, "lengths": (512,)})
    assert ids(alone) == [cells[1].id, cells[4].id]


def test_answers_get_the_room_they_need() -> None:
    config = RunConfig(tasks=("cwe", "passkey"), lengths=(512,), language="english")
    assert [source.max_new_tokens for source in expand_tasks(config)] == [128, 32]
    short = config.model_copy(update={"max_new_tokens": 7})
    assert [source.max_new_tokens for source in expand_tasks(short)] == [7, 7]


def test_a_filler_text_that_is_missing(tmp_path: Path) -> None:
    config = RunConfig(filler=f"file:{tmp_path}/none.txt", language="english")
    with pytest.raises(DataError, match=f"place it at {tmp_path}/none.txt"):
        expand_tasks(config)
