"""A watch by a clock that the test tells, on a real edge."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import boot_s
from pilotfish.lab.field.watch.clock import Clock
from pilotfish.lab.field.watch.listener import WatchListener, WatchRound
from pilotfish.lab.field.watch.watch_file import open_watch
from pilotfish.lab.field.watch.watch_settings import WatchSettings
from pilotfish.lab.field.watch.watching import Watching

EVERY_S = 300.0


class JumpingClock(Clock):
    """Runs in real time, but jumps over what the watch waits for. wall_s: set ahead by so much."""

    def __init__(self) -> None:
        self.ahead_s = self.wall_s = 0.0

    def unix_s(self) -> float:
        return time.time() + self.ahead_s + self.wall_s

    def boot_s(self) -> float:
        return boot_s() + self.ahead_s

    def wait(self, seconds: float) -> None:
        time.sleep(0.0005)  # lets the link's threads run
        self.ahead_s += seconds


class Plan(WatchListener):
    """Keeps what a watch tells; does what the test has planned after a round, by its number."""

    def __init__(self, acts: dict[int, Callable[[], None]] | None = None) -> None:
        self.rounds: list[WatchRound] = []
        self.outages: list[Any] = []
        self.steps: list[float] = []
        self.disk: list[str] = []
        self.written: list[int] = []
        self.acts = acts or {}

    def on_round(self, round_: WatchRound) -> None:
        self.rounds.append(round_)
        self.acts.get(round_.number, lambda: None)()

    def on_outage(self, outage: Any) -> None:
        self.outages.append(outage)

    def on_clock_step(self, stamp: Any, by_s: float) -> None:
        self.steps.append(by_s)

    def on_disk(self, stamp: Any, problem: str, waiting: int) -> None:
        self.disk.append(problem)

    def on_rows(self, written: int, failures: int, dropped: int, file_bytes: int) -> None:
        self.written.append(written)


def settings_of(edge: str, out: Path, prompts: Path, **changes: Any) -> WatchSettings:
    """The settings of a short watch, by text."""
    rounds = changes.pop("rounds", 3)
    values = {"every_s": EVERY_S, "for_s": rounds * EVERY_S, "max_tokens": 6, **changes}
    return WatchSettings(edge=edge, out=out, prompts=prompts, **values)


def started(settings: WatchSettings, clock: Clock, plan: WatchListener | None = None) -> Watching:
    """A watch that can be run; it opens the file."""
    opened = open_watch(settings, settings.matrix, clock)
    return Watching(settings, opened, clock=clock, listener=plan or WatchListener())


def watched(settings: WatchSettings, clock: Clock, plan: Plan | None = None) -> Plan:
    """Run a watch to its end."""
    plan = plan or Plan()
    started(settings, clock, plan).run()
    return plan


def numbers(out: Path) -> list[int]:
    """The rounds whose probes are in the file."""
    with Run.open(out) as run:
        every_s = run.facts.watch.every_s if run.facts.watch else EVERY_S
        return [int(probe.clock_s // every_s) for probe in run.probes()]
