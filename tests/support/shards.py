"""Run test files in several pytest processes, which take batches of files as they become free.

Every process collects its batch only; with one collection for all, each of them would import all
files. A file's cost is known from an earlier run (`DURATIONS`), so that long files begin first, and
batches become shorter towards the end, when no process shall wait for another.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
DURATIONS = ROOT / "tests/durations.json"  # seconds by file, of tests that are not slow
# Folders whose files share fixtures that take long to make: they stay together.
TOGETHER = ("tests/deploy/booted",)
_UNKNOWN_S = 2.0  # of a file that is not in DURATIONS
_STARTING_S = 3.0  # that a process spends before its first test: a batch is longer than that
_POLL_S = 0.05
FAILED, NO_TESTS = 1, 5  # exit statuses of pytest


@dataclass
class Results:
    """Outcomes of the tests of all processes. status: pytest's; the worst of them."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by node id
    seconds: dict[str, float] = field(default_factory=dict)
    status: int = NO_TESTS

    def add(self, rows: Iterable[dict[str, Any]], status: int) -> None:
        """Take in what one process wrote, and its exit status."""
        for row in rows:
            self.outcomes[row["test"]] = row["outcome"]
            self.seconds[row["test"]] = row["seconds"]
        if status != NO_TESTS:
            self.status = status if self.status == NO_TESTS else max(self.status, status)

    def add_all(self, other: Results) -> None:
        """Take in what other tests did."""
        self.outcomes |= other.outcomes
        self.seconds |= other.seconds

    @property
    def failed(self) -> list[str]:
        """Return the node ids of the tests that failed."""
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    def count(self) -> str:
        """Say how many tests ended how."""
        numbers = defaultdict(int)
        for outcome in self.outcomes.values():
            numbers[outcome] += 1
        return ", ".join(f"{number} {outcome}" for outcome, number in sorted(numbers.items()))


@dataclass
class _Process:
    files: list[str]
    running: subprocess.Popen[bytes]
    log: Path
    outcomes: Path


def run(files: Sequence[str], words: Sequence[str], workers: int, *, stop_early: bool) -> Results:
    """Run these files with these options of pytest, and print every batch as it ends."""
    results, durations = Results(), known_durations()
    queue = units(files, durations)
    total_s = sum(seconds for _, seconds in queue)
    done_s, running = 0.0, list[_Process]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            while queue or running:
                while queue and len(running) < workers:
                    batch = take_batch(queue, workers)
                    running.append(_start(batch, words, folder))
                ended = _wait_for_any(running)
                running.remove(ended)
                results.add(_rows(ended.outcomes), ended.running.returncode)
                done_s += sum(durations.get(name, _UNKNOWN_S) for name in ended.files)
                _print_batch(ended, done_s / total_s, results)
                if stop_early and results.failed:
                    break
        finally:
            for process in running:
                process.running.terminate()
            for process in running:
                process.running.wait()
    return results


def known_durations() -> dict[str, float]:
    """Read the seconds by file of the run that was recorded last."""
    durations: dict[str, float] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return durations


def record(results: Results) -> None:
    """Write the seconds of each file for later runs."""
    seconds: defaultdict[str, float] = defaultdict(float)
    for test, duration in results.seconds.items():
        seconds[test.partition("::")[0]] += duration
    rounded = {name: round(value, 1) for name, value in sorted(seconds.items())}
    DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n", encoding="utf-8")


def units(files: Sequence[str], durations: dict[str, float]) -> list[tuple[list[str], float]]:
    """Group the files that stay together, and sort the groups: those that take longest first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for name in files:
        folder = next((folder for folder in TOGETHER if name.startswith(f"{folder}/")), name)
        groups[folder].append(name)
    timed = [
        (group, sum(durations.get(name, _UNKNOWN_S) for name in group)) for group in groups.values()
    ]
    return sorted(timed, key=lambda unit: -unit[1])


def take_batch(queue: list[tuple[list[str], float]], workers: int) -> list[str]:
    """Take the longest group, and short ones from the end until the batch has its share."""
    batches = 2 * workers if workers > 1 else 1
    share_s = max(_STARTING_S, sum(seconds for _, seconds in queue) / batches)
    files, seconds = queue.pop(0)
    batch = list(files)
    while queue and seconds + queue[-1][1] <= share_s:
        more, more_s = queue.pop()
        batch += more
        seconds += more_s
    return batch


def _start(files: list[str], words: Sequence[str], folder: Path) -> _Process:
    place = Path(tempfile.mkdtemp(dir=folder))
    log, outcomes = place / "log", place / "outcomes"
    command = [sys.executable, "-m", "pytest", "-p", "tests.support.outcomes"]
    command += [
        "-o",
        "addopts=-q --strict-markers",
        "-p",
        "no:cacheprovider",
        "--outcomes",
        str(outcomes),
        *words,
        *sorted(files),
    ]
    with log.open("wb") as file:
        running = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT)
    return _Process(files, running, log, outcomes)


def _wait_for_any(running: list[_Process]) -> _Process:
    """Wait until one of the processes has ended."""
    while True:
        for process in running:
            if process.running.poll() is not None:
                return process
        time.sleep(_POLL_S)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Read the outcomes of a process, which may have been killed while it wrote a line."""
    if not path.exists():
        return []
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    return [json.loads(line) for line in lines if line.endswith("\n")]


def _print_batch(ended: _Process, part: float, results: Results) -> None:
    """Print how far the run is, and the output of a batch in which something failed."""
    if ended.running.returncode not in (0, NO_TESTS):
        print(ended.log.read_text(encoding="utf-8", errors="replace"))
    else:
        lines = ended.log.read_text(encoding="utf-8", errors="replace").splitlines()
        for line in lines:
            if line.startswith("left by the tests"):
                print(line)
    print(f"[{min(1.0, part):4.0%}] {results.count()}", flush=True)
