"""Nodes of the stages after stage 1, which are attached all together or not at all.

In:  steps, with stage 1's states.
Out: the last stage's answers, in the order of the steps.

Law: the slots of all stages have the same tokens. When a stage is lost, or loses its connection to
the next stage, all stages are attached again with empty slots, under a new incarnation.
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
    """Nodes of the stages, in order (possibly none); the methods never wait.

    stage: stage 1; the other stages must be of the same split.
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
        self._digests = [entry.digest for entry in pipeline.stage]
        limit = options.config.limits.message_mib * MEBIBYTE
        self._clients: list[NodeClient] = []
        with ExitStack() as stack:
            stack.callback(self.close)
            for index, address in enumerate(addresses):
                check, record = partial(self._check_fit, index), partial(self._record_event, index)
                self._clients.append(
                    NodeClient(address, options.keys, limit, check=check, on_event=record)
                )
            stack.pop_all()
        self._poller = zmq.Poller()
        self._client_of = {source: client for client in self._clients for source in client.sources}
        for source in self._client_of:
            self._poller.register(source, zmq.POLLIN)
        self._requested: bytes | None = None  # incarnation of the last attach requests
        # incarnation of the attachment; None unless all nodes are attached
        self.incarnation: bytes | None = None if addresses else b""

    def __len__(self) -> int:
        return len(self._clients)

    @property
    def names(self) -> list[str]:
        """Names of the nodes, in order."""
        return [client.node.name for client in self._clients]

    @property
    def nodes(self) -> dict[str, bool]:
        """Node name → whether the node is attached. Thread-safe."""
        return {client.node.name: client.incarnation is not None for client in self._clients}

    @property
    def received_bytes(self) -> dict[str, int]:
        """Node name → bytes received from the node."""
        return {client.node.name: client.received_bytes for client in self._clients}

    @property
    def sources(self) -> "list[zmq.Socket[bytes] | int]":
        """Sockets and descriptors of the nodes' connections."""
        return [source for client in self._clients for source in client.sources]

    @property
    def due_s(self) -> float | None:
        """Seconds until a node is to be contacted again; None: no contact is planned."""
        return min(
            (due for client in self._clients if (due := client.due_s) is not None), default=None
        )

    @property
    def problem(self) -> str:
        """Nodes that are not attached, with the reasons; "" if there is none."""
        return ", ".join(filter(None, (client.problem for client in self._clients)))

    def receive(self) -> list[tuple[Scored, list[Buffer]]]:
        """Read the nodes' messages, attach the nodes, and return the last stage's answers."""
        answers: list[tuple[Scored, list[Buffer]]] = []
        news = {self._client_of[source] for source, _ in self._poller.poll(0)}
        for client in self._clients:
            if client in news or client.due_s == 0.0:
                received = client.receive()
                if client is self._clients[-1]:
                    answers = received
        if self.incarnation is None:
            answers = []  # the answers belong to an earlier attachment
        self._attach_if_ready()
        return answers

    def send(
        self, number: int, items: Sequence[Item], frames: Sequence[Buffer], spent_ns: int
    ) -> None:
        """Send a step to stage 2; frames: tokens, parents of all trees, and stage 1's states."""
        assert self.incarnation is not None
        step = Step(
            incarnation=self.incarnation, number=number, items=list(items), compute_ns=[spent_ns]
        )
        first = self._clients[0]
        self._metrics.node_bytes[first.node.name, "to"] += first.send(step, frames)

    def record_success(self) -> None:
        """Record a good answer, which all stages have computed."""
        for client in self._clients:
            client.record_success()

    def reject_answer(self, reason: str) -> None:
        """Detach all stages after a malformed answer."""
        self._record_event(-1, "lied")
        self._clients[-1].detach(reason)
        self._attach_if_ready()

    def detach_overdue(self) -> None:
        """Detach all stages after an overdue answer."""
        self._record_event(-1, "late")
        self.incarnation = self._requested = None
        self._attach_if_ready()

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()

    def _attach_if_ready(self) -> None:
        """Request the attachment when all nodes are ready, or record its loss or completion."""
        if not self._clients:
            return
        incarnations = {client.incarnation for client in self._clients}
        if self.incarnation is not None and incarnations != {self.incarnation}:
            self.incarnation = self._requested = None
        if any(peer.ready is None for peer in self._clients):
            self._requested = None
        elif self._requested is None:
            self._attach()
        elif incarnations == {self._requested}:
            self.incarnation = self._requested

    def _attach(self) -> None:
        """Request attachments from the last stage to stage 2: each needs the next one attached."""
        end = self._stage.cut.end
        for client in self._clients:
            assert client.ready is not None
            if client.ready.first_layer != end:
                client.detach(
                    f"its first layer is {client.ready.first_layer}, but the previous stage ends "
                    f"before layer {end}: use stages from the same run of `pilotfish export split`"
                )
                return
            end += client.ready.layers
        self._requested = secrets.token_bytes(16)
        following = [*(peer.node for peer in self._clients[1:]), None]
        for client, node in reversed(list(zip(self._clients, following, strict=True))):
            client.attach(
                Attach(
                    incarnation=self._requested,
                    states=self._states,
                    next="" if node is None else node.address,
                    next_key=b"" if node is None else node.key,
                )
            )

    def _check_fit(self, index: int, ready: Ready) -> str:
        """Return the reason why a node does not fit as stage ``index`` + 2; "" if it fits."""
        cut, wanted = self._stage.cut, index + 2
        if (ready.stage, ready.stages, ready.whole) != (wanted, cut.count, cut.whole):
            holds = f"stage {ready.stage} of {ready.stages}" if ready.stages else "a whole model"
            return (
                f"it holds {holds} ({ready.model}, {ready.whole or ready.digest}), not stage "
                f"{wanted} of {cut.count} of {cut.whole}: start the node with the right stage, or "
                "correct the order of the list"
            )
        if self._digests[index] and ready.digest != self._digests[index]:
            return f"it holds a stage with digest {ready.digest}, not {self._digests[index]}"
        return lacks_room(ready, self._stage.slots, self._stage.context)

    def _record_event(self, index: int, what: str) -> None:
        self._metrics.node_events[self._clients[index].node.name, what] += 1
