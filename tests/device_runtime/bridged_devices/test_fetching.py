"""A vocabulary is fetched: interrupted, cut, shown."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pilotfish import EdgeServer
from pilotfish.base.errors import (
    AccessDeniedError,
    InterruptedGenerationError,
)
from pilotfish.wire import messages as m
from tests.device_runtime.bridged_devices.asking import (
    GREEDY,
    TEXT,
    Models,
    opened,
    wanted_of,
)
from tests.device_runtime.test_bad_edge import LyingEdge
from tests.device_runtime.test_link_loss import await_true
from tests.support.relay import Relay


def test_a_fetch_can_be_interrupted_and_shows_that_it_lives(
    models: Models, server: EdgeServer, liar: Callable[..., LyingEdge], empty_cache: Path
) -> None:
    edge = liar(models.other)  # leaves what is asked for a part unanswered
    with opened(models, server.endpoint, "wait") as device:
        wanted = device.generate(TEXT, **GREEDY).tokens
        device.redirect(edge.endpoint)
        ended: list[BaseException] = []

        def ask() -> None:
            try:
                device.generate(TEXT, **GREEDY)
            except BaseException as error:
                ended.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        await_true(lambda: any(isinstance(each, m.Fetch) for each in edge.requests))
        for _ in range(3):
            before = device.last_checked_s
            await_true(lambda at=before: device.last_checked_s > at)
        device.interrupt()
        asking.join(20)
        assert [type(error) for error in ended] == [InterruptedGenerationError]
        device.redirect(server.endpoint)
        assert device.generate(TEXT, **GREEDY).tokens == wanted


def test_an_edge_that_goes_away_in_the_middle_of_a_fetch(
    models: Models, relay: Relay, other_server: EdgeServer, empty_cache: Path
) -> None:
    """Under `local` the answer is the drafter's; when the edge is back the rest is fetched."""
    with opened(models, relay.endpoint, "local") as device:
        device.generate(TEXT, **GREEDY)
        deaf = Deaf(relay)
        device._pairs._progress = deaf
        relay.turn_to(other_server.endpoint)
        relay.cut()
        with suppress(AccessDeniedError):
            device.generate(TEXT, max_tokens=1, protocol="greedy")
        await_true(lambda: device.link_up)
        for _ in range(3):
            got = device.generate(TEXT, **GREEDY)
        assert {record.protocol for record in got.rounds} == {"greedy"}
        assert got.tokens == wanted_of(device, TEXT, GREEDY)


class Deaf:
    """Cuts the link when the first part is there."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self.received = 0

    def __call__(self, done: int, total: int) -> None:
        self.received += 1
        self._relay.cut()
