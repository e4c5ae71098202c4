"""Owners share the target's passes by the time that these take, not by their number."""

from __future__ import annotations

from collections import Counter

import pytest

from pilotfish.edge_runtime.scheduler import CHUNK, NARROW, Scheduler
from tests.edge_runtime.test_scheduler import MS, Clock
from tests.edge_runtime.test_scheduler_passes import Steered, job
from tests.support.passes import collect

LONG = b"long"
SHORT = b"short"


class Edge:
    """One lane, whose passes take a millisecond a token and five besides."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.target = Steered()
        self.scheduler = Scheduler(self.target, self.clock)
        self.used: Counter[bytes] = Counter()  # tokens, by owner
        self.firsts: list[bytes] = []  # owner of each pass
        self._owners: dict[int, bytes] = {}

    def ask(self, slot: int, owner: bytes, tokens: int) -> None:
        """A window of so many tokens, always of another text."""
        self._owners[slot] = owner
        text = [1 + (self.clock.now_ns // MS + at) % 7 for at in range(tokens)]
        self.scheduler.submit(job(slot, text, self.clock, owner, rows=tokens))

    def turn(self) -> list[int]:
        """Make one pass; returns the slots whose jobs are done."""
        batch = self.scheduler.next_batch()
        assert batch is not None
        number, jobs = batch
        self.target.start(number, [each.work for each in jobs])
        self.firsts.append(self._owners[jobs[0].slot])
        for each in jobs:
            self.used[self._owners[each.slot]] += each.size
        self.clock.now_ns += (5 + sum(each.size for each in jobs)) * MS
        self.target.finish(number)
        return [done.slot for done in collect(self.scheduler)]


def test_costly_passes_take_no_more_than_their_share() -> None:
    """Wide windows of one owner beside narrower ones of another, both always waiting."""
    edge = Edge()
    widths = {0: (LONG, 120), 1: (LONG, 120), 2: (SHORT, 40)}
    for slot, (owner, tokens) in widths.items():
        edge.ask(slot, owner, tokens)
    for _ in range(120):
        for slot in edge.turn():
            edge.ask(slot, *widths[slot])
    assert 0.8 < edge.used[SHORT] / edge.used[LONG] < 1.25


def test_one_costly_rule_a_pass() -> None:
    """The verdicts of all wait for each: a window beside many of them waits for one."""
    edge = Edge()
    for slot in range(8):
        text = [1 + slot, 2]
        costly = job(slot, text, edge.clock, LONG if slot % 2 else b"other", rows=2)
        costly.expected_cpu_s = 0.05 if slot < 7 else 0.001
        edge._owners[slot] = costly.owner
        edge.scheduler.submit(costly)
    done = [sorted(edge.turn()) for _ in range(7)]
    assert [7 in slots for slots in done] == [True] + [False] * 6
    assert [len(slots) for slots in done] == [2] + [1] * 6


def test_who_owes_time_waits_for_rules() -> None:
    """Not for reading a prompt; and as soon as nothing is owed, it goes on."""
    edge = Edge()
    owing = {LONG}
    edge.scheduler.over_budget = owing.__contains__
    edge.ask(0, LONG, 4)
    assert edge.scheduler.next_batch() is None
    assert 0.0 < (edge.scheduler.wait_s() or 0.0) < 0.1  # it is looked again soon
    edge.ask(1, SHORT, 4)
    assert edge.turn() == [1]
    assert edge.scheduler.next_batch() is None
    owing.clear()
    assert edge.turn() == [0]
    assert edge.scheduler.wait_s() is None


def test_many_sessions_are_no_larger_share() -> None:
    edge = Edge()
    for slot in range(8):
        edge.ask(slot, LONG if slot else SHORT, 60)
    for _ in range(80):
        for slot in edge.turn():
            edge.ask(slot, LONG if slot else SHORT, 60)
    assert edge.firsts.count(SHORT) >= 39


def test_equal_owners_take_turns_though_their_passes_differ_a_little() -> None:
    edge = Edge()
    widths = {0: (LONG, 64), 1: (SHORT, 62)}
    for slot, (owner, tokens) in widths.items():
        edge.ask(slot, owner, tokens)
    for _ in range(12):
        for slot in edge.turn():
            edge.ask(slot, *widths[slot])
    assert edge.firsts == [LONG, SHORT] * 6


def test_silence_saves_up_no_time() -> None:
    """Who had the edge alone takes turns with who comes later."""
    edge = Edge()
    edge.ask(1, SHORT, 100)
    edge.turn()
    for _ in range(50):
        edge.ask(0, LONG, 100)
        edge.turn()
    edge.firsts.clear()
    for slot, owner in enumerate((LONG, SHORT)):
        edge.ask(slot, owner, 100)
    for _ in range(10):
        for slot in edge.turn():
            edge.ask(slot, SHORT if slot else LONG, 100)
    assert edge.firsts.count(LONG) == 5


@pytest.mark.parametrize("alone", [True, False])
def test_a_shared_pass_is_as_wide_as_its_owners_shares(alone: bool) -> None:
    """An owner's sixteen windows delay a neighbour's by a chunk, not by all of them."""
    edge = Edge()
    for slot in range(16):
        edge.ask(slot, LONG, NARROW)
    if not alone:
        edge.ask(16, SHORT, 4)
    done = edge.turn()
    assert edge.used[LONG] == (16 * NARROW if alone else CHUNK)
    assert alone or 16 in done
    while edge.scheduler.wait_s() is not None:  # and none is forgotten
        done += edge.turn()
    assert len(done) == (16 if alone else 17)


def test_owners_that_are_forgotten_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pilotfish.edge_runtime.fair_shares._OWNERS", 3)
    edge = Edge()
    for slot in range(9):
        edge.ask(slot, bytes([slot]), 60)
    done: list[int] = []
    while edge.scheduler.wait_s() is not None:
        done += edge.turn()
    assert sorted(done) == list(range(9))
    assert len(edge.scheduler._shares._used_ns) == 3


def test_a_step_looks_once_at_each_slots_next_job() -> None:
    """`wait_s` looks, and `next_batch` starts what it found."""
    edge = Edge()
    looks: list[bytes] = []
    edge.scheduler.over_budget = lambda owner: bool(looks.append(owner))
    for slot, owner in enumerate((LONG, SHORT)):
        edge.ask(slot, owner, 4)
    assert edge.scheduler.wait_s() == 0.0
    assert edge.turn() == [0, 1]
    assert looks == [LONG, SHORT]


def test_what_changes_between_a_look_and_the_pass_counts() -> None:
    edge = Edge()
    for slot in range(3):
        edge.ask(slot, SHORT, 4)
    dropped = job(3, [1, 2], edge.clock, LONG, rows=2)
    edge.scheduler.submit(dropped)
    assert edge.scheduler.wait_s() == 0.0
    dropped.cancelled = True
    assert edge.turn() == [0, 1, 2]
    edge.ask(0, SHORT, 4)
    assert edge.scheduler.wait_s() == 0.0
    edge.ask(1, SHORT, 4)
    assert edge.turn() == [0, 1]
    edge.ask(0, SHORT, 4)
    edge.ask(1, SHORT, 4)
    batch = edge.scheduler.next_batch()
    assert batch is not None
    number, jobs = batch
    edge.ask(2, SHORT, 4)
    assert edge.scheduler.wait_s() is None  # the only lane is in use
    edge.target.start(number, [each.work for each in jobs])
    edge.target.finish(number)
    assert [done.slot for done in collect(edge.scheduler)] == [0, 1]
    assert edge.turn() == [2]
