"""Configuration and keys below ``/etc/pilotfish``: what is a person's stays a person's.

Law: a configuration file that someone edited is never overwritten: the new one is laid beside it as
``NAME.new``. One that is still as some installed version brought it follows the current version.
Keys that are there are never replaced.

Standard library only: this runs on the board before anything is installed.
"""

import hashlib
from collections.abc import Iterator
from pathlib import Path

from deploy import files, manifest
from deploy.errors import BundleError
from deploy.manifest import Manifest
from deploy.rootfs import Rootfs
from deploy.versions import Versions

FOLDER = "etc/pilotfish"


def bring_configuration(root: Rootfs, versions: Versions, name: str) -> Iterator[str]:
    """Lay down the configuration of a version; yields a sentence for each thing that was done."""
    ours = _shipped(versions)
    for source in sorted((versions.folder(name) / "config").glob("*")):
        content = source.read_bytes()
        target = root.path(f"{FOLDER}/{source.name}")
        aside = target.with_name(f"{source.name}.new")
        there = target.read_bytes() if target.is_file() and not target.is_symlink() else None
        if target.is_symlink():
            yield f"{target} is a link and stays"
        elif there is None or _sha(there) in ours.get(source.name, set()):
            files.remove(aside)
            if files.put(target, content, 0o644 if there is None else _mode(target)):
                yield f"{target} written"
        elif there != content and files.put(aside, content):
            yield f"{target} was edited and stays; the new one is {aside.name} beside it"


def bring_keys(root: Rootfs, bundle: Path, held: Manifest) -> Iterator[str]:
    """Copy the bundle's keys where none are; yields a sentence for each thing that was done."""
    for path, entry in held.files.items():
        if not path.startswith("keys/"):
            continue
        target = root.path(f"{FOLDER}/{path}")
        content = (bundle / path).read_bytes()
        if _sha(content) != entry.sha256:
            raise BundleError(f"{path} of the bundle changed while it was copied.")
        if target.is_symlink():
            yield f"{target} is a link and stays"
        elif not target.exists():
            files.put(target, content, entry.mode)
            yield f"{target} written"
        elif target.read_bytes().strip() != content.strip():
            yield f"{target} is another key than the bundle's, and stays"


def edited(root: Rootfs, versions: Versions, name: str) -> list[str]:
    """The configuration files of a version that were edited since."""
    ours = _shipped(versions)
    found = []
    for source in sorted((versions.folder(name) / "config").glob("*")):
        target = root.path(f"{FOLDER}/{source.name}")
        known = ours.get(source.name, set())
        if target.is_symlink() or (target.is_file() and _sha(target.read_bytes()) not in known):
            found.append(source.name)
    return found


def _shipped(versions: Versions) -> dict[str, set[str]]:
    """SHA-256 of each configuration file as any installed version brought it."""
    found: dict[str, set[str]] = {}
    for name in versions.names():
        for path in (versions.folder(name) / "config").glob("*"):
            found.setdefault(path.name, set()).add(manifest.hash_file(path))
    return found


def _sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def _mode(path: Path) -> int:
    return path.stat().st_mode & 0o777
