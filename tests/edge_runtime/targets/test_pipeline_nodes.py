"""Which nodes an edge takes for its stages, and what it says of others: each time what to do."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import ConfigError, KeysError
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.targets.pipeline import PipelineTarget
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import Work
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.export.split import split_artifact
from pilotfish.wire import keys
from pilotfish.wire.keys import EdgeKeys
from tests.conftest import Pair
from tests.support.hostile import cpu_s
from tests.support.pipelines import (
    Node,
    Row,
    cut,
    made_pair,
    opened,
    row,
    served,
    waited_for,
)
from tests.support.tiny import tiny_artifact

CONTEXT = 256
SLOTS = 4
SIZE = {"slots": SLOTS, "context": CONTEXT}
FLAGS = {"sessions": SLOTS, "context": CONTEXT}
PROMPT = [1, 3, 2, 7]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made_pair(tmp_path_factory.mktemp("nodes"), CONTEXT)


@pytest.fixture(scope="module")
def thirds(made: Pair) -> Path:
    """The target in three stages."""
    return cut(made.target, made.target.parent / "thirds", 3)


@pytest.fixture(scope="module")
def located(thirds: Path) -> Iterator[Row]:
    with row(thirds, **FLAGS) as nodes:
        yield nodes


def flies(target: PipelineTarget) -> bool:
    """A pass comes back."""
    (answer,) = target.run(0, [Work(0, np.arange(5, dtype=np.uint32), 2)], timeout_s=30.0)
    return len(answer.logits) == 2


# Stages that are not these


def test_stages_in_the_wrong_order(located: Row, tmp_path: Path) -> None:
    turned = Row(located.folder, located.nodes, [*reversed(located.links)])
    words = ("stage 2: it holds stage 3 of 3", "stage 3: it holds stage 2 of 3")
    reply = waited_for(turned, tmp_path / "list.toml", *words, **SIZE)
    assert "not stage 2 of 3" in reply


def test_a_stage_of_another_model(located: Row, made: Pair, thirds: Path, tmp_path: Path) -> None:
    tiny_artifact(tmp_path / "other", vocab=64, layers=4, seed=5, dialect="opset17")
    split_artifact(tmp_path / "other", tmp_path / "cut", stages=3)
    with row(tmp_path / "cut", **FLAGS) as others:
        mixed = Row(thirds, located.nodes, [located.links[0], others.links[1]])
        reply = waited_for(mixed, tmp_path / "list.toml", "stage 3: it holds", **SIZE)
        assert "stage 3: it holds stage 3 of 3" in reply
        assert "not stage 3 of 3 of" in reply


def test_a_whole_model_is_no_stage(located: Row, made: Pair, tmp_path: Path) -> None:
    node = Node(made.target, **FLAGS)
    try:
        mixed = Row(located.folder, located.nodes, [located.links[0], node])
        reply = waited_for(mixed, tmp_path / "list.toml", "stage 3: it holds", **SIZE)
        assert "it holds a whole model" in reply
    finally:
        node.stop()


def test_stages_that_were_cut_elsewhere_do_not_fit_together(
    made: Pair, located: Row, thirds: Path, tmp_path: Path
) -> None:
    split_artifact(made.target, tmp_path / "cut", layers=[1, 1, 2])
    with row(tmp_path / "cut", **FLAGS) as others:
        mixed = Row(thirds, located.nodes, others.links)
        reply = waited_for(mixed, tmp_path / "list.toml", "before layer 2", **SIZE)
        assert "its first layer is 1, but the previous stage ends before layer 2" in reply
        assert "pilotfish export split" in reply


def test_the_list_may_name_the_artifact_of_a_stage(
    located: Row, thirds: Path, tmp_path: Path
) -> None:
    digests = [Artifact.open(path, stage=True).manifest.digest for path in sorted(thirds.iterdir())]
    named = {**SIZE, "digests": digests[1:]}
    with opened(located, tmp_path / "list.toml", **named) as target:
        assert flies(target)
    named["digests"] = [digests[1], "0123456789abcdef"]
    reply = waited_for(located, tmp_path / "list.toml", "with digest", **named)
    assert f"stage 3: it holds a stage with digest {digests[2]}, not 0123456789abcdef" in reply


def test_a_list_without_a_stage_or_with_one_too_many(located: Row, tmp_path: Path) -> None:
    for links in (located.links[:1], [*located.links, Elsewhere("tcp://127.0.0.1:1")]):
        short = Row(located.folder, located.nodes, links)
        with (
            pytest.raises(ConfigError, match="must name the other 2 stages in their order"),
            opened(short, tmp_path / "list.toml", **SIZE),
        ):
            pass


def test_an_edge_that_is_given_another_stage_than_the_first(located: Row, tmp_path: Path) -> None:
    with (
        pytest.raises(ConfigError, match="--target is stage 2 of 3"),
        opened(located, tmp_path / "list.toml", first=located.folder / "stage-2", **SIZE),
    ):
        pass


def test_an_edge_that_is_given_the_whole_model(located: Row, made: Pair, tmp_path: Path) -> None:
    with (
        pytest.raises(ArtifactError, match="pilotfish export split"),
        opened(located, tmp_path / "list.toml", first=made.target, **SIZE),
    ):
        pass


def test_a_stage_is_no_target_by_itself(thirds: Path) -> None:
    for stage in ("stage-1", "stage-2"):
        with pytest.raises(Exception, match="stage"), EdgeServer(thirds / stage):
            pass


# Stages that are too small, and what becomes of it when they are put right


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        pytest.param(
            {"sessions": 2, "context": CONTEXT},
            "start it with --sessions 4",
            marks=pytest.mark.slow,
        ),
        ({"sessions": SLOTS, "context": 100}, "with --context 256, or the edge with --context 100"),
    ],
    ids=["slots", "context"],
)
def test_a_stage_that_is_too_small_until_it_is_started_again(
    thirds: Path, tmp_path: Path, flags: dict[str, int], says: str
) -> None:
    with row(thirds, options=[FLAGS, flags]) as small:
        assert says in waited_for(small, tmp_path / "list.toml", "stage 3: it has", **SIZE)
        mending = threading.Timer(
            1.0, lambda: (small.nodes[1].kill(), small.nodes[1].restart(**FLAGS))
        )
        mending.start()
        with opened(small, tmp_path / "list.toml", **SIZE) as target:
            assert flies(target)
        mending.join()


def test_a_stage_that_comes_late_is_waited_for(thirds: Path, tmp_path: Path) -> None:
    with row(thirds, **FLAGS) as late:
        late.nodes[0].kill()
        reply = waited_for(late, tmp_path / "list.toml", "stage 2", **SIZE)
        assert "stage 2: not there yet" in reply
        coming = threading.Timer(1.0, late.nodes[0].restart)
        coming.start()
        with opened(late, tmp_path / "list.toml", **SIZE) as target:
            assert flies(target)
        coming.join()


def test_nodes_have_one_edge_at_a_time(located: Row, tmp_path: Path) -> None:
    with opened(located, tmp_path / "one.toml", **SIZE) as first:
        reply = waited_for(located, tmp_path / "two.toml", "another edge", **SIZE)
        assert "each edge needs its own nodes" in reply
        assert flies(first)
    with opened(located, tmp_path / "two.toml", **SIZE) as second:
        assert flies(second)


# Keys


class Locked(NamedTuple):
    """Folders of keys: the edge's, and each node's."""

    edge: Path
    nodes: list[Path]

    @property
    def publics(self) -> list[str]:
        """Of the nodes, for the list."""
        return [str(folder / "edge.pub") for folder in self.nodes]


@pytest.fixture
def locked(tmp_path: Path) -> Locked:
    """Each node lets the edge in, and the stage before it."""
    edge, *nodes = folders = [tmp_path / name for name in ("edge", "second", "third")]
    for folder in folders:
        keys.create(folder, keys.EDGE)
        (folder / "allowed").mkdir()
    keys.allow(nodes[0], edge / "edge.pub", "edge")
    keys.allow(nodes[1], edge / "edge.pub", "edge")
    keys.allow(nodes[1], nodes[0] / "edge.pub", "second")
    return Locked(edge, nodes)


def secured(locked: Locked) -> list[dict[str, Any]]:
    """The nodes' options."""
    return [{**FLAGS, "keys": folder} for folder in locked.nodes]


