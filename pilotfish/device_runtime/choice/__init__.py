"""Choose protocol and window for protocol="auto". One file a policy, one line here."""

from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.policy import Policy
from pilotfish.device_runtime.choice.predictive import Predictive
from pilotfish.device_runtime.choice.threshold import Threshold

POLICIES: dict[str, type[Policy]] = {policy.name: policy for policy in (Predictive, Threshold)}

__all__ = ["POLICIES", "Evidence", "Policy"]
