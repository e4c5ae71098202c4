"""The cache folder, for files that can be built or downloaded again: writes, locks, use."""

import fcntl
import logging
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
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


def artifacts_directory() -> Path:
    """Return the cache's folder of artifacts."""
    return cache_directory() / "artifacts"


@contextmanager
def locked(path: Path, on_wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Hold the lock file at `path` against other processes; a process's end frees it, too.

    on_wait: called once if another process holds the lock, before waiting for it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


_used: dict[Path, int] = {}  # artifact's manifest → the descriptor that marks it as in use


def use_until_exit(manifest: Path) -> bool:
    """Mark a cached artifact as in use until this process ends; return whether it still exists.

    manifest: the artifact's manifest. The folder's time of change becomes the time of this use.
    """
    path = manifest.resolve()
    if path in _used and path.exists():
        return True
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    except OSError:
        return False
    if not path.exists():  # removed between the two calls
        os.close(descriptor)
        return False
    _used[path] = descriptor
    with suppress(OSError):  # another user's cache
        os.utime(path.parent)
    return True


@contextmanager
def unused(manifest: Path) -> Iterator[bool]:
    """Yield whether no process uses a cached artifact; while it yields True, none begins to."""
    try:
        descriptor = os.open(manifest, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        yield True
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            free = True
        except BlockingIOError:
            free = False
        yield free
    finally:
        os.close(descriptor)


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
