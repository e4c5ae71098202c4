"""One probe of the link."""

import time

from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.lab.field.link_rows import Probe


def measure_link(link: EdgeLink) -> Probe:
    """Measure the link."""
    before = link.estimator.probing
    begun_ns = time.monotonic_ns()
    for _ in range(10):
        ping(link)
    rtts = link.estimator.rtts_since(begun_ns)
    measure_rates(link)
    state = link.state()
    cost = link.estimator.probing.since(before)
    return Probe(
        began_unix_s=0.0,
        clock_s=0.0,
        took_s=(time.monotonic_ns() - begun_ns) * 1e-9,
        rtts_s=[sample.rtt_s for sample in rtts],
        lost=10 - len(rtts),
        up_bps=None if state.up is None else state.up.value,
        down_bps=None if state.down is None else state.down.value,
        uplink_bytes=cost.uplink_bytes,
        downlink_bytes=cost.downlink_bytes,
        link=state,
    )
