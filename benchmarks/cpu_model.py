# SPDX-License-Identifier: Apache-2.0
"""Decode steps of a whole model, ours and those of other libraries, for `benchmarks/cpu_peers.py`.

The model, the random pairs and the caches of transformers are those of `benchmarks/decode.py`, in bfloat16.
"""

from __future__ import annotations

import fcntl
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.cpu_turns import Array, Built, Contender, Setting

EMPTY = 8
"""Tokens in a nearly empty cache, which shows the time of a token without attention."""
TOKEN = 5
ROOM = 512
"""Number of tokens that turns may add."""
STREAMED = 0
WARM_STEPS, STEPS = 1, 4


def prompt_of(setting: Setting) -> list[int]:
    """Return the token ids of a prompt."""
    ids: list[int] = np.random.default_rng(0).integers(3, 1000, setting.prompt).tolist()
    return ids


def exact(setting: Setting) -> Array:
    """Return the logits of the model in float32 over the same pairs, one token per level, [levels, vocabulary]."""
    import torch
    from transformers import DynamicCache

    from benchmarks import decode
    from kvpress.hf.models import with_cache

    model = decode.build_model().float()
    cache = DynamicCache()
    for layer in range(8):
        cache.update(*(side.float() for side in decode.random_pairs(setting.tokens, layer)), layer)
    with torch.no_grad():
        logits = [model(torch.tensor([[TOKEN]]), **with_cache(cache)).logits[0, -1] for _ in setting.levels]
    answer: Array = torch.stack(logits).numpy()
    return answer


def in_torch(name: str, setting: Setting) -> Built:
    """Build one of our presses by its spec, or a cache of transformers by its name."""
    import torch
    from transformers import DynamicCache, QuantizedCache, StaticCache

    import kvpress
    from benchmarks import decode
    from kvpress.hf.models import with_cache

    torch.set_num_threads(setting.threads)
    model = decode.build_model()
    theirs: dict[str, Callable[[], Any]] = {
        "static": lambda: StaticCache(config=model.config, max_cache_len=max(setting.tokens, setting.prompt) + ROOM),
        "quanto": lambda: QuantizedCache(backend="quanto", config=model.config, nbits=4),
    }
    press = None if name in theirs else decode.press_of(name)
    if press is None:
        cache = decode.fill(theirs[name](), setting.tokens)
        size = decode.held_bytes(cache)
    else:
        cache = decode.ours(model, press, setting.tokens)
        size = kvpress.memory_report(cache).total_bytes

    @torch.no_grad()
    def run(ids: list[int], cache: Any) -> Array:
        extra: dict[str, Any] = {}
        if name == "quanto":  # with an explicit mask, attention takes the faster of its paths
            seen = cache.get_seq_length()
            extra["attention_mask"] = torch.ones(len(ids), seen + len(ids), dtype=torch.bool).tril(seen)[None, None]
        logits = model(torch.tensor([ids]), **with_cache(cache), logits_to_keep=1, **extra).logits[0, -1]
        answer: Array = logits.float().numpy()
        return answer

    def around() -> AbstractContextManager[object]:
        return nullcontext() if press is None else kvpress.reading(model, press)

    def prefill() -> object:
        if press is None:
            return run(prompt_of(setting), theirs[name]())
        with press(model):
            return run(prompt_of(setting), DynamicCache(config=model.config))

    return Built(lambda: run([TOKEN], cache), size, around, prefill)


def llama(kind: str, flash: bool, setting: Setting) -> Built:
    """llama.cpp on the same model."""
    from benchmarks import cpu_llama

    folder = Path(setting.folder)
    model, pairs = folder / "model.gguf", folder / f"pairs-{setting.tokens}.npy"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (model.exists() and pairs.exists()):  # made by a process that ends: this one should not hold torch
            command = [sys.executable, "-m", "benchmarks.cpu_llama", str(model), str(setting.tokens), str(pairs)]
            subprocess.run(command, check=True)  # noqa: S603 - our own module
    context = cpu_llama.Context(model, max(setting.tokens, setting.prompt) + ROOM, kind, flash, setting.threads)
    size = context.restore(np.load(pairs, mmap_mode="r"))

    def prefill() -> object:
        context.clear()
        return context.read(prompt_of(setting))

    return Built(lambda: context.read([TOKEN]), size, prefill=prefill)


def empty(build: Callable[[Setting], Built]) -> Contender:
    """Return a contender whose cache is nearly empty."""

    def prepare(setting: Setting) -> Built:
        return replace(build(replace(setting, tokens=EMPTY)), prefill=None)

    return Contender(None, prepare, judged=False, every_level=False)


CONTENDERS: dict[str, Contender] = {
    "ours empty": empty(partial(in_torch, "none")),
    "ours dense": Contender(16, partial(in_torch, "none")),
    "ours int8": Contender(8, partial(in_torch, "kivi:bits=8")),
    "ours int4": Contender(4, partial(in_torch, "kivi:bits=4")),
    # Codebooks and channels are random here, which cost as much to read as calibrated ones.
    "ours CQ 8c8b": Contender(1, partial(in_torch, "cq:coupled=8"), judged=False),
    "ours selection 1/16": Contender(None, partial(in_torch, "double_sparsity"), judged=False),
    "transformers empty": empty(partial(in_torch, "static")),
    "transformers static": Contender(16, partial(in_torch, "static")),
    "quanto 4 bits": Contender(4, partial(in_torch, "quanto")),
    "llama.cpp empty": empty(partial(llama, "f16", False)),
    "llama.cpp f16": Contender(16, partial(llama, "f16", False)),
    "llama.cpp f16 flash": Contender(16, partial(llama, "f16", True)),
    "llama.cpp q8_0 flash": Contender(8, partial(llama, "q8_0", True)),
    "llama.cpp q4_0 flash": Contender(4, partial(llama, "q4_0", True)),
}
