"""Run files: what goes in comes out, nothing is lost, and whatever is wrong with one is said."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pilotfish.base.errors import RunFileError
from pilotfish.device_runtime.record import (
    STAGES,
    Choice,
    Forecast,
    Round,
    RttSample,
    Timings,
)
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.recording import Recorder, expect_unused, has_begun
from pilotfish.lab.field.resumption import expect_same_pair, expect_same_settings
from pilotfish.lab.field.run import Answer, Configuration, Facts, MatrixSettings, Model, Run, Start
from pilotfish.lab.field.run_file import APPLICATION_ID
from pilotfish.wire.link.state import LinkState, Reading
from tests.support.examples import examples

FACTS = Facts(
    software="pilotfish 0",
    settings=MatrixSettings(prompts=("Why?", "How?"), windows=(2, "auto")),
    starts=(Start(unix_s=1.5, host={"board": "Jetson", "cpus": 8}),),
    drafter=Model("small", "int4", "0123456789abcdef"),
    target=Model("large"),
    edge="tcp://127.0.0.1:7077",
    edge_software="pilotfish 0",
    draft_path="/models/small",
    keys_path=None,
    note="by the window",
    energy=None,
)
LINK = LinkState(rtt=Reading(value=0.02, age_s=0.5, samples=3))
CHOICE = Choice(
    policy="predictive",
    protocol="greedy",
    window=4,
    token_s=0.01,
    reason="cheapest",
    forecasts=[Forecast("greedy", 4, 0.01), Forecast("stream", 0, 0.02)],
)


def requests(prompt=0, repeat=0, *, protocol="greedy", window=4, warm_up=False):
    return Answer(
        id=0,
        protocol=protocol,
        window=window,
        prompt=prompt,
        repeat=repeat,
        warm_up=warm_up,
        temperature=0.0,
        seed=7,
        started_unix_s=time.time(),
        finished=False,
    )


def a_round(number=0, protocol="greedy"):
    timings = Timings(**{stage: 0.001 * i for i, stage in enumerate(STAGES)})
    return Round(
        protocol=protocol,
        start=10 + 3 * number,
        window=4,
        nodes=4,
        accepted=2,
        tokens=[1, 2, number],
        uplink_bytes=40,
        downlink_bytes=58,
        timings=timings,
    )


@pytest.fixture
def path(tmp_path):
    return tmp_path / "walk.pilotfish"


@pytest.fixture
def written(path):
    """A run file with three finished answers and one that was cut off after its second round."""
    with Recorder.create(path, FACTS) as recorder:
        for repeat in range(4):
            number = recorder.begin(requests(repeat=repeat))
            for i in range(6 if repeat < 3 else 2):
                recorder.add_round(number, i, 0.1 * i, a_round(i))
            if repeat < 3:
                recorder.end(number, finished=True, tokens=18, total_s=0.6, link=LINK)
    return path


def read(path, **kind):
    with Run.open(path) as run:
        return list(run.answers(**kind))


finite = st.floats(0, 1e6)
counts = st.integers(0, 2**31 - 1)
rounds = st.builds(
    Round,
    protocol=st.sampled_from(["greedy", "tree", "stream", "local"]),
    start=counts,
    window=counts,
    nodes=counts,
    accepted=counts,
    tokens=st.lists(counts, max_size=20),
    uplink_bytes=counts,
    downlink_bytes=counts,
    timings=st.builds(Timings, **dict.fromkeys(STAGES, finite)),
    notes=st.dictionaries(
        st.sampled_from(["forgiven", "of another package"]), counts.map(lambda n: n + 1)
    ),
    inquired=counts,
)


@given(
    given=st.lists(st.tuples(finite, rounds), max_size=8), window=st.sampled_from([3, "auto", None])
)
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_goes_in_comes_out(tmp_path, given, window):
    path = tmp_path / f"{time.monotonic_ns()}.pilotfish"
    with Recorder.create(path, FACTS) as recorder:
        wanted = requests(window=window)
        number = recorder.begin(wanted)
        for i, (at_s, round_) in enumerate(given):
            recorder.add_round(number, i, at_s, round_)
        recorder.end(number, finished=True, link=LINK, choice=CHOICE, energy_j=1.25)
        assert recorder.finished_cells() == {wanted.cell}
    with Run.open(path) as run:
        assert run.facts == FACTS
        (answer,) = run.answers()
    assert [*zip(answer.at_s, answer.rounds, strict=True)] == given
    assert (answer.link, answer.choice, answer.energy_j) == (LINK, CHOICE, 1.25)
    assert answer.cell == wanted.cell
    assert answer.configuration == Configuration("greedy", window)


def test_only_finished_answers_count_unless_the_others_are_asked_for(written):
    assert [answer.repeat for answer in read(written)] == [0, 1, 2]
    every = read(written, finished=False)
    assert [len(answer.rounds) for answer in every] == [6, 6, 6, 2]
    assert not every[-1].finished


def test_warm_up_answers_are_kept_apart(path):
    with Recorder.create(path, FACTS) as recorder:
        for warm_up in (True, False):
            recorder.end(recorder.begin(requests(warm_up=warm_up)), finished=True)
        assert len(recorder.finished_cells()) == 1
    assert [answer.warm_up for answer in read(path)] == [False]
    assert [answer.warm_up for answer in read(path, warm_up=True)] == [True, False]


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


def test_a_run_is_read_while_it_is_measured(path):
    with Recorder.create(path, FACTS) as recorder:
        number = recorder.begin(requests())
        with Run.open(path) as run:
            for i in range(3):
                recorder.add_round(number, i, 0.1, a_round(i))
                (answer,) = run.answers(finished=False)
                assert len(answer.rounds) == i + 1
            recorder.end(number, finished=True)
        recorder.end(recorder.begin(requests(repeat=1)), finished=True)


# the columns of rounds that older formats do not have
LATER = {
    1: ("forgiven", "inquired", "deviation", "notes"),
    2: ("deviation", "notes"),
    3: ("notes",),
    4: (),
    5: (),
}


def as_format(version, path):
    """The file as Pilotfish wrote it before it knew decision heads, or relaxations."""
    with sqlite3.connect(path) as database:
        for column in LATER[version]:
            database.execute(f"ALTER TABLE rounds DROP COLUMN {column}")
        database.executescript(
            "DROP TABLE rtts; DROP TABLE probes; DROP TABLE outages;"
            f"ALTER TABLE answers DROP COLUMN clock_s; PRAGMA user_version = {version};"
        )
        if version == 5:
            return
        database.executescript(
            "DROP INDEX measured_once; ALTER TABLE answers DROP COLUMN point;"
            "CREATE UNIQUE INDEX measured_once ON answers (protocol, ifnull(window, ''), prompt, "
            "repeat) WHERE finished AND NOT warm_up;"
        )
        (settings,) = database.execute("SELECT value FROM facts WHERE name = 'settings'").fetchone()
        flat = json.loads(settings)
        flat |= flat.pop("options")
        del flat["link"], flat["varied"]
        database.execute("UPDATE facts SET value = ? WHERE name = 'settings'", (json.dumps(flat),))


@pytest.mark.parametrize("version", LATER)
def test_a_file_of_an_older_format_is_read_and_gone_on_with(written, version):
    before = read(written, finished=False)
    as_format(version, written)
    assert read(written, finished=False) == before
    with Recorder.resume(written) as recorder:
        number = recorder.begin(requests(repeat=3))
        wanted = replace(a_round(), notes={"forgiven": 2, "deviation": 0.25}, inquired=3)
        recorder.add_round(number, 0, 0.1, wanted)
        recorder.end(number, finished=True)
    *older, newest = read(written, finished=False)
    assert older == before
    assert newest.rounds == [wanted]


PROBE = Probe(
    began_unix_s=1.8e9,
    clock_s=300.0,
    took_s=1.5,
    rtts_s=[0.02, 0.021],
    lost=1,
    up_bps=4e6,
    up_bound=True,
    down_bps=2e7,
    uplink_bytes=300_000,
    downlink_bytes=900_000,
    link=LINK,
    signal={"source": "ModemManager", "rsrp_dbm": -97.5},
    position={"lat": 52.5, "lon": 13.4},
    power_w=7.5,
)
OUTAGE = Outage(began_unix_s=1.8e9, began_clock_s=310.0, reason="no route")


def test_probes_outages_and_rtts_come_out_as_they_went_in(path):
    with Recorder.create(path, FACTS) as recorder:
        recorder.add_probe(PROBE)
        recorder.add_probe(bare := Probe(began_unix_s=1.8e9, clock_s=600.0, took_s=0.1, lost=10))
        ended = replace(OUTAGE, ended_unix_s=1.8e9 + 60, ended_clock_s=370.0)
        assert recorder.add_outage(OUTAGE) == recorder.add_outage(ended)
        open_still = replace(OUTAGE, began_clock_s=380.0)
        recorder.add_outage(open_still)
        number = recorder.begin(replace(requests(), clock_s=301.5))
        recorder.add_rtts(number, [RttSample(0.1, 0.02), RttSample(0.2, 0.03)])
        recorder.end(number, finished=True)
    with Run.open(path) as run:
        assert [replace(probe, id=0) for probe in run.probes()] == [PROBE, bare]
        first, second = run.outages()
        (answer,) = run.answers()
    assert (first, second) == (replace(ended, id=1), replace(open_still, id=2))
    assert (answer.clock_s, answer.rtts) == (301.5, [(0.1, 0.02), (0.2, 0.03)])


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


# What is no run file


def foreign(path):
    path.write_bytes(b"PK\3\4 no database at all " * 40)
    return "not a run file"


def other_database(path):
    with sqlite3.connect(path) as database:
        database.execute("CREATE TABLE songs (title)")
    return "not a run file"


def of_the_future(path):
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("PRAGMA user_version = 99")
    return "format 99"


def without_tables(path):
    with sqlite3.connect(path) as database:
        database.execute(f"PRAGMA application_id = {APPLICATION_ID}")
        database.execute("PRAGMA user_version = 1")
    return "cannot be read"


def empty(path):
    path.touch()
    return "empty"


def absent(path):
    return "There is no run file"


def folder(path):
    path.mkdir()
    return "There is no run file"


@pytest.mark.parametrize(
    "make", [foreign, other_database, of_the_future, without_tables, empty, absent, folder]
)
def test_what_is_no_run_file_is_said_in_a_line(path, make):
    words = make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(RunFileError, match=words) as caught:
        Run.open(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert (path.read_bytes() if path.is_file() else None) == before


def test_a_fact_that_is_missing_or_of_another_kind_is_damage(written):
    for statement in (
        "UPDATE facts SET value = '{' WHERE name = 'starts'",
        "DELETE FROM facts WHERE name = 'settings'",
    ):
        with sqlite3.connect(written) as database:
            database.execute(statement)
        with pytest.raises(RunFileError, match="damaged"):
            Run.open(written)


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE rounds SET tokens = 'many' WHERE number = 1",
        "UPDATE rounds SET verify_s = 'long' WHERE number = 1",
        "UPDATE answers SET prompt = 'the first'",
        "UPDATE answers SET link = '{\"rtt\": 3}'",
    ],
)
def test_a_value_of_another_kind_is_damage(written, statement):
    with sqlite3.connect(written) as database:
        database.execute(statement)
    with pytest.raises(RunFileError, match="damaged"):
        read(written)


@given(cut=st.integers(0, 2**20), at=st.lists(st.integers(0, 2**20), max_size=12))
@examples(60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_damaged_file_is_read_or_refused(written, tmp_path, cut, at):
    data = bytearray(written.read_bytes())
    del data[max(1, cut % (2 * len(data))) :]
    for position in at:
        data[position % len(data)] ^= 0xA5
    broken = tmp_path / "broken.pilotfish"
    broken.write_bytes(data)
    text = ""
    try:
        assert len(read(broken, finished=False, warm_up=True)) <= 4
    except RunFileError as error:
        text = str(error)
    assert "\n" not in text
    assert broken.read_bytes() == data


def test_a_file_that_was_cut_off_while_it_was_made_is_as_good_as_none(path):
    path.touch()
    assert not has_begun(path)
    with Recorder.create(path, FACTS) as recorder:
        assert recorder.finished_cells() == set()
    assert has_begun(path)


# Going on


@pytest.mark.parametrize(
    ("option", "words"),
    [
        ({"repeat": 9}, "--repeat 4, not 9"),
        ({"windows": (2, 4)}, "--windows 2,auto, not 2,4"),
        ({"prompts": ("Where?",)}, "other prompts"),
        ({"edge": "tcp://127.0.0.1:1"}, "--edge"),
        ({"max_tokens": 3}, "--max-tokens 64, not 3"),
    ],
)
def test_other_settings_are_refused_with_what_differs(option, words):
    with pytest.raises(RunFileError, match=words):
        expect_same_settings(Path("walk"), FACTS, option)
    expect_same_settings(Path("walk"), FACTS, {"repeat": 4, "windows": (2, "auto")})


def test_another_pair_is_refused():
    for change in ({"drafter": Model("small", "int8", "0")}, {"target": None}):
        other = Facts(**{**vars(FACTS), **change})
        with pytest.raises(RunFileError, match=next(iter(change))):
            expect_same_pair(Path("walk"), FACTS, other)
    expect_same_pair(Path("walk"), FACTS, Facts(**{**vars(FACTS), "draft_path": "/elsewhere"}))
