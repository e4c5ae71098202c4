"""Log-probabilities of a generation's tokens and of its prompt, for devices that request them.

In:  each pass's logits (in an answer, after the logits options) and decision.
Out: frames of entries, which are sent with the tokens. An entry has a token's log-probability, and
     the likeliest tokens with their log-probabilities. If the device samples a token itself
     (protocol `dssd`), its entry is sent with the next verdict. The prompt's entries are sent with
     the first tokens.
"""

from collections.abc import Sequence

import numpy as np

from pilotfish.base.errors import UnsupportedError
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.codecs.logprobs import entry_type, make_entries, row_logprobs
from pilotfish.wire.messages import Buffer
from pilotfish.wire.protocols import Decision, Draft, StatesNeeded
from pilotfish.wire.protocols.protocol import Ids


class Logprobs:
    """Entries of one generation.

    most: number of likeliest tokens in an entry. start: position of the first entry.
    """

    def __init__(self, most: int, start: int) -> None:
        self._most, self._start = most, start
        self._committed = bytearray()  # entries of committed tokens, from ``start`` on
        self._latest = np.zeros(0, entry_type(most))  # entries of the last decision
        self._sampled: Floats | None = None  # logits [V] of the token that the device samples
        # while a decision waits for states: entries of each draft, and of each row's choice
        self._nodes = self._best = self._latest

    def record(self, draft: Draft, logits: Floats, decision: Decision | StatesNeeded) -> None:
        """Record a window's decision and logits [n + 1, V] (root and n drafts)."""
        ids = draft.ids.tolist()
        pending = np.zeros(0, entry_type(self._most))
        if self._sampled is not None and len(draft.pending):
            pending = make_entries(self._sampled[None], draft.pending.tolist(), self._most)
        self._sampled = None
        if isinstance(decision, StatesNeeded):
            rows_by_token = row_logprobs(logits, self._most)
            self._nodes = rows_by_token.select(ids, logits)
            self._best = rows_by_token.select(decision.choices.tolist(), logits)
            return
        path = [*draft.path(decision.accepted)]
        rows, tokens = [0, *path], [ids[node - 1] for node in path]
        if decision.token is None:
            self._sampled = logits[rows.pop()].copy()
        else:
            tokens.append(decision.token)
        latest = make_entries([logits[row] for row in rows], tokens, self._most)
        self._latest = np.concatenate([pending, latest])

    def record_decision(self, decision: Decision) -> None:
        """Record a decision that needed states from the device; its window is a chain."""
        accepted = decision.accepted
        self._latest = np.concatenate([self._nodes[:accepted], self._best[accepted : accepted + 1]])

    def record_stream(self, drafts: Sequence[int], logits: Floats, decision: Decision) -> None:
        """Record a stream's pass: its decision, and logits [n + 1, V] of n drafts and one token."""
        self.record(Draft(np.array(drafts, np.uint32)), logits, decision)

    def commit(self, count: int | None = None) -> Buffer:
        """Commit the last decision's first ``count`` entries (None: all); return their frame."""
        frame = self._latest[:count].tobytes()
        self._committed += frame  # the bytearray grows in place
        return frame

    def frame_of(self, start: int, count: int) -> Buffer:
        """Return the frame of ``count`` committed tokens from position ``start``, for a retry."""
        size = entry_type(self._most).itemsize
        begin = (start - self._start) * size
        return bytes(memoryview(self._committed)[begin : begin + count * size])


def expect_sendable(length: int, most: int, most_bytes: int) -> None:
    """Raise `UnsupportedError` if the entries of a prompt exceed ``most_bytes``.

    length: tokens of the prompt. most: number of likeliest tokens in an entry.
    """
    size = (length - 1) * entry_type(most).itemsize
    if size > most_bytes:
        raise UnsupportedError(
            f"The log-probabilities of {length} tokens take {size:,} bytes, but at most "
            f"{most_bytes:,} are allowed: ask for fewer of the likeliest tokens."
        )


class PromptLogprobs:
    """Entries of a prompt ``ids`` [n] for all tokens after the first, without logits options.

    start: n; the entries are sent with the reply that starts at this position. If a pass fails, its
    entries stay unknown.
    """

    def __init__(self, ids: Ids, most: int) -> None:
        self.start = len(ids)
        self.sent_to = b""  # connection over which the entries were sent
        self.ids, self._most = ids.copy(), most
        # np.zeros: pages without computed entries use no memory
        self._entries = np.zeros(len(ids) - 1, entry_type(most))
        self._computed = np.zeros(len(ids) - 1, np.bool_)

    def record(self, end: int, logits: Floats) -> None:
        """Record the logits [rows, V] after each of the ``rows`` tokens before ``end`` < n.

        Each row yields the entry of the next token.
        """
        begin = end - len(logits)
        following = self.ids[begin + 1 : end + 1].tolist()
        self._entries[begin:end] = make_entries(logits, following, self._most)
        self._computed[begin:end] = True

    def covers(self, begin: int, end: int) -> bool:
        """Return whether the entries from index ``begin`` to ``end`` have been computed."""
        return bool(self._computed[begin:end].all())

    @property
    def frame(self) -> Buffer:
        """Frame of all entries: a view, which must not be changed."""
        if not self._computed.all():
            self._entries["own"][~self._computed] = np.nan  # NaN marks an unknown entry
            self._entries["values"][~self._computed] = -np.inf
            self._computed[:] = True
        return self._entries.view(np.uint8).data
