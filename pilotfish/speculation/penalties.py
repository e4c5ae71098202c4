"""Apply vLLM's three penalties (`LogitsOptions`) to rows of logits that continue one text.

In:  logits [n, V], the text u32 [m], and for each row its path, the tokens after the text.
Out: the same rows, changed.

The text's tokens are counted once, as the text grows. The text has the same effect on all rows; a
few operations over each row apply it in place. The few tokens of a row's path are then recomputed
from their original logits. So a window takes O(n V) time for any length of the text, and the memory
of one more row.
"""

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats

Ids = NDArray[np.uint32]
Places = NDArray[np.intp]

_MANY = 16  # an effect on more than 1/16 of the vocabulary is applied to whole rows
_AT_ONCE = 4096  # number of tokens from which one count over the vocabulary is cheaper


class _Effect(NamedTuple):
    """Effect of one text on a row.

    at: the affected tokens, i64 [k]; None: all tokens, k = V. kind: the row's dtype. factor: factor
    of the repetition penalty, a scalar or [k]; None: no such penalty. subtracted: arrays [k] to
    subtract one after the other.
    """

    at: Places | None
    kind: np.dtype[np.floating]
    factor: Floats | np.floating | None
    subtracted: Sequence[Floats]


class Penalties:
    """Penalties of one generation. Not thread-safe.

    prompt_length: number of tokens before the answer. repetition: a factor; 1: no penalty.
    frequency, presence: numbers to subtract; 0: no penalty. The text may grow, shrink or change
    between calls: each call compares it with the last text.
    """

    def __init__(
        self, *, repetition: float, frequency: float, presence: float, prompt_length: int
    ) -> None:
        self._repetition, self._frequency, self._presence = repetition, frequency, presence
        self._prompt_length = prompt_length
        self._room: Ids = np.empty(0, np.uint32)
        self._length = 0  # length of the counted text, at the start of ``_room``
        # for each token [V]: occurrences in the answer; whether it occurs in the prompt
        self._counts: NDArray[np.int32] = np.zeros(0, np.int32)
        self._prompt: NDArray[np.bool_] = np.zeros(0, np.bool_)
        self._text_effect: _Effect | None = None  # None: must be computed

    def apply(self, logits: Floats, text: Ids, paths: Sequence[Sequence[int]]) -> None:
        """Apply the penalties of the text and of each row's path to ``logits`` [n, V], in place."""
        self._update(text, logits.shape[1])
        effect, kind = self._text_effect, logits.dtype
        if effect is None or effect.kind != kind:
            self._text_effect = effect = self._effect_of_text(kind)
        rows, tokens, times = _path_tokens(paths)
        path_logits = logits[rows, tokens]
        scratch = np.empty(logits.shape[1] if effect.at is None else len(effect.at), kind)
        for row in logits:
            if effect.at is None:
                self._change(row, scratch, effect)
            else:
                values = row[effect.at]
                self._change(values, scratch, effect)
                row[effect.at] = values
        counts = self._counts[tokens] + times
        self._change(
            path_logits, np.empty_like(path_logits), self._effect_of_counts(None, counts, kind)
        )
        logits[rows, tokens] = path_logits

    def _change(self, values: Floats, scratch: Floats, effect: _Effect) -> None:
        if effect.factor is not None:
            np.divide(values, effect.factor, out=scratch)
            np.multiply(values, effect.factor, out=values)
            # A logit above 0 becomes the quotient, any other the product. With a factor of at least
            # 1, this is the smaller of the two.
            chosen = np.minimum if self._repetition >= 1.0 else np.maximum
            chosen(values, scratch, out=values)
        for each in effect.subtracted:
            values -= each

    # Effects

    def _effect_of_text(self, kind: np.dtype[np.floating]) -> _Effect:
        """Compute the effect of the counted text on a row of this dtype; O(V)."""
        occurs = self._counts > 0
        if self._repetition != 1.0:
            occurs |= self._prompt
        if np.count_nonzero(occurs) * _MANY <= len(occurs):
            at = occurs.nonzero()[0]
            return self._effect_of_counts(at, self._counts[at], kind)
        effect = self._effect_of_counts(None, self._counts, kind)
        if effect.factor is None:
            return effect
        return effect._replace(factor=np.where(occurs, effect.factor, kind.type(1.0)))

    def _effect_of_counts(
        self, at: Places | None, counts: NDArray[np.integer], kind: np.dtype[np.floating]
    ) -> _Effect:
        """Compute the effect on tokens that occur ``counts`` [k] times in the answer."""
        subtracted: list[Floats] = []
        if self._frequency:
            subtracted.append(counts.astype(kind) * kind.type(self._frequency))
        if self._presence:
            subtracted.append((counts > 0) * kind.type(self._presence))
        factor = None if self._repetition == 1.0 else kind.type(self._repetition)
        return _Effect(at, kind, factor, subtracted)

    # Counting

    def _update(self, text: Ids, vocab: int) -> None:
        """Update the counts to this text."""
        held = self._room[: self._length]
        if len(self._counts) != vocab:
            self._forget(vocab)
        elif not np.array_equal(text[: len(held)], held):
            self._cut(_common_length(text, held))
        if self._length == len(text):
            return
        begin, prompt_length = self._length, self._prompt_length
        self._append(text)
        if begin < prompt_length and self._repetition != 1.0:
            self._prompt[text[begin:prompt_length]] = True
        self._count(text[max(begin, prompt_length) :])

    def _append(self, text: Ids) -> None:
        if len(text) > len(self._room):
            room = np.empty(max(len(text), 2 * self._length), np.uint32)
            room[: self._length] = self._room[: self._length]
            self._room = room
        self._room[self._length : len(text)] = text[self._length :]
        self._length = len(text)
        self._text_effect = None

    def _cut(self, length: int) -> None:
        """Drop the text after its first ``length`` tokens."""
        if length < min(self._prompt_length, self._length):
            self._forget(len(self._counts))
            return
        self._count(self._room[max(length, self._prompt_length) : self._length], -1)
        self._length, self._text_effect = length, None

    def _forget(self, vocab: int) -> None:
        self._length, self._text_effect = 0, None
        self._counts = np.zeros(vocab, np.int32)
        self._prompt = np.zeros(vocab if self._repetition != 1.0 else 0, np.bool_)

    def _count(self, ids: Ids, times: int = 1) -> None:
        if len(ids) < _AT_ONCE:
            np.add.at(self._counts, ids, times)
        else:
            self._counts += (times * np.bincount(ids, minlength=len(self._counts))).astype(np.int32)


def _common_length(text: Ids, held: Ids) -> int:
    """Return the length of the common prefix of two texts."""
    shorter = min(len(text), len(held))
    differing = (text[:shorter] != held[:shorter]).nonzero()[0]
    return int(differing[0]) if len(differing) else shorter


def _path_tokens(paths: Sequence[Sequence[int]]) -> tuple[Places, Places, Places]:
    """Return the paths' distinct (row, token) pairs: rows, tokens and occurrences, [k] each."""
    lengths = [len(path) for path in paths]
    tokens = np.fromiter(chain.from_iterable(paths), np.int64, sum(lengths))
    rows = np.arange(len(paths)).repeat(lengths)
    places, times = np.unique((rows << 32) + tokens, return_counts=True)
    return places >> 32, places & 0xFFFF_FFFF, times
