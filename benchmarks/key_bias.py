# SPDX-License-Identifier: Apache-2.0
"""Which codecs keep their answers at 3 bits where keys have a large bias, as those of models of the Qwen2 kind do.

    python benchmarks/key_bias.py

The reference model gets a bias in two slowly turning pairs of rotary channels, which its softmax hardly sees: a number that all
logits have in common. Printed is the mean divergence from the full cache of the same model, along the tokens behind a prompt,
without the bias and with it. Codecs that are fitted to a model are fitted to each of the two.
"""

from __future__ import annotations

import copy
import tempfile
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
"""Of four channels of every head; keys of the model have a size of about 2."""
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


def with_bias(model: Any, size: float = BIAS) -> nn.Module:
    """Return a copy of the reference model whose keys have a bias."""
    model = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(3)
    for layer in model.model.layers:
        attention = layer.self_attn
        bias = torch.zeros(attention.k_proj.weight.shape[0] // 64, 64)
        for channel in (30, 31, 62, 63):
            bias[:, channel] = size * torch.randn(len(bias), generator=generator).sign()
        attention.k_proj.bias = nn.Parameter(bias.flatten().to(attention.k_proj.weight.dtype))
    return model


@dataclass(frozen=True)
class Exact:
    """What a model says with its full cache: log-probabilities along `steps` behind `ids`, token ids `[1, T]`."""

    model: Any
    ids: Tensor
    steps: Tensor
    expected: Tensor

    @classmethod
    def of(cls, model: Any, tokenizer: Any, repeat: int = 1) -> Exact:
        """Read the prompt, which says its text so many times, and the steps at once."""
        ids, steps = (tokenizer(text, return_tensors="pt").input_ids for text in (TEXT * repeat, STEPS))
        with torch.inference_mode():
            logits = model(torch.cat([ids, steps], dim=1)).logits[:, ids.shape[1] :]
        return cls(model, ids, steps, logits.float().log_softmax(-1))

    def divergence(self, spec: str) -> float:
        """Mean divergence of the model under a press that reads the steps one by one."""
        with torch.inference_mode(), kvpress.get_press(spec)(self.model):
            cache = self.model(self.ids, use_cache=True).past_key_values
            logits = [self.model(step, **with_cache(cache)).logits for step in self.steps.split(1, dim=1)]
        found = torch.cat(logits, dim=1).float().log_softmax(-1)
        return float((self.expected.exp() * (self.expected - found)).sum(-1).mean())


def main() -> None:
    torch.set_num_threads(1)
    model, tokenizer = kvpress.load_model("reference")
    plain, loud = (Exact.of(kind, tokenizer, repeat=4) for kind in (model, with_bias(model)))
    print(f"{plain.steps.shape[1]} tokens behind {plain.ids.shape[1]}, bias {BIAS:g}, {date.today().isoformat()}\n")
    print("| codec | without bias | with it |\n|---|---:|---:|")
    for spec in CODECS:
        print(f"| `{spec}` | {plain.divergence(spec):.4f} | {loud.divergence(spec):.4f} |", flush=True)
    sequences = pack(tokenizer, documents(str(DATA)), 1024, 8)
    with tempfile.TemporaryDirectory() as folder:
        for spec, settings in FITTED.items():
            found = []
            for name, exact in (("plain", plain), ("loud", loud)):
                path = Path(folder) / f"{settings.method}-{name}.safetensors"
                calibrate(exact.model, sequences, settings, path)
                found.append(exact.divergence(f"{spec},calibration='{path}'"))
            print(f"| `{spec}` | {found[0]:.4f} | {found[1]:.4f} |", flush=True)


if __name__ == "__main__":
    main()
