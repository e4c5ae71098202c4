"""Mahimahi's traces: what is read, and what is refused."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import TraceError
from pilotfish.emulation.traces import Trace, TraceClock


def written(path, text):
    path.write_bytes(text.encode())
    return path


def test_a_trace_is_read_as_it_is(tmp_path):
    trace = Trace.load(written(tmp_path / "trace", "0\n0\n7\r\n7\n10"))
    assert list(trace.times_ms) == [0, 0, 7, 7, 10]
    assert trace.period_s == 0.01
    assert trace.mean_bps == pytest.approx(5 * 1500 * 8 / 0.01)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "is empty"),
        ("0\n0\n", "lasts 0 ms"),
        ("1\n\n3\n", "line 2: ''"),
        ("1\n2\nthree\n", "line 3: 'three'"),
        ("1\n-2\n", "line 2: '-2'"),
        ("1\n2.5\n", "line 2: '2.5'"),
        ("1\n٣\n", "line 2"),
        ("5\n9\n8\n", "line 3: 8 ms comes after 9 ms"),
        ("1\n" + "9" * 400 + "\n", "line 2: '" + "9" * 40 + "'"),
        ("\0\1\2", "line 1"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path, text, says):
    with pytest.raises(TraceError) as caught:
        Trace.load(written(tmp_path / "trace", text))
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) in str(caught.value)


def test_a_trace_that_is_not_there(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(TraceError, match="cannot be read"):
            Trace.load(path)


@given(
    st.lists(st.integers(0, 50), min_size=1, max_size=12).filter(any),
    st.lists(st.tuples(st.floats(0, 0.2), st.integers(1, 4000)), max_size=20),
)
def test_the_clock_takes_opportunities_as_a_walk_over_all_of_them_does(steps, requests):
    times = [sum(steps[: i + 1]) for i in range(len(steps))]
    trace = Trace(array("Q", times))
    clock = TraceClock(trace, 0.0)
    index, room, now = -1, 0, 0.0
    for gap, size in requests:
        now += gap
        left = clock.leave(now, size)
        if index >= 0 and trace.time_s(index) < now:
            room = 0
        while size:
            if not room:
                index += 1
                while trace.time_s(index) < now - 1e-9:
                    index += 1
                room = 1500
            size, room = max(0, size - room), max(0, room - size)
        assert left == trace.time_s(index)
        now = left
