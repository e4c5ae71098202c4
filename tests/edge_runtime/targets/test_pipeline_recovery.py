"""Stages that die, freeze or lose each other in the middle of answers: the text stays the same."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.targets.pipeline import PipelineTarget
from pilotfish.emulation.emulator import Emulator
from tests.conftest import Pair
from tests.support.daemons import free_port, scrape
from tests.support.hostile import cpu_s, starved_s
from tests.support.pipelines import (
    Answering,
    Row,
    cut,
    holdings,
    made_pair,
    opened,
    row,
    served,
)
from tests.support.relay import Relay

CONTEXT = 2048
SLOTS = 4
STAGES = 4
PROMPTS = ([1, 3, 2, 7], [*range(60)] * 4, [9])
WISHES: list[dict[str, Any]] = [
    {"protocol": "coupled", "temperature": 1.0, "seed": 3},
    {"protocol": "tree", "temperature": 1.0, "seed": 4},
    {"protocol": "stream", "temperature": 1.0, "seed": 5},
]
TOKENS = 150
FLAGS = {"sessions": SLOTS, "context": CONTEXT}
SLOW = pytest.mark.slow
PLACES = pytest.mark.parametrize(
    "place",
    [pytest.param(0, marks=SLOW), 1, pytest.param(2, marks=SLOW)],
    ids=["first", "middle", "last"],
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made_pair(tmp_path_factory.mktemp("recovery"), CONTEXT, endless=True)


@pytest.fixture(scope="module")
def wanted(made: Pair) -> list[list[int]]:
    """What the whole model says to each prompt."""
    with (
        EdgeServer(made.target, threads=1) as server,
        Device(made.draft, server.endpoint, threads=1) as device,
    ):
        return [
            device.generate(prompt, max_tokens=TOKENS, **wish).tokens
            for prompt, wish in zip(PROMPTS, WISHES, strict=True)
        ]


@pytest.fixture(scope="module")
def located(made: Pair) -> Iterator[Row]:
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    with row(folder, sessions=SLOTS, context=CONTEXT) as nodes:
        yield nodes


@pytest.fixture(scope="module")
def server(located: Row, made: Pair) -> Iterator[EdgeServer]:
    path = made.target.parent / "row.toml"
    with served(located, path, server=FLAGS) as edge:
        yield edge


@contextmanager
def at(server: EdgeServer, made: Pair, **options: Any) -> Iterator[list[Device]]:
    """A device for each answer."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(Device(made.draft, server.endpoint, threads=1, **options))
            for _ in PROMPTS
        ]


def emulated(endpoint: str) -> Emulator:
    """A link that can be cut, and made slow."""
    return Emulator(endpoint).start()


@pytest.fixture
def devices(server: EdgeServer, made: Pair) -> Iterator[list[Device]]:
    with at(server, made) as opened:
        yield opened


def begun(devices: Sequence[Device], tokens: int = 20) -> list[Answering]:
    """All three answers, under way."""
    answers = [
        Answering(device, prompt, max_tokens=TOKENS, **wish)
        for device, prompt, wish in zip(devices, PROMPTS, WISHES, strict=True)
    ]
    for answer in answers:
        answer.until(tokens)
    return answers


@PLACES
def test_a_stage_frozen_for_a_while(
    devices: list[Device], located: Row, wanted: list[list[int]], place: int
) -> None:
    answers = begun(devices)
    located.nodes[place].freeze()
    time.sleep(2.0)
    located.nodes[place].thaw()
    assert [answer.result() for answer in answers] == wanted


def test_a_stage_frozen_for_an_unnoticed_moment(
    devices: list[Device], located: Row, wanted: list[list[int]]
) -> None:
    answers = begun(devices)
    located.nodes[1].freeze()
    time.sleep(0.3)
    located.nodes[1].thaw()
    assert [answer.result() for answer in answers] == wanted


@PLACES
def test_a_stage_killed_and_started_again(
    devices: list[Device], located: Row, wanted: list[list[int]], place: int
) -> None:
    """Twice."""
    answers = begun(devices)
    for _ in range(2):
        located.nodes[place].kill()
        located.nodes[place].restart()
        answers[0].until(len(answers[0].tokens) + 10)
    assert [answer.result() for answer in answers] == wanted


def test_all_stages_killed_one_after_the_other(
    devices: list[Device], located: Row, wanted: list[list[int]]
) -> None:
    answers = begun(devices)
    for node in located.nodes:
        node.kill()
    for node in located.nodes:
        node.restart()
    assert [answer.result() for answer in answers] == wanted


# Links


class Hops(Relay):
    """A relay of which a test may cut the newest connection: that of the stage before the node."""

    def cut_newest(self) -> None:
        """Close it unasked, as the network may."""
        for end in self._open[-2:]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        del self._open[-2:]


