# SPDX-License-Identifier: Apache-2.0
"""Time of every calibration of a pretrained model, and the files for the study `calibrated` of `recall_presses`.

    TEXT=$(python -c "import pydoc_data.topics as topics; print(topics.__file__)")
    python -m benchmarks.calibrations --data $TEXT --files calibrated --out calibrations.json [--model smollm2] [--limit 600]
    cd calibrated && python -m benchmarks.recall_presses calibrated --out recall.json --contexts 10
    python -m benchmarks.calibrations --table calibrations.json

Each command of `kvpress calibrate` runs in a process of its own, with the environment of this one (number of threads), and is
stopped after `--limit` seconds; it resumes in another run. The record has the command, its seconds, and the size of its file.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from kvpress_eval.report.table import markdown

from benchmarks.machine import cpu_model

KVPRESS = str(Path(sys.executable).with_name("kvpress"))
TEXTS = ("--sequences", "8", "--tokens", "1024")
HEADS = ("--sink-size", "16", "--recent-size", "64", "--steps", "60")
CALIBRATIONS: dict[str, tuple[str, ...]] = {
    "cq.safetensors": ("cq", "--iterations", "20"),
    "kvquant.safetensors": ("kvquant", "--iterations", "20"),
    "aquakv.safetensors": ("aquakv", "--iterations", "10"),
    "oscar.safetensors": ("oscar",),
    "leank.safetensors": ("leank", *HEADS),
    "double_sparsity.safetensors": ("double_sparsity",),
    "expected_attention.safetensors": ("expected_attention",),
    "qfilter.safetensors": ("qfilter",),
    "duo_attention.tsv": ("duo_attention", *HEADS),
    "kvzip_heads.tsv": ("kvzip_heads",),
    "kvzap.safetensors": ("kvzap", "--steps", "500"),
    "kvzap_linear.safetensors": ("kvzap", "--kind", "linear"),
    "fastkvzip.safetensors": ("fastkvzip", "--steps", "500"),
}
"""Arguments of `kvpress calibrate` by the file that they make."""


def calibrate(file: Path, arguments: tuple[str, ...], model: str, data: list[str], limit: float) -> dict[str, Any]:
    """Run one calibration; return its command, seconds, and the bytes of its file, None if it did not end within `limit`."""
    method, *options = arguments
    shown = ["kvpress", "calibrate", method, "--model", model, *TEXTS, *options, "--out", file.name]
    command = [KVPRESS, *shown[1:-1], str(file), "--force", *(f"--data={path}" for path in data)]
    started = time.monotonic()
    try:
        ended = subprocess.run(command, timeout=limit, capture_output=True, text=True, check=False)  # noqa: S603 - ours
        error = "" if ended.returncode == 0 else ended.stderr.strip()[-500:]
    except subprocess.TimeoutExpired:
        error = f"stopped after {limit:.0f} s"
    seconds = round(time.monotonic() - started, 1)
    size = file.stat().st_size if not error else None
    return {"command": shlex.join(shown), "seconds": seconds, "bytes": size, "error": error}


def to_markdown(record: dict[str, Any]) -> str:
    """Return the options, seconds and bytes of each calibration of a record as a Markdown table, fastest first."""
    rows = []
    for row in sorted(record["rows"].values(), key=lambda row: row["seconds"]):
        _, _, method, *arguments = shlex.split(row["command"])
        options = arguments[arguments.index("--tokens") + 2 : arguments.index("--out")]
        size = row["error"] if row["bytes"] is None else f"{row['bytes'] / 1000:,.0f} kB"
        rows.append([" ".join([method, *options]), f"{row['seconds']:.0f}", size])
    return markdown(("calibrate", "seconds", "file"), ["---", "---:", "---:"], rows, "")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--table", type=Path, help="record to print as a table, instead of a measurement")
    parser.add_argument("--data", nargs="+", help="texts to calibrate on")
    parser.add_argument("--files", type=Path, help="folder for the files")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--limit", type=float, default=600, help="longest time of a command, in seconds")
    parser.add_argument("--only", nargs="+", default=[*CALIBRATIONS], choices=[*CALIBRATIONS], help="files to make")
    options = parser.parse_args()
    if options.table:
        print(to_markdown(json.loads(options.table.read_text())))
        return
    if None in (options.data, options.files, options.out):
        parser.error("give --data, --files and --out, or --table")
    options.files.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {"rows": {}}
    record |= {
        "date": date.today().isoformat(), "machine": cpu_model(), "model": options.model, "limit": options.limit,
        "threads": int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1)), "texts": [Path(p).name for p in options.data],
    }  # fmt: skip
    for name in options.only:
        row = calibrate(options.files / name, CALIBRATIONS[name], options.model, options.data, options.limit)
        record["rows"][name] = row
        options.out.write_text(json.dumps(record, indent=1) + "\n")
        print(f"{name:32s} {row['seconds']:7.1f} s {row['error'] or row['bytes']}", flush=True)


if __name__ == "__main__":
    main()
