"""Run the tests: `make test`, `test-all`, `test-reference`, `test-clients` and `.ci/run` come here.

    python -m tests [--all | --changed [BASE] | --reference | --clients] [-n N] [--record]
        [options of pytest]

First all tests but those marked `timing`, in N processes, file by file (`tests.support.shards`);
then those marked `timing`, one after the other. Tests that fail run once more, alone: on a busy
machine anything may be late. Tests marked `slow` are left out:
`--all` runs all of them, and tries properties on all examples; `--changed` runs those of the rooms
in which something changed since BASE, and `--list` only names these rooms. `--reference` runs what
needs torch, and nothing else; `--clients` runs clients of other projects, and nothing else.
`--record` writes how long each file took, for the next run's shares.
"""

from __future__ import annotations

import argparse
import compileall
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.support import shards
from tests.support.reaper import Reaper
from tests.support.selection import APART, SLOW_ROOMS, changed_rooms, room_of_test
from tests.support.shards import NO_TESTS, ROOT, Results, Shards, known_seconds

CORES = len(os.sched_getaffinity(0))
WORKERS = min(10, 5 * CORES // 2)  # more than cores, since most of a test's time is waiting
# Minimum seconds of tests in a batch, since each batch imports everything anew; torch takes long.
LEAST_S = {"": 20.0, "reference": 60.0, "clients": 20.0}
# What a part is called, and the markers of its tests.
PARTS = {"beside each other": "not timing", "one after the other": "timing"}
WORDS = {0: "passed", 1: "FAILED", NO_TESTS: "no tests"}
# Options of pytest that are followed by a value.
VALUED = ("-k", "-p", "-o", "-c", "-W", "--tb", "--timeout", "--deselect", "--ignore", "--basetemp")
STOP_EARLY = ("-x", "--exitfirst", "--maxfail")
SHOWN = ("-v", "-r", "-s", "--durations", "--setup", "--capture")  # batches that pass, too
RUN_NOTHING = ("--co", "--collect-only", "--fixtures", "--markers", "-h", "--help", "--version")


@dataclass(frozen=True)
class Plan:
    """What all parts share.

    chosen: an expression of markers. words: options of pytest. rooms: those whose slow tests run.
    least_s: of a batch, which is to be longer than what its process imports first.
    """

    chosen: str
    words: list[str]
    rooms: set[str]
    least_s: float

    @property
    def stops_early(self) -> bool:
        """Whether the first failure ends the run."""
        return any(word.startswith(STOP_EARLY) for word in self.words)

    def shards(self, kind: str, tests: Sequence[str], workers: int) -> Shards:
        """Return the run of those tests that bear these markers."""
        return Shards(
            tests,
            ["-m", f"{self.chosen} and {kind}", *self.words],
            workers,
            seconds=known_seconds(lambda file: room_of_test(file) in self.rooms),
            least_s=self.least_s,
            verbose=any(word.startswith(SHOWN) for word in self.words),
            stop_early=self.stops_early,
        )


def main() -> int:
    """All parts; the exit status is the worst one."""
    options, rest = arguments()
    if options.list:
        print(*sorted(changed_rooms(options.changed)), sep="\n")
        return 0
    started = time.monotonic()
    files, words = split_arguments(rest)
    rooms = slow_rooms(options)
    chosen = selection(options, rooms)
    if set(RUN_NOTHING).intersection(words):
        command = [sys.executable, "-m", "pytest", "-m", chosen, *words, *files]
        return subprocess.run(command, cwd=ROOT, check=False).returncode
    for folder in ("pilotfish", "tests/support"):
        compileall.compile_dir(ROOT / folder, quiet=2)
    words.append(f"--hypothesis-profile={'thorough' if options.all else 'pilotfish'}")
    plan = Plan(chosen, words, rooms, LEAST_S[options.apart or ""])
    files = files or files_of(options)
    workers = options.n or (CORES if options.apart else WORKERS)
    parts = dict[str, Results]()
    for part, kind in PARTS.items():
        if tests := timing_files(files) if kind == "timing" else files:
            print(f"\n{part}:", flush=True)
            parts[part] = twice(plan, kind, tests, 1 if kind == "timing" else workers)
            if plan.stops_early and parts[part].status == 1:
                break
    if options.record:
        shards.record(parts.values())
    return conclude(parts, time.monotonic() - started)


def conclude(parts: dict[str, Results], took_s: float) -> int:
    """Print how all went and what it took; return the exit status."""
    texts = [
        f"{name}: {WORDS.get(part.status, f'status {part.status}')} ({part.count()})"
        for name, part in parts.items()
    ]
    used = os.times()
    cpu_s = used.children_user + used.children_system
    print(f"\n{took_s / 60:.1f} min, {cpu_s / 60:.1f} of the processors; {'; '.join(texts)}")
    statuses = [part.status for part in parts.values() if part.status != NO_TESTS]
    return max(statuses, default=NO_TESTS)


def slow_rooms(options: argparse.Namespace) -> set[str]:
    """Return the rooms of which slow tests run."""
    if options.changed is not None:
        return changed_rooms(options.changed)
    return set(SLOW_ROOMS) if options.all or options.apart else set()


def selection(options: argparse.Namespace, rooms: set[str]) -> str:
    """Return the expression of markers that chooses the tests."""
    chosen = options.apart or f"not ({' or '.join(APART)})"
    if options.changed is not None:
        print(f"slow tests of: {', '.join(sorted(rooms)) or 'no room'}")
        chosen += f" and ({' or '.join(['not slow', *sorted(rooms)])})"
    elif not rooms:
        chosen += " and not slow"
    return f"{chosen} and ({options.m})" if options.m else chosen


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own options; the rest is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False, add_help=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--changed", nargs="?", const="", metavar="BASE")
    for room in APART:
        parser.add_argument(f"--{room}", action="store_const", const=room, dest="apart")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("-n", type=int, default=0)
    parser.add_argument("-m", default="")
    return parser.parse_known_args()


def split_arguments(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell files, folders and node ids from options of pytest."""
    files, words = list[str](), list[str]()
    for before, word in zip(("", *rest), rest, strict=False):
        path = Path(word.split("::")[0])
        if word.startswith("-") or before in VALUED or not path.exists():
            words.append(word)
        elif path.is_dir():
            files += [name.as_posix() for name in sorted(path.rglob("test_*.py"))]
        else:
            files.append(word)
    return files, words


def twice(plan: Plan, kind: str, tests: Sequence[str], workers: int) -> Results:
    """Run a part of the tests, and what failed once more, alone: that decides."""
    results = plan.shards(kind, tests, workers).run()
    print_slowest(results)
    if not results.failed or plan.stops_early or results.wrong_use:
        return results
    print("\nOnce more and alone, what failed: what fails again has failed.", flush=True)
    again = plan.shards(kind, results.failed, 1).run()
    # a file that could not be imported has no tests until it can
    results.outcomes |= dict.fromkeys(results.failed, "skipped") | again.outcomes
    results.wrong_use = again.wrong_use
    return results


def print_slowest(results: Results) -> None:
    """Name the tests that took longest."""
    for test in sorted(results.seconds, key=lambda test: -results.seconds[test])[:8]:
        print(f"{results.seconds[test]:7.1f} s  {test}")


def files_of(options: argparse.Namespace) -> list[str]:
    """Return every file of tests but those of rooms apart, or only those of one such room."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    if options.apart:
        return [name for name in names if room_of_test(name) == options.apart]
    return [name for name in names if room_of_test(name) not in APART]


def timing_files(tests: Sequence[str]) -> list[str]:
    """Return those in whose files some tests are marked `timing`."""
    return [
        test for test in tests if "pytest.mark.timing" in (ROOT / test.split("::")[0]).read_text()
    ]


if __name__ == "__main__":
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each child would compile all files anew
    reaper = Reaper()  # of this process's own children, pytest's, too
    try:
        status = main()
    except KeyboardInterrupt:
        status = 128 + signal.SIGINT
    finally:
        reaper.close()
    sys.exit(status)
