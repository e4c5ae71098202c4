"""A model on the Hugging Face hub as a source: fetch it to the hub's cache, open the directory.

In: "owner/name" or "owner/name@revision". `huggingface_hub` reads HF_ENDPOINT (the hub's address),
HF_HOME (the cache) and HF_TOKEN (for gated models).
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from fnmatch import fnmatch
from pathlib import Path

from pilotfish.engines.manifest import Source
from pilotfish.export.export_errors import DownloadError
from pilotfish.export.source_names import CHECKPOINT_FILES, CONFIG, HUB_ID
from pilotfish.export.sources.huggingface import DirectorySource, describe_directory
from pilotfish.export.sources.huggingface_config import Description
from pilotfish.export.sources.source import Progress

# Files that are not downloaded: copies in other formats, which are in subfolders, and Mistral's
# consolidated copies of all weights.
UNWANTED = ("*/*.json", "*/*.safetensors", "consolidated*")
POLL_S = 0.5
MOST_NEAR = 3  # number of names that an error proposes


def open_hub(source: str, progress: Progress, ignored: Collection[str] = ()) -> DirectorySource:
    """Fetch the files that the hub's cache lacks, and open the model.

    config.json is fetched and checked first, so an unsupported model is not downloaded.

    Raises:
        DownloadError: if the hub is unreachable, does not have the model, or denies access to the
            model; or if the disk is full.
        ExportError: if the model is not supported.
    """
    location, path = _fetch_config(source)
    describe_directory(path, location, ignored)
    with _download_progress(location, path.name, progress):
        path = _fetch(source, location, path.name, CHECKPOINT_FILES)
    published = Source(kind="hub", location=location, revision=path.name)
    return DirectorySource(path, progress, published, ignored=ignored)


def describe_hub(source: str, ignored: Collection[str] = ()) -> Description:
    """Fetch config.json alone, and read it; see `open_hub`."""
    location, path = _fetch_config(source)
    return describe_directory(path, location, ignored)


def _fetch_config(source: str) -> tuple[str, Path]:
    """Fetch config.json; return the model's name on the hub, and the folder of the file."""
    match = HUB_ID.fullmatch(source)
    if match is None:
        raise DownloadError(f"{source!r} is not a hub id such as owner/name")
    # The cache names the directory of a snapshot after its commit.
    return match["id"], _fetch(source, match["id"], match["revision"], (CONFIG,))


def _fetch(source: str, location: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """Download files of the model to the hub's cache; return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        with _without_bars():
            return Path(
                snapshot_download(
                    location,
                    revision=revision,
                    allow_patterns=list(wanted),
                    ignore_patterns=list(UNWANTED),
                )
            )
    except GatedRepoError:
        raise DownloadError(
            f"the model {source} is gated: accept its licence on the hub, then log in with `hf "
            "auth login`, or set HF_TOKEN to a token of your account"
        ) from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"the hub has no model {source}, or shows it only to users who are logged in: "
            f"{_near_names(location)}run `hf auth login`, or set HF_TOKEN, if the model is private"
        ) from None
    except RevisionNotFoundError:
        raise DownloadError(
            f"the model {location} has no revision {revision}: name a branch, a tag or a commit"
        ) from None
    except Exception as error:  # error classes of the HTTP client differ between versions
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DownloadError(
                f"the disk is full, so {source} could not be fetched into {_hub_cache()}: free "
                "space there, or set HF_HOME to a folder on another disk"
            ) from None
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"{source} could not be fetched from the hub: {reason}. Files that have arrived whole "
            "are kept: repeat the command to fetch the others. Without a network, give a "
            "directory with the model's files"
        ) from None


def _near_names(location: str) -> str:
    """Return a part of a sentence with the hub's models of a similar name; "" without any."""
    from huggingface_hub import HfApi

    name = location.partition("/")[2]
    try:
        names = [each.id for each in HfApi().list_models(search=name, limit=MOST_NEAR)]
    except Exception:  # the error is about the name; a search that fails adds nothing
        return ""
    return f"did you mean {' or '.join(names)}? Else " if names else ""


@contextmanager
def _without_bars() -> Iterator[None]:
    """Let the hub's client draw no bars of its own inside the block."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


@contextmanager
def _download_progress(location: str, commit: str, progress: Progress) -> Iterator[None]:
    """Report the bytes of the model's files in the hub's cache as progress, inside the block."""
    folder = _hub_cache() / f"models--{location.replace('/', '--')}" / "blobs"
    total = _download_bytes(location, commit)
    label = "download" if total is None else f"download, {total / 1e6:,.0f} MB"
    finished = threading.Event()

    def report() -> None:
        while not finished.wait(POLL_S):
            done = _folder_bytes(folder)
            progress(label, done if total is None else min(done, total), total)

    reporter = threading.Thread(target=report, name="download progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        finished.set()
        reporter.join()
    if total is not None:
        progress(label, total, total)


def _download_bytes(location: str, commit: str) -> int | None:
    """Return the total size of the files to fetch; None if the hub does not state it."""
    from huggingface_hub import HfApi

    try:
        files = HfApi().model_info(location, revision=commit, files_metadata=True).siblings or ()
    except Exception:  # without the size, the download goes on; its own error says what is wrong
        return None
    sizes = [file.size for file in files if _is_wanted(file.rfilename)]
    return sum(size for size in sizes if size) if None not in sizes and sizes else None


def _is_wanted(name: str) -> bool:
    wanted = any(fnmatch(name, pattern) for pattern in CHECKPOINT_FILES)
    return wanted and not any(fnmatch(name, pattern) for pattern in UNWANTED)


def _folder_bytes(folder: Path) -> int:
    """Return the total size of the files in a folder; files may vanish at any time."""
    total = 0
    for file in folder.glob("*"):
        with suppress(OSError):
            total += file.stat().st_size
    return total


def _hub_cache() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HUB_CACHE)
