# SPDX-License-Identifier: Apache-2.0
"""All codecs side by side at equal measured bits: divergence along decoding and accuracy, on the reference model.

    python benchmarks/codecs.py [--samples 4] [--texts 4] [--tokens 128] [--out benchmarks/results/codecs.json] [--figures docs]
    python benchmarks/codecs.py --methods turboquant block_gtq --out some.json [...]

A codec is placed by the bytes that it holds after the context was read, windows, scales and codebooks included. The dense tail
is 32 to 95 tokens for every codec, and scales belong to 64 channels or tokens, the head dim of the model, where a codec has a
choice. A test asserts that every codec of the registry is in the list.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from kvpress_eval.common.files import replace_file
from kvpress_eval.results.summary import summarise

from benchmarks.quality import EXACT_TASKS, Sizes, about, accuracy_row, divergences, measure_tasks
from benchmarks.quality_figures import bits_table, draw_bits, write_figure

TAIL = "residual_length=32"
METHODS: dict[str, list[str]] = {
    "kivi": [f"kivi:bits={b},group_size=64,{TAIL}" for b in (8, 4, 3, 2, 1)],
    "kivi, rotated": [f"kivi:bits={b},group_size=64,{TAIL},rotate=true" for b in (4, 3, 2)],
    "adaquant": [f"adaquant:bits=({k},{v}),{TAIL}" for k, v in ((8, 4), (4, 3), (3, 2))],
    "squat": [f"squat:bits={b},group_size=64,{TAIL}" for b in (4, 3, 2)],
    "kvarn": [f"kvarn:bits={b},tile_size=64,sinks=4,{TAIL}" for b in ("(4,2)", "3", "2")],
    "saw_int4": [f"saw_int4:bits={b},{TAIL}" for b in (8, 4, 3, 2)],
    "rotated": [f"rotated:bits={b},{TAIL}" for b in (8, 4, 3, 2, 1)],
    "turboquant": [f"turboquant:bits={b},{TAIL}" for b in (4, 3, 2, 1)],
    "eoptshrinkq": [f"eoptshrinkq:bits={b},{TAIL}" for b in (4, 3, 2)],
    "block_gtq": [f"block_gtq:bits={b},sinks=0,{TAIL}" for b in (4, 3, 2, 1)],
    "floats": [f"fp8:{TAIL}", f"nvfp4:{TAIL}", f"mxfp4:{TAIL}"],
    "gear": [f"gear:bits={b},{TAIL}" for b in (4, 2)],
    "gear_l": [f"gear_l:bits={b},{TAIL}" for b in (4, 2)],
    "zipcache": [f"zipcache:bits={high},low_bits={low},interval=64,{TAIL}" for high, low in ((4, 2), (3, 2))],
    "kvquant": [f"kvquant:bits={b},{TAIL}" for b in (4, 3, 2)],
    "kvquant, no outliers": [f"kvquant:bits={b},outliers=0,{TAIL}" for b in (4, 3, 2)],
    "aquakv": [f"aquakv:bits={b},{TAIL}" for b in ("4", "3", "(3,2)", "2")],
    "oscar": [f"oscar:bits={b},sinks=4,{TAIL}" for b in (4, 3, 2)],
    "cq": [f"cq:coupled={channels},{TAIL}" for channels in (4, 8)],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4, help="samples of each task and length")
    parser.add_argument("--texts", type=int, default=4, help="texts whose next tokens are compared")
    parser.add_argument("--tokens", type=int, default=128, help="tokens that are read after the context of each text")
    parser.add_argument(
        "--methods", nargs="+", choices=METHODS, default=[], help="only these methods, without a figure"
    )
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/codecs.json"))
    parser.add_argument("--figures", type=Path, default=Path("docs"), help="folder of the PNG")
    parser.add_argument("--runs", type=Path, default=Path("runs/codecs"), help="folder of finished cells")
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes = Sizes(options.samples, texts=options.texts, tokens=options.tokens)
    presses = tuple(spec for name in options.methods or METHODS for spec in METHODS[name])
    moved = divergences(presses, sizes, options.runs)
    result = measure_tasks(("none", *presses), EXACT_TASKS, sizes.lengths, sizes, options.runs)
    full, *summaries = summarise(result.cells)
    of = {spec: method for method, specs in METHODS.items() for spec in specs}
    for row in moved.values():
        del row["kl_by_token"]
    rows = [{"method": of[s.press], **accuracy_row(s), **moved[s.press]} for s in summaries]
    study = {**about(result), "sizes": vars(sizes), "full": accuracy_row(full), "rows": rows}
    replace_file(options.out, (json.dumps(study, indent=1) + "\n").encode())
    if not options.methods:
        write_figure(options.figures / "codecs_bits.png", draw_bits, study, 13.0)
    print(bits_table(study))


if __name__ == "__main__":
    main()
