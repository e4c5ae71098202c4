"""What else a machine did while a benchmark ran: figures taken beside other work are worth less.

In:  /proc/stat, of the cores that this process may use, and the CPU time of this process and all
     below it, ended ones that were waited for included. Out: the share of these cores that
     was busy with something else, before the run and during it.

Interrupts are left out, for most of a benchmark's are its own; what a hypervisor gave to others
(steal) is counted.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

MUCH = 0.05  # of the cores; less is what a quiet system does
LOOK_S = 0.5  # before the run
_TICK_S = 1.0 / os.sysconf("SC_CLK_TCK")
_PROC = Path("/proc")


class CpuTimes(NamedTuple):
    """Seconds: on the clock, of all cores' work, and of our own."""

    at_s: float
    busy_s: float
    own_s: float


class Company:
    """Looks at the machine when it is made, for half a second, and then whenever it is asked.

    before: the share of the cores that was busy with something else; None where Linux's figures
    cannot be had.
    """

    def __init__(self) -> None:
        self.load_1m = os.getloadavg()[0]
        self._cores = os.sched_getaffinity(0)
        first = self._reading()
        time.sleep(LOOK_S)
        self._began = self._reading()
        self.before = self._share(first, self._began)

    def report(self) -> dict[str, Any]:
        """For the JSON: shares are of the cores."""
        during = self._share(self._began, self._reading())
        return {
            "cores": len(self._cores),
            "load_1m_before": self.load_1m,
            "other_work_before": self.before,
            "other_work_during": during,
            "beside_other_work": max(during or 0.0, self.before or 0.0) >= MUCH,
        }

    def _reading(self) -> CpuTimes | None:
        try:
            return CpuTimes(time.monotonic(), _busy_s(self._cores), own_s(os.getpid()))
        except (OSError, ValueError, IndexError):
            return None

    def _share(self, first: CpuTimes | None, last: CpuTimes | None) -> float | None:
        if first is None or last is None:
            return None
        other_s = (last.busy_s - first.busy_s) - (last.own_s - first.own_s)
        cores_s = len(self._cores) * (last.at_s - first.at_s)
        return round(min(1.0, max(0.0, other_s / cores_s)), 4)


def in_words(report: dict[str, Any]) -> str:
    """A line for below a table; "" for a machine that did nothing else."""
    if not report["beside_other_work"]:
        return ""
    busy = max(report["other_work_during"] or 0.0, report["other_work_before"] or 0.0)
    return f"taken beside other work: {100 * busy:.0f} % of the cores were busy with something else"


def own_s(root: int) -> float:
    """CPU seconds of a process and all below it, and of those ended that were waited for."""
    parents: dict[int, int] = {}
    spent: dict[int, float] = {}
    for pid, parent, seconds in _processes():
        parents[pid], spent[pid] = parent, seconds

    def ours(pid: int) -> bool:
        while pid not in (root, 0, 1):
            pid = parents.get(pid, 0)
        return pid == root

    return sum(seconds for pid, seconds in spent.items() if ours(pid))


def _processes() -> Iterator[tuple[int, int, float]]:
    """Of each process: its id, its parent's, and its CPU seconds with those of ended children."""
    for entry in _PROC.iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            yield int(entry.name), int(fields[1]), _TICK_S * sum(map(int, fields[11:15]))


def _busy_s(cores: set[int]) -> float:
    """Seconds that these cores worked since the start: user, nice, system, steal."""
    wanted = {f"cpu{core}" for core in cores}
    lines = (line.split() for line in (_PROC / "stat").read_text().splitlines())
    result = [fields for fields in lines if fields and fields[0] in wanted]
    if not result:
        raise ValueError("no core is told of")
    ticks = sum(int(fields[at]) for fields in result for at in (1, 2, 3, 8))
    return _TICK_S * ticks
