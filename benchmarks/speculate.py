# SPDX-License-Identifier: Apache-2.0
"""Speculation with a partial cache as the draft: tokens per round, time per token against plain decoding, and memory.

python benchmarks/speculate.py --out benchmarks/results/speculate.json
python benchmarks/speculate.py --random --length 32768 --layers 8 --rounds 1 --tokens 48 --threads 1 \
    --drafts streaming_llm:0.9 "quest, 1/16" --out benchmarks/results/speculate_32k.json
python benchmarks/speculate.py --model smollm2 --length 4096 --threads 2 --costs 15 \
    --drafts streaming_llm:0.9 snapkv:0.9 kivi:bits=4 "quest, 1/16" --out benchmarks/results/speculate_smollm2.json

The first command uses the reference model, which recalls codes from its context. With --random the model is a random Llama in
bfloat16: its text has no meaning, so that a draft is accepted only where its pairs give the same tokens, and mostly the cost of
rounds and memory is measured. Other models continue the source of Python's own modules. Plain decoding is timed under the same
press, without the prompt, in turns with speculation; with --rounds 1 once for all drafts. Every timing reads the prompt again,
which takes most of the time at such a length: three times in the second command.

With --costs, the parts of a round are timed by themselves, behind one filled cache and in turns: a step of each draft that is a
press, the verification of all proposed tokens and the next, and a step without speculation. Their ratios bound the gain.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from kvpress_eval.tasks.texts import read_text
from torch import Tensor
from transformers import TextStreamer

import kvpress
from benchmarks.handover import build, write_rows
from benchmarks.real_decode import PLAIN, InTorch, ratios
from kvpress import Draft, PartialVerification, RetrievedChunks, RetrievedPassages
from kvpress.hf.models import with_cache

VERIFICATION = "verification"


def drafts(length: int) -> dict[str, Any]:
    """Return the drafts that are measured after prompts of a length."""
    budget = max(32, length // 16)
    return {
        "streaming_llm:0.9": "streaming_llm:0.9",
        "snapkv:0.9": "snapkv:0.9",
        "kivi:bits=2": "kivi:bits=2",
        "kivi:bits=4": "kivi:bits=4",
        "quest, 1/16": f"quest:budget={budget},skip_layers=0",
        "chunks, 1/16": Draft(retrieve=RetrievedChunks(chunk=16, chunks=budget // 16)),
        "passages, 1/8": Draft(retrieve=RetrievedPassages(chunk=32, least=64, query=32)),
        "constant, 1/16": Draft.constant(window=budget),
    }


class Clock(TextStreamer):
    """Records the time of each token."""

    def __init__(self) -> None:
        self.at: list[float] = []

    def put(self, value: Tensor) -> None:
        del value
        self.at.append(time.perf_counter())

    def end(self) -> None:
        """Do nothing, as there is no text to print."""


def plain(model: Any, ids: Tensor, press: str, tokens: int) -> tuple[Tensor, float]:
    """Return the tokens of plain decoding, and its seconds per token after the first."""
    clock = Clock()
    with kvpress.get_press(press)(model):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, do_sample=False, streamer=clock
        )
    return output, (clock.at[-1] - clock.at[1]) / max(1, len(clock.at) - 2)


def prompt(tokenizer: Any, length: int) -> Tensor:
    """Return a text of about `length` tokens, with codes in it that the reference model recalls."""
    codes = " The code for tiger is 4837. The code for apple is 1192. The code for otter is 7718."
    filler = tokenizer(" The old river runs near the green hill.", add_special_tokens=False)["input_ids"]
    text = codes + " The old river runs near the green hill." * (length // len(filler)) + " The code for tiger is"
    return tokenizer(text, return_tensors="pt")["input_ids"]


def source_text(tokenizer: Any, length: int) -> Tensor:
    """Return `length` tokens of the source of Python's own modules."""
    text = "\n".join(read_text("stdlib").spread(4000))[: 8 * length]
    ids: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
    return ids[:, :length]


@torch.no_grad()
def passes(contender: InTorch, tokens: Tensor, start: int, steps: int = 4) -> float:
    """Return the median seconds of a pass of `tokens [1, n]` behind a copy of a cache; the first of them is not counted."""
    cache, times = copy.deepcopy(contender.cache), []
    with contender.block():
        for step in range(steps + 1):
            first = start + step * tokens.shape[1]
            positions = torch.arange(first, first + tokens.shape[1])[None]
            began = time.perf_counter()
            contender.model(tokens, position_ids=positions, use_cache=True, **with_cache(cache))
            times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def costs(model: Any, ids: Tensor, presses: Sequence[str], proposed: int, rounds: int) -> dict[str, list[float]]:
    """Return the times of draft steps, by press, and of a verification, as multiples of a plain step: median and range."""
    contenders = {name: InTorch(model, name) for name in (PLAIN, *presses)}
    for contender in contenders.values():
        contender.read(ids[:, :-1])
    newest, after = ids[:, -1:], ids.shape[1] - 1
    times: dict[str, list[float]] = {}
    for _ in range(rounds):
        for name, contender in contenders.items():
            times.setdefault(name, []).append(passes(contender, newest, after))
        verified = passes(contenders[PLAIN], newest.expand(1, proposed + 1), after)
        times.setdefault(VERIFICATION, []).append(verified)
    over_plain = {name: ratios(seconds, times[PLAIN]) for name, seconds in times.items() if name != PLAIN}
    return {name: [statistics.median(over), over[0], over[-1]] for name, over in over_plain.items()}


