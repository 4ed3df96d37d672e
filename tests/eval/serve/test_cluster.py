# SPDX-License-Identifier: Apache-2.0
"""Replicas on a cluster of two machines: routing, disconnects, and the loss of a replica under load."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest
from kvpress_eval.common.errors import ClusterError
from kvpress_eval.run.cluster import connected
from kvpress_eval.serve.api import ApiSettings
from kvpress_eval.serve.cluster import APP, ClusterSettings, deploy
from kvpress_eval.serve.run import load_app
from kvpress_eval.serve.settings import EngineSettings
from openai import APIError, OpenAI
from prometheus_client.parser import text_string_to_metric_families

from tests.eval.serve.servers import alone, text_of
from tests.eval.serve.test_failures import wait_until_up

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::ResourceWarning"),
]
PRESS = "snapkv:0.3,window_size=16 + kivi:bits=4,residual_length=32"
QUESTION = "\nWhat is the code for tiger?\n"
LOST = "was lost before the answer was complete"
PORT = 18433


def wait_until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not happened():
        assert time.monotonic() < end
        time.sleep(0.05)


@dataclass
class RunningCluster:
    """Replicas on a cluster, and their client."""

    ray: Any
    """Ray, connected to the cluster."""
    url: str = f"http://127.0.0.1:{PORT}"
    """Base URL."""

    @property
    def client(self) -> OpenAI:
        return OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=120)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(f"{self.url}{path}", timeout=60)

    def post(self, path: str, body: Any) -> Any:
        return httpx.post(f"{self.url}{path}", json=body, timeout=120).json()

    def complete(self, prompt: str, tokens: int, **fields: Any) -> str:
        completion = self.client.completions.create(
            model="reference", prompt=prompt, max_tokens=tokens, temperature=0, extra_body=fields
        )
        return str(completion.choices[0].text)

    def wait(self, **state: Any) -> None:
        """Wait until `/health` has some values."""
        wait_until(lambda: self.get("/health").json().items() >= state.items())

    def replicas(self) -> list[str]:
        """Return the names of the actors of the replicas."""
        actors = self.ray.util.list_named_actors(all_namespaces=True)
        return sorted(each["name"] for each in actors if each["name"].startswith(f"SERVE_REPLICA::{APP}#Replica#"))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningCluster]:
    pytest.importorskip("ray.serve")
    from ray.cluster_utils import Cluster

    handler = signal.getsignal(signal.SIGTERM)  # a node of the cluster replaces this handler
    size = {"num_cpus": 1, "memory": 3 * 2**30, "object_store_memory": 100 * 2**20}
    machines = Cluster(initialize_head=True, head_node_args={**size, "include_dashboard": False})
    try:
        machines.add_node(**size)
        store = tmp_path_factory.mktemp("prefixes")

        def load(api: ApiSettings) -> Any:  # local, so that it travels to the replicas by value
            settings = EngineSettings((PRESS, "none"), 2**29, chunk=64)
            app = load_app(api, "reference", settings, 2**28, store, "1GB", "float32", "cpu")
            app.state.engine.end_tokens = set()  # as the model of the other tests
            return app

        with connected(machines.address) as ray:
            from ray import serve

            with pytest.raises(ClusterError, match="room for 2 replicas of 1 cores"):
                deploy(load, ApiSettings("reference", None), ClusterSettings(3), "127.0.0.1", PORT)
            deploy(load, ApiSettings("reference", None), ClusterSettings(2), "127.0.0.1", PORT)
            yield RunningCluster(ray)
            serve.shutdown()
    finally:
        machines.shutdown()
        signal.signal(signal.SIGTERM, handler)


def samples(metrics: str, name: str, **labels: str) -> dict[str, float]:
    """Return the values of a metric by replica, of the samples with some labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(metrics):
        for entry in family.samples:
            if entry.name == name and entry.labels.items() >= labels.items():
                replica = entry.labels["replica"]
                found[replica] = found.get(replica, 0) + entry.value
    return found


