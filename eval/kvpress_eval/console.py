"""The `kvpress` command with everything: what the library offers, and the commands that measure."""

from __future__ import annotations

from kvpress.cli import app
from kvpress_eval.cli import demo_command, eval_command

app.command("eval")(eval_command)
app.command("demo")(demo_command)

__all__ = ["app"]
