"""A day of `field watch` in half an hour: is in the file, and in the report, what was done?

    python benchmarks/watch_day.py [--hours 24] [--traces DIR/NAME] [--json PATH] [--quick]

A watch with `--every 5min` runs by a simulated clock. This clock runs in real time while
something is measured, and jumps while the watch waits (5 min → about 5 s). The link is emulated
by a cellular trace, which runs in real time. In the day the edge is away for an hour, the watch is
killed three times (once it stays dead for 15 minutes), its disk is full for an hour (a tmpfs, which
needs root; without root this part is left out), and its wall clock is set twice, both ways. Then
the run file and `field report --json` are compared with what was done. The model is the tests'
tiny one: what is measured is the link. --hours 2 has the same events in less time.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from _common import Goal, at_most, conclude, free_port, options
from _daemons import CommandProcess
from _told_clock import ToldClock

from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.emulation.traces import Trace, TraceClock
from pilotfish.lab.field.link_rows import Probe
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import on_wall_clock
from tests.support.tiny import tiny_pair

EVERY_S = 300.0
SPEED = 600.0  # speed of the simulated clock while the watch waits
RTT_S = 0.05  # RTT of the emulated link, in addition to its trace
PING_BYTES = 120  # approximate bytes of a ping, and of its reply, on the link
STEPS_S = (7200.0, -10800.0)
DEAD_S = 900.0  # how long the watch stays dead after the second kill
DISK_BYTES = 24_000_000
COLUMNS = ("what", "done", "recorded")


@dataclass
class Day:
    """What is done, and what was done so far; times by the watch's run clock."""

    folder: Path
    clock: ToldClock
    watch: "subprocess.Popen[bytes] | None" = None
    begun_s: float = 0.0
    trace_s: float = 0.0  # when the trace began (monotonic)
    away: list[float] = field(default_factory=list)
    kills: list[dict[str, float]] = field(default_factory=list)
    steps: list[tuple[float, float]] = field(default_factory=list)
    full: list[float] = field(default_factory=list)

    @property
    def now_s(self) -> float:
        return self.clock.boot_s() - self.begun_s

    @property
    def disk(self) -> Path:
        return self.folder / "disk"

    @property
    def out(self) -> Path:
        return self.disk / "day.pilotfish"

    @property
    def measured(self) -> int:
        """Rows that the watch had measured so far."""
        witness = self.folder / "witness"
        return witness.stat().st_size // 16 if witness.exists() else 0

    def monotonic_s(self, clock_s: list[float]) -> np.ndarray[Any, np.dtype[np.float64]]:
        """When it was so late by the run's clock, by the machine's; for times of probes."""
        rows = np.fromfile(self.folder / "witness", np.float64).reshape(-1, 2)
        told_s = np.array(clock_s) + self.begun_s
        after = np.searchsorted(rows[:, 1], told_s)  # the row of the probe, at its end
        difference_s: np.ndarray[Any, np.dtype[np.float64]] = rows[after, 0] - rows[after, 1]
        return told_s + difference_s

    def recorded(self) -> int:
        """Rows of the file, with the ends of outages and the edge's facts."""
        with Run.open(self.out) as run:
            answers = sum(1 for _ in run.answers(warm_up=True, finished=False))
            outages = list(run.outages())
            ended = sum(outage.ended_clock_s is not None for outage in outages)
            facts = run.facts.target is not None
            return answers + sum(1 for _ in run.probes()) + len(outages) + ended + facts


def main() -> int:
    parser = options(__doc__ or "")
    parser.add_argument("--hours", type=float, help="length of the day (24; with --quick 2)")
    parser.add_argument(
        "--traces", metavar="PATH", help="a Mahimahi trace without its .up and .down"
    )
    args = parser.parse_args()
    hours = args.hours or (2.0 if args.quick else 24.0)
    with tempfile.TemporaryDirectory(prefix="pilotfish-day-") as name:
        folder = Path(name)
        with small_disk(folder / "disk") as has_disk:
            day = Day(folder, ToldClock(folder / "clock", SPEED))
            conditions = Conditions(
                rtt_s=RTT_S,
                trace_up=None if args.traces is None else f"{args.traces}.up",
                trace_down=None if args.traces is None else f"{args.traces}.down",
            )
            begun_s = time.monotonic()
            spend(day, hours, conditions, has_disk)
            took_s = time.monotonic() - begun_s
            rows, goals = compare(day, hours, conditions, has_disk)
    rows.append({"what": "real minutes", "done": hours * 60, "recorded": round(took_s / 60, 1)})
    return conclude(args, f"{hours:g} hours of `field watch`", COLUMNS, rows, goals)


