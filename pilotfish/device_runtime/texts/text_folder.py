"""The folder of all owners' texts.

In:  a vocabulary and an owner. Out: the file of this owner's texts.

An owner's name may be derived from an API key, so the folder does not contain it: a file is named
by a hash of the owner's name, keyed with a secret of the folder. If there are too many files, the
least recently used files are removed.
"""

from __future__ import annotations

import fcntl
import hashlib
import hmac
import logging
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pilotfish.base.files import write_whole
from pilotfish.device_runtime.texts.text_store import unusable_store_error
from pilotfish.drafting.lookup import DEFAULT_OWNER

_log = logging.getLogger("pilotfish.device")

_SUFFIX = ".texts"
_SECRET, _SECRET_BYTES = "secret", 32
# Maximum number and bytes of the files of all API keys and all vocabularies together.
_MOST_FILES, _MOST_BYTES = 256, 64 << 20


class _TextFile(NamedTuple):
    used_ns: int
    size: int
    path: Path


class TextFolder:
    """A folder of texts; `UnsupportedError` if it cannot be made."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._owners = folder / "owners"
        self._secret = b""
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise unusable_store_error(folder, error) from error

    def shared_path(self, vocabulary: str) -> Path:
        """Return the file of shared texts; older versions kept all texts in this file."""
        return self._folder / f"{_vocabulary_key(vocabulary)}{_SUFFIX}"

    def owner_path(self, vocabulary: str, owner: str) -> Path:
        """Return the file of an owner's texts; `UnsupportedError` if the folder is unusable."""
        if owner == DEFAULT_OWNER:
            return self._folder / f"{_vocabulary_key(vocabulary)}.own{_SUFFIX}"
        try:
            self._secret = self._secret or self._read_secret()
        except OSError as error:
            raise unusable_store_error(self._owners, error) from error
        name = hmac.digest(self._secret, owner.encode(), "sha256").hex()[:32]
        return self._owners / f"{_vocabulary_key(vocabulary)}.{name}{_SUFFIX}"

    def _read_secret(self) -> bytes:
        """Return the folder's secret; creates it if it is missing."""
        self._owners.mkdir(mode=0o700, exist_ok=True)
        folder = os.open(self._owners, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            os.fchmod(folder, 0o700)  # the folder may be a copy with other rights
            fcntl.flock(folder, fcntl.LOCK_EX)  # locked only while the secret is read or created
            path = self._owners / _SECRET
            with suppress(FileNotFoundError):
                file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
                with os.fdopen(file, "rb") as opened:
                    os.fchmod(file, 0o600)
                    if len(secret := opened.read(_SECRET_BYTES + 1)) == _SECRET_BYTES:
                        return secret
                _log.warning("%s is damaged: earlier texts can no longer be used", path)
            secret = secrets.token_bytes(_SECRET_BYTES)
            write_whole(path, secret, 0o600)
            return secret
        finally:
            os.close(folder)

    def make_room(self, wanted: Path) -> None:
        """Remove the least recently used files of other owners until one more file has room.

        wanted: the file to be opened next.
        """
        if wanted.parent != self._owners:
            return
        with suppress(OSError):
            os.utime(wanted, follow_symlinks=False)
        others = sorted(file for file in _files(self._owners) if file.path != wanted)
        size, count = sum(file.size for file in others), len(others)
        for file in others:
            if count < _MOST_FILES and size <= _MOST_BYTES:
                break
            if _try_remove(file.path):
                size, count = size - file.size, count - 1


def _vocabulary_key(vocabulary: str) -> str:
    return hashlib.sha256(vocabulary.encode()).hexdigest()[:16]


def _files(folder: Path) -> list[_TextFile]:
    """List the files of a folder except its secret; includes half-written files."""
    files: list[_TextFile] = []
    with (
        suppress(OSError),
        os.scandir(folder) as entries,
    ):  # ignore errors here: opening a file will raise them again
        for entry in entries:
            if entry.name == _SECRET or not entry.is_file(follow_symlinks=False):
                continue
            with suppress(FileNotFoundError):  # another device has removed it
                about = entry.stat(follow_symlinks=False)
                files.append(_TextFile(about.st_mtime_ns, about.st_size, Path(entry.path)))
    return files


def _try_remove(path: Path) -> bool:
    """Remove a file unless a device has it open; returns whether it no longer exists."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return False
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        path.unlink(missing_ok=True)
    except OSError:
        return False
    finally:
        os.close(file)
    return True
