"""Get the target's vocabulary: from the device's cache, or in parts from the edge.

In:  a greeted edge and its `Welcome`. Out: exactly the `Vocabulary` that the welcome names: the
     bytes must have the welcome's digest, and the tokens its fingerprint.

Fetched vocabularies are cached. When a cached file is read, its hash is checked. Cached files may
be deleted at any time.
"""

import hashlib
import logging
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from pilotfish.base.errors import MalformedError, PairMismatchError, PilotfishError
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.retry import BUSY, RetryBudget
from pilotfish.engines.cache import cache_directory, keep_newest, replace_file
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.codecs.compressed import decompress
from pilotfish.wire.messages import MAX_VOCABULARY, PART_BYTES, Buffer, Fetch, Part, Reply, Welcome

Progress = Callable[[int, int], None]  # arguments: bytes so far, total bytes

_log = logging.getLogger("pilotfish.device")

_DIGEST = re.compile("[0-9a-f]{64}")
_SLACK_BYTES = 1024  # upper bound of zlib's overhead on incompressible bytes
_MAX_CACHED = 16  # maximum number of cached vocabularies; the least recently used are deleted


def target_vocabulary(
    link: EdgeLink, welcome: Welcome, progress: Progress | None = None
) -> Vocabulary:
    """Return the vocabulary of the edge's target.

    progress: called after every part. Raises `PairMismatchError` if the edge offers no vocabulary,
    or has changed it; `MalformedError` if the edge sends other bytes than the welcome names; and
    the errors of `EdgeLink.request` if the edge is lost.
    """
    digest, size = welcome.vocabulary, welcome.vocabulary_bytes
    if not digest:
        raise PairMismatchError(
            f"The target {welcome.model} has another vocabulary than the drafter, and its edge "
            "does not offer this vocabulary: install the device's Pilotfish release on the edge, "
            "or use a "
            "drafter of the same family."
        )
    if not _DIGEST.fullmatch(digest) or not 0 < size <= MAX_VOCABULARY:
        raise MalformedError(
            f"The edge offers a vocabulary of {size} bytes with the name {digest!r}; a vocabulary "
            f"must have 1 to {MAX_VOCABULARY} bytes, and its SHA-256 as its name."
        )
    path = cache_directory() / "vocabularies" / f"{digest}.bin"
    blob = _read_cache(path, digest, size)
    if blob is not None:
        return _decode(blob, welcome)
    blob = _fetch(link, welcome, progress)
    if hashlib.sha256(blob).hexdigest() != digest:
        raise _unusable_error("its bytes do not have the promised hash")
    _write_cache(path, blob)  # cache first: an unusable vocabulary is fetched only once
    return _decode(blob, welcome)


def _fetch(link: EdgeLink, welcome: Welcome, progress: Progress | None) -> bytes:
    digest, size = welcome.vocabulary, welcome.vocabulary_bytes
    _log.info("fetching the vocabulary of %s from the edge, %d KiB", welcome.model, size >> 10)
    blob = bytearray()
    wire_bytes = 0
    for number, expected in enumerate(_part_sizes(size)):
        frame = _fetch_part(link, Fetch(vocabulary=digest, part=number))
        wire_bytes += len(frame)
        blob += _unpack(frame, expected)
        if progress is not None:
            progress(len(blob), size)
    _log.info("the vocabulary has arrived; %d KiB crossed the link", wire_bytes >> 10)
    return bytes(blob)


def _part_sizes(size: int) -> Iterator[int]:
    for at in range(0, size, PART_BYTES):
        yield min(PART_BYTES, size - at)


def _fetch_part(link: EdgeLink, fetch: Fetch) -> Buffer:
    """Fetch the frame of one part; wait for a busy edge as long as the link's policy allows."""

    def wanted(reply: Reply) -> bool:
        return (
            isinstance(reply, Part)
            and reply.vocabulary == fetch.vocabulary
            and reply.part == fetch.part
        )

    retry_budget = RetryBudget(link)
    while True:
        try:
            frames = link.request(fetch, (), wanted).frames
        except BUSY as error:
            retry_budget.add(error)
        else:
            if len(frames) != 1:
                raise _unusable_error(f"a part has {len(frames)} frames instead of one")
            return frames[0]


def _unpack(frame: Buffer, expected: int) -> bytes:
    """Decompress a part; it must have the expected number of bytes."""
    if len(frame) > expected + _SLACK_BYTES:
        raise _unusable_error(f"a part of {expected} bytes has {len(frame)} compressed bytes")
    try:
        return decompress(frame, expected)
    except MalformedError as error:
        raise _unusable_error(f"a part does not have {expected} bytes: {error}") from None


def _decode(blob: bytes, welcome: Welcome) -> Vocabulary:
    try:
        vocabulary = Vocabulary.decode(blob, welcome.model)
        fits = (
            vocabulary.vocab_size == welcome.vocab_size
            and vocabulary.eos_ids == welcome.eos_ids
            and vocabulary.fingerprint == welcome.tokenizer
        )
    except ArtifactError as error:
        raise _unusable_error(str(error)) from None
    if not fits:
        raise _unusable_error("it does not match the edge's welcome")
    return vocabulary


def _unusable_error(reason: str) -> PilotfishError:
    return MalformedError(
        f"The edge's vocabulary cannot be used: {reason}. Export the target again, and restart the "
        "edge; if that does not help, use a drafter with the target's own vocabulary."
    )


# The cache


def _read_cache(path: Path, digest: str, size: int) -> bytes | None:
    """Read a cached vocabulary; None if the file is missing, unreadable or damaged."""
    try:
        if path.stat().st_size == size:
            blob = path.read_bytes()
            if hashlib.sha256(blob).hexdigest() == digest:
                with suppress(OSError):
                    path.touch()
                return blob
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            _log.warning("%s cannot be read: %s", path, error.strerror)
        return None
    _log.warning("%s is damaged: fetching the vocabulary again", path)
    return None


def _write_cache(path: Path, blob: bytes) -> None:
    try:
        replace_file(path, blob)
        keep_newest(path.parent, "*.bin", _MAX_CACHED)
    except OSError as error:
        _log.warning("the vocabulary cannot be cached, and will be fetched again: %s", error)
