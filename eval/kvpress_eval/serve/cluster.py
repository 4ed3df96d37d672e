# SPDX-License-Identifier: Apache-2.0
"""Replicas of the server on the machines of a Ray cluster."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from starlette.types import ASGIApp, Message, Scope

from kvpress_eval.common.errors import ClusterError, ConfigError
from kvpress_eval.serve.access import Access
from kvpress_eval.serve.gateway import FullError, Gateway, LostError, ReplicaStatus

APP = "kvpress"
"""Name of the application of Ray Serve."""
ROUTER = "ray.serve.experimental.consistent_hash_router.ConsistentHashRouter"
"""Router of Ray Serve that sends equal session identifiers to one replica."""
SPARE = 16
"""Requests of a replica besides those that run or wait: health checks, refusals, the page."""
REPORT_SECONDS = 10.0
"""Seconds that gateways outlive replicas, to report the requests that those could not finish."""
STATUS_SECONDS = 10.0
"""Longest time in which a replica must report its state."""


@dataclass(frozen=True)
class ClusterSettings:
    """Replicas of a server."""

    replicas: int
    """Replicas; the least number of them with `max_replicas`."""
    max_replicas: int | None = None
    """Most replicas; None for a fixed number."""
    address: str | None = None
    """Address of the cluster; None for one that is started on this machine."""
    cpus: int = 1
    """Cores of a replica."""
    gpus: int = 0
    """GPUs of a replica."""
    rows: int = 64
    """Requests that a replica runs at once; with more, another one is started."""
    queue: int = 256
    """Requests that wait in a replica; more go to another one."""

    def __post_init__(self) -> None:
        if self.max_replicas is not None and self.max_replicas < self.replicas:
            raise ConfigError(f"max_replicas must be at least replicas={self.replicas}, got {self.max_replicas}")


class Replica:
    """One server in a process of a cluster.

    Args:
        load: loads the model and returns the application.
        threads: CPU threads of torch.
        presses: registered press classes; unpickling them has imported the modules of user-defined ones.
    """

    async def __init__(self, load: Callable[[], Any], threads: int, presses: Sequence[type]) -> None:  # type: ignore[misc]
        import torch
        from ray import serve

        del presses
        torch.set_num_threads(threads)
        self.name = serve.get_replica_context().replica_id.unique_id
        self.app = await asyncio.to_thread(load)
        self._lifespan = self.app.router.lifespan_context(self.app)
        await self._lifespan.__aenter__()

    async def answer(self, route: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of a response; closing the iterator disconnects the client.

        `route` is the beginning of the identifiers of responses.
        """
        from kvpress_eval.serve.requests import ROUTE

        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        unread, gone = [body], asyncio.Event()

        async def receive() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            await gone.wait()
            return {"type": "http.disconnect"}

        async def run() -> None:
            ROUTE.set(route)
            try:
                await self.app(scope, receive, messages.put)
            finally:
                await messages.put(None)

        # Version 2.3 of the interface announces a disconnect through `receive`, also between two tokens.
        scope = {**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}}
        task = asyncio.create_task(run())
        try:
            while (message := await messages.get()) is not None:
                yield message
            await task
        finally:
            gone.set()

    async def document_name(self, body: bytes) -> str:
        """Return the identifier of the document that an upload makes; empty if the upload is wrong."""
        from pydantic import ValidationError

        from kvpress_eval.serve.requests import RefusedError
        from kvpress_eval.serve.schemas import DocumentBody

        try:
            upload = DocumentBody.model_validate_json(body)
            press = upload.press or self.app.state.engine.settings.presses[0]
            document = await asyncio.to_thread(self.app.state.prompts.add_document, upload, press)
        except (ValidationError, RefusedError):
            return ""
        return str(document.name)

    async def status(self) -> ReplicaStatus:
        """Return the state of this replica."""
        engine = self.app.state.engine
        return ReplicaStatus(self.name, engine.load, list(engine.metrics.registry.collect()))

    async def check_health(self) -> None:
        """Raise an error if the engine has ended; Ray Serve then replaces this replica."""
        if not self.app.state.engine.is_alive:
            raise RuntimeError("the engine has ended")

    async def __del__(self) -> None:
        # Ray Serve calls this after the last request has ended, or after `--drain` seconds.
        await self._lifespan.__aexit__(None, None, None)


