"""`pilotfish field report` draws nothing of fewer than 20 points, and says so."""

from __future__ import annotations

import re
from dataclasses import fields

import numpy as np
import pytest

from pilotfish.lab.field.link_rows import Outage
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.report.measured import read_run, with_unique_names
from pilotfish.lab.field.report.pictures import Gallery, draw
from pilotfish.lab.field.report.report_page import page
from tests.support.made_answers import answer, chain, chosen, facts, linked, recorded
from tests.support.made_watches import probe

ENOUGH = 20


def windows(path, number):
    """So many answers under each of two windows; each has one steady round."""
    answers = [
        answer([chain(w, 1), chain(w, 1)], window=w, repeat=i)
        for w in (2, 4)
        for i in range(number)
    ]
    return recorded(path, answers)


def steady(path, number):
    """So many answers under one window."""
    answers = [answer([chain(2, 1), chain(2, 1)], window=2, repeat=i) for i in range(number)]
    return recorded(path, answers)


def rounds(path, number):
    """So many answers of a single round."""
    return recorded(path, [answer([chain(4, 3)], window=4, repeat=i) for i in range(number)])


def autos(path, number):
    """So many answers under auto."""
    choice = chosen("ahead", 4, 0.005, [("ahead", 4, 0.005, 0.005), ("stream", 0, 0.02, 0.02)])
    answers = [
        answer(
            [chain(4, 3, protocol="ahead", ms=10.0 + i)] * 3, protocol="auto", window=None,
            repeat=i, choice=choice, link=linked(jitter=0.002), started_unix_s=1.8e9 + 30 * i,
        )
        for i in range(number)
    ]  # fmt: skip
    return recorded(path, answers)


def probes(path, number):
    """So many probes with one ping each, and a bound of the goodput in every other one."""
    rng = np.random.default_rng(1)
    with Recorder.create(path, facts()) as recorder:
        for i in range(number):
            made = probe(30.0 * i, rng)
            del made.rtts_s[1:]
            recorder.add_probe(made)
    return path


# each kind of picture: what makes a run that has so many points for it, and the number of runs
KINDS = {
    "rtt": (probes, 1),
    "rtt_distribution": (probes, 1),
    "link": (probes, 1),
    "latency": (windows, 1),
    "stages": (windows, 1),
    "compared": (steady, 2),
    "depths": (rounds, 1),
    "bytes_per_token": (rounds, 1),
    "distribution": (autos, 1),
    "distribution_compared": (autos, 2),
    "choices": (autos, 1),
    "alternatives": (autos, 1),
    "predictions": (autos, 1),
}


def gallery_of(tmp_path, make, runs, number):
    paths = [make(tmp_path / f"{i}-{number}.pilotfish", number) for i in range(runs)]
    measured = with_unique_names([read_run(path) for path in paths])
    return measured, draw(measured, tmp_path)


def test_every_kind_of_picture_is_tried():
    assert set(KINDS) == {kind.name for kind in fields(Gallery)}


@pytest.mark.parametrize("case", sorted({KINDS[kind] for kind in KINDS}, key=str))
def test_nothing_is_drawn_of_too_few_points(tmp_path, case):
    kinds = [kind for kind, made in KINDS.items() if made == case]
    measured, few = gallery_of(tmp_path, *case, ENOUGH - 1)
    for kind in kinds:
        drawn = getattr(few, kind)
        assert drawn.pictures == [], kind
        assert all(re.search(r"19 .*needs 20|needs 20.* \(19 ", words) for words in drawn.few), kind
        assert drawn.few, kind
        assert all(words.replace("'", "&#39;") in page(measured, few) for words in drawn.few)
    _, enough = gallery_of(tmp_path, *case, ENOUGH)
    for kind in kinds:
        drawn = getattr(enough, kind)
        assert len(drawn.pictures) == 1, kind
        assert drawn.few == [], kind
        (picture,) = drawn.pictures
        assert picture.path.read_bytes()[:4] == picture.narrow.read_bytes()[:4] == b"\x89PNG"


def test_a_line_of_too_few_points_is_left_out_of_its_picture(tmp_path):
    answers = [answer([chain(2, 1)] * 3, window=2, repeat=i) for i in range(25)]
    answers += [answer([chain(0, 0, protocol="stream")] * 3, protocol="stream", window=None)]
    run = read_run(recorded(tmp_path / "x.pilotfish", answers))
    drawn = draw([run], tmp_path).distribution
    (picture,) = drawn.pictures
    assert "a line for each of greedy γ=2;" in picture.alt
    assert drawn.few == [
        "x: left out of the distribution over answers, where each needs 20: stream (1 answer)."
    ]


def test_a_watch_that_never_reached_its_edge_is_reported(tmp_path):
    path = tmp_path / "away.pilotfish"
    with Recorder.create(path, facts()) as recorder:
        recorder.add_outage(Outage(began_unix_s=1.8e9, began_clock_s=5.0, reason="refused"))
    run = read_run(path)
    gallery = draw([run], tmp_path)
    assert not any(getattr(gallery, kind) for kind in KINDS)
    assert "No answer was finished." in page([run], gallery)
