"""The texts of earlier conversations on this device, by vocabulary; on disk if asked.

In:  conversations, as token ids. Out: a `Corpus` for each vocabulary.

A file has a record for each text: how many ids, their CRC-32, the ids (all u32, little-endian). It
only grows at its end, until it holds twice what is used and is written anew; what a power cut left
torn is cut off when it is opened. It is readable by its owner alone: it holds what was said.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import logging
import os
import stat
import struct
import threading
import zlib
from pathlib import Path

import numpy as np

from pilotfish.speculation.corpus import BREAK, MOST_TOKENS, Corpus
from pilotfish.speculation.repeats import Ids
from pilotfish.wire.errors import UnsupportedError
from pilotfish.wire.files import write_whole

_log = logging.getLogger("pilotfish.device")

OFF = "off"
_HEAD = struct.Struct("<II")
_SUFFIX = ".texts"
_MODE = 0o600
_USED_TWICE = 8  # bytes of a file for each token of memory
_LARGEST = 16  # likewise; more is never written


class TextMemory:
    """The earlier texts of a device, shared by its lanes. Thread-safe.

    kept: "off": there are none, each conversation has its own text alone; a folder: they are kept
    there; None: in memory, as long as the process lives. Only the vocabulary used last is in
    memory.
    """

    def __init__(self, kept: str | Path | None = None, most: int = MOST_TOKENS) -> None:
        self._off = kept is not None and str(kept) == OFF
        self._folder = None if kept is None or self._off else Path(kept)
        self._most = most
        self._lock = threading.Lock()
        self._lanes = 0
        self._vocabulary = ""
        self._texts: Texts = Texts(0)
        if self._folder is not None:
            _expect_usable(self._folder)

    def texts(self, vocabulary: str, vocab_size: int) -> Texts:
        """Return the texts in the vocabulary of this fingerprint and size."""
        with self._lock:
            if vocabulary != self._vocabulary:
                opened = self._opened(vocabulary, vocab_size)  # may raise; then nothing changes
                self._texts.close()
                self._texts, self._vocabulary = opened, vocabulary
            return self._texts

    def _opened(self, vocabulary: str, vocab_size: int) -> Texts:
        if self._off or not vocabulary:
            return Texts(0)
        if self._folder is None:
            return Texts(self._most)
        name = hashlib.sha256(vocabulary.encode()).hexdigest()[:16]
        return KeptTexts(self._folder / f"{name}{_SUFFIX}", self._most, vocab_size)

    def join(self) -> None:
        """Count a lane that uses these texts."""
        with self._lock:
            self._lanes += 1

    def leave(self) -> None:
        """Note that a lane uses them no longer; the last one closes the file."""
        with self._lock:
            self._lanes -= 1
            last = self._lanes <= 0
        if last:
            self.close()

    def close(self) -> None:
        """Close the file, so that another device may have it."""
        with self._lock:
            self._texts.close()
            if self._folder is not None:
                self._texts, self._vocabulary = Texts(0), ""


def _expect_usable(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise _unusable(folder, error) from error


def _unusable(path: Path, error: OSError) -> UnsupportedError:
    return UnsupportedError(
        f"Texts cannot be kept in {path} ({error.strerror}): name another folder."
    )


class Texts:
    """The texts in one vocabulary, in memory. most: tokens; 0: none are kept."""

    def __init__(self, most: int, begin: Ids | None = None) -> None:
        self._most = most
        self._corpus = Corpus(most, begin)
        self.look = self._corpus.look

    def add(self, text: Ids) -> None:
        """Add a text u32 [n]."""
        if self._most and len(text):
            self._corpus.add(text)

    def close(self) -> None:
        """Do nothing."""


class KeptTexts(Texts):
    """The same in a file, too; `UnsupportedError` if it cannot be, or another process has it."""

    def __init__(self, path: Path, most: int, vocab_size: int) -> None:
        self._path = path
        self._lock = threading.Lock()
        try:
            self._file = _held(path)
            found = self._found(_LARGEST * most, vocab_size)
        except BlockingIOError as error:
            raise UnsupportedError(
                f"Another device keeps its texts in {path.parent}: name another folder."
            ) from error
        except OSError as error:
            raise _unusable(path, error) from error
        super().__init__(most, found)

    def _found(self, most_bytes: int, vocab_size: int) -> Ids:
        """Read all whole texts, and cut off what is torn, or more than is ever written."""
        try:
            with os.fdopen(os.dup(self._file), "rb") as file:
                found, self._size = _read(file.read(most_bytes), vocab_size)
            if self._size < os.fstat(self._file).st_size:
                _log.warning("%s ends in a torn text, which is left out", self._path)
                os.ftruncate(self._file, self._size)
        except BaseException:
            os.close(self._file)
            raise
        return found

    def add(self, text: Ids) -> None:
        """Add a text u32 [n]; where the disk takes no more it is kept in memory alone."""
        super().add(text)
        if not len(text):
            return
        with self._lock:
            if self._file < 0:
                return
            try:
                if self._size > _USED_TWICE * self._most:
                    self._rewrite()  # with this text
                    return
                record = _record(text[-self._most :])
                if os.pwrite(self._file, record, self._size) < len(record):
                    raise OSError(0, "the disk is full")
                self._size += len(record)
            except OSError as error:
                _log.warning("texts are kept in memory alone from now on: %s", error)
                self._drop()

    def _rewrite(self) -> None:
        """Write anew what is used."""
        ids = self.look().ids
        texts = np.split(ids, np.flatnonzero(ids == BREAK) + 1)
        blob = b"".join(_record(text[:-1]) for text in texts if len(text) > 1)
        write_whole(self._path, blob, _MODE)
        fresh = _held(self._path)
        os.close(self._file)
        self._file, self._size = fresh, len(blob)

    def _drop(self) -> None:
        file, self._file = self._file, -1
        try:
            os.ftruncate(file, self._size)
        except OSError:
            _log.warning(
                "%s cannot be cut to its whole texts; that is done when it is read", self._path
            )
        os.close(file)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1


def _held(path: Path) -> int:
    """Open a file of texts for this process and its owner alone; `BlockingIOError` if taken."""
    # O_NONBLOCK: nobody writes to a pipe that stands in its place
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, _MODE)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise OSError(errno.EINVAL, "it is no file")
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not os.path.samestat(os.fstat(file), os.lstat(path)):
            raise BlockingIOError(errno.EAGAIN, "its holder has just written it anew")
        os.fchmod(file, _MODE)  # it may come from elsewhere
    except BaseException:
        os.close(file)
        raise
    return file


def _record(text: Ids) -> bytes:
    data = text.astype("<u4").tobytes()
    return _HEAD.pack(len(text), zlib.crc32(data)) + data


def _read(blob: bytes, vocab_size: int) -> tuple[Ids, int]:
    """Return all whole texts, with `BREAK` behind each, and the bytes up to the first torn one."""
    found = np.empty(len(blob) // 4, np.uint32)  # a head is longer than `BREAK`: that is enough
    at = used = 0
    while at + _HEAD.size <= len(blob):
        count, checksum = _HEAD.unpack_from(blob, at)
        end = at + _HEAD.size + 4 * count
        data = blob[at + _HEAD.size : end]
        # none is empty: where a disk lost its blocks there are zeros
        if not count or end > len(blob) or zlib.crc32(data) != checksum:
            break
        ids = np.frombuffer(data, "<u4")
        if ids.max() < vocab_size:
            found[used : used + count] = ids
            found[used + count] = BREAK
            used += count + 1
        at = end
    return found[:used], at
