"""The cost model against the clock: time per round over emulated links, predicted and measured.

    python benchmarks/links.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

The default pair, an edge process, CURVE, and between them `emulation`: RTT 0, 20 and 50 ms by
10, 50 and 100 Mbit/s each way. Before each answer the round is predicted as protocol "auto" does
it: the link as pings of 12 kB measured it, computing times, acceptance and bytes as the rounds
until then showed them (`device_runtime.choice`). Then the answer's rounds are measured:
"measured_ms" is the median of what they took, draft to settle, first and last left out. `stream`'s
round is a token. "modelled_ms" has the computing times of these very rounds and only the link from
the model: where it is right and "predicted_ms" is not, the machine has changed its pace meanwhile.
The goal is that no protocol on no link is off by more than 10 %.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median

from _common import (
    PROMPTS,
    Goal,
    Rows,
    Steps,
    at_most,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)

from pilotfish import Device, EdgeServer
from pilotfish.device_runtime.choice.costs import plan_costs, predicted_round_s, with_defaults
from pilotfish.device_runtime.plan import plan
from pilotfish.device_runtime.record import Round
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.lab.field.replay import round_s
from pilotfish.speculation.latency import Link, streamed_token_s
from pilotfish.wire.protocols import STREAM
from pilotfish.wire.request import Options, Request

RTTS_MS = (0, 20, 50)
RATES_MBPS = (10, 50, 100)
WINDOW = 4
CASES: dict[str, Options] = {
    "stream": {"protocol": "stream"},
    "greedy": {"protocol": "greedy"},
    "coupled": {"protocol": "coupled", "temperature": 1.0},
    "tslt": {"protocol": "tslt", "temperature": 1.0},
    "tree": {"protocol": "tree", "temperature": 1.0},
    "dssd": {"protocol": "dssd", "temperature": 1.0},
    "dsd": {"protocol": "dsd", "temperature": 1.0},
}
COLUMNS = (
    *("rtt_ms", "rate_mbps", "protocol", "rounds", "measured_ms"),
    *("predicted_ms", "predicted_off", "modelled_ms", "modelled_off"),
    *("told_rtt_ms", "told_up_mbps", "told_down_mbps"),
)


@contextmanager
def emulated(drafter: Path, target: Path) -> Iterator[tuple[Device, Emulator]]:
    """A device and an edge, and the link between them, which can be changed."""
    with (
        throwaway_keys() as folder,
        EdgeServer(target, keys=folder) as edge,
        Emulator(edge.endpoint) as link,
        Device(drafter, link.endpoint, folder) as device,
    ):
        yield device, link


def row(device: Device, wanted: Options, *, answers: int, tokens: int) -> dict[str, object]:
    """Predict and measure one protocol on the link as it is."""
    state = device.probe(rates=True)
    planned = plan(Request.from_options(wanted))
    if planned.streams:
        predicted_s = plan_costs(planned, with_defaults(state), device.evidence).token_s
    else:
        predicted_s = predicted_round_s(planned, with_defaults(state), device.evidence)
    rounds: list[Round] = []
    for seed in range(answers):
        request: Options = {**wanted, "seed": seed, "max_tokens": tokens}
        rounds += device.generate(PROMPTS[seed], **request).rounds[1:-1]
    measured_s = median(item.timings.total for item in rounds)
    modelled_s = modelled(rounds, with_defaults(state))
    assert state.rtt is not None
    assert state.up is not None
    assert state.down is not None
    return {
        "protocol": planned.protocol,
        "rounds": len(rounds),
        "measured_ms": measured_s * 1e3,
        "predicted_ms": predicted_s * 1e3,
        "predicted_off": predicted_s / measured_s - 1.0,
        "modelled_ms": modelled_s * 1e3,
        "modelled_off": modelled_s / measured_s - 1.0,
        "told_rtt_ms": state.rtt.value * 1e3,
        "told_up_mbps": state.up.value * 1e-6,
        "told_down_mbps": state.down.value * 1e-6,
    }


def modelled(rounds: Sequence[Round], link: Link) -> float:
    """The median of the rounds, with the model's link instead of the measured one."""
    if rounds[0].protocol == STREAM:
        pass_s = median(item.timings.verify for item in rounds)
        down = median(item.downlink_bytes for item in rounds)
        return streamed_token_s(pass_s, down, link, math.inf)
    return median(round_s(item, link) for item in rounds)


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    answers, tokens = (1, 24) if args.quick else (2, 40)
    links = [(rtt, rate) for rtt in RTTS_MS for rate in RATES_MBPS]
    steps = Steps(len(links))
    rows: Rows = []
    with emulated(*pair(args)) as (device, link):
        cases: dict[str, Options] = {
            name: {**wanted} if name == STREAM else {**wanted, "window": WINDOW}
            for name, wanted in CASES.items()
        }
        for wanted in cases.values():  # fresh engines are slow, and bytes are guesses until counted
            for seed in range(2):
                device.generate(PROMPTS[0], **{**wanted, "max_tokens": 16, "seed": seed})
        for rtt, rate in links:
            steps.next(f"RTT {rtt} ms, {rate} Mbit/s")
            link.set(Conditions(rtt_s=rtt * 1e-3, up_bps=rate * 1e6, down_bps=rate * 1e6))
            for _ in range(4):  # of the old link nothing is known any more
                device.probe(rates=True)
            for wanted in cases.values():
                result = row(device, wanted, answers=answers, tokens=tokens)
                rows.append({"rtt_ms": rtt, "rate_mbps": rate, **result})
    goals: list[Goal] = [
        at_most(
            f"{protocol}: largest error of the {what} time per round",
            max(abs(item[f"{what}_off"]) for item in rows if item["protocol"] == protocol),
            0.10,
        )
        for what in ("predicted", "modelled")
        for protocol in CASES
    ]
    return conclude(args, "time per round, predicted and measured", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
