"""The `kvpress` command with everything: what the library offers, and the commands that measure."""

from __future__ import annotations

from collections.abc import Callable
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


_lenient: dict[str, Any] = {"allow_extra_args": True, "ignore_unknown_options": True}
try:
    from kvpress_eval.cli import demo_command, divergence_command, eval_command, lm_eval_command, reselect_command
except ModuleNotFoundError as error:
    for name in ("eval", "divergence", "reselect", "lm-eval", "demo"):
        app.command(name, context_settings=_lenient)(_without_extra(str(error.name)))
else:
    app.command("eval")(eval_command)
    app.command("divergence")(divergence_command)
    app.command("reselect")(reselect_command)
    app.command("lm-eval")(lm_eval_command)
    app.command("demo")(demo_command)

__all__ = ["app"]
