"""Run the tests: `make test`, `make test-all` and `.ci/run` come here.

    python -m tests [--all | --changed [BASE]] [options of pytest]

First all that may share the machine, in parallel, file by file; then, one after the other, what is
marked `timing`. What fails is named and run once more, alone: on a busy machine anything may be
late. Left out are `reference` (see `make test-reference`) and, unless asked for, `slow`:
`--all` runs all slow tests, `--changed` those of the rooms in which something changed since BASE,
which `--list` only names.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

from tests.support.reaper import Reaper

ROOT = Path(__file__).parents[1]
NO_TESTS = 5  # pytest's exit status where a selection is empty
# More workers than cores, since most of a test's time is waiting.
WORKERS = min(8, 2 * len(os.sched_getaffinity(0)))
# As they stand, not those with many tests first: what takes long has few.
PARALLEL = ("-n", str(WORKERS), "--no-loadscope-reorder")
# Rooms, and what else can break their slow tests besides `tests/ROOM` and the room itself.
SLOW_ROOMS = {
    "deploy": ("pilotfish/systemd/",),
    "device_runtime": ("pilotfish/wire/",),
    "distill": (),
    "emulation": (),
    "edge_runtime": ("pilotfish/wire/", "pilotfish/engines/"),
    "engines": ("pilotfish/export/",),
    "export": (),
    "field": (),
    "judge": (),
    "reference": (
        "pilotfish/export/",
        "pilotfish/engines/",
        "pilotfish/judge/",
        "pilotfish/distill/",
    ),
    "selftest": ("pilotfish/engines/", "pilotfish/export/"),
    "speculation": (),
    "system": (
        "pilotfish/wire/",
        "pilotfish/device_runtime/",
        "pilotfish/edge_runtime/",
        "pilotfish/speculation/",
    ),
    "wire": (),
}
# With these, every room has changed.
COMMON = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "tests/support/", ".ci/")


def main() -> int:
    """Both parts; the exit status is that of the first that failed."""
    options, rest = arguments()
    if options.list:
        print(*sorted(changed_rooms(options.changed)), sep="\n")
        return 0
    chosen, rooms = "not reference", []
    if options.changed is not None:
        rooms = sorted(changed_rooms(options.changed))
        print(f"slow tests of: {', '.join(rooms) or 'no room'}")
        chosen += f" and ({' or '.join(['not slow', *rooms])})"
    elif not options.all:
        chosen += " and not slow"
    if options.m:
        chosen += f" and ({options.m})"
    rest.append(f"--hypothesis-profile={'thorough' if options.all or rooms else 'pilotfish'}")
    started = time.monotonic()
    parallel = twice(f"{chosen} and not timing", "parallel", *PARALLEL, rest=rest)
    if parallel not in (0, NO_TESTS) and not go_on(parallel, rest):
        return parallel
    print("\nOne after the other, since they measure time:")
    files = [] if any(Path(word.split("::")[0]).exists() for word in rest) else timed_files()
    serial = twice(f"{chosen} and timing", "serial", *files, rest=rest)
    took = time.monotonic() - started
    statuses = {parallel, serial} - {NO_TESTS}
    failed = max(statuses, default=NO_TESTS)
    parts = zip(("in parallel", "serially"), (parallel, serial), strict=True)
    words = ", ".join(f"{part}: {WORDS.get(status, f'status {status}')}" for part, status in parts)
    print(f"\n{took / 60:.1f} min; {words}")
    return failed


WORDS = {0: "passed", 1: "FAILED", NO_TESTS: "no tests"}


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own options; the rest is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False, add_help=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--changed", nargs="?", const="", metavar="BASE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("-m", default="")
    return parser.parse_known_args()


def twice(chosen: str, part: str, *options: object, rest: list[str]) -> int:
    """Run a part of the tests, and what failed once more, alone; the status of the last run."""
    cache = ("-o", f"cache_dir=.pytest_cache/{part}")  # the usual one is the user's
    status = run(chosen, *options, "--cache-clear", *cache, *rest)
    if status != 1 or not go_on(status, rest):
        return status
    print("\nOnce more and alone, what failed: what fails again has failed.")
    return run(chosen, "--last-failed", *cache, *rest)


def run(chosen: str, *options: object) -> int:
    """One run of pytest."""
    words = [sys.executable, "-m", "pytest", "-m", chosen, *map(str, options)]
    return subprocess.run(words, cwd=ROOT, check=False).returncode


def go_on(status: int, rest: list[str]) -> bool:
    """Whether the serial part shall run after this status of the parallel one."""
    return status == 1 and not {"-x", "--exitfirst", "--lf", "--sw"}.intersection(rest)


def timed_files() -> list[Path]:
    """Files with tests marked `timing`: collecting all others again would take a while."""
    files = (path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [path for path in files if "pytest.mark.timing" in (ROOT / path).read_text()]


def changed_rooms(base: str | None) -> set[str]:
    """Rooms with slow tests in which something changed since `base`; all, if git cannot tell."""
    try:
        return rooms_of(changed_files(base or merge_base()))
    except subprocess.CalledProcessError:
        return set(SLOW_ROOMS)


def rooms_of(names: list[str]) -> set[str]:
    """Rooms whose slow tests may fail by a change of these files."""
    if any(name.startswith(COMMON) for name in names):
        return set(SLOW_ROOMS)
    return {
        room
        for room, others in SLOW_ROOMS.items()
        for name in names
        if name.startswith((f"pilotfish/{room}/", f"tests/{room}/", *others))
    }


def merge_base() -> str:
    """Where this branch left `main`; on `main` itself, the commit before."""
    head = git("rev-parse", "HEAD")
    for main_branch in ("origin/main", "main"):
        try:
            base = git("merge-base", main_branch, "HEAD")
        except subprocess.CalledProcessError:
            continue
        if base != head:
            return base
    return git("rev-parse", "HEAD^")


def changed_files(base: str) -> list[str]:
    """Paths that differ from `base`, committed or not."""
    names = git("diff", "--name-only", base).splitlines()
    return names + git("ls-files", "--others", "--exclude-standard").splitlines()


def git(*words: str) -> str:
    """What git says.

    Raises:
        subprocess.CalledProcessError: if it cannot tell, as in a shallow clone.
    """
    asked = subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True)
    return asked.stdout.strip()


if __name__ == "__main__":
    reaper = Reaper()  # of this process's own children, pytest's, too
    status = main()
    reaper.close()
    sys.exit(status)
