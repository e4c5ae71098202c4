"""Edges that are killed and links that are cut, at random moments of seeded answers.

Every answer is compared with the undisturbed one: its tokens, its text, and what the
pieces add up to. A kill is SIGKILL, and the edge is started anew at once at the same address. A cut
is one of two things that the emulator does: it breaks all connections and refuses new ones for up
to a second, or it lets nothing pass for 1.5 to 4 seconds, as a cellular link may.

Three times to recover, in seconds: `noticed`, from when the device noticed the loss to the next
verified token (p50 and p95); `all`, from the kill or cut itself; `ready`, from when the edge served
again or the link was whole.
"""

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
from _common import (
    PROMPTS,
    Goal,
    Rows,
    Steps,
    at_least,
    at_most,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)

from pilotfish import Device, EdgeServer, Generation, Round
from pilotfish.emulation.emulator import Emulator
from pilotfish.wire.request import Options

PROTOCOLS = ("greedy", "coupled", "dsd", "tslt", "tree", "dssd", "ahead", "stream")
LATEST = 0.9  # of an answer's time; what comes later may miss it
SLOW_BPS = 1.0


@dataclass
class Disturbance:
    """When it was, and when what it broke was whole again (monotonic)."""

    begun_s: float = 0.0
    whole_s: float = 0.0


@dataclass
class Watched:
    """A device's rounds by their start, with the time at which each was settled."""

    settled_s: dict[int, float] = field(default_factory=dict)

    def note(self, record: Round) -> None:
        self.settled_s[record.start] = time.monotonic()


@dataclass(frozen=True)
class Reference:
    """An undisturbed answer and how long it took."""

    generation: Generation
    seconds: float


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    parser.add_argument("--kills", type=int, metavar="N", help="(default: 100; 7 with --quick)")
    parser.add_argument("--cuts", type=int, metavar="N", help="(default: 100; 14 with --quick)")
    parser.add_argument("--tokens", type=int, default=48, help="of each answer (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the moments (%(default)s)")
    args = parser.parse_args()
    kills = (7 if args.quick else 100) if args.kills is None else args.kills
    cuts = (14 if args.quick else 100) if args.cuts is None else args.cuts
    drafter, target = pair(args)
    chance = random.Random(args.seed)
    steps = Steps(len(PROTOCOLS) + kills + cuts)
    with throwaway_keys() as folder, _edge(target, folder) as edge:
        references = _references(drafter, edge.server, folder, args.tokens, steps)
        rows = _killed(drafter, edge, folder, references, kills, chance, steps)
        rows += _cut(drafter, edge, folder, references, cuts, chance, steps)
    rows += [_total(what, rows) for what in dict.fromkeys(row["what"] for row in rows)]
    for row in rows:
        _summarise(row)
    columns = ("what", "protocol", "answers", "identical", "whole", "noticed", "noticed p95")
    columns += ("all", "all p95", "ready", "ready p95")
    title = f"answers of {args.tokens} tokens, disturbed at a random moment"
    return conclude(args, title, columns, rows, _goals(rows))


def _goals(rows: Rows) -> list[Goal]:
    goals: list[Goal] = []
    for row in rows:
        if row["protocol"] == "all":
            share = row["identical"] / max(1, row["answers"])
            broken = row["answers"] - row["whole"]
            goals.append(at_least(f"{row['what']}: identical answers", share, 1.0))
            goals.append(at_most(f"{row['what']}: tokens lost or said twice", broken, 0))
            goals.append(at_most(f"{row['what']}: p95 after all is whole, s", row["ready p95"], 3))
    return goals


# What is broken


class Edge:
    """An edge that can be killed, and comes back at the same address."""

    def __init__(self, target: Path, keys: Path) -> None:
        self._target, self._keys = target, keys
        self.server = EdgeServer(target, keys=keys).start()

    def kill(self, disturbance: Disturbance) -> None:
        disturbance.begun_s = time.monotonic()
        os.kill(self.server.pid, signal.SIGKILL)
        self.server.stop()
        self.server = EdgeServer(self._target, self.server.endpoint, keys=self._keys).start()
        disturbance.whole_s = time.monotonic()


@contextmanager
def _edge(target: Path, keys: Path) -> Iterator[Edge]:
    edge = Edge(target, keys)
    try:
        yield edge
    finally:
        edge.server.stop()


def _break(emulator: Emulator, chance: random.Random, disturbance: Disturbance) -> None:
    """End all connections, and refuse new ones for a while."""
    wait_s = chance.uniform(0.0, 1.0)
    disturbance.begun_s = time.monotonic()
    emulator.stop()
    time.sleep(wait_s)
    emulator.start()
    disturbance.whole_s = time.monotonic()


def _stall(emulator: Emulator, chance: random.Random, disturbance: Disturbance) -> None:
    """For a while nothing passes."""
    wait_s = chance.uniform(1.5, 4.0)
    disturbance.begun_s = time.monotonic()
    emulator.set(up_bps=SLOW_BPS, down_bps=SLOW_BPS)
    time.sleep(wait_s)
    emulator.set(up_bps=None, down_bps=None)
    disturbance.whole_s = time.monotonic()


