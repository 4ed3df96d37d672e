# SPDX-License-Identifier: Apache-2.0
"""`kvpress serve`: the OpenAI API in front of a model, with continuous batching over compressed caches."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kvpress_eval.commands import _shared as shared

if TYPE_CHECKING:
    from kvpress_eval.serve.cluster import ClusterSettings


def command(
    model: shared.Model,
    press: Annotated[
        list[str] | None, typer.Option(help="A press that requests may choose; may be repeated. Default: the first.")
    ] = None,
    memory: Annotated[str, typer.Option(help="Limit of all caches, such as 24GB.")] = "4GB",
    prefix_memory: Annotated[str, typer.Option(help="Part of it for shared texts and kept conversations.")] = "1GB",
    prefix_store: Annotated[
        Path | None, typer.Option(help="Folder that keeps these beyond the memory, and after a restart.")
    ] = None,
    limit: Annotated[str, typer.Option(help="Limit of that folder.")] = "20GB",
    host: Annotated[str, typer.Option(help="Address; 0.0.0.0 for all networks.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port; 0 for a free one.", min=0, max=65535)] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests.")] = None,
    api_keys: Annotated[Path | None, typer.Option(help="File with one API key per line.")] = None,
    rate: Annotated[int | None, typer.Option(help="Most requests a minute of a key.", min=1)] = None,
    max_tokens: Annotated[int, shared.token_count("max_tokens", "Answers that set no limit.")] = 1024,
    max_body: Annotated[str, typer.Option(help="Largest body of a request.")] = "8MB",
    chunk: Annotated[int, shared.token_count("chunk", "Tokens of prompts read between decode steps.")] = 256,
    queue: Annotated[int, typer.Option(help="Most waiting requests; more get 429.", min=1)] = 256,
    rows: Annotated[int, typer.Option(help="Most requests that run at once.", min=1)] = 64,
    preempt: Annotated[
        float | None, typer.Option(help="Seconds after which a short waiting request suspends a long one.", min=0)
    ] = None,
    drain: Annotated[float, typer.Option(help="Seconds for running answers after SIGTERM.", min=0)] = 30,
    dtype: shared.Dtype = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:1; with engine ray, of each replica.")] = "auto",
    model_kwargs: shared.ModelKwargs = None,
    threads: shared.Threads = None,
    engine: Annotated[str, typer.Option(help="local, or ray: replicas on the machines of a cluster.")] = "local",
    replicas: Annotated[int, typer.Option(help="Replicas of engine ray.", min=1)] = 1,
    max_replicas: Annotated[int | None, typer.Option(help="Add replicas under load, up to so many.", min=1)] = None,
    ray_address: shared.RayAddress = None,
) -> None:
    """Serve a model over HTTP with the OpenAI API: many users, one compressed memory.

    Requests join and leave a running batch at any step. Shared texts (/v1/documents, system prompts) are read and compressed
    once. A request begins only if its cache fits --memory; others wait, or get 429. SIGTERM finishes running answers.
    """
    with shared.exit_codes():
        import torch

        from kvpress.cache.report import parse_bytes
        from kvpress.core.spec import get_press
        from kvpress.hf.model_kwargs import configured, parse_model_kwargs
        from kvpress_eval.common.errors import ConfigError

        try:
            from kvpress_eval.serve.access import ApiKeys, Rate
            from kvpress_eval.serve.api import ApiSettings
            from kvpress_eval.serve.cluster import serve_on_cluster
            from kvpress_eval.serve.run import load_app, serve
            from kvpress_eval.serve.settings import EngineSettings
        except ModuleNotFoundError as error:
            if str(error.name).startswith("kvpress"):
                raise
            raise ConfigError(
                f"{error.name} is not installed; the server needs: pip install 'kvpress-toolkit[serve]'"
            ) from error

        try:
            specs = list(dict.fromkeys(press or ["none"]))
            for spec in specs:
                get_press(spec)
            settings = EngineSettings(specs, parse_bytes(memory, "memory"), chunk, queue, rows, preempt_seconds=preempt)
            prefix_bytes = parse_bytes(prefix_memory, "prefix_memory")
            if prefix_bytes > settings.memory:
                raise ValueError(f"prefix_memory must be at most memory={memory}, got {prefix_memory}")
            api = ApiSettings(
                name or Path(model).name,
                None,
                max_tokens,
                parse_bytes(max_body, "max_body"),
                None if api_keys is None else ApiKeys(api_keys),
                None if rate is None else Rate(rate),
                drain,
            )
            cluster = _cluster(engine, replicas, max_replicas, ray_address)
            if threads:
                torch.set_num_threads(threads)
            if device == "auto":
                device = "cuda" if torch.cuda.is_available() else "cpu"
            load = partial(
                load_app, name=model, settings=settings, prefix_bytes=prefix_bytes, store=prefix_store, store_limit=limit,
                dtype=dtype, device=device, model_kwargs=configured(model, parse_model_kwargs(model_kwargs)),
            )  # fmt: skip
            if cluster is None:
                serve(load, api, host, port)
            else:
                gpus = int(device.startswith("cuda"))
                cluster = replace(cluster, cpus=threads or 1, gpus=gpus, rows=rows, queue=queue)
                serve_on_cluster(load, api, cluster, host, port)
        except KeyboardInterrupt:  # SIGTERM or Ctrl-C, after running answers have ended
            return
        except (ValueError, KeyError, TypeError, OSError, NotImplementedError) as error:
            raise ConfigError(str(error)) from error


def _cluster(engine: str, replicas: int, max_replicas: int | None, address: str | None) -> ClusterSettings | None:
    """Return the replicas of engine ray, and None for engine local.

    Raises:
        ValueError: the engine does not exist, or is local with options of a cluster.
    """
    from kvpress_eval.config.schema import RAY
    from kvpress_eval.serve.cluster import ClusterSettings

    if engine == RAY:
        return ClusterSettings(replicas, max_replicas, address)
    if engine != "local":
        raise ValueError(f"engine must be local or {RAY}, got {engine!r}")
    given = {"replicas": replicas != 1, "max_replicas": max_replicas is not None, "ray_address": address is not None}
    if wrong := [name for name, is_set in given.items() if is_set]:
        raise ValueError(f"{wrong[0]} needs engine ray: add --engine ray, or leave it out")
    return None
