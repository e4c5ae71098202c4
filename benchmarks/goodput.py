"""The goodput that a probe of `field watch` measures, against the rate of a kernel path.

    python benchmarks/goodput.py [--json PATH] [--quick]

Edge and device run in two network namespaces, over the kernel's own TCP; it takes root. Links have
1, 10 or 50 Mbit/s both ways and an RTT of 5, 50 or 200 ms. `deep`: the queue has 2 MB. `short`: it
has one RTT of the rate, at least 20 kB. `lossy`: it has 64 kB, and 1 % of the packets vanish. A
share is the measured goodput by the link's rate of whole packets; headers take 4 to 8 % of it.
`false`: the share of values that are more than the rate, or are no bound and below 0.9 of it.
"""

import sys
from argparse import Namespace
from itertools import product
from typing import Any

from _common import Rows, Steps, at_most, conclude, options, throwaway_keys
from _path_lab import PORT

from pilotfish import EdgeServer
from pilotfish.device_runtime.link.goodput import GoodputReading, measure_goodput
from pilotfish.device_runtime.link.link_group import connect
from pilotfish.device_runtime.link.probing import measure_rates, ping
from tests.support.kernel_path import KernelPath
from tests.support.tiny import tiny_artifact

_MOST_BYTES = 2_000_000
_LEAST_SHARE, _MOST_SHARE = 0.9, 1.03
_MBITS, _RTTS_MS = (1, 10, 50), (5, 50, 200)
_COLUMNS = ("queue", "Mbit/s", "rtt ms", "up", "up bound", "down", "down bound", "kB up", "kB down")


def main(args: Namespace) -> int:
    """Run all links; return the exit code."""
    kinds = ("deep",) if args.quick else ("deep", "short", "lossy")
    links = list(product(kinds, _MBITS, _RTTS_MS))
    rows: Rows = []
    with throwaway_keys() as keys, KernelPath() as path:
        steps = Steps(len(links))
        artifact = tiny_artifact(keys / "target")
        with path.at_edge():
            listen = f"tcp://{path.address}:{PORT}"
            edge = EdgeServer(artifact.path, listen=listen, keys=keys, threads=1).start()
        try:
            with path.at_device():
                for kind, mbit, rtt_ms in links:
                    steps.next(f"{kind}, {mbit} Mbit/s, {rtt_ms} ms")
                    shape(path, kind, mbit, rtt_ms)
                    link = connect(edge.endpoint, keys, 20.0)
                    try:
                        pings = [ping(link).rtt_s for _ in range(5)]
                        measure_rates(link, brief=True)
                        rtt_s = min(each for each in pings if each is not None)
                        reading = measure_goodput(link, _MOST_BYTES, rtt_s=rtt_s)
                    finally:
                        link.close()
                        path.forget()
                    rows.append(row(kind, mbit, rtt_ms, reading))
        finally:
            edge.stop()
    false = [is_false(each, way) for each in rows for way in ("up", "down")]
    goals = [at_most("false", sum(false) / len(false), 0.0)]
    return conclude(args, "Goodput as a share of the link's rate", _COLUMNS, rows, goals)


def shape(path: KernelPath, kind: str, mbit: int, rtt_ms: int) -> None:
    """Set the path's conditions."""
    short = max(20_000, mbit * rtt_ms * 125)
    path.set(
        up_bps=mbit * 1e6,
        down_bps=mbit * 1e6,
        rtt_s=rtt_ms * 1e-3,
        queue_bytes={"deep": 2_000_000, "short": short, "lossy": 64 * 1024}[kind],
        loss=0.01 if kind == "lossy" else 0.0,
    )


def row(kind: str, mbit: int, rtt_ms: int, reading: GoodputReading) -> dict[str, Any]:
    """Return a link's values; a share of 0: not measured."""
    values: dict[str, Any] = {"queue": kind, "Mbit/s": mbit, "rtt ms": rtt_ms}
    for way, goodput in (("up", reading.up), ("down", reading.down)):
        values[way] = 0.0 if goodput is None else goodput.bps / mbit / 1e6
        values[f"{way} bound"] = goodput is None or goodput.is_bound
    values["kB up"] = reading.cost.uplink_bytes // 1000
    values["kB down"] = reading.cost.downlink_bytes // 1000
    return values


def is_false(row: dict[str, Any], way: str) -> bool:
    """Whether a value is neither near the rate nor a lower bound of it."""
    near = row[way] >= _LEAST_SHARE or row[f"{way} bound"]
    return row[way] > _MOST_SHARE or not near


if __name__ == "__main__":
    sys.exit(main(options(__doc__ or "").parse_args()))
