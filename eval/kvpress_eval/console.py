"""The `kvpress` command with everything: what the library offers, and the commands that measure."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import typer

from kvpress.cli import app


def _without_extra(missing: str) -> Callable[[], None]:
    """Stand in for a measuring command where the `eval` extra is not installed."""

    def command() -> None:
        """Measure presses; needs the `eval` extra: pip install 'kvpress[eval]'."""
        typer.echo(f"error: {missing} is not installed; measuring needs: pip install 'kvpress[eval]'", err=True)
        raise typer.Exit(2)

    return command


_COMMANDS = {
    "eval": "eval:eval_command",
    "fidelity": "fidelity:fidelity_command",
    "reselect": "reselect:reselect_command",
    "lm-eval": "lm_eval:lm_eval_command",
    "report": "report:report_command",
    "show": "show:show_command",
    "demo": "eval:demo_command",
}
"""Where each command is, below `kvpress_eval.commands`."""
_LENIENT: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}

for name, place in _COMMANDS.items():
    module, _, function = place.partition(":")
    try:
        command = getattr(import_module(f"kvpress_eval.commands.{module}"), function)
    except ModuleNotFoundError as error:
        app.command(name, context_settings=_LENIENT)(_without_extra(str(error.name)))
    else:
        app.command(name)(command)

__all__ = ["app"]
