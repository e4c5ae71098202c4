"""Sharing sessions when all are taken: no owner keeps all others out."""

from __future__ import annotations

import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import TooManySessionsError
from pilotfish.edge_runtime.edge_config import EdgeLimits
from pilotfish.edge_runtime.generation import Generation
from pilotfish.edge_runtime.sessions import Session, Sessions
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire import keys
from pilotfish.wire import messages as m
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.protocols import SamplingParams
from tests.conftest import Pair
from tests.support.daemons import free_port, running, scrape
from tests.support.hostile import PROMPT, RawClient, RawSession

IDLE_S = 60.0


def bare_generation() -> Generation:
    """A `stream` without options."""
    sampling_params = SamplingParams(sampling=Sampling(temperature=1.0), seed=1)
    return Generation(0, sampling_params, None, None, None, None, None, 0.0)


class Table:
    """Sessions under a clock that is set by hand."""

    def __init__(self, slots: int, per_owner: int = 8) -> None:
        self.now_s = 0.0
        limits = EdgeLimits(
            sessions=slots, sessions_per_client=per_owner, idle_s=IDLE_S, expire_s=IDLE_S
        )
        self.sessions = Sessions(limits, lambda job: None, lambda: self.now_s)

    def open(self, owner: str, *, busy: bool = False) -> Session:
        self.now_s += 1.0
        session = self.sessions.open(secrets.token_bytes(16), owner.encode())
        if busy:
            session.generation = bare_generation()
            session.queue_job(session.generation, np.zeros(0, np.uint32), 0, None)
        return session

    @property
    def held(self) -> dict[str, int]:
        owners = [session.owner.decode() for session in self.sessions]
        return {owner: owners.count(owner) for owner in owners}


@pytest.mark.parametrize("busy", [False, True])
def test_the_owner_with_most_gives_way(busy: bool) -> None:
    """Also where each of its sessions has work all the time."""
    table = Table(slots=4)
    first, *_ = [table.open("greedy", busy=busy) for _ in range(3)]
    table.open("modest")
    table.open("newcomer")
    assert table.held == {"greedy": 2, "modest": 1, "newcomer": 1}
    assert first not in table.sessions
    with pytest.raises(TooManySessionsError):
        table.open("newcomer")  # it would then have more than the other keeps
    with pytest.raises(TooManySessionsError):
        table.open("greedy")


def test_a_session_gets_the_lowest_free_slot() -> None:
    """Adjacent slots make the cheapest batch."""
    table = Table(slots=4)
    held = [table.open("one") for _ in range(4)]
    for at in (3, 1, 2):
        table.sessions.close(held[at])
    assert [table.open("one").slot for _ in range(3)] == [1, 2, 3]


def test_work_under_way_is_displaced_last() -> None:
    table = Table(slots=3)
    table.open("greedy", busy=True)
    idle = table.open("greedy")
    table.open("greedy", busy=True)
    table.open("newcomer")
    assert idle not in table.sessions


def test_what_idles_goes_before_what_is_used() -> None:
    table = Table(slots=3)
    idle = table.open("modest")
    table.now_s += IDLE_S
    for _ in range(2):
        table.open("greedy")
    table.open("newcomer")
    assert idle not in table.sessions


def test_to_look_a_session_up_is_no_use_of_it() -> None:
    table = Table(slots=1)
    session = table.open("one")
    table.now_s += IDLE_S
    assert table.sessions.find(session.id, b"one") is session
    table.open("other")
    assert table.held == {"other": 1}


def test_what_waits_for_a_pass_does_not_expire() -> None:
    """However long the passes before it take, and whoever else is idle."""
    table = Table(slots=3)
    waits, rests = table.open("one", busy=True), table.open("one")
    table.now_s += IDLE_S
    fresh = table.open("other")
    table.sessions.expire()
    assert rests not in table.sessions
    assert [*table.sessions] == [waits, fresh]
    waits.stop()
    table.sessions.expire()
    assert [*table.sessions] == [fresh]


@given(st.lists(st.sampled_from("abcd"), max_size=80), st.integers(2, 9))
def test_whoever_comes_again_and_again_gets_a_fair_share(asking: list[str], slots: int) -> None:
    """After any crowd: an owner that asks until it is refused is at most one short of the most."""
    table = Table(slots)
    for owner in asking:
        try:
            table.open(owner)
        except TooManySessionsError:
            held = table.held
            assert sum(held.values()) == slots
            assert max(held.values()) - held.get(owner, 0) <= 1
    before = table.held
    if "new" not in before and max(before.values(), default=0) != 1:
        table.open("new")  # and one that has none comes in at once


def test_to_begin_and_end_again_and_again_drives_out_few() -> None:
    table = Table(8)
    for _ in range(8):
        table.open("alice", busy=True)
    driven_out = 0
    for _ in range(100):
        with suppress(TooManySessionsError):
            table.sessions.close(table.open("carol"))
        table.now_s -= 0.9
        while table.held["alice"] < 8:
            table.open("alice", busy=True)
            driven_out += 1
    assert driven_out == 8
    table.now_s += IDLE_S
    table.open("carol")  # and in time it is welcome again


def test_to_be_driven_out_is_no_end_of_ones_own() -> None:
    """Whoever has driven others out and is driven out in turn may come in again."""
    table = Table(slots=2, per_owner=2)
    for other in ("alice", "bob", "dave"):  # each holds all
        others = [table.open(other, busy=True) for _ in range(2)]
        driven_out = table.open("carol", busy=True)
        table.sessions.close(others[1])
        carols = table.open("carol", busy=True)
        back = table.open(other, busy=True)
        assert driven_out not in table.sessions
        table.sessions.close(carols)
        table.sessions.close(back)


@pytest.fixture
def folder(tmp_path: Path, key_folders: dict[str, Path]) -> Path:
    """An edge's keys, with three devices on the list."""
    folder = Path(shutil.copytree(key_folders["edge"], tmp_path / "keys"))
    keys.allow(folder, key_folders["eve"] / "device.pub", "carol")
    return folder


def test_two_keys_that_hold_all_sessions_keep_no_third_out(
    pair: Pair, folder: Path, key_folders: dict[str, Path]
) -> None:
    """By cancels or by pings, they are not used; and if they are used, one still gives way."""
    alice, bob, carol = (DeviceKeys.load(key_folders[name]) for name in ("alice", "bob", "eve"))
    port = free_port()
    flags = ("--target", pair.target, "--threads", 1, "--keys", folder, "--metrics", port)
    flags += ("--metrics-devices",)
    with (
        running(*flags, "--sessions", 6, "--idle", 1) as edge,
        RawClient(edge.endpoint, alice) as a,
        RawClient(edge.endpoint, bob) as b,
        RawClient(edge.endpoint, carol) as c,
    ):
        held = [(client, RawSession()) for client in (a, b) for _ in range(3)]
        for client, session in held:
            client.send(*session.begin(PROMPT))
        assert a.settle() == b.settle() == []

        def come_in() -> list[m.Reply]:
            c.send(*RawSession().begin(PROMPT))
            return c.settle()

        assert come_in() == []
        time.sleep(1.1)
        for client, session in held:
            client.say(m.Cancel(session=session.id, generation=0))
        a.settle()
        b.settle()
        for _ in range(5):  # all that is held has idled, in spite of the cancels
            assert come_in() == []
        counts = {name: scrape(port)[f'device_sessions{{device="{name}"}}'] for name in ("carol",)}
        assert counts == {"carol": 6}
