# SPDX-License-Identifier: Apache-2.0
"""Two processes share the heads of a model (tensor parallel): every press keeps the pairs and gives the tokens of one."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

import kvpress
from kvpress.hf.model_files import folder_of
from kvpress.hf.models import with_cache
from kvpress.testing.models import random_model
from tests.goldens import specs
from tests.models import padded_batch, tiny_model
from tests.test_runahead import together

STEPS, DECODING_STEPS = 2, 4
"""Generated tokens, and those under presses that evict while tokens are generated."""
SIZES = {"num_attention_heads": 8, "num_key_value_heads": 4}
LENGTHS = {"random": [52, 64], "reference": [262, 270]}
"""Tokens of the two rows that a model reads."""
EXTRA = (
    "adakv(tova:0.5)",
    "decoding(adakv(snapkv:window_size=4)):target_size=20,compression_interval=4",
    "protect(adakv(knorm:0.5)):tokens=3:9",
    "headkv:0.5,window_size=4,table={folder}/kv.tsv",
    "headkv:0.5,window_size=4,table={folder}/queries.tsv",
    "duo_attention:0.5,table={folder}/kv.tsv,sink_size=4,recent_size=8",
    "lukv(knorm:0.5):curve={folder}/curve.npy",
    "frontier:bytes=20KB",
    "fastv:0.5,layer=1,tokens=4:40",
    "must_drop:all_below=0.1,each_below=0.5,layers=(0,1),tokens=4:40",
    "per_layer_compression(knorm):compression_ratios=(0.7,0.5,0.3)",
)
"""Specs for the random model of presses whose registered ones need files or more layers."""
UNAVAILABLE = ("frontier:bytes=12KB",)
"""Specs that neither model can run; `EXTRA` has others of these presses."""
REFUSED = {"restorekv": "tensor parallel divides", "entropy_gated_chunkkv": "tensor parallel divides"}
"""Reason of the refusal under tensor parallel, by the name of a press."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the random model and with tables of its heads."""
    folder = tmp_path_factory.mktemp("tensor_parallel")
    tiny_model("llama", norms=0.3, **SIZES).save_pretrained(folder / "random")
    numbers = torch.Generator().manual_seed(0)
    for name, heads in (("kv", 4), ("queries", 8)):
        rows = torch.rand(3, heads, generator=numbers).tolist()
        (folder / f"{name}.tsv").write_text("\n".join("\t".join(map(str, row)) for row in rows))
    np.save(folder / "curve.npy", torch.rand(99, 3, 4, generator=numbers).sort(dim=0).values.numpy())
    return folder


def load(folder: Path, name: str, **settings: Any) -> Any:
    """Load a model in float32, to generate without end."""
    path = folder_of("reference") if name == "reference" else folder / name
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers prefers another argument for the plan
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **settings).eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    return model


def outcome(model: Any, name: str, spec: str) -> tuple[Any, ...]:
    """Return the generated tokens, the stored pairs of every layer and the memory report; or the error as a text."""
    ids, mask = padded_batch(LENGTHS[name])
    torch.manual_seed(0)
    press = kvpress.get_press(spec)
    steps = DECODING_STEPS if any(step.acts_in("decode") for step in press.recipe().evictions) else STEPS
    try:
        with warnings.catch_warnings(), press(model), torch.no_grad():
            warnings.simplefilter("ignore")
            result = model.generate(
                ids, attention_mask=mask, max_new_tokens=steps, do_sample=False, return_dict_in_generate=True
            )
    except (ValueError, TypeError, OSError, NotImplementedError) as error:
        return (str(error),)
    cache = result.past_key_values
    stored = [layer.store.stored() for layer in cache.layers]
    return result.sequences[:, ids.shape[1] :].tolist(), stored, kvpress.memory_report(cache)


