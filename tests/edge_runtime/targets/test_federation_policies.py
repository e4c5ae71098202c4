"""A worker that freezes, dies, comes back or stays away: the list's policy, told and counted."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from pilotfish import Device
from pilotfish.base.errors import TargetLostError
from pilotfish.device_runtime.record import Piece
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import SamplingParams
from tests.support.daemons import await_sample, free_port, scrape
from tests.support.federating import (
    Cast,
    Ensemble,
    Running,
    again,
    cast_in,
    endless,
    federation,
    kill,
)

PROMPT = [3, 1, 4, 1, 5]
LENGTH = 60
OPTIONS = {"protocol": "coupled", "temperature": 1.0, "seed": 2, "window": 3, "max_tokens": LENGTH}
LAW = SamplingParams(sampling=Sampling(temperature=1.0), seed=2)
KEPT = 16
LATE_S, GIVE_UP_S = 1.5, 4.5  # more than anything takes on a busy machine
SLACK_S = 4.0
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Cast:
    return endless(cast_in(tmp_path_factory.mktemp("cast")))


@dataclass
class Play:
    """A federation under a policy, its device, and what may befall its workers "a" and "b"."""

    cast: Cast
    running: Running
    device: Device

    def __post_init__(self) -> None:
        self.both = Ensemble([self.cast.a, self.cast.b], kept=KEPT)
        self.first = Ensemble([self.cast.a], kept=KEPT)
        self.wanted = self.both.decode(PROMPT, LENGTH, LAW)

    def events(self, node: str) -> dict[str, float]:
        figures = scrape(self.running.metrics)
        kinds = ("late", "gone", "dropped", "lied", "refused")
        name = 'node_events_total{{event="{}",node="{}"}}'
        return {kind: figures.get(name.format(kind, node), 0.0) for kind in kinds}

    def is_up(self, node: str) -> bool:
        return scrape(self.running.metrics)[f'node_up{{node="{node}"}}'] == 1.0

    def freeze(self, index: int) -> None:
        os.kill(self.running.workers[index].pid, signal.SIGSTOP)

    def thaw(self, index: int) -> None:
        os.kill(self.running.workers[index].pid, signal.SIGCONT)

    def end(self, index: int) -> None:
        kill(self.running.workers[index])

    def restart(self, index: int) -> None:
        before = self.running.workers[index]
        model = (self.cast.a, self.cast.b)[index]
        self.running.workers[index] = again(model, before.endpoint)

    def await_all(self) -> None:
        """Until both workers take part."""
        for node in "ab":
            await_sample(self.running.metrics, f'node_up{{node="{node}"}}', 1)

    def answer(self) -> list[int]:
        tokens: list[int] = self.device.generate(PROMPT, **OPTIONS).tokens
        return tokens

    def fails(self, *names: str) -> float:
        """An answer ends in a typed error that names these workers; how long that took."""
        began_s = time.monotonic()
        with pytest.raises(TargetLostError, match=", ".join(names)):
            self.answer()
        return time.monotonic() - began_s


def take(pieces: Iterator[Piece], rounds: int) -> list[int]:
    """The tokens of so many rounds, each of which ends with one that was not drafted."""
    tokens: list[int] = []
    while rounds:
        piece = next(pieces)
        tokens += piece.tokens
        rounds -= piece.origin != "drafted"
    return tokens


def play_under(policy: str, cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    settings = {"late": policy, "late_s": LATE_S, "give_up_s": GIVE_UP_S, "kept": KEPT}
    folder = tmp_path_factory.mktemp(policy)
    with (
        federation(folder, [cast.a, cast.b], metrics=free_port(), **settings) as running,
        Device(cast.draft, running.endpoint, threads=1) as device,
    ):
        yield Play(cast, running, device)


@pytest.fixture(scope="module")
def waiting(cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    yield from play_under("wait", cast, tmp_path_factory)


@pytest.fixture(scope="module")
def dropping(cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    yield from play_under("drop", cast, tmp_path_factory)


@pytest.fixture(scope="module")
def failing(cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Play]:
    yield from play_under("fail", cast, tmp_path_factory)


# wait


@SLOW
@pytest.mark.parametrize("frozen_s", [0.3, 3.0])
def test_a_frozen_worker_is_waited_for(waiting: Play, frozen_s: float) -> None:
    """For longer than its connection lasts, too."""
    before = waiting.events("b")
    pieces = waiting.device.stream(PROMPT, **OPTIONS)
    got = take(pieces, 2)
    waiting.freeze(1)
    threading.Timer(frozen_s, waiting.thaw, [1]).start()
    began_s = time.monotonic()
    got += take(pieces, 1)
    assert time.monotonic() - began_s > frozen_s - 0.1
    got += [token for piece in pieces for token in piece.tokens]
    assert got == waiting.wanted
    after = waiting.events("b")
    assert after["gone"] + after["late"] >= before["gone"] + before["late"] + (frozen_s > LATE_S)
    assert after["dropped"] == 0


@pytest.mark.parametrize("victims", [pytest.param([0], marks=SLOW), [1], [0, 1]])
def test_a_worker_that_is_killed_and_comes_back_changes_nothing(
    waiting: Play, victims: list[int]
) -> None:
    """In the middle of an answer, twice; it is told all that it has forgotten."""
    pieces = waiting.device.stream(PROMPT, **OPTIONS)
    got: list[int] = []
    for _ in range(2):
        got += take(pieces, 2)
        for index in victims:
            waiting.end(index)
        restarting = threading.Thread(target=lambda: [waiting.restart(i) for i in victims])
        restarting.start()
        got += take(pieces, 1)
        restarting.join()
    got += [token for piece in pieces for token in piece.tokens]
    assert got == waiting.wanted
    assert all(waiting.events("ab"[index])["gone"] >= 1 for index in victims)


@SLOW
@pytest.mark.parametrize("victims", [pytest.param([1], marks=SLOW), [0, 1]])
def test_no_pass_waits_forever(waiting: Play, victims: list[int]) -> None:
    for index in victims:
        waiting.end(index)
    took_s = waiting.fails(*("ab"[index] for index in victims))
    assert GIVE_UP_S <= took_s < 2 * GIVE_UP_S + SLACK_S  # the prompt, and then the window
    for index in victims:
        waiting.restart(index)
    assert waiting.answer() == waiting.wanted


# drop


def test_without_a_killed_worker_the_other_goes_on_until_it_is_back(dropping: Play) -> None:
    before = dropping.events("b")
    pieces = dropping.device.stream(PROMPT, **OPTIONS)
    got = take(pieces, 5)
    at_kill = len(got)
    dropping.end(1)
    began_s = time.monotonic()
    got += take(pieces, 5)
    assert time.monotonic() - began_s < LATE_S  # a lost worker is not waited for
    assert not dropping.is_up("b")
    dropping.restart(1)
    dropping.await_all()
    at_return = len(got)
    got += [token for piece in pieces for token in piece.tokens]
    both = dropping.both.choices(PROMPT, got, LAW)
    first = dropping.first.choices(PROMPT, got, LAW)
    wanted = [*both[:at_kill], *first[at_kill:at_return], *both[at_return:]]
    assert got == wanted
    for part in (slice(0, at_kill), slice(at_kill, at_return), slice(at_return, LENGTH)):
        assert both[part] != first[part]
    after = dropping.events("b")
    assert after["gone"] == before["gone"] + 1
    assert after["dropped"] >= before["dropped"] + 5
    assert dropping.events("a")["dropped"] == 0
    assert dropping.answer() == dropping.wanted


@SLOW
def test_without_a_frozen_worker_the_other_goes_on_after_a_while(dropping: Play) -> None:
    before = dropping.events("b")
    pieces = dropping.device.stream(PROMPT, **OPTIONS)
    got = take(pieces, 5)
    at_freeze = len(got)
    dropping.freeze(1)
    began_s = time.monotonic()
    got += take(pieces, 1)
    assert time.monotonic() - began_s < LATE_S + SLACK_S
    got += [token for piece in pieces for token in piece.tokens]
    both = dropping.both.choices(PROMPT, got, LAW)
    first = dropping.first.choices(PROMPT, got, LAW)
    assert got == [*both[:at_freeze], *first[at_freeze:]]
    dropping.thaw(1)
    dropping.await_all()
    after = dropping.events("b")
    assert after["dropped"] > before["dropped"]
    assert after["gone"] + after["late"] > before["gone"] + before["late"]
    assert dropping.answer() == dropping.wanted


@SLOW
def test_when_all_are_gone_the_first_that_is_back_answers_alone(dropping: Play) -> None:
    for index in (0, 1):
        dropping.end(index)
    restarting = threading.Thread(target=dropping.restart, args=[0])
    restarting.start()
    assert dropping.answer() == dropping.first.decode(PROMPT, LENGTH, LAW)
    restarting.join()
    dropping.restart(1)
    dropping.await_all()
    assert dropping.answer() == dropping.wanted


def test_when_all_stay_away_no_pass_waits_forever(dropping: Play) -> None:
    for index in (0, 1):
        dropping.end(index)
    assert dropping.fails("a", "b") < 2 * GIVE_UP_S + SLACK_S
    for index in (0, 1):
        dropping.restart(index)
    dropping.await_all()
    assert dropping.answer() == dropping.wanted


# fail


def test_without_a_worker_an_answer_fails_and_the_next_one_works(failing: Play) -> None:
    pieces = failing.device.stream(PROMPT, **OPTIONS)
    next(pieces)
    failing.end(1)
    began_s = time.monotonic()
    with pytest.raises(TargetLostError, match="b did not answer"):
        for _ in pieces:
            pass
    assert LATE_S <= time.monotonic() - began_s < LATE_S + SLACK_S
    assert failing.fails("b") < 2 * LATE_S + SLACK_S
    assert failing.events("b")["late"] >= 2
    failing.restart(1)
    failing.await_all()
    assert failing.answer() == failing.wanted


@SLOW
def test_a_worker_that_is_back_in_time_fails_no_pass(failing: Play) -> None:
    """It was only frozen for a moment."""
    pieces = failing.device.stream(PROMPT, **OPTIONS)
    got = take(pieces, 1)
    failing.freeze(1)
    threading.Timer(0.4, failing.thaw, [1]).start()
    got += [token for piece in pieces for token in piece.tokens]
    assert got == failing.wanted


@SLOW
def test_one_device_s_error_is_not_anothers(failing: Play, cast: Cast) -> None:
    """A session that was there before goes on after the failure, with what it holds."""
    with Device(cast.draft, failing.running.endpoint, threads=1) as other:
        assert other.generate(PROMPT, **OPTIONS).tokens == failing.wanted
        failing.end(0)
        failing.fails("a")
        failing.restart(0)
        failing.await_all()
        assert other.generate(PROMPT, **OPTIONS).tokens == failing.wanted


@SLOW
@pytest.mark.parametrize("policy", ["wait", "local"])
def test_a_device_need_not_mind(failing: Play, cast: Cast, policy: str) -> None:
    """It waits until the edge has its target again, or its drafter goes on alone."""
    with Device(
        cast.draft, failing.running.endpoint, threads=1, on_link_loss=policy, patience_s=60.0
    ) as device:
        pieces = device.stream(PROMPT, **OPTIONS)
        got = take(pieces, 1)
        failing.end(1)
        restarting = threading.Timer(LATE_S + 1.0, failing.restart, [1])
        restarting.start()
        rest = list(pieces)
        restarting.join()
        assert device.last is not None
        assert len(device.last.tokens) == LENGTH
        if policy == "wait":
            assert [*got, *(token for piece in rest for token in piece.tokens)] == failing.wanted
        else:
            assert "local" in {piece.origin for piece in rest}
        assert device.last.recoveries
    failing.await_all()