@pytest.mark.parametrize("place", [1, pytest.param(2, marks=SLOW)], ids=["middle", "last"])
def test_two_stages_that_lose_each_other(
    made: Pair, wanted: list[list[int]], tmp_path: Path, place: int
) -> None:
    """The edge's own connections all stand."""
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    with (
        row(folder, link=Hops, sessions=SLOTS, context=CONTEXT) as apart,
        served(apart, tmp_path / "row.toml", server=FLAGS) as server,
        at(server, made) as devices,
    ):
        answers = begun(devices)
        for _ in range(3):
            apart.links[place].cut_newest()
            answers[0].until(len(answers[0].tokens) + 20)
        assert [answer.result() for answer in answers] == wanted


@pytest.mark.parametrize(
    ("place", "silent"),
    [
        (0, True),
        (2, False),
        pytest.param(0, False, marks=SLOW),
        pytest.param(2, True, marks=SLOW),
    ],
)
def test_a_link_that_is_cut_and_comes_back(
    made: Pair, wanted: list[list[int]], tmp_path: Path, place: int, silent: bool
) -> None:
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    with (
        row(folder, link=emulated, sessions=SLOTS, context=CONTEXT) as apart,
        served(apart, tmp_path / "row.toml", server=FLAGS) as server,
        at(server, made) as devices,
    ):
        answers = begun(devices)
        apart.links[place].cut(2.0, silent=silent)
        assert [answer.result() for answer in answers] == wanted


@SLOW
def test_a_long_session_is_rebuilt_over_a_slow_link(made: Pair, tmp_path: Path) -> None:
    """All its states at once would take longer to cross than a connection may be silent."""
    prompt = [*range(60)] * 30
    wish: dict[str, Any] = {"protocol": "coupled", "temperature": 1.0, "seed": 1, "max_tokens": 40}
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    with (
        row(folder, link=emulated, sessions=SLOTS, context=CONTEXT) as apart,
        served(apart, tmp_path / "row.toml", server=FLAGS) as server,
        at(server, made) as devices,
    ):
        expected = devices[0].generate(prompt, **wish).tokens
        answer = Answering(devices[0], prompt, **wish)
        answer.until(5)
        for link in apart.links:  # 1,800 states of 256 bytes take 1.8 s
            link.set(up_bps=2e6)
        apart.nodes[2].kill()
        apart.nodes[2].restart()
        assert answer.result() == expected


# Stages that hang, are slow, or never come back


def test_a_stage_that_never_comes_back(made: Pair, wanted: list[list[int]], tmp_path: Path) -> None:
    """Answers end in a typed error after a while; sessions live on, and go on when it is there."""
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    port = free_port()
    with (
        row(folder, sessions=SLOTS, context=CONTEXT) as lone,
        served(
            lone,
            tmp_path / "row.toml",
            server={**FLAGS, "metrics": port},
            late_s=1.0,
            give_up_s=2.0,
        ) as server,
        at(server, made) as devices,
    ):
        answers = begun(devices)
        lone.nodes[1].kill()
        killed_s, starved_before = time.monotonic(), starved_s(server.pid) + starved_s()
        for answer in answers:
            with pytest.raises(TargetLostError, match=r"within 2 s.*stage 3: gone"):
                answer.result()
            starved = starved_s(server.pid) + starved_s() - starved_before  # on a busy machine
            assert 1.0 < answer.ended_s - killed_s < 6.0 + starved
        busy_s = cpu_s(server.pid)
        again = [
            Answering(device, prompt, max_tokens=TOKENS, **wish)
            for device, prompt, wish in zip(devices, PROMPTS, WISHES, strict=True)
        ]
        time.sleep(1.0)  # they wait for the stage, and cost nothing
        assert cpu_s(server.pid) - busy_s < 0.3
        for answer in again:
            with pytest.raises(TargetLostError):
                answer.result()
        assert scrape(port)['node_up{node="stage 3"}'] == 0.0
        lone.nodes[1].restart()
        answers = begun(devices)
        assert [answer.result() for answer in answers] == wanted
        seen = scrape(port)
        assert seen["failed_passes_total"] >= 2.0
        assert seen['node_events_total{event="gone",node="stage 3"}'] == 1.0
        assert {seen[f'node_up{{node="stage {index}"}}'] for index in (2, 3, 4)} == {1.0}
        assert seen['node_compute_seconds_total{node="edge"}'] > 0.0
        assert seen['node_compute_seconds_total{node="stage 4"}'] > 0.0
        assert seen['node_bytes_total{direction="to",node="stage 2"}'] > 10_000.0
        assert seen['node_bytes_total{direction="from",node="stage 4"}'] > 10_000.0


def test_a_stage_that_hangs_but_stays_connected(
    made: Pair, wanted: list[list[int]], tmp_path: Path
) -> None:
    pace = tmp_path / "pace"
    pace.write_text("0")
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    options = [{}, {"pace": pace}, {}]
    with (
        row(folder, options=options, sessions=SLOTS, context=CONTEXT) as odd,
        served(odd, tmp_path / "row.toml", server=FLAGS, late_s=0.5, give_up_s=3.0) as server,
        at(server, made) as devices,
    ):
        answers = begun(devices, 2)  # the stage hangs long before the first of them ends
        pace.write_text("3600")
        for answer in answers:
            with pytest.raises(TargetLostError, match="within 3 s"):
                answer.result()
        pace.write_text("0")
        odd.nodes[1].kill()
        odd.nodes[1].restart()
        assert [answer.result() for answer in begun(devices)] == wanted