# Answers


def _wish(at: int, tokens: int) -> tuple[str, Options]:
    protocol = PROTOCOLS[at]
    temperature = 0.0 if protocol == "greedy" else 1.0
    return PROMPTS[at], Options(
        protocol=protocol, temperature=temperature, seed=at, max_tokens=tokens
    )


def _references(
    drafter: Path, edge: EdgeServer, folder: Path, tokens: int, steps: Steps
) -> list[Reference]:
    results = []
    with Device(drafter, edge.endpoint, folder) as device:
        for at, protocol in enumerate(PROTOCOLS):
            steps.next(f"{protocol}, undisturbed")
            prompt, wish = _wish(at, tokens)
            device.generate(prompt, **wish)
            begun_s = time.monotonic()
            results.append(Reference(device.generate(prompt, **wish), time.monotonic() - begun_s))
    return results


def _killed(
    drafter: Path,
    edge: Edge,
    folder: Path,
    references: list[Reference],
    count: int,
    chance: random.Random,
    steps: Steps,
) -> Rows:
    rows = [_row("kill", protocol) for protocol in PROTOCOLS]
    watched = Watched()
    with _device(drafter, edge.server.endpoint, folder, watched) as device:
        for turn in range(count):
            at = turn % len(PROTOCOLS)
            steps.next(f"{PROTOCOLS[at]}, the edge is killed")
            _until_hit(device, watched, references[at], at, rows[at], edge.kill, chance)
    return rows


def _cut(
    drafter: Path,
    edge: Edge,
    folder: Path,
    references: list[Reference],
    count: int,
    chance: random.Random,
    steps: Steps,
) -> Rows:
    ways = {"broken link": _break, "stalled link": _stall}
    rows = {what: [_row(what, protocol) for protocol in PROTOCOLS] for what in ways}
    watched = Watched()
    emulator = Emulator(edge.server.endpoint).start()
    # where it listens again after a cut
    again = Emulator(edge.server.endpoint, listen=emulator.endpoint)
    emulator.stop()
    with again, _device(drafter, again.endpoint, folder, watched) as device:
        for turn, what in zip(range(count), cycle(ways), strict=False):
            at = turn // len(ways) % len(PROTOCOLS)
            steps.next(f"{PROTOCOLS[at]}, {what}")

            def disturb(disturbance: Disturbance, way: Any = ways[what]) -> None:
                way(again, chance, disturbance)

            _until_hit(device, watched, references[at], at, rows[what][at], disturb, chance)
    return [row for some in rows.values() for row in some]


def _device(drafter: Path, endpoint: str, folder: Path, watched: Watched) -> Device:
    return Device(
        drafter, endpoint, folder, on_round=watched.note, on_link_loss="wait", patience_s=120.0
    )


def _until_hit(
    device: Device,
    watched: Watched,
    reference: Reference,
    at: int,
    row: dict[str, Any],
    disturb: Callable[[Disturbance], None],
    chance: random.Random,
) -> None:
    """One answer that was disturbed: a moment that was too late for one is tried again."""
    prompt, wish = _wish(at, len(reference.generation.tokens))
    for _ in range(20):
        watched.settled_s.clear()
        disturbance = Disturbance()
        moment_s = chance.uniform(0.0, LATEST) * reference.seconds
        hand = threading.Timer(moment_s, disturb, [disturbance])
        hand.start()
        pieces = list(device.stream(prompt, **wish))
        hand.join()
        generation = device.last
        assert generation is not None
        tokens = [token for piece in pieces for token in piece.tokens]
        text = "".join(piece.text for piece in pieces)
        wanted = reference.generation
        whole = tokens == generation.tokens and text == generation.text
        identical = tokens == wanted.tokens and text == wanted.text
        if not identical or not whole or generation.recoveries:
            break
    row["answers"] += 1
    row["identical"] += identical
    row["whole"] += whole
    for recovery in generation.recoveries[:1]:
        verified_s = watched.settled_s[recovery.at]
        row["noticed_s"].append(recovery.lost_s)
        row["all_s"].append(verified_s - disturbance.begun_s)
        row["ready_s"].append(max(0.0, verified_s - disturbance.whole_s))


# Figures


def _row(what: str, protocol: str) -> dict[str, Any]:
    counts = dict.fromkeys(("answers", "identical", "whole"), 0)
    return {"what": what, "protocol": protocol, **counts} | {
        name: [] for name in ("noticed_s", "all_s", "ready_s")
    }


def _total(what: str, rows: Rows) -> dict[str, Any]:
    total = _row(what, "all")
    for row in rows:
        if row["what"] == what:
            for name in ("answers", "identical", "whole", "noticed_s", "all_s", "ready_s"):
                total[name] = total[name] + row[name]
    return total


def _summarise(row: dict[str, Any]) -> None:
    for name in ("noticed", "all", "ready"):
        seconds = row[f"{name}_s"]
        row[name] = float(np.median(seconds)) if seconds else 0.0
        row[f"{name} p95"] = float(np.percentile(seconds, 95)) if seconds else 0.0


if __name__ == "__main__":
    sys.exit(main())
