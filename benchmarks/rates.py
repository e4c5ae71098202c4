"""The rates that a device measures, against what TCP carries, over paths under the kernel's TCP.

    python benchmarks/rates.py [--json PATH] [--quick] [--links N] [--control NAME]

Edge and device run in two network namespaces, and a path between them forwards packet by packet,
below the kernel's own TCP (docs/emulation.md); it takes root. The links are drawn at random, every
third from the easy ones: 0.3 s of them are at most 100 kB, and the jitter is at most half the RTT.

On each link, plain TCP connections measure the truth, each way in turn, at the receiver. `rate`:
of a warm connection, with BBR, which loss hardly slows, over at least 0.3 MB and 1.5 s: the sender
is never idle. `cold`: of the first 1 MB of a new connection with the congestion control that device
and edge have, so with slow start, and with its retreat after each loss. Then the device measures on
two connections (`first` and `second`, at a `cost` in bytes), and gives three answers of so many
`rounds` and `kB` up (`last`).
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from _common import Goal, Rows, Steps, at_least, at_most, conclude, options
from _path_lab import Lab, laboratory

WAYS = ("up", "down")
FACTOR, CLOSE = 1.5, 1.25
LINKS, QUICK_LINKS, ANSWERS = 42, 6, 3
LEAST_BPS, MOST_BPS = 1e6, 200e6
EASY_BPS = 100e3 * 8 / 0.3  # 0.3 s of an easy link are at most 100 kB
_COLD_BYTES = 1_000_000
_WARM_BYTES, _WARM_S = 300_000, 1.5
_WITHIN_S = 300.0
_HERE = Path(__file__).parent
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"
_COLUMNS = ("way", "easy", "link", "rtt ms", "jitter ms", "loss", "rate", "cold", "first", "second")
_COLUMNS += ("last", "cost", "rounds", "kB")
_FIRST = ("first", "second")


def links(count: int) -> Iterator[tuple[bool, dict[str, float]]]:
    """Yield links and whether they are easy: RTTs of 5 to 100 ms, jitter to 40 ms, loss to 3 %."""
    random = Random(52)

    def between(low: float, high: float) -> float:
        return low * (high / low) ** random.random()

    for number in range(count):
        rtt_s = between(0.005, 0.1)
        jitter_s = random.choice((0.0, 0.005, 0.01, 0.02, 0.04))
        easy = number % 3 == 0
        most_bps = EASY_BPS if easy else MOST_BPS
        yield (
            easy,
            {
                "up_bps": between(LEAST_BPS, most_bps),
                "down_bps": between(LEAST_BPS, most_bps),
                "rtt_s": rtt_s,
                "jitter_s": min(jitter_s, rtt_s / 2) if easy else jitter_s,
                "loss": random.choice((0.0, 0.0, 0.01, 0.03)),
                "seed": number,
            },
        )


def main() -> int:
    """Measure each link, and print the table."""
    parser = options(__doc__)
    parser.add_argument("--links", type=int, metavar="N", help=f"number of links ({LINKS})")
    parser.add_argument(
        "--control", metavar="NAME", help="congestion control of both ends (the kernel's default)"
    )
    args = parser.parse_args()
    count = args.links or (QUICK_LINKS if args.quick else LINKS)
    rows: Rows = []
    steps = Steps(count)
    with (
        tempfile.TemporaryDirectory(prefix="pilotfish-rates-") as folder,
        laboratory(sys.executable, Path(folder)) as lab,
    ):
        control = _set_up_tcp(lab, args.control)
        server = _serve_goodput(lab)
        try:
            for easy, link in links(count):
                steps.next(", ".join(f"{name} {value:.4g}" for name, value in link.items()))
                _shape(lab, link)
                rows += _measure(lab, link, easy)
        finally:
            server.kill()
            server.communicate()
    return conclude(
        args, f"rates over paths, Mbit/s, under {control}", _COLUMNS, rows, _goals(rows)
    )


def _set_up_tcp(lab: Lab, control: str | None) -> str:
    """Set up both ends; returns the name of their congestion control."""
    names = []
    for ends in (lab.path.edge_command, lab.path.device_command):
        # otherwise a connection begins with the window of the last one, on another link
        lines = ["echo 1 > /proc/sys/net/ipv4/tcp_no_metrics_save"]
        if control:
            lines.append(f"echo {control} > {_CONTROL}")
        lines.append(f"cat {_CONTROL}")
        done = subprocess.run(
            ends("sh", "-ec", "\n".join(lines)), check=False, stdout=subprocess.PIPE
        )
        if done.returncode:
            allowed = "/proc/sys/net/ipv4/tcp_allowed_congestion_control"
            sys.exit(f"the kernel refuses {control} here; it takes the names in {allowed}")
        names.append(done.stdout.decode().strip())
    return "/".join(sorted(set(names)))


def _serve_goodput(lab: Lab) -> subprocess.Popen[bytes]:
    """Start the process at the edge's end that receives and sends for `_goodput.py`."""
    words = sys.executable, _HERE / "_goodput.py", "serve", lab.path.address
    process = subprocess.Popen(lab.path.edge_command(*words), stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def _shape(lab: Lab, link: dict[str, float]) -> None:
    # a queue of 0.2 s, as of a home router
    queue_bytes = int(max(32_000, 0.2 * max(link["up_bps"], link["down_bps"]) / 8))
    lab.path.set(**link, queue_bytes=queue_bytes)


def _run(lab: Lab, program: str, *words: object) -> str:
    """Run a program of this folder at the device's end; returns what it prints."""
    command = lab.path.device_command(sys.executable, _HERE / program, *words)
    lab.path.forget()
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=_WITHIN_S)
    return done.stdout.decode()


