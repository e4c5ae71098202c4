"""A process with some of a load's devices, each of which asks question after question.

`python -m pilotfish.lab.field.load.worker DESCRIPTOR` reads requests from a socket, one JSON object
a line. The first names the devices; the process answers when all are connected. ``begin`` starts
the questions. Then each finished answer is sent at once. ``until`` (a time, s) is answered when no
question asked before it is open; meanwhile the devices go on, so that the load does not change.
When the other end closes, the process ends.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from pilotfish.base.child import ChildPipe
from pilotfish.base.errors import PilotfishError
from pilotfish.device_runtime.device import Device
from pilotfish.lab.field.load.arrivals import Arrivals
from pilotfish.lab.field.load.clients import Client, ServiceClient, WireClient
from pilotfish.lab.field.load.record import Record
from pilotfish.lab.field.load.recorded_drafter import RecordedSource

_SWITCH_S = 5e-4  # so that a thread that has slept goes on soon
_TICK_S = 0.02
_AFTER_ERROR_S = 0.5


class Devices(Struct, frozen=True, kw_only=True):
    """The devices of one process.

    numbers: the devices' numbers. edge, keys, record: what devices on the wire need; options: those
    of their answers. services, prompts, max_tokens: what clients of services need; they are spread
    over the services.
    """

    numbers: list[int]
    seed: int
    think_s: float
    rate: float | None
    edge: str = ""
    keys: str | None = None
    record: str = ""
    options: dict[str, Any] = {}
    services: list[str] = []
    prompts: list[Any] = []
    max_tokens: int = 0


class _Asker:
    """One device: its client, its arrivals, and the question that is open."""

    def __init__(self, number: int, client: Client, arrivals: Arrivals) -> None:
        self.number, self.client, self.arrivals = number, client, arrivals
        # when the open or the next question comes; ∞ before the load begins
        self.asked_s = float("inf")


class Worker:
    """The devices of this process, a thread each."""

    def __init__(self, pipe: ChildPipe, askers: Sequence[_Asker]) -> None:
        self._pipe, self._askers = pipe, askers
        self._sending = threading.Lock()
        self._over = threading.Event()

    def begin(self, begin_s: float) -> None:
        """Start the questions at this time."""
        for asker in self._askers:
            asker.asked_s = begin_s + asker.arrivals.next_s(0.0)
            threading.Thread(target=self._ask, args=(asker, begin_s), daemon=True).start()

    def _ask(self, asker: _Asker, begin_s: float) -> None:
        while not self._over.wait(max(0.0, asker.asked_s - time.monotonic())):
            prompt = asker.arrivals.next_prompt()
            answer = asker.client.ask(asker.number, prompt, asker.asked_s)
            if self._over.is_set():
                return
            if answer.error:
                self._over.wait(_AFTER_ERROR_S)
            self.send({"answer": structs.asdict(answer)})
            asker.asked_s = begin_s + asker.arrivals.next_s(time.monotonic() - begin_s)

    def wait_until_answered(self, until_s: float) -> None:
        """Wait until no question that was asked before ``until_s`` is open."""
        while any(asker.asked_s < until_s for asker in self._askers):
            if self._over.wait(_TICK_S):
                return
        self.send({"answered": True})

    def send(self, message: dict[str, Any]) -> None:
        """Send a message to the parent; one thread at a time."""
        with self._sending, suppress(OSError):  # the parent may have ended
            self._pipe.send(message)

    def end(self) -> None:
        """Let no device ask any more."""
        self._over.set()


def _askers(devices: Devices, stack: ExitStack) -> Iterator[_Asker]:
    """Connect the devices."""
    if devices.services:
        count = len(devices.prompts)
        clients: list[Client] = [
            ServiceClient(
                devices.services[number % len(devices.services)],
                devices.prompts,
                devices.max_tokens,
            )
            for number in devices.numbers
        ]
    else:
        record = Record.load(Path(devices.record))
        count = len(record.answers)
        first = stack.enter_context(
            Device(
                RecordedSource.of(record),
                devices.edge,
                devices.keys,
                lanes=len(devices.numbers),
            )
        )
        others = [stack.enter_context(first.beside()) for _ in devices.numbers[1:]]
        clients = [WireClient(device, record, devices.options) for device in (first, *others)]
    for number, client in zip(devices.numbers, clients, strict=True):
        arrivals = Arrivals(
            seed=devices.seed,
            device=number,
            think_s=devices.think_s,
            rate=devices.rate,
            prompts=count,
        )
        yield _Asker(number, client, arrivals)


def main(descriptor: int) -> int:
    """Run the devices until the parent ends; return the exit status."""
    sys.setswitchinterval(_SWITCH_S)
    with socket.socket(fileno=descriptor) as connection, ExitStack() as stack:
        pipe = ChildPipe(connection)
        first = pipe.receive()
        if first is None:
            return 0
        try:
            askers = [*_askers(msgspec.convert(first, Devices), stack)]
        except PilotfishError as error:
            pipe.send_error(error)
            return error.exit_code
        worker = Worker(pipe, askers)
        worker.send({"ready": True})
        while (request := pipe.receive()) is not None:
            if "begin" in request:
                worker.begin(request["begin"])
            else:
                worker.wait_until_answered(request["until"])
        worker.end()
        for asker in askers:
            asker.client.close()
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads that are in the middle of an answer
