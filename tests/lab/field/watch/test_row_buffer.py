"""Rows that the disk does not take: they wait, and nothing is lost or written twice."""

from __future__ import annotations

import resource
import shutil
import sqlite3
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pilotfish.device_runtime.record import Round, RttSample
from pilotfish.lab.field.answer import Answer
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_facts import Facts, Model, Start, Watch
from pilotfish.lab.field.watch import row_buffer
from pilotfish.lab.field.watch.retention import forget_old
from pilotfish.lab.field.watch.row_buffer import RowBuffer
from pilotfish.lab.field.watch.watch_file import reopen
from tests.support.examples import examples
from tests.support.made_watches import MEMORY

EVERY_S = 300.0
WATCH = Watch(every_s=EVERY_S)


def facts():
    return Facts(
        software="pilotfish",
        settings=MatrixSettings(prompts=("abc",)),
        starts=(Start(unix_s=1e9, host={}),),
        drafter=Model("text"),
        target=None,
        edge="tcp://127.0.0.1:7077",
        edge_software=None,
        draft_path="text",
        keys_path=None,
        note="",
        energy=None,
        device="a",
        watch=WATCH,
    )


class Buffered:
    def __init__(self, out):
        self.problems: list[str] = []
        self.rows = RowBuffer(
            Recorder.create(out, facts()),
            lambda: reopen(out, facts()),
            on_disk=self.problems.append,
        )


@pytest.fixture
def buffered(out):
    result = Buffered(out)
    yield result
    result.rows.close()


def add_answer(rows, number, *, length=16, finished=True):
    """Add an answer as `Measurement` does."""
    answer = Answer(
        id=0,
        protocol="stream",
        window=None,
        prompt=0,
        repeat=number,
        warm_up=False,
        temperature=0.0,
        seed=0,
        started_unix_s=1e9 + number * EVERY_S,
        clock_s=number * EVERY_S + 1.0,
        finished=False,
    )
    rows.begin(answer)
    for at in range(length):
        round_ = Round(protocol="stream", start=3 + at, window=0, accepted=0, tokens=[at])
        rows.add_round(0, at, 0.01 * (at + 1), round_)
    rows.add_rtts(0, [RttSample(0.01, 0.05)])
    rows.end(0, finished=finished, prompt_tokens=3, tokens=length, total_s=0.5)


def probe(number):
    return Probe(
        began_unix_s=1e9 + number * EVERY_S,
        clock_s=number * EVERY_S,
        took_s=1.0,
        rtts_s=[0.05] * 10,
    )


def add_round(rows, number):
    rows.add_probe(probe(number))
    add_answer(rows, number)


@contextmanager
def full_disk(out, more=20_000):
    """Let files grow by so many bytes at most, as a full disk does."""
    wal = out.with_name(out.name + "-wal")
    most = max(path.stat().st_size for path in (out, wal) if path.exists()) + more
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def recorded(out):
    """The rounds of the probes and of the answers in the file."""
    with Run.open(out) as run:
        answers = list(run.answers())
        assert all(len(answer.rounds) == answer.tokens for answer in answers)
        assert all(len(answer.rtts) == 1 for answer in answers)
        return (
            [round(each.clock_s / EVERY_S) for each in run.probes()],
            [answer.repeat for answer in answers],
        )


def test_rows_that_wait_are_written_by_the_hundred(out, buffered, monkeypatch):
    """At an end by a signal the watch has seconds, and each transaction waits for the disk."""
    transactions = []
    together = Recorder.together
    monkeypatch.setattr(
        Recorder, "together", lambda self: transactions.append(self) or together(self)
    )
    with full_disk(out, 0):
        for number in range(1_000):
            buffered.rows.add_probe(probe(number))
    assert buffered.rows.waiting > 900
    transactions.clear()
    buffered.rows.flush()
    assert len(transactions) <= 11
    with Run.open(out) as run:
        assert [each.clock_s / EVERY_S for each in run.probes()] == list(range(1_000))


