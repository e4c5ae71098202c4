"""The folder for what can be made or fetched again, and atomic writes to it."""

import os
import threading
from pathlib import Path


def cache_directory() -> Path:
    """Return the folder of this machine's caches: downloaded models, artifacts, engines.

    $PILOTFISH_CACHE, or `pilotfish` in $XDG_CACHE_HOME or ~/.cache.
    """
    if own := os.environ.get("PILOTFISH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotfish"


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
        with os.fdopen(descriptor, "wb") as file:
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
