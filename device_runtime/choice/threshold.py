"""threshold: the paper's own rule (wisv §VII-B).

An RTT above 10 ms makes a second exchange dearer than all hidden states in the first one, so they
are all uploaded; below that only those are which the edge asks for.
"""

from collections.abc import Sequence

from device_runtime.choice.evidence import Evidence
from device_runtime.choice.policy import Policy, link_in_words
from device_runtime.plan import Plan
from device_runtime.record import Choice
from wire.errors import UnsupportedError
from wire.link.state import LinkState

RTT_S = 0.010
FULL, SELECTIVE = "wisv-full", "wisv-selective"


class Threshold(Policy):
    """Full hidden upload above 10 ms, else selective."""

    name = "threshold"

    def choose(
        self, plans: Sequence[Plan], link: LinkState, evidence: Evidence
    ) -> tuple[Plan, Choice]:
        """The plan of the protocol that the RTT asks for."""
        if link.rtt is None:
            raise UnsupportedError("Policy threshold needs an RTT, which was not measured.")
        wanted = FULL if link.rtt.value > RTT_S else SELECTIVE
        plan = next((plan for plan in plans if plan.protocol == wanted), None)
        if plan is None:
            raise UnsupportedError(
                f"Policy threshold asks for protocol {wanted} here ({link_in_words(link)}), which "
                "is not to choose from: allow lossy protocols, or use policy predictive."
            )
        return plan, Choice(
            policy=self.name,
            protocol=plan.protocol,
            window=len(plan.expansion),
            token_s=None,
            reason=f"{wanted}: {link_in_words(link)}, against a threshold of {RTT_S * 1e3:g} ms",
        )
