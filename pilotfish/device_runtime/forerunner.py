"""Draft ahead of a stream, step by step: the device's half of protocol `ahead`.

In:  the target's tokens as they arrive. Out: hints.

One thread drafts and receives: while no token has arrived, a step runs one pass of the drafter or
reads a chunk of the prompt, so an arriving token waits for one pass at most. Drafting stops once
the last draft is unlikely to be accepted, and restarts where a token differs from its draft.
"""

import math
import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from pilotfish.device_runtime.edge_session import EdgeSession
from pilotfish.device_runtime.plan import Plan
from pilotfish.drafting.ahead import (
    NextDraft,
    PassAcceptance,
    learn_acceptance,
    next_drafts,
    wants_draft,
)
from pilotfish.drafting.window import Drafter
from pilotfish.speculation.ahead import FLOOR
from pilotfish.speculation.logits_options import LogitsProcessor
from pilotfish.speculation.pass_drafts import stream_drafts
from pilotfish.wire.protocols.ahead import DEVICE, DraftAhead, DraftComparison
from pilotfish.wire.protocols.protocol import Ids

# Minimum time between hints, in target passes: until `_LATE_DRAFTS` drafts are sent, and
# afterwards.
_EARLY_INTERVAL, _LATE_INTERVAL, _LATE_DRAFTS = 0.25, 1.0, 6
# Maximum hints between two messages of tokens: more would pile up on a stalled link.
_MAX_HINTS = 4
_MAX_MISSED = 16  # target passes that lack the device's right drafts, before it resends them
_NS = 1e-9
_INTERVAL_FADE = 0.9  # weight of older intervals between the target's tokens


class DraftStats(NamedTuple):
    """Work of the drafter between two messages of tokens.

    forced: indices of the new tokens that were drafted because a grammar forced them.
    """

    drafts: int
    draft_s: float
    sent_bytes: int
    forced: tuple[int, ...] = ()


