"""The edge daemon: load the target, listen, serve until told to stop."""

import gc
import logging
import math
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import zmq

from edge_runtime.config import MEBIBYTE, EdgeConfig
from edge_runtime.doorkeeper import Doorkeeper
from edge_runtime.scheduler import Scheduler
from edge_runtime.service import Service
from engines.artifact import Artifact
from engines.decoder import Decoder
from engines.pace import pass_times
from wire.keys import EdgeKeys
from wire.messages import Buffer, PassTime, Reply
from wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

_WIDTHS = (1, 2, 4, 8, 16, 32)  # of the passes whose times devices are told
_BURST = 256  # messages taken in one turn, so that a flood does not keep verdicts from leaving


def serve(
    config: EdgeConfig,
    *,
    announce: Callable[[str], None] = lambda endpoint: None,
    lifeline: int | None = None,
) -> int:
    """Serve until SIGINT or SIGTERM, or until ``lifeline`` (a descriptor) closes at its other end.

    ``announce`` is called with the endpoint, once devices may come. Returns the exit code.
    """
    keys = EdgeKeys.load(config.keys) if config.keys is not None else None
    artifact = Artifact.open(config.target)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    listener = Listener(context, config.listen, keys, config.limits.message_mib * MEBIBYTE)
    try:
        with _handshakes(listener):
            decoder = Decoder(
                artifact,
                slots=config.limits.sessions,
                context=config.limits.context,
                threads=config.threads,
                provider=config.provider,
            )
            passes = [
                PassTime(tokens=width, ns=max(1, int(seconds * 1e9)))
                for width, seconds in pass_times(decoder, _WIDTHS).items()
            ]
        scheduler = Scheduler(decoder)
        service = Service(
            artifact.manifest, decoder, config.limits, scheduler.submit, _sender(listener), passes
        )
        gc.collect()
        gc.freeze()  # what was loaded stays; no collection between two rounds looks through it
        with _Signals() as signals:
            _log.info("serving %s on %s", artifact.manifest.model, listener.endpoint)
            announce(listener.endpoint)
            code = _loop(listener, scheduler, service, signals, lifeline)
        _log.info("stopped after %d target passes", scheduler.passes)
        return code
    finally:
        listener.close()
        context.destroy(linger=0)


@contextmanager
def _handshakes(listener: Listener) -> Iterator[None]:
    """Let devices in while the target loads: a restarted edge is not an absent one."""
    if listener.gate is None:
        yield
        return
    doorkeeper = Doorkeeper({int(listener.gate.socket.fd): listener.gate.answer})
    doorkeeper.start()
    doorkeeper.begin()
    try:
        yield
    finally:
        doorkeeper.end()


def _sender(listener: Listener) -> Callable[[bytes, Reply, Sequence[Buffer]], None]:
    def send(client: bytes, message: Reply, frames: Sequence[Buffer]) -> None:
        try:
            listener.send(client, message, frames)
        except zmq.ZMQError as error:  # it does not read, or went away: it asks again, or never
            _log.debug("a reply was not taken: %s", error)

    return send


def _loop(
    listener: Listener,
    scheduler: Scheduler,
    service: Service,
    signals: "_Signals",
    lifeline: int | None,
) -> int:
    duties: dict[zmq.Socket[bytes], Callable[[], bool]] = {
        listener.socket: partial(_receive, listener, service)
    }
    if listener.gate is not None:
        duties[listener.gate.socket] = listener.gate.answer
    doorkeeper = Doorkeeper({int(source.fd): duty for source, duty in duties.items()})
    doorkeeper.start()
    poller = zmq.Poller()
    for source in (*duties, signals.descriptor):
        poller.register(source, zmq.POLLIN)
    if lifeline is not None:
        poller.register(lifeline, zmq.POLLIN | zmq.POLLERR)
    wait_s: float | None = None
    while True:
        for source, _ in poller.poll(None if wait_s is None else math.ceil(wait_s * 1e3)):
            if source in duties:
                duties[source]()
            elif source == lifeline:
                return 0
        if signals.received is not None:
            return 0 if signals.received == signal.SIGTERM else 128 + signals.received
        wait_s = scheduler.wait_s()
        if wait_s == 0.0:
            doorkeeper.begin()
            done = scheduler.run()
            with doorkeeper.turn:
                for job in done:
                    service.finish(job)
            doorkeeper.end()


def _receive(listener: Listener, service: Service) -> bool:
    """Serve the messages that have arrived; True if some of them had to be left."""
    for _ in range(_BURST):
        envelope = listener.receive()
        if envelope is not None:
            service.handle(envelope)
        if not listener.waiting:
            return False
    return True


class _Signals:
    """SIGINT and SIGTERM as something to poll."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._read, self._write = socket.socketpair()
        self._read.setblocking(False)
        self._write.setblocking(False)
        self.descriptor = self._read.fileno()

    def _note(self, number: int, frame: object) -> None:
        self.received = number

    def __enter__(self) -> "_Signals":
        self._before = {
            number: signal.signal(number, self._note) for number in (signal.SIGINT, signal.SIGTERM)
        }
        signal.set_wakeup_fd(self._write.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(self, *_: object) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._read.close()
        self._write.close()
