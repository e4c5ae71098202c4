"""A model on the Hugging Face hub as a source: fetch it to the hub's cache, open the directory.

In: "owner/name" or "owner/name@revision". `huggingface_hub` reads HF_ENDPOINT (the hub's address),
HF_HOME (the cache) and HF_TOKEN (for gated models).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path

from pilotfish.engines.manifest import Source
from pilotfish.export.export_errors import DownloadError
from pilotfish.export.sources.huggingface import DirectorySource, describe_directory
from pilotfish.export.sources.huggingface_tokenizer import NAMED_TEMPLATES
from pilotfish.export.sources.source import Progress

HUB_ID = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
CONFIG = ("config.json",)
WANTED = (
    *("*.json", "*.safetensors", "merges.txt", "tokenizer.model", "chat_template.jinja"),
    f"{NAMED_TEMPLATES}/*.jinja",
)
# Files that are not downloaded: copies in other formats, which are in subfolders, and Mistral's
# consolidated copies of all weights.
UNWANTED = ("*/*.json", "*/*.safetensors", "consolidated*")


def open_hub(source: str, progress: Progress, ignored: Collection[str] = ()) -> DirectorySource:
    """Fetch the files that the hub's cache lacks, and open the model.

    config.json is fetched and checked first, so an unsupported model is not downloaded.

    Raises:
        DownloadError: if the hub is unreachable, does not have the model, or denies access to the
            model.
        ExportError: if the model is not supported.
    """
    match = HUB_ID.fullmatch(source)
    if match is None:
        raise DownloadError(f"{source!r} is not a hub id such as owner/name")
    location = match["id"]
    # The cache names the directory of a snapshot after its commit.
    path = _fetch(source, location, match["revision"], CONFIG)
    describe_directory(path, location, ignored)
    path = _fetch(source, location, path.name, WANTED)
    published = Source(kind="hub", location=location, revision=path.name)
    return DirectorySource(path, progress, published, ignored=ignored)


def _fetch(source: str, location: str, revision: str | None, wanted: Sequence[str]) -> Path:
    """Download files of the model to the hub's cache; return their folder."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    try:
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
            "auth login`"
        ) from None
    except RepositoryNotFoundError:
        raise DownloadError(
            f"the hub has no model {source}, or shows it only to users who are logged in: run "
            "`hf auth login`"
        ) from None
    except Exception as error:  # error classes of the HTTP client differ between versions
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise DownloadError(
            f"{source} could not be fetched from the hub: {reason}. Without a network, give a "
            "directory with the model's files"
        ) from None
