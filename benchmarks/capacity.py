"""How much more one edge verifies for eight devices than for one.

    python benchmarks/capacity.py [--json PATH] [--quick] [--draft DIR] [--target DIR]

First the drafter and the target record real windows (greedy, so that acceptance is real). Then 1,
2, 4 and 8 devices replay them against an edge process, CURVE over loopback: a replaying device
sends its next window as soon as it has the verdict on the last, without drafting, so the edge is
what limits. All devices live in one poll loop of this process, which costs little; they stay
connected throughout, and take turns, so that every recording has the same share at every number.

Between the replays the bare engine (the Decoder, in this process) runs the very same windows: eight
single passes, then one pass of eight. Everything takes turns, and medians are compared.

Goals: verified tokens/s at 8 devices over 1 at least 0.85 times what the bare engine gains by the
batch; no device starved (the least served has at least 0.8 times as many rounds per second as the
most served).
"""

import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
from _common import (
    PROMPTS,
    Goal,
    Rows,
    Steps,
    at_least,
    conclude,
    options,
    pair,
    pair_options,
    throwaway_keys,
)
from _replay import Recording, Replay, Tally, record, replay

from pilotfish import Device, EdgeServer
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.wire.keys import DeviceKeys
from tests.support.prefill import prefill

WINDOWS = (1, 4)  # γ
COUNTS = (1, 2, 4, 8)
DEVICES = max(COUNTS)
COLUMNS = ("window", "devices", "verified_per_s", "committed_per_s", "gain", "bare_gain", "share")


class Bare:
    """The engine alone, on the windows of all recordings."""

    def __init__(self, decoder: Decoder, recordings: Sequence[Recording]) -> None:
        self._decoder = decoder
        self._recordings = recordings

    def seconds(self, rounds: int) -> tuple[float, float]:
        """Medians of one single pass for each slot, summed, and of one pass for all slots."""
        for slot, recording in enumerate(self._recordings):
            self._decoder.rollback(slot, 0)
            prefill(self._decoder, slot, recording.text.astype(np.int64), rows=0)
        single, batched = [], []
        for share in np.linspace(1.0, 0.0, rounds):  # backwards, since rolling back is free
            passes = [self._pass(slot, share) for slot in range(len(self._recordings))]
            batched.append(self._time(passes))
            for item in passes:
                self._decoder.rollback(
                    item.slot, self._decoder.length(item.slot) - len(item.tokens)
                )
            single.append(sum(self._time([item]) for item in passes))
        return float(np.median(single)), float(np.median(batched))

    def _pass(self, slot: int, share: float) -> Pass:
        """The window that is this share into the recording, with the slot ready for it."""
        recording = self._recordings[slot]
        step = recording.steps[round(share * (len(recording.steps) - 1))]
        self._decoder.rollback(slot, step.start - 1)
        new = np.concatenate([recording.text[step.start - 1 : step.start], step.draft])
        return Pass(slot, new.astype(np.int64))

    def _time(self, passes: Sequence[Pass]) -> float:
        begun = time.perf_counter()
        self._decoder.forward(passes)
        return time.perf_counter() - begun


@dataclass
class Trial:
    """One turn of everything at one window: what the bare engine and the edge did."""

    bare: tuple[float, float]
    served: dict[int, list[Tally]]  # by number of devices

    def gain(self, devices: int) -> float:
        """Windows per second of so many devices over those of one."""
        return self._rate(devices) / self._rate(1)

    def _rate(self, devices: int) -> float:
        tallies = self.served[devices]
        return sum(sum(t.windows) for t in tallies) / sum(t.seconds for t in tallies)

    @property
    def bare_gain(self) -> float:
        """The batch's gain in the bare engine."""
        return self.bare[0] / self.bare[1]


def trial(bare: Bare, devices: Sequence[Replay], rounds: int) -> Trial:
    """One turn: the bare engine, then every number of devices, each with all recordings."""
    timed = bare.seconds(rounds)
    served = {
        count: [
            replay(devices[first : first + count], rounds) for first in range(0, DEVICES, count)
        ]
        for count in COUNTS
    }
    return Trial(timed, served)


def rows_of(window: int, trials: Sequence[Trial]) -> Rows:
    """One row for each number of devices."""
    rows = []
    for count in COUNTS:
        tallies = [metrics for item in trials for metrics in item.served[count]]
        seconds = sum(t.seconds for t in tallies)
        windows = np.sum([t.windows for t in tallies], axis=0)
        rows.append(
            {
                "window": window,
                "devices": count,
                "verified_per_s": float(windows.sum() * (window + 1) / seconds),
                "committed_per_s": sum(t.committed for t in tallies) / seconds,
                "pass_ms": seconds / float(windows.max()) * 1e3,
                "gain": float(np.median([item.gain(count) for item in trials])),
                "bare_gain": float(np.median([item.bare_gain for item in trials])),
                "share": share(tallies),
            }
        )
    return rows


def share(tallies: Sequence[Tally]) -> float:
    """Rounds per second of the least served device over those of the most served one."""
    rounds, seconds = np.sum([each.whole for each in tallies], axis=0).T
    rates = rounds / seconds
    return float(rates.min() / rates.max())


def judge(window: int, trials: Sequence[Trial], rows: Rows) -> list[Goal]:
    """The goals at this window."""
    selection = float(np.median([item.gain(DEVICES) / item.bare_gain for item in trials]))
    return [
        at_least(f"γ={window}: gain of 8 devices over the bare engine's gain", selection, 0.85),
        at_least(f"γ={window}: least served device over most served", rows[-1]["share"], 0.8),
    ]


def main() -> int:
    parser = options(__doc__)
    pair_options(parser)
    args = parser.parse_args()
    draft, target = pair(args)
    tokens, rounds, trials = (32, 4, 2) if args.quick else (96, 8, 7)
    steps = Steps(len(WINDOWS) * (len(PROMPTS) + trials))
    decoder = Decoder(target, slots=DEVICES, context=2048)
    with Device(draft) as device:
        prompts = [device.prompt(prompt).ids for prompt in PROMPTS[:DEVICES]]
    drafter = ModelDrafter.open(Artifact.open(draft), provider="auto", threads=None, context=None)
    recordings: dict[int, list[Recording]] = {window: [] for window in WINDOWS}
    for window in WINDOWS:
        for prompt in prompts:
            steps.next(f"γ={window}: recording")
            recordings[window].append(record(drafter, decoder, prompt, window, tokens))
    rows: Rows = []
    goals: list[Goal] = []
    with throwaway_keys() as folder, EdgeServer(target, keys=folder, sessions=DEVICES) as edge:
        keys = DeviceKeys.load(folder)
        for window in WINDOWS:
            bare = Bare(decoder, recordings[window])
            with ExitStack() as stack:
                devices = [
                    stack.enter_context(closing(Replay(recording, edge.endpoint, keys)))
                    for recording in recordings[window]
                ]
                done = []
                for _ in range(trials):
                    steps.next(f"γ={window}: the bare engine, then 1, 2, 4 and 8 devices")
                    done.append(trial(bare, devices, rounds))
            rows += rows_of(window, done)
            goals += judge(window, done, rows)
    return conclude(args, "one edge, several devices", COLUMNS, rows, goals)


if __name__ == "__main__":
    sys.exit(main())