def test_a_failed_deletion_is_over_with_the_next_sign_of_life(buffered):
    def fail(recorder):
        raise OSError("no room")

    buffered.rows.tidy(fail)
    assert buffered.rows.problem == "no room"
    assert buffered.rows.waiting == 0
    buffered.rows.note_alive(1e9, 1.0)
    assert buffered.problems == ["no room", ""]


def test_what_a_full_disk_refuses_is_written_when_there_is_room(out, buffered):
    add_round(buffered.rows, 0)
    with full_disk(out):
        for number in range(1, 60):
            add_round(buffered.rows, number)
        assert buffered.rows.waiting > 10
        assert len(buffered.problems) == 1  # once, not for each row
        assert str(out) in buffered.problems[0]
        in_file, _ = recorded(out)
        assert in_file == list(range(len(in_file)))
    buffered.rows.flush()
    assert buffered.problems[1:] == [""]
    assert buffered.rows.waiting == 0
    assert recorded(out) == (list(range(60)), list(range(60)))


def test_a_failed_write_leaves_no_part_of_an_answer(out, buffered, monkeypatch):
    taken = Recorder.add_round

    def breaking(recorder, answer, number, at_s, round_):
        if number == 7:
            raise OSError("the disk is gone.")
        taken(recorder, answer, number, at_s, round_)

    with monkeypatch.context() as broken:
        broken.setattr(Recorder, "add_round", breaking)
        add_answer(buffered.rows, 0)
    with Run.open(out) as run:
        assert list(run.answers(finished=False)) == []
    buffered.rows.flush()
    assert recorded(out)[1] == [0]


def test_a_file_that_was_moved_is_begun_anew(out, buffered):
    add_round(buffered.rows, 0)
    moved = out.with_name("moved.pilotfish")
    out.rename(moved)
    add_round(buffered.rows, 1)
    buffered.rows.flush()
    assert "moved or deleted" in buffered.problems[0]
    assert recorded(moved)[0] == [0]
    assert recorded(out) == ([1], [1])


def test_an_answer_of_another_target_is_dropped(out, buffered):
    def refuse():
        raise ValueError("another target")

    buffered.rows.check_answer = refuse
    with pytest.raises(ValueError, match="another"):
        add_answer(buffered.rows, 0)
    add_answer(buffered.rows, 1, finished=False)
    buffered.rows.flush()
    with Run.open(out) as run:
        assert [answer.repeat for answer in run.answers(finished=False)] == [1]


def test_an_outage_that_waits_for_the_disk_keeps_its_end(out, buffered):
    with full_disk(out, more=0):
        for number in range(40):
            add_round(buffered.rows, number)
        outage = Outage(began_unix_s=1e9, began_clock_s=50.0, reason="away")
        buffered.rows.add_outage(outage)
        buffered.rows.add_outage(replace(outage, ended_unix_s=1e9 + 7.0, ended_clock_s=57.0))
        assert buffered.rows.waiting
    buffered.rows.flush()
    with Run.open(out) as run:
        (outage,) = run.outages()
    assert (outage.began_clock_s, outage.ended_clock_s, outage.reason) == (50.0, 57.0, "away")


def test_memory_is_bounded(out, buffered, monkeypatch):
    monkeypatch.setattr(row_buffer, "MOST_ROWS", 20)
    with full_disk(out, more=0):
        for number in range(60):
            add_round(buffered.rows, number)
        assert buffered.rows.waiting == 20
        assert buffered.rows.dropped > 20
    buffered.rows.flush()
    in_file, _ = recorded(out)
    assert in_file[-1] == 59
    assert len(in_file) < 60


def test_a_damaged_file_is_a_broken_disk(out, buffered):
    """Rows wait, though SQLite raises another error for damage than for a full disk."""
    add_round(buffered.rows, 0)
    with sqlite3.connect(out) as other:
        other.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    whole = out.read_bytes()
    with out.open("r+b") as file:
        file.write(b"\xff" * len(whole))
    add_round(buffered.rows, 1)
    assert buffered.problems
    assert buffered.rows.waiting