class RemoteReplicas:
    """Replicas that Ray Serve routes to."""

    def __init__(self, handle: Any) -> None:
        self.handle = handle

    async def answer(self, route: str, scope: Scope, body: bytes) -> AsyncIterator[Message]:
        """Yield the ASGI messages of a response."""
        handle = self.handle.options(method_name="answer", stream=True, session_id=route)
        response = handle.remote(route, scope, body)
        try:
            async for message in response:
                yield message
        except Exception as error:
            raise _known(error) from error
        finally:
            response.cancel()  # of no effect once the response has ended

    async def document_name(self, body: bytes) -> str:
        """Return the identifier of the document that an upload makes."""
        try:
            return str(await self.handle.document_name.remote(body))
        except Exception as error:
            raise _known(error) from error

    async def statuses(self) -> Sequence[ReplicaStatus]:
        """Return the state of each replica."""
        try:
            responses = self.handle.broadcast("status")
            answers = await responses.results_async(timeout_s=STATUS_SECONDS, return_exceptions=True)
        except Exception as error:
            raise _known(error) from error
        statuses = [answer for answer in answers if isinstance(answer, ReplicaStatus)]
        if not statuses:  # all were lost since the list of replicas was read
            raise LostError("no replica reports its state")
        return statuses


def _known(error: Exception) -> Exception:
    """Return the gateway's error for one of Ray; other errors as they are."""
    from ray.exceptions import RayActorError, RayError, RayTaskError
    from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError, RayServeException

    if isinstance(error, BackPressureError):
        return FullError(str(error))
    if isinstance(error, RayTaskError) and not isinstance(error, RayActorError):
        return error  # raised by the replica, which lives
    if isinstance(error, (RayError, RayServeException, DeploymentUnavailableError, TimeoutError)):
        return LostError(str(error).partition("\n")[0])
    return error


class GatewayProcess:
    """Gateway in a process of a cluster: access is checked here, and replicas receive accepted requests only."""

    def __init__(self, replicas: Any, api: Any) -> None:
        self.replicas, self.api = RemoteReplicas(replicas), api

    def __serve_build_asgi_app__(self) -> ASGIApp:
        return Access(Gateway(self.replicas), self.api.keys, self.api.rate, self.api.max_body)


def serve_on_cluster(load: Callable[[Any], Any], api: Any, settings: ClusterSettings, host: str, port: int) -> None:
    """Serve on a cluster until SIGTERM or Ctrl-C, then let accepted requests finish.

    Args:
        load: loads the model and returns the application for some `ApiSettings`; it is called in each replica.
        api: settings of the application.
        settings: the replicas.
        host: address of the proxy on each machine.
        port: its port.

    Raises:
        ConfigError: Ray Serve is not installed, its cluster serves another application, or the port is in use.
        ClusterError: no cluster answers, or no replica starts.
    """
    from kvpress_eval.run.cluster import connected
    from kvpress_eval.serve.metrics import log
    from kvpress_eval.serve.run import log_lines, warn_if_open

    _check_port(host, port)
    with connected(settings.address) as ray:
        try:
            from ray import serve
        except ImportError as error:
            raise ConfigError("engine ray needs Ray Serve: pip install 'kvpress-toolkit[ray-serve]'") from error
        if other := list(serve.status().applications):
            raise ConfigError(
                f"the cluster serves {', '.join(map(repr, other))} already: stop it, or use another cluster"
            )
        try:
            deploy(load, api, settings, host, port)
            nodes = sum(node["Alive"] for node in ray.nodes())
            log_lines()
            warn_if_open(api, host)
            log("start", model=api.model, replicas=settings.replicas, nodes=nodes, host=host, port=port)
            threading.Event().wait()
        finally:
            _drain(api.drain_seconds + REPORT_SECONDS)


