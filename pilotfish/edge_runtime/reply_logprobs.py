"""The log-probabilities of a generation's tokens, and of its prompt, for a device that asked.

In:  of each pass the logits, of answers as they were shaped, and what was decided by them. Out: the
     frames that go with the tokens. Those of a token that the device samples itself (`dssd`) go
     with the next verdict, those of the prompt with the first tokens.
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
    """Of one generation. most: likeliest tokens of each entry; start: its first position."""

    def __init__(self, most: int, start: int) -> None:
        self._most, self._start = most, start
        self._committed = bytearray()  # entries, from ``start`` on
        self._latest = np.zeros(0, entry_type(most))  # of the last decision
        self._sampled: Floats | None = None  # the row that a pending token is sampled by
        # of each node, and of the likeliest token behind each row, until a window is decided on
        self._nodes = self._best = self._latest

    def record(self, draft: Draft, logits: Floats, decision: Decision | StatesNeeded) -> None:
        """Take in the logits [n + 1, V] of a window, and what came of it."""
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
        """Take in the late decision on a window, a chain."""
        accepted = decision.accepted
        self._latest = np.concatenate([self._nodes[:accepted], self._best[accepted : accepted + 1]])

    def record_stream(self, drafts: Sequence[int], logits: Floats, decision: Decision) -> None:
        """Take in a pass of a stream: logits [n + 1, V] behind the drafts."""
        self.record(Draft(np.array(drafts, np.uint32)), logits, decision)

    def commit(self, count: int | None = None) -> Buffer:
        """Keep the last decision's, the first ``count`` if not all; returns their frame."""
        frame = self._latest[:count].tobytes()
        self._committed += frame  # which grows in place
        return frame

    def frame_of(self, start: int, count: int) -> Buffer:
        """Return the frame of committed tokens once more, from this position on."""
        size = entry_type(self._most).itemsize
        begin = (start - self._start) * size
        return bytes(memoryview(self._committed)[begin : begin + count * size])


def expect_sendable(length: int, most: int, most_bytes: int) -> None:
    """Raise `UnsupportedError` if those of so many tokens are too large for a message."""
    size = (length - 1) * entry_type(most).itemsize
    if size > most_bytes:
        raise UnsupportedError(
            f"The log-probabilities of {length} tokens take {size:,} bytes; {most_bytes:,} is the "
            "most: ask for fewer of the likeliest tokens."
        )


class PromptLogprobs:
    """Of the tokens ``ids`` [n] that a generation begins with, but the first, unshaped.

    start: n; the reply that begins there tells them. Those that failed to be computed are unknown.
    """

    def __init__(self, ids: Ids, most: int) -> None:
        self.start = len(ids)
        self.sent_to = b""  # the connection that took their frame
        self.ids, self._most = ids.copy(), most
        # of what no pass has told yet, pages that take no memory yet, either
        self._entries = np.zeros(len(ids) - 1, entry_type(most))
        self._computed = np.zeros(len(ids) - 1, np.bool_)

    def record(self, end: int, logits: Floats) -> None:
        """Take in the logits [rows, V] of the tokens before ``end``, each of which tells the next.

        Of the last of them, too, so that end < n.
        """
        begin = end - len(logits)
        following = self.ids[begin + 1 : end + 1].tolist()
        self._entries[begin:end] = make_entries(logits, following, self._most)
        self._computed[begin:end] = True

    def covers(self, begin: int, end: int) -> bool:
        """Whether passes have told all of the tokens before these positions."""
        return bool(self._computed[begin:end].all())

    @property
    def frame(self) -> Buffer:
        """Their frame, which must not be changed: it is no copy."""
        if not self._computed.all():
            self._entries["own"][~self._computed] = np.nan  # as of `unknown` ones
            self._entries["values"][~self._computed] = -np.inf
            self._computed[:] = True
        return self._entries.view(np.uint8).data
