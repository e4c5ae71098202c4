"""Run files: what goes in comes out, also while the file is written and from older formats."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given
from hypothesis import strategies as st

from pilotfish.device_runtime.record import STAGES, Round, RttSample, Timings
from pilotfish.lab.field.configuration import Configuration
from pilotfish.lab.field.link_rows import Probe
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from tests.support.examples import examples
from tests.support.made_runs import (
    CHOICE,
    FACTS,
    LATER,
    LINK,
    OUTAGE,
    PROBE,
    a_round,
    as_format,
    read,
    requests,
)

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


def test_probes_outages_and_rtts_come_out_as_they_went_in(path):
    with Recorder.create(path, FACTS) as recorder:
        recorder.add_probe(PROBE)
        recorder.add_probe(bare := Probe(began_unix_s=1.8e9, clock_s=600.0, took_s=0.1, lost=10))
        ended = replace(OUTAGE, ended_unix_s=1.8e9 + 60, ended_clock_s=370.0)
        recorder.add_outage(OUTAGE)
        recorder.add_outage(ended)
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
