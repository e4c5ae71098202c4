"""The progress of a command: nothing of the time left before it is known; lines in a log."""

from __future__ import annotations

import pytest

from pilotfish.base import progress
from pilotfish.base.progress import ProgressDisplay
from tests.support.set_clock import SetClock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetClock:
    made = SetClock(100.0)
    monkeypatch.setattr(progress, "time", made)
    return made


def test_what_a_run_before_has_done_says_nothing_of_the_pace(
    clock: SetClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay(waves={"answers": 2}) as display:
        for done, now_s in ((300, 100.0), (301, 130.0), (302, 160.0)):
            clock.now_s = now_s
            display.show("answers", done, 400)
    # 98 are left, at 30 s each; with the others' the pace would be 0.2 s
    assert capsys.readouterr().err.splitlines() == [
        "answers …",
        "answers: 301 of 400",
        "answers: 302 of 400, about 49 min left",
    ]


def test_a_wave_is_never_more_than_there_is(
    clock: SetClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay(waves={"answers": 8}) as display:
        report = display.counter("answers", 2)
        clock.now_s += 30
        report(2)
    assert capsys.readouterr().err.splitlines() == [
        "answers …",
        "answers: 2 of 2, about 0 s left",
    ]


def test_each_stage_has_its_own_pace(clock: SetClock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressDisplay() as display:
        display.show("download", 0, 80_000_000)
        clock.now_s += 30
        display.show("download", 20_000_000, 80_000_000)
        display.show("check", 0, 10)
        clock.now_s += 300
        display.show("check", 5, 10)
    assert capsys.readouterr().err.splitlines() == [
        "download …",
        "download: 25 %, about 2 min left",
        "check …",
        "check: 5 of 10, about 5 min left",
    ]


def test_a_stage_that_begins_again_has_a_new_pace(
    clock: SetClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display:
        for _ in range(2):
            display.show("evaluation", 0, 4)
            clock.now_s += 30
            display.show("evaluation", 2, 4)
            clock.now_s += 1000
    line = "evaluation: 2 of 4, about 30 s left"
    assert capsys.readouterr().err.splitlines() == [
        "evaluation …",
        line,
        "evaluation: 0 of 4",
        line,
    ]


def test_a_log_gets_a_line_every_twenty_seconds_at_most(
    clock: SetClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display:
        report = display.counter("tokens", 100)
        for done in range(1, 101):
            clock.now_s += 1
            report(done)
    assert [line.partition(",")[0] for line in capsys.readouterr().err.splitlines()] == [
        "tokens …",
        *("tokens: 21 of 100", "tokens: 42 of 100", "tokens: 63 of 100", "tokens: 84 of 100"),
    ]


def test_the_callers_estimate_is_shown_instead(
    clock: SetClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display:
        display.show("steps", 0, 10)
        clock.now_s += 30
        display.show("steps", 5, 10, 7200.0)
    assert capsys.readouterr().err.splitlines()[1:] == ["steps: 5 of 10, about 2.0 h left"]


def test_a_stage_of_unknown_length_is_only_named(
    clock: SetClock, capsys: pytest.CaptureFixture[str]
) -> None:
    with ProgressDisplay() as display:
        for _ in range(3):
            display.show("opening [the] drafters", 0, None)
            clock.now_s += 30
        display.counter("nothing to do", 0)
        display.print_above("left out: [a]")
    assert capsys.readouterr().err.splitlines() == ["opening [the] drafters …", "left out: [a]"]


def test_a_terminal_has_a_bar_and_a_later_stage_gets_a_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressDisplay() as display:
        display.show("opening", 0, None)
        assert "opening" in capsys.readouterr().err
        report = display.counter("reading [all]", 4)
        report(4)
    drawn = capsys.readouterr().err
    assert "reading [all]" in drawn
    assert "4 of 4" in drawn
    last = drawn.rpartition("\x1b[2K")[2]
    assert "reading [all]" in last
    assert "opening" not in last
    assert "reading [all] …" not in drawn
    display.show("later", 0, 1)
    assert "later …" in capsys.readouterr().err


def test_a_display_without_stages_draws_nothing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    with ProgressDisplay():
        pass
    assert capsys.readouterr().err == ""
