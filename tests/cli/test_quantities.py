"""Times, rates and shares on the command line."""

from __future__ import annotations

from argparse import ArgumentTypeError

import pytest

from pilotfish.cli.quantities import duration, rate, share, size


@pytest.mark.parametrize(
    ("read", "text", "value"),
    [
        (duration, "50ms", 0.05),
        (duration, "0.05s", 0.05),
        (duration, "200us", 200e-6),
        (duration, "200µs", 200e-6),
        (duration, " 1.5 S ", 1.5),
        (duration, "0", 0.0),
        (duration, "0ms", 0.0),
        (rate, "20mbit", 20e6),
        (rate, "1.5gbit", 1.5e9),
        (rate, "800kbit", 800e3),
        (rate, "20Mbit", 20e6),
        (rate, "9600bit", 9600.0),
        (size, "500kB", 500_000),
        (size, "0", 0),
        (size, "0B", 0),
        (share, "1%", 0.01),
        (share, "0.01", 0.01),
        (share, ".5 %", 0.005),
        (share, "0", 0.0),
    ],
)
def test_what_is_written_with_its_unit(read, text, value):
    assert read(text) == pytest.approx(value, rel=1e-12)


@pytest.mark.parametrize(
    ("read", "texts", "says"),
    [
        (duration, ["50", "", "ms", "-1ms", "1e3s", "5min", "nan", "infs", "1..5s", "٥ms"], "50ms"),
        (rate, ["20", "20mb", "20mbps", "20MB/s", "-1mbit", "mbit", "inf"], "20mbit"),
        (rate, ["0mbit", "0.0kbit"], "above 0"),
        (share, ["-1%", "one", "%", "1%%", "nan", "1e-3"], "1% or 0.01"),
        (share, ["100%", "1", "250%", "1.0"], "below 100%"),
    ],
)
def test_what_is_refused_is_told_how_to_write_it(read, texts, says):
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=says):
            read(text)
