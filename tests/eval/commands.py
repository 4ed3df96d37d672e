# SPDX-License-Identifier: Apache-2.0
"""The command line, as a user has it."""

from __future__ import annotations

from typing import Any

from kvpress_eval.console import app
from typer.testing import CliRunner


def invoke(*arguments: Any, **options: Any) -> tuple[int, str]:
    """Run a command of `kvpress`; return its exit code and its output."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments], **options)
    return done.exit_code, done.output
