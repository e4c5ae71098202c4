"""Write a directory atomically: if writing is interrupted, the old content stays."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from pilotfish.base.reading import naming_file
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import EngineError
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.export.export_errors import ExportError

OLD = "-old"  # suffix of the name that the old directory has while it is replaced


def is_artifact(folder: Path) -> bool:
    """Whether a folder has a manifest, as artifacts do."""
    return (folder / MANIFEST_NAME).is_file()


@contextmanager
def replacing(
    out: Path,
    is_ours: Callable[[Path], bool] = is_artifact,
    validate: Callable[[Path], object] = Artifact.open,
) -> Iterator[Path]:
    """Yield an empty hidden directory next to `out`; when the block ends, it replaces `out`.

    `is_ours` returns whether the existing content of `out` may be replaced. The existing content
    stays until `validate` has accepted the new content; `validate` raises an EngineError for
    invalid content. If the block raises, the new directory is removed. If an export is killed, the
    next export to the same place removes the killed export's files, and restores the old content if
    that was moved away.

    Raises:
        ExportError: if `out` is a file or a directory that `is_ours` rejects, or the new content is
            invalid.
    """
    _remove_leftovers(out)
    expect_replaceable(out, is_ours)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.parent / f".{out.name}.partial-{os.getpid()}"
    try:
        with naming_file(out):
            partial.mkdir()
            yield partial
            _validate(partial, out, validate)
            for file in partial.rglob("*"):
                _sync(file)
            _sync(partial)
            _swap_in(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def expect_replaceable(out: Path, is_ours: Callable[[Path], bool] = is_artifact) -> None:
    """Raise `ExportError` if `out` exists and is neither empty nor accepted by `is_ours`."""
    if out.exists() and not (out.is_dir() and (not any(out.iterdir()) or is_ours(out))):
        raise ExportError(f"{out} contains something other than an export: choose another --out")


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link; copy the file if the file system or the file's owner forbids links."""
    try:
        os.link(source.resolve(), target)
    except OSError:
        shutil.copyfile(source, target)


def _validate(partial: Path, out: Path, opened: Callable[[Path], object]) -> None:
    try:
        opened(partial)
    except EngineError as error:
        problem = str(error).replace(str(partial), str(out))
        raise ExportError(
            f"the new content of {out} is invalid and was discarded: {problem}"
        ) from None


def _swap_in(partial: Path, out: Path) -> None:
    old = partial.with_name(f"{partial.name}{OLD}")
    if out.exists():
        out.rename(old)
    partial.rename(out)
    _sync(out.parent)
    shutil.rmtree(old, ignore_errors=True)


def _remove_leftovers(out: Path) -> None:
    """Remove the directories that killed exports to `out` left.

    If an export was killed after it had moved `out` away, restore the old content.
    """
    for left in out.parent.glob(f".{out.name}.partial-*"):
        pid = left.name.rpartition(".partial-")[2].partition("-")[0]
        if Path(f"/proc/{pid}").exists():
            continue
        if left.name.endswith(OLD) and not out.exists():
            left.rename(out)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _sync(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
