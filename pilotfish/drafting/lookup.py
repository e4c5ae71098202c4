"""Prompt lookup: draft the tokens that followed the same words in earlier text.

In:  the committed tokens, and earlier texts. Out: drafts (`TextHints`), or the distribution of the
     next token (`Recollection`).

A device samples from all earlier places. An edge, whose sessions share its processor, follows one
place and pauses after a search in vain; on GSM8K and edited texts this gained fewer tokens, in a
fifth of the time.
Both find places with `speculation.prompt_lookup`, and estimate acceptance by the length of a match.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np

from pilotfish.drafting.ahead import Proposal
from pilotfish.speculation.acceptance import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.corpus import EMPTY_SNAPSHOT, CorpusSnapshot
from pilotfish.speculation.prompt_lookup import Ids, LookupMatch, find_match
from pilotfish.speculation.recall import Recall
from pilotfish.speculation.sequences import common_prefix
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.protocols.ahead import MOST_DRAFTS

DEFAULT_OWNER = ""  # the owner if the device has only one user
Owner = str | None  # None: a client without a key; its texts are not kept
MAX_OWNERS = 64  # maximum number of owners in memory; the most recent ones stay
_OVERLAP_TOKENS = 2  # stored tokens repeated before new ones: the context of a later match
_MOST_REST = 4  # upper limit of passes between two searches for repeats


class TextHints:
    """Prompt lookup: proposes the tokens that followed an earlier occurrence of the last tokens.

    After a search without success it pauses for one pass, after the next for two, up to four.
    """

    def __init__(self, committed: CommittedTokens) -> None:
        self._committed = committed
        self._estimator = AcceptanceEstimator(REPEAT_PRIOR)
        self._match: LookupMatch | None = None
        self._expected: list[int] = []
        self._missed = self._rest = 0

    def propose(self, limit: int) -> Proposal:
        """Return the tokens that followed the earlier occurrence."""
        self._update_match()
        ids = self._expected[:limit]
        return Proposal(
            ids, self._estimator.estimate_each([self._match_length + at for at in range(len(ids))])
        )

    @property
    def _match_length(self) -> int:
        return self._match.length if self._match is not None else 0

    def _update_match(self) -> None:
        """Continue the present match, or search for a new one."""
        ids = self._committed.ids
        if self._match is not None and self._match.end == len(ids):
            return
        continued = self._match.extend(ids) if self._match is not None else None
        self._expected = []
        if continued is None and self._rest > 0:
            self._match = None
            return
        self._match = continued or find_match(ids)
        if self._match is not None:
            self._expected = self._match.continuation(ids, MOST_DRAFTS).tolist()

    def record_tokens(self, ids: Sequence[int]) -> None:
        """Compare the expected tokens with the committed tokens, even if no pass took them."""
        agreed = 0
        for at, (expected, id) in enumerate(zip(self._expected, ids, strict=False)):
            self._estimator.update(self._match_length + at, expected == id)
            if expected != id:
                break
            agreed += 1
        # a search before every pass would cost more than it gains in a text without repeats
        self._rest -= 1
        if agreed:
            self._missed = 0
        elif self._rest < 0:
            self._missed += 1
            self._rest = min(self._missed, _MOST_REST)
        self._expected = []


class StoredTexts(Protocol):
    """Earlier texts that can be searched and that grow."""

    def snapshot(self) -> CorpusSnapshot:
        """Return the present texts; later additions do not change the result."""

    def add(self, text: Ids) -> None:
        """Add a text u32 [n]."""


class EarlierTexts(Protocol):
    """The earlier texts of all owners, used by several lanes."""

    def texts(self, vocabulary: str, vocab_size: int, owner: Owner) -> StoredTexts:
        """Return the owner's texts in the vocabulary with this fingerprint and size."""

    def shared_texts(self, vocabulary: str, vocab_size: int) -> StoredTexts | None:
        """Return all owners' texts in this vocabulary; None if texts are not shared."""

    def trim(self) -> None:
        """Drop the oldest texts while all owners together exceed the limit."""

    def acquire(self) -> None:
        """Count one more lane that uses these texts."""

    def release(self) -> None:
        """Count one lane less."""


class Recollection(Recall):
    """A lane's `Recall`, which searches the owner's earlier texts and adds to them."""

    def __init__(self, memory: EarlierTexts) -> None:
        super().__init__()
        self._memory = memory
        self._texts: list[StoredTexts] = []  # stores to which the conversation is added
        self._vocabulary = ""
        self._owner: Owner = DEFAULT_OWNER
        # acceptance of repetitions, per owner: a common estimate would reveal texts to other owners
        self._estimators: OrderedDict[Owner, AcceptanceEstimator] = OrderedDict(
            {DEFAULT_OWNER: self._odds}
        )
        self._saved: Ids = np.empty(0, np.uint32)  # the conversation when it was last stored
        self._released = False
        memory.acquire()

    def fork(self) -> Recollection:
        """Make a recollection for another lane."""
        return Recollection(self._memory)

    def release(self) -> None:
        """Stop using the memory."""
        if not self._released:
            self._released = True
            self._memory.release()

    def start(
        self,
        vocabulary: str,
        vocab_size: int,
        owner: Owner = DEFAULT_OWNER,
        *,
        lossless: bool = True,
    ) -> None:
        """Begin a generation of this owner, and search the texts in this vocabulary.

        lossless: whether the answer's protocol is lossless, so that other owners' texts may be
        searched.
        """
        # in case opening the texts fails: search and keep nothing
        self._texts = []
        self.set_corpus(EMPTY_SNAPSHOT)
        if owner != self._owner:
            self._forget(0)  # the lane's last text belongs to another owner
        known = (self._vocabulary, self._owner)
        if (vocabulary, owner) != known:  # ids of another vocabulary mean other words
            self._vocabulary, self._owner = vocabulary, owner
            self._saved = np.empty(0, np.uint32)
            self.set_estimator(
                self._estimators.setdefault(owner, AcceptanceEstimator(REPEAT_PRIOR))
            )
            self._estimators.move_to_end(owner)
            if len(self._estimators) > MAX_OWNERS:
                self._estimators.popitem(last=False)
        own_texts = self._memory.texts(vocabulary, vocab_size, owner)
        shared_texts = self._memory.shared_texts(vocabulary, vocab_size)
        self._texts = [own_texts] if shared_texts is None else [own_texts, shared_texts]
        self.set_corpus(
            (own_texts if shared_texts is None or not lossless else shared_texts).snapshot()
        )

    def end(self, committed: Ids) -> None:
        """Store the tokens that were added to the conversation u32 [n] since it was last stored."""
        known = common_prefix(self._saved, committed)
        if known == len(committed) or not self._texts:
            return
        self._saved = committed.copy()
        for texts in self._texts:
            texts.add(committed[max(0, known - _OVERLAP_TOKENS) :])
        self._memory.trim()
