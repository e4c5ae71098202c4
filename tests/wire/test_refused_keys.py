"""What an edge's journal says of keys that are refused."""

from __future__ import annotations

import logging

import pytest

from pilotfish.wire import refused_keys as module
from pilotfish.wire.refused_keys import RefusedKeys

BOARD, STRANGER = b"b" * 40, b"s" * 40


class Clock:
    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_a_key_that_was_on_the_list_is_named_and_the_command_with_it(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    refused.learn({BOARD: "kitchen"})
    refused.learn({})
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
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    for _ in range(1300):
        refused.note(STRANGER, "10.0.0.4")
        clock.now_s += 1.0
    assert len(caplog.records) == 3
    assert "and 599 times before" in caplog.records[1].message


def test_strangers_without_number_are_a_line_a_second_and_bounded(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    refused = RefusedKeys()
    for number in range(5000):
        refused.note(b"%040d" % number, "10.0.0.4")
        clock.now_s += 0.01
    assert len(caplog.records) <= 51
    assert len(refused._met) <= 1024
    assert not refused.by_name