def _drain(seconds: float) -> None:
    """Accept no more requests, wait for those accepted for at most `seconds`, and end Ray Serve."""
    from ray import serve

    serve.delete(APP, _blocking=False)  # would wait for a minute, and no longer
    end = time.monotonic() + seconds
    while APP in serve.status().applications and time.monotonic() < end:
        time.sleep(0.2)
    serve.shutdown()


def deploy(load: Callable[[Any], Any], api: Any, settings: ClusterSettings, host: str, port: int) -> None:
    """Start the proxies, gateways and replicas on the cluster that this process is connected to.

    Raises:
        ClusterError: the machines have no room for the replicas, or no replica starts.
    """
    import ray
    from ray import serve
    from ray.serve.config import AutoscalingConfig, RequestRouterConfig

    from kvpress.core.registry import entries
    from kvpress_eval.serve.run import KEEP_ALIVE

    _check_room([node["Resources"] for node in ray.nodes() if node["Alive"]], settings)
    serve.start(
        proxy_location="EveryNode", http_options={"host": host, "port": port, "keep_alive_timeout_s": KEEP_ALIVE}
    )
    count: dict[str, Any] = {"num_replicas": settings.replicas}
    if settings.max_replicas is not None:
        count["autoscaling_config"] = AutoscalingConfig(
            min_replicas=settings.replicas, max_replicas=settings.max_replicas, target_ongoing_requests=settings.rows
        )
        count["num_replicas"] = None
    capacity, seconds = settings.rows + settings.queue + SPARE, max(1.0, api.drain_seconds)
    replica = serve.deployment(
        Replica,
        ray_actor_options={"num_cpus": settings.cpus, "num_gpus": settings.gpus},
        request_router_config=RequestRouterConfig(request_router_class=ROUTER),
        max_ongoing_requests=capacity,
        max_queued_requests=settings.queue,
        graceful_shutdown_timeout_s=seconds,
        **count,
    )
    gateway = serve.deployment(
        serve.ingress()(GatewayProcess),
        num_replicas=settings.replicas,
        ray_actor_options={"num_cpus": 0},
        # The replicas refuse requests that are too many, not the gateways, of which each may get all.
        max_ongoing_requests=2 * capacity * (settings.max_replicas or settings.replicas),
        graceful_shutdown_timeout_s=seconds + REPORT_SECONDS,
    )
    inner = replace(api, keys=None, rate=None)  # the gateways check both
    classes = [entry.press for entry in entries()]
    application = gateway.bind(replica.bind(_Load(load, inner), settings.cpus, classes), api)
    try:
        serve.run(application, name=APP, route_prefix="/")
    except RuntimeError as error:
        raise ClusterError(f"no replica starts: {error}") from error


@dataclass(frozen=True)
class _Load:
    """Loader of the application of a replica."""

    load: Callable[[Any], Any]
    api: Any

    def __call__(self) -> Any:
        return self.load(self.api)


def _check_room(machines: Sequence[Mapping[str, float]], settings: ClusterSettings) -> None:
    """Raise an error if the cluster has no room for the replicas, for which Ray Serve would wait without end."""

    def room(resources: Mapping[str, float]) -> int:
        by_cpus = resources.get("CPU", 0) // settings.cpus
        return int(min(by_cpus, resources.get("GPU", 0) // settings.gpus) if settings.gpus else by_cpus)

    total = sum(map(room, machines))
    if total < settings.replicas:
        raise ClusterError(
            f"the cluster has room for {total} replicas of {settings.cpus} cores and {settings.gpus} GPUs each, not for "
            f"replicas={settings.replicas}: add machines, or lower --replicas or --threads"
        )


def _check_port(host: str, port: int) -> None:
    """Raise an error if the port is in use on this machine."""
    if not port:
        raise ConfigError("engine ray needs a port, the same one on all machines: port must be in [1, 65535], got 0")
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port} ({error.strerror or error}): choose another --port"
        ) from error