def test_all_is_encrypted_between_edge_and_stages(
    made: Pair, thirds: Path, locked: Locked, tmp_path: Path
) -> None:
    wish: dict[str, Any] = {"protocol": "tree", "temperature": 1.0, "seed": 2, "max_tokens": 40}
    keys.allow(locked.edge, keys.create(tmp_path / "device", keys.DEVICE))
    (tmp_path / "device" / "edge.pub").write_bytes((locked.edge / "edge.pub").read_bytes())
    with (
        EdgeServer(made.target, threads=1) as server,
        Device(made.draft, server.endpoint, threads=1) as device,
    ):
        wanted = device.generate(PROMPT, **wish).tokens
    with (
        row(thirds, options=secured(locked)) as result,
        served(
            result,
            tmp_path / "list.toml",
            server={**FLAGS, "keys": locked.edge},
            keys=locked.publics,
        ) as server,
        Device(made.draft, server.endpoint, tmp_path / "device", threads=1) as device,
    ):
        assert device.generate(PROMPT, **wish).tokens == wanted
        for place in (0, 1):
            result.nodes[place].kill()
            result.nodes[place].restart()
            assert device.generate(PROMPT, **wish).tokens == wanted


def test_a_stage_that_does_not_let_in_the_stage_before_it(
    thirds: Path, locked: Locked, tmp_path: Path
) -> None:
    (locked.nodes[1] / "allowed" / "second.pub").unlink()
    fields = {"owned": EdgeKeys.load(locked.edge), "keys": locked.publics}
    with row(thirds, options=secured(locked)) as result:
        reply = waited_for(result, tmp_path / "list.toml", "refuses the key of", **fields, **SIZE)
        assert "stage 2 of 3" in reply
        assert f"next stage at {result.nodes[1].endpoint}" in reply
        assert "put this node's edge.pub on the allow-list there" in reply

        def let_in() -> None:
            keys.allow(locked.nodes[1], locked.nodes[0] / "edge.pub", "second")
            os.kill(result.nodes[1].server.pid, signal.SIGHUP)

        mending = threading.Timer(1.0, let_in)
        mending.start()
        with opened(result, tmp_path / "list.toml", **fields, **SIZE) as target:
            assert flies(target)
        mending.join()


