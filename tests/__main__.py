"""Run the tests: `make test`, `make test-all` and `.ci/run` come here.

    python -m tests [--all | --changed [BASE]] [--record] [options of pytest]

First the tests that compute, in several processes, file by file (`tests.support.shards`); then
those marked `waits`, beside each other; then, one after the other, those marked `timing`. Tests
that fail run once more, alone: on a busy machine anything may be late. Left out are `reference`
(see `make test-reference`) and, unless asked for, `slow`: `--all` runs all slow tests, with as many
examples as hypothesis likes; `--changed` those of the rooms in which something changed since BASE,
which `--list` only names.
`--record` writes how long each file took, for the next run's order.
"""

from __future__ import annotations

import argparse
import ast
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support import shards
from tests.support.reaper import Reaper
from tests.support.shards import NO_TESTS, ROOT

# More processes than cores, since most of a test's time is waiting.
WORKERS = min(8, 2 * len(os.sched_getaffinity(0)))
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
    "speculation": (),
    "system": (
        "pilotfish/wire/",
        "pilotfish/device_runtime/",
        "pilotfish/edge_runtime/",
        "pilotfish/emulation/",
        "pilotfish/speculation/",
    ),
    "wire": (),
}
# With these, every room has changed.
COMMON = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "pilotfish/base/", ".ci/")
# What a part is called, the marker of its tests, and how many processes share the machine.
KINDS = ("waits", "timing")
PARTS = (
    ("in parallel", "not waits and not timing", WORKERS),
    ("waiting", "waits", WORKERS),
    ("one after the other", "timing", 1),
)
WORDS = {0: "passed", 1: "FAILED", NO_TESTS: "no tests"}


def main() -> int:
    """All parts; the exit status is the worst one."""
    options, rest = arguments()
    if options.list:
        print(*sorted(changed_rooms(options.changed)), sep="\n")
        return 0
    started = time.monotonic()
    chosen = selection(options)
    named, words = split_arguments(rest)
    words += [f"--hypothesis-profile={'thorough' if options.all else 'pilotfish'}"]
    results, statuses = shards.Results(), list[int]()
    for part, kind, workers in PARTS:
        if not all(status in (0, NO_TESTS) or goes_on(status, words) for status in statuses):
            break
        print(f"\n{part}:", flush=True)
        files = named or (marked_files(kind) if kind in KINDS else all_files())
        done = twice(f"{chosen} and ({kind})", files, words, workers)
        results.add_all(done)
        statuses.append(done.status)
    if options.record:
        shards.record(results)
    text = ", ".join(
        f"{part}: {WORDS.get(status, f'status {status}')}"
        for (part, _, _), status in zip(PARTS, statuses, strict=False)
    )
    print(f"\n{(time.monotonic() - started) / 60:.1f} min; {text}")
    return max((status for status in statuses if status != NO_TESTS), default=NO_TESTS)


def selection(options: argparse.Namespace) -> str:
    """Return the expression of markers that chooses the tests."""
    chosen = "not reference"
    if options.changed is not None:
        rooms = sorted(changed_rooms(options.changed))
        print(f"slow tests of: {', '.join(rooms) or 'no room'}")
        chosen += f" and ({' or '.join(['not slow', *rooms])})"
    elif not options.all:
        chosen += " and not slow"
    return f"{chosen} and ({options.m})" if options.m else chosen


def arguments() -> tuple[argparse.Namespace, list[str]]:
    """Our own options; the rest is pytest's."""
    parser = argparse.ArgumentParser(prog="python -m tests", allow_abbrev=False, add_help=False)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--changed", nargs="?", const="", metavar="BASE")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("-m", default="")
    return parser.parse_known_args()


def split_arguments(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """Tell files, folders and node ids from options of pytest."""
    files, words = list[str](), list[str]()
    for word in rest:
        path = Path(word.split("::")[0])
        if word.startswith("-") or not path.exists():
            words.append(word)
        elif path.is_dir():
            files += [name.as_posix() for name in sorted(path.rglob("test_*.py"))]
        else:
            files.append(word)
    return files, words


def twice(chosen: str, files: Sequence[str], words: list[str], workers: int) -> shards.Results:
    """Run a part of the tests, and what failed once more, alone; the status is the last run's."""
    early = not goes_on(shards.FAILED, words)
    results = shards.run(files, ["-m", chosen, *words], workers, stop_early=early)
    print_slowest(results)
    if results.status != shards.FAILED or early:
        return results
    print("\nOnce more and alone, what failed: what fails again has failed.", flush=True)
    again = shards.run(results.failed, words, 1, stop_early=False)
    results.status = again.status
    return results


def print_slowest(results: shards.Results) -> None:
    """Name the tests that took longest."""
    for test in sorted(results.seconds, key=lambda test: -results.seconds[test])[:8]:
        print(f"{results.seconds[test]:7.1f} s  {test}")


def goes_on(status: int, words: Sequence[str]) -> bool:
    """Whether the tests go on after this status of a part of them."""
    return status == shards.FAILED and not {"-x", "--exitfirst"}.intersection(words)


def all_files() -> list[str]:
    """Every file of tests but those that need torch."""
    paths = sorted((ROOT / "tests").rglob("test_*.py"))
    names = [path.relative_to(ROOT).as_posix() for path in paths]
    return [name for name in names if not name.startswith("tests/reference/")]


def marked_files(kind: str) -> list[str]:
    """Files with tests that bear a marker."""
    return [name for name in all_files() if f"pytest.mark.{kind}" in (ROOT / name).read_text()]


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
    rooms = {
        room
        for room, others in SLOW_ROOMS.items()
        for name in names
        if name.startswith((f"pilotfish/{room}/", f"tests/{room}/", *others))
    }
    for name in names:
        if name.startswith("tests/") and name.endswith(".py"):
            rooms |= importing_rooms().get(name, set())
        elif name.startswith("tests/data/"):
            rooms |= {room for room in SLOW_ROOMS if mentions(room, Path(name).stem)}
    return rooms & set(SLOW_ROOMS)


@cache
def importing_rooms() -> dict[str, set[str]]:
    """For each file below `tests`: the rooms whose tests import it, directly or through others."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
    imports = {path.as_posix(): imported_files(path) for path in paths}
    users = {name: {Path(name).parts[1]} for name in imports if not is_shared(name)}
    users["tests/conftest.py"] = set(SLOW_ROOMS)
    changed = True
    while changed:
        changed = False
        for name, files in imports.items():
            for file in files:
                rooms = users.setdefault(file, set())
                more = users.get(name, set()) - rooms
                rooms |= more
                changed |= bool(more)
    return users


def is_shared(name: str) -> bool:
    """Whether a file below `tests` belongs to no room."""
    return Path(name).parts[1] == "support" or len(Path(name).parts) == 2


def imported_files(path: Path) -> set[str]:
    """Return the files below `tests` that one imports, or starts by its name."""
    text = (ROOT / path).read_text(encoding="utf-8")
    names = set[str]()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names |= {word for word in node.value.split() if word.startswith("tests.")}
    files = {name.replace(".", "/") + ".py" for name in names if name.startswith("tests.")}
    return {name for name in files if (ROOT / name).is_file()} - {path.as_posix()}


def mentions(room: str, word: str) -> bool:
    """Whether a test of a room names a file of data."""
    return any(word in path.read_text() for path in (ROOT / "tests" / room).rglob("*.py"))


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
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # each child would compile all files anew
    reaper = Reaper()  # of this process's own children, pytest's, too
    status = main()
    reaper.close()
    sys.exit(status)