@contextmanager
def small_disk(path: Path) -> Iterator[bool]:
    """Mount a small file system there; yield False if that is not allowed."""
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(path)]
    mounted = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    if not mounted:
        print("no tmpfs can be mounted (are you root?): the disk is never full", file=sys.stderr)
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", str(path)], check=True)


# What is done


def spend(day: Day, hours: float, conditions: Conditions, has_disk: bool) -> None:
    """Run the watch, and do to it what the day has."""
    _, target = tiny_pair(day.folder / "pair")
    port = free_port()
    log = day.folder / "edge.log"
    words = ["edge", "serve", "--target", target, "--threads", 1]
    words += ["--listen", f"tcp://127.0.0.1:{port}"]
    edge = CommandProcess(*words, log=log)
    try:
        await_edge(log, 1)
        with Emulator(f"tcp://127.0.0.1:{port}", conditions) as link:
            flags = watch_flags(day, link.endpoint, hours)
            day.trace_s = link.since_s
            start(day, flags)
            day.begun_s = first_start(day)
            for share, act in events(day, edge, flags, has_disk):
                until(day, share * hours * 3600)
                print(f"[{day.now_s / 3600:5.2f} h] {act.__name__}", file=sys.stderr)
                act()
            assert day.watch is not None
            assert day.watch.wait(600) == 0, day.watch.returncode
    finally:
        edge.kill()
        if day.watch is not None and day.watch.poll() is None:
            day.watch.kill()
            day.watch.wait()


def events(
    day: Day, edge: CommandProcess, flags: list[str], has_disk: bool
) -> Iterator[tuple[float, Callable[[], None]]]:
    """Yield what is done, and when (as a share of the day)."""

    def kill() -> None:
        kill_watch(day, flags, dead_s=0.0)

    def kill_and_stay_dead() -> None:
        kill_watch(day, flags, dead_s=DEAD_S)

    def fill_disk() -> None:
        day.full.append(day.now_s)
        with suppress(OSError), (day.disk / "filler").open("wb", buffering=0) as filler:
            while True:
                filler.write(bytes(4096))

    def free_disk() -> None:
        (day.disk / "filler").unlink()
        day.full.append(day.now_s)

    def set_clock_forward() -> None:
        set_clock(day, STEPS_S[0])

    def set_clock_back() -> None:
        set_clock(day, STEPS_S[1])

    def stop_edge() -> None:
        edge.kill()
        day.away.append(day.now_s)

    def start_edge() -> None:
        assert edge.log is not None
        edge.start()
        await_edge(edge.log, 2)
        day.away.append(day.now_s)

    yield 2 / 24, kill
    if has_disk:
        yield 4 / 24, fill_disk
        yield 5 / 24, free_disk
    yield 7 / 24, set_clock_forward
    yield 9.03 / 24, stop_edge
    yield 10.03 / 24, start_edge
    yield 13 / 24, kill_and_stay_dead
    yield 16 / 24, set_clock_back
    yield 19 / 24, kill


def watch_flags(day: Day, endpoint: str, hours: float) -> list[str]:
    prompts = day.folder / "prompts.txt"
    prompts.write_text("abc\nbcd ef\nfed\n")
    flags = ["--edge", endpoint, "--out", str(day.out), "--every", f"{EVERY_S:g}s"]
    return [*flags, "--for", f"{hours:g}h", "--prompts", str(prompts), "--threads", "1"]


def start(day: Day, flags: list[str]) -> None:
    command = [sys.executable, str(Path(__file__).with_name("_told_watch.py"))]
    command += [str(day.folder / "clock"), str(SPEED), str(day.folder / "witness"), *flags]
    with (day.folder / "watch.log").open("ab") as log:
        day.watch = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=log, stdout=log)


