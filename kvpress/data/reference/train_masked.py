# SPDX-License-Identifier: Apache-2.0
"""Make a masked-diffusion model of the reference model: the same language, the causal mask removed, answers masked.

    OMP_NUM_THREADS=1 python train_masked.py --out runs/masked --minutes 8

Begins with the reference model's weights. Answers of 16 tokens, filled up with the end token, are masked with a rate drawn for each
row; masked tokens are predicted in their own place, as `kvpress.diffuse` asks. At the end, `diffuse` answers questions
with and without its caches. The mask token is the padding token, 0.
"""

import argparse
import json
import random
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from train import EOS, EVPOOL, Gen, eval_rows
from transformers import AutoModelForCausalLM

import kvpress

ANSWER, MASK = 16, 0
TASKS = ("single", "mk4", "mq", "mv")
WAYS = {
    "none": dict(cache="none"),
    "prefix": dict(cache="prefix"),
    "dual": dict(cache="dual"),
    "dual, refresh_every=4": dict(cache="dual", refresh_every=4),
    "dual, sparse_dllm:0.5": dict(cache="dual", press="sparse_dllm:0.5", full_steps=2),
    "dual, sparse_dllm:0.8": dict(cache="dual", press="sparse_dllm:0.8", full_steps=2),
    "dual, random:0.5": dict(cache="dual", press="random:0.5", full_steps=2),
    "dual, kivi 4 bit": dict(cache="dual", press="kivi:bits=4,residual_length=0"),
    "dual, threshold=0.9": dict(cache="dual", threshold=0.9),
    "dual, threshold=0.5": dict(cache="dual", threshold=0.5),
}


def rows_of(gen, task, length, count):
    """Prompts, padded on the left, and their answers of `ANSWER` tokens: ids `[B, T]`, real `[B, T]`."""
    rows = [(c + q, (a + [EOS] * ANSWER)[:ANSWER]) for c, q, a in eval_rows(gen, task, length, count)]
    longest = max(len(p) for p, _ in rows)
    ids = torch.tensor([[0] * (longest - len(p)) + p + a for p, a in rows])
    real = torch.tensor([[0] * (longest - len(p)) + [1] * (len(p) + ANSWER) for p, a in rows]).bool()
    return ids, real


def loss_of(model, ids, real, draw):
    """Cross-entropy of masked answer tokens, each row weighed by one over its rate, and the share that is right."""
    rate = torch.rand(len(ids), 1, generator=draw).clamp_min(0.1)
    masked = torch.zeros_like(real)
    masked[:, -ANSWER:] = torch.rand(len(ids), ANSWER, generator=draw) < rate
    # A few words of the context too, so that both directions are read.
    context = torch.rand(ids.shape, generator=draw) < 0.15
    masked[:, :-ANSWER] = (context & real)[:, :-ANSWER]
    hidden = torch.zeros(len(ids), 1, 1, ids.shape[1]).masked_fill(~real[:, None, None], -1e9)
    with torch.autocast("cpu", torch.bfloat16):
        states = model.model(
            ids.masked_fill(masked, MASK),
            attention_mask=hidden,
            position_ids=(real.long().cumsum(1) - 1).clamp_min(0),
            use_cache=False,
        ).last_hidden_state
        logits = model.lm_head(states[masked]).float()
    weight = (1 / rate).expand_as(ids).clone()
    weight[:, :-ANSWER] = 0.1
    weight[:, -ANSWER:][ids[:, -ANSWER:] == EOS] *= 0.2
    each = F.cross_entropy(logits, ids[masked], reduction="none")
    answers = (torch.arange(ids.shape[1]) >= ids.shape[1] - ANSWER) & (ids != EOS)
    right = (logits.argmax(-1) == ids[masked])[answers[masked]].float().mean()
    return (each * weight[masked]).sum() / weight[masked].sum(), right


def answered(model, length, count, seed=12345):
    """Share of questions answered right, tokens a pass and bytes held, by way of reading."""
    found = {}
    for way, settings in WAYS.items():
        settings = dict(settings)
        if "press" in settings:
            settings["press"] = kvpress.get_press(settings["press"])
        right, passes, held, total = 0, 0, 0, 0
        for task in TASKS:
            gen = Gen.__new__(Gen)
            gen.r, gen.pool = random.Random(seed), EVPOOL
            ids, real = rows_of(gen, task, length, count)
            out = kvpress.diffuse(
                model,
                ids[:, :-ANSWER],
                ANSWER,
                attention_mask=real[:, :-ANSWER],
                mask_token=MASK,
                block_length=ANSWER,
                **settings,
            )
            right += int((out.sequences[:, -ANSWER:] == ids[:, -ANSWER:]).all(1).sum())
            passes, total = passes + out.forwards, total + count
            held += 0 if out.cache is None else kvpress.memory_report(out.cache).total_bytes
        found[way] = {"right": right / total, "tokens_per_forward": len(TASKS) * ANSWER / passes, "held_bytes": held}
        print(
            f"{way:26} right {right / total:.3f}, {len(TASKS) * ANSWER / passes:.2f} tokens a pass, {held:,} bytes",
            flush=True,
        )
    return found


def measure(model, args):
    """Write what comes of all ways of reading beside the model."""
    found = answered(model, args.length, args.questions)
    written = {"args": {**vars(args), "out": str(args.out)}, "ways": found}
    (args.out / "results.json").write_text(json.dumps(written, indent=1))


def main():
    """Train, save, and measure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--rows", type=int, default=24)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--questions", type=int, default=50)
    parser.add_argument("--measure", action="store_true", help="train nothing: ask the model that --out holds")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.measure:
        measure(AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval(), args)
        return
    torch.manual_seed(args.seed)
    model = AutoModelForCausalLM.from_pretrained(kvpress.reference_path(), dtype=torch.float32)
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n and "lm_head" not in n]
    rest = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    optimizers = [
        torch.optim.Muon(matrices, lr=args.lr, weight_decay=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=args.lr, betas=(0.9, 0.98), weight_decay=0.0),
    ]
    gen, draw = Gen(1 + args.seed), torch.Generator().manual_seed(args.seed)
    started, step, done = time.time(), 0, 0.0
    while done < 1:
        share = min(1, (step + 1) / 20) * max(0.01, min(1, (1 - done) / 0.6))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = args.lr * share
        loss, right = loss_of(model, *rows_of(gen, gen.r.choice(TASKS), args.length, args.rows), draw)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step, done = step + 1, (time.time() - started) / 60 / args.minutes
        if step % 50 == 0:
            print(f"{step} {time.time() - started:.0f}s loss {loss.item():.3f} right {right.item():.3f}", flush=True)
    model.config.mask_token_id = MASK
    model.eval().to(torch.bfloat16).save_pretrained(args.out)
    measure(model.float(), args)


if __name__ == "__main__":
    main()
