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
batch; no device starved (the least served has at least 0.8 times the windows of the most served).
"""

import secrets
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass

import numpy as np
import zmq
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
from numpy.typing import NDArray

from device_runtime.drafter import Drafter
from engines.artifact import Artifact
from engines.decoder import Decoder, Pass
from pilotfish import Device, EdgeServer, PilotfishError
from speculation.distributions import Sampling
from wire.codecs.ids import encode_ids
from wire.committed import Committed
from wire.keys import DeviceKeys
from wire.messages import Begin, Buffer, Close, Request, Verdict, Window
from wire.protocols import EXCHANGES, Law, Ruling
from wire.transport import Channel

WINDOWS = (1, 4)  # γ
COUNTS = (1, 2, 4, 8)
DEVICES = max(COUNTS)
GREEDY = EXCHANGES["greedy"]
LAW = Law(sampling=Sampling(), seed=0)
COLUMNS = ("window", "devices", "verified_per_s", "committed_per_s", "gain", "bare_gain", "share")
Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class Step:
    """A recorded round: draft u32 [γ] after ``start`` tokens with this hash, and the verdict."""

    start: int
    digest: bytes
    draft: Ids
    ruling: Ruling


@dataclass(frozen=True)
class Recording:
    """A prompt u32 [n] and the rounds of its answer; ``text`` u32 is all of it."""

    prompt: Ids
    steps: list[Step]
    text: Ids
    vocab: int


def record(drafter: Drafter, target: Decoder, prompt: Ids, window: int, tokens: int) -> Recording:
    """Speculate in this process for about so many tokens, or until the answer ends."""
    ends = set(drafter.manifest.eos_ids)
    committed = Committed()
    committed.extend(prompt)
    target.rollback(0, 0)
    target.prefill(0, prompt[:-1].astype(np.int64), rows=0)
    steps: list[Step] = []
    text: list[int] = []
    while len(committed) < len(prompt) + tokens and not ends.intersection(text):
        start = len(committed)
        draft = drafter.draft(committed.ids, (1,) * window, GREEDY, LAW, ends=())
        new = np.concatenate([committed.ids[-1:], draft.ids]).astype(np.int64)
        logits = target.forward([Pass(0, new)])[0].logits
        ruling = GREEDY.rule(draft, logits, LAW, round_start=start)
        target.rollback(0, start + ruling.accepted)
        steps.append(Step(start, committed.hash, draft.ids, ruling))
        text = [*map(int, draft.ids[: ruling.accepted]), ruling.token]
        committed.extend(text)
    return Recording(prompt, steps, committed.ids.copy(), target.vocab_size)


class Replay:
    """One device that replays a recording, over and over."""

    def __init__(self, recording: Recording, endpoint: str, keys: DeviceKeys) -> None:
        self._recording = recording
        self._channel = Channel(endpoint, keys, 1 << 20)
        self._id = secrets.token_bytes(16)
        self._generation = -1
        self._next = 0
        self.socket = self._channel.socket
        self.answered = self.committed = self.parted = 0
        deadline = time.monotonic() + 5.0
        while not self._channel.connected and time.monotonic() < deadline:
            self._channel.receive(0.1)
        self._begin(keep=0)

    def _begin(self, keep: int) -> None:
        self._generation += 1
        held = Committed()
        held.extend(self._recording.prompt[:keep])
        begin = Begin(
            session=self._id,
            generation=self._generation,
            keep=keep,
            hash=held.hash,
            protocol=GREEDY.name,
            seed=LAW.seed,
            temperature=0.0,
            top_k=0,
            top_p=1.0,
        )
        self._send(begin, encode_ids(self._recording.prompt[keep:], self._recording.vocab))
        self._next = 0

    def _send(self, message: Request, *frames: Buffer) -> None:
        self._channel.send(message, frames)

    def send(self) -> None:
        """The next window; after the last one, the generation begins anew after its prompt."""
        if self._next == len(self._recording.steps):
            self._begin(keep=len(self._recording.prompt))
        step = self._recording.steps[self._next]
        window = Window(
            session=self._id, generation=self._generation, start=step.start, hash=step.digest
        )
        self._send(window, encode_ids(step.draft, self._recording.vocab))

    def take(self) -> bool:
        """Take in what has arrived; True for a verdict."""
        arrived = self._channel.receive(0.0)
        if arrived is None:
            return False
        verdict = arrived[0]
        if not isinstance(verdict, Verdict):
            raise PilotfishError(f"the edge sent {verdict} instead of a verdict")
        ruling = Ruling(verdict.accepted, verdict.token)
        self.answered += 1
        self.committed += ruling.accepted + 1
        self._next += 1
        if ruling != self._recording.steps[self._next - 1].ruling:  # a tie went the other way
            self.parted += 1
            self._next = len(self._recording.steps)
        return True

    def close(self) -> None:
        self._send(Close(session=self._id))
        self._channel.close()


@dataclass
class Tally:
    """What some devices got: windows each, tokens committed, seconds."""

    windows: list[int]
    committed: int
    seconds: float


def replay(devices: Sequence[Replay], rounds: int) -> Tally:
    """Replay until ``rounds`` windows a device were answered, whichever device they went to."""
    poller = zmq.Poller()
    by_socket = {device.socket: device for device in devices}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    for device in devices:
        device.send()
    # a first round that does not count: prompts are read, batches form
    _verdicts(poller, by_socket, len(devices), again=True)
    for device in devices:
        device.answered = device.committed = 0
    begun = time.perf_counter()
    _verdicts(poller, by_socket, rounds * len(devices), again=True)
    seconds = time.perf_counter() - begun
    tally = Tally([d.answered for d in devices], sum(d.committed for d in devices), seconds)
    _verdicts(poller, by_socket, len(devices), again=False)
    return tally


def _verdicts(
    poller: zmq.Poller,
    by_socket: "dict[zmq.Socket[bytes], Replay]",
    count: int,
    *,
    again: bool,
) -> None:
    """Wait for so many verdicts; with ``again`` each is followed by the device's next window."""
    while count > 0:
        ready = poller.poll(30_000)
        if not ready:
            raise PilotfishError("the edge does not answer any more")
        for socket, _ in ready:
            device = by_socket[socket]
            if count > 0 and device.take():
                count -= 1
                if again:
                    device.send()