def test_the_file_of_another_watch_is_never_written(out, buffered):
    """Someone puts another watch's file in the place of the running watch's."""
    other = replace(facts(), starts=(Start(unix_s=5e8, host={}),))
    backup = out.with_name("backup")
    Recorder.create(backup, other).close()
    add_round(buffered.rows, 0)
    before = backup.read_bytes()
    out.rename(out.with_name("moved"))
    backup.rename(out)
    add_round(buffered.rows, 1)
    add_round(buffered.rows, 2)
    assert out.read_bytes() == before
    assert buffered.rows.waiting == 4
    out.unlink()
    buffered.rows.flush()
    assert recorded(out) == ([1, 2], [1, 2])


def test_a_row_that_the_file_refuses_ends_no_watch(out, buffered):
    """A file may have each answer once."""
    add_answer(buffered.rows, 0)
    add_answer(buffered.rows, 0)
    assert buffered.rows.waiting == 1
    assert "cannot be written" in buffered.problems[0]


# A bounded file


def test_old_rounds_are_deleted_whole(out):
    watch = Watch(every_s=EVERY_S, keep_s=10 * EVERY_S)
    buffered = Buffered(out)
    for number in range(30):
        add_round(buffered.rows, number)
    buffered.rows.tidy(lambda recorder: forget_old(recorder, watch, 29 * EVERY_S + 5.0))
    buffered.rows.close()
    assert recorded(out) == (list(range(19, 30)), list(range(19, 30)))


def test_the_file_stays_within_its_bytes(out):
    most = 400_000
    watch = Watch(every_s=EVERY_S, keep_s=1e9, most_bytes=most)
    buffered = Buffered(out)
    sizes = []
    for number in range(300):
        add_round(buffered.rows, number)
        buffered.rows.tidy(lambda recorder, n=number: forget_old(recorder, watch, n * EVERY_S))
        sizes.append(out.stat().st_size)
    buffered.rows.close()
    probes, answers = recorded(out)
    assert max(sizes) <= most
    assert probes == answers == list(range(probes[0], 300))
    assert 0 < probes[0] < 200  # what fits is kept
    with Run.open(out) as run:
        assert run.facts.device == "a"


def test_a_file_of_outages_alone_is_bounded(out):
    """An edge that comes and goes for days, and a watch without a round."""
    most = 4_000_000
    watch = Watch(every_s=86400.0, keep_s=1e9, most_bytes=most)
    recorder = Recorder.create(out, facts())
    sizes = []
    for minute in range(1000):
        with recorder.together():
            for number in range(100 * minute, 100 * (minute + 1)):
                recorder.add_outage(outage(0.6 * number, 0.6 * number + 0.3))
        forget_old(recorder, watch, 60.0 * (minute + 1))
        sizes.append(out.stat().st_size)
    recorder.add_outage(outage(60_000.0))
    forget_old(recorder, watch, 60_010.0)
    recorder.close()
    assert max(sizes) <= most
    with Run.open(out) as run:
        begins = [each.began_clock_s for each in run.outages()]
    assert len(begins) > 10_000
    assert begins[-1] == 60_000.0  # it has not ended
    assert np.diff(begins[:-1]) == pytest.approx(0.6)


def test_an_outage_that_has_not_ended_is_never_too_old(out):
    watch = Watch(every_s=EVERY_S, keep_s=EVERY_S, most_bytes=1)
    with Recorder.create(out, facts()) as recorder:
        recorder.add_outage(outage(1.0, 5.0))
        recorder.add_outage(outage(10.0))
        recorder.add_probe(probe(0))
        forget_old(recorder, watch, 100 * EVERY_S)
        recorder.add_outage(outage(10.0, 99 * EVERY_S))
    with Run.open(out) as run:
        assert [(each.began_clock_s, each.ended_clock_s) for each in run.outages()] == [
            (10.0, 99 * EVERY_S)
        ]
        assert list(run.probes()) == []


# Outages, whatever the disk does


