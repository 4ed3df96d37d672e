# SPDX-License-Identifier: Apache-2.0
"""Run configurations from YAML, with errors that name the file, the line and the key."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from kvpress_eval.common.errors import ConfigError, unknown_name
from kvpress_eval.config.schema import RunConfig


def load_config(path: Path | None, overrides: dict[str, Any]) -> RunConfig:
    """Return the configuration in a file (or the defaults) with some fields replaced."""
    values, lines = read_values(path)
    return validate({**values, **overrides}, path, lines, overrides)


def read_values(path: Path | None, further: Sequence[str] = ()) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the values of a file and the line of each key; keys must be fields of a run or in `further`."""
    values, lines = read_yaml(path) if path else ({}, {})
    allowed = [*RunConfig.model_fields, *further]
    for key in values:
        if key not in allowed:
            message = unknown_name("key", str(key), allowed)
            raise ConfigError(f"{path}:{lines[key]}: {message} (allowed: {', '.join(allowed)})")
    return values, lines


def validate(values: dict[str, Any], path: Path | None, lines: dict[str, int], overrides: dict[str, Any]) -> RunConfig:
    """Return the configuration with these values; errors name the line of a value that comes from a file."""
    try:
        return RunConfig.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(_describe(item, path, lines, overrides) for item in error.errors())) from error


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Return the top-level mapping of a file, and the line of each key."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        if not isinstance(node, yaml.MappingNode):
            raise ConfigError(f"{path}:{node.start_mark.line + 1}: expected `key: value` lines")
        _refuse_duplicates(node, path)
        lines = {key.value: key.start_mark.line + 1 for key, _ in node.value}
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = f":{error.problem_mark.line + 1}" if error.problem_mark else ""
        raise ConfigError(f"{path}{line}: {error.problem}") from error
    except yaml.YAMLError as error:
        raise ConfigError(f"{path}: {error}") from error
    finally:
        loader.dispose()


def _refuse_duplicates(node: yaml.Node, path: Path) -> None:
    """Raise ConfigError for a duplicate key: YAML forbids it, but the parser silently keeps the last one."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            _refuse_duplicates(child, path)
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.value in seen:
            raise ConfigError(f"{path}:{line}: duplicate key {key.value!r}, first on line {seen[key.value]}")
        seen[key.value] = line
        _refuse_duplicates(value, path)


def _describe(item: Any, path: Path | None, lines: dict[str, int], overrides: dict[str, Any]) -> str:
    key = str(item["loc"][0])
    where = f"{path}:{lines[key]}: " if key in lines and key not in overrides else ""
    return f"{where}{'.'.join(map(str, item['loc']))}: {item['msg'].removeprefix('Value error, ')}"
