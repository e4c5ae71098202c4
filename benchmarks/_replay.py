"""Devices that replay recorded windows: they never draft, so the edge is what limits.

The drafter and the target record real windows (greedy, so that acceptance is real). A replaying
device sends its next window as soon as it has the verdict on the last. All devices live in one poll
loop of this process, which costs little.
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import zmq
from numpy.typing import NDArray

from pilotfish import PilotfishError
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.channel import EdgeChannel
from pilotfish.wire.codecs.ids import encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.keys import DeviceKeys
from pilotfish.wire.messages import Begin, Buffer, Close, DeviceMessage, Verdict, Window
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, Decision, SamplingParams
from tests.support.prefill import prefill

GREEDY = PROTOCOL_REGISTRY["greedy"]
LAW = SamplingParams(sampling=Sampling(), seed=0)
Ids = NDArray[np.uint32]


@dataclass(frozen=True)
class Step:
    """A recorded round: draft u32 [γ] after ``start`` tokens with this hash, and the verdict."""

    start: int
    digest: bytes
    draft: Ids
    ruling: Decision


@dataclass(frozen=True)
class Recording:
    """A prompt u32 [n] and the rounds of its answer; ``text`` u32 is all of it."""

    prompt: Ids
    steps: list[Step]
    text: Ids
    vocab: int


def record(
    drafter: ModelDrafter, target: Decoder, prompt: Ids, window: int, tokens: int
) -> Recording:
    """Speculate in this process for about so many tokens, or until the answer ends."""
    ends = set(drafter.manifest.eos_ids)
    committed = CommittedTokens()
    committed.extend(prompt)
    target.rollback(0, 0)
    prefill(target, 0, prompt[:-1].astype(np.int64), rows=0)
    steps: list[Step] = []
    text: list[int] = []
    while len(committed) < len(prompt) + tokens and not ends.intersection(text):
        start = len(committed)
        draft = drafter.draft(committed.ids, (1,) * window, GREEDY, LAW, ends=())
        new = np.concatenate([committed.ids[-1:], draft.ids]).astype(np.int64)
        logits = target.forward([Pass(0, new)])[0].logits
        ruling = GREEDY.verify(draft, logits, LAW, round_start=start)
        target.rollback(0, start + ruling.accepted)
        steps.append(Step(start, committed.hash, draft.ids, ruling))
        text = [*map(int, draft.ids[: ruling.accepted]), ruling.token]
        committed.extend(text)
    return Recording(prompt, steps, committed.ids.copy(), target.vocab_size)


class Replay:
    """One device that replays a recording, over and over."""

    def __init__(self, recording: Recording, endpoint: str, keys: DeviceKeys) -> None:
        self._recording = recording
        self._channel = EdgeChannel(endpoint, keys, 1 << 20)
        self._id = secrets.token_bytes(16)
        self._generation = -1
        self._next = 0
        self.socket = self._channel.socket
        self.answered_s: list[float] = []  # when each verdict came
        self.committed = self.parted = 0
        deadline = time.monotonic() + 5.0
        while not self._channel.connected and time.monotonic() < deadline:
            self._channel.receive(0.1)
        self._begin(keep=0)

    def _begin(self, keep: int) -> None:
        self._generation += 1
        held = CommittedTokens()
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

    def _send(self, message: DeviceMessage, *frames: Buffer) -> None:
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
        ruling = Decision(verdict.accepted, verdict.token)
        self.answered_s.append(time.perf_counter())
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
    """What some devices got.

    windows: verdicts of each in the measured span. committed: tokens of all. seconds: the span.
    whole: of each device, its rounds that overlap the span, and how long they took (s).
    """

    windows: list[int]
    committed: int
    seconds: float
    whole: list[tuple[int, float]]


def replay(devices: Sequence[Replay], rounds: int) -> Tally:
    """Replay until ``rounds`` windows a device were answered, whichever device they went to."""
    poller = zmq.Poller()
    by_socket = {device.socket: device for device in devices}
    for socket in by_socket:
        poller.register(socket, zmq.POLLIN)
    for device in devices:
        device.answered_s.clear()
    sent_s = time.perf_counter()
    for device in devices:
        device.send()
    # a first round that does not count: prompts are read, batches form
    _verdicts(poller, by_socket, len(devices), again=True)
    for device in devices:
        device.committed = 0
    begun_s = time.perf_counter()
    _verdicts(poller, by_socket, rounds * len(devices), again=True)
    ended_s = time.perf_counter()
    committed = sum(device.committed for device in devices)
    _verdicts(poller, by_socket, len(devices), again=False)
    return Tally(
        [sum(begun_s < at <= ended_s for at in device.answered_s) for device in devices],
        committed,
        ended_s - begun_s,
        [whole_rounds([sent_s, *device.answered_s], begun_s, ended_s) for device in devices],
    )


def whole_rounds(verdicts_s: Sequence[float], begun_s: float, ended_s: float) -> tuple[int, float]:
    """Count a device's rounds that overlap a span; return them, and the time that they took.

    The number of verdicts within the span would not do: all devices of a pass get their verdicts
    within a moment, in any order. A span that begins or ends in this moment has a verdict more of
    one device and a verdict less of another, though all are served alike.

    verdicts_s: times of its verdicts, in order; one of them, or its first window, is before the
    span, and one is after the span.
    """
    first = max(index for index, at in enumerate(verdicts_s) if at <= begun_s)
    last = min(index for index, at in enumerate(verdicts_s) if at >= ended_s)
    return last - first, verdicts_s[last] - verdicts_s[first]


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
