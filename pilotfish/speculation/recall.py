"""Draft without a model: predict the tokens that followed earlier occurrences of the text's end.

In:  the committed tokens, and earlier texts. Out: after any path of drafts, the tokens that
     followed earlier, their counts, and the acceptance of the likeliest.

A match is a place where earlier tokens equal the text's last tokens. Each place with the longest
match counts once. While the text continues like the tokens at a place, the place advances with the
text; when no place is left, the text itself and all earlier texts are searched again.

Acceptance is learned from the committed tokens alone, in their order. It does not depend on the
drafts, so a window may end by it without bias in the output's law.

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
from pilotfish.speculation.sequences import common_prefix

_MANY = 64  # number of latest places that are compared
# number of latest places after the last token that are checked for the last two tokens
_SCANNED = 4096
_ALONE = 8  # number of latest places that are used if only the last token matches
# maximum number of new tokens to learn from: a window and one token; more are a prompt
_LEARNT = 65
_LENGTHS = 64  # upper limit of match length (tokens) for the acceptance estimate
_NOWHERE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Echo:
    """Prediction of the next token: the tokens at earlier places that match the end of the text.

    earlier, here: matching places in the earlier texts, and in this text, i64 [m], ascending.
    length: length of the match, in tokens. tokens: the distinct tokens at these places, u32 [k].
    weights: their counts, f64 [k]; the latest place adds half a count, so that its token wins ties.
    """

    earlier: NDArray[np.int64]
    here: NDArray[np.int64]
    length: int
    tokens: Ids
    weights: NDArray[np.float64]

    @property
    def likeliest(self) -> int:
        """The token with the highest count."""
        return int(self.tokens[self.weights.argmax()])


class Recall:
    """Predictor of the next tokens of one text at a time. Not thread-safe."""

    def __init__(self) -> None:
        self._earlier = EMPTY_SNAPSHOT
        self._text = np.empty(1024, np.uint32)  # committed tokens, then the path's tokens
        self._end = 0  # number of committed tokens
        self._path: list[int] = []
        # predictions after the committed tokens, and after each token of the path
        self._echoes: list[Echo | None] = [None]
        self._odds = AcceptanceEstimator(REPEAT_PRIOR)
        self._odds_by_length: dict[int, float] = {}  # match length → acceptance

    def set_corpus(self, earlier: CorpusSnapshot) -> None:
        """Use these earlier texts from now on."""
        self._earlier = earlier
        self._forget(self._end)

    def set_estimator(self, odds: AcceptanceEstimator) -> None:
        """Use this acceptance estimator from now on, and update it."""
        self._odds = odds
        self._odds_by_length.clear()

    def update(self, committed: Ids) -> None:
        """Follow the committed tokens u32 [n]; usually the text has only grown at its end."""
        known = common_prefix(self._text[: self._end], committed)
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
        """Set the number of committed tokens, drop all predictions, and search for matches."""
        self._end = end
        self._path.clear()
        self._echoes = [self._search(end)]

    def _commit(self, token: int) -> None:
        """Learn from the next committed token, and advance the places where it follows."""
        echo = self._echoes[0]
        if echo is not None:
            self._odds.update(min(echo.length, _LENGTHS), echo.likeliest == token)
            self._odds_by_length.clear()
        if self._path and self._path[0] == token:  # the draft was right: later echoes stay valid
            del self._path[0], self._echoes[0]
            self._end += 1
            return
        self._path.clear()
        self._text[self._end] = token
        self._end += 1
        self._echoes = [self._extend(echo, token, self._end)]

    def predict(self, path: Sequence[int]) -> Echo | None:
        """Return the prediction after the committed tokens and a path; None without a match."""
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
        """Return the probability in (0, 1) that the echo's likeliest token follows."""
        length = min(echo.length, _LENGTHS)
        if length not in self._odds_by_length:
            self._odds_by_length[length] = self._odds.estimate(length)
        return self._odds_by_length[length]

    # Places

    def _reserve(self, length: int) -> None:
        """Make room for ``length`` tokens."""
        if length > len(self._text):
            self._text = np.concatenate([self._text, np.empty(length, np.uint32)])

    def _extend(self, echo: Echo | None, token: int, end: int) -> Echo | None:
        """Extend the places of a match by ``token``, or search again if ``token`` follows none.

        ``token`` is the last of the first ``end`` tokens of the text.
        """
        # search again after a match of one token: that search kept fewer places
        if echo is not None and echo.length > 1:
            earlier = _advance(self._earlier.ids, echo.earlier, token)
            here = _advance(self._text, echo.here, token)
            if extended := self._echo(earlier, here, echo.length + 1, end):
                return extended
        return self._search(end)

    def _search(self, end: int) -> Echo | None:
        """Find the places with the longest match for the text's first ``end`` tokens."""
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
        """Create the echo of these places; None if there is no token at any of them."""
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


def _advance(ids: Ids, starts: NDArray[np.int64], token: int) -> NDArray[np.int64]:
    """Return the next place after each of ``starts`` [m] that has ``token``; i64 [k]."""
    if not len(starts):
        return _NOWHERE
    places: NDArray[np.int64] = starts[ids.take(starts) == token] + 1
    return places


def _count_tokens(following: Ids) -> tuple[Ids, NDArray[np.float64]]:
    """Return the distinct tokens and their counts; the last token adds half a count."""
    last = following[-1:]
    if len(following) == 1 or (following == last).all():
        return last, np.ones(1)
    tokens, counts = np.unique(following, return_counts=True)
    return tokens, counts + 0.5 * (tokens == last)
