"""The serving loop tells the memory watch when it waits with an empty queue."""

from __future__ import annotations

from pilotfish.base.supervisor import Supervisor
from pilotfish.edge_runtime.serving import ServingLoop
from pilotfish.edge_runtime.signals import Signals
from pilotfish.wire import messages as m
from pilotfish.wire.transport import Envelope, Listener
from tests.support.hostile import RawClient
from tests.support.listening import listening


class Loop(ServingLoop):
    """Counts the messages, and notes whether the edge seems to wait during each poll."""

    status = ""

    def __init__(self, listener: Listener, signals: Signals) -> None:
        super().__init__(
            listener=listener,
            handle=self._count,
            signals=signals,
            supervisor=Supervisor(),
            inspection=None,
            lifeline=None,
        )
        self.messages, self.waits, poll = 0, list[bool](), self._poller.poll

        def note_and_poll(timeout_ms: int) -> object:
            self.waits.append(listener.connections.waiting)
            return poll(timeout_ms)

        self._poller.poll = note_and_poll

    def step(self) -> None:
        self._poll(0.001)

    def poll_at_once(self) -> None:
        self._poll(0.0)

    def _count(self, envelope: Envelope) -> None:
        assert not self._listener.connections.waiting
        self.messages += 1

    def _tick(self) -> int | None:
        return None

    def _reload(self) -> str:
        return ""

    def _stop(self, number: int) -> int | None:
        return None


def test_a_loop_waits_only_while_its_queue_is_empty() -> None:
    with listening() as listener, Signals() as signals, RawClient(listener.endpoint) as client:
        loop = Loop(listener, signals)
        client.say(m.Ping(nonce=1))
        assert listener.socket.poll(30_000)
        while not loop.messages:  # the first polls may only return events of the connection
            loop.step()
        assert not any(loop.waits)
        loop.poll_at_once()
        assert not loop.waits[-1]
        loop.step()
        assert loop.waits[-1]
        assert not listener.connections.waiting
