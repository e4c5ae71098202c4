"""Choose protocol and window for protocol="auto": one file and one line here per policy."""

from pilotfish.device_runtime.choice.evidence import Evidence
from pilotfish.device_runtime.choice.policy import Policy
from pilotfish.device_runtime.choice.predictive import PredictivePolicy
from pilotfish.device_runtime.choice.threshold import ThresholdPolicy

POLICIES: dict[str, type[Policy]] = {
    policy.name: policy for policy in (PredictivePolicy, ThresholdPolicy)
}

__all__ = ["POLICIES", "Evidence", "Policy"]
