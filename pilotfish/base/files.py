"""Write files that change as a whole or not at all, even if the disk fills or the power fails.

The new content is written beside the file, made durable, and renamed into its place. Standard
library only: this runs on a board before anything is installed there.

What people said, and what they were answered, is nobody else's: such files are made with the mode
`PRIVATE`, in folders made by `private_folder`. What is there already keeps its mode.
"""

import os
from pathlib import Path

PRIVATE = 0o600
_PARTIAL = ".pilotfish-partial"


def write_whole(path: Path, content: bytes, mode: int, *, group: int | None = None) -> None:
    """Replace a file's content; only its owner can read it before it has its ``mode``.

    group: whose it becomes; None: the writer's. One writer at a time. Raises `OSError`; then the
    old content is intact, and nothing is left beside it.
    """
    partial = partial_path(path)
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            if group is not None:  # our units' services may not even call this
                os.fchown(descriptor, -1, group)
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        move_into_place(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def partial_path(path: Path) -> Path:
    """Return where the next content of ``path`` is written; remove what a kill left there."""
    partial = path.with_name(f".{path.name}{_PARTIAL}")
    partial.unlink(missing_ok=True)
    return partial


def private_folder(path: Path) -> None:
    """Make a folder, and those above it that are missing, for its owner alone.

    One that is there stays as it is. Raises `OSError`, also for a file of that name.
    """
    if not path.is_dir():
        private_folder(path.parent)
        path.mkdir(mode=0o700, exist_ok=True)


def remove_partial_files(folder: Path) -> None:
    """Remove what kills left in a folder of files that were made `beside` others."""
    for partial in folder.glob(f".*{_PARTIAL}"):
        partial.unlink(missing_ok=True)


def move_into_place(partial: Path, path: Path) -> None:
    """Rename the file made `beside` into its place, durably."""
    os.replace(partial, path)
    sync(path.parent)


def sync(folder: Path) -> None:
    """Make a folder's entries survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
