"""Targets with passes that finish at any time: when passes start, and which jobs wait."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.edge_runtime.scheduler import Job, Scheduler
from pilotfish.edge_runtime.steps import record_works
from pilotfish.edge_runtime.targets.target import Scores, Target
from pilotfish.engines.contents import SlotContents
from pilotfish.engines.engine import Work
from pilotfish.engines.onnx_decoder import Output
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.protocols import Decision, Draft
from tests.edge_runtime.test_scheduler import MS, Clock
from tests.support.passes import collect, run

VOCAB = 8


class Steered(Target):
    """Its passes finish when a test says so; each row's logits name its last token."""

    def __init__(self, lanes: int = 1, depth: int = 1, abreast: int = 1) -> None:
        self.context, self.digest = 512, "0"
        self.lanes, self.depth, self.concurrent_passes = lanes, depth, abreast
        self.started: dict[int, list[Work]] = {}
        self.cleared: list[int] = []  # slots
        self._contents = SlotContents(32, self.context)
        self._finished: list[Scores] = []

    def start(self, number: int, works: Sequence[Work]) -> None:
        self.started[number] = list(works)

    def cached(self, slot: int, tokens: NDArray[np.uint32], rows: int) -> int:
        return self._contents.find(slot, tokens, rows).tokens

    def clear(self, slot: int) -> None:
        assert all(slot != work.slot for works in self.started.values() for work in works)
        self.cleared.append(slot)
        self._contents.clear(slot)

    def collect_scores(self) -> Sequence[Scores]:
        down, self._finished = self._finished, []
        return down

    def finish(self, number: int, error: Exception | None = None) -> None:
        """A pass finishes; of one that fails, the slots hold nothing."""
        works = self.started.pop(number)
        if error is None:
            record_works(works, self._contents)
        else:
            for work in works:
                self._contents.clear(work.slot)
        answers = []
        for work in works:
            logits = np.zeros((work.rows, VOCAB), np.float32)
            logits[np.arange(work.rows), work.tokens[len(work.tokens) - work.rows :] % VOCAB] = 1.0
            answers.append(Output(logits, np.empty((work.rows, 0), np.float32)))
        self._finished.append(Scores(number, () if error else answers, error))

    @property
    def under_way(self) -> list[list[int]]:
        """The slots of the passes under way, in the order in which they left."""
        return [[work.slot for work in works] for works in self.started.values()]


def job(slot: int, tokens: Sequence[int], clock: Clock, owner: bytes = b"", rows: int = 2) -> Job:
    """A window at the end of these tokens."""

    def rule(logits: Floats, hidden: Floats) -> Decision:
        return Decision(0, int(logits[0].argmax()))

    ids = np.array(tokens, np.uint32)
    name = bytes([slot]) * 16
    return Job(name, slot, ids, rows, rule, owner=owner or name, queued_ns=clock())


@pytest.fixture
def clock() -> Clock:
    return Clock()


def leave(scheduler: Scheduler) -> None:
    """All passes leave that can leave at once."""
    while scheduler.wait_s() == 0.0:
        run(scheduler)


def test_lanes_compute_side_by_side_and_each_waits_for_its_own(clock: Clock) -> None:
    target = Steered(lanes=2)
    scheduler = Scheduler(target, clock)
    for slot in range(5):
        scheduler.submit(job(slot, [1, 2, 3], clock))
    leave(scheduler)
    assert target.under_way == [[0, 2, 4], [1, 3]]
    late, early = sorted(target.started)
    scheduler.submit(job(5, [1, 2, 3], clock))
    leave(scheduler)
    assert len(target.started) == 2, "its lane is taken"
    target.finish(early)
    assert {done.slot for done in collect(scheduler)} == {1, 3}
    leave(scheduler)
    assert target.under_way == [[0, 2, 4], [5]]
    target.finish(late)
    assert {done.slot for done in collect(scheduler)} == {0, 2, 4}


