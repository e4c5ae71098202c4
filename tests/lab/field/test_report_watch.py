"""`pilotfish field report` of watches: the link over clock time, outages, set clocks, devices."""

from __future__ import annotations

import json
import math
import re
import sqlite3
from contextlib import closing
from dataclasses import fields, replace

import numpy as np
import pytest

from pilotfish.base.errors import RunFileError
from pilotfish.cli import main
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.report import clock_axis, link_plots, link_tables, quantity_plots
from pilotfish.lab.field.report.distribution_plots import compare_distributions
from pilotfish.lab.field.report.measured import read_run, with_unique_names
from pilotfish.lab.field.report.samples import (
    breaks,
    by_span,
    distribution,
    percentiles,
    samples,
)
from pilotfish.lab.statistics import _MANY, median_interval
from pilotfish.wire.link.state import READINGS, LinkState
from tests.lab.field.test_report import page_of
from tests.lab.field.test_report_marks import painted
from tests.support.made_watches import BEGAN_UNIX_S, EVERY_S, probe, recorded_watch

SLOTS = 72
HOUR_S = 3600.0
AWAY, OFF = (20, 32), (50, 56)
STEPS = [(8, 3600.0), (10, -3600.0)]


@pytest.fixture(scope="module")
def north(tmp_path_factory):
    """A watch of six hours: an outage of nearly one, a pause, and a clock that was set twice."""
    path = tmp_path_factory.mktemp("watch") / "north.pilotfish"
    return recorded_watch(path, SLOTS, away=[AWAY], off=[OFF], steps=STEPS)


@pytest.fixture(scope="module")
def south(tmp_path_factory):
    path = tmp_path_factory.mktemp("watch") / "south.pilotfish"
    return recorded_watch(path, 24, seed=5, device="jetson <b>south</b>", slow=2.0)


@pytest.fixture(scope="module")
def report(north, tmp_path_factory):
    """The report of the watch: its folder, and its values."""
    folder = tmp_path_factory.mktemp("report")
    values = folder / "values.json"
    assert main(["field", "report", str(north), "--out", str(folder), "--json", str(values)]) == 0
    return folder, json.loads(values.read_text())["runs"][0]


def test_the_values_are_what_was_done(north, report):
    _, run = report
    link, (outage,) = run["link"], run["link"]["outages"]
    done = SLOTS - (AWAY[1] - AWAY[0] - 1) - (OFF[1] - OFF[0] - 1)
    assert (link["rounds"], link["slots"]) == (done, SLOTS)
    assert run["began_unix_s"] == BEGAN_UNIX_S
    assert run["ended_unix_s"] == BEGAN_UNIX_S + SLOTS * EVERY_S
    assert outage["began_unix_s"] == BEGAN_UNIX_S + AWAY[0] * EVERY_S + 20.0
    assert outage["length_s"] == (AWAY[1] - AWAY[0]) * EVERY_S - 23.0
    ((begin, end),) = [each.values() for each in link["pauses"]]
    assert begin == pytest.approx(BEGAN_UNIX_S + OFF[0] * EVERY_S + 15.0, abs=5.0)
    assert end == BEGAN_UNIX_S + OFF[1] * EVERY_S
    assert link["observed_s"] == pytest.approx(SLOTS * EVERY_S - (end - begin))
    assert link["available"] == pytest.approx(1.0 - outage["length_s"] / link["observed_s"])
    assert [step["by_s"] for step in link["clock_steps"]] == [3600.0, -3600.0]
    with closing(sqlite3.connect(north)) as database:
        stored = [rtt for (row,) in database.execute("SELECT rtts_s FROM probes") for rtt in
                  json.loads(row)]  # fmt: skip
    pings = link["rtt_ms"]["pings"]
    assert pings["n"] == len(stored) == 10 * done
    for name, level in (("p50", 50), ("p90", 90), ("p99", 99)):
        assert pings[name] == pytest.approx(1e3 * np.percentile(stored, level))
    assert pings["p99.9"] is None  # fewer than 1,000 samples
    assert sum(run["choices"].values()) == pytest.approx(1.0)
    assert {row["protocol"] for row in run["percentiles"]} == {"stream", "ahead", "auto"}
    assert all(row["token_ms"]["n"] == done for row in run["percentiles"])
    assert link["bytes"]["probes"] == [400_000 * done, 900_000 * done]