def _measure(lab: Lab, link: dict[str, float], easy: bool) -> Rows:
    """Return a row each way; rates are in Mbit/s."""
    warm, cold = [], []
    for way in WAYS:
        # three times what is under way at once, and at least what BBR needs to find the rate
        pace = link[f"{way}_bps"] / 8
        ahead = int(3 * pace * (link["rtt_s"] + link["jitter_s"])) + 200_000
        size = max(_WARM_BYTES, int(pace * _WARM_S))
        words = way, lab.path.address
        warm.append(float(_run(lab, "_goodput.py", *words, ahead, size, "bbr")))
        cold.append(float(_run(lab, "_goodput.py", *words, 0, _COLD_BYTES)))
    facts = json.loads(
        _run(lab, "_rates_device.py", lab.folder / "draft", lab.endpoint, lab.keys, ANSWERS)
    )
    rounds, sent = facts["answer"]
    return [
        {
            "way": way,
            "easy": easy,
            "link": _mbps(link[f"{way}_bps"]),
            "rtt ms": round(link["rtt_s"] * 1e3, 1),
            "jitter ms": round(link["jitter_s"] * 1e3, 1),
            "loss": link["loss"],
            "rate": _mbps(warm[at]),
            "cold": _mbps(cold[at]),
            "first": _mbps(facts["first"][0][at]),
            "second": _mbps(facts["first"][1][at]),
            "last": _mbps(facts["last"][at]),
            "cost": facts["cost"][at],
            "rounds": round(rounds, 1),
            "kB": round(sent * 1e-3),
        }
        for at, way in enumerate(WAYS)
    ]


def _mbps(bps: float | None) -> float | None:
    return None if bps is None else round(bps * 1e-6, 2)


def _goals(rows: Rows) -> list[Goal]:
    def share(factor: float, readings: Sequence[str], truth: str) -> float:
        pairs = [(row[reading], row[truth]) for row in rows for reading in readings]
        ratios = [reading / true for reading, true in pairs if reading is not None]
        return sum(1 / factor <= ratio <= factor for ratio in ratios) / max(1, len(ratios))

    warm, cold = (share(FACTOR, _FIRST, truth) for truth in ("rate", "cold"))
    last = share(CLOSE, ("last",), "rate")
    costs = [row["cost"] / min(100e3, 0.3 * row["rate"] * 1e6 / 8) for row in rows]
    thrifty = sum(cost <= 1.1 for cost in costs) / len(costs)  # a tenth for heads of messages
    goals = [
        at_least(
            f"share of first rates, if known, within {FACTOR} of a warm connection", warm, 0.9
        ),
        at_least(f"share of them within {FACTOR} of a new connection's 1 MB", cold, 0.9),
        at_least(f"share within {CLOSE} of a warm one after {ANSWERS} answers", last, 0.95),
        at_least("share that costs at most 100 kB and 0.3 s of the link", thrifty, 0.95),
    ]
    for kind, is_easy, limit in (("easy", True, 0.1), ("other", False, 0.4)):
        some = [row[reading] for row in rows if row["easy"] is is_easy for reading in _FIRST]
        unknown = some.count(None) / max(1, len(some))
        goals.append(at_most(f"share unknown of {len(some)} on {kind} links", unknown, limit))
    return goals


if __name__ == "__main__":
    sys.exit(main())