def test_a_stage_that_does_not_let_in_the_edge(
    thirds: Path, locked: Locked, tmp_path: Path
) -> None:
    (locked.nodes[1] / "allowed" / "edge.pub").unlink()
    fields = {"owned": EdgeKeys.load(locked.edge), "keys": locked.publics}
    with row(thirds, options=secured(locked)) as result:
        reply = waited_for(result, tmp_path / "list.toml", "stage 3: it refuses", **fields, **SIZE)
        assert "put edge.pub on its allow-list" in reply


def test_a_list_with_a_wrong_key(thirds: Path, locked: Locked, tmp_path: Path) -> None:
    with row(thirds, options=secured(locked)) as result:
        for place in (0, 1):
            publics = list(locked.publics)
            publics[place] = str(locked.edge / "edge.pub")
            fields = {"owned": EdgeKeys.load(locked.edge), "keys": publics}
            reply = waited_for(result, tmp_path / "list.toml", "key", **fields, **SIZE)
            assert f"stage {place + 2}: " in reply


def test_a_key_that_is_taken_off_a_stages_list(
    thirds: Path, locked: Locked, tmp_path: Path
) -> None:
    """That of the stage before it, while both are at work; what it is told it does not leave lying.

    An unread message would keep its loop from ever sleeping.
    """
    fields = {"owned": EdgeKeys.load(locked.edge), "keys": locked.publics}
    edge_metrics = EdgeMetrics()
    with (
        row(thirds, options=secured(locked)) as result,
        opened(result, tmp_path / "list.toml", metrics=edge_metrics, **fields, **SIZE) as target,
    ):
        assert flies(target)
        entry = locked.nodes[1] / "allowed" / "second.pub"
        key = entry.read_bytes()
        entry.unlink()
        os.kill(result.nodes[1].server.pid, signal.SIGHUP)
        time.sleep(0.3)  # it is heard, and the connection is not cut yet
        target.start(7, [Work(0, np.arange(9, dtype=np.uint32), 1)])
        seen = tells(target, "This key was removed")
        assert "stage 2: The stage after stage 2 of 3 (layer 2) refuses" in seen
        tells(target, "refuses the key of")
        assert edge_metrics.node_events["stage 2", "refused"] >= 1
        busy_s = cpu_s(result.nodes[0].server.pid)
        time.sleep(1.0)
        assert cpu_s(result.nodes[0].server.pid) - busy_s < 0.3
        entry.write_bytes(key)
        os.kill(result.nodes[1].server.pid, signal.SIGHUP)
        end_s = time.monotonic() + 30.0
        while not (finished := target.collect_scores()):
            assert time.monotonic() < end_s, target.problem
            target.pause()
        assert (finished[0].number, finished[0].error) == (7, None)


def tells(target: PipelineTarget, words: str) -> str:
    """What it says of its nodes, once it says these words."""
    end_s = time.monotonic() + 20.0
    while words not in (problem := target.problem):
        assert time.monotonic() < end_s, problem
        assert not target.collect_scores()
        target.pause()
    return problem


def test_beyond_loopback_every_node_needs_a_key(located: Row, tmp_path: Path) -> None:
    away = Row(located.folder, located.nodes, [located.links[0], Elsewhere("tcp://192.0.2.1:7078")])
    with (
        pytest.raises(KeysError, match="names no key for stage 3"),
        opened(away, tmp_path / "list.toml", **SIZE),
    ):
        pass


class Elsewhere(NamedTuple):
    """An address."""

    endpoint: str
