# SPDX-License-Identifier: Apache-2.0
"""Recall of facts behind every press that acts on a prompt of text, on SmolLM2.

    python -m benchmarks.recall_presses half --out half.json [--length 1024] [--filler noise] [--contexts 4] [--threads 1]
                                        [--take benchmarks/results/recall_smollm2_1024.json ...] [--finished]
    python -m benchmarks.recall_presses evictors --ratio 0.9 --out tenth.json
    python -m benchmarks.recall_presses unseen --out unseen.json --contexts 40
    python -m benchmarks.recall_presses recommended --out prose.json --filler essays --contexts 40
    python -m benchmarks.recall_presses sizes --out essays.json --filler essays --contexts 40
    python -m benchmarks.recall_presses gradient --out gradient.json --contexts 40
    python -m benchmarks.recall_presses narrow --out narrow.json --contexts 40
    python -m benchmarks.recall_presses widths --out widths.json --contexts 8
    python -m benchmarks.recall_presses longer --out longer.json --length 2048 --contexts 40
    python -m benchmarks.recall_presses seen --out seen.json --question-aware
    python -m benchmarks.recall_presses fitted --out fitted.json   (with predictors.safetensors and rotations.safetensors here)
    python -m benchmarks.recall_presses calibrated --out calibrated.json   (in the folder of `benchmarks.calibrations`)
    python -m benchmarks.recall_presses single --out single.json --length 2048 --contexts 8   (in the same folder)
    python -m benchmarks.recall_table half.json --by-size

`half` keeps half of the pairs where a press has a ratio, and its own default size otherwise; `evictors` are those of its
presses that have one. Presses are measured in groups that share the reading of a context. A group that fails is measured
press by press, and the record names the presses that failed with the reason. Rows are stored in `FILE.rows`, so that the same
command continues a run that was stopped, and `--finished` writes the record of what is there. `--take` copies the rows of the
same questions from earlier records. With `--press-seconds`, a press that takes longer is named among those that failed.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from kvpress_eval.common.errors import ConfigError, EvalError
from kvpress_eval.common.files import write_json
from kvpress_eval.config.schema import RunConfig
from kvpress_eval.recall.facts import FactSettings
from kvpress_eval.recall.figures import Margins
from kvpress_eval.recall.measure import measure
from kvpress_eval.results.store import CellStore, read_rows, rows_folder
from kvpress_eval.results.summary import BASELINE
from kvpress_eval.results.verdict import nats, points
from rich.console import Console

GROUP = 6
"""Presses of one group."""
SETTINGS = (
    "schema", "kvpress", "model", "weights", "device", "dtype", "seed", "language", "filler", "question_aware", "facts",
    "values",
)  # fmt: skip
"""Fields of a record that its rows depend on."""
HALF = ":0.5"
"""Ratio in a spec, which `--ratio` replaces."""
EXPECTED = "expected_attention:0.5,epsilon=0.02"
EVICTORS = (
    "snapkv:0.5",
    "snapkv:0.5,window_size=20,kernel_size=21",
    "nacl:0.5",
    "agentkv:0.5",
    "kvcrush(snapkv:0.5)",
    "pyramidkv:0.5",
    "adakv(snapkv:0.5)",
    "criticalkv(snapkv:0.5)",
    "critical_adakv(snapkv:0.5)",
    "chunkkv(snapkv:0.5)",
    "entropy_gated_chunkkv(snapkv:0.5)",
    "cake:0.5",
    "uncomp:0.5",
    "r_kv:0.5",
    "sparse_dllm:0.5",
    "finch:0.5,window_size=64",
    "tova:0.5",
    "h2o:0.5,interval=32",
    "observed_attention:0.5",
    EXPECTED,
    f"adakv({EXPECTED})",
    "compactor:0.5",
    "leverage_score:0.5",
    "non_causal_attn:0.5",
    "keydiff:0.5",
    "block(keydiff:0.5)",
    "key_rerotation(keydiff:0.5)",
    "merging(keydiff:0.5)",
    "chunk(keydiff:0.5):chunk_length=256",
    "bounded(keydiff:0.5):chunk=256",
    "knorm:0.5",
    "cur:0.5",
    "cap:0.5",
    "lagkv:0.5",
    "triattention:0.5",
    "kvmerger:0.5",
    "subgen:0.5",
    "streaming_llm:0.5",
    "random:0.5",
    "duo_attention:0.5,on_the_fly_scoring=true",
    "simlayerkv:0.9,n_recent=128",
    "scope:budget=512",
    "think:0.5",
)
REREADERS = (
    "kvzip:0.5",
    "kvgrad:0.5",
    "refit(kvzip:0.5):ridge=1.0",
    "kvcompose:0.5",
    "attention_matching:0.5",
)
"""Evictors that read the prompt twice."""
CODECS = (
    "fp8",
    "kivi:bits=4",
    "kivi:bits=2",
    "adaquant",
    "kvarn:bits=(4,4)",
    "kvarn",
    "rotated:bits=4",
    "rotated:bits=3",
    "saw_int4",
    "nvfp4",
    "mxfp4",
    "squat:bits=4",
    "squat:bits=2",
    "turboquant:bits=4",
    "turboquant:bits=3",
    "eoptshrinkq:bits=3",
    "eoptshrinkq:bits=2",
    "zipcache",
    "gear:bits=2",
    "gear_l:bits=2",
)
SELECTORS = (
    "quest:budget=128",
    "quest:budget=128,page_size=4",
    "sparq:budget=128",
    "loki:budget=128",
    "infllm_v2:budget=128,block_size=16,kernel_size=8,stride=4,n_sink=16,n_recent=32",
    "tidal_decode:budget=128",
    "twilight(quest:budget=512,page_size=4)",
    "loopserve:budget=128",
    "pqcache:budget=128",
    "pqcache:budget=128,parts=8,bits=8",
    "vattention(quest:budget=128,page_size=4)",
    "vattention(pqcache:budget=128)",
)
SPARSE_PREFILL = (
    "minference:vertical=128,slash=256",
    "flex_prefill",
    "xattention",
    "tri_shape:local=256,last=64",
    "power_attention",
    "critiprefill:budget=512,segment=128,dense=512",
    "zipvl",
)
FRONTIER = tuple(f"frontier:smaller={factor}" for factor in (5, 10, 20, 50))
GRADIENT = tuple(f"{press},passes=3" for press in FRONTIER)
SIZES = (*FRONTIER[:3], "budgeted(compactor):smaller=10")
NARROW = (
    *FRONTIER[2:],
    "budgeted(compactor):smaller=20",
    "budgeted(kvzip:repeat_prompt=):smaller=20",
    "budgeted(refit(kvzip:repeat_prompt=,layerwise=true):ridge=1.0):smaller=20",
)
"""Sizes at which values have 3 bits."""
RECOMMENDED = (
    "kvzip:0.5",
    "frontier:smaller=10",
    "kivi:bits=4",
    "snapkv:0.5",
    "compactor:0.5",
    "keydiff:0.5",
    "quest:budget=128,page_size=4",
)
GATES = "fastkvzip:gates=fastkvzip.safetensors"
PREDICTORS, ROTATIONS = "calibration=predictors.safetensors", "calibration=rotations.safetensors"
FITTED = (
    "snapkv:0.5",
    "compactor:0.5",
    "keydiff:0.5",
    "rotated:bits=3",
    "kivi:bits=2",
    f"vector(snapkv:0.5):{PREDICTORS}",
    f"vector(compactor:0.5):{PREDICTORS}",
    f"vector(keydiff:0.5):{PREDICTORS}",
    *(f"oscar:bits={bits},residual_length=32,sinks=4,{ROTATIONS}" for bits in (4, 3, 2)),
    *(f"saw_int4:bits={bits},residual_length=32,sinks=4" for bits in (4, 2)),
)
"""Presses with a file of the model, in the folder in which the study runs, beside others of their size."""
CALIBRATED = (
    "kivi:bits=4",
    "rotated:bits=4",
    "cq:residual_length=32,calibration=cq.safetensors",
    "kvquant:calibration=kvquant.safetensors",
    "kvquant:bits=3,calibration=kvquant.safetensors",
    "aquakv:calibration=aquakv.safetensors",
    "aquakv:bits=3,calibration=aquakv.safetensors",
    "leank:0.5,sink_size=16,recent_size=64,calibration=leank.safetensors",
    "compactor:0.5",
    EXPECTED,
    "expected_attention_stats:0.5,epsilon=0.02,stats_folder=expected_attention.safetensors",
    "qfilter:0.5,filters=qfilter.safetensors",
    "kvzap:0.5,weights=kvzap.safetensors",
    "adakv(kvzap:0.5,weights=kvzap.safetensors)",
    "kvzap:0.5,model_type=linear,weights=kvzap_linear.safetensors",
    "adakv(kvzap:0.5,model_type=linear,weights=kvzap_linear.safetensors)",
    "fastkvzip:0.5,gates=fastkvzip.safetensors",
    "fastkvzip:0.75,gates=fastkvzip.safetensors",
    *(
        f"frontier:smaller={factor},passes=1{gates}"
        for factor in (5, 10)
        for gates in ("", ",gates=fastkvzip.safetensors")
    ),
    "duo_attention:0.5,on_the_fly_scoring=true",
    "duo_attention:0.5,table=duo_attention.tsv,sink_size=16,recent_size=64",
    "duo_attention:0.5,table=kvzip_heads.tsv,sink_size=16,recent_size=64",
    "quest:budget=128,page_size=4",
    "double_sparsity:budget=128,channels=16,calibration=double_sparsity.safetensors",
)
"""Presses with the files of `benchmarks.calibrations`, in the folder in which the study runs, beside others without a file."""
PAIRS = (
    "refit(kvzip:{},repeat_prompt=,chunk_size=256,kvzip_plus_normalization=true)"
    ":queries=repeat,weights=true,ridge=1,tokens=512"
)
CODES = "rotated:bits={},sinks=1,residual_length=0"
WIDTHS = tuple(
    f"{PAIRS.format(ratio)} + {CODES.format(bits)}"
    for ratios in ((0.652, 0.608), (0.753, 0.722), (0.829, 0.808), (0.936, 0.928))
    for ratio, bits in zip(ratios, (4, "(4,3)"), strict=True)
)
"""`frontier` at 10, 14, 20 and 50 times smaller, with values in 4 and in 3 bits, as its components."""
SINGLE = tuple(
    f"budgeted(refit({scorer}):queries=prefill,ridge=1,weights=true,tokens={tokens}):smaller={smaller}"
    for scorer, smaller in ((GATES, 10), ("compactor", 10), (GATES, 5))
    for tokens in (128, 512)
)
"""`frontier` with a single reading as its components, with values that are fitted to 128 and to 512 queries of each head."""
STUDIES: dict[str, tuple[str, ...]] = {
    "half": (*CODECS, *EVICTORS, *SELECTORS, *SPARSE_PREFILL, *REREADERS, *SIZES),
    "evictors": tuple(press for press in (*EVICTORS, *REREADERS) if HALF in press),
    "gradient": GRADIENT,
    "narrow": NARROW,
    "widths": WIDTHS,
    "single": SINGLE,
    "recommended": RECOMMENDED,
    "sizes": FRONTIER,
    "longer": (*FRONTIER, "rotated:bits=4", "kvzip:0.75", *(press for press in RECOMMENDED if press not in FRONTIER)),
    "fitted": FITTED,
    "calibrated": CALIBRATED,
    "unseen": (
        *FRONTIER,
        "kivi:bits=4",
        "rotated:bits=3",
        "kvzip:0.5",
        "kvzip:0.75",
        "refit(kvzip:0.75):ridge=1.0",
        "kvgrad:0.75",
        "refit(kvzip:0.69):ridge=1 + kivi:bits=4,residual_length=0,group_size=32",
        "refit(kvzip:0.845):ridge=1 + kivi:bits=4,residual_length=0,group_size=32",
        "rotated:bits=4",
        "turboquant:bits=3",
        "kivi:bits=2",
        "compactor:0.5",
        "keydiff:0.5",
        "snapkv:0.5",
        EXPECTED,
        "knorm:0.5",
        "streaming_llm:0.5",
        "random:0.5",
        "quest:budget=128",
        "quest:budget=128,page_size=4",
        "budgeted(compactor):smaller=10",
        *NARROW[2:],
    ),
    "seen": (
        "snapkv:0.75",
        "snapkv:0.75,window_size=20,kernel_size=21",
        "snapkv:0.75,window_size=20",
        "snapkv:0.75,kernel_size=21",
        "pyramidkv:0.75",
        "pyramidkv:0.75,window_size=20,kernel_size=21",
        "adakv(snapkv:0.75)",
        "criticalkv(snapkv:0.75)",
        "chunkkv(snapkv:0.75)",
        "cake:0.75",
        "finch:0.75,window_size=64",
        "kvzip:0.75",
        "compactor:0.75",
        "frontier:smaller=10",
        "tova:0.75",
        "h2o:0.75,interval=32",
        "quest:budget=128",
        "quest:budget=128,page_size=4",
    ),
}
ARTEFACT = "needs a file that is made for the model"
NOT_MEASURED = {
    "block_gtq": ARTEFACT,
    "headkv": ARTEFACT,
    "lukv": ARTEFACT,
    "restorekv": ARTEFACT,
    "rlkv": ARTEFACT,
    "dms": "cuts by a threshold, not to a size",
    "per_layer_compression": "ratios of the layers are the user's",
    "protect": "protects spans that the user names",
    "composed": "combines other presses",
    "offload": "moves pairs, and changes no answer",
    "shotkv": "needs a prompt of examples",
    "cam": "acts on generated tokens",
    "compression_ratio_decoding": "acts on generated tokens",
    "conversation": "acts on turns",
    "decoding": "acts on generated tokens",
    "prefill_decoding": "combines other presses",
    "fastv": "acts on images and videos",
    "must_drop": "acts on images and videos",
    "video_xl2": "acts on videos",
}
"""Presses of status recommended and reproduction that no study measures, with the reason."""


def contexts_of(config: RunConfig) -> set[str]:
    """Return the names of the contexts that a configuration measures."""
    return {f"{length}-{config.seed}-{index}" for length in config.lengths for index in range(config.samples)}


def take_rows(folder: Path, records: Sequence[dict[str, Any]], presses: Collection[str], config: RunConfig) -> int:
    """Store the rows of `presses` on the questions of `config` that earlier records hold; return their number.

    A measurement with other settings than those of the records refuses the folder.
    """
    store = CellStore(folder)
    contexts, taken = contexts_of(config), 0
    with store.claim() as is_claimed:
        if not is_claimed:
            raise SystemExit(f"another process measures into {folder}")
        for record in records:
            rows = [row for row in record["answers"] if row["press"] in presses and row["context"] in contexts]
            stored = store.open({name: record[name] for name in SETTINGS}, [row["sample"] for row in rows])
            for row in rows:
                if row["sample"] not in stored:
                    store.append(row)
                    taken += 1
    return taken


def measure_all(
    config: RunConfig,
    presses: Sequence[str],
    facts: FactSettings,
    folder: Path,
    console: Console,
    finished_only: bool = False,
    press_seconds: float | None = None,
) -> dict[str, Any]:
    """Return the record of `presses`, and under `failed` the presses without figures, each with its error.

    With `finished_only` nothing is measured, and the record holds the presses whose rows are stored for all contexts.
    """
    margins = Margins(points(3), nats(0.05))
    failed: dict[str, str] = {}
    started = time.monotonic()

    def measure_group(group: Sequence[str]) -> None:
        begun = time.monotonic()
        try:
            record = measure(
                config.model_copy(update={"presses": tuple(group)}), facts, margins, console, folder, press_seconds
            )
        except (ConfigError, EvalError) as error:
            if len(group) > 1:
                for press in group:
                    measure_group([press])
            else:
                failed[group[0]] = str(error)
                console.print(f"failed: {group[0]}: {error}", soft_wrap=True)
        else:
            failed.update({stopped["press"]: stopped["sentence"] for stopped in record["stopped"]})
            console.print(f"{time.monotonic() - begun:.0f} s: {', '.join(group)}", soft_wrap=True)

    if not finished_only:
        for first in range(0, len(presses), GROUP):
            measure_group(presses[first : first + GROUP])
    contexts = contexts_of(config)  # an earlier run may have measured more
    rows = Counter(row["press"] for row in read_rows(folder / "rows.jsonl")[0] if row["context"] in contexts)
    finished = tuple(press for press in presses if rows[press] == config.samples)
    record = measure(config.model_copy(update={"presses": finished}), facts, margins, console, folder)
    return {**record, "failed": failed, "seconds": round(time.monotonic() - started, 1)}


def main() -> None:
    """Measure a study and write its record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--filler", default="noise")
    parser.add_argument("--contexts", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--question-aware", action="store_true")
    parser.add_argument("--ratio", type=float, help="share of pairs to evict instead of half of them")
    parser.add_argument("--take", type=Path, nargs="+", default=[], help="records whose rows are copied")
    parser.add_argument(
        "--finished", action="store_true", help="measure nothing, and write the presses that are finished"
    )
    parser.add_argument("--press-seconds", type=float, help="longest time of a press over all contexts")
    options = parser.parse_args()
    config = RunConfig(
        model=options.model,
        presses=("none",),
        lengths=(options.length,),
        samples=options.contexts,
        filler=options.filler,
        threads=options.threads,
        question_aware=options.question_aware,
    )
    presses = STUDIES[options.study]
    if options.ratio is not None:
        presses = tuple(press.replace(HALF, f":{options.ratio}") for press in presses)
    console = Console(stderr=True)
    folder = rows_folder(options.out)
    if options.take:
        earlier = [json.loads(path.read_text()) for path in options.take]
        count = take_rows(folder, earlier, {BASELINE, *presses}, config)
        console.print(f"rows taken from earlier records: {count}")
    record = measure_all(config, presses, FactSettings(), folder, console, options.finished, options.press_seconds)
    write_json(options.out, record)


if __name__ == "__main__":
    main()
