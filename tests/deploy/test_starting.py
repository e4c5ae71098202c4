"""How long an installation waits for a unit: its own time counts, not that of what it waits for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pilotfish.deploy import system

UNIT = "pilotfish-device.service"
BUILD_S = 25 * 60.0  # of an engine, at the first start; the unit for it has half an hour
PATIENCE_S = 300.0


class Board:
    """systemd and a clock; state: of the unit, by the seconds since it was started."""

    def __init__(self, state: Callable[[float], tuple[str, bool]]) -> None:
        self.state, self.now_s = state, 0.0

    def monotonic(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def properties(self, unit: str) -> dict[str, str]:
        assert unit == UNIT
        active, queued = self.state(self.now_s)
        options = {"ActiveState": active, "Job": "12" if queued else ""}
        return {"Result": "success", "NRestarts": "0", "ConditionResult": "yes"} | options


def started(board: Board, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(system, "time", board)
    monkeypatch.setattr(system, "_properties", board.properties)
    monkeypatch.setattr(system, "_run", lambda *command: None)
    monkeypatch.setattr(system, "journal", lambda unit: "its journal")
    monkeypatch.setattr(system.subprocess, "run", lambda *command, **options: None)
    return system.restart(UNIT, PATIENCE_S)


def test_a_unit_that_waits_for_an_engine_to_be_built_has_its_own_time_afterwards(monkeypatch):
    def state(at_s: float) -> tuple[str, bool]:
        if at_s < BUILD_S:
            return "inactive", True
        return ("activating", True) if at_s < BUILD_S + 0.9 * PATIENCE_S else ("active", False)

    assert started(Board(state), monkeypatch) is None


@pytest.mark.parametrize("active", ["inactive", "activating"])
def test_one_that_never_comes_is_told(active, monkeypatch):
    board = Board(lambda at_s: (active, True))
    info = started(board, monkeypatch)
    assert info is not None
    assert "is not active after 300 s" in info
    assert board.now_s <= 3600.0
    assert active == "inactive" or board.now_s <= PATIENCE_S + 1.0


def test_an_installer_that_stood_still_looks_once_more(monkeypatch):
    """It was suspended meanwhile: the unit has long been active."""

    class Suspended(Board):
        def sleep(self, seconds: float) -> None:
            self.now_s += seconds + (2 * PATIENCE_S if self.now_s == 1.0 else 0.0)

    assert started(Suspended(lambda at_s: ("active", False)), monkeypatch) is None
