"""The run's clock of a watch that is killed, on a machine that reboots and whose clock is set."""

from __future__ import annotations

import shutil
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pilotfish.lab.field import run_clock
from pilotfish.lab.field.link_rows import Outage, Probe
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import RunClock
from pilotfish.lab.field.watch.clock import Clock
from pilotfish.lab.field.watch.watch_file import WatchFile, open_watch
from tests.support.examples import examples
from tests.support.made_watches import MEMORY
from tests.support.watching import settings_of

NOON = 1.8e9
MONTH_S = 30 * 86400.0
ROUNDING_S = 1e-3


class Machine(Clock):
    """The clocks of a machine. now_s: the true time."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.wall_s = NOON
        self.boots = 1
        self.booted_s = -100.0

    def unix_s(self) -> float:
        return self.wall_s + self.now_s

    def boot_s(self) -> float:
        return self.now_s - self.booted_s

    def boot_id(self) -> str:
        return f"boot {self.boots}"


def is_on(watch: KilledWatch) -> bool:
    return watch.file is not None


def is_off(watch: KilledWatch) -> bool:
    return watch.file is None


class KilledWatch(RuleBasedStateMachine):
    """A watch that writes rows, is killed at any moment, and is started again at any later one."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        prompts = self.folder / "prompts.txt"
        prompts.write_text("abc\n")
        self.settings = settings_of("tcp://127.0.0.1:7077", self.folder / "day", prompts)
        self.machine = Machine()
        self.patches = pytest.MonkeyPatch()
        self.patches.setattr(run_clock, "boot_id", self.machine.boot_id)
        self.file: WatchFile | None = None
        self.away: Outage | None = None
        self.newest_s = 0.0  # the newest time by the run's clock that the file has
        self.newest_at = (0, 0.0)  # the boot and the true time of this
        self.start()

    def now(self) -> tuple[float, float]:
        """The present time by the wall clock and by the run's clock, as the watch tells it."""
        assert self.file is not None
        clock_s = RunClock(self.file.facts.starts[-1].moment, self.machine.boot_s)()
        assert clock_s >= self.newest_s - ROUNDING_S
        self.newest_s, self.newest_at = clock_s, (self.machine.boots, self.machine.now_s)
        return self.machine.unix_s(), clock_s

    @rule(seconds=st.sampled_from([0.0, 0.5, 60.0, 7000.0, 1e6, 1e8]))
    def time_passes(self, seconds: float) -> None:
        self.machine.now_s += seconds

    @rule(by_s=st.sampled_from([-NOON, NOON, -7200.0, 7200.0, -1.0, 1e9]))
    def somebody_sets_the_wall_clock(self, by_s: float) -> None:
        self.machine.wall_s += by_s

    @precondition(is_on)
    @rule()
    def a_probe(self) -> None:
        assert self.file is not None
        unix_s, clock_s = self.now()
        self.file.recorder.add_probe(Probe(began_unix_s=unix_s, clock_s=clock_s, took_s=0.0))

    @precondition(is_on)
    @rule()
    def edge_leaves_or_returns(self) -> None:
        assert self.file is not None
        self.machine.now_s += 1.0  # the begin names the outage, and a connection takes its time
        unix_s, clock_s = self.now()
        ended = self.away
        self.away = None if ended else Outage(began_unix_s=unix_s, began_clock_s=clock_s)
        if ended:
            times = {"ended_unix_s": unix_s, "ended_clock_s": clock_s}
            self.file.recorder.add_outage(Outage(**{**vars(ended), **times}))
        elif self.away:
            self.file.recorder.add_outage(self.away)

    @precondition(is_on)
    @rule()
    def a_sign_of_life(self) -> None:
        assert self.file is not None
        unix_s, clock_s = self.now()
        self.file.recorder.change_facts(alive_unix_s=unix_s, alive_clock_s=clock_s)

    @precondition(is_on)
    @rule()
    def kill(self) -> None:
        assert self.file is not None
        self.file.recorder.close()
        self.file = self.away = None

    @precondition(is_off)
    @rule()
    def reboot(self) -> None:
        self.machine.boots += 1
        self.machine.booted_s = self.machine.now_s

    @precondition(is_off)
    @rule()
    def start(self) -> None:
        before_s, (boot, true_s) = self.newest_s, self.newest_at
        self.file = open_watch(self.settings, self.settings.matrix, self.machine)
        self.now()
        passed_s = self.newest_s - before_s
        assert passed_s == pytest.approx(self.file.off_s, abs=ROUNDING_S)
        if boot == self.machine.boots:
            assert passed_s == pytest.approx(self.machine.now_s - true_s, abs=ROUNDING_S)
        else:
            assert passed_s <= MONTH_S + ROUNDING_S

    @invariant()
    def times_of_the_file_are_in_order(self) -> None:
        with Run.open(self.settings.out) as run:
            starts, outages = run.facts.starts, list(run.outages())
            probes = [probe.clock_s for probe in run.probes()]
        assert probes == sorted(probes)
        assert all(start.off_s >= 0.0 for start in starts)
        assert all(a.clock_s <= b.clock_s - b.off_s + ROUNDING_S for a, b in pairwise(starts))
        spans = [
            (
                each.began_clock_s,
                self.newest_s if each.ended_clock_s is None else each.ended_clock_s,
            )
            for each in outages
        ]
        assert all(begin <= end for begin, end in spans)
        # the times off are in no outage, so spans of both kinds do not overlap
        spans += [(start.clock_s - start.off_s, start.clock_s) for start in starts]
        spans.sort()
        assert all(a[1] <= b[0] + ROUNDING_S for a, b in pairwise(spans))
        still_open = sum(each.ended_clock_s is None for each in outages)
        assert still_open == (self.away is not None) if is_on(self) else still_open <= 1

    def teardown(self) -> None:
        if self.file is not None:
            self.file.recorder.close()
        self.patches.undo()
        shutil.rmtree(self.folder)


KilledWatch.TestCase.settings = examples(400, stateful_step_count=25, derandomize=True)
TestKilledWatch = KilledWatch.TestCase
