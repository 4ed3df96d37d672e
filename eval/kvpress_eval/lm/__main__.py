# SPDX-License-Identifier: Apache-2.0
"""`python -m kvpress_eval.lm ...` is lm-eval's own command line, with the model `kvpress` registered.

lm-eval 0.4.13 finds models of other packages only once their module is imported; later ones read the entry point as well.
"""

from __future__ import annotations

import sys

from kvpress_eval.common.errors import ConfigError
from kvpress_eval.lm.require import require_lm_eval


def main() -> None:
    """Run lm-eval with the arguments of this process."""
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
