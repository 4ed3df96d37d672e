# SPDX-License-Identifier: Apache-2.0
"""`python -m kvpress_eval.lm ...` runs the command line of lm-eval with the model `kvpress` registered.

lm-eval 0.4.13 registers a model of another package when its module is imported; later versions also read the entry point.
"""

from __future__ import annotations

import sys

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.lm.require import require_lm_eval


def main() -> None:
    """Run lm-eval with the arguments of the command line."""
    try:
        require_lm_eval()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    from lm_eval.__main__ import cli_evaluate

    import kvpress_eval.lm.model  # noqa: F401  # registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
