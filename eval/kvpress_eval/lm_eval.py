"""`python -m kvpress_eval.lm_eval ...` is lm-eval's own command line, with the model `kvpress` registered.

lm-eval 0.4.13 finds models of other packages only once their module is imported; later ones read the entry point as well.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib import import_module

from kvpress_eval.errors import ConfigError

_PARTS = ("lm_eval", "accelerate")


def require_lm_eval() -> None:
    """Raise unless lm-eval and what its Hugging Face models need are installed."""
    for part in _PARTS:
        if importlib.util.find_spec(part) is None:
            raise ConfigError(f"{part} is not installed; tasks of lm-eval need: pip install 'kvpress[lm-eval]'")


def main() -> None:
    """Run lm-eval with the arguments of this process."""
    try:
        require_lm_eval()
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    import_module("kvpress_eval.lm_model")
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
