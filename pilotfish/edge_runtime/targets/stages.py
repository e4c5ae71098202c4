"""The stages behind the first one, attached together or not at all.

In:  steps, with stage 1's states.
Out: the last stage's answers, in the order of the steps.

Law: the stages' slots belong together. When a stage is lost, or has lost the next one, all are
attached again with empty slots, under another incarnation.
"""

import secrets
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial

import zmq

from pilotfish.edge_runtime.edge_config import MEBIBYTE
from pilotfish.edge_runtime.targets.node_client import NodeAddress, NodeClient
from pilotfish.edge_runtime.targets.node_list import Pipeline, lacks_room
from pilotfish.edge_runtime.targets.target import TargetOptions
from pilotfish.engines.stage import Stage
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Item, Ready, Scored, Step


class Stages:
    """The nodes of the stages, in order; there may be none. Never waits.

    stage: the first one, which the others must fit.
    """

    def __init__(
        self,
        stage: Stage,
        pipeline: Pipeline,
        addresses: Sequence[NodeAddress],
        options: TargetOptions,
    ) -> None:
        self._stage = stage
        self._metrics = options.metrics
        self._states = pipeline.states
        self._digests = [listed.digest for listed in pipeline.stage]
        limit = options.config.limits.message_mib * MEBIBYTE
        self._clients: list[NodeClient] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for index, spot in enumerate(addresses):
                unfit, note = partial(self._unfit, index), partial(self._note, index)
                self._clients.append(
                    NodeClient(spot, options.keys, limit, check=unfit, on_event=note)
                )
            stack.pop_all()
        self._poller = zmq.Poller()
        self._client_of = {source: peer for peer in self._clients for source in peer.sources}
        for source in self._client_of:
            self._poller.register(source, zmq.POLLIN)
        self._asked: bytes | None = None  # the incarnation of the last attach requests
        # of the attachment; None if not all are attached
        self.incarnation: bytes | None = None if addresses else b""

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def names(self) -> list[str]:
        """The nodes' names."""
        return [peer.node.name for peer in self._clients]

    @property
    def nodes(self) -> dict[str, bool]:
        """The nodes by name, and whether each is attached. For any thread."""
        return {peer.node.name: peer.incarnation is not None for peer in self._clients}

    @property
    def received_bytes(self) -> dict[str, int]:
        """Bytes received from each node, by name."""
        return {peer.node.name: peer.received_bytes for peer in self._clients}

    @property
    def sources(self) -> "list[zmq.Socket[bytes] | int]":
        """Their connections."""
        return [source for peer in self._clients for source in peer.sources]

    @property
    def due_s(self) -> float | None:
        """Seconds until a node is to be asked again."""
        return min((due for peer in self._clients if (due := peer.due_s) is not None), default=None)

    @property
    def problem(self) -> str:
        """The nodes that are not attached, and why."""
        return ", ".join(filter(None, (peer.problem for peer in self._clients)))

    def receive(self) -> list[tuple[Scored, list[Buffer]]]:
        """Read the nodes' messages, attach the nodes, and return the answers."""
        answers: list[tuple[Scored, list[Buffer]]] = []
        news = {self._client_of[source] for source, _ in self._poller.poll(0)}
        for peer in self._clients:
            if peer in news or peer.due_s == 0.0:
                received = peer.receive()
                if peer is self._clients[-1]:
                    answers = received
        if self.incarnation is None:
            answers = []  # these belong to an earlier attachment
        self._attach_if_ready()
        return answers

    def send(
        self, number: int, items: Sequence[Item], frames: Sequence[Buffer], spent_ns: int
    ) -> None:
        """Send stage 1's states of a step, and its trees' parents, to the next stage."""
        assert self.incarnation is not None
        step = Step(
            incarnation=self.incarnation, number=number, items=list(items), compute_ns=[spent_ns]
        )
        first = self._clients[0]
        self._metrics.node_bytes[first.node.name, "to"] += first.send(step, frames)

    def note_success(self) -> None:
        """Note a good answer."""
        for peer in self._clients:
            peer.note_success()

    def reject_answer(self, reason: str) -> None:
        """Detach all after a malformed answer."""
        self._note(-1, "lied")
        self._clients[-1].detach(reason)
        self._attach_if_ready()

    def detach_overdue(self) -> None:
        """Detach all after an overdue answer."""
        self._note(-1, "late")
        self.incarnation = self._asked = None
        self._attach_if_ready()

    def close(self) -> None:
        """Close the connections."""
        for peer in self._clients:
            peer.close()

    def _attach_if_ready(self) -> None:
        """Attach all together, when all are there."""
        if not self._clients:
            return
        as_which = {peer.incarnation for peer in self._clients}
        if self.incarnation is not None and as_which != {self.incarnation}:
            self.incarnation = self._asked = None
        if any(peer.ready is None for peer in self._clients):
            self._asked = None
        elif self._asked is None:
            self._attach()
        elif as_which == {self._asked}:
            self.incarnation = self._asked

    def _attach(self) -> None:
        """Attach from the last one on, so that each finds the next one attached."""
        end = self._stage.cut.end
        for peer in self._clients:
            assert peer.ready is not None
            if peer.ready.first_layer != end:
                peer.detach(
                    f"its first layer is {peer.ready.first_layer}, but {end} follows on the stage "
                    "before: take the stages that one `pilotfish export split` has made"
                )
                return
            end += peer.ready.layers
        self._asked = secrets.token_bytes(16)
        following = [*(peer.node for peer in self._clients[1:]), None]
        for peer, place in reversed(list(zip(self._clients, following, strict=True))):
            peer.attach(
                Attach(
                    incarnation=self._asked,
                    states=self._states,
                    next="" if place is None else place.address,
                    next_key=b"" if place is None else place.key,
                )
            )

    def _unfit(self, index: int, ready: Ready) -> str:
        """Describe why a node does not suit as stage ``index`` + 2; "" if it does."""
        cut, wanted = self._stage.cut, index + 2
        if (ready.stage, ready.stages, ready.whole) != (wanted, cut.count, cut.whole):
            holds = f"stage {ready.stage} of {ready.stages}" if ready.stages else "a whole model"
            return (
                f"it holds {holds} ({ready.model}, {ready.whole or ready.digest}), not stage "
                f"{wanted} of {cut.count} of {cut.whole}: start it with that, or put the list in "
                "order"
            )
        if self._digests[index] and ready.digest != self._digests[index]:
            return f"it holds a stage with digest {ready.digest}, not {self._digests[index]}"
        return lacks_room(ready, self._stage.slots, self._stage.context)

    def _note(self, index: int, what: str) -> None:
        self._metrics.node_events[self._clients[index].node.name, what] += 1
