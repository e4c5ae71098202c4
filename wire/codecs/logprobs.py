"""Log-probabilities of committed tokens, and of the likeliest ones beside each.

In:  rows of logits, shaped but for temperature and truncation, and a token of each. Out: entries, a
     frame of them, and back. An entry is f32 of the token, then u32 [k] and f32 [k] of the
     likeliest, the likeliest first. NaN: not known. −∞ among the likeliest: there are fewer.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.truncation import largest
from pilotfish.wire.errors import MalformedError, TokenOutOfRangeError
from pilotfish.wire.messages import Buffer

Entries = NDArray[np.void]


class TokenLogprob(NamedTuple):
    """Of a token: ln p at temperature 1, under bias, penalties and constraint, untruncated.

    top: the likeliest tokens with theirs, the likeliest first.
    """

    logprob: float
    top: Sequence[tuple[int, float]]


@cache
def entry_type(most: int) -> np.dtype[Any]:
    """The layout of an entry with the ``most`` likeliest tokens."""
    return np.dtype([("own", "<f4"), ("ids", "<u4", (most,)), ("values", "<f4", (most,))])


def unknown(count: int, most: int) -> Entries:
    """Entries of which nothing is known."""
    found = np.zeros(count, entry_type(most))
    found["own"], found["values"] = np.nan, -np.inf
    return found


def entries(logits: Floats, tokens: Sequence[int], most: int) -> Entries:
    """Entries of ``tokens`` [n] by rows of logits [n, V]."""
    found = unknown(len(tokens), most)
    for entry, row, token in zip(found, logits, tokens, strict=True):
        # in float64, as sums over a vocabulary should be
        shifted = row.astype(np.float64) - float(row.max())
        shifted -= np.log(np.exp(shifted).sum())
        entry["own"] = shifted[token]
        if most:
            ids = largest(row, most)
            ids = ids[np.argsort(-row[ids], kind="stable")[:most]]
            entry["ids"][: len(ids)], entry["values"][: len(ids)] = ids, shifted[ids]
    return found


def decode_logprobs(
    frame: Buffer, most: int, vocab_size: int, counts: Sequence[int]
) -> list[TokenLogprob | None]:
    """The entries of a frame, which has one of these ``counts``; None for what is not known.

    `MalformedError` for another length or numbers that cannot be, `TokenOutOfRangeError` for an id
    ≥ V.
    """
    kind = entry_type(most)
    if len(frame) not in [count * kind.itemsize for count in counts]:
        raise MalformedError(f"A frame of {len(frame)} bytes has not the logprobs asked for.")
    found = np.frombuffer(frame, kind)
    values = found["values"]
    if (found["own"] > 0).any() or np.isnan(values).any() or (values > 0).any():
        raise MalformedError("The edge's logprobs are no logarithms of probabilities.")
    if found["ids"].size and int(found["ids"].max()) >= vocab_size:
        raise TokenOutOfRangeError(f"A logprob is of a token that is not among {vocab_size}.")
    return [_told(entry) for entry in found]


def _told(entry: np.void) -> TokenLogprob | None:
    if np.isnan(entry["own"]):
        return None
    pairs = zip(entry["ids"].tolist(), entry["values"].tolist(), strict=True)
    return TokenLogprob(float(entry["own"]), [pair for pair in pairs if pair[1] != -np.inf])
