"""What replicas on a Ray cluster bring, and what the cluster itself costs.

    python benchmarks/cluster.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

One machine, one private cluster. Replaying devices (benchmarks/_replay.py), 1, 2 and 4 of them,
against the target in the edge's own process with all cores, with one thread, and as 1 and 2
replicas of one thread each, and as 2 replicas of 2 stages. Every edge is started anew and measured
alone. Windows of γ = 4.

Goal: with 4 devices, 2 replicas of one thread verify at least 1.5 times as much as 1 such replica.
"""

import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from pathlib import Path

import numpy as np
from _common import (
    PROMPTS,
    Rows,
    Steps,
    at_least,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)
from _replay import Recording, Replay, record, replay

from pilotfish import Device, EdgeServer
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.wire.keys import DeviceKeys

WINDOW = 4
COUNTS = (1, 2, 4)
COLUMNS = ("target", "threads", "devices", "verified_per_s", "round_ms", "over_local")


def edges(target: Path) -> dict[str, tuple[int, dict[str, object]]]:
    """Names, threads in all, and flags."""
    cores = len(os.sched_getaffinity(0))
    item = {"threads": 1}
    return {
        "in the edge, all cores": (cores, {}),
        "in the edge, one thread": (1, item),
        "1 replica": (1, {"cluster": "ray", "replicas": 1, **item}),
        "2 replicas": (2, {"cluster": "ray", "replicas": 2, **item}),
        "2 replicas of 2 stages": (4, {"cluster": "ray", "replicas": 2, "stages": 2, **item}),
    }


def measure(
    target: Path, flags: dict[str, object], recordings: Sequence[Recording], rounds: int
) -> dict[int, tuple[float, float]]:
    """Verified tokens a second, and ms a round, by number of devices."""
    results = {}
    with ExitStack() as stack:
        folder = stack.enter_context(throwaway_keys())
        edge = stack.enter_context(EdgeServer(target, keys=folder, sessions=max(COUNTS), **flags))
        keys = DeviceKeys.load(folder)
        devices = [
            stack.enter_context(closing(Replay(recording, edge.endpoint, keys)))
            for recording in recordings
        ]
        for count in COUNTS:
            tallies = [replay(devices[:count], rounds) for _ in range(3)]
            rates = [sum(metrics.windows) / metrics.seconds for metrics in tallies]
            rate = float(np.median(rates))
            results[count] = (rate * (WINDOW + 1), 1e3 * count / rate)
    return results


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    draft, target = pair(args)
    tokens, rounds = (32, 8) if args.quick else (96, 40)
    with Device(draft) as device:
        prompts = [device.prompt(prompt).ids for prompt in PROMPTS[: max(COUNTS)]]
    drafter = ModelDrafter.open(Artifact.open(draft), provider="auto", threads=None, context=None)
    decoder = Decoder(target)
    recordings = [record(drafter, decoder, prompt, WINDOW, tokens) for prompt in prompts]
    del decoder, drafter
    wanted = edges(target)
    steps = Steps(len(wanted))
    rows: Rows = []
    for name, (threads, flags) in wanted.items():
        steps.next(name)
        for count, (rate, round_ms) in measure(target, flags, recordings, rounds).items():
            local = next((row for row in rows if row["devices"] == count), None)
            rows.append(
                {
                    "target": name,
                    "threads": threads,
                    "devices": count,
                    "verified_per_s": rate,
                    "round_ms": round_ms,
                    "over_local": rate / local["verified_per_s"] if local else 1.0,
                }
            )
    by = {(row["target"], row["devices"]): row["verified_per_s"] for row in rows}
    gain = by["2 replicas", 4] / by["1 replica", 4]
    goals = [at_least("4 devices: 2 replicas over 1", gain, 1.5)]
    return conclude(args, "replicas on a cluster, one machine", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
