"""What is said of the time left: nothing before it is known, and only by one's own pace."""

from __future__ import annotations

import pytest

from pilotfish.cli import countdown
from pilotfish.cli.countdown import Countdown


class Clock:
    now_s = 100.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(countdown, "time", made)
    return made


def test_what_a_run_before_has_done_says_nothing_of_the_pace(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Countdown("answers", 400, begun=300, wave=2) as display:
        for done, now_s in ((300, 100.0), (301, 130.0), (302, 160.0)):
            clock.now_s = now_s
            display.update(done)
    # 98 are left, at 30 s each; with the others' the pace would be 0.2 s
    assert capsys.readouterr().err.splitlines() == [
        "answers: 301 of 400",
        "answers: 302 of 400, about 49 min left",
    ]


def test_a_wave_is_never_more_than_there_is(
    clock: Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    with Countdown("answers", 2, wave=8) as display:
        clock.now_s += 30
        display.update(2)
    assert capsys.readouterr().err.splitlines() == ["answers: 2 of 2, about 0 s left"]
