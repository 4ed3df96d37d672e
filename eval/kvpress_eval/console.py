# SPDX-License-Identifier: Apache-2.0
"""The `kvpress` command: the commands of the library and those that measure.

Every file in `commands` registers a command: `lm_eval.py` holds the function `command` of `kvpress lm-eval`, and optionally
a class `Command`, if its help shows more than options.
"""

from __future__ import annotations

import kvpress

if not hasattr(kvpress, "_check_alone"):
    raise ImportError(
        f"the package kvpress in {list(kvpress.__path__)} is not that of kvpress-toolkit: another distribution has overwritten "
        "or removed its files, or comes first. Run these two commands:\n"
        "  pip uninstall -y kvpress kvpress-toolkit\n"
        "  pip install kvpress-toolkit"
    )

from kvpress.cli import app
from kvpress_eval.common.discovery import modules_of

for module in modules_of("kvpress_eval.commands"):
    name = module.__name__.rpartition(".")[2].replace("_", "-")
    app.command(name, cls=getattr(module, "Command", None))(module.command)

__all__ = ["app"]
