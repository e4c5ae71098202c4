"""What `field watch` says: a line a round to people, few lines to a journal."""

from __future__ import annotations

import dataclasses
import logging
import time

import pytest

from pilotfish.cli.field.watch_screen import WatchLog, WatchScreen
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.watch.clock import Stamp
from pilotfish.lab.field.watch.listener import WatchListener, WatchRound
from tests.support.made_answers import answer, stream


def round_of(number: int, **failed: str) -> WatchRound:
    stamp = Stamp(1e9 + 300.0 * number, 300.0 * number)
    probe = Probe(
        began_unix_s=stamp.unix_s,
        clock_s=stamp.clock_s,
        took_s=1.0,
        rtts_s=[0.04, 0.05, 0.06],
        lost=1,
        up_bps=2.5e6,
        up_bound=True,
    )
    return WatchRound(number=number, stamp=stamp, probe=probe, failed=failed)


def tell_a_day(listener: WatchListener) -> None:
    for number in range(288):
        listener.on_round(round_of(number, wisv="this edge has no head"))
    outage = Outage(began_unix_s=1e9, began_clock_s=10.0, reason="nothing listens there")
    listener.on_outage(outage)
    ended = {"ended_unix_s": 1e9 + 70.0, "ended_clock_s": 80.0}
    listener.on_outage(Outage(**{**vars(outage), **ended}))
    listener.on_disk(Stamp(1e9, 5.0), "/x cannot be written: full.", 1)
    listener.on_disk(Stamp(1e9, 5.0), "", 0)
    listener.on_clock_step(Stamp(1e9, 5.0), -3600.0)


def test_a_journal_gets_a_line_an_hour(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        tell_a_day(WatchLog())
    by_level = {
        level: [entry.getMessage() for entry in caplog.records if entry.levelname == level]
        for level in ("INFO", "WARNING", "ERROR")
    }
    assert len(caplog.records) < 60
    assert by_level["INFO"][0] == (
        "13 rounds, RTT 50.0 ms (median), 0 outages, 13 answers by wisv failed"
    )
    assert "the edge is away: nothing listens there" in by_level["WARNING"]
    assert "the edge is back after 70 s" in by_level["INFO"]
    assert len(by_level["ERROR"]) == 1
    assert any("-3600 s" in line for line in by_level["INFO"])


def test_people_get_a_line_a_round(capsys: pytest.CaptureFixture[str]) -> None:
    tell_a_day(WatchScreen())
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 288 + 5
    assert "RTT 50.0 ms (1 lost)   up ≥ 2.5 down – Mbit/s   wisv: this edge has no head" in lines[0]
    assert "the wall clock was set by -3600 s" in lines[-1]
    at = time.strftime("%H:%M:%S", time.localtime(1e9))
    assert lines[-3].startswith(f"{at}  /x cannot be written")  # the event's time


def test_the_time_per_token_is_that_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    slow_prompt = answer(stream(10.0, 0.5, 0.4, 0.6), protocol="stream")
    short = answer(stream(0.5), protocol="auto")
    WatchScreen().on_round(dataclasses.replace(round_of(1), answers=[slow_prompt, short]))
    assert "stream 250 ms/token   auto – ms/token" in capsys.readouterr().err