def outage(began_s, ended_s=None):
    ended_unix_s = None if ended_s is None else 1e9 + ended_s
    return Outage(
        began_unix_s=1e9 + began_s,
        began_clock_s=began_s,
        ended_unix_s=ended_unix_s,
        ended_clock_s=ended_s,
        reason="away",
    )


class FailingDisk(Recorder):
    """A recorder whose writes fail while ``works`` is False."""

    works = True

    @contextmanager
    def together(self):
        if not type(self).works:
            raise OSError("the disk is full.")
        with super().together():
            yield


class OutagesAndADisk(RuleBasedStateMachine):
    """A watch whose edge and disk come and go, against what its files must have."""

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        self.out = self.folder / "day.pilotfish"
        FailingDisk.works = True
        self.most_rows = pytest.MonkeyPatch()
        self.most_rows.setattr(row_buffer, "MOST_ROWS", 4)
        self.rows = RowBuffer(FailingDisk.create(self.out, facts()), self.reopen)
        self.now_s = 0.0
        self.begun: dict[float, float | None] = {}  # all outages: their ends by their begins
        self.moved = 0

    def reopen(self):
        if not FailingDisk.works:
            raise OSError("the disk is full.")
        other = reopen(self.out, facts())
        return FailingDisk(other.path, other._lock, other._database)

    def later(self):
        self.now_s += 1.0
        return self.now_s

    @property
    def away_since(self):
        return next((begin for begin, end in self.begun.items() if end is None), None)

    @rule()
    def edge_leaves_or_returns(self):
        now_s, begin = self.later(), self.away_since
        self.begun[now_s if begin is None else begin] = None if begin is None else now_s
        self.rows.add_outage(outage(now_s) if begin is None else outage(begin, now_s))

    @rule()
    def a_probe(self):
        now_s = self.later()
        self.rows.add_probe(replace(probe(0), clock_s=now_s, began_unix_s=1e9 + now_s))

    @rule()
    def a_sign_of_life(self):
        now_s = self.later()
        self.rows.note_alive(1e9 + now_s, now_s)

    @rule()
    def disk_fails_or_works(self):
        FailingDisk.works = not FailingDisk.works

    @rule()
    def file_is_moved(self):
        if self.out.exists():
            self.moved += 1
            self.out.rename(self.folder / f"moved{self.moved}")
            for part in ("wal", "shm"):  # as `mv` of a folder does
                log = self.out.with_name(f"{self.out.name}-{part}")
                if log.exists():
                    log.rename(self.folder / f"moved{self.moved}-{part}")

    @invariant()
    def what_waits_is_bounded(self):
        assert self.rows.waiting <= 4

    def teardown(self):
        FailingDisk.works = True
        self.rows.flush()
        self.rows.flush()
        dropped, waiting = self.rows.dropped, self.rows.waiting
        self.rows.close()
        self.most_rows.undo()
        assert waiting == 0
        recorded_ends: dict[float, float | None] = {}
        for path in [*sorted(self.folder.glob("moved?")), self.out]:
            if not path.exists() or not path.stat().st_size:
                continue
            with Run.open(path) as run:
                outages = list(run.outages())
            begins = [each.began_clock_s for each in outages]
            assert begins == sorted(set(begins))  # each once
            for each in outages:
                assert each.began_clock_s in self.begun
                if each.ended_clock_s is not None:
                    assert each.ended_clock_s == self.begun[each.began_clock_s]
                    recorded_ends[each.began_clock_s] = each.ended_clock_s
                else:
                    recorded_ends.setdefault(each.began_clock_s, None)
                    # an outage is open in the file that is written only if the edge is away
                    assert path != self.out or each.began_clock_s == self.away_since
        if path.exists() and self.away_since is not None and not dropped:
            # also a file that was begun anew during the outage has it
            assert outages[-1].began_clock_s == self.away_since
        lost = [
            begin for begin, end in self.begun.items() if recorded_ends.get(begin, "none") != end
        ]
        assert len(lost) <= dropped
        shutil.rmtree(self.folder)


OutagesAndADisk.TestCase.settings = examples(80, stateful_step_count=30)
TestOutagesAndADisk = OutagesAndADisk.TestCase
