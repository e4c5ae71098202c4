"""Run test files in several pytest processes, which take batches of files as they become free.

Every process collects its batch only; with one collection for all, each of them would import all
files. How long a file takes is known from an earlier run (`DURATIONS`): long files begin first, and
batches become shorter towards the end, when no process shall wait for another.

A process that dies takes down one test, which has failed; the rest of its batch runs in another.
A process that hangs is made to die, and shows where its threads are.
"""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Seconds by file and kind of its tests, as `--record` wrote them. A kind is some of the markers
# in KINDS, or "" for tests without.
DURATIONS = ROOT / "tests/durations.json"
KINDS = ("timing", "slow")
# Folders whose files share fixtures that take long to make: they stay together.
TOGETHER = ("tests/deploy/arm64", "tests/deploy/booted")
# Each process's options. The cache is the user's, and `addopts` asks for more than is printed here.
OPTIONS = ("-p", "tests.support.outcomes", "-p", "no:cacheprovider", "-o", "addopts=")
OPTIONS += ("-q", "--strict-markers", "--continue-on-collection-errors")
NO_TESTS = 5  # pytest's exit status where a selection is empty
_FAILED, _WRONG_USE = 1, 4  # likewise
_UNKNOWN_S = 2.0  # of a file that is not in DURATIONS
_POLL_S = 0.1
_PROGRESS_S = 20.0  # between two lines, at most
_END_S = 15.0  # for processes that are interrupted, to close their fixtures
# A process hangs that writes no outcome for so long, or that runs on after its last test for so
# long. The first is longer than any test's own limit, which a test that holds Python's lock passes.
_SILENT_S, _EXIT_S = 1800.0, 60.0
_ABORT_S = 5.0  # for a process that hangs, to write where its threads are


@dataclass
class Results:
    """Outcomes of the tests of all processes."""

    outcomes: dict[str, str] = field(default_factory=dict)  # by node id
    seconds: dict[str, float] = field(default_factory=dict)  # by node id
    kinds: dict[str, str] = field(default_factory=dict)  # by node id
    wrong_use: bool = False  # whether pytest did not understand its arguments

    @property
    def failed(self) -> list[str]:
        """Return the node ids of the tests that failed."""
        return [test for test, outcome in self.outcomes.items() if outcome == "failed"]

    @property
    def status(self) -> int:
        """Return the exit status, as pytest's."""
        if self.wrong_use:
            return _WRONG_USE
        return _FAILED if self.failed else 0 if self.outcomes else NO_TESTS

    def add(self, row: dict[str, Any]) -> None:
        """Take in what `tests.support.outcomes` wrote of a test."""
        self.outcomes[row["test"]] = row["outcome"]
        self.seconds[row["test"]] = row["seconds"]
        self.kinds[row["test"]] = " ".join(kind for kind in KINDS if kind in row["markers"])

    def count(self) -> str:
        """Say how many tests ended how."""
        numbers = sorted(Counter(self.outcomes.values()).items())
        return ", ".join(f"{number} {outcome}" for outcome, number in numbers)


