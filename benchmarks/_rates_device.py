"""A device that tells the rates of its link before its first answer, and after some answers.

    python _rates_device.py DRAFT ENDPOINT KEYS ANSWERS

It measures RTT and rates twice, on two connections, as before an answer under a decision head. On
the second it then gives answers by "auto" with protocol `dsd` alone. With a vocabulary of 1,000, a
window of 6 tokens takes 12 kB. It prints a JSON object: "first" is the rates up and down (bit/s;
null: unknown) of both measurements, "last" those after the answers, "cost" the bytes up and down of
the first measurement, "answer" the mean rounds and bytes up of an answer.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.link.edge_link import EdgeLink
from pilotfish.device_runtime.link.probing import measure_rates, ping
from pilotfish.device_runtime.link.retry import RetryPolicy
from pilotfish.device_runtime.plan import Auto
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.link.state import LinkState

_TOKENS = 20
_PATIENCE_S = 60.0


def _rates(state: LinkState | None) -> list[float | None]:
    assert state is not None
    return [reading and reading.value for reading in (state.up, state.down)]


def main() -> None:
    """Measure and answer, and tell the rates."""
    draft, endpoint, keys, answers = sys.argv[1:]
    link = EdgeLink(
        endpoint, DeviceKeys.load(Path(keys)), RetryPolicy.from_policy("wait", _PATIENCE_S)
    )
    link.connect()
    ping(link)
    measure_rates(link)
    facts: dict[str, Any] = {
        "first": [_rates(link.state())],
        "cost": link.estimator.probing[1:],
    }
    link.close()
    with Device(
        draft, endpoint, keys, threads=1, on_link_loss="wait", patience_s=_PATIENCE_S
    ) as device:
        facts["first"].append(_rates(device.probe(rates=True)))
        generations = [
            device.generate(
                "The quick brown fox",
                protocol=Auto(among=("dsd",)),
                window=6,
                temperature=1.0,
                seed=seed,
                max_tokens=_TOKENS,
            )
            for seed in range(int(answers))
        ]
        facts["last"] = _rates(device.link_state())
    facts["answer"] = [
        mean(len(each.rounds) for each in generations),
        mean(sum(round_.uplink_bytes for round_ in each.rounds) for each in generations),
    ]
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
