"""Encode log-probabilities: of committed tokens, and of the likeliest tokens at their positions.

In:  rows of logits (processed, without temperature and truncation), and one token for each row.
Out: a frame of entries. Decoding returns `TokenLogprob`s. An entry is the token's log-probability
     f32, then ids u32 [k] and log-probabilities f32 [k] of the likeliest tokens in descending
     order. NaN: unknown. −∞ among the likeliest: there are fewer than k.
"""

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError
from pilotfish.speculation.distributions import Floats
from pilotfish.speculation.truncation import likeliest
from pilotfish.wire.messages import Buffer

Entries = NDArray[np.void]
Rows = Floats | Sequence[Floats]


class TokenLogprob(NamedTuple):
    """A token's ln p at temperature 1, with bias, penalties and constraint, without truncation.

    top: the likeliest tokens and their ln p, in descending order.
    """

    logprob: float
    top: Sequence[tuple[int, float]]


@cache
def entry_type(most: int) -> np.dtype[Any]:
    """Return the layout of an entry with the ``most`` likeliest tokens."""
    return np.dtype([("own", "<f4"), ("ids", "<u4", (most,)), ("values", "<f4", (most,))])


def unknown_entries(count: int, most: int) -> Entries:
    """Return ``count`` entries with all values unknown."""
    table = np.zeros(count, entry_type(most))
    table["own"], table["values"] = np.nan, -np.inf
    return table


def make_entries(logits: Rows, tokens: Sequence[int], most: int) -> Entries:
    """Compute the entries of ``tokens`` [n] from rows of logits [n, V]."""
    return row_logprobs(logits, most).select(tokens, logits)


class RowLogprobs(NamedTuple):
    """Entries [n] that lack their tokens' own values. sums: f64 [n], ln Σ exp of each row."""

    entries: Entries
    sums: NDArray[np.float64]

    def select(self, tokens: Sequence[int], logits: Rows) -> Entries:
        """Return the entries of ``tokens`` [m], m ≤ n, from the first rows of the same logits."""
        table: Entries = self.entries[: len(tokens)].copy()
        logits_of_tokens = [row[token] for token, row in zip(tokens, logits, strict=False)]
        table["own"] = np.array(logits_of_tokens, np.float64) - self.sums[: len(tokens)]
        return table


def row_logprobs(logits: Rows, most: int) -> RowLogprobs:
    """Compute the sums, and the ``most`` likeliest tokens, of rows of logits [n, V]."""
    table, sums = unknown_entries(len(logits), most), np.zeros(len(logits))
    scratch = np.empty_like(logits[0]) if len(logits) else None
    for at, row in enumerate(logits):
        ids = likeliest(row, most)
        highest = row[ids[0]] if len(ids) else row.max()
        weights = np.exp(np.subtract(row, highest, out=scratch), out=scratch)
        # numpy's pairwise sum in float32 is exact to 1e-6 over 150,000 tokens
        sums[at] = float(highest) + math.log(weights.sum())
        table["ids"][at, : len(ids)] = ids
        table["values"][at, : len(ids)] = row[ids].astype(np.float64) - sums[at]
    return RowLogprobs(table, sums)


def decode_logprobs(
    frame: Buffer, most: int, vocab_size: int, counts: Sequence[int]
) -> list[TokenLogprob | None]:
    """Decode a frame; None: an unknown entry. counts: the allowed numbers of entries.

    Raises `MalformedError` for a wrong length or impossible values, `TokenOutOfRangeError` for an
    id ≥ V.
    """
    kind = entry_type(most)
    if len(frame) not in [count * kind.itemsize for count in counts]:
        raise MalformedError(f"A frame of {len(frame)} bytes does not hold the requested logprobs.")
    table = np.frombuffer(frame, kind)
    values = table["values"]
    if (table["own"] > 0).any() or np.isnan(values).any() or (values > 0).any():
        raise MalformedError("The edge's logprobs are not logarithms of probabilities.")
    if table["ids"].size and int(table["ids"].max()) >= vocab_size:
        raise TokenOutOfRangeError(
            f"A logprob belongs to no token: the vocabulary has {vocab_size} tokens."
        )
    return [_decode_entry(entry) for entry in table]


def _decode_entry(entry: np.void) -> TokenLogprob | None:
    if np.isnan(entry["own"]):
        return None
    pairs = zip(entry["ids"].tolist(), entry["values"].tolist(), strict=True)
    return TokenLogprob(float(entry["own"]), [pair for pair in pairs if pair[1] != -np.inf])