class Batch:
    """One pytest process, and what it has written so far.

    tests: files, or node ids. log: a file for its output; None: its output is ours.
    """

    def __init__(
        self, tests: Sequence[str], options: Sequence[str], root: Path, place: Path, log: bool
    ) -> None:
        self.tests = tests
        self.log = place / "log" if log else None
        arguments, outcomes = place / "arguments", place / "outcomes"
        arguments.write_text("".join(f"{test}\n" for test in tests), encoding="utf-8")
        outcomes.touch()
        self._outcomes = outcomes.open(encoding="utf-8")
        self._line = ""  # its last one, as far as it is written
        self.collected: dict[str, None] | None = None  # tests that have not ended
        self.under_way: str | None = None
        self._last, self._read_at = tests[-1], time.monotonic()
        # when it is made to die, it writes where its threads are
        command = [sys.executable, "-X", "faulthandler", "-m", "pytest"]
        command += [*OPTIONS, "--outcomes", str(outcomes)]
        with open(self.log or "/dev/null", "wb") as file:
            output = None if self.log is None else file
            self.process = subprocess.Popen(
                [*command, *options, f"@{arguments}"], cwd=root, stdout=output, stderr=output
            )

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the tests that have ended since the last call."""
        for line in self._outcomes:
            self._line += line
            if not line.endswith("\n"):
                return
            row, self._line = json.loads(self._line), ""
            self._read_at = time.monotonic()
            if "collected" in row:
                self.collected = dict.fromkeys(row["collected"])
            elif "started" in row:
                self.under_way = row["started"]
            else:
                if row["test"] == self.under_way:
                    self.under_way = None
                self._last = row["test"]
                (self.collected or {}).pop(row["test"], None)
                yield row

    def hangs_in(self) -> str | None:
        """Return the test that hangs, or after which its process does; None: it goes on."""
        limit_s = _EXIT_S if self.collected == {} else _SILENT_S
        if self.process.poll() is not None or time.monotonic() < self._read_at + limit_s:
            return None
        return self.under_way or self._last

    def abort(self) -> None:
        """Make the process die."""
        self.process.send_signal(signal.SIGABRT)
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(_ABORT_S)
        self.process.kill()

    def close(self) -> None:
        """Stop reading."""
        self._outcomes.close()


class Shards:
    """A queue of tests, and the processes that work on it.

    seconds: how long each file takes. verbose: print the output of every batch.
    stop_early: end with the first failure. root: node ids are relative to it.
    """

    def __init__(
        self,
        tests: Sequence[str],
        options: Sequence[str],
        workers: int,
        *,
        seconds: dict[str, float] | None = None,
        least_s: float = 5.0,
        verbose: bool = False,
        stop_early: bool = False,
        root: Path = ROOT,
    ) -> None:
        self.results = Results()
        self._options, self._workers, self._least_s = options, workers, least_s
        self._verbose, self._stop_early, self._root = verbose, stop_early, root
        self._seconds = seconds or {}
        self._queue = units(tests, self._seconds)
        self._again: list[list[str]] = []  # batches that a process has not finished
        self._total_s = sum(seconds for _, seconds in self._queue) or 1.0
        self._ended_s = 0.0
        self._running: list[Batch] = []
        self._printed_at, self._interrupted_at = time.monotonic(), 0.0

    def run(self) -> Results:
        """Run all tests; no process is left."""
        with tempfile.TemporaryDirectory(prefix="pilotfish-tests-") as folder:
            try:
                while self._is_waiting() or self._running:
                    while self._is_waiting() and len(self._running) < self._workers:
                        self._start(Path(folder))
                    time.sleep(_POLL_S)
                    self._look()
                    if self._is_over():
                        break
            except KeyboardInterrupt:
                self._interrupted_at = time.monotonic()
                raise
            finally:
                self._end()
        return self.results

    def _is_waiting(self) -> bool:
        return bool(self._queue or self._again)

    def _is_over(self) -> bool:
        return self.results.wrong_use or (self._stop_early and bool(self.results.failed))

    def _start(self, folder: Path) -> None:
        place = Path(tempfile.mkdtemp(dir=folder))
        if self._again:
            tests = self._again.pop()
        else:
            tests = take_batch(self._queue, self._workers, self._least_s)
        self._running.append(Batch(tests, self._options, self._root, place, self._workers > 1))

    def _look(self) -> None:
        """Take in what has ended, tests and processes, and print how far the run is."""
        for batch in list(self._running):
            has_ended = batch.process.poll() is not None
            for row in batch.read():
                self.results.add(row)
                if row["outcome"] == "failed" and batch.log:
                    print(f"FAILED {row['test']}", flush=True)
            if has_ended:
                self._running.remove(batch)
                self._take_leave(batch)
            elif test := batch.hangs_in():
                print(f"a process hangs, and is ended: in or after {test}", flush=True)
                batch.abort()
                self.results.add({"test": test, "outcome": "failed", "seconds": 0.0, "markers": []})
        if self._workers > 1 and time.monotonic() > self._printed_at + _PROGRESS_S:
            self._print_progress()

    def _take_leave(self, batch: Batch) -> None:
        """Print what a process leaves to be read."""
        batch.close()
        status = batch.process.returncode
        failed = status not in (0, NO_TESTS)
        self.results.wrong_use |= status == _WRONG_USE
        if not self._is_over():
            failed |= self._take_over(batch)
        if batch.log is not None:
            log = batch.log.read_text(encoding="utf-8", errors="replace")
            if text := log if self._verbose else important(log, failed):
                print(text.rstrip("\n"), flush=True)
        self._ended_s += sum(map(self._expected, batch.tests))
        if not (self._is_waiting() or self._running) and self._workers > 1:
            self._print_progress()

    def _take_over(self, batch: Batch) -> bool:
        """Plan what a process that died has not run; say whether there is any."""
        if batch.process.returncode == NO_TESTS or batch.collected == {}:
            return False
        died = batch.under_way
        if batch.collected is not None:
            rest = [test for test in batch.collected if test != died]
            self._again += [rest] if rest else []
        elif len(batch.tests) > 1:  # one of the files is to blame
            self._again += [[test] for test in batch.tests]
        else:
            died = batch.tests[0]
        print(f"a process ended with status {batch.process.returncode}, in {died}", flush=True)
        if died is not None:
            self.results.add({"test": died, "outcome": "failed", "seconds": 0.0, "markers": []})
        return True

    def _print_progress(self) -> None:
        self._printed_at = time.monotonic()
        done_s = self._ended_s
        for batch in self._running:
            if batch.collected is not None:
                files = set(map(_file_of, batch.collected))
                ended = [test for test in batch.tests if test not in files]
                done_s += sum(map(self._expected, ended))
        part = min(1.0, done_s / self._total_s)
        print(f"[{part:4.0%}] {self.results.count()}", flush=True)

    def _expected(self, test: str) -> float:
        return self._seconds.get(test, _UNKNOWN_S)

    def _end(self) -> None:
        """End the processes that still run; with Ctrl-C they have been interrupted themselves."""
        deadline = time.monotonic() + _END_S
        running = [batch.process for batch in self._running]
        if self._interrupted_at:
            while any(map(_runs, running)) and time.monotonic() < self._interrupted_at + 3:
                time.sleep(_POLL_S)
        for process in filter(_runs, running):
            process.send_signal(signal.SIGINT)
        while any(map(_runs, running)) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        for process in running:
            process.kill()
            process.wait()
        for batch in self._running:
            batch.close()


def _runs(process: subprocess.Popen[bytes]) -> bool:
    return process.poll() is None


def important(log: str, failed: bool) -> str:
    """Return the part of pytest's output that is to be read: failures, and processes left over."""
    if failed:
        match = re.search(r"^=+ (ERRORS|FAILURES) =+$", log, re.MULTILINE)
        return log[match.start() :] if match else log
    lines = log.splitlines(keepends=True)
    return "".join(line for line in lines if line.startswith("left by the tests"))


