"""Pairs of a drafter and its targets, one per target vocabulary, with the evidence on each.

In:  the welcomes of edges. Out: the pair and its evidence; an unknown vocabulary of a target is
     fetched.
"""

import logging
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, PairMismatchError
from pilotfish.bridge import Pair
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.pair_statistics import PairStatistics
from pilotfish.device_runtime.vocabulary_fetch import Progress, target_vocabulary
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols.protocol import PairSizes

_log = logging.getLogger("pilotfish.device")

# Placeholder, until the first handshake, for a drafter without a vocabulary.
UNKNOWN = Vocabulary(
    model="none: no edge was greeted",
    tokenizer_json='{"model": {"type": "BPE", "vocab": {"?": 0}, "merges": []}, "decoder": '
    '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}}',
    vocab_size=1,
    bos_id=None,
    eos_ids=[],
    chat_template=None,
)

# Maximum target vocabularies in memory, up to 100 MB each, in addition to the drafter's.
_MAX_PAIRS = 3


class VocabularyPair(NamedTuple):
    """A pair of drafter and target, and the evidence on it.

    vocabulary: digest of the target's vocabulary, as in the edge's welcome.
    """

    vocabulary: str
    pair: Pair
    statistics: PairStatistics


class VocabularyPairs:
    """The vocabulary pairs of a device, shared by its lanes. Thread-safe.

    drafter: the drafter's vocabulary; None if it drafts in any target's vocabulary.
    vocabulary_subset: the token ids that its head was cut to, i64 [N]; None for a whole head.
    pass_times: seconds of the drafter's pass by number of tokens. drafts_per_pass: maximum number
    of tokens that a pass drafts. prior: acceptance α before any evidence. hidden_size: dimension of
    the drafter's hidden states. progress: called with the fetched bytes and their total.
    """

    def __init__(
        self,
        drafter: Vocabulary | None,
        vocabulary_subset: NDArray[np.int64] | None,
        pass_times: Mapping[int, float],
        drafts_per_pass: int,
        prior: float,
        hidden_size: int,
        progress: Progress | None,
    ) -> None:
        self._any_vocabulary = drafter is None
        self._drafter, self._vocabulary_subset = drafter or UNKNOWN, vocabulary_subset
        self._hidden = hidden_size
        self._pass_times, self._drafts_per_pass = pass_times, drafts_per_pass
        self._prior = prior
        self._progress = progress
        # until the first handshake, the drafter's vocabulary stands for both
        self.latest = self._drafter_pair = self._new_pair(self._drafter.digest, self._drafter)
        # pairs by digest of the target's vocabulary; the drafter's vocabulary comes first
        self._known = {self._drafter.digest: self.latest}
        # digest of the last unsuitable vocabulary, and the error's text: the check takes seconds,
        # and without this memory it would run before every answer under `local`
        self._mismatch = ("", "")

    def _new_pair(self, name: str, target: Vocabulary) -> VocabularyPair:
        pair = Pair(
            target if self._any_vocabulary else self._drafter, target, self._vocabulary_subset
        )
        sizes = PairSizes(target.vocab_size, self._hidden)
        statistics = PairStatistics(self._pass_times, sizes, self._prior, self._drafts_per_pass)
        return VocabularyPair(name, pair, statistics)

    def expect(self, welcome: Welcome) -> str:
        """Return the digest of the target's vocabulary; "" if it cannot be fetched.

        An edge sends no digest of a vocabulary that is too long; then its tokens must be the
        drafter's.
        """
        alike = not self._any_vocabulary and welcome.tokenizer == self._drafter.fingerprint
        return welcome.vocabulary or (self._drafter.digest if alike else "")

    def get(self, link: EdgeLink, welcome: Welcome) -> VocabularyPair:
        """Return the pair for this welcome; fetches an unknown vocabulary.

        A target with the drafter's own tokens may have another chat template. This template is also
        fetched, and ignored if it is unusable. Raises the errors of `target_vocabulary`, and
        `PairMismatchError` for a pair without shared tokens.
        """
        name = self.expect(welcome)
        mismatch, complaint = self._mismatch
        if name and name == mismatch:
            raise PairMismatchError(complaint)
        known = self._known.get(name)
        if known is None:  # several lanes may fetch at once; the first result is kept
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
            _log.warning("using the drafter's own chat template: %s", error)
            return self._drafter_pair._replace(vocabulary=name)
        try:
            return self._new_pair(name, target)
        except PairMismatchError as error:
            self._mismatch = (name, str(error))
            raise