def test_a_device_due_in_one_lane_delays_no_other(clock: Clock) -> None:
    """Slots 0 and 2 share a lane: 0 waits for 2, which comes back 3 ms after each verdict."""
    target = Steered(lanes=2)
    scheduler = Scheduler(target, clock)

    def round_trip(*slots: int) -> None:
        for slot in slots:
            scheduler.submit(job(slot, [1, 2, 3], clock))
        leave(scheduler)
        clock.now_ns += 80 * MS
        for number in list(target.started):
            target.finish(number)
        collect(scheduler)
        clock.now_ns += 3 * MS

    round_trip(0, 1, 2, 3)
    round_trip(0, 1, 2, 3)
    scheduler.submit(job(0, [1, 2, 3], clock))
    assert scheduler.wait_s() == pytest.approx(0.75e-3), "a quarter longer than 2 took last time"
    scheduler.submit(job(1, [1, 2, 3], clock))
    scheduler.submit(job(3, [1, 2, 3], clock))
    assert scheduler.wait_s() == 0.0, "no other device is due in the other lane"
    leave(scheduler)
    assert target.under_way == [[1, 3]]
    scheduler.submit(job(2, [1, 2, 3], clock))
    leave(scheduler)
    assert target.under_way == [[1, 3], [0, 2]]


def test_how_long_a_lane_waits_follows_from_its_own_passes(clock: Clock) -> None:
    """Lane 0 takes 8 ms a pass, lane 1 takes 800: an eighth of 8 is too short to wait for 2."""
    target = Steered(lanes=2)
    scheduler = Scheduler(target, clock)
    for _ in range(2):
        for slot in range(4):
            scheduler.submit(job(slot, [1, 2, 3], clock))
        leave(scheduler)
        quick, slow = sorted(target.started)
        clock.now_ns += 8 * MS
        target.finish(quick)
        collect(scheduler)
        clock.now_ns += 792 * MS
        target.finish(slow)
        collect(scheduler)
        clock.now_ns += 5 * MS
    scheduler.submit(job(1, [1, 2, 3], clock))
    assert scheduler.wait_s() == pytest.approx(1.25e-3), "slot 3 is due"
    leave(scheduler)
    assert target.under_way == []
    for slot in (0, 2):
        scheduler.submit(job(slot, [1, 2, 3], clock))
    leave(scheduler)
    assert target.under_way == [[0, 2]]


def test_as_many_passes_as_a_lane_takes_and_the_jobs_shared_out(clock: Clock) -> None:
    target = Steered(depth=3, abreast=3)
    scheduler = Scheduler(target, clock)
    for slot in range(7):
        scheduler.submit(job(slot, [1, 2, 3], clock))
    leave(scheduler)
    assert [len(slots) for slots in target.under_way] == [3, 2, 2]
    first = min(target.started)
    scheduler.submit(job(7, [1, 2, 3], clock))
    leave(scheduler)
    assert len(target.started) == 3
    target.finish(first)
    collect(scheduler)
    leave(scheduler)
    assert target.under_way[-1] == [7]


def test_an_owner_with_a_pass_under_way_comes_after_waiting_ones(clock: Clock) -> None:
    """With two passes under way fairness cannot wait for the first one to come back."""
    target = Steered(depth=4)
    scheduler = Scheduler(target, clock)
    greedy = [job(slot, range(40), clock, owner=b"greedy", rows=40) for slot in range(4)]
    for each in greedy:
        scheduler.submit(each)
    run(scheduler)
    clock.now_ns += MS
    scheduler.submit(job(9, range(40), clock, owner=b"modest", rows=40))
    run(scheduler)
    assert target.under_way == [[0], [9]]


def test_jobs_of_a_slot_never_overtake_each_other(clock: Clock) -> None:
    target = Steered(depth=4)
    scheduler = Scheduler(target, clock)
    first, second = job(0, [1, 2, 3], clock), job(0, [1, 2, 3, 4], clock)
    scheduler.submit(first)
    scheduler.submit(second)
    leave(scheduler)
    assert target.under_way == [[0]]
    target.finish(min(target.started))
    assert collect(scheduler) == [first]
    leave(scheduler)
    assert (second.size, len(second.work.tokens)) == (2, 4), "all that is held but what rows need"


