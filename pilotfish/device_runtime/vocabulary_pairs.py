"""Pairs of a drafter and its targets, one per target vocabulary, with the evidence on each.

In:  the welcomes of edges. Out: the pair, with the target's vocabulary, which is fetched if it is
     unknown, and the pair's evidence.
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

# Stands for the vocabulary of a drafter without one, until the first handshake.
UNKNOWN = Vocabulary(
    model="none: no edge was greeted",
    tokenizer_json='{"model": {"type": "BPE", "vocab": {"?": 0}, "merges": []}, "decoder": '
    '{"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": true}}',
    vocab_size=1,
    bos_id=None,
    eos_ids=[],
    chat_template=None,
)

# Target vocabularies in memory, up to 100 MB each; the drafter's own comes on top.
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

    drafter: the drafter's vocabulary; None if it drafts in any target's. vocabulary_subset: i64
    [N], the tokens that its head was cut to; None for a whole head. pass_times: seconds of
    the drafter's pass by number of tokens. prior: α without evidence. hidden_size: d of its states.
    """

    def __init__(
        self,
        drafter: Vocabulary | None,
        vocabulary_subset: NDArray[np.int64] | None,
        pass_times: Mapping[int, float],
        prior: float,
        hidden_size: int,
        progress: Progress | None,
    ) -> None:
        self._any_vocabulary = drafter is None
        self._drafter, self._vocabulary_subset = drafter or UNKNOWN, vocabulary_subset
        self._hidden = hidden_size
        self._pass_times, self._prior = pass_times, prior
        self._progress = progress
        # the drafter's vocabulary on both sides, until the first handshake
        self.latest = self._drafter_pair = self._new_pair(self._drafter.digest, self._drafter)
        # pairs by digest of the target's vocabulary; the drafter's own comes first
        self._known = {self._drafter.digest: self.latest}
        # last unsuitable digest, and the error: the check takes seconds and would run before every
        # answer under `local`
        self._mismatch = ("", "")

    def _new_pair(self, name: str, target: Vocabulary) -> VocabularyPair:
        pair = Pair(
            target if self._any_vocabulary else self._drafter, target, self._vocabulary_subset
        )
        sizes = PairSizes(target.vocab_size, self._hidden)
        return VocabularyPair(name, pair, PairStatistics(self._pass_times, sizes, self._prior))

    def expect(self, welcome: Welcome) -> str:
        """Return the digest of the target's vocabulary; "" if it cannot be fetched.

        An older edge sends no digest: its tokens must be the drafter's.
        """
        alike = not self._any_vocabulary and welcome.tokenizer in ("", self._drafter.fingerprint)
        return welcome.vocabulary or (self._drafter.digest if alike else "")

    def get(self, link: EdgeLink, welcome: Welcome) -> VocabularyPair:
        """Return the pair for this welcome; fetches an unknown vocabulary.

        A target with the drafter's own tokens may have another template, which is also fetched; an
        unusable template is ignored. Raises like `target_vocabulary`, and `PairMismatchError` for a
        pair without shared tokens.
        """
        name = self.expect(welcome)
        mismatch, complaint = self._mismatch
        if name and name == mismatch:
            raise PairMismatchError(complaint)
        known = self._known.get(name)
        if known is None:  # several lanes may fetch it at once; the first one wins
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
