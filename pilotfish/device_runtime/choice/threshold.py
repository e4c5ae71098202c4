"""threshold: the rule of the WISV paper (§VII-B), by the RTT measured for this request.

Above the threshold (default: 10 ms), a second exchange costs more than uploading all hidden states
with the first, so the device uploads all of them. Otherwise it uploads only the states that the
edge requests. An unknown RTT counts as long: one exchange is the safer choice.

The paper does not set the window. Here it is the request's window or, without one, the cheapest by
the cost model of `predictive`.
"""

from collections.abc import Sequence
from dataclasses import replace

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.choice.costs import with_defaults
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.policy import Policy
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.plan import THRESHOLD, Plan
from pilotfish.device_runtime.record import Choice
from pilotfish.wire.link.state import LinkState
from pilotfish.wire.protocols import WisvFull, WisvSelective
from pilotfish.wire.request import AutoOptions

RTT_S = 0.010
FULL, SELECTIVE = WisvFull.name, WisvSelective.name


class ThresholdPolicy(Policy):
    """Upload all hidden states above a threshold of the RTT, else only the requested ones."""

    name = THRESHOLD
    wants_resources = True
    protocols = (FULL, SELECTIVE)

    def __init__(self) -> None:
        self._windows = PredictivePolicy()

    def check(self, auto: AutoOptions, plans: Sequence[Plan]) -> None:
        """Refuse plans without the protocols of the rule; a request may still allow lossy ones."""
        allowed = auto.lossy or auto.among is not None
        if allowed and not any(plan.protocol in self.protocols for plan in plans):
            raise UnsupportedError(_explain_refusal(FULL, auto, plans))

    def choose(
        self, auto: AutoOptions, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """Choose the protocol by the RTT, then this protocol's cheapest plan."""
        threshold_s = RTT_S if auto.rtt_threshold_s is None else auto.rtt_threshold_s
        far = with_defaults(link).rtt_s > threshold_s
        wanted = FULL if far else SELECTIVE
        fitting = [plan for plan in plans if plan.protocol == wanted]
        if not fitting:
            raise UnsupportedError(_explain_refusal(wanted, auto, plans))
        plan, choice = self._windows.choose(auto, fitting, link, evidence)
        side = "above" if far else "not above"
        reason = f"RTT {side} {threshold_s * 1e3:g} ms: {choice.reason}"
        return plan, replace(choice, policy=self.name, reason=reason)


def _explain_refusal(wanted: str, auto: AutoOptions, plans: Sequence[Plan]) -> str:
    """Explain why no plan has the wanted protocol, and what to do."""
    rule = f"Policy {THRESHOLD} chooses between {FULL} and {SELECTIVE}"
    if auto.among is None and not auto.lossy:
        return (
            f"{rule}, whose output may differ from the target's: allow lossy protocols, or use "
            f"policy {AutoOptions().policy}."
        )
    if auto.among is not None and wanted not in auto.among:
        return (
            f"{rule}, in this case {wanted}, which is not among the protocols that you named: "
            "name both, or neither."
        )
    if not plans[0].sampling.sampling.greedy:
        return (
            f"{rule}, which work only at temperature 0: use temperature 0, or policy "
            f"{AutoOptions().policy}."
        )
    return (
        f"{rule}, which this edge does not offer: the edge needs a decision head for this "
        f"drafter. Start the edge with --head, or use policy {AutoOptions().policy}."
    )