def first_start(day: Day) -> float:
    """Wait until the watch has begun; return the told seconds of its clock's zero."""
    while day.measured == 0:
        time.sleep(0.01)
    with Run.open(day.out) as run:
        return run.facts.starts[0].boot_s


def until(day: Day, clock_s: float) -> None:
    """Wait until the told clock has come there."""
    assert day.watch is not None
    while day.now_s < clock_s:
        if day.watch.poll() is not None:
            raise SystemExit(f"the watch has ended:\n{(day.folder / 'watch.log').read_text()}")
        time.sleep(0.02)


def kill_watch(day: Day, flags: list[str], dead_s: float) -> None:
    """Kill the watch at any moment in the next round."""
    assert day.watch is not None
    time.sleep(random.SystemRandom().uniform(0.0, 4.0))
    killed_s = day.now_s
    day.watch.kill()
    day.watch.wait()
    measured, recorded = day.measured, day.recorded()
    before = sum(kill["lost"] for kill in day.kills)
    day.kills.append({"at_s": killed_s, "lost": measured - recorded - before})
    day.clock.skip(dead_s)
    start(day, flags)


def set_clock(day: Day, by_s: float) -> None:
    day.steps.append((day.now_s, by_s))
    day.clock.set_wall(by_s)


def await_edge(log: Path, starts: int) -> None:
    while not log.exists() or log.read_text().count("serves on") < starts:
        time.sleep(0.01)


# What was recorded


