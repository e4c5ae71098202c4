"""Choose protocol and window for protocol="auto": one file and one line here per policy."""

from pilotfish.device_runtime.alternatives import alternatives
from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.policy import Policy
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.choice.threshold import ThresholdPolicy
from pilotfish.device_runtime.plan import plan
from pilotfish.wire.protocols import names
from pilotfish.wire.request import AUTO, Request

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (PredictivePolicy, ThresholdPolicy)
}


def check(request: Request) -> None:
    """Raise `UnsupportedError` for a request that no edge, device or policy can answer."""
    if request.protocol != AUTO:
        plan(request)
        return
    plans = alternatives(request, offered=names())
    if policy := POLICIES.get(request.auto.policy):
        policy().check(request.auto, plans)


__all__ = ["POLICIES", "Evidence", "Policy", "check"]
