"""Replicas and stages as actors of a Ray cluster: the same text, whatever dies meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from tests.support.clustered import ClusterEdge, can_be_alone, cluster_edge
from tests.support.tiny import tiny_artifact

pytestmark = [
    pytest.mark.slow,
    # not imported: Ray puts packages of its own on the path, which other tests would find
    pytest.mark.skipif(find_spec("ray") is None, reason="needs the extra ray"),
    pytest.mark.skipif(not can_be_alone(), reason="needs a network of its own (root)"),
]

PROMPTS = [[1, 2, 3], [4, 5, 6, 7], [9, 9], [30, 20, 10]]
LENGTH = 60


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target in four layers that never ends, and its drafter."""
    folder = tmp_path_factory.mktemp("cluster")
    for name, sharpness in (("target", 0.7), ("draft", 0.9)):
        tiny_artifact(
            folder / name, vocab=64, seed=1, sharpness=sharpness, layers=4, context=512,
            dialect="opset17",
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def whole(models: Path) -> Iterator[EdgeServer]:
    """The whole model in one process."""
    with EdgeServer(models / "target", threads=1) as started:
        yield started


@pytest.fixture(scope="module")
def wanted(models: Path, whole: EdgeServer) -> list[list[int]]:
    """What it answers."""
    return answers(models, whole.endpoint)


@pytest.fixture(scope="module", params=[(2, 1), (2, 2)], ids=["2 replicas", "2 of 2 stages"])
def edge(
    request: pytest.FixtureRequest, models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ClusterEdge]:
    """An edge on a cluster of its own."""
    replicas, stages = request.param
    folder = tmp_path_factory.mktemp("edge")
    flags = ("--replicas", replicas, "--stages", stages, "--threads", 1, "--late", 2)
    with cluster_edge(models / "target", folder, models / "cache", *flags) as started:
        yield started


def answers(
    models: Path, endpoint: str, amid: Callable[[], None] = lambda: None
) -> list[list[int]]:
    """Those to all prompts, of four devices at once; ``amid`` is called when all have begun."""
    results: dict[int, list[int]] = {}
    begun = threading.Barrier(len(PROMPTS), amid, timeout=60)

    def ask(index: int) -> None:
        wish = {"protocol": "coupled", "temperature": 1.0, "seed": 1, "max_tokens": LENGTH}
        with Device(models / "draft", endpoint, threads=1) as device:
            pieces = device.stream(PROMPTS[index], **wish)
            results[index] = [*next(pieces).tokens]
            begun.wait()
            for piece in pieces:
                results[index] += piece.tokens

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return [results[index] for index in range(len(PROMPTS))]


def test_the_text_is_the_whole_models(
    edge: ClusterEdge, models: Path, wanted: list[list[int]]
) -> None:
    assert answers(models, edge.endpoint) == wanted


@pytest.mark.parametrize("protocol", ["greedy", "tslt", "tree", "dssd", "stream"])
def test_every_protocol_goes_over_a_cluster(
    edge: ClusterEdge, whole: EdgeServer, models: Path, protocol: str
) -> None:
    temperature = 0.0 if protocol == "greedy" else 1.0
    results = []
    for endpoint in (whole.endpoint, edge.endpoint):
        with Device(models / "draft", endpoint, threads=1) as device:
            answer = device.generate(
                PROMPTS[0], protocol=protocol, temperature=temperature, max_tokens=20, seed=5
            )
            results.append(answer.tokens)
    assert results[0] == results[1]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_sessions_go_on_when_an_actor_is_lost(
    edge: ClusterEdge, models: Path, wanted: list[list[int]], number: signal.Signals
) -> None:
    """Killed, Ray starts another; stopped, the edge has it killed when it is overdue."""
    victims = edge.actors()
    info = "has lost an actor" if number == signal.SIGKILL else "is overdue"
    for victim in (victims[0], victims[-1])[: 2 if number == signal.SIGKILL else 1]:
        before = edge.log.count(info)
        assert answers(models, edge.endpoint, partial(os.kill, victim, number)) == wanted
        edge.await_line(info, times=before + 1)
        deadline = time.monotonic() + 60
        while victim in edge.actors() or len(edge.actors()) < len(victims):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        assert answers(models, edge.endpoint) == wanted


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_actor_outlives_its_edge(models: Path, tmp_path: Path, number: signal.Signals) -> None:
    """Told to stop, it takes all of Ray with it; killed, some of Ray's agents see it later."""
    with cluster_edge(models / "target", tmp_path / "edge", models / "cache") as started:
        with Device(models / "draft", started.endpoint, threads=1) as device:
            assert len(device.generate([1, 2, 3], protocol="greedy", max_tokens=4).tokens) == 4
        assert len(started.actors()) == 1
        os.kill(started.pid, number)
        left = started.rays if number == signal.SIGTERM else started.actors
        assert started.ends() == (0 if number == signal.SIGTERM else 128 + number)
        deadline = time.monotonic() + 20
        while left() and time.monotonic() < deadline:
            time.sleep(0.05)
        assert left() == []


def test_a_private_cluster_listens_on_loopback_only(edge: ClusterEdge) -> None:
    loopback = {"0100007F", "0" * 24 + "01000000", "0000000000000000FFFF00000100007F"}
    assert edge.listens_on()
    assert edge.listens_on() <= loopback


@pytest.mark.parametrize(
    ("flags", "code", "words"),
    [
        (["--cluster-address", "127.0.0.1:1"], 69, "no Ray cluster at 127.0.0.1:1"),
        (["--cluster-address", "ray://there:10001"], 78, "HOST:PORT or auto"),
        (["--provider", "cuda"], 78, "0 GPUs, but these actors need 1"),
        (["--federate", "workers.toml"], 78, "one kind of target"),
    ],
)
def test_what_cannot_be_is_said(models: Path, flags: list[str], code: int, words: str) -> None:
    command = [sys.executable, "-m", "pilotfish", "edge", "serve", "--cluster", "ray"]
    command += ["--target", str(models / "target"), "--listen", "tcp://127.0.0.1:0", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, words in done.stderr) == (code, True), done.stderr


def test_no_ray_where_no_cluster_is_asked_for(models: Path) -> None:
    with EdgeServer(models / "target", threads=1) as started:
        maps = Path(f"/proc/{started.pid}/maps").read_text()
    assert "/ray/" not in maps
