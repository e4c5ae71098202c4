"""A directory that appears whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from engines.artifact import MANIFEST_NAME
from export.errors import ExportError


def is_artifact(folder: Path) -> bool:
    """Whether it looks like one."""
    return (folder / MANIFEST_NAME).is_file()


@contextmanager
def replacing(out: Path, ours: Callable[[Path], bool] = is_artifact) -> Iterator[Path]:
    """Yield an empty hidden directory beside `out`; at the end it takes `out`'s place.

    What was there is replaced, if it is `ours`: what such an export writes. After an exception
    nothing is left; what a kill left is removed by the next export to the same place.

    Raises:
        ExportError: if `out` is a file, or a directory that holds something else.
    """
    if out.exists() and not (out.is_dir() and (_is_empty(out) or ours(out))):
        raise ExportError(f"{out} holds something that no export wrote: choose another --out")
    out.parent.mkdir(parents=True, exist_ok=True)
    _remove_abandoned(out)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        for file in partial.rglob("*"):
            _sync(file)
        _sync(partial)
        _take_place(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _take_place(partial: Path, out: Path) -> None:
    old = partial.with_name(f"{partial.name}-old")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_abandoned(out: Path) -> None:
    """Remove what exports to this place left whose process is gone."""
    for left in out.parent.glob(f".{out.name}.partial-*"):
        pid = left.name.rpartition(".partial-")[2].partition("-")[0]
        if not Path(f"/proc/{pid}").exists():
            shutil.rmtree(left, ignore_errors=True)


def _is_empty(folder: Path) -> bool:
    return not any(folder.iterdir())


def _sync(path: Path) -> None:
    """Make a file's content, or a directory's entries, survive a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
