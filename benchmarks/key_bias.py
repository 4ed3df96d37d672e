# SPDX-License-Identifier: Apache-2.0
"""Divergence of codecs at 3 bits where keys have a large bias, as in models like Qwen2.

    python benchmarks/key_bias.py
    python benchmarks/key_bias.py --model FOLDER

The reference model gets a bias in two slowly turning pairs of rotary channels, which hardly changes its softmax: it adds nearly
the same number to all logits. Printed is the mean divergence from the full cache of the same model, along the tokens after a
prompt, without the bias and with it. Codecs that are calibrated for a model are calibrated for each of the two.

With `--model`, a Llama in a folder reads Python source instead: 64 tokens after 1024, in one pass. A further column has the
bias in two pairs that turn fast, where it is a different vector at every position.
"""

from __future__ import annotations

import argparse
import copy
import inspect
import tempfile
import textwrap
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import kvpress
from kvpress.calibrate import LevelSettings, PredictorSettings, calibrate
from kvpress.calibrate.corpus import documents, pack
from kvpress.hf.models import with_cache

BIAS = 40.0
"""Bias of four channels of every head; keys of the model have a size of about 2."""
TEXT = "".join(
    f" The code for {name} is {code}." + " The old river runs." * 8 for name, code in (("tiger", 4837), ("otter", 9162))
)
STEPS = " The code for otter is 9162. The code for"
DENSE = "residual_length=0,sinks=4"
CODECS = (
    f"kivi:bits=3,{DENSE}",
    f"kivi:bits=3,{DENSE},rotate=true",
    f"squat:bits=3,{DENSE}",
    f"gear:bits=3,{DENSE}",
    f"rotated:bits=3,{DENSE}",
    "kvarn:bits=3,tile_size=32,sinks=4",
    f"turboquant:bits=3,{DENSE}",
    f"saw_int4:bits=3,{DENSE}",
    f"saw_int4:bits=3,block_size=1,{DENSE}",
    f"fp8:{DENSE}",
    f"nvfp4:{DENSE}",
    f"mxfp4:{DENSE}",
)


FITTED = {"kvquant:bits=3": LevelSettings(fisher=False), "aquakv:bits=3": PredictorSettings()}
DATA = Path("kvpress/data/reference/calibration.jsonl")


PRETRAINED = (
    "turboquant:bits=3,residual_length=0",
    "rotated:bits=3,residual_length=0",
    "rotated:bits=4,residual_length=0",
    "kivi:bits=3,residual_length=0",
    "saw_int4",
    "frontier:smaller=10",
    "fp8",
    "mxfp4",
    "gear:bits=3",
    "zipcache",
)
SLOW, FAST = (30, 31, 62, 63), (2, 5, 34, 37)
"""Channels of the bias, of 64: rotary pairs that turn slowly, and that turn fast."""


def with_bias(model: Any, size: float = BIAS, channels: tuple[int, ...] = SLOW) -> nn.Module:
    """Return a copy of a model with heads of 64 channels whose keys have a bias."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        attention = layer.self_attn
        bias = torch.zeros(attention.k_proj.weight.shape[0] // 64, 64)
        for channel in channels:
            bias[:, channel] = size * torch.randn(len(bias), generator=generator).sign()
        attention.k_proj.bias = nn.Parameter(bias.flatten().to(attention.k_proj.weight.dtype))
    return model


@dataclass(frozen=True)
class Exact:
    """Log-probabilities of a model with its full cache, along `steps` after `ids`, token ids `[1, T]`."""

    model: Any
    ids: Tensor
    steps: Tensor
    expected: Tensor

    @classmethod
    def of(cls, model: Any, tokenizer: Any, repeat: int = 1) -> Exact:
        """Read the prompt, which has its text `repeat` times, and the steps at once."""
        ids, steps = (tokenizer(text, return_tensors="pt").input_ids for text in (TEXT * repeat, STEPS))
        with torch.inference_mode():
            logits = model(torch.cat([ids, steps], dim=1)).logits[:, ids.shape[1] :]
        return cls(model, ids, steps, logits.float().log_softmax(-1))

    def divergence(self, spec: str) -> float:
        """Return the mean divergence of the model under a press that reads the steps one by one."""
        with torch.inference_mode(), kvpress.get_press(spec)(self.model):
            cache = self.model(self.ids, use_cache=True).past_key_values
            logits = [self.model(step, **with_cache(cache)).logits for step in self.steps.split(1, dim=1)]
        log_probs = torch.cat(logits, dim=1).float().log_softmax(-1)
        return float((self.expected.exp() * (self.expected - log_probs)).sum(-1).mean())


def divergences(model: Any, ids: Tensor, steps: Tensor) -> list[float]:
    """Return the mean divergence of a model under each press, along steps that are read in one pass after a prompt."""
    presses = [kvpress.get_press(spec) for spec in ("none", *PRETRAINED)]
    rows = []
    for press, cache in zip(presses, kvpress.prefill(model, presses, ids).caches, strict=True):
        with torch.inference_mode(), press(model):
            rows.append(model(steps, **with_cache(cache)).logits.float().log_softmax(-1))
    expected, *others = rows
    return [float((expected.exp() * (expected - compressed)).sum(-1).mean()) for compressed in others]


def pretrained(folder: str, prompt: int = 1024, steps: int = 64) -> None:
    """Print the divergences of a pretrained model without a bias, and with one in channels that turn slowly or fast."""
    model, tokenizer = kvpress.load_model(folder)
    text = inspect.getsource(textwrap) + inspect.getsource(inspect)
    ids = tokenizer(text, return_tensors="pt").input_ids[:, : prompt + steps]
    print(f"{steps} tokens behind {prompt}, bias {BIAS:g}, {date.today().isoformat()}\n")
    print("| codec | without bias | slow | fast |\n|---|---:|---:|---:|", flush=True)
    models = model, with_bias(model, channels=SLOW), with_bias(model, channels=FAST)
    columns = [divergences(network, ids[:, :prompt], ids[:, prompt:]) for network in models]
    for spec, *figures in zip(PRETRAINED, *columns, strict=True):
        print(f"| `{spec}` | {' | '.join(f'{figure:.4f}' for figure in figures)} |")


def main() -> None:
    torch.set_num_threads(1)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="folder of a Llama with heads of 64 channels; the reference model by default")
    folder = parser.parse_args().model
    if folder is not None:
        pretrained(folder)
        return
    model, tokenizer = kvpress.load_model("reference")
    plain, loud = (Exact.of(kind, tokenizer, repeat=4) for kind in (model, with_bias(model)))
    print(f"{plain.steps.shape[1]} tokens behind {plain.ids.shape[1]}, bias {BIAS:g}, {date.today().isoformat()}\n")
    print("| codec | without bias | with it |\n|---|---:|---:|")
    for spec in CODECS:
        print(f"| `{spec}` | {plain.divergence(spec):.4f} | {loud.divergence(spec):.4f} |", flush=True)
    sequences = pack(tokenizer, documents(str(DATA)), 1024, 8)
    with tempfile.TemporaryDirectory() as folder:
        for spec, settings in FITTED.items():
            rows = []
            for name, exact in (("plain", plain), ("loud", loud)):
                path = Path(folder) / f"{settings.method}-{name}.safetensors"
                calibrate(exact.model, sequences, settings, path)
                rows.append(exact.divergence(f"{spec},calibration='{path}'"))
            print(f"| `{spec}` | {rows[0]:.4f} | {rows[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
