"""Whom one drafter has drafted for: a pair for each vocabulary that it met, and what was learned.

In: what edges say of themselves. Out: the vocabulary to speak with them, fetched where it is not
known, and the evidence of that pair.
"""

from collections.abc import Mapping
from typing import NamedTuple

from device_runtime.bridge import Pair
from device_runtime.bridge.arrival import Progress, target_vocabulary
from device_runtime.learned import Learned
from device_runtime.link.edge_link import EdgeLink
from engines.vocabulary import Vocabulary
from wire.messages import Welcome

_MOST = (
    2  # other vocabularies that are kept in mind, up to 100 MB each; an edge may come with ever new
)


class Partner(NamedTuple):
    """A target's vocabulary beside the drafter's, and what the pair has shown."""

    pair: Pair
    learned: Learned


class Partners:
    """All lanes of a device share them. Thread-safe.

    pace: seconds of a drafter's pass by the number of its tokens.
    """

    def __init__(
        self, own: Vocabulary, pace: Mapping[int, float], progress: Progress | None
    ) -> None:
        self._own = own
        self._pace = pace
        self._progress = progress
        self.latest = self._partner(own)  # the drafter by itself, until an edge is met
        # by the digest of the target's vocabulary; the drafter's own is the first
        self._known = {own.digest: self.latest}

    def _partner(self, target: Vocabulary) -> Partner:
        pair = Pair(self._own, target)
        return Partner(pair, Learned(self._pace, target.vocab_size))

    def meet(self, link: EdgeLink, welcome: Welcome) -> Partner:
        """The partner behind this link, which was welcomed so; its vocabulary may be fetched.

        A target of the drafter's own tokens may have another template: then it is fetched, too.
        Raises what `target_vocabulary` raises, and `PairMismatchError` for a pair that has nothing
        in common.
        """
        name = welcome.vocabulary
        if not name and welcome.tokenizer in ("", self._own.fingerprint):
            name = self._own.digest  # an older edge
        known = self._known.get(name)
        if known is None:  # lanes that meet it at the same time may each fetch it; one will do
            found = self._partner(target_vocabulary(link, welcome, self._progress))
            for oldest in list(self._known)[1:-_MOST]:
                self._known.pop(oldest, None)
            known = self._known.setdefault(name, found)
        self.latest = known
        return known
