"""Choose protocol and window for protocol="auto": one file and one line here per policy."""

from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.policy import Policy
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.choice.threshold import ThresholdPolicy
from pilotfish.device_runtime.plan import alternatives, check
from pilotfish.wire.protocols import names
from pilotfish.wire.request import AUTO, Request

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (PredictivePolicy, ThresholdPolicy)
}


def check_with_policy(request: Request) -> None:
    """Raise `UnsupportedError` for a request that no edge, device or policy can answer."""
    check(request)
    if request.protocol == AUTO and request.auto.policy in POLICIES:
        plans = alternatives(request, offered=names())
        POLICIES[request.auto.policy]().check(request.auto, plans)


__all__ = ["POLICIES", "Evidence", "Policy", "check_with_policy"]
