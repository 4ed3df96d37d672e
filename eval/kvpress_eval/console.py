# SPDX-License-Identifier: Apache-2.0
"""The `kvpress` command with everything: what the library offers, and the commands that measure.

A command is known because its file is in `commands`: `lm_eval.py` holds the function `command` of `kvpress lm-eval`, and
its class `Command` where that shows more than its options.
"""

from __future__ import annotations

from kvpress.cli import app
from kvpress_eval.common.discovery import modules_of

for module in modules_of("kvpress_eval.commands"):
    name = module.__name__.rpartition(".")[2].replace("_", "-")
    app.command(name, cls=getattr(module, "Command", None))(module.command)

__all__ = ["app"]