def test_questions_about_a_document_reach_the_replica_that_read_it(cluster: RunningCluster) -> None:
    texts = [text_of(number, 10 + number) for number in range(6)]
    documents = [cluster.post("/v1/documents", {"text": text, "chat": False}) for text in texts]
    assert not any(document["cached"] for document in documents)
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda each: cluster.complete(QUESTION, 8, document=each["id"]), documents))
    assert answers == [alone(PRESS, QUESTION, 8, behind=text) for text in texts]
    metrics = cluster.get("/metrics").text
    for result in ("miss", "hit"):
        assert sum(samples(metrics, "kvpress_prefix_lookups_total", result=result).values()) == len(texts)
    assert min(samples(metrics, "kvpress_prefix_bytes").values()) > 0  # both replicas hold some of them


def test_both_replicas_answer_requests_without_a_document(cluster: RunningCluster) -> None:
    prompts = [text_of(number, 2) + QUESTION for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda prompt: cluster.complete(prompt, 6), prompts))
    assert answers == [alone(PRESS, prompt, 6) for prompt in prompts]
    generated = samples(cluster.get("/metrics").text, "kvpress_batch_rows_count")
    assert min(generated.values()) > 0
    assert len(generated) == 2


def test_a_client_that_disconnects_frees_its_row(cluster: RunningCluster) -> None:
    body = {"model": "reference", "prompt": "A king", "max_tokens": 3000, "stream": True, "temperature": 0}
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = response.iter_lines()  # while it lives, the connection stays open
        assert next(lines).startswith("data: ")
        cluster.wait(rows=1)
    cluster.wait(rows=0)
    cancelled = samples(cluster.get("/metrics").text, "kvpress_requests_total", outcome="cancelled")
    assert sum(cancelled.values()) == 1


def test_a_lost_replica_harms_its_own_requests_only(cluster: RunningCluster) -> None:
    """Streams and whole answers run on both replicas while one is killed."""
    prompts = [text_of(number, 3) + QUESTION for number in range(12)]

    def outcome(number: int) -> str:
        arguments = {"model": "reference", "prompt": prompts[number], "max_tokens": 400, "temperature": 0}
        try:
            if number % 2:
                return str(cluster.client.completions.create(**arguments).choices[0].text)
            chunks = cluster.client.completions.create(**arguments, stream=True)
            return "".join(chunk.choices[0].text for chunk in chunks)
        except APIError as error:
            return LOST if LOST in str(error) else str(error)

    before = cluster.replicas()
    with ThreadPoolExecutor(len(prompts)) as pool:
        running = [pool.submit(outcome, number) for number in range(len(prompts))]
        wait_until(lambda: min(samples(cluster.get("/metrics").text, "kvpress_rows").values()) >= 2)
        cluster.ray.kill(cluster.ray.get_actor(before[0], namespace="serve"))
        outcomes = [future.result() for future in running]
    counts = Counter(text == LOST for text in outcomes)
    assert counts[True] > 0
    assert counts[False] > 0
    for prompt, text in zip(prompts, outcomes, strict=True):
        assert text in (LOST, alone(PRESS, prompt, 400))
    # Ray Serve starts another replica, and both answer.
    cluster.wait(replicas=2, rows=0)
    assert len(set(cluster.replicas()) - set(before)) == 1
    assert cluster.complete(prompts[0], 6) == alone(PRESS, prompts[0], 6)


def test_sigterm_finishes_running_answers() -> None:
    """The command of one machine, with a cluster of its own."""
    pytest.importorskip("ray.serve")
    program, url = "from kvpress_eval.console import app; app()", f"http://127.0.0.1:{PORT + 1}"
    options = ["--dtype", "float32", "--engine", "ray", "--port", str(PORT + 1), "--memory", "1GB", "--drain", "60"]
    process = subprocess.Popen(  # noqa: S603 - our own program
        [sys.executable, "-c", program, "serve", "--model", "reference", *options]
    )
    try:
        wait_until_up(url, process)
        body = {"model": "reference", "prompt": [5, 6, 7], "max_tokens": 300, "seed": 1, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=120) as response:
            lines = response.iter_lines()
            assert next(lines).startswith("data: ")
            process.send_signal(signal.SIGTERM)
            assert "data: [DONE]" in list(lines)
        assert process.wait(120) == 143
    finally:
        process.kill()
        process.wait()
