"""What an edge's journal says of keys that are refused."""

from __future__ import annotations

import logging
import shlex

import pytest

from pilotfish.wire import refused_keys as module
from pilotfish.wire.refused_keys import RefusedKeys
from tests.support.set_clock import SetClock

BOARD, STRANGER = b"b" * 40, b"s" * 40


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    clock = SetClock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_key_that_was_on_the_list_is_named_and_the_command_with_it(
    clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    refused.add_names({BOARD: "kitchen"})
    refused.add_names({})
    refused.note(BOARD, "10.0.0.3")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    for words in (BOARD.decode(), "'kitchen'", "10.0.0.3", "keys allow device.pub --name kitchen"):
        assert words in record.message
    refused.note(STRANGER, "10.0.0.4")
    clock.now_s += 2.0
    refused.note(STRANGER, "10.0.0.4")
    assert "--name NAME" in caplog.records[1].message
    assert refused.by_name == {"kitchen": 1}
    assert refused.total == 3


def test_a_key_that_comes_again_and_again_is_a_line_in_ten_minutes(
    clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    for _ in range(1300):
        refused.note(STRANGER, "10.0.0.4")
        clock.now_s += 1.0
    assert len(caplog.records) == 3
    assert "and 599 times before" in caplog.records[1].message


def test_a_key_on_the_list_is_only_counted(
    clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    """It is shut out for a minute; `keys allow` would say that it is on the list."""
    refused = RefusedKeys()
    refused.add_names({BOARD: "kitchen"})
    refused.note(BOARD, "10.0.0.3", listed=True)
    assert not caplog.records
    assert refused.by_name == {"kitchen": 1}


def test_strangers_hide_no_device_and_become_rare(
    clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    refused.add_names({BOARD: "kitchen"})
    for number in range(36_000):
        refused.note(b"%040d" % number, "10.0.0.4")
        if number % 100 == 99:
            refused.note(BOARD, "10.0.0.3")
        clock.now_s += 0.1
    named = [record for record in caplog.records if "'kitchen'" in record.message]
    assert len(named) == 6  # in an hour
    assert len(caplog.records) - len(named) < 100
    clock.now_s += 3600.0
    caplog.clear()
    for number in range(3):  # it is a second again
        refused.note(b"%040d" % number, "10.0.0.4")
        clock.now_s += 1.5
    assert len(caplog.records) == 2


def test_a_name_of_any_kind_can_be_copied_from_the_log(
    clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    refused.add_names({BOARD: "Bob's board; rm"})
    refused.note(BOARD, "10.0.0.3")
    command = caplog.records[0].message.partition("`")[2].partition("`")[0]
    assert shlex.split(command)[-1] == "Bob's board; rm"


def test_strangers_without_number_are_a_line_a_second_and_bounded(
    clock: SetClock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    for number in range(5000):
        refused.note(b"%040d" % number, "10.0.0.4")
        clock.now_s += 0.01
    assert len(caplog.records) <= 51
    assert len(refused._strangers) <= 1024
    assert not refused.by_name
