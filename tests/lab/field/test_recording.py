"""Run files as they are written: one writer, nothing lost or overwritten, old rows deleted."""

from __future__ import annotations

import os
import shutil
import sqlite3
from dataclasses import replace

import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.device_runtime.record import RttSample
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_facts import Start
from pilotfish.lab.field.writable_run_file import expect_unused, has_begun
from tests.support.made_runs import (
    FACTS,
    OUTAGE,
    PROBE,
    a_round,
    read,
    requests,
)


def test_a_cell_is_measured_once(path):
    """Also one without a window, whose NULL equals nothing in SQL."""
    with Recorder.create(path, FACTS) as recorder:
        for window in (4, None):
            for _ in range(2):
                recorder.begin(requests(window=window))
            recorder.end(1 if window else 3, finished=True)
            with pytest.raises(sqlite3.IntegrityError):
                recorder.end(2 if window else 4, finished=True)


def test_a_round_is_in_the_file_when_recording_it_returns(path, tmp_path):
    """A copy of the file and its log, as a power cut would leave them, holds every round."""
    with Recorder.create(path, FACTS) as recorder:
        number = recorder.begin(requests())
        for i, protocol in enumerate(["greedy", "greedy", "stream"]):
            recorder.add_round(number, i, 0.1, a_round(i, protocol))
            folder = tmp_path / f"cut{i}"
            folder.mkdir()
            for part in tmp_path.glob("walk.pilotfish*"):
                shutil.copy(part, folder)
            (answer,) = read(folder / path.name, finished=False)
            assert len(answer.rounds) == i + 1


def test_the_file_alone_holds_all_finished_answers(path, tmp_path):
    with Recorder.create(path, FACTS) as recorder:
        for repeat in range(2):
            number = recorder.begin(requests(repeat=repeat))
            recorder.add_round(number, 0, 0.1, a_round())
            recorder.end(number, finished=True)
        shutil.copy(path, tmp_path / "copy")
        assert len(read(tmp_path / "copy")) == 2
    assert os.listdir(tmp_path).count("walk.pilotfish-wal") == 0
    assert len(read(path)) == 2


def test_what_is_old_is_deleted_and_its_space_is_used_again(path):
    def measure(recorder, repeat):
        wanted = replace(requests(repeat=repeat), clock_s=float(repeat))
        number = recorder.begin(wanted)
        recorder.add_probe(replace(PROBE, clock_s=float(repeat)))
        ends = {"ended_unix_s": 1.8e9, "ended_clock_s": repeat + 0.5}
        recorder.add_outage(replace(OUTAGE, began_clock_s=float(repeat), **ends))
        for at in range(10):
            recorder.add_round(number, at, 0.1, a_round(at))
        recorder.add_rtts(number, [RttSample(0.1, 0.02)] * 10)
        recorder.end(number, finished=True)

    with Recorder.create(path, FACTS) as recorder:
        for repeat in range(100):
            measure(recorder, repeat)
        full = recorder.used_bytes()
        recorder.forget(50.0)
        assert recorder.used_bytes() < 0.7 * full
        before = path.stat().st_size
        for repeat in range(100, 140):
            measure(recorder, repeat)
        assert path.stat().st_size <= before
    with Run.open(path) as run:
        answers, probes = list(run.answers()), list(run.probes())
        assert [answer.repeat for answer in answers] == [*range(50, 140)]
        assert [probe.clock_s for probe in probes] == [*range(50, 140)]
        assert len(list(run.outages())) == 90
        assert all(len(answer.rtts) == len(answer.rounds) == 10 for answer in answers)
        assert run.last_moment().clock_s == 139.0 + PROBE.took_s


def test_deleting_reads_only_what_it_deletes(path):
    """A watch deletes after each round, and its file has 35,000 answers after a month."""
    steps: list[int] = []
    with Recorder.create(path, FACTS) as recorder:
        with recorder.together():
            for repeat in range(2000):
                recorder.begin(replace(requests(repeat=repeat), clock_s=float(repeat)))
                recorder.add_probe(replace(PROBE, clock_s=float(repeat)))
        recorder._database.set_progress_handler(lambda: steps.append(10), 10)
        recorder.forget(3.0)
        recorder._database.set_progress_handler(None, 0)
        assert recorder.oldest_s() == 3.0
    with Run.open(path) as run:
        assert len(list(run.probes())) == len(list(run.answers(finished=False))) == 1997
    assert sum(steps) < 2000


def test_a_file_has_one_writer(written):
    with Recorder.resume(written), pytest.raises(RunFileError, match="is writing"):
        Recorder.resume(written)
    with Recorder.resume(written) as recorder:
        assert len(recorder.finished_cells()) == 3


def test_nothing_is_overwritten(written):
    before = written.read_bytes()
    with pytest.raises(RunFileError, match="--resume"):
        Recorder.create(written, FACTS)
    with pytest.raises(RunFileError, match="--resume"):
        expect_unused(written)
    assert written.read_bytes() == before


def test_a_start_is_noted(written):
    again = Start(unix_s=9.0, host={"power_mode": "MAXN"})
    with Recorder.resume(written) as recorder:
        recorder.change_facts(starts=[*FACTS.starts, again])
    with Run.open(written) as run:
        assert run.facts.starts == (*FACTS.starts, again)
        assert run.facts.host == FACTS.starts[0].host


def test_a_file_that_was_cut_off_while_it_was_made_is_as_good_as_none(path):
    path.touch()
    assert not has_begun(path)
    with Recorder.create(path, FACTS) as recorder:
        assert recorder.finished_cells() == set()
    assert has_begun(path)
