"""The targets that one drafter has met: a pair for each vocabulary, and the evidence on it.

In: the welcomes of edges. Out: the target's vocabulary, fetched if it is unknown, and the evidence
on the pair.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, PairMismatchError
from pilotfish.device_runtime.bridge import Pair
from pilotfish.device_runtime.bridge.vocabulary_fetch import Progress, target_vocabulary
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.pair_statistics import PairStatistics
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols.protocol import PairSizes

_log = logging.getLogger("pilotfish.device")

# A drafter of any vocabulary knows no token until an edge is greeted.
UNKNOWN = Vocabulary(
    model="none: no edge was greeted",
    tokenizer_json='{"model": {"type": "BPE", "vocab": {"?": 0}, "merges": []}, "decoder": '
    '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}}',
    vocab_size=1,
    bos_id=None,
    eos_ids=[],
    chat_template=None,
)

# Vocabularies kept in memory beside the drafter's, up to 100 MB each.
_MAX_PAIRS = 3


class VocabularyPair(NamedTuple):
    """A pair of drafter and target, and the evidence on it.

    vocabulary: the digest of the target's, as in its edge's welcome.
    """

    vocabulary: str
    pair: Pair
    statistics: PairStatistics


class VocabularyPairs:
    """The partners of a device, shared by its lanes. Thread-safe.

    own: the drafter's vocabulary; None: it drafts in any target's. kept: i64 [N], the tokens that
    its head was cut to; None for a whole one. pace: seconds of its pass by the number of its
    tokens. hope: its α on a pair that has shown none. hidden_size: d of its states.
    """

    def __init__(
        self,
        drafter: Vocabulary | None,
        vocabulary_subset: NDArray[np.int64] | None,
        pace: Mapping[int, float],
        prior: float,
        hidden_size: int,
        progress: Progress | None,
    ) -> None:
        self._any_vocabulary = drafter is None
        self._drafter, self._vocabulary_subset = drafter or UNKNOWN, vocabulary_subset
        self._hidden = hidden_size
        self._pace, self._prior = pace, prior
        self._progress = progress
        # the drafter by itself, until an edge is greeted
        self.latest = self._drafter_pair = self._new_pair(self._drafter.digest, self._drafter)
        # by the digest of the target's vocabulary; the drafter's own comes first
        self._known = {self._drafter.digest: self.latest}
        # the last digest that does not fit the drafter, and the error: the check takes seconds, and
        # under `local` would be repeated before every answer
        self._mismatch = ("", "")

    def _new_pair(self, name: str, target: Vocabulary) -> VocabularyPair:
        pair = Pair(
            target if self._any_vocabulary else self._drafter, target, self._vocabulary_subset
        )
        sizes = PairSizes(target.vocab_size, self._hidden)
        return VocabularyPair(name, pair, PairStatistics(self._pace, sizes, self._prior))

    def expect(self, welcome: Welcome) -> str:
        """Return the digest of the target's vocabulary; "" if it cannot be fetched.

        An older edge names none: it must have the drafter's tokens, if that has its own.
        """
        alike = not self._any_vocabulary and welcome.tokenizer in ("", self._drafter.fingerprint)
        return welcome.vocabulary or (self._drafter.digest if alike else "")

    def get(self, link: EdgeLink, welcome: Welcome) -> VocabularyPair:
        """Find or make the partner for this welcome; fetches an unknown vocabulary.

        A target with the drafter's own tokens may have another template, which is fetched too, or
        left out if it cannot be used. Raises like `target_vocabulary`, and `PairMismatchError` for
        a pair without shared tokens.
        """
        name = self.expect(welcome)
        mismatch, complaint = self._mismatch
        if name and name == mismatch:
            raise PairMismatchError(complaint)
        known = self._known.get(name)
        if known is None:  # several lanes may fetch it at once; the first is kept
            pair = self._fetch(name, link, welcome)
            for oldest in list(self._known)[1 : 1 - _MAX_PAIRS]:
                self._known.pop(oldest, None)
            known = self._known.setdefault(name, pair)
        self.latest = known
        return known

    def _fetch(self, name: str, link: EdgeLink, welcome: Welcome) -> VocabularyPair:
        try:
            target = target_vocabulary(link, welcome, self._progress)
        except MalformedError as error:
            if welcome.tokenizer != self._drafter.fingerprint:
                raise
            _log.warning("the drafter's own chat template is used: %s", error)
            return self._drafter_pair._replace(vocabulary=name)
        try:
            return self._new_pair(name, target)
        except PairMismatchError as error:
            self._mismatch = (name, str(error))
            raise