@SLOW
def test_a_stage_that_is_slower_than_one_is_patient_for(
    made: Pair, wanted: list[list[int]], tmp_path: Path
) -> None:
    """That costs an attachment or two, not one for each pass."""
    pace = tmp_path / "pace"
    pace.write_text("0")
    port = free_port()
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    with (
        row(folder, options=[{}, {"pace": pace}, {}], sessions=SLOTS, context=CONTEXT) as slow,
        served(
            slow, tmp_path / "row.toml", server={**FLAGS, "metrics": port}, late_s=0.2
        ) as server,
        at(server, made) as devices,
    ):
        answers = begun(devices)
        pace.write_text("0.5")
        for _ in range(4):
            answers[0].until(len(answers[0].tokens) + 1)
        assert 1.0 <= scrape(port)['node_events_total{event="late",node="stage 4"}'] <= 3.0
        pace.write_text("0")
        assert [answer.result() for answer in answers] == wanted


@SLOW
def test_a_pass_that_the_stages_die_of_is_given_up(made: Pair, tmp_path: Path) -> None:
    """It is not sent for ever to a stage that is started again and again."""
    pace = tmp_path / "pace"
    pace.write_text("0")
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    wish: dict[str, Any] = {"protocol": "coupled", "temperature": 1.0, "seed": 1, "max_tokens": 100}
    with (
        row(folder, options=[{}, {}, {"pace": pace}], sessions=SLOTS, context=CONTEXT) as frail,
        served(frail, tmp_path / "row.toml", server=FLAGS) as server,
        at(server, made) as devices,
    ):
        expected = devices[0].generate(PROMPTS[0], **wish).tokens
        answer = Answering(devices[0], PROMPTS[0], **wish)
        answer.until(10)
        pace.write_text("die")
        node, deaths = frail.nodes[2], 0
        while answer.is_alive():
            if node.died:
                deaths += 1
                node.restart()
            time.sleep(0.01)
        with pytest.raises(TargetLostError, match="lost 8 times"):
            answer.result()
        assert deaths == 9
        pace.write_text("0")
        if node.died:
            node.restart()
        assert devices[0].generate(PROMPTS[0], **wish).tokens == expected


@SLOW
def test_nothing_grows_however_often_stages_are_attached(made: Pair, tmp_path: Path) -> None:
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    wish: dict[str, Any] = {"protocol": "coupled", "temperature": 1.0, "seed": 1, "max_tokens": 30}
    with (
        row(folder, link=Hops, sessions=SLOTS, context=CONTEXT) as apart,
        served(apart, tmp_path / "row.toml", server=FLAGS) as server,
        at(server, made) as devices,
    ):
        expected = devices[0].generate(PROMPTS[0], **wish).tokens
        pids = [server.pid, *(node.server.pid for node in apart.nodes)]
        before: list[tuple[int, int]] = []
        for turn in range(18):
            apart.links[turn % 3].cut()
            assert devices[0].generate(PROMPTS[0], **wish).tokens == expected
            if turn == 5:
                before = [holdings(pid) for pid in pids]
        for (files, threads), pid in zip(before, pids, strict=True):
            assert holdings(pid)[0] <= files + 4
            assert holdings(pid)[1] <= threads + 1


@SLOW
def test_idle_stages_that_are_lost_often_are_soon_attached_again(
    made: Pair, tmp_path: Path
) -> None:
    """A stage that lost the next one is not at fault: its pauses do not grow."""
    folder = cut(made.target, made.target.parent / "thirds", 3)
    with (
        row(folder, sessions=SLOTS, context=CONTEXT) as idle,
        opened(idle, tmp_path / "row.toml", slots=SLOTS, context=CONTEXT) as target,
    ):
        for _ in range(5):
            idle.nodes[1].kill()
            until(target, lambda: not target.attached)
            idle.nodes[1].restart()
            served_s = time.monotonic()
            until(target, lambda: target.attached)
            assert time.monotonic() - served_s < 3.0


def until(target: PipelineTarget, holds: Callable[[], bool]) -> None:
    """See to the target until it is so."""
    end_s = time.monotonic() + 30.0
    while not holds():
        assert time.monotonic() < end_s, target.problem
        target.collect_scores()
        target.pause()


# The edge


def test_an_edge_killed_and_started_again(
    made: Pair, located: Row, wanted: list[list[int]], tmp_path: Path
) -> None:
    """With nodes of its own, which it left in the middle of everything."""
    folder = cut(made.target, made.target.parent / "cut", STAGES)
    with row(folder, sessions=SLOTS, context=CONTEXT) as lone:
        path = lone.listed(tmp_path / "row.toml")
        first = EdgeServer(lone.first, pipeline=path, threads=1, **FLAGS).start()
        try:
            with at(first, made, on_link_loss="wait") as devices:
                answers = begun(devices)
                os.kill(first.pid, signal.SIGKILL)
                first.stop()
                with EdgeServer(lone.first, first.endpoint, pipeline=path, threads=1, **FLAGS):
                    assert [answer.result() for answer in answers] == wanted
        finally:
            first.stop()
