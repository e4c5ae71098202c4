"""The texts of one owner in one vocabulary: in memory, and optionally in a file.

A file has a record for each text: number of ids, CRC-32 of the ids, the ids (all u32,
little-endian). Texts are appended until the file is twice as large as needed; then it is rewritten.
If a power cut left the last record incomplete, opening the file removes this record. Only the user
who owns the file can read it.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import stat
import struct
import threading
import zlib
from pathlib import Path

import numpy as np

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.files import write_whole
from pilotfish.speculation.corpus import BREAK, Corpus
from pilotfish.speculation.prompt_lookup import Ids

_log = logging.getLogger("pilotfish.device")

_HEAD = struct.Struct("<II")
_MODE = 0o600
_MAX_BYTES_PER_TOKEN = 8  # bytes of a file per token in memory; above this, the file is rewritten
_MIN_TOKENS = 8192  # a file with the bytes of fewer tokens is not rewritten
_READ_BYTES_PER_TOKEN = 16  # maximum bytes read, per token of max_tokens; no file has more


def unusable_store_error(path: Path, error: OSError) -> UnsupportedError:
    """Return the error for a place where texts cannot be kept."""
    return UnsupportedError(
        f"Texts cannot be kept in {path} ({error.strerror}): name another folder."
    )


class TextStore:
    """The texts of an owner in memory. max_tokens: maximum number of tokens; 0: keep none."""

    def __init__(self, max_tokens: int, begin: Ids | None = None) -> None:
        self._max_tokens = max_tokens
        self._corpus = Corpus(max_tokens, begin)
        self.snapshot = self._corpus.snapshot

    def add(self, text: Ids) -> None:
        """Add a text u32 [n]."""
        if self._max_tokens and len(text):
            self._corpus.add(text)

    def __len__(self) -> int:
        return len(self.snapshot().ids)

    def drop_oldest(self) -> None:
        """Drop the oldest quarter of the texts; a file shrinks when it is rewritten."""
        self._corpus.drop_oldest()

    def close(self) -> None:
        """Do nothing."""


class FileTextStore(TextStore):
    """A store with a file; `UnsupportedError` if the file is unusable or another process has it."""

    def __init__(self, path: Path, max_tokens: int, vocab_size: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = _open_locked(path)
            begin = self._read_file(_READ_BYTES_PER_TOKEN * max_tokens, vocab_size)
        except BlockingIOError as error:
            raise UnsupportedError(
                f"Another device keeps its texts in {path.parent}: name another folder."
            ) from error
        except OSError as error:
            raise unusable_store_error(path, error) from error
        super().__init__(max_tokens, begin)

    def _read_file(self, most_bytes: int, vocab_size: int) -> Ids:
        """Read all whole texts; cut off an incomplete end and the bytes beyond the limit."""
        try:
            with os.fdopen(os.dup(self._file), "rb") as file:
                ids, self._size = _parse(file.read(most_bytes), vocab_size)
            if self._size < os.fstat(self._file).st_size:
                _log.warning("%s ends in an incomplete text, which is cut off", self._path)
                os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise
        return ids

    def add(self, text: Ids) -> None:
        """Add a text u32 [n]; if the disk is full, keep texts in memory only."""
        super().add(text)
        if not len(text):
            return
        with self._lock:
            if self._file < 0:
                return
            try:
                if self._size > _MAX_BYTES_PER_TOKEN * max(
                    len(self), min(_MIN_TOKENS, self._max_tokens)
                ):
                    self._rewrite()  # the new file includes this text
                    return
                record = _record(text[-self._max_tokens :])
                if os.pwrite(self._file, record, self._size) < len(record):
                    raise OSError(0, "the disk is full")
                self._size += len(record)
            except OSError as error:
                _log.warning("texts are kept in memory only from now on: %s", error)
                self._stop_writing()

    def _rewrite(self) -> None:
        """Write the file again with the texts in memory."""
        ids = self.snapshot().ids
        texts = np.split(ids, np.flatnonzero(ids == BREAK) + 1)
        blob = b"".join(_record(text[:-1]) for text in texts if len(text) > 1)
        write_whole(self._path, blob, _MODE)
        fresh = _open_locked(self._path)
        os.close(self._file)
        self._file, self._size = fresh, len(blob)

    def _stop_writing(self) -> None:
        file, self._file = self._file, -1
        try:
            os.ftruncate(file, self._size)
        except OSError:
            _log.warning(
                "the incomplete text at the end of %s cannot be cut off; the next reader will do "
                "so",
                self._path,
            )
        os.close(file)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _open_locked(path: Path) -> int:
    """Open a file of texts and lock it for this process; `BlockingIOError` if it is locked."""
    # O_NONBLOCK: opening a pipe in the file's place must not block
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.lstat(path)):
            raise BlockingIOError(errno.EAGAIN, "another process has just rewritten it")
        os.fchmod(file, _MODE)  # the file may be a copy with other rights
    except BaseException:
        os.close(file)
        raise
    return file


def _record(text: Ids) -> bytes:
    data = text.astype("<u4").tobytes()
    return _HEAD.pack(len(text), zlib.crc32(data)) + data


def _parse(blob: bytes, vocab_size: int) -> tuple[Ids, int]:
    """Return the whole texts, each followed by `BREAK`, and the bytes of all whole records."""
    # enough room: a record's head is longer than `BREAK`
    texts = np.empty(len(blob) // 4, np.uint32)
    at = used = 0
    while at + _HEAD.size <= len(blob):
        count, checksum = _HEAD.unpack_from(blob, at)
        end = at + _HEAD.size + 4 * count
        data = blob[at + _HEAD.size : end]
        # no text is empty, so a count of 0 is a lost block of the disk
        if not count or end > len(blob) or zlib.crc32(data) != checksum:
            break
        ids = np.frombuffer(data, "<u4")
        if ids.max() < vocab_size:
            texts[used : used + count] = ids
            texts[used + count] = BREAK
            used += count + 1
        at = end
    return texts[:used], at
