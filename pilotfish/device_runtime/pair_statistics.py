"""Evidence on a pair, and the state of the policies; shared by the lanes of a device.

In:  rounds, and the edge's welcome. Out: evidence, and the plan that a policy chooses.
"""

import logging
import threading
from collections.abc import Mapping, Sequence

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.choice import POLICIES, Evidence
from pilotfish.device_runtime.choice.costs import add_forecast_error, with_defaults
from pilotfish.device_runtime.plan import Plan
from pilotfish.device_runtime.record import Choice, Round
from pilotfish.speculation.acceptance import PRIOR_ACCEPTANCE
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.messages import Welcome
from pilotfish.wire.protocols.protocol import PairSizes
from pilotfish.wire.request import AutoOptions

_log = logging.getLogger("pilotfish.answers")


class PairStatistics:
    """Collects evidence and applies the policies of "auto". Thread-safe.

    drafter_pass_times: seconds of the drafter's pass by number of tokens, measured at the start.
    prior: acceptance α before any evidence. drafts_per_pass: see `Evidence`.
    """

    def __init__(
        self,
        drafter_pass_times: Mapping[int, float],
        sizes: PairSizes,
        prior: float = PRIOR_ACCEPTANCE,
        drafts_per_pass: int = 1,
    ) -> None:
        self._drafter_pass_times, self._prior = drafter_pass_times, prior
        self._sizes, self._drafts_per_pass = sizes, drafts_per_pass
        self._policies = {name: policy() for name, policy in POLICIES.items()}
        self._lock = threading.Lock()
        self._has_welcome = False
        self.evidence = Evidence(
            drafter_pass_times, {}, sizes, prior=prior, drafts_per_pass=drafts_per_pass
        )

    def on_welcome(self, welcome: Welcome | None) -> None:
        """Take the target's pass times from the first edge's welcome."""
        with self._lock:
            if welcome is None or self._has_welcome:
                return
            self._has_welcome = True
            target_pass_times = {
                pass_time.tokens: pass_time.ns * 1e-9 for pass_time in welcome.passes
            }
            edge_drafter_pass_times = {
                pass_time.tokens: pass_time.ns * 1e-9 for pass_time in welcome.drafts
            }
            self.evidence = Evidence(
                self._drafter_pass_times,
                target_pass_times,
                self._sizes,
                edge_drafter_pass_times,
                self._prior,
                self._drafts_per_pass,
            )

    @property
    def vocab_size(self) -> int:
        """Number of tokens of the target's vocabulary."""
        return self._sizes.vocabulary

    def check(self, policy: str) -> None:
        """Raise `UnsupportedError` for an unknown policy."""
        if policy not in self._policies:
            known = ", ".join(self._policies)
            raise UnsupportedError(f"There is no policy {policy!r}; use one of {known}.")

    def choose(
        self, auto: AutoOptions, plans: Sequence[Plan], state: LinkState | None
    ) -> tuple[Plan, Choice]:
        """Choose a plan by the link's state and the evidence."""
        with self._lock:
            policy = self._policies[auto.policy]
            plan, choice = policy.choose(auto, plans, state or LinkState(), self.evidence)
        _log.info("auto: %s", choice.reason)
        return plan, choice

    def message_bytes(self, plan: Plan) -> float:
        """Estimate the bytes of the longer message of a round under this plan."""
        with self._lock:
            return 0.0 if plan.exchange is None else max(self.evidence.round_bytes(plan))

    def add(self, plan: Plan, rounds: Sequence[Round], state: LinkState | None) -> None:
        """Add an answer's rounds to the evidence, without rounds that the drafter generated alone.

        state: the link's state before the answer. An answer with a prediction is left out: its
        speed says nothing about answers without one.
        """
        if plan.request.prediction:
            return
        with self._lock:
            protocol_rounds = [record for record in rounds if record.protocol == plan.protocol]
            self.evidence.add(plan, protocol_rounds)
            if state is not None and state.rtt is not None:
                add_forecast_error(plan, protocol_rounds, with_defaults(state), self.evidence)