def test_the_page_tells_it(report):
    folder, run = report
    page = page_of(folder)
    text = " ".join("".join(page.text).split())
    share = 100 * run["choices"]["ahead"]
    assert "6 h; 56 of 72 rounds; RTT p50" in text
    assert "away 59 min 37 s in 1 outage (81.9 % available); auto chose ahead in" in text
    assert f"auto chose ahead in {share:.0f} % of its 56 answers." in text
    assert "The device's wall clock was set twice (by +1 h at" in text
    assert "Nothing was measured for 29 min" in text
    assert "The edge did not answer within 2 s." in text
    assert "never measured" not in text
    alts = " ".join(page.alts)
    assert (
        "the RTT in ms against clock time (UTC), of pings and rounds of answers, with gaps at"
        in alts
    )
    assert "1 outages" not in alts


def test_several_devices_are_in_one_picture_with_their_names(north, south):
    runs = with_unique_names([read_run(north), read_run(south)])
    assert [run.name for run in runs] == ["jetson-north", "jetson <b>south</b>"]
    rtt = link_plots.rtt_distribution([(run.name, run.history) for run in runs])
    tokens = compare_distributions([(run.name, run.values, run.figures) for run in runs])
    for plot in (rtt, tokens):
        assert "jetson-north, jetson <b>south</b>" in plot.alt
        assert plot.selection.few == {}
    assert len(tokens.ylabels) == 3  # a panel for each protocol
    table = link_tables.rtt_percentiles(runs)
    assert [row[0] for row in table.rows] == ["jetson-north"] * 2 + ["jetson <b>south</b>"] * 2
    again = with_unique_names([read_run(north), read_run(south), read_run(north)])
    assert [run.name for run in again] == [
        "jetson-north, north", "jetson <b>south</b>, south", "jetson-north, north (2)"
    ]  # fmt: skip


def test_an_outage_that_had_not_ended(tmp_path):
    path = recorded_watch(tmp_path / "x.pilotfish", 12, away=[(3, 5), (9, 13)], open_outage=True)
    run = read_run(path)
    assert [outage.ended for outage in run.history.outages] == [True, False]
    assert "still away at the file's end" in str(link_tables.outages(run).rows[-1])
    assert run.as_json()["link"]["outages"][-1]["ended_unix_s"] is None
    assert "in 2 outages" in link_tables.availability(run)


def test_a_time_that_was_not_watched_is_neither_there_nor_away(tmp_path):
    """An outage whose end a later start recorded, after the machine was off."""
    link = read_run(recorded_watch(tmp_path / "x.pilotfish", 24, away=[(4, 16)])).history
    (outage,) = link.outages
    off = (outage.began_s + 600.0, outage.began_s + 1500.0)
    link = replace(link, pauses=[off])
    assert link.away_s == pytest.approx(outage.lasted_s - 900.0)
    assert link.observed_s == pytest.approx(24 * EVERY_S - 900.0)
    assert link.available == pytest.approx(1.0 - link.away_s / link.observed_s)


def test_a_bound_is_marked_by_its_sign(north):
    plot = quantity_plots.quantities_over_time("north", read_run(north).history)
    assert re.search(r"goodput up [\d.]+ to ≥ [\d.]+ Mbit/s \(\d+ of 56 are ≥\)", plot.finding)


def test_every_reading_of_the_link_has_a_name_and_a_unit():
    assert list(READINGS) == [field.name for field in fields(LinkState)]


def test_a_restart_of_seconds_is_time_off(tmp_path):
    """Time off is known from the starts, and not only from a lack of rows."""
    path = recorded_watch(tmp_path / "x.pilotfish", 12, away=[(3, 5)], steps=[(2, 7200.0)])
    with Recorder.resume(path) as recorder:
        first = read_run(path).facts.starts[0]
        again = replace(first, unix_s=first.unix_s + 9999, clock_s=6 * EVERY_S - 10.0, off_s=120.0)
        recorder.change_facts(starts=[first, again])
    link = read_run(path).history
    ((begin, end),) = link.pauses
    assert (begin - link.began_s, end - link.began_s) == (6 * EVERY_S - 130.0, 6 * EVERY_S - 10.0)
    assert link.observed_s == 12 * EVERY_S - 120.0
    assert link.available == 1.0 - (2 * EVERY_S - 23.0) / link.observed_s


