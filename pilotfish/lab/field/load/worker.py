"""A process with some of a load's devices, each of which asks question after question.

`python -m pilotfish.lab.field.load.worker DESCRIPTOR` reads requests from a socket, one JSON object
a line. The first names the devices; the process answers when all are connected. ``begin`` starts
the questions. Then each finished answer is sent at once. ``until`` (a time, s) is answered when no
question asked before it is open; meanwhile the devices go on, so that the load does not change.

Each second the process gives a sign of life. If a device raises an unexpected exception, or
gets no token for too long, the process sends an error. When the other end closes, it ends.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct, structs

from pilotfish.base.child import STOP_S, ChildPipe
from pilotfish.base.errors import EdgeLostError, InternalError, PilotfishError
from pilotfish.device_runtime.device import Device
from pilotfish.lab.field.load.arrivals import Arrivals
from pilotfish.lab.field.load.clients import Client, WireClient
from pilotfish.lab.field.load.record import Record
from pilotfish.lab.field.load.recorded_drafter import RecordedSource
from pilotfish.lab.field.load.service_client import ServiceClient

_SWITCH_S = 5e-4  # so that a thread that has slept goes on soon
_CHECK_EVERY_S = 0.02  # longest time between two looks at the clock
_SIGN_EVERY_S = 1.0  # time between two signs of life
_AFTER_ERROR_S = 0.5


class Devices(Struct, frozen=True, kw_only=True):
    """The devices of one process.

    numbers: the devices' numbers. token_wait_s: longest time without a token of an open question.
    edge, digest, keys, record: what devices on the wire need; the edge's target has this digest.
    options: those of their answers. services, prompts, max_tokens: what clients of services need;
    they are spread over the services.
    """

    numbers: list[int]
    seed: int
    think_s: float
    rate: float | None
    token_wait_s: float = 300.0
    edge: str = ""
    digest: str = ""
    keys: str | None = None
    record: str = ""
    options: dict[str, Any] = {}
    services: list[str] = []
    prompts: list[Any] = []
    max_tokens: int = 0


class _User:
    """The user of one device: its client, its arrivals, and the question that is open."""

    def __init__(self, number: int, client: Client, arrivals: Arrivals) -> None:
        self.number, self.client, self.arrivals = number, client, arrivals
        # when the open or the next question comes; ∞ before the load begins
        self.asked_s = math.inf


class Worker:
    """The devices of this process, a thread each."""

    def __init__(self, pipe: ChildPipe, token_wait_s: float) -> None:
        self._pipe, self._token_wait_s = pipe, token_wait_s
        self._sending = threading.Lock()
        self._over = threading.Event()
        self._until_s: float | None = None
        self.users: list[_User] = []

    def begin(self, begin_s: float) -> None:
        """Start the questions at this time."""
        for user in self.users:
            user.asked_s = begin_s + user.arrivals.next_s(0.0)
            threading.Thread(target=self._ask, args=(user, begin_s), daemon=True).start()

    def _ask(self, user: _User, begin_s: float) -> None:
        """Ask a user's questions; tell the parent if that raises an unexpected exception."""
        try:
            while not self._over.wait(max(0.0, user.asked_s - time.monotonic())):
                prompt = user.arrivals.next_prompt()
                answer = user.client.ask(user.number, prompt, user.asked_s)
                if answer.error:
                    self._over.wait(_AFTER_ERROR_S)
                self.send({"answer": structs.asdict(answer)})
                user.asked_s = begin_s + user.arrivals.next_s(time.monotonic() - begin_s)
        except PilotfishError as error:
            self.fail(error)
        except Exception as error:  # else the thread ends in silence, and its answer never comes
            self.fail(
                InternalError(f"Device {user.number} has failed: {type(error).__name__}: {error}.")
            )

    def answer_until(self, until_s: float) -> None:
        """Tell the parent when no question that was asked before ``until_s`` is open."""
        self._until_s = until_s

    def report(self) -> None:
        """Give signs of life, and tell which questions wait too long.

        When the devices end, or the parent has ended, this ends the process if nothing else does.
        """
        sign_s = 0.0
        while not self._over.wait(_CHECK_EVERY_S):
            now_s, until_s = time.monotonic(), self._until_s
            if now_s >= sign_s:
                sign_s = now_s + _SIGN_EVERY_S
                if not self.send({"alive": True}):
                    break
                self._expect_tokens(now_s)
            if until_s is not None and all(user.asked_s >= until_s for user in self.users):
                self._until_s = None
                self.send({"answered": True})
        time.sleep(STOP_S)
        os._exit(1)

    def _expect_tokens(self, now_s: float) -> None:
        for user in self.users:
            if now_s - user.client.last_token_s > self._token_wait_s:
                self.fail(
                    EdgeLostError(
                        f"The answer of device {user.number} got no token for "
                        f"{self._token_wait_s:g} s."
                    )
                )

    def send(self, message: dict[str, Any]) -> bool:
        """Send a message, one thread at a time; return whether the parent is there."""
        with self._sending, suppress(OSError):
            self._pipe.send(message)
            return True
        return False

    def fail(self, error: PilotfishError) -> None:
        """Tell the parent an error, which ends the load."""
        with self._sending, suppress(OSError):
            self._pipe.send_error(error)

    def end(self) -> None:
        """Let no device ask any more."""
        self._over.set()


def _users(devices: Devices, stack: ExitStack) -> Iterator[_User]:
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
        clients = [
            WireClient(device, record, devices.options, devices.digest)
            for device in (first, *others)
        ]
    for number, client in zip(devices.numbers, clients, strict=True):
        arrivals = Arrivals(
            seed=devices.seed,
            device=number,
            think_s=devices.think_s,
            rate=devices.rate,
            prompts=count,
        )
        yield _User(number, client, arrivals)


def main(descriptor: int) -> int:
    """Run the devices until the parent ends; return the exit status."""
    sys.setswitchinterval(_SWITCH_S)
    with socket.socket(fileno=descriptor) as connection, ExitStack() as stack:
        pipe = ChildPipe(connection)
        first = pipe.receive()
        if first is None:
            return 0
        devices = msgspec.convert(first, Devices)
        worker = Worker(pipe, devices.token_wait_s)
        threading.Thread(target=worker.report, daemon=True).start()
        try:
            worker.users = [*_users(devices, stack)]
            worker.send({"ready": True})
            while (request := pipe.receive()) is not None:
                if "begin" in request:
                    worker.begin(request["begin"])
                else:
                    worker.answer_until(request["until"])
        except PilotfishError as error:
            worker.fail(error)
            return error.exit_code
        except Exception as error:  # no room for another thread, for example
            worker.fail(InternalError(f"Devices have failed: {type(error).__name__}: {error}."))
            return InternalError.exit_code
        worker.end()
        for user in worker.users:
            user.client.close()
    return 0


if __name__ == "__main__":
    code = main(int(sys.argv[1]))
    sys.stderr.flush()
    os._exit(code)  # without waiting for threads that are in the middle of an answer
