"""Serve the target's vocabulary, in parts, to devices with a drafter of another vocabulary.

In:  a `Fetch`. Out: the requested `Part`, which is compressed separately and small enough to cross
     a slow link between two heartbeats.
"""

import hashlib
import logging
import zlib

from pilotfish.base.errors import MalformedError, PairMismatchError
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire import messages as m

_log = logging.getLogger("pilotfish.edge")


class VocabularyServer:
    """Serves the parts of one vocabulary. Used by the serving loop only.

    digest: SHA-256 (hex) of the encoded vocabulary. size: its bytes. If the vocabulary is too large
    for the wire, they are "" and 0.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        blob = vocabulary.encode()
        if len(blob) > m.MAX_VOCABULARY:
            _log.warning(
                "the vocabulary has %d bytes, more than the wire protocol allows: only drafters "
                "with the same vocabulary can be served", len(blob),
            )  # fmt: skip
            blob = b""
        self.digest = hashlib.sha256(blob).hexdigest() if blob else ""
        self.size = len(blob)
        self._plain = [blob[at : at + m.PART_BYTES] for at in range(0, len(blob), m.PART_BYTES)]
        self._packed: dict[int, bytes] = {}  # part index → compressed part, filled on request

    def get_part(self, fetch: m.Fetch) -> tuple[m.Part, tuple[bytes]]:
        """Return the requested part and its frame.

        Raises `PairMismatchError` for another vocabulary, `MalformedError` for an unknown part.
        """
        if not self.digest or fetch.vocabulary != self.digest:
            raise PairMismatchError(
                "This edge does not offer the requested vocabulary; it may serve another model "
                "now: connect again."
            )
        if fetch.part >= len(self._plain):
            raise MalformedError(
                f"The vocabulary has {len(self._plain)} parts; there is no part {fetch.part}."
            )
        packed = self._packed.get(fetch.part)
        if packed is None:  # compress the part once, in a few milliseconds
            packed = self._packed[fetch.part] = zlib.compress(self._plain[fetch.part], 6)
            self._plain[fetch.part] = b""
        return m.Part(vocabulary=self.digest, part=fetch.part), (packed,)
