"""Several devices, and workers and edges that come and go all the while: no text is any other."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.protocols import SamplingParams
from tests.conftest import CONTEXT
from tests.support.averaging import tokens_of
from tests.support.federating import (
    SESSIONS,
    Cast,
    Ensemble,
    Running,
    again,
    cast_in,
    endless,
    federation,
    kill,
    worker,
    write_list,
)

KEPT = 16


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Cast:
    return endless(cast_in(tmp_path_factory.mktemp("cast")))


@pytest.fixture(scope="module")
def running(cast: Cast, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("chaos")
    with federation(folder, [cast.a, cast.b], kept=KEPT, late_s=2.0) as held:
        yield held


class Talker(threading.Thread):
    """A device that has answers to prompts of its own until it is told to stop."""

    def __init__(self, cast: Cast, endpoint: str, number: int, stop: threading.Event) -> None:
        super().__init__()
        self._cast, self._endpoint, self._number, self._stop_ = cast, endpoint, number, stop
        self.answers: list[tuple[list[int], int, list[int]]] = []
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            with Device(self._cast.draft, self._endpoint, threads=1, on_link_loss="wait") as device:
                while not self._stop_.is_set():
                    self._answer(device, 100 * self._number + len(self.answers))
        except Exception as error:
            self.error = error

    def _answer(self, device: Device, seed: int) -> None:
        prompt = tokens_of(seed, 4 + 23 * (seed % 5)).tolist()
        options = {"protocol": "coupled", "temperature": 1.0}
        if seed % 3 == 0:  # trees of which paths are kept; at temperature 0 all are greedy
            options = {"protocol": "tree", "expansion": (2, 2, 1), "draft_temperature": 1.3}
        answer = device.generate(prompt, max_tokens=40, seed=seed, **options)
        self.answers.append((prompt, seed, answer.tokens))


@pytest.mark.parametrize("chaos_s", [4.0, pytest.param(12.0, marks=pytest.mark.slow)])
def test_workers_that_die_and_freeze_all_the_while_change_no_text(
    cast: Cast, running: Running, chaos_s: float
) -> None:
    rng, stop = random.Random(5), threading.Event()
    talkers = [Talker(cast, running.endpoint, number, stop) for number in range(3)]
    for talker in talkers:
        talker.start()
    end_s = time.monotonic() + chaos_s
    while time.monotonic() < end_s or (
        all(talker.is_alive() for talker in talkers)
        and sum(len(talker.answers) for talker in talkers) <= 6
    ):
        time.sleep(rng.uniform(0.2, 1.0))
        index = rng.randrange(2)
        victim = running.workers[index]
        if rng.random() < 0.5:
            kill(victim)
            running.workers[index] = again((cast.a, cast.b)[index], victim.endpoint)
        else:
            os.kill(victim.pid, signal.SIGSTOP)
            time.sleep(rng.choice([0.1, 0.5, 1.6]))
            os.kill(victim.pid, signal.SIGCONT)
    stop.set()
    for talker in talkers:
        talker.join(60)
        assert not talker.is_alive()
        assert talker.error is None
    ensemble = Ensemble([cast.a, cast.b], kept=KEPT)
    answers = [answer for talker in talkers for answer in talker.answers]
    assert len(answers) > 6
    for prompt, seed, got in answers:
        law = SamplingParams(sampling=Sampling(temperature=float(seed % 3 != 0)), seed=seed)
        ensemble.assert_same(prompt, law, got, ensemble.decode(prompt, 40, law))


def test_an_edge_that_is_killed_finds_its_workers_again(cast: Cast, tmp_path: Path) -> None:
    """They have served another edge, and forget what that one had told them."""
    options = {"protocol": "coupled", "temperature": 1.0, "seed": 3, "window": 3}
    with worker(cast.a) as item, worker(cast.b) as two:
        path = write_list(
            tmp_path / "w.toml", [("a", item.endpoint), ("b", two.endpoint)], kept=KEPT
        )
        flags = {"federate": path, "sessions": SESSIONS, "threads": 1}
        first = EdgeServer(cast.a, **flags).start()
        with Device(cast.draft, first.endpoint, threads=1, on_link_loss="wait") as device:
            wanted = device.generate([3, 1, 4], max_tokens=60, **options).tokens
            pieces = device.stream([3, 1, 4], max_tokens=60, **options)
            got = [*next(pieces).tokens, *next(pieces).tokens]
            endpoint = first.endpoint
            kill(first)
            with EdgeServer(cast.a, endpoint, **flags):
                got += [token for piece in pieces for token in piece.tokens]
                assert got == wanted


@pytest.mark.parametrize("protocol", ["coupled", "tree", "stream"])
def test_a_full_context_ends_the_answer(cast: Cast, running: Running, protocol: str) -> None:
    with Device(cast.draft, running.endpoint, threads=1) as device:
        prompt = tokens_of(8, CONTEXT - 10).tolist()
        answer = device.generate(prompt, max_tokens=64, protocol=protocol)
        assert len(answer.tokens) == 10
        assert answer.finish_reason == "length"


def test_protocols_choose_and_deviate_as_over_any_target(cast: Cast, running: Running) -> None:
    """`auto` and `adaptive`; without a head for an ensemble there is no `wisv`."""
    with Device(cast.draft, running.endpoint, threads=1) as device:
        ensemble = Ensemble([cast.a, cast.b], kept=KEPT)
        wanted = ensemble.decode([3, 1, 4], 40, SamplingParams(sampling=Sampling(), seed=0))
        assert device.generate([3, 1, 4], max_tokens=40, protocol="auto").tokens == wanted
        options = {"protocol": "adaptive", "temperature": 1.0, "seed": 1, "max_tokens": 40}
        strict = device.generate([3, 1, 4], tau=0.0, **options)
        assert strict.notes["deviation"] == 0.0
        assert device.generate([3, 1, 4], tau=0.8, **options).notes["deviation"] > 0.0
        with pytest.raises(UnsupportedError, match="wisv-full"):
            device.generate([3, 1, 4], protocol="wisv-full")