class Bare:
    """The engine alone, on the windows of all recordings."""

    def __init__(self, decoder: Decoder, recordings: Sequence[Recording]) -> None:
        self._decoder = decoder
        self._recordings = recordings

    def seconds(self, rounds: int) -> tuple[float, float]:
        """Medians of one single pass for each slot, summed, and of one pass for all slots."""
        for slot, recording in enumerate(self._recordings):
            self._decoder.rollback(slot, 0)
            self._decoder.prefill(slot, recording.text.astype(np.int64), rows=0)
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
        tallies = [tally for one in trials for tally in one.served[count]]
        seconds = sum(t.seconds for t in tallies)
        windows = np.sum([t.windows for t in tallies], axis=0)
        rows.append(
            {
                "window": window,
                "devices": count,
                "verified_per_s": float(windows.sum() * (window + 1) / seconds),
                "committed_per_s": sum(t.committed for t in tallies) / seconds,
                "pass_ms": seconds / float(windows.max()) * 1e3,
                "gain": float(np.median([one.gain(count) for one in trials])),
                "bare_gain": float(np.median([one.bare_gain for one in trials])),
                "share": float(windows.min() / windows.max()),
            }
        )
    return rows


def judge(window: int, trials: Sequence[Trial], rows: Rows) -> list[Goal]:
    """The goals at this window."""
    kept = float(np.median([one.gain(DEVICES) / one.bare_gain for one in trials]))
    return [
        at_least(f"γ={window}: gain of 8 devices over the bare engine's gain", kept, 0.85),
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
    drafter = Drafter(Artifact.open(draft), provider="auto", threads=None, context=None)
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