def compare(
    day: Day, hours: float, conditions: Conditions, has_disk: bool
) -> tuple[list[dict[str, Any]], list[Goal]]:
    """Compare the file and its report with what was done."""
    with Run.open(day.out) as run:
        probes, answers = list(run.probes()), list(run.answers())
        outages, starts = list(run.outages()), run.facts.starts
    rounds = {int(probe.clock_s // EVERY_S) for probe in probes}
    every_round = range(round(hours * 3600 / EVERY_S))
    by_design = {n for n in every_round if is_impossible(day, n * EVERY_S)}
    missing = sorted(set(every_round) - rounds - by_design)
    whole = {n for n in rounds if sum(each.repeat == n for each in answers) == 3}
    times = on_wall_clock(
        [probe.clock_s for probe in probes], [probe.began_unix_s for probe in probes]
    )
    longest = max(outages, key=lambda each: (each.ended_clock_s or 0) - each.began_clock_s)
    ended_s = longest.ended_clock_s or float("inf")
    begin_error_s, end_error_s = longest.began_clock_s - day.away[0], ended_s - day.away[1]
    lost = sum(kill["lost"] for kill in day.kills)
    lost_at_end = day.measured - day.recorded() - lost
    rtts_s = np.concatenate([probe.rtts_s for probe in probes])
    true_s = true_rtts_s(day, conditions, probes)
    rows: list[dict[str, Any]] = [
        {
            "what": "rounds that were possible",
            "done": len(every_round) - len(by_design),
            "recorded": len(rounds),
        },
        {"what": "rounds with all answers", "done": len(rounds), "recorded": len(whole)},
        {"what": "rounds missing though possible", "done": 0, "recorded": str(missing)},
        {"what": "starts", "done": 1 + len(day.kills), "recorded": len(starts)},
        {"what": "outages (one was made)", "done": 1, "recorded": len(outages)},
        {"what": "outage begins, s", "done": day.away[0], "recorded": longest.began_clock_s},
        {"what": "outage ends, s", "done": day.away[1], "recorded": ended_s},
        *(
            {"what": f"rows lost by kill {n}, s {kill['at_s']:.0f}", "done": 0, "recorded": lost}
            for n, kill in enumerate(day.kills, 1)
            if (lost := kill["lost"]) is not None
        ),
        {"what": "rows lost otherwise", "done": 0, "recorded": lost_at_end},
        {"what": "disk full, s", "done": str(day.full), "recorded": disk_lines(day)},
        {
            "what": "clock steps",
            "done": str([by_s for _, by_s in day.steps]),
            "recorded": str([round(step.by_s) for step in times.steps]),
        },
    ]
    goals = [
        at_most("rounds missing though possible", len(missing), 0),
        at_most("outage begins late or early, told seconds", abs(begin_error_s), 60.0),
        at_most("outage ends late or early, told seconds", abs(end_error_s), 60.0),
        at_most("rows lost by a kill", max(kill["lost"] for kill in day.kills), 1),
        at_most("rows lost otherwise", lost_at_end, 0),
        at_most(
            "clock steps' error, s",
            step_error_s([by_s for _, by_s in day.steps], [step.by_s for step in times.steps]),
            1.0,
        ),
    ]
    for share in (50, 90, 99):
        true, recorded = np.percentile(true_s, share), np.percentile(rtts_s, share)
        rows.append(
            {
                "what": f"RTT p{share}, ms (n = {len(rtts_s)})",
                "done": round(1e3 * float(true), 1),
                "recorded": round(1e3 * float(recorded), 1),
            }
        )
        goals.append(
            at_most(
                f"RTT p{share}: share by which it differs from the trace's",
                abs(float(recorded / true) - 1.0),
                0.1,
            )
        )
    return rows, goals + reported(day, rows)


def is_impossible(day: Day, due_s: float) -> bool:
    """Whether no round could be measured then: the edge was away, or the watch dead."""
    late_s = due_s + EVERY_S / 2
    # a kill in the first seconds of a round loses its probe
    dead = [(kill["at_s"] - 30.0, kill["at_s"] + DEAD_S) for kill in day.kills[1:2]]
    return any(begun <= due_s and late_s <= ended for begun, ended in [tuple(day.away), *dead])


def step_error_s(done: list[float], recorded: list[float]) -> float:
    if len(done) != len(recorded):
        return float("inf")
    return max(abs(a - b) for a, b in zip(done, recorded, strict=True))


def disk_lines(day: Day) -> str:
    lines = (day.folder / "watch.log").read_text().splitlines()
    return f"{sum('stay in memory' in line for line in lines)} line(s) told it"


def true_rtts_s(
    day: Day, conditions: Conditions, probes: list[Probe]
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The RTTs of the probes' pings, one after the other, by the trace alone."""
    if conditions.trace_up is None or conditions.trace_down is None:
        return np.full(sum(len(probe.rtts_s) for probe in probes), conditions.rtt_s)
    up, down = Trace.load(conditions.trace_up), Trace.load(conditions.trace_down)
    rtts_s = []
    for probe, begun_s in zip(
        probes, day.monotonic_s([probe.clock_s for probe in probes]), strict=True
    ):
        at_s = float(begun_s) - day.trace_s
        for _ in probe.rtts_s:
            rtts_s.append(_rtt_s(conditions, up, down, at_s))
            at_s += rtts_s[-1]
    return np.array(rtts_s)


def _rtt_s(conditions: Conditions, up: Trace, down: Trace, at_s: float) -> float:
    half_s = conditions.rtt_s / 2
    there_s = TraceClock(up, 0.0).leave(at_s, PING_BYTES) + half_s
    return TraceClock(down, 0.0).leave(there_s, PING_BYTES) + half_s - at_s


def reported(day: Day, rows: list[dict[str, Any]]) -> list[Goal]:
    """Make the report; compare its values of the link with what was done, and add them as rows."""
    path = day.folder / "report.json"
    command = [sys.executable, "-m", "pilotfish", "field", "report", str(day.out)]
    command += ["--out", str(day.folder / "report"), "--json", str(path)]
    subprocess.run(command, env={**os.environ, "MPLBACKEND": "Agg"}, check=True)
    link = json.loads(path.read_text())["runs"][0]["link"]
    away_s = day.away[1] - day.away[0]
    steps = [step["by_s"] for step in link["clock_steps"]]
    done_steps = [by_s for _, by_s in day.steps]
    rows += [
        {"what": "report: away, s", "done": away_s, "recorded": link["away_s"]},
        {"what": "report: outages", "done": 1, "recorded": len(link["outages"])},
        {"what": "report: clock steps", "done": str(done_steps), "recorded": str(steps)},
        {"what": "report: rounds", "done": "", "recorded": f"{link['rounds']} of {link['slots']}"},
        {"what": "report: RTT", "done": "", "recorded": str(link["rtt_ms"])},
    ]
    return [
        at_most("report: difference of the time away, s", abs(link["away_s"] - away_s), 60.0),
        at_most("report: clock steps' error, s", step_error_s(done_steps, steps), 1.0),
    ]


if __name__ == "__main__":
    sys.exit(main())
