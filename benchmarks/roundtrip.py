"""What a round costs beyond drafting and verifying.

    python benchmarks/roundtrip.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

A device in this process, an edge in another, CURVE over loopback between them. Each round is timed
by its stages (draft, encode, uplink, queue, verify, downlink, settle); "beyond" is what remains
when draft and verify, the two models' own work, are taken away. A generation's first round is left
out: its queue stage is the reading of the prompt. The cases take turns, so that a noisy machine is
noisy for all. Drafter and target are not busy at the same time, so two cores are enough.

"unseen" is the time between two rounds that no stage accounts for; it shows that the stages do not
hide anything. The row "bare echo" is what a process of a few lines takes to answer as many bytes
over the same encrypted ZeroMQ, after four draft tokens here and a reading of as many megabytes as
the target has there: models leave no cache warm, and a core that sleeps takes a while to wake, so
this is far from the figure of an echo in a tight loop. It is the part that is not Pilotfish's.

Goal (greedy, window 4): p50 at most 0.5 ms, p99 at most 2 ms.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

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
from _echo import DOWN, UP, Echo

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
    answers: int = 1  # in each repetition
    generations: list[Generation] = field(default_factory=list)

    def run(self, device: Device, repetition: int) -> None:
        """The generations of one repetition, each of another prompt."""
        for i in range(repetition * self.answers, (repetition + 1) * self.answers):
            self._generate(device, PROMPTS[i % len(PROMPTS)], i)

    def _generate(self, device: Device, prompt: str, seed: int) -> None:
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


class BareEcho:
    """The row that says what this machine takes by itself."""

    def __init__(self, echo: Echo) -> None:
        self._echo = echo
        self._seconds: list[float] = []

    def run(self, device: Device, prompt: str) -> None:
        """Some exchanges, each after four tokens of the drafter alone."""
        for _ in range(TOKENS // 4):
            device.generate(prompt, protocol="local", max_tokens=4)
            self._seconds.append(self._echo.seconds())

    def row(self) -> dict[str, float | int | str]:
        """The same columns, as far as they mean something."""
        return {
            "protocol": "bare echo",
            "window": 4,
            "rounds": len(self._seconds),
            "uplink_bytes": float(sum(UP)),
            "downlink_bytes": float(DOWN),
            "beyond_p50_ms": float(np.percentile(self._seconds, 50)) * 1e3,
            "beyond_p99_ms": float(np.percentile(self._seconds, 99)) * 1e3,
        }


def measure(cases: Sequence[Case], bare: BareEcho, device: Device, repetitions: int) -> None:
    """All cases in turn, ``repetitions`` times."""
    steps = Steps(repetitions)
    cases[0].run(device, 0)  # the first pass of a fresh engine is a slow one
    cases[0].generations.clear()
    for i in range(repetitions):
        steps.next("one repetition of all cases")
        for case in cases:
            case.run(device, i)
        bare.run(device, PROMPTS[i % len(PROMPTS)])


def _megabytes(artifact: Path) -> int:
    return sum(path.stat().st_size for path in artifact.iterdir()) >> 20


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
    cases = [
        Case("greedy", 4, answers=3),  # p99 wants many rounds
        *(Case("greedy", window) for window in (0, 16)),
        *(Case("dsd", window) for window in (4, 0, 16)),
    ]
    with (
        Echo(_megabytes(target)) as echo,
        throwaway_keys() as folder,
        EdgeServer(target, keys=folder) as edge,
        Device(drafter, edge.endpoint, folder) as device,
    ):
        bare = BareEcho(echo)
        measure(cases, bare, device, repetitions=2 if args.quick else 10)
    rows = [*(case.row() for case in cases), bare.row()]
    return conclude(args, "a round, by stage", COLUMNS, rows, judge(rows))


if __name__ == "__main__":
    sys.exit(main())
