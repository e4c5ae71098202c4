"""The edge daemon: load the target, listen, serve until told to stop."""

import logging
import os
import signal
import socket
from collections.abc import Callable, Sequence
from itertools import islice

import zmq

from edge_runtime.config import MEBIBYTE, EdgeConfig
from edge_runtime.scheduler import Scheduler
from edge_runtime.service import Service
from engines.artifact import Artifact
from engines.decoder import Decoder
from wire.keys import EdgeKeys
from wire.messages import Buffer, Reply
from wire.transport import Listener

_log = logging.getLogger("pilotfish.edge")

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
        decoder = Decoder(
            artifact,
            slots=config.limits.sessions,
            context=config.limits.context,
            threads=config.threads,
            provider=config.provider,
        )
        scheduler = Scheduler(decoder)
        service = Service(
            artifact.manifest, decoder, config.limits, scheduler.submit, _sender(listener)
        )
        with _Signals() as signals:
            scheduler.start()
            _log.info("serving %s on %s", artifact.manifest.model, listener.endpoint)
            announce(listener.endpoint)
            code = _loop(listener, scheduler, service, signals, lifeline)
        scheduler.stop()
        scheduler.join(timeout=5.0)
        _log.info("stopped after %d target passes", scheduler.passes)
        return code
    finally:
        listener.close()
        context.destroy(linger=0)


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
    poller = zmq.Poller()
    for source in (listener.socket, scheduler.wake, signals.descriptor):
        poller.register(source, zmq.POLLIN)
    if listener.gate is not None:
        poller.register(listener.gate.socket, zmq.POLLIN)
    if lifeline is not None:
        poller.register(lifeline, zmq.POLLIN | zmq.POLLERR)
    while True:
        ready = dict(poller.poll())
        if scheduler.wake in ready:
            os.eventfd_read(scheduler.wake)
            while not scheduler.outbox.empty():
                service.finish(scheduler.outbox.get())
        if listener.gate is not None and listener.gate.socket in ready:
            listener.gate.answer()
        if listener.socket in ready:
            for envelope in islice(listener.receive(), _BURST):
                service.handle(envelope)
        if signals.received is not None:
            return 0 if signals.received == signal.SIGTERM else 128 + signals.received
        if lifeline is not None and lifeline in ready:
            return 0


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
