"""Change files so that each change happens completely or not at all, even if the power fails.

Each function does nothing if its result exists already, so that a second run changes nothing.
`base.files` writes single files.

Standard library only: this runs on the board before anything is installed.
"""

import ctypes
import os
import shutil
import stat
from pathlib import Path

from pilotfish.base.files import move_into_place, partial_path, sync, write_whole


def put(path: Path, content: bytes, mode: int = 0o644) -> bool:
    """Make a file hold ``content``; return whether anything changed."""
    if holds(path, content, mode):
        return False
    folder(path.parent)
    write_whole(path, content, mode)
    return True


def link(path: Path, target: str) -> bool:
    """Make a symbolic link point to ``target``; return whether anything changed."""
    if path.is_symlink() and os.readlink(path) == target:
        return False
    folder(path.parent)
    partial = partial_path(path)
    os.symlink(target, partial)
    move_into_place(partial, path)
    return True


def move(source: Path, target: Path) -> None:
    """Rename a file or folder within one file system, durably; replace a file of the new name."""
    os.replace(source, target)
    sync(target.parent)


def remove(path: Path) -> bool:
    """Remove a file or link, durably; return whether there was one."""
    try:
        path.unlink()
    except FileNotFoundError:
        return False
    sync(path.parent)
    return True


def remove_tree(path: Path) -> bool:
    """Remove a folder that nothing uses; return whether there was one."""
    if not path.is_dir() or path.is_symlink():
        return False
    shutil.rmtree(path)
    sync(path.parent)
    return True


def folder(path: Path, mode: int = 0o755) -> None:
    """Make a folder and its parents; existing folders keep their modes."""
    if path.is_dir():
        return
    folder(path.parent)
    path.mkdir()
    path.chmod(mode)
    sync(path.parent)


def holds(path: Path, content: bytes, mode: int | None = None) -> bool:
    """Return whether a path is a regular file with this content, and with this mode if given."""
    try:
        status = path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return (
        stat.S_ISREG(status.st_mode)
        and status.st_size == len(content)
        and mode in (None, stat.S_IMODE(status.st_mode))
        and path.read_bytes() == content
    )


def sync_all(path: Path) -> None:
    """Make all writes so far to the file system of ``path`` durable, in one call."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "the file system cannot be synchronised", str(path))
    finally:
        os.close(descriptor)