def test_an_outage_at_the_end_lasts_as_long_as_the_watch_says(tmp_path):
    """The watch has no rows during an outage, but it writes that it runs."""
    path = recorded_watch(tmp_path / "x.pilotfish", 12, away=[(9, 13)], open_outage=True)
    until_s = 11.5 * EVERY_S
    with Recorder.resume(path) as recorder:
        recorder.change_facts(alive_unix_s=BEGAN_UNIX_S + until_s, alive_clock_s=until_s)
    (outage,) = read_run(path).history.outages
    assert (outage.ended, outage.ended_s) == (False, BEGAN_UNIX_S + until_s)


def two_hours(path, *, alive_s=None, start_s=None, **kinds):
    """A watch of two rounds, one each hour. alive_s: the last moment that it wrote without a row;
    start_s: of a second start. Both by the run's clock. Returns its history.
    """
    recorded_watch(path, 2, every_s=HOUR_S, **kinds)
    known = {}
    with Recorder.resume(path) as recorder:
        if alive_s is not None:
            known |= {"alive_unix_s": BEGAN_UNIX_S + alive_s, "alive_clock_s": alive_s}
        if start_s is not None:
            first = read_run(path).facts.starts[0]
            known["starts"] = [first, replace(first, clock_s=start_s, off_s=start_s - 3620.0)]
        recorder.change_facts(**known)
    return read_run(path).history


def test_the_last_round_of_a_watch_that_runs_counts_as_long_as_the_interval(tmp_path):
    link = two_hours(tmp_path / "x.pilotfish")
    assert (link.rounds, link.slots, link.observed_s) == (2, 2, 2 * HOUR_S)


def test_a_time_of_which_nothing_is_known_is_not_available(tmp_path):
    """The edge was away when the watch last wrote that it runs, long before its next round."""
    link = two_hours(tmp_path / "x.pilotfish", alive_s=4260.0, away=[(1, 2)], open_outage=True)
    assert (link.rounds, link.slots, link.observed_s) == (2, 2, 4260.0)
    assert link.away_s == 4260.0 - 3620.0
    assert link.available == 1.0 - link.away_s / 4260.0


def test_a_watch_that_stopped_was_not_watching_until_its_next_round(tmp_path):
    link = two_hours(tmp_path / "x.pilotfish", alive_s=3700.0)
    assert (link.rounds, link.slots, link.observed_s) == (2, 2, 3700.0)


def test_a_watch_that_has_just_started_again_knows_nothing_of_its_next_round(tmp_path):
    link = two_hours(tmp_path / "x.pilotfish", start_s=5000.0)
    assert (link.rounds, link.slots) == (2, 2)
    assert HOUR_S < link.observed_s < 3620.0


def test_the_table_has_the_ten_longest_outages(tmp_path):
    away = [(at, at + 1 + at % 3) for at in range(0, 60, 5)]
    run = read_run(recorded_watch(tmp_path / "x.pilotfish", 64, away=away))
    table = link_tables.outages(run)
    assert len(table.rows) == 10
    assert [row[0] for row in table.rows] == sorted(row[0] for row in table.rows)
    assert "the 10 longest of 12 outages" in link_tables.outage_summary(run)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("UPDATE probes SET rtts_s = '[0.1, -1.0]'", "-1 as its RTT"),
        ("UPDATE probes SET up_bps = 9e999", "inf as its goodput up"),
        ("UPDATE probes SET lost = -1", "-1 as its lost pings"),
        ("UPDATE probes SET signal = '{\"dbm\": 1e300}'", "1e+300 as its signal's dbm"),
        ("UPDATE rtts SET rtt_s = 1e9", "1e+09 as its RTT"),
        ("UPDATE outages SET ended_clock_s = 1.0", "1 as its end by the run's clock"),
        ("UPDATE outages SET ended_unix_s = NULL", "nan as its end"),
        ("UPDATE answers SET clock_s = -1", "-1 as its begin by the run's clock"),
        (
            "UPDATE facts SET value = '{\"every_s\": 0}' WHERE name = 'watch'",
            "0 as its interval",
        ),
    ],
)
def test_impossible_values_of_the_link_are_damage(tmp_path, change, words):
    path = recorded_watch(tmp_path / "x.pilotfish", 4, away=[(1, 2)])
    with closing(sqlite3.connect(path)) as database, database:
        assert database.execute(change).rowcount
    with pytest.raises(RunFileError, match="is damaged") as caught:
        read_run(path)
    assert words in str(caught.value)


# Samples


