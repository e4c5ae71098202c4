"""A run's clock does not jump, and what is read is put on the setting that held longest."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.lab.field.run_clock import Moment, RunClock, begin, continued_s, on_wall_clock
from tests.support.examples import examples

NOON = 1.8e9
LAST = Moment(unix_s=NOON, clock_s=1000.0, boot_id="a", boot_s=5000.0)


@pytest.mark.parametrize(
    ("boot", "unix_s", "boot_s", "expected"),
    [
        ("a", NOON + 60, 5060.0, 1060.0),
        ("a", NOON - 7200, 5060.0, 1060.0),  # the wall clock was set back
        ("b", NOON + 60, 20.0, 1060.0),  # rebooted
        ("b", 0.0, 20.0, 1000.0),  # rebooted into 1970
        ("", NOON + 60, 5060.0, 1060.0),  # the kernel does not name its boots
    ],
)
def test_it_goes_on_over_starts(boot, unix_s, boot_s, expected):
    assert continued_s(LAST, unix_s, boot, boot_s) == pytest.approx(expected)


def test_a_clock_that_was_not_set_tells_no_time_that_passed():
    """A board without a battery begins in 1970; its first start may end before NTP sets it."""
    first = Moment(unix_s=60.0, clock_s=30.0, boot_id="a", boot_s=40.0)
    assert continued_s(first, NOON, "b", 20.0) == 30.0


def test_a_clock_that_is_far_ahead_passes_a_month_at_most():
    assert continued_s(LAST, NOON + 60 * 365 * 86400, "b", 20.0) == 1000.0 + 30 * 86400


def test_a_start_and_the_time_since():
    first = begin(unix_s=NOON, now_boot_s=50.0)
    assert first.clock_s == 0.0
    again = begin(first, unix_s=NOON - 3600, now_boot_s=80.0)
    assert again.clock_s == pytest.approx(30.0)
    assert RunClock(again, boot=lambda: 90.0)() == pytest.approx(40.0)


def test_a_clock_that_was_never_set_is_left_as_it_is():
    times = on_wall_clock([0.0, 300.0, 600.0], [NOON, NOON + 300.2, NOON + 600.1])
    assert times.unix_s.tolist() == [NOON, NOON + 300.2, NOON + 600.1]
    assert times.steps == []


def test_the_setting_that_held_longest_counts():
    clock = 300.0 * np.arange(100)
    unix = NOON + clock
    unix[:3] -= 1.7e9  # a board that began in 1970
    unix[40:50] += 7200
    unix[70:75] -= 10800
    times = on_wall_clock(clock, unix)
    assert np.allclose(times.unix_s, NOON + clock)
    assert [step.clock_s for step in times.steps] == [900, 12000, 15000, 21000, 22500]
    assert [step.unix_s - NOON for step in times.steps] == [900, 12000, 15000, 21000, 22500]
    assert [step.by_s for step in times.steps] == [1.7e9, 7200, -7200, -10800, 10800]


def test_a_clock_that_drifts_is_not_set():
    clock = 300.0 * np.arange(500)
    unix = NOON + clock * (1 + 4e-4)
    assert on_wall_clock(clock, unix).steps == []


@given(
    steps=st.lists(st.tuples(st.integers(1, 30), st.floats(-1e5, 1e5)), max_size=6),
    first=st.integers(1, 30),
)
@examples(100)
def test_times_never_go_back(steps, first):
    offsets = [0.0] * first
    for rows, by_s in steps:
        offsets += [offsets[-1] + by_s] * rows
    clock = 60.0 * np.arange(len(offsets))
    times = on_wall_clock(clock, NOON + clock + np.asarray(offsets))
    assert np.all(np.diff(times.unix_s) >= 0.0)
    assert len(times.unix_s) == len(clock)


def test_of_no_rows():
    assert on_wall_clock([], []).unix_s.tolist() == []


def test_a_clock_that_steps_at_every_row_costs_little():
    """A damaged file has as many settings as rows; comparing all pairs would take gigabytes."""
    random = np.random.default_rng(0)
    clock = np.arange(30_000.0)
    wall = on_wall_clock(clock.tolist(), random.uniform(0.0, 4e9, len(clock)).tolist())
    assert len(wall.steps) == len(clock) - 1
    assert np.isfinite(wall.unix_s).all()