class Forerunner:
    """Drafts ahead of the target, for one generation."""

    def __init__(
        self,
        drafter: Drafter,
        edge: EdgeSession,
        plan: Plan,
        acceptance: PassAcceptance,
        committed: Ids,
        logits_processor: LogitsProcessor | None,
        *,
        last: int,
        ends: Collection[int],
        rtt_s: float = 0.0,
    ) -> None:
        """Begin after the tokens ``committed``, u32 [n].

        acceptance: the pair's acceptance; the forerunner updates it. logits_processor: processes
        logits over the target's tokens. last: position of the answer's last token. ends: end
        tokens. rtt_s: the link's RTT; 0 if unknown.
        """
        self._drafter, self._edge, self._plan = drafter, edge, plan
        self._acceptance, self._logits_processor = acceptance, logits_processor
        self._last, self._ends, self._rtt_s = last, ends, rtt_s
        self._ahead = DraftAhead()
        self._ahead.start(committed)
        self._room = drafter.remaining_context(committed)
        self._incarnation = edge.incarnation
        self._forced: list[int] = []  # positions of the drafts that a grammar forced
        self._stuck = False  # the drafter has no prediction
        self._pass_s = self._hint_sent_s = self._draft_s = 0.0
        # mean seconds between messages of tokens, and the time of the last one; 0 if unknown
        self._interval_s = self._tokens_came_s = 0.0
        self._drafted = self._sent_bytes = self._hints = self._missed = 0

    def step(self) -> bool:
        """Run one pass of the drafter, or send its drafts; returns whether there is more to do."""
        ahead = self._ahead
        if self._is_done():
            self._send_hint()
            return False
        started_s = time.monotonic()
        committed, drafts = ahead.text.ids[: ahead.committed], ahead.drafts
        if self._drafter.catch_up(committed, drafts):
            return True
        made = self._next_drafts(committed, drafts)
        if not made:
            self._stuck = True
            self._send_hint()
            return False
        for draft in made:
            ahead.append(*draft)
        now_s = time.monotonic()
        self._drafted += len(made)
        self._draft_s += now_s - started_s
        sent = len(ahead) - ahead.unsent
        interval = _LATE_INTERVAL if sent >= _LATE_DRAFTS else _EARLY_INTERVAL
        if not sent or now_s - self._hint_sent_s >= interval * self._pass_s:
            self._send_hint()
        return True

    def _next_drafts(self, committed: Ids, drafts: Ids) -> Sequence[NextDraft]:
        """Return a pass's drafts, or one that a grammar forces; none without a prediction."""
        processor, position = self._logits_processor, self._ahead.committed + len(drafts)
        if processor is not None:
            token = processor.forced_token(committed, drafts.tolist())
            if token is not None and self._drafter.bridge.can_draft(token):
                self._forced.append(position)
                acceptance = self._acceptance.at(0).estimate(math.inf)
                return [NextDraft(token, acceptance, math.inf)]
        most = min(self._drafter.drafts_per_pass, self._most_drafts() - len(drafts))
        count = stream_drafts(
            self._acceptance.means(most),
            self._drafter.pass_times,
            target_s=self._interval_s or self._edge.token_s,
            rtt_s=self._rtt_s,
        )
        level = self._drafter.predict_next(committed, drafts, count)
        if level is None:
            return ()
        return next_drafts(
            level.logits,
            committed,
            drafts.tolist(),
            processor,
            self._plan.drafting,
            self._acceptance,
            joint_acceptance=self._ahead.joint_acceptance,
            least_acceptance=FLOOR,
            ends=self._ends,
            known=level.acceptance,
        )

    def _most_drafts(self) -> int:
        """Return the maximum number of drafts beyond the committed tokens."""
        return min(self._edge.limits.window, self._room - 1, self._last - self._ahead.committed)

    def _is_done(self) -> bool:
        """Whether to stop drafting: there is no room, or acceptance is unlikely."""
        wanted = wants_draft(self._ahead, self._most_drafts(), FLOOR, self._ends)
        return self._stuck or not wanted

    def _send_hint(self) -> None:
        """Send the unsent drafts; if sending fails, the next hint has them too."""
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
        """Compare the next committed tokens with the drafts.

        Returns the comparison, and the drafter's work since the last comparison. source: source of
        the drafts in the target's pass. pass_s: seconds of this pass.
        """
        begin = self._ahead.committed
        comparison = self._ahead.compare(ids)
        self._stuck = False
        self._missed = 0 if source == DEVICE or not comparison.agreed else self._missed + 1
        if self._missed >= _MAX_MISSED:
            self._missed = 0
            self._ahead.resend_all()
        learn_acceptance(self._acceptance, comparison)
        self._room = self._drafter.remaining_context(self._ahead.text.ids[: self._ahead.committed])
        self._pass_s = pass_s
        self._record_interval()
        forced = self._take_forced(begin, comparison.agreed) if self._forced else ()
        stats = DraftStats(self._drafted, self._draft_s, self._sent_bytes, forced)
        self._drafted, self._draft_s, self._sent_bytes, self._hints = 0, 0.0, 0, 0
        return comparison, stats

    def _record_interval(self) -> None:
        now_s, last_s = time.monotonic(), self._tokens_came_s
        if last_s:
            fade = _INTERVAL_FADE if self._interval_s else 0.0
            self._interval_s = fade * self._interval_s + (1.0 - fade) * (now_s - last_s)
        self._tokens_came_s = now_s

    def _take_forced(self, begin: int, agreed: int) -> tuple[int, ...]:
        """Return the indices of forced tokens among the next ``agreed`` ones; drop old entries."""
        forced = tuple(at - begin for at in self._forced if at < begin + agreed)
        ahead = range(self._ahead.committed, len(self._ahead.text))
        self._forced = [at for at in self._forced if at in ahead]
        return forced