def test_a_job_cancelled_in_a_pass_leaves_its_slot_to_the_next_session(
    clock: Clock,
) -> None:
    """The slot is given away meanwhile: it is emptied before the next session's pass."""
    target = Steered(depth=2)
    scheduler = Scheduler(target, clock)
    missing = job(0, [1, 2, 3, 4], clock)
    scheduler.submit(missing)
    leave(scheduler)
    missing.cancelled = True
    heir = job(0, [1, 2, 3, 5], clock)
    heir.session = b"another" * 2
    scheduler.submit(heir)
    leave(scheduler)
    assert len(target.started) == 1
    target.finish(min(target.started))
    assert collect(scheduler) == [missing]
    leave(scheduler)
    assert target.cleared == [0, 0]
    assert heir.size == 4
    target.finish(min(target.started))
    assert collect(scheduler) == [heir]
    again = job(0, [1, 2, 3, 5, 6], clock)
    again.session = heir.session
    scheduler.submit(again)
    leave(scheduler)
    assert target.cleared == [0, 0]
    assert again.size == 2


@pytest.mark.parametrize("same", ["owner", "session"])
def test_nothing_of_a_slot_is_left_to_another_owner_or_session(clock: Clock, same: str) -> None:
    """Else the size and time of a pass would tell it what the other has read."""
    target = Steered()
    scheduler = Scheduler(target, clock)
    jobs = [job(3, [1, 2, 3, 4, 5, 6], clock, owner=b"first") for _ in range(3)]
    if same == "owner":
        jobs[2].session = b"another" * 2
    else:
        jobs[2].owner = b"second"
    for each in jobs:
        scheduler.submit(each)
        leave(scheduler)
        target.finish(min(target.started))
        assert collect(scheduler) == [each]
    assert [each.size for each in jobs] == [6, 2, 6]
    assert target.cleared == [3, 3]


def test_a_job_may_be_cancelled_while_its_pass_is_put_together(clock: Clock) -> None:
    """The receiver's thread does that; here the clock does, which is read in between."""
    target = Steered()
    only = job(0, [1, 2, 3], clock)

    class Meanwhile(Clock):
        def __call__(self) -> int:
            only.cancelled = True
            return self.now_ns

    scheduler = Scheduler(target, Meanwhile())
    scheduler.submit(only)
    run(scheduler)
    assert target.under_way in ([], [[0]])


def test_a_pass_that_fails_costs_its_own_jobs_only(clock: Clock) -> None:
    target = Steered(depth=2, abreast=2)
    scheduler = Scheduler(target, clock)
    jobs = [job(slot, [1, 2, 3], clock) for slot in range(4)]
    for each in jobs:
        scheduler.submit(each)
    leave(scheduler)
    bad, good = sorted(target.started)
    target.finish(bad, RuntimeError("lost"))
    target.finish(good)
    done = collect(scheduler)
    assert {each.slot for each in done if each.error} == {0, 1}
    assert {each.slot for each in done if each.decision} == {2, 3}
    again = [job(slot, [1, 2, 3], clock) for slot in (0, 2)]
    for each in again:
        scheduler.submit(each)
    leave(scheduler)
    assert [each.size for each in again] == [3, 2], "the target knows what its slots hold"


class Branches(Draft):
    """Three nodes: two children of the root, and one of the first's."""

    @property
    def parents(self) -> NDArray[np.int64]:
        return np.array([-1, -1, 0])

    def path(self, node: int) -> Sequence[int]:
        return [[], [1], [2], [1, 3]][node]


def test_of_a_tree_the_path_is_not_computed_again(clock: Clock) -> None:
    target = Steered(depth=2)
    scheduler = Scheduler(target, clock)
    tree = job(0, [1, 2, 3, 4, 5], clock, rows=4)
    tree.draft = Branches(np.array([3, 4, 5], np.uint32))
    tree.verify = lambda logits, hidden: Decision(3, 1)
    scheduler.submit(tree)
    leave(scheduler)
    target.finish(min(target.started))
    collect(scheduler)
    following = job(0, [1, 2, 3, 5, 6, 7], clock)
    scheduler.submit(following)
    leave(scheduler)
    assert following.size == 2, "the slot holds the prompt and the path"
