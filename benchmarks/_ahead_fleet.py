"""Many devices at one edge, and a hostile one beside them.

Devices are the product's, a few in each of some processes, over one emulated link; their drafters
replay (`_ahead_replayed.py`) at a given pace. They answer prompt after prompt until they are told
another way to, or to end. What counts is what arrives between two looks at them.
"""

import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from _ahead_edge import BenchEdge, Counts
from _ahead_replayed import Pace, load, replayed_drafters
from _common import throwaway_keys

from pilotfish import Device, PilotfishError
from pilotfish.emulation.emulator import Conditions, Emulator
from pilotfish.wire import keys

PROCESSES = 2
_SETTLE_S = 2.0  # after a change of ways
Told = dict[str, Any]


class _Worker:
    """Some devices of this process, each with a thread that answers."""

    def __init__(self, devices: Sequence[Device], questions: Sequence[Any], first: int) -> None:
        self._devices, self._questions = devices, questions
        self._ways: list[Told | None] = [None] * len(devices)
        self.tokens = [0] * len(devices)
        self.errors: list[str] = []
        self.over = False
        for at in range(len(devices)):
            threading.Thread(target=self._work, args=(at, first + at), daemon=True).start()

    def tell(self, ways: Sequence[Told | None]) -> None:
        """Answer so from now on; None: not at all."""
        self._ways = list(ways)

    def _work(self, at: int, turn: int) -> None:
        device = self._devices[at]
        while not self.over:
            way = self._ways[at]
            if way is None:
                time.sleep(0.02)
                continue
            turn += 1
            try:
                pieces = device.stream(self._questions[turn % len(self._questions)], **way)
                for piece in pieces:
                    self.tokens[at] += len(piece.tokens)
                    if self._ways[at] is not way or self.over:
                        break
                pieces.close()  # it is a generator
            except PilotfishError as error:
                self.errors.append(str(error))
                time.sleep(0.2)


def _serve(
    pipe: Connection, draft: str, endpoint: str, folders: Sequence[str], recording: str,
    pace: Pace, questions: Sequence[Any], first: int,
) -> None:  # fmt: skip
    sys.setswitchinterval(5e-4)  # threads that have slept are to go on at once
    with ExitStack() as stack:
        stack.enter_context(replayed_drafters(load(Path(recording)), pace))
        devices = [
            stack.enter_context(Device(draft, endpoint, folder, threads=1)) for folder in folders
        ]
        worker = _Worker(devices, questions, first)
        pipe.send("ready")
        while (data := pipe.recv()) is not None:
            if data == "count":
                pipe.send((list(worker.tokens), time.monotonic(), list(worker.errors)))
            else:
                worker.tell(data)
        worker.over = True
        time.sleep(0.5)


@dataclass
class Served:
    """What an interval brought: tokens a second of each device, and the edge's work."""

    rates: list[float]
    counts: Counts
    tokens: int
    errors: list[str]

    @property
    def total(self) -> float:
        return sum(self.rates)


class Fleet:
    """Devices in processes of their own."""

    def __init__(self, edge: BenchEdge, pipes: Sequence[Connection], shares: Sequence[int]) -> None:
        self.edge = edge
        self._pipes, self._shares = pipes, shares

    @property
    def size(self) -> int:
        return sum(self._shares)

    def run(self, ways: Sequence[Told | None], seconds: float) -> Served:
        """Answer so, each device its way, and look after so long."""
        rest = list(ways)
        for pipe, share in zip(self._pipes, self._shares, strict=True):
            pipe.send([dict(way) if way is not None else None for way in rest[:share]])
            rest = rest[share:]
        time.sleep(_SETTLE_S)
        before, counts = self._look(), self.edge.counts()
        time.sleep(seconds)
        after, counts = self._look(), self.edge.counts().since(counts)
        rates, tokens, errors = [], 0, []
        for (then, then_s, old), (now, now_s, new) in zip(before, after, strict=True):
            rates += [(b - a) / (now_s - then_s) for a, b in zip(then, now, strict=True)]
            tokens += sum(now) - sum(then)
            errors += new[len(old) :]
        return Served(rates, counts, tokens, errors)

    def rest(self) -> None:
        """Let all devices be quiet."""
        for pipe, share in zip(self._pipes, self._shares, strict=True):
            pipe.send([None] * share)

    def _look(self) -> list[tuple[list[int], float, list[str]]]:
        for pipe in self._pipes:
            pipe.send("count")
        return [pipe.recv() for pipe in self._pipes]


def device_keys(folder: Path, count: int) -> list[Path]:
    """A folder for each of so many more devices, all of which the edge lets in."""
    results = []
    for at in range(count):
        ours = folder / f"device-{at}"
        ours.mkdir()
        (ours / "edge.pub").write_bytes((folder / "edge.pub").read_bytes())
        keys.allow(folder, keys.create(ours, keys.DEVICE), name=f"device-{at}")
        results.append(ours)
    return results


@contextmanager
def fleet(
    draft: Path, target: Path, recording: Path, questions: Sequence[Any], *, devices: int,
    drafter_pace: Pace, target_pace: Pace | None, rtt_s: float, spare_keys: int = 0,
) -> Iterator[tuple[Fleet, list[Path]]]:  # fmt: skip
    """A fleet, and the folders of keys that none of its devices uses.

    target_pace: of a replayed target; None: the real one, on the first core, devices on the last.
    """
    every = sorted(os.sched_getaffinity(0))
    apart = target_pace is None
    with ExitStack() as stack:
        folder = stack.enter_context(throwaway_keys())
        folders = device_keys(folder, devices + spare_keys)
        edge = stack.enter_context(
            BenchEdge(
                target,
                counts=folder / "counts",
                recording=None if apart else recording,
                pace=target_pace or Pace(0.0),
                keys=folder,
                cores={every[0]} if apart else None,
                threads=1,
                sessions=devices + spare_keys,
            )
        )
        link = stack.enter_context(Emulator(edge.endpoint, Conditions(rtt_s=rtt_s)))
        pipes, shares = [], []
        spawn = multiprocessing.get_context("spawn")
        first = 0
        for at in range(PROCESSES):
            share = devices * (at + 1) // PROCESSES - first
            ours, theirs = spawn.Pipe()
            our_value = [str(each) for each in folders[first : first + share]]
            info = (theirs, str(draft), link.endpoint, our_value, str(recording))
            process = spawn.Process(
                target=_serve, args=(*info, drafter_pace, list(questions), first), daemon=True
            )
            process.start()
            if apart:
                os.sched_setaffinity(process.pid or 0, {every[-1]})
            stack.callback(process.join, 5.0)
            stack.callback(ours.send, None)
            pipes.append(ours)
            shares.append(share)
            first += share
        for pipe in pipes:
            assert pipe.recv() == "ready"
        yield Fleet(edge, pipes, shares), folders[devices:]
