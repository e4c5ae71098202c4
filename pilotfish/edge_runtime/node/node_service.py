"""Serve a node's messages. The node's loop calls these functions; they never wait.

A node works for one edge at a time. A new connection with the same key replaces the attachment,
since it comes from the same edge after a restart. An edge with another key may attach only when the
first edge is no longer connected. Steps come from the edge or from the stage before this one, and
must name the present incarnation. Any other message gets a typed refusal.
"""

import logging
import time
from collections.abc import Sequence

import msgspec
import zmq

from pilotfish.base.errors import AccessDeniedError, ConflictError, InternalError, PilotfishError
from pilotfish.edge_runtime.client_errors import is_client_error
from pilotfish.edge_runtime.node.work import NodeWork, add_compute_time
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, AttachReply, Greet, Refused, Scored, Step, decode_order
from pilotfish.wire.transport import Envelope, Listener, check_size

_log = logging.getLogger("pilotfish.edge")


class NodeService:
    """Serves messages and manages the attachment. Used by the node's loop.

    steps: number of steps so far.
    """

    def __init__(self, listener: Listener, work: NodeWork, message_bytes: int) -> None:
        self._listener = listener
        self._work = work
        self._message_bytes = message_bytes
        self._edge, self._owner = b"", b""  # connection and key of the attached edge
        self._incarnation: bytes | None = None
        self._joining = False  # whether the attachment still has to be confirmed to the edge
        self.steps = 0

    @property
    def attached(self) -> bool:
        """Whether an edge is attached and connected."""
        return self._incarnation is not None and self._listener.connections.is_connected(self._edge)

    def handle(self, envelope: Envelope) -> None:
        """Serve one message of an edge or of the stage before this one."""
        incarnation = None
        try:
            gate = self._listener.gate
            if gate is not None and envelope.owner not in gate.allowed:
                raise AccessDeniedError("This key was removed from the node's allow-list.")
            check_size(envelope, self._message_bytes)
            order = decode_order(envelope.header)
            match order:
                case Greet():
                    self._reply(envelope.client, self._work.ready)
                case Attach():
                    self._attach(order, envelope)
                case Step() if order.incarnation == self._incarnation:
                    incarnation = self._incarnation
                    self._step(order, envelope.frames)
                case Step():
                    over = ConflictError(
                        "This attachment has ended: another edge with the same key attached the "
                        "node, or the node failed; see its log."
                    )
                    self._refuse(envelope.client, over, order.incarnation)
        except Exception as error:
            if isinstance(error, PilotfishError) and is_client_error(error):
                refusal: PilotfishError = error
            else:
                _log.exception("a step failed")
                refusal = InternalError(f"The node failed at this step ({error}); see its log.")
            self._refuse(envelope.client, refusal, incarnation)

    def update_attachment(self) -> None:
        """Confirm the attachment to the edge once it is complete; end it if it failed."""
        if self._incarnation is None:
            return
        try:
            if self._work.joined and self._joining:
                self._joining = False
                self._reply(self._edge, AttachReply(incarnation=self._incarnation))
        except PilotfishError as error:
            self._refuse(self._edge, error, self._incarnation)

    def _attach(self, attach: Attach, envelope: Envelope) -> None:
        self._listener.connections.read_events()
        if self.attached and envelope.owner != self._owner:
            raise ConflictError(
                "This node already works for another edge: each edge needs its own nodes."
            )
        self._incarnation = None
        self._work.attach(attach)
        self._edge, self._owner = envelope.client, envelope.owner
        self._incarnation, self._joining = attach.incarnation, True
        self.update_attachment()

    def _step(self, step: Step, frames: Sequence[Buffer]) -> None:
        begun_ns = time.monotonic_ns()
        answer = self._work.run_step(step, frames)
        self.steps += 1
        if answer is not None:
            scored = Scored(
                incarnation=step.incarnation,
                number=step.number,
                compute_ns=add_compute_time(step, begun_ns).compute_ns,
            )
            self._reply(self._edge, scored, answer)

    def _refuse(self, client: bytes, error: PilotfishError, incarnation: bytes | None) -> None:
        """Send a refusal; if it concerns the present attachment, send it to the edge and detach."""
        if incarnation is not None and incarnation == self._incarnation:
            self._incarnation, client = None, self._edge
            self._work.close()  # close the connection to the next stage, since it is no longer read
        refused = Refused(incarnation=incarnation, code=error.code, message=str(error)[:1024])
        self._reply(client, refused)

    def _reply(self, client: bytes, report: msgspec.Struct, frames: Sequence[Buffer] = ()) -> None:
        try:
            self._listener.send(client, report, frames)
        except zmq.ZMQError as error:  # the peer is gone; it may retry later
            _log.debug("the edge did not receive a report: %s", error)
