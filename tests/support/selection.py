"""Which rooms' slow tests a change calls for: `python -m tests --changed`."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from tests.support.rooms import room_of
from tests.support.shards import ROOT

# Rooms, and what else can break their slow tests besides the room itself and its tests.
SLOW_ROOMS = {
    "bridge": ("pilotfish/drafting/", "pilotfish/device_runtime/", "pilotfish/engines/"),
    "clients": (
        "pilotfish/device_runtime/service/",
        "pilotfish/wire/request.py",
        "docs/clients.md",
    ),
    "deploy": ("pilotfish/systemd/",),
    "device_runtime": ("pilotfish/bridge/", "pilotfish/drafting/", "pilotfish/wire/"),
    "distill": (),
    "emulation": (),
    "edge_runtime": ("pilotfish/drafting/", "pilotfish/wire/", "pilotfish/engines/"),
    "engines": ("pilotfish/export/",),
    "export": (),
    "field": (),
    "judge": (),
    "reference": (
        "pilotfish/export/",
        "pilotfish/engines/",
        "pilotfish/lab/judge/",
        "pilotfish/lab/distill/",
    ),
    "selftest": ("pilotfish/engines/", "pilotfish/export/"),
    "speculation": (),
    "system": (
        "pilotfish/wire/",
        "pilotfish/device_runtime/",
        "pilotfish/edge_runtime/",
        "pilotfish/emulation/",
        "pilotfish/bridge/",
        "pilotfish/drafting/",
        "pilotfish/speculation/",
    ),
    "wire": (),
}
# Rooms whose tests only run if asked for by name (`--reference`), since they need much else.
APART = ("clients", "reference")
# Rooms in `pilotfish/lab`.
LAB = ("distill", "field", "judge", "selftest")
# With these, every room has changed.
COMMON = ("constraints.txt", "pyproject.toml", "tests/conftest.py", "pilotfish/base/", ".ci/")


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
        if room in rooms_of_file(name) or name.startswith(others)
    }
    for name in names:
        if name.startswith("tests/") and name.endswith(".py"):
            rooms |= importing_rooms().get(name, set())
        elif name.startswith("tests/data/"):
            rooms |= naming_rooms(Path(name).parts[2])
    return rooms & set(SLOW_ROOMS)


def rooms_of_file(name: str) -> Sequence[str]:
    """Return the room of a file; for a file that the rooms of the lab share, all of them."""
    folder, _, path = name.partition("/")
    if folder == "tests":
        return (room_of_test(name),)
    if folder != "pilotfish":
        return ()
    room = room_of(path)
    return LAB if room == "lab" else (room,)


@cache
def importing_rooms() -> dict[str, set[str]]:
    """For each file below `tests`: the rooms whose tests import it, directly or through others."""
    paths = [path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("*.py"))]
    imports = {path.as_posix(): imported_files(path) for path in paths}
    users = {name: {room_of_test(name)} for name in imports if not is_shared(name)}
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


def room_of_test(name: str) -> str:
    """Return the room of a file below `tests`."""
    return room_of(name.removeprefix("tests/"))


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


def naming_rooms(data: str) -> set[str]:
    """Return the rooms whose tests name a file or folder of `tests/data`, or import what does."""
    word = re.compile(rf"\b{re.escape(data)}\b")
    users = [
        rooms
        for name, rooms in importing_rooms().items()
        if word.search((ROOT / name).read_text(encoding="utf-8"))
    ]
    return set().union(*users)


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
    completed = subprocess.run(
        ["git", *words], cwd=ROOT, check=True, capture_output=True, text=True
    )
    return completed.stdout.strip()
