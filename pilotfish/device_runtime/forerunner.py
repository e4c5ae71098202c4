"""Draft ahead of a stream: the device's half of `ahead`, a step at a time.

In:  the target's tokens as they come. Out: hints.

One thread does it all: while no token has arrived, a step makes one pass of the drafter, or reads a
piece of the prompt, so that what arrives waits for one pass at most. Drafting goes on until the
odds that the last draft comes true are low, and begins again where a token differs from its draft.
"""

import math
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from pilotfish.device_runtime.drafting import Drafter
from pilotfish.device_runtime.edge_session import EdgeSession
from pilotfish.device_runtime.plan import Plan
from pilotfish.speculation.acceptance import AcceptanceEstimator
from pilotfish.speculation.ahead import FLOOR
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.wire.protocols.ahead import DEVICE, DraftAhead, DraftComparison, draft_with_margin
from pilotfish.wire.protocols.protocol import Ids

# Hints are sent no more often than so, in passes: at first, and where so many drafts are told.
_EARLY_INTERVAL, _LATE_INTERVAL, _LATE_DRAFTS = 0.25, 1.0, 6
_MAX_HINTS = 4  # hints from one message of tokens to the next: a link that stalls is not filled up
_MAX_MISSED = 16  # passes without our drafts, though these were right: were hints lost?
_NS = 1e-9


class DraftStats(NamedTuple):
    """What was done from one message of tokens to the next.

    forced: which of these tokens a grammar forced, of those drafted here; numbered from 0.
    """

    drafts: int
    draft_s: float
    sent_bytes: int
    forced: tuple[int, ...] = ()


class Forerunner:
    """Drafts for one generation. odds: of the pair, which it also teaches."""

    def __init__(
        self,
        drafter: Drafter,
        edge: EdgeSession,
        plan: Plan,
        estimator: AcceptanceEstimator,
        committed: Ids,
        logits_processor: LogitsProcessor | None,
        *,
        last: int,
        ends: Collection[int],
    ) -> None:
        """committed: u32 [n]; last: the position of the answer's last token.

        shaper: of logits over the target's tokens.
        """
        self._drafter, self._edge, self._plan = drafter, edge, plan
        self._estimator, self._logits_processor = estimator, logits_processor
        self._last, self._ends = last, ends
        self._ahead = DraftAhead()
        self._ahead.start(committed)
        self._room = drafter.remaining_context(committed)
        self._incarnation = edge.incarnation
        self._forced: list[int] = []  # positions of drafts that a grammar forced
        self._stuck = False  # the drafter cannot say what may follow
        self._pass_s = self._hint_sent_s = self._draft_s = 0.0
        self._drafted = self._sent_bytes = self._hints = self._missed = 0

    def step(self) -> bool:
        """Make a pass of the drafter, or send what is drafted; returns whether to go on."""
        lead = self._ahead
        if self._done():
            self._send_hint()
            return False
        started_s = time.monotonic()
        committed, drafts = lead.text.ids[: lead.committed], lead.drafts
        if self._drafter.catch_up(committed, drafts):
            return True
        found = self._next_draft(committed, drafts)
        if found is None:
            self._stuck = True
            self._send_hint()
            return False
        lead.append(*found)
        now_s = time.monotonic()
        self._drafted += 1
        self._draft_s += now_s - started_s
        told = len(lead) - lead.unsent
        often = _LATE_INTERVAL if told >= _LATE_DRAFTS else _EARLY_INTERVAL
        if not told or now_s - self._hint_sent_s >= often * self._pass_s:
            self._send_hint()
        return True

    def _next_draft(self, committed: Ids, drafts: Ids) -> tuple[int, float, float | None] | None:
        """Return the next draft, its odds and its margin; None if the drafter knows of none.

        margin: by which the odds were told; None if the drafter told them itself.
        """
        shaper, position = self._logits_processor, self._ahead.committed + len(drafts)
        if shaper is not None:
            token = shaper.forced_token(committed, drafts.tolist())
            if token is not None and self._drafter.bridge.can_draft(token):
                self._forced.append(position)
                return token, self._estimator.estimate(math.inf), math.inf
        level = self._drafter.predict_next(committed, drafts)
        if level is None:
            return None
        if shaper is not None:
            dead = shaper.process(level.logits, committed, [drafts.tolist()])
            if dead or np.isneginf(level.logits.max()):
                return None
        token, margin = draft_with_margin(level.logits[0], self._plan.drafting, position)
        if level.acceptance is None:
            return token, self._estimator.estimate(margin), margin
        return token, level.acceptance[0], None

    def _done(self) -> bool:
        """Whether a further draft is not worth a pass, or there is no room for it."""
        lead = self._ahead
        most = min(self._edge.limits.window, self._room - 1, self._last - lead.committed)
        if len(lead) >= most or self._stuck:
            return True
        return len(lead) > 0 and (
            lead.joint_acceptance < FLOOR or int(lead.drafts[-1]) in self._ends
        )

    def _send_hint(self) -> None:
        """Send the drafts that have not been sent; if that fails, they are told with the next."""
        if self._incarnation != self._edge.incarnation:
            self._incarnation = self._edge.incarnation
            self._ahead.resend_all()
        if self._ahead.unsent <= 0 or self._hints >= _MAX_HINTS:
            return
        sent = self._edge.hint(*self._ahead.encode_hint(self._drafter.bridge.vocab_size))
        if sent is None:
            self._ahead.resend_all()
            return
        self._hints += 1
        self._sent_bytes += sent
        self._hint_sent_s = time.monotonic()

    def record_tokens(
        self, ids: Sequence[int], source: str, pass_s: float
    ) -> tuple[DraftComparison, DraftStats]:
        """Take in the next committed tokens; returns how the drafts did, and the leg until now.

        source, pass_s: of the drafts in their pass, and its seconds.
        """
        begin = self._ahead.committed
        met = self._ahead.compare(ids)
        self._stuck = False
        self._missed = 0 if source == DEVICE or not met.agreed else self._missed + 1
        if self._missed >= _MAX_MISSED:
            self._missed = 0
            self._ahead.resend_all()
        for at, margin in enumerate(met.margins):
            if margin is not None:
                self._estimator.update(margin, at < met.agreed)
        self._room = self._drafter.remaining_context(self._ahead.text.ids[: self._ahead.committed])
        self._pass_s = pass_s
        forced = self._take_forced(begin, met.agreed) if self._forced else ()
        leg = DraftStats(self._drafted, self._draft_s, self._sent_bytes, forced)
        self._drafted, self._draft_s, self._sent_bytes, self._hints = 0, 0.0, 0, 0
        return met, leg

    def _take_forced(self, begin: int, agreed: int) -> tuple[int, ...]:
        """Which of the first ``agreed`` tokens from ``begin`` on were forced; forgets the past."""
        found = tuple(at - begin for at in self._forced if at < begin + agreed)
        ahead = range(self._ahead.committed, len(self._ahead.text))
        self._forced = [at for at in self._forced if at in ahead]
        return found
