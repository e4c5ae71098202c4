"""What a round costs beyond drafting and verifying.

    python benchmarks/roundtrip.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

A device in this process, an edge in another, CURVE over loopback between them. Each round is timed
by its stages (draft, encode, uplink, queue, verify, downlink, settle); "beyond" is what remains
when draft and verify, the two models' own work, are taken away. A generation's first round is left
out: its queue stage is the reading of the prompt. The cases take turns, so that a noisy machine is
noisy for all. Drafter and target are not busy at the same time, so two cores are enough.

"unseen" is the time between two rounds that no stage accounts for; it shows that the stages do not
hide anything.

Goal (greedy, window 4): p50 at most 0.5 ms, p99 at most 2 ms.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
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

from pilotfish import Device, EdgeServer, Generation

BEYOND = ("encode", "uplink", "queue", "downlink", "settle")
TOKENS = 96  # of one answer
COLUMNS = (
    *("protocol", "window", "rounds", "tokens_per_round", "uplink_bytes", "draft_ms", "verify_ms"),
    *("beyond_p50_ms", "beyond_p99_ms", *(f"{stage}_p50_ms" for stage in BEYOND), "unseen_ms"),
)


@dataclass
class Case:
    """One protocol and window, and what was generated under it."""

    protocol: str
    window: int
    generations: list[Generation] = field(default_factory=list)

    def run(self, device: Device, prompt: str, seed: int) -> None:
        """One more generation."""
        temperature = 0.0 if self.protocol == "greedy" else 1.0
        self.generations.append(
            device.generate(
                prompt,
                protocol=self.protocol,
                window=self.window,
                max_tokens=TOKENS,
                temperature=temperature,
                seed=seed,
            )
        )

    def row(self) -> dict[str, float | int | str]:
        """The figures; times are in milliseconds."""
        rounds = [r for g in self.generations for r in g.rounds[1:]]
        times = [r.timings for r in rounds]
        # [rounds, stages]
        beyond = np.array([[getattr(t, stage) for stage in BEYOND] for t in times]) * 1e3
        p50, p99 = np.percentile(beyond, (50, 99), axis=0)
        total = beyond.sum(axis=1)
        return {
            "protocol": self.protocol,
            "window": self.window,
            "rounds": len(rounds),
            "tokens_per_round": float(np.mean([len(r.tokens) for r in rounds])),
            "uplink_bytes": float(np.median([r.uplink_bytes for r in rounds])),
            "draft_ms": float(np.median([t.draft for t in times])) * 1e3,
            "verify_ms": float(np.median([t.verify for t in times])) * 1e3,
            "beyond_p50_ms": float(np.percentile(total, 50)),
            "beyond_p99_ms": float(np.percentile(total, 99)),
            **{f"{stage}_p50_ms": float(v) for stage, v in zip(BEYOND, p50, strict=True)},
            **{f"{stage}_p99_ms": float(v) for stage, v in zip(BEYOND, p99, strict=True)},
            "unseen_ms": float(np.median([_unseen_s(g) for g in self.generations])) * 1e3,
        }


def _unseen_s(generation: Generation) -> float:
    """Seconds a round, after the first, that no stage accounts for."""
    rounds = generation.rounds[1:]
    after_first = generation.total_s - generation.first_token_s
    return (after_first - sum(r.timings.total for r in rounds)) / max(1, len(rounds))


def measure(cases: Sequence[Case], device: Device, repetitions: int) -> None:
    """Every case answers a prompt in turn, ``repetitions`` times, each time another prompt."""
    steps = Steps(repetitions)
    cases[0].run(device, PROMPTS[-1], 0)  # the first pass of a fresh engine is a slow one
    cases[0].generations.clear()
    for i in range(repetitions):
        prompt = PROMPTS[i % len(PROMPTS)]
        steps.next(prompt)
        for case in cases:
            case.run(device, prompt, seed=i)


def judge(rows: Rows) -> list[Goal]:
    """The goals, which are those of greedy at window 4."""
    row = next(r for r in rows if (r["protocol"], r["window"]) == ("greedy", 4))
    what = "greedy, window 4: a round beyond drafting and verifying"
    return [
        at_most(f"{what}, p50 in ms", row["beyond_p50_ms"], 0.5),
        at_most(f"{what}, p99 in ms", row["beyond_p99_ms"], 2.0),
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    drafter, target = pair(args)
    cases = [Case(protocol, window) for protocol in ("greedy", "dsd") for window in (4, 0, 16)]
    with (
        throwaway_keys() as folder,
        EdgeServer(target, keys=folder) as edge,
        Device(drafter, edge.endpoint, folder) as device,
    ):
        measure(cases, device, repetitions=3 if args.quick else 24)
    rows = [case.row() for case in cases]
    return conclude(args, "a round, by stage", COLUMNS, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(main())
