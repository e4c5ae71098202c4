"""Replace files as a whole or not at all, even if the disk fills or the power fails.

The new content is written to a partial file in the same folder, synced, and renamed. The module
needs the standard library only, since it runs on a board before anything is installed there.

Conversations are private: their files have the mode `PRIVATE`, in folders made by `private_folder`.
Existing files and folders keep their modes.
"""

import os
import stat
from pathlib import Path

PRIVATE = 0o600
_PARTIAL = ".pilotfish-partial"


def write_whole(path: Path, content: bytes, mode: int, *, group: int | None = None) -> None:
    """Replace a file's content; until the file has its ``mode``, only its owner can read it.

    group: the file's group; None: the writer's. Only one process may write a file at a time. Raises
    `OSError`; then the old content is intact, and no partial file is left.
    """
    partial = partial_path(path)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if group is not None:  # not called without a group, since our systemd units forbid it
                os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        move_into_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def write_output(path: Path, content: bytes) -> None:
    """Write a command's results to the path that the caller named.

    A file is replaced as a whole and keeps its mode; a link to a file stays a link. A pipe, or a
    file of /dev or /proc, is written in place. Raises `OSError`, which names the path.
    """
    try:
        try:
            status = path.stat()
        except FileNotFoundError:
            status = None
        is_file = status is None or stat.S_ISREG(status.st_mode)
        if is_file and path.absolute().parts[1] not in ("dev", "proc"):
            mode = 0o666 & ~_umask() if status is None else stat.S_IMODE(status.st_mode)
            write_whole(path.resolve(), content, mode)
        else:
            path.write_bytes(content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def _umask() -> int:
    """Return the process's umask, which can only be read by setting it."""
    mask = os.umask(0o077)  # another thread's file would be more private, never less
    os.umask(mask)
    return mask


def partial_path(path: Path) -> Path:
    """Return the path of the partial file for ``path``; remove a killed writer's partial file."""
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    partial.unlink(missing_ok=True)
    return partial


def private_folder(path: Path) -> None:
    """Make a folder and its missing parents, for their owner only.

    An existing folder stays as it is. Raises `OSError`, also if a file has that name.
    """
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove the partial files that killed writers have left in a folder."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        partial.unlink(missing_ok=True)


def move_into_place(partial: Path, path: Path) -> None:
    """Rename a partial file into its place, durably."""
    os.replace(partial, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make a folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
