"""Who comes and goes stands in the log by name, and however many do, in few lines."""

from __future__ import annotations

import logging

import pytest

from pilotfish.edge_runtime import loop
from pilotfish.edge_runtime.loop import DeviceLog

ALLOWED = {bytes([number]): f"device-{number:02}" for number in range(40)}


@pytest.fixture
def unpaused(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each note counts at once."""
    caplog.set_level(logging.INFO, "pilotfish.edge")
    monkeypatch.setattr(loop, "_LOG_PAUSE_S", 0.0)


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = list(caplog.messages)
    caplog.clear()
    return found


@pytest.mark.usefixtures("unpaused")
def test_each_coming_and_going_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    seen = DeviceLog()
    for owners, expected in (
        ([], []),
        ([b"\1", b"\2"], ["connected: device-01, device-02"]),
        ([b"\1", b"\2"], []),
        ([b"\2", b"\3"], ["connected: device-03", "no longer connected: device-01"]),
        ([], ["no longer connected: device-02, device-03"]),
        ([b"a stranger"], []),
    ):
        seen.log_changes(owners, ALLOWED)
        assert logged(caplog) == expected


@pytest.mark.usefixtures("unpaused")
def test_many_at_once_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    DeviceLog().log_changes([*ALLOWED], ALLOWED)
    [line] = logged(caplog)
    assert line.endswith("device-09 and 30 more")


def test_who_comes_and_goes_all_the_time_fills_no_log(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "pilotfish.edge")
    seen = DeviceLog()
    for _ in range(1000):
        seen.log_changes([b"\1"], ALLOWED)
        seen.log_changes([], ALLOWED)
    assert len(caplog.messages) <= 2
