"""Choose the passes of a window from a drafter with a mask token, and learn from its rounds.

In:  the accepted tokens and the times of each round. Out: the number of the next window's first
     drafts that have a pass each (`speculation.pass_drafts.single_passes`).

Only the deterministic protocols choose: their text does not depend on the drafts. Under the others
a window takes as few passes as possible, so that neither times nor drafts that were discarded have
an influence on later drafts, and a seed gives the same text again.
"""

from pilotfish.device_runtime.edge_session import EdgeSession
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Timings
from pilotfish.drafting.ahead import ModelAcceptance
from pilotfish.drafting.window import Drafter
from pilotfish.speculation.pass_drafts import single_passes


class WindowPasses:
    """Passes of a session's windows.

    acceptance: the pair's acceptance by place in a pass; rounds update it. rtt_s: the link's RTT
    before the present answer, 0 if unknown.
    """

    def __init__(self, drafter: Drafter, edge: EdgeSession, acceptance: ModelAcceptance) -> None:
        self._drafter, self._edge, self._acceptance = drafter, edge, acceptance
        self.rtt_s = 0.0
        self._waiting_s = 0.0  # seconds of the last round without the drafter; 0 if unknown
        self._is_first = True

    def start(self, rtt_s: float) -> None:
        """Begin an answer."""
        self.rtt_s, self._waiting_s, self._is_first = rtt_s, 0.0, True

    def single(self, plan: Plan, drafts: int) -> int:
        """Return how many first drafts of the next window have a pass each; drafts: its length."""
        most = self._drafter.drafts_per_pass
        if most == 1 or plan.exchange is None or not plan.exchange.deterministic:
            return 0
        return single_passes(
            self._acceptance.of(plan.sampling).means(most),
            self._drafter.pass_times,
            waiting_s=self._waiting_s or self.rtt_s + self._edge.token_s,
            drafts=drafts,
        )

    def record_round(self, plan: Plan, accepted: int, timings: Timings) -> None:
        """Learn from the last window, of which the first ``accepted`` tokens were accepted."""
        if not self._is_first:  # the first round includes the reading of the prompt
            self._waiting_s = timings.total - timings.draft
        self._is_first = False
        acceptance = self._acceptance.of(plan.sampling)
        for at, place in self._drafter.places.items():
            if at <= accepted:
                acceptance.count(place, at < accepted)
