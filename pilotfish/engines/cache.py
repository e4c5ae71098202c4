"""The folder for what can be made or fetched again, and atomic writes to it."""

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
    """Return the folder of this machine's caches: downloaded models, artifacts, engines.

    $PILOTFISH_CACHE, or `pilotfish` in $XDG_CACHE_HOME or ~/.cache; for a user without a home a
    folder of its own among the temporary files.
    """
    if own := os.environ.get("PILOTFISH_CACHE"):
        return Path(own)
    folder = user_folder("XDG_CACHE_HOME", ".cache")
    return _temporary() if folder is None else folder / "pilotfish"


@cache
def _temporary() -> Path:
    """Return the folder for a user without a home.

    Engines are code, so one that another user may have filled is not taken.
    """
    folder = Path(tempfile.gettempdir()) / f"pilotfish-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="pilotfish-"))
    _log.warning(
        "this user has no home folder: models and engines are cached in %s; set HOME, or "
        "PILOTFISH_CACHE to a folder that lasts",
        folder,
    )
    return folder


def replace_file(path: Path, *parts: bytes | memoryview, mode: int = 0o666) -> None:
    """Write a file beside `path` and rename it, so that it is never seen half written.

    mode: of the file, less the umask.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*"):
        if not Path(f"/proc/{left.suffix[1:]}").exists():  # left by a thread that was killed
            left.unlink(missing_ok=True)
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
    """Delete all but the ``most`` recently used of the matching files in `folder`."""
    files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-most]:
        file.unlink(missing_ok=True)
