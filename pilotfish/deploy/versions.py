"""Manage the versions installed below ``/opt/pilotfish``, of which one is current.

    versions/<version>-<digest8>/{bin,site,artifacts,systemd,config,manifest.json,installed.json}
    current -> versions/…       the version that the units run
    previous -> versions/…      the version that `--rollback` restores

A version is made in a hidden folder (its name begins with a dot), which one rename makes visible;
another rename makes the version current. So ``current`` always names a complete version. After a
kill or a power cut, the next run removes the hidden folders.

Standard library only: this runs on the board before anything is installed.
"""

import fcntl
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotfish.base.files import sync
from pilotfish.deploy import files, manifest
from pilotfish.deploy.errors import InstallError

HOME = "opt/pilotfish"
LISTING = "installed.json"
_INCOMING = ".incoming-"


class Versions:
    """The versions installed in one root file system."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.all = home / "versions"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock out other installations, and remove the remains of an interrupted run."""
        files.folder(self.all)
        descriptor = os.open(self.home, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise InstallError(
                    f"Another installation is running in {self.home}: wait until it ends."
                ) from None
            for left in self.all.glob(".*"):
                files.remove_tree(left)
            yield
        finally:
            os.close(descriptor)

    @property
    def current(self) -> str | None:
        """The name of the version that the units run; None if no version is installed."""
        return self._link_target("current")

    @property
    def previous(self) -> str | None:
        """The name of the previous version; None if there is none."""
        return self._link_target("previous")

    def folder(self, name: str) -> Path:
        """Return the path of a version's folder; the folder need not exist."""
        return self.all / name

    def names(self) -> list[str]:
        """List all installed versions."""
        if not self.all.is_dir():
            return []
        return sorted(path.name for path in self.all.iterdir() if not path.name.startswith("."))

    def incoming(self, name: str) -> Path:
        """Make an empty hidden folder for a new version."""
        path = self.all / f"{_INCOMING}{name}"
        files.remove_tree(path)
        path.mkdir()
        path.chmod(0o755)
        return path

    def adopt(self, fresh: Path, name: str) -> None:
        """Rename a finished hidden folder to its version's name.

        If the version exists already, its damaged files are replaced one by one: the version may be
        current, so its folder must not be missing for a moment.
        """
        (fresh / LISTING).write_bytes(_encode(listing(fresh)))
        (fresh / LISTING).chmod(0o644)
        files.sync_all(fresh)
        target = self.folder(name)
        if not target.exists():
            os.rename(fresh, target)
            sync(self.all)
            return
        _mend(fresh, target)
        files.remove_tree(fresh)

    def switch(self, name: str) -> bool:
        """Make a version current, and the current one previous; return whether it changed."""
        before = self.current
        if before == name:
            return False
        if before is not None:
            files.link(self.home / "previous", f"versions/{before}")
        return files.link(self.home / "current", f"versions/{name}")

    def undo(self, before: str, earlier: str | None) -> None:
        """Undo a `switch`. before, earlier: the versions that were current and previous then."""
        files.link(self.home / "current", f"versions/{before}")
        if earlier is None:
            files.remove(self.home / "previous")
        else:
            files.link(self.home / "previous", f"versions/{earlier}")

    def roll_back(self) -> str:
        """Make the previous version current; return its name.

        The current version becomes the previous one. If an earlier run was interrupted between the
        two links, both name the same version: then only the link ``previous`` is set.
        """
        current, previous = self.current, self.previous
        others = [name for name in self.names() if name != current]
        if current is not None and previous == current and others:
            files.link(self.home / "previous", f"versions/{others[-1]}")
            return current
        if current is None or previous is None or previous == current:
            raise InstallError("There is no previous version to restore.")
        files.link(self.home / "current", f"versions/{previous}")
        files.link(self.home / "previous", f"versions/{current}")
        return previous

    def prune(self) -> None:
        """Remove every version but the current and the previous one."""
        for name in self.names():
            if name not in (self.current, self.previous):
                hidden = self.all / f".{name}"
                os.rename(self.folder(name), hidden)
                files.remove_tree(hidden)

    def faults(self, name: str) -> list[str]:
        """Compare a version's files with `LISTING`; return a sentence for each difference."""
        folder = self.folder(name)
        try:
            expected = json.loads((folder / LISTING).read_bytes())
        except (OSError, ValueError, RecursionError):
            expected = None
        if not isinstance(expected, dict):
            return [f"{folder / LISTING} is missing or damaged."]
        files_now = listing(folder)
        return [
            *(f"{folder / path} is missing." for path in expected if path not in files_now),
            *(
                f"{folder / path} was changed."
                for path, entry in files_now.items()
                if path in expected and expected[path] != entry
            ),
            *(
                f"{folder / path} is not a file of this version."
                for path in files_now
                if path not in expected
            ),
        ]

    def _link_target(self, link: str) -> str | None:
        try:
            name = os.readlink(self.home / link).rpartition("/")[2]
        except OSError:
            return None
        return name if self.folder(name).is_dir() else None


def listing(folder: Path) -> dict[str, list[str | int]]:
    """Return path → [SHA-256, mode] of each file of a version, path → [target] of each link."""
    entries: dict[str, list[str | int]] = {}
    for parent, folders, names in os.walk(folder):
        for name in sorted([*names, *folders]):
            path = Path(parent) / name
            relative = str(path.relative_to(folder))
            if path.is_symlink():
                entries[relative] = [os.readlink(path)]
            elif name in names and relative != LISTING:
                entries[relative] = [manifest.hash_file(path), stat.S_IMODE(path.stat().st_mode)]
    return entries


def _encode(entries: dict[str, list[str | int]]) -> bytes:
    return json.dumps(entries, indent=0, sort_keys=True).encode() + b"\n"


def _mend(fresh: Path, target: Path) -> None:
    """Make a version's folder equal to a fresh one, file by file."""
    expected, present = listing(fresh), listing(target)
    for path, entry in expected.items():
        if present.get(path) != entry:
            files.folder((target / path).parent)
            files.move(fresh / path, target / path)
    for path in present.keys() - expected.keys():
        files.remove(target / path)
    files.move(fresh / LISTING, target / LISTING)
