# SPDX-License-Identifier: Apache-2.0
"""Accuracy of `frontier` at each size on SmolLM2, of its parts, and of bits alone: commands of `kvpress recall`.

    python -m benchmarks.frontier sizes --out sizes.json [--length 1024] [--filler noise] [--contexts 10] [--threads 1]
    python -m benchmarks.frontier bits --out bits.json
    python -m benchmarks.recall_table sizes.json

`sizes` measures `frontier` at 5, 10, 20 and 50 times smaller, other scorers at the same sizes, and `frontier` without some of
its parts. `bits` keeps all pairs and stores them in several ways. A run that was stopped continues with the same command.
`docs/frontier.md` and `docs/real-models.md` show the tables.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

WITHOUT_REFIT = "kvzip:repeat_prompt="
LAYERWISE = "refit(kvzip:repeat_prompt=,layerwise=true):ridge=1.0"
SIZES = (
    *(f"frontier:smaller={smaller}" for smaller in (5, 10, 20, 50)),
    *(f"budgeted(compactor):smaller={smaller}" for smaller in (10, 20)),
    "budgeted(sample(leverage_score)):smaller=10",
    *(f"budgeted({scorer}):smaller=20" for scorer in (WITHOUT_REFIT, LAYERWISE)),
)
DENSE = "residual_length=0,sinks=1"
BITS = (
    "kivi:bits=4,residual_length=0",
    f"kivi:bits=4,{DENSE}",
    f"kivi:bits=4,rotate=true,{DENSE}",
    "rotated:bits=4,residual_length=0",
    f"rotated:bits=4,{DENSE}",
    f"rotated:bits=(8,4),{DENSE}",
    f"rotated:bits=8,{DENSE}",
    f"rotated:bits=3,{DENSE}",
)
STUDIES = {"sizes": SIZES, "bits": BITS}


def command(study: str, options: argparse.Namespace) -> list[str]:
    """Return the command that measures a study."""
    arguments = ["recall", "--model", options.model, "--lengths", options.length, "--contexts", options.contexts]
    arguments += ["--filler", options.filler, "--threads", options.threads, "--out", options.out]
    for press in STUDIES[study]:
        arguments += ["--press", press]
    return [str(Path(sys.executable).with_name("kvpress")), *map(str, arguments)]


def main() -> None:
    """Run `kvpress recall` for a study."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--filler", default="noise")
    parser.add_argument("--contexts", type=int, default=10)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    raise SystemExit(subprocess.run(command(options.study, options), check=False).returncode)  # noqa: S603 - our own


if __name__ == "__main__":
    main()
