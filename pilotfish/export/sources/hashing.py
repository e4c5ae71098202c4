"""Hash the source files of a model, with progress."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pilotfish.engines.artifact import file_sha256
from pilotfish.export.sources.source import Progress


def hash_files(paths: Sequence[Path], progress: Progress) -> dict[str, str]:
    """Return file name → SHA-256 in lower-case hex."""
    total = sum(path.stat().st_size for path in paths)
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        done += count
        progress("hash", done, total)

    return {path.name: file_sha256(path, advance) for path in paths}