def test_a_percentile_needs_a_sample_above_it():
    known = {n: [name for name, p in percentiles(np.arange(n)).items() if p is not None]
             for n in (0, 1, 2, 9, 10, 99, 100, 999, 1000)}  # fmt: skip
    assert known == {
        0: [], 1: [], 2: ["p50"], 9: ["p50"], 10: ["p50", "p90"], 99: ["p50", "p90"],
        100: ["p50", "p90", "p99"], 999: ["p50", "p90", "p99"],
        1000: ["p50", "p90", "p99", "p99.9"],
    }  # fmt: skip


def test_spans_of_time_have_the_extremes_and_the_median():
    rng = np.random.default_rng(2)
    made = samples(rng.uniform(0, 100, 999), rng.lognormal(size=999))
    spans = by_span(made, np.arange(0.0, 100.0, 10.0))
    assert len(spans.unix_s) == 10
    for at, middle in enumerate(spans.unix_s):
        within = (made.unix_s // 10) == at
        inside, times = made.values[within], made.unix_s[within]
        assert middle == (times.min() + times.max()) / 2
        span = (spans.low[at], spans.median[at], spans.high[at])
        assert span == (inside.min(), pytest.approx(np.median(inside)), inside.max())


@pytest.mark.parametrize("late_s", [(0.0, 1.2), (0.0, 140.0)])
def test_each_round_of_a_watch_is_a_point_however_late_it_begins(tmp_path, late_s):
    rng = np.random.default_rng(0)
    path = tmp_path / "x.pilotfish"
    recorded_watch(path, 0)
    begins = np.arange(100) * EVERY_S + rng.uniform(*late_s, 100)
    with Recorder.resume(path) as recorder:
        rounds = [probe(float(at), rng) for at in begins]
        for each in rounds:
            recorder.add_probe(each)
    plot = link_plots.rtt_over_time("x", read_run(path).history)
    (axes,) = painted(plot, tmp_path)
    (line,) = (each for each in axes.lines if each.get_label() == "pings")
    assert line.get_xdata() - BEGAN_UNIX_S == pytest.approx(begins, abs=1e-3)
    assert line.get_ydata() == pytest.approx([1e3 * np.median(each.rtts_s) for each in rounds])


def test_a_line_breaks_at_pauses_and_outages():
    times = np.array([0.0, 10.0, 20.0, 100.0, 110.0, 120.0])
    broken = breaks(times, times, 50.0, np.array([112.0]))
    assert broken.tolist() == [False, False, False, True, False, True]


def test_a_curve_of_many_samples_keeps_its_tail():
    values = np.random.default_rng(4).lognormal(size=100_000)
    curve, share = distribution(values)
    assert len(curve) < 2_000
    assert curve[-1] == values.max()
    for level in (50.0, 90.0, 99.9):
        assert np.interp(level, share, curve) == pytest.approx(
            np.percentile(values, level), rel=0.01
        )


def test_the_interval_of_many_values_is_what_resamples_approach():
    values = np.random.default_rng(6).lognormal(size=_MANY + 200)
    drawn = np.random.default_rng(1).choice(values, (4_000, len(values)))
    expected = np.percentile(np.median(drawn, axis=1), [2.5, 97.5])
    low, high = median_interval(values.tolist())
    assert math.log(high / low) == pytest.approx(math.log(expected[1] / expected[0]), rel=0.15)
    assert low < np.median(values) < high


# Times


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.04, "0.0 s"), (9.4, "9.4 s"), (42.0, "42 s"), (60.0, "1 min"), (125.2, "2 min 5 s"),
        (3599.7, "1 h"), (3600.0, "1 h"), (86400.0, "24 h"), (30 * 86400.0, "30 d"),
        (200_000.0, "2 d 8 h"),
    ],
)  # fmt: skip
def test_durations(seconds, text):
    assert link_tables.duration(seconds) == text


@pytest.mark.parametrize("length_s", [3.0, 200.0, 7200.0, 86400.0, 8 * 86400.0, 4e9])
@pytest.mark.parametrize("most", [5, 13])
def test_ticks_are_few_and_tell_the_date(length_s, most):
    begin = 1_796_000_123.0
    ticks = [*clock_axis._ticks(begin, begin + length_s, most)]
    assert 1 <= len(ticks) <= most
    assert all(begin <= at <= begin + length_s for at, _ in ticks)
    if length_s > 86400.0:
        assert "Nov" in ticks[0][1] or "Dec" in ticks[0][1] or length_s > 1e8


def test_a_young_watch_is_told_to_wait(tmp_path):
    young = recorded_watch(tmp_path / "young.pilotfish", 0)
    with pytest.raises(RunFileError, match="after the first round of the watch") as raised:
        read_run(young)
    assert "measure" not in str(raised.value)