def measured(
    model: Any, ids: Tensor, press: str, tokens: int, rounds: int, proposed: int, only: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return a row for every draft, or those of `only`, plain decoding timed with each; with one round, timed once for all.

    Raises:
        ValueError: there is no draft of such a name.
    """
    rows = []
    named: list[tuple[str, Any, PartialVerification | None]] = [
        (name, d, None) for name, d in drafts(ids.shape[1]).items()
    ]
    selector = f"quest:budget={max(32, ids.shape[1] // 8)},skip_layers=0"
    named.append(("partial verification", "streaming_llm:0.9", PartialVerification(selector, refresh=4)))
    unknown = set(only) - {name for name, *_ in named}
    if unknown:
        raise ValueError(
            f"drafts must be some of {', '.join(repr(name) for name, *_ in named)}, got {', '.join(map(repr, sorted(unknown)))}"
        )
    once = plain(model, ids, press, tokens) if rounds == 1 else None
    for name, setting, verify in named:
        if only and name not in only:
            continue
        draft = setting if isinstance(setting, Draft) else Draft(setting)
        draft = Draft(draft.press, draft.model, proposed, draft.retrieve)
        took: list[list[float]] = [[], []]
        for _ in range(rounds):
            expected, seconds = once or plain(model, ids, press, tokens)
            took[0].append(seconds)
            result = kvpress.speculate(
                model, ids, draft=draft, press=press, verify=verify, max_new_tokens=tokens, do_sample=False
            )
            took[1].append(result.seconds / max(1, result.tokens - 1))
        ours, theirs = (sorted(times)[len(times) // 2] for times in reversed(took))
        rows.append({
            "draft": name, "setting": setting if isinstance(setting, str) else None,
            "press": press, "length": ids.shape[1], "tokens": result.tokens, "proposed": proposed,
            "same": bool(result.sequences.shape == expected.shape and (result.sequences == expected).all()),
            "tokens_per_round": result.tokens_per_round, "acceptance": result.acceptance,
            "seconds": ours, "plain_seconds": theirs,
            "target_bytes": result.target_bytes, "draft_bytes": result.draft_bytes,
        })  # fmt: skip
        print(
            f"{name:22} {result.tokens_per_round:4.1f} tokens a round ({result.acceptance:4.0%} accepted), "
            f"{1e3 * ours:7.1f} ms a token, plain {1e3 * theirs:7.1f}: {theirs / ours:4.2f} times as fast, "
            f"{result.draft_bytes / result.target_bytes:4.0%} more memory, {'same' if rows[-1]['same'] else 'other'} tokens",
            flush=True,
        )
    return rows


def presses_of(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return the presses of the drafts of some rows that are one press each."""
    return [row["setting"] for row in rows if row["setting"] is not None]


def bound(rows: Sequence[dict[str, Any]], parts: dict[str, list[float]], proposed: int) -> None:
    """Put the costs of a round's parts into the rows, and the speed that a round without any other cost would have."""
    for row in rows:
        if row["setting"] is None:
            continue
        row["draft_step"], row["verification"] = parts[row["setting"]], parts[VERIFICATION]
        row["times_as_fast"] = row["tokens_per_round"] / (proposed * row["draft_step"][0] + row["verification"][0])
        print(
            f"{row['draft']:22} a draft step takes {row['draft_step'][0]:.2f} and a verification {row['verification'][0]:.2f} "
            f"plain steps: at most {row['times_as_fast']:.2f} times as fast",
            flush=True,
        )


def main(arguments: list[str] | None = None) -> None:
    """Print a line for every draft, and write all as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", action="store_true", help="a random model instead of --model")
    parser.add_argument("--model", default="reference")
    parser.add_argument("--length", type=int, default=900)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--press", default="none", help="press of the model itself")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--proposed", type=int, default=4, help="tokens of the draft in every round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--drafts", nargs="+", default=(), metavar="NAME", help="drafts to measure, such as snapkv:0.9; all by default"
    )
    parser.add_argument("--costs", type=int, default=0, metavar="ROUNDS", help="rounds in which parts are timed")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args(arguments)
    torch.set_num_threads(args.threads)
    if args.random:
        model = build(args.layers, args.hidden)
        ids = torch.randint(3, 512, (1, args.length), generator=torch.Generator().manual_seed(1))
    else:
        model, tokenizer = kvpress.load_model(args.model, dtype=torch.float32)
        ids = (prompt if args.model == "reference" else source_text)(tokenizer, args.length)
    rows = measured(model, ids, args.press, args.tokens, args.rounds, args.proposed, args.drafts)
    if args.costs:
        parts = costs(model, ids, presses_of(rows), args.proposed, args.costs)
        bound(rows, parts, args.proposed)
    if args.out:
        write_rows(args.out, rows)


if __name__ == "__main__":
    main()
