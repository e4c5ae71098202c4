"""What this machine can make or fetch again: where it is kept, and how a file gets there whole."""

import os
import threading
from pathlib import Path


def cache_directory() -> Path:
    """Where this machine keeps what can be made again: models that were fetched, artifacts.

    $PILOTFISH_CACHE, or `pilotfish` in $XDG_CACHE_HOME or ~/.cache.
    """
    if own := os.environ.get("PILOTFISH_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pilotfish"


def replace_file(path: Path, *parts: bytes | memoryview) -> None:
    """Write a file beside `path` and move it there, so that nobody sees it by halves."""
    path.parent.mkdir(parents=True, exist_ok=True)
    for left in path.parent.glob(f".{path.name}.*"):
        if not Path(f"/proc/{left.suffix[1:]}").exists():  # a thread that was killed left it
            left.unlink(missing_ok=True)
    partial = path.with_name(f".{path.name}.{threading.get_native_id()}")
    try:
        with partial.open("wb") as file:
            for part in parts:
                file.write(part)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def keep_newest(folder: Path, pattern: str, most: int) -> None:
    """Of the files in `folder` that match, remove all but the ``most`` that were used last."""
    files = sorted(folder.glob(pattern), key=lambda file: file.stat().st_mtime_ns)
    for file in files[:-most]:
        file.unlink(missing_ok=True)
