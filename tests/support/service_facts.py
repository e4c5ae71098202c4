"""A round, an answer and a link for the metrics and the status of a device service."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from pilotfish.device_runtime.link.connectivity import Connectivity, LinkStatus
from pilotfish.device_runtime.record import Generation, Round, Timings
from pilotfish.device_runtime.service.service_metrics import ServiceMetrics
from pilotfish.wire.link.state import LinkState, Reading

UP, DOWN = (
    LinkStatus.from_state(state, "tcp://edge.example:7077", keys=True)
    for state in (Connectivity.CONNECTED, Connectivity.KEY_REFUSED)
)
STATE = LinkState(
    rtt=Reading(value=0.05, age_s=0.5, samples=5),
    up=Reading(value=2e6, age_s=1.0, samples=3),
    signal=Reading(value=-71.0, age_s=0.0, samples=1),
)


def a_round(protocol="greedy", window=4, accepted=2, tokens=3, **changes) -> Round:
    return Round(
        protocol=protocol,
        start=7,
        window=window,
        nodes=window,
        accepted=accepted,
        tokens=list(range(tokens)),
        uplink_bytes=100,
        downlink_bytes=60,
        timings=Timings(draft=0.02, encode=1e-4, uplink=0.01, verify=0.04, downlink=0.01),
        **changes,
    )


def an_answer(rounds: list[Round], **changes) -> Generation:
    tokens = [token for item in rounds for token in item.tokens]
    facts = {
        "protocol": rounds[0].protocol,
        "prompt_tokens": 11,
        "tokens": tokens,
        "text": "",
        "finish_reason": "stop",
        "rounds": rounds,
        "first_token_s": 0.2,
        "total_s": 1.2,
    }
    return Generation(**{**facts, **changes})


def samples(metrics: ServiceMetrics) -> dict[str, float]:
    """Each sample's value, by its name and labels as one string: ``name{a="b"}``."""
    results = {}
    for family in text_string_to_metric_families(metrics.exposition().decode()):
        for sample in family.samples:
            labels = ",".join(f'{k}="{v}"' for k, v in sorted(sample.labels.items()))
            results[sample.name + (f"{{{labels}}}" if labels else "")] = sample.value
    return results
