"""The text of `ahead` against that of `stream`, whatever becomes of the hints.

Each prompt at temperature 0 and, with a seed, at 1: under `stream`, under `ahead`, and under
`ahead` with hints that are dropped, delayed, doubled, sent in another order, forged at random, or
all of this by chance. Forged ones have other ids, other odds, another start or another hash. An
answer that parts from `stream`'s elsewhere than at a tie is a bug.
"""

import random
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from _common import Goal, Rows, Steps, at_most, conclude, options, pair, pair_options
from exactness import MORE, PROMPTS, _verdict

from pilotfish import Device, EdgeServer
from pilotfish.device_runtime.edge_session import EdgeSession
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.wire.messages import Buffer

Hint = tuple[int, bytes, Sequence[Buffer]]
LATE = 12  # hints that a delayed one comes after, at most


class Faults:
    """Does one kind of thing to hints on their way; stands in for `EdgeSession.hint`."""

    def __init__(self, kind: str, seed: int) -> None:
        self.kind = kind
        self._random = random.Random(seed)
        self._held: list[tuple[int, Hint]] = []
        self._sent = 0
        self.done = 0

    def of(self, hint: Hint) -> list[Hint]:
        """What is sent in place of this one."""
        self._sent += 1
        due = [held for at, held in self._held if at <= self._sent]
        self._held = [(at, held) for at, held in self._held if at > self._sent]
        kind = self.kind
        if kind == "all":
            kind = self._random.choice(("none", "none", "dropped", "delayed", "doubled", "forged"))
        if kind == "none" or self._random.random() < 0.3:
            return [*due, hint]
        self.done += 1
        if kind == "dropped":
            return due
        if kind in ("delayed", "reordered"):
            most = LATE if kind == "delayed" else 1
            self._held.append((self._sent + self._random.randint(1, most), hint))
            return due
        if kind == "doubled":
            return [*due, hint, hint]
        return [*due, self._forged(hint)]

    def _forged(self, hint: Hint) -> Hint:
        start, digest, (ids, odds) = hint
        what = self._random.randrange(4)
        if what == 0:  # ids of its own, sure of themselves
            length = self._random.randrange(1, 64)
            return start, digest, [self._random.randbytes(2 * length), b"\xff" * length]
        if what == 1:
            return start, digest, [ids, self._random.randbytes(len(odds))]
        if what == 2:
            return max(0, start + self._random.randint(-4, 4)), digest, [ids, odds]
        return start, self._random.randbytes(8), [ids, odds]


KINDS = ("none", "dropped", "delayed", "doubled", "reordered", "forged", "all")


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--prompts", type=int, default=20, help="of 20 (%(default)s)")
    parser.add_argument("--kinds", default=",".join(KINDS), help="what to do to hints (all)")
    args = parser.parse_args()
    drafter, target = pair(args)
    prompts = (*PROMPTS, *MORE)[: 2 if args.quick else args.prompts]
    kinds = args.kinds.split(",")
    steps = Steps(2 * len(prompts) * (1 + len(kinds)))
    reference = Decoder(target)
    rows: Rows = [_row(kind, t) for t in (0.0, 1.0) for kind in kinds]
    real = EdgeSession.hint
    with EdgeServer(target) as edge, Device(drafter, edge.endpoint) as device:
        for seed, prompt in enumerate(prompts):
            ids = device.prompt(prompt).ids.astype(np.int64)
            for temperature in (0.0, 1.0):
                generation: dict[str, Any] = {
                    "temperature": temperature,
                    "seed": seed,
                    "max_tokens": args.tokens,
                }
                steps.next("stream")
                wanted = device.generate(prompt, protocol="stream", **generation).tokens
                for row in (item for item in rows if item["T"] == temperature):
                    steps.next(f"hints: {row['hints']}")
                    faults = Faults(row["hints"], seed)
                    EdgeSession.hint = _faulty(faults, real)  # between the device and its socket
                    try:
                        got = device.generate(prompt, protocol="ahead", **generation)
                    finally:
                        EdgeSession.hint = real
                    noise = seed if temperature else None
                    row["answers"] += 1
                    row[_verdict(reference, ids, got.tokens, wanted, noise)] += 1
                    row["faults"] += faults.done
                    row["drafts"] += sum(each.window for each in got.rounds)
                    row["accepted"] += sum(each.accepted for each in got.rounds)
    goals: list[Goal] = [
        at_most("answers that differ otherwise than by a tie", sum(r["differ"] for r in rows), 0),
        at_most("answers that part at a tie", sum(r["ties"] for r in rows), 0),
    ]
    columns = (
        "hints",
        "T",
        "answers",
        "identical",
        "ties",
        "differ",
        "faults",
        "drafts",
        "accepted",
    )
    return conclude(args, f"ahead against stream, {args.tokens} tokens", columns, rows, goals)


def _faulty(faults: Faults, real: Callable[..., int | None]) -> Callable[..., int | None]:
    def hint(self: EdgeSession, *info: Any) -> int | None:
        sent = 0
        for item in faults.of(info):
            if (size := real(self, *item)) is None:
                return None
            sent += size
        return sent

    return hint


def _row(kind: str, temperature: float) -> dict[str, Any]:
    counts = dict.fromkeys(
        ("answers", "identical", "ties", "differ", "faults", "drafts", "accepted"), 0
    )
    return {"hints": kind, "T": temperature, **counts}


if __name__ == "__main__":
    sys.exit(main())
