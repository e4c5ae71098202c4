"""The cache folder, for files that can be built or downloaded again, and atomic writes to it."""

import logging
import os
import stat
import tempfile
import threading
from functools import cache
from pathlib import Path

from pilotfish.base.home import user_folder
from pilotfish.base.reading import naming_file

_log = logging.getLogger("pilotfish")


def cache_directory() -> Path:
    """Return this machine's cache folder for downloaded models, artifacts and engines.

    It is $PILOTFISH_CACHE if set, else `pilotfish` in $XDG_CACHE_HOME or ~/.cache. A user without a
    home folder gets a private temporary folder.
    """
    if configured := os.environ.get("PILOTFISH_CACHE"):
        return Path(configured)
    folder = user_folder("XDG_CACHE_HOME", ".cache")
    return _temporary_folder() if folder is None else folder / "pilotfish"


@cache
def _temporary_folder() -> Path:
    """Return the cache folder of a user without a home folder.

    Cached engines are executable code, so a folder that another user could write to is not used.
    """
    folder = Path(tempfile.gettempdir()) / f"pilotfish-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if (
            not stat.S_ISDIR(status.st_mode)
            or status.st_uid != os.getuid()
            or status.st_mode & 0o022
        ):
            raise PermissionError
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="pilotfish-"))
    _log.warning(
        "this user has no home folder, so models and engines are cached in the temporary "
        "folder %s; set HOME, or set PILOTFISH_CACHE to a permanent folder",
        folder,
    )
    return folder


def replace_file(path: Path, *parts: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file atomically: write a temporary file next to `path`, then rename it to `path`.

    parts: content, in order. mode: permissions of the file, before the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*"):
        # the process that wrote this file was killed
        if not Path(f"/proc/{leftover.suffix[1:]}").exists():
            leftover.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        with naming_file(path), os.fdopen(descriptor, "wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def keep_newest(folder: Path, pattern: str, most: int) -> None:
    """Delete the files in `folder` that match `pattern`, except the `most` last modified ones."""
    files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-most]:
        file.unlink(missing_ok=True)