def distributed(rank: int, folder: Path, name: str) -> Any:
    """Load the part of a model that a process of the group holds."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="0")
    return load(folder, name, tp_plan="auto")


def run_all(rank: int, report: Callable[[Any], None], folder: Path, jobs: list[tuple[str, str]]) -> None:
    """Report the outcome of each job, a model and a spec, with the report of memory over both ranks."""
    models: dict[str, Any] = {}
    for name, spec in jobs:
        if name not in models:
            models[name] = distributed(rank, folder, name)
        result = outcome(models[name], name, spec)
        report((spec, *result, result[-1].over_ranks() if len(result) > 1 else None))


def jobs_of(folder: Path) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """Yield the model, the spec and the outcome in one process of every registered spec that either model can run."""
    models = {name: load(folder, name) for name in LENGTHS}
    for spec in (*specs(), *(spec.format(folder=folder) for spec in EXTRA)):
        for name, model in models.items():
            result = outcome(model, name, spec)
            if len(result) > 1:
                yield name, spec, result
                break
        else:
            assert spec in UNAVAILABLE, f"{spec}: {result[0]}"


def by_rows(ranks: list[list[int]]) -> list[int]:
    """Return the stored pairs of the streams of both rows, in the order of one process, from those of each rank."""
    heads = len(ranks[0]) // 2
    return [count for row in range(2) for counts in ranks for count in counts[row * heads : (row + 1) * heads]]


def test_every_press_equals_one_process(folder: Path, tmp_path: Path) -> None:
    runs = list(jobs_of(folder))
    ranks = together(run_all, tmp_path, 2, folder, [(name, spec) for name, spec, _ in runs], seconds=400)
    results = [{spec: result for spec, *result in reports} for reports in ranks]
    wrong = {}
    for _, spec, (tokens, stored, single) in runs:
        first, second = (result.get(spec) for result in results)
        if first is None or second is None:
            wrong[spec] = "a process ended before it"
        elif (reason := REFUSED.get(spec.partition("(")[0].partition(":")[0])) is not None:
            assert reason in first[0]
            assert reason in second[0]
        elif len(first) < 4 or len(second) < 4:
            wrong[spec] = first[0]
        elif [by_rows(list(layer)) for layer in zip(first[1], second[1], strict=True)] != stored:
            wrong[spec] = "other pairs are kept"
        elif not first[0] == second[0] == tokens:
            wrong[spec] = "other tokens are generated"
        elif (first[3].kept, first[3].uncompressed_bytes) != (single.kept, single.uncompressed_bytes):
            wrong[spec] = "the reports of both ranks do not add up to that of one process"
    assert wrong == {}


def files(rank: int, report: Callable[[Any], None], folder: Path) -> None:
    """Report the tokens after a file is loaded again by its rank, and the errors of other readers."""
    model = distributed(rank, folder, "random")
    ids, _ = padded_batch([40])
    question, tokens = torch.tensor([[5, 9, 14]]), []
    with kvpress.get_press("adakv(knorm:0.5)")(model):
        cache = model(ids, use_cache=True).past_key_values
    kvpress.save(cache, folder / f"rank{rank}.kvpress", model)
    torch.distributed.barrier()
    uncompressed = kvpress.memory_report(cache).uncompressed_bytes
    for source in (cache, kvpress.load(folder / f"rank{rank}.kvpress", model)):
        tokens.append(answer(model, question, source))
    try:
        kvpress.load(folder / f"rank{1 - rank}.kvpress", model)
        error = ""
    except ValueError as caught:
        error = str(caught)
    report((tokens, error, uncompressed))


def answer(model: Any, question: Tensor, cache: Any) -> list[list[int]]:
    """Return the most likely token after each token of a question behind a cache."""
    with kvpress.reading(model):
        output = model(question, use_cache=True, **with_cache(cache))
    tokens: list[list[int]] = output.logits.argmax(-1).tolist()
    return tokens


def test_cache_files_belong_to_their_rank(folder: Path, tmp_path: Path) -> None:
    ranks = [reports[0] for reports in together(files, tmp_path, 2, folder)]
    for rank, ((before, after), error, uncompressed) in enumerate(ranks):
        assert before == after == ranks[0][0][0]
        assert f"heads 'those of rank {1 - rank} of 2' (here 'those of rank {rank} of 2')" in error
        assert uncompressed == 40 * 3 * 2 * 2 * 32 * 4  # half of the 4 KV heads
    with pytest.raises(ValueError, match="heads 'those of rank 0 of 2'"):
        kvpress.load(folder / "rank0.kvpress", load(folder, "random"))


def prefix_store(rank: int, report: Callable[[Any], None], folder: Path) -> None:
    """Report the answers behind a prefix that is read, found, and read again once a rank has lost its file."""
    model = distributed(rank, folder, "random")
    store, (ids, _) = kvpress.PrefixStore(folder / "store"), padded_batch([40])
    answers = []
    for lost in (None, None, 1, 0):
        own_folder = store._folder(model, "adakv(knorm:0.5)")  # all ranks compute the digest of the weights
        if lost == rank:
            next(own_folder.glob("*.kv")).unlink()
        torch.distributed.barrier()
        cache = store.read(model, "adakv(knorm:0.5)", ids)
        answers.append((answer(model, torch.tensor([[5, 9, 14]]), cache), store.hits))
    report(answers)


def test_ranks_find_a_prefix_together(folder: Path, tmp_path: Path) -> None:
    """A rank that has lost its file makes all ranks read the prompt again; another number of ranks finds nothing."""
    first, second = (reports[0] for reports in together(prefix_store, tmp_path, 2, folder))
    assert first == second
    assert [hits for _, hits in first] == [0, 1, 1, 1]
    assert len({str(tokens) for tokens, _ in first}) == 1
    store, (ids, _) = kvpress.PrefixStore(folder / "store"), padded_batch([40])
    model = load(folder, "random")
    assert len(store) == 2
    assert store.find(model, "adakv(knorm:0.5)", ids) is None
    assert answer(model, torch.tensor([[5, 9, 14]]), store.read(model, "adakv(knorm:0.5)", ids)) == first[0][0]


def refused(rank: int, report: Callable[[Any], None], folder: Path, names: Sequence[str]) -> None:
    """Report the errors of models whose pairs ranks cannot share."""
    messages = []
    for name in names:
        model = distributed(rank, folder, name)
        with pytest.raises(NotImplementedError) as caught, kvpress.get_press("knorm:0.5")(model):
            pass
        messages.append(str(caught.value))
    report(messages)


LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 16,
}
REFUSED_MODELS = {
    "odd": "has 3 KV heads, which 2 ranks cannot hold in equal parts; choose a number of ranks that divides 3",
    "olmo2": "gathers the keys of all heads on every rank",
    "minicpm3": "caches latents, which every rank",
}


def test_models_that_ranks_cannot_share_are_refused(tmp_path: Path) -> None:
    tiny_model("llama", hidden_size=96, num_attention_heads=6, num_key_value_heads=3).save_pretrained(tmp_path / "odd")
    tiny_model("olmo2").save_pretrained(tmp_path / "olmo2")
    random_model("minicpm3", **LATENT).save_pretrained(tmp_path / "minicpm3")
    for (messages,) in together(refused, tmp_path, 2, tmp_path, list(REFUSED_MODELS)):
        for message, reason in zip(messages, REFUSED_MODELS.values(), strict=True):
            assert reason in message
