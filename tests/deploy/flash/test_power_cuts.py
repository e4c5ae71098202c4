"""Power cuts during installations: a kill before each change, and what the next run does."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.bundles import (
    HOME,
    can_install,
    current,
    installation,
    put,
    snapshot,
)

pytestmark = can_install
# The power is cut at each n-th of the changes that matter.
each = pytest.mark.parametrize("nth", [3, pytest.param(1, marks=pytest.mark.slow)])


# What Python reports of what it does to a file system, or has others do.
CHANGES = {"os.rename", "os.symlink", "os.mkdir", "os.remove", "os.rmdir", "os.chmod"}
OTHERS = {"subprocess.Popen", "shutil.rmtree"}


def killed_at(step: int, action: Callable[[], object]) -> bool:
    """Do it in a process of its own that is killed before its n-th change; False: it had fewer."""
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, arguments: tuple[object, ...]) -> None:
            nonlocal count
            flags = arguments[2] if event == "open" else 0
            writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
            if event in CHANGES or event in OTHERS or writes:
                count += 1
                if count == step:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(watch)
        try:
            action()
        except BaseException:
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def restored(template: Path, root: Path) -> Path:
    shutil.rmtree(root, ignore_errors=True)
    shutil.copytree(template, root, symlinks=True)
    return root


def settled(root: Path) -> dict[str, object]:
    """What a root holds, without what systemd's tools keep for themselves."""
    return {path: what for path, what in snapshot(root).items() if not path.startswith("etc/.")}


def kills(
    template: Path, root: Path, action: Callable[[], object], stride: int = 1
) -> Iterator[int]:
    """Kill the action at every ``stride``-th change; yields after each kill."""
    step = 1
    while killed_at(step, action):
        yield step
        restored(template, root)
        step += stride
    assert step > 10


@pytest.mark.parametrize("nth", [2, pytest.param(1, marks=pytest.mark.slow)])
def test_power_cuts_in_an_upgrade_leave_a_whole_version(
    nth: int, root: Path, version_1: Path, version_2: Path
) -> None:
    put(root, version_1)
    template = Path(shutil.copytree(root, root.parent / "template", symlinks=True))
    old = {path: what for path, what in settled(root).items() if "versions" not in path}
    put(root, version_2)
    wanted = settled(root)
    restored(template, root)
    seen = set()
    for step in kills(template, root, lambda: put(root, version_2), nth):
        version = current(root)
        seen.add(version)
        here, _ = installation(root)
        name = here.versions.current
        assert name is not None
        assert here.versions.faults(name) == [], step
        now = settled(root)
        if version == "1.0":  # nothing of the old version was touched
            touched = {path for path, what in old.items() if now.get(path) != what}
            assert touched <= {f"{HOME}/previous"}, step
        put(root, version_2)
        assert settled(root) == wanted, step
    assert seen == {"1.0", "2.0"}


@each
def test_power_cuts_in_a_first_installation_are_made_good(
    nth: int, root: Path, version_1: Path
) -> None:
    template = Path(shutil.copytree(root, root.parent / "template", symlinks=True))
    put(root, version_1)
    wanted = settled(root)
    restored(template, root)
    for step in kills(template, root, lambda: put(root, version_1), 3 * nth):
        put(root, version_1)
        assert settled(root) == wanted, step


def test_power_cuts_on_the_way_back_are_made_good(
    root: Path, version_1: Path, version_2: Path
) -> None:
    put(root, version_1)
    put(root, version_2)
    template = Path(shutil.copytree(root, root.parent / "template", symlinks=True))

    def back() -> None:
        installation(root)[0].roll_back()

    back()
    wanted = settled(root)
    restored(template, root)
    for step in kills(template, root, back):
        if current(root) == "2.0" or os.readlink(root / HOME / "previous").startswith(
            os.readlink(root / HOME / "current")
        ):
            back()
        else:  # it was on version 1.0 already: installing that one settles the rest
            put(root, version_1)
        assert settled(root) == wanted, step


@each
def test_power_cuts_in_a_repair_leave_no_moment_without_the_version(
    nth: int, root: Path, version_1: Path
) -> None:
    put(root, version_1)
    wanted = settled(root)
    (root / HOME / "current/site/pilotfish/cli.py").write_text("evil")
    (root / HOME / "current/site/more.py").write_text("evil")
    template = Path(shutil.copytree(root, root.parent / "template", symlinks=True))
    for step in kills(template, root, lambda: put(root, version_1), 3 * nth):
        assert (root / HOME / "current/bin/pilotfish").is_file(), step
        put(root, version_1)
        assert settled(root) == wanted, step


def test_power_cuts_in_an_uninstall_are_made_good(
    root: Path, version_1: Path, version_2: Path
) -> None:
    put(root, version_1)
    put(root, version_2)
    template = Path(shutil.copytree(root, root.parent / "template", symlinks=True))

    def away() -> None:
        installation(root)[0].uninstall(purge=False)

    away()
    wanted = settled(root)
    restored(template, root)
    for step in kills(template, root, away, 2):
        if (root / HOME).exists():
            away()
        assert settled(root) == wanted, step
