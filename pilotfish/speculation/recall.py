"""A drafter's distribution without a model: what followed where the text's last words stood before.

In:  the committed tokens, and earlier texts. Out: behind any path of drafts, the tokens that
     followed before, how often each did, and the odds that the likeliest is right.

Of all places that have the longest match with the end of the text, each counts once; that is the
distribution. While the text goes on as one of them did, they are followed; else they are searched
anew, in the text itself and in all earlier ones.

The odds are learnt from the committed tokens alone, in their order. Which drafts there were changes
nothing here, so a window that ends by these odds cannot bias the law.

References: Saxena 2023 (prompt lookup), Oliaro et al. 2024 (SuffixDecoding), Luo et al. 2024 (Token
Recycling).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.acceptance import REPEAT_PRIOR, AcceptanceEstimator
from pilotfish.speculation.corpus import BREAK, EMPTY_SNAPSHOT, CorpusSnapshot
from pilotfish.speculation.prompt_lookup import Ids, find_places, match_lengths

_MANY = 64  # places that are compared: the latest
_SCANNED = 4096  # places in this text that had the last token, of which some had the last two
_ALONE = 8  # the latest of them, where none had
_LEARNT = 65  # tokens that come at once, a window and one more, are learnt from; more are a prompt
_LENGTHS = 64  # a longer match is not told from this
_NOWHERE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Echo:
    """What may follow, by the places where the last words stood before.

    earlier, here: these places in the earlier texts and in this one, i64 [m], ascending. length:
    of the match, in tokens. tokens: u32 [k], what followed, each once. weights: f64 [k], how often;
    the latest counts for half a time more, so that it wins a draw.
    """

    earlier: NDArray[np.int64]
    here: NDArray[np.int64]
    length: int
    tokens: Ids
    weights: NDArray[np.float64]

    @property
    def likeliest(self) -> int:
        """The token that followed most often."""
        return int(self.tokens[self.weights.argmax()])


class Recall:
    """Follows one text at a time. One thread at a time."""

    def __init__(self) -> None:
        self._earlier = EMPTY_SNAPSHOT
        self._text = np.empty(1024, np.uint32)  # committed tokens, then those of the last path
        self._end = 0  # of the committed ones
        self._path: list[int] = []
        self._echoes: list[Echo | None] = [None]  # behind the committed tokens and each of the path
        self._odds = AcceptanceEstimator(REPEAT_PRIOR)
        self._odds_by_length: dict[int, float] = {}  # odds by length

    def set_corpus(self, earlier: CorpusSnapshot) -> None:
        """Search these earlier texts from now on."""
        self._earlier = earlier
        self._forget(self._end)

    def set_estimator(self, odds: AcceptanceEstimator) -> None:
        """Tell, and learn, the odds by these from now on."""
        self._odds = odds
        self._odds_by_length.clear()

    def update(self, committed: Ids) -> None:
        """Take in the committed tokens u32 [n], of which most are known."""
        known = _common(self._text[: self._end], committed)
        if known < self._end:
            self._forget(known)
        new = committed[known:]
        if not len(new):
            return
        self._reserve(len(committed))
        if len(new) > _LEARNT:
            self._text[known : len(committed)] = new
            self._forget(len(committed))
            return
        for token in new.tolist():
            self._commit(token)

    def _forget(self, end: int) -> None:
        """Note that the text has so many committed tokens, and search anew."""
        self._end = end
        self._path.clear()
        self._echoes = [self._search(end)]

    def _commit(self, token: int) -> None:
        """Learn by the next committed token, and go on along the places that had it."""
        echo = self._echoes[0]
        if echo is not None:
            self._odds.update(min(echo.length, _LENGTHS), echo.likeliest == token)
            self._odds_by_length.clear()
        if self._path and self._path[0] == token:  # as drafted: what is known behind it still holds
            del self._path[0], self._echoes[0]
            self._end += 1
            return
        self._path.clear()
        self._text[self._end] = token
        self._end += 1
        self._echoes = [self._extend(echo, token, self._end)]

    def predict(self, path: Sequence[int]) -> Echo | None:
        """Return what may follow the committed tokens and a path of drafts; None: nothing known."""
        known = 0
        while known < min(len(path), len(self._path)) and path[known] == self._path[known]:
            known += 1
        if known < len(path):
            del self._path[known:], self._echoes[known + 1 :]
            self._reserve(self._end + len(path))
            for token in path[known:]:
                end = self._end + len(self._path)
                self._text[end] = token
                self._path.append(token)
                self._echoes.append(self._extend(self._echoes[-1], token, end + 1))
        return self._echoes[len(path)]

    def acceptance(self, echo: Echo) -> float:
        """Return the odds in (0, 1) that the likeliest token is the one that follows."""
        length = min(echo.length, _LENGTHS)
        if length not in self._odds_by_length:
            self._odds_by_length[length] = self._odds.estimate(length)
        return self._odds_by_length[length]

    # Places

    def _reserve(self, length: int) -> None:
        """Make room for so many tokens."""
        if length > len(self._text):
            self._text = np.concatenate([self._text, np.empty(length, np.uint32)])

    def _extend(self, echo: Echo | None, token: int, end: int) -> Echo | None:
        """Go on to the first ``end`` tokens, of which ``token`` is the last; or search anew."""
        # of one token there are fewer places than of the two that they now are
        if echo is not None and echo.length > 1:
            earlier = _advance(self._earlier.ids, echo.earlier, token)
            here = _advance(self._text, echo.here, token)
            if extended := self._echo(earlier, here, echo.length + 1, end):
                return extended
        return self._search(end)

    def _search(self, end: int) -> Echo | None:
        """Find the places with the longest match with the end of the first ``end`` tokens."""
        text, earlier = self._text[:end], self._earlier
        before = earlier.find_places(text, _MANY)
        before = before[earlier.ids.take(before) != BREAK]
        here = find_places(text, text, 1, _SCANNED)
        pairs = here[here > 1]
        pairs = pairs[text.take(pairs - 2) == text[-2]] if len(pairs) else _NOWHERE
        here = pairs[-_MANY:] if len(pairs) or len(before) else here[-_ALONE:]
        if not len(here) and not len(before):
            return None
        lengths = match_lengths(text, here, text), match_lengths(earlier.ids, before, text)
        length = max(int(each.max(initial=1)) for each in lengths)
        return self._echo(before[lengths[1] == length], here[lengths[0] == length], length, end)

    def _echo(
        self, earlier: NDArray[np.int64], here: NDArray[np.int64], length: int, end: int
    ) -> Echo | None:
        """Make the echo of these places; None if nothing follows at any."""
        if len(earlier):
            following = self._earlier.ids.take(earlier)
            if (following == BREAK).any():
                earlier = earlier[following != BREAK]
                following = following[following != BREAK]
        else:
            following = np.empty(0, np.uint32)
        if len(here) and here[-1] >= end:
            here = here[here < end]
        if len(here):
            following = np.concatenate([following, self._text.take(here)])
        if not len(following):
            return None
        tokens, weights = _count_tokens(following)
        return Echo(earlier, here, length, tokens, weights)


def _common(first: Ids, second: Ids) -> int:
    """Count the first tokens that are the same."""
    length = min(len(first), len(second))
    differ = first[:length] != second[:length]
    return int(differ.argmax()) if differ.any() else length


def _advance(ids: Ids, starts: NDArray[np.int64], token: int) -> NDArray[np.int64]:
    """Return the places behind those at which the token followed."""
    if not len(starts):
        return _NOWHERE
    places: NDArray[np.int64] = starts[ids.take(starts) == token] + 1
    return places


def _count_tokens(following: Ids) -> tuple[Ids, NDArray[np.float64]]:
    """Count equal tokens; the last one counts for half a time more."""
    last = following[-1:]
    if len(following) == 1 or (following == last).all():
        return last, np.ones(1)
    tokens, counts = np.unique(following, return_counts=True)
    return tokens, counts + 0.5 * (tokens == last)