def units(tests: Sequence[str], seconds: dict[str, float]) -> list[tuple[list[str], float]]:
    """Group the tests that stay together, and sort the groups: those that take longest first."""
    groups: defaultdict[str, list[str]] = defaultdict(list)
    for test in tests:
        file = _file_of(test)
        groups[next((f for f in TOGETHER if file.startswith(f"{f}/")), file)].append(test)
    timed = [
        (group, sum(seconds.get(test, _UNKNOWN_S) for test in group)) for group in groups.values()
    ]
    return sorted(timed, key=lambda unit: -unit[1])


def take_batch(queue: list[tuple[list[str], float]], workers: int, least_s: float) -> list[str]:
    """Take the longest group, and short ones from the end until the batch has its share."""
    if workers == 1:
        tests = [test for group, _ in queue for test in group]
        queue.clear()
        return sorted(tests, key=_file_of)
    share_s = max(least_s, sum(seconds for _, seconds in queue) / (1.5 * workers))
    tests, seconds = queue.pop(0)
    batch = list(tests)
    while queue and seconds + queue[-1][1] <= share_s:
        more, more_s = queue.pop()
        batch += more
        seconds += more_s
    return sorted(batch, key=_file_of)


def _file_of(test: str) -> str:
    return test.partition("::")[0]


def known_seconds(with_slow: Callable[[str], bool]) -> dict[str, float]:
    """Return the seconds of each file in the recorded run, without its `timing` tests.

    with_slow: whether the slow tests of a file run, too.
    """
    recorded: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    return {
        file: 0.1 + kinds.get("", 0.0) + (kinds.get("slow", 0.0) if with_slow(file) else 0.0)
        for file, kinds in recorded.items()
    }


def record(parts: Iterable[Results]) -> None:
    """Write the seconds of each file for later runs; those of other files remain as they are."""
    recorded: dict[str, dict[str, float]] = json.loads(DURATIONS.read_text(encoding="utf-8"))
    measured: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for part in parts:
        for test, seconds in part.seconds.items():
            measured[_file_of(test)][part.kinds[test]] += seconds
    for file, kinds in measured.items():
        recorded[file] = recorded.get(file, {}) | kinds
    rows = []
    for file in sorted(file for file in recorded if (ROOT / file).exists()):
        seconds = {kind: round(each, 1) for kind, each in sorted(recorded[file].items())}
        rows.append(f"{json.dumps(file)}: {json.dumps(seconds)}")
    DURATIONS.write_text("{\n" + ",\n".join(rows) + "\n}\n", encoding="utf-8")
