"""Log-probabilities of a generation's tokens and of its prompt, for devices that request them.

In:  each pass's logits (after logits options, in answers) and its decision. Out: frames that are
     sent with the tokens. The entry of a token that the device samples itself (`dssd`) is sent with
     the next verdict, those of the prompt with the first tokens.
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
    """Entries of one generation. most: likeliest tokens per entry. start: first position."""

    def __init__(self, most: int, start: int) -> None:
        self._most, self._start = most, start
        self._committed = bytearray()  # entries, from ``start`` on
        self._latest = np.zeros(0, entry_type(most))  # entries of the last decision
        self._sampled: Floats | None = None  # row that the device samples a pending token from
        # until a late decision: entries of each node, and of each row's likeliest token
        self._nodes = self._best = self._latest

    def record(self, draft: Draft, logits: Floats, decision: Decision | StatesNeeded) -> None:
        """Record a window's logits [n + 1, V] and decision."""
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
        """Record the late decision on a window, which is a chain."""
        accepted = decision.accepted
        self._latest = np.concatenate([self._nodes[:accepted], self._best[accepted : accepted + 1]])

    def record_stream(self, drafts: Sequence[int], logits: Floats, decision: Decision) -> None:
        """Record a stream's pass: logits [n + 1, V] of its drafts and the next token."""
        self.record(Draft(np.array(drafts, np.uint32)), logits, decision)

    def commit(self, count: int | None = None) -> Buffer:
        """Commit the last decision's first ``count`` entries, or all; returns their frame."""
        frame = self._latest[:count].tobytes()
        self._committed += frame  # grows in place
        return frame

    def frame_of(self, start: int, count: int) -> Buffer:
        """Return the frame of ``count`` committed tokens from a position on, for a retry."""
        size = entry_type(self._most).itemsize
        begin = (start - self._start) * size
        return bytes(memoryview(self._committed)[begin : begin + count * size])


def expect_sendable(length: int, most: int, most_bytes: int) -> None:
    """Raise `UnsupportedError` if the entries of ``length`` tokens exceed a message."""
    size = (length - 1) * entry_type(most).itemsize
    if size > most_bytes:
        raise UnsupportedError(
            f"The log-probabilities of {length} tokens take {size:,} bytes; {most_bytes:,} is the "
            "most: ask for fewer of the likeliest tokens."
        )


class PromptLogprobs:
    """Entries of a prompt ``ids`` [n] without its first token, before logits options.

    start: n; the reply that starts there carries them. Entries of failed passes stay unknown.
    """

    def __init__(self, ids: Ids, most: int) -> None:
        self.start = len(ids)
        self.sent_to = b""  # the connection that took their frame
        self.ids, self._most = ids.copy(), most
        # pages of entries that are not computed yet use no memory
        self._entries = np.zeros(len(ids) - 1, entry_type(most))
        self._computed = np.zeros(len(ids) - 1, np.bool_)

    def record(self, end: int, logits: Floats) -> None:
        """Record logits [rows, V] of the tokens before ``end``, each scoring the next token.

        Requires end < n.
        """
        begin = end - len(logits)
        following = self.ids[begin + 1 : end + 1].tolist()
        self._entries[begin:end] = make_entries(logits, following, self._most)
        self._computed[begin:end] = True

    def covers(self, begin: int, end: int) -> bool:
        """Whether the entries that the tokens from ``begin`` to ``end`` score are computed."""
        return bool(self._computed[begin:end].all())

    @property
    def frame(self) -> Buffer:
        """The frame of all entries. It is a view and must not be changed."""
        if not self._computed.all():
            self._entries["own"][~self._computed] = np.nan  # as of `unknown` ones
            self._entries["values"][~self._computed] = -np.inf
            self._computed[:] = True
        return self._entries.view(np.uint8).data
